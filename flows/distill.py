"""Distillation: a student learns from teachers, from what it samples itself or from what they write.

tinker-flows run on_policy_distillation --config examples/on_policy_distillation.yaml learning_rate=1e-4
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from prefect import flow
from tinker_cookbook.eval.evaluators import Evaluator
from tinker_cookbook.rl.types import RLDataset

from blocks.errors import ConfigError
from flows.config import BuilderConfig
from flows.distill_config import (
    DistillConfig,
    GroupsConfig,
    LessonsConfig,
    OffPolicyConfig,
    OnPolicyConfig,
    PromptConfig,
    SelfConfig,
)
from flows.result import TrainResult, as_state
from flows.run import Run, open_run
from flows.segments import in_segments
from flows.teachers import open_teachers
from flows.train import train
from objectives.batch import TOPK
from objectives.objective import Objective
from tasks.advantages import Shape
from tasks.data import build
from tasks.distilled import DistilledSource, TeacherDistance
from tasks.evaluate import build_evaluator
from tasks.lessons import Lessons, TaughtSource
from tasks.mixture import Mixture
from tasks.rollouts import build_environments
from tasks.source import Source

# Rewards play no part.
NO_REWARD = Shape()
_ON_POLICY = ("ref_logprobs", "sampling_logprobs", "advantages")

Made = tuple[Source, Sequence[Evaluator]]


@flow(name="on_policy_distillation", flow_run_name="{config.run_name}")
def on_policy_distillation(config: OnPolicyConfig) -> TrainResult:
    """Learn from teachers how likely they find each token that the student samples."""
    return _run(config, _ON_POLICY, lambda run: _on_policy(run, config, config.datasets))


@flow(name="off_policy_distillation", flow_run_name="{config.run_name}")
def off_policy_distillation(config: OffPolicyConfig) -> TrainResult:
    """Learn what teachers write, or how likely they find the tokens of given sequences."""
    given = ("ref_logprobs", TOPK) if config.top_k else ("ref_logprobs",)
    return _run(config, given, lambda run: _off_policy(run, config, config.datasets, config.top_k))


@flow(name="self_distillation", flow_run_name="{config.run_name}")
def self_distillation(config: SelfConfig) -> TrainResult:
    """Learn from earlier weights of the model that are shown more of each question, such as an answer."""
    questions = config.questions.builder(config.shown, config.batch_size)
    datasets = [GroupsConfig(environment=questions, teacher=config.teacher)]
    return _run(config, _ON_POLICY, lambda run: _on_policy(run, config, datasets))


@flow(name="prompt_distillation", flow_run_name="{config.run_name}")
def prompt_distillation(config: PromptConfig) -> TrainResult:
    """Have a teacher answer with a long prompt, learn its answers without, and compare both."""
    questions = config.questions.builder(config.prompt, config.batch_size)
    datasets = [LessonsConfig(environment=questions, teacher=config.teacher)]
    given = ("ref_logprobs", TOPK) if config.top_k else ("ref_logprobs",)
    return _run(config, given, lambda run: _off_policy(run, config, datasets, config.top_k))


def _run(config: DistillConfig, given: Sequence[str], make: Callable[[Run], Made]) -> TrainResult:
    """A run on what `make` makes of an open one: its source, and the evaluators that go with it."""
    with Objective.from_spec(config.objective) as objective:
        objective.check_needs(given)
        _check_base(objective, on_policy=given is _ON_POLICY)
        evaluators = [build_evaluator(each.builder, each.params) for each in config.evaluators]

        def attempt(restarts: Sequence[str]) -> TrainResult:
            with open_run(config, restarts, lora_rank=config.lora_rank, seed=config.seed) as run:
                source, held_out = make(run)
                with closing(source):
                    return as_state(train(run, config, source, objective, [*held_out, *evaluators]))

        return in_segments(config, attempt)


def _check_base(objective: Objective, *, on_policy: bool) -> None:
    if on_policy and objective.base is None:
        raise ConfigError(
            "objective.base_loss is cross_entropy, which would learn whatever the student samples: take "
            "importance_sampling, ppo or another loss that reads advantages."
        )


def _on_policy(run: Run, config: DistillConfig, datasets: Sequence[GroupsConfig]) -> Made:
    teachers = open_teachers(run, config, [each.teacher for each in datasets])
    tokenizer, play = run.client.get_tokenizer(), config.rollout.play(config.seed, NO_REWARD)
    built = [_build_groups(run, each.environment) for each in datasets]
    weights = [each.weight for each in datasets]
    mixture = Mixture([train for train, _ in built], weights, config.batch_size, config.seed)
    tests = [(teacher, test) for teacher, (_, test) in zip(teachers, built, strict=True) if test is not None]
    held_out = [TeacherDistance(tests, tokenizer, play)] if tests else []
    return DistilledSource(mixture, teachers, tokenizer, play), held_out


def _off_policy(run: Run, config: DistillConfig, datasets: Sequence[LessonsConfig], top_k: int) -> Made:
    teachers = open_teachers(run, config, [each.teacher for each in datasets])
    tokenizer, play = run.client.get_tokenizer(), config.rollout.play(config.seed, NO_REWARD)
    built = [_build_lessons(run, each) for each in datasets]
    weights = [each.weight for each in datasets]
    mixture = Mixture([train for train, _ in built], weights, config.batch_size, config.seed)
    made_of = [config.seed, config.rollout, top_k, *datasets, *(each.name for each in teachers)]
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    source = TaughtSource(mixture, teachers, tokenizer, Lessons(key, play, top_k), run.directory)
    held_out = source.held_out([test for _, test in built])
    answered = zip(teachers, datasets, built, strict=True)
    tests = [(teacher, test) for teacher, each, (_, test) in answered if each.environment and test is not None]
    distance = [TeacherDistance(tests, tokenizer, play)] if tests else []
    return source, [*([held_out] if held_out else []), *distance]


def _build_groups(run: Run, config: BuilderConfig) -> tuple[RLDataset, RLDataset | None]:
    return build_environments(config.builder, config.params, run.client.get_tokenizer(), run.for_builders)


def _build_lessons(run: Run, config: LessonsConfig) -> tuple[Any, Any]:
    if config.environment:
        return _build_groups(run, config.environment)
    assert config.data is not None
    data, tokenizer = config.data, run.client.get_tokenizer()
    return build("data", data.builder, data.params, tokenizer, lambda made: made(), run.for_builders)
