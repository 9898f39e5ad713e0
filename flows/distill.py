"""Distillation: a student learns from teachers, on its own samples or on theirs.

tinker-flows run on_policy_distillation --config examples/on_policy_distillation.yaml learning_rate=1e-3
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, cast

from prefect import flow
from tinker_cookbook.eval.evaluators import Evaluator
from tinker_cookbook.rl.types import RLDataset
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from blocks.files.local import path_of
from flows.config.base import BuilderConfig
from flows.config.distill import (
    DistillConfig,
    GroupsConfig,
    OffPolicyConfig,
    OnPolicyConfig,
    PromptConfig,
    SamplingConfig,
    SelfConfig,
    TeacherDataConfig,
    TeacherTargetsConfig,
)
from flows.config.loader import renderer_names
from flows.monitoring.run_tags import warn_of_metrics
from flows.runs.result import TrainResult
from flows.runs.retries import run_with_approval
from flows.runs.rights import apply_rights
from flows.runs.run import Run, open_run
from flows.runs.start.config_record import FORMAT_OF_CORRECTIONS, recorded_format
from flows.runs.start.contents import texts_in
from flows.runs.teachers import open_saved_teacher, open_teachers
from flows.training.candidates import open_candidates
from flows.training.trainer import Trainer
from objectives.batch import TOPK
from objectives.config.aliases import renamed_attribute
from objectives.config.import_path import import_path
from objectives.objective import Objective
from objectives.terms.token.divergence import READS_DISTRIBUTION
from tasks.common.digests import digest_code, digest_file, digest_folder, digest_text
from tasks.common.renderers import renderer_name_of
from tasks.common.sampling import open_renderer
from tasks.distillation.hindsight import Hindsight
from tasks.distillation.mixture import Mixture
from tasks.distillation.on_policy import OnPolicySource, TeacherKL, TeacherSync, TeacherTargets
from tasks.distillation.teacher_data import SequenceSettings, TeacherDataSource
from tasks.evaluation.evaluators import build_evaluators
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.health import HealthLimits
from tasks.rl.rollout_source import HeldOutEnvironments, HeldOutGroups, build_environments
from tasks.rl.rollouts.hang_watch import HangWatch
from tasks.supervised.dataset import open_datasets
from tasks.training.batch_source import BatchSource, MetricWarning

__getattr__ = partial(renamed_attribute, "flows.distill")  # names of release 0.1

# Advantages of rewards, which only `train_on_rewards` uses; distillation has no settings for them.
NO_REWARD = AdvantageSettings()
HEALTH = HealthLimits()
SourceAndEvaluators = tuple[BatchSource, Sequence[Evaluator]]


@flow(name="on_policy_distillation", flow_run_name="{config.run_name}", on_running=[apply_rights])
def on_policy_distillation(config: OnPolicyConfig) -> TrainResult:
    """Train the student on its own samples, with the teachers' log-probabilities of each token as the target."""
    return _run(config, _on_policy_inputs(config), lambda run, hangs: _on_policy(run, hangs, config, config.datasets))


@flow(name="off_policy_distillation", flow_run_name="{config.run_name}", on_running=[apply_rights])
def off_policy_distillation(config: OffPolicyConfig) -> TrainResult:
    """Train the student on the teachers' samples, or on their distribution over the tokens of a dataset."""
    return _run(config, _off_policy_inputs(config), lambda run, hangs: _off_policy(run, hangs, config, config.datasets))


@flow(name="self_distillation", flow_run_name="{config.run_name}", on_running=[apply_rights])
def self_distillation(config: SelfConfig) -> TrainResult:
    """Train the student on its own samples, with earlier weights that see more context as the teacher."""
    questions = config.questions.builder(config.teacher_prompt, config.batch_size)
    datasets = [GroupsConfig(environment=questions, teacher=config.teacher)]
    return _run(config, _on_policy_inputs(config), lambda run, hangs: _on_policy(run, hangs, config, datasets))


@flow(name="prompt_distillation", flow_run_name="{config.run_name}", on_running=[apply_rights])
def prompt_distillation(config: PromptConfig) -> TrainResult:
    """Train the student, without a prompt, on a teacher's completions with a long prompt; compare the two policies."""
    datasets = teacher_datasets(config)
    return _run(config, _off_policy_inputs(config), lambda run, hangs: _off_policy(run, hangs, config, datasets))


def teacher_datasets(config: OffPolicyConfig | PromptConfig) -> Sequence[TeacherDataConfig]:
    """Return the datasets of off-policy or prompt distillation."""
    if isinstance(config, OffPolicyConfig):
        return config.datasets
    questions = config.questions.builder(config.prompt, config.batch_size)
    return [TeacherDataConfig(environment=questions, teacher=config.teacher)]


def _on_policy_inputs(config: SamplingConfig) -> Sequence[str]:
    return ("ref_logprobs", TOPK) if config.top_k else ("ref_logprobs", "sampling_logprobs", "advantages")


def _off_policy_inputs(config: TeacherTargetsConfig) -> Sequence[str]:
    return ("ref_logprobs", TOPK) if config.top_k else ("ref_logprobs",)


def _run(
    config: DistillConfig, inputs: Sequence[str], open_source: Callable[[Run, HangWatch], SourceAndEvaluators]
) -> TrainResult:
    """Train on the source that `open_source` opens for a run; `inputs` are the batch fields that losses may read.

    The watch that `open_source` gets warns of groups that no longer respond.
    """
    with Objective.from_spec(config.objective, config.seed) as objective:
        can_sample = isinstance(config, TeacherTargetsConfig) and config.candidates != "off"
        objective.check_needs(inputs, can_sample=can_sample)
        _check_base(objective, on_policy="advantages" in inputs)
        if isinstance(config, OffPolicyConfig | PromptConfig):
            check_targets(objective, config)

        def attempt(restarts: Sequence[str]) -> TrainResult:
            with open_run(config, restarts, config.adapter) as run, closing(_open_watch(config, run)) as hangs:
                evaluators = build_evaluators(config.evaluators, config.infrequent_evaluators, run.builder_arguments)
                source, held_out = open_source(run, hangs)
                for evaluator in held_out:
                    if isinstance(evaluator, HeldOutGroups):
                        evaluator.hangs = hangs
                candidates = open_candidates(run, config) if isinstance(config, TeacherTargetsConfig) else None
                with closing(source):
                    trainer = Trainer(run, config, source, objective, [*held_out, *evaluators], candidates=candidates)
                    return trainer.train()

        return run_with_approval(config, attempt)


def _check_base(objective: Objective, *, on_policy: bool) -> None:
    if on_policy and objective.base is None:
        raise ConfigError(
            "objective.base_loss is cross_entropy, which would imitate the student's own samples: use "
            "importance_sampling, ppo or another loss that reads advantages, or set top_k."
        )


def check_targets(objective: Objective, config: OffPolicyConfig | PromptConfig) -> None:
    """Check that no term reads the weights of targets that a teacher draws as a distribution; see `TeacherSequence`.

    Raises:
        ConfigError: a term or the base loss does.
    """
    draws = config.rollout.is_plain and any(dataset.environment for dataset in teacher_datasets(config))
    if not (config.top_k and draws):
        return
    for term in filter(None, (objective.base, *objective.regularizers)):
        if term.term.name in READS_DISTRIBUTION:
            raise ConfigError(
                f"The term {term.term.name} takes the weights of a position for the teacher's distribution, but those "
                "of completions that the teacher samples are its distribution only on average: use cross_entropy, "
                "train on the student's own samples with on_policy_distillation or self_distillation, or let the "
                "teacher score given sequences (`data` of off_policy_distillation)."
            )


def _open_watch(config: DistillConfig, run: Run) -> HangWatch:
    def report(warning: MetricWarning) -> None:
        warn_of_metrics(run.log, config.run_name, "health", [warning])

    return HangWatch(HEALTH, config.rollout.timeout_s, report)


def _on_policy(
    run: Run, hangs: HangWatch, config: SamplingConfig, datasets: Sequence[GroupsConfig]
) -> SourceAndEvaluators:
    """Open the source of the student's own samples, and the evaluators on held-out groups."""
    teachers = open_teachers(run, config, [dataset.teacher for dataset in datasets])
    tokenizer, settings = run.client.get_tokenizer(), config.rollout.settings(config.seed, NO_REWARD)
    if recorded_format(run.directory) < FORMAT_OF_CORRECTIONS:
        settings = settings.with_service_logprobs()
    built = [_build_groups(run, dataset.environment) for dataset in datasets]
    weights = [dataset.weight for dataset in datasets]
    mixture = Mixture([train for train, _ in built], weights, config.batch_size, config.seed)
    tests = [(teacher, test) for teacher, (_, test) in zip(teachers, built, strict=True) if test is not None]
    hindsight = _open_hindsight(config, tokenizer)
    if hindsight:
        # An evaluation gives the teacher no hindsight, so the KL to the teacher would not measure progress.
        held_out = [HeldOutEnvironments(test, settings, tokenizer) for _, test in tests]
    else:
        held_out = [TeacherKL(tests, tokenizer, settings)] if tests else []
    every = config.teacher_sync_every
    sync = TeacherSync(every, partial(open_saved_teacher, run, config.model)) if every else None
    targets = TeacherTargets(
        kl_penalty_coef=config.kl_penalty_coef,
        kl_discount_factor=config.kl_discount_factor,
        train_on_rewards=isinstance(config, OnPolicyConfig) and config.train_on_rewards,
        top_k=config.top_k,
        skip_first_n_tokens=config.skip_first_n_tokens,
    )
    source = OnPolicySource(mixture, teachers, tokenizer, settings, targets, sync)
    source.watch_hangs(hangs)
    source.hindsight = hindsight
    source.measures_post_kl = config.compute_post_kl
    source.scores_last_n = config.prompt_logprobs_last_n == "auto"
    return source, held_out


def _open_hindsight(config: SamplingConfig, tokenizer: Tokenizer) -> Hindsight | None:
    if not isinstance(config, OnPolicyConfig) or config.hindsight is None:
        return None
    fields = config.hindsight.model_dump(exclude={"renderer_name"})
    names = [config.hindsight.renderer_name, *renderer_names(config.datasets[0])]
    name = next(filter(None, names), "") or renderer_name_of(config.model, tokenizer)
    return Hindsight(**fields, renderer=open_renderer(name, tokenizer))


def _off_policy(
    run: Run, hangs: HangWatch, config: TeacherTargetsConfig, datasets: Sequence[TeacherDataConfig]
) -> SourceAndEvaluators:
    """Open the source of the teachers' data, and the evaluators on held-out data."""
    teachers = open_teachers(run, config, [dataset.teacher for dataset in datasets])
    tokenizer, settings = run.client.get_tokenizer(), config.rollout.settings(config.seed, NO_REWARD)
    built = [open_teacher_data(tokenizer, run.builder_arguments, dataset, config.seed) for dataset in datasets]
    weights = [dataset.weight for dataset in datasets]
    mixture = Mixture([train for train, _ in built], weights, config.batch_size, config.seed)
    key, data_digest = stored_under(config, datasets, [teacher.name for teacher in teachers])
    # Training on a teacher's samples reads no logprobs of the sampler.
    sequences = SequenceSettings(key, settings.with_service_logprobs(), config.top_k, data_digest)
    source = TeacherDataSource(mixture, teachers, tokenizer, sequences, run.directory)
    source.watch_hangs(hangs)
    held_out = source.held_out([test for _, test in built])
    rows = zip(teachers, datasets, built, strict=True)
    tests = [(teacher, test) for teacher, dataset, (_, test) in rows if dataset.environment and test is not None]
    distance = [TeacherKL(tests, tokenizer, settings)] if tests else []
    return source, [*([held_out] if held_out else []), *distance]


def stored_under(
    config: TeacherTargetsConfig, datasets: Sequence[TeacherDataConfig], teachers: Sequence[str]
) -> tuple[str, str]:
    """Digest what all stored teacher data of a run depends on, and the code and data files of the environments.

    Args:
        teachers: name of each dataset's teacher.
    """
    names = [config.model, *(dataset.teacher.model for dataset in datasets)]
    folders = [digest_folder(path) for name in names if (path := path_of(name)) and path.is_dir()]
    completer = config.rollout.completer
    code = digest_code(cast(Callable[..., object], import_path(completer.builder))) if completer else None
    ingredients = [config.seed, config.rollout, config.top_k, *datasets, *teachers, folders, code]
    environments = [dataset.environment for dataset in datasets if dataset.environment]
    builders = [digest_code(cast(Callable[..., object], import_path(config.builder))) for config in environments]
    # Not the other files of a folder, to which a builder may write.
    paths = [path for text, _ in texts_in([config.params for config in environments]) if (path := path_of(text))]
    files = [digest_file(path) for path in paths if path.is_file()]
    return digest_text(repr(ingredients)), digest_text(repr([*builders, *files]))


def _build_groups(run: Run, config: BuilderConfig) -> tuple[RLDataset, RLDataset | None]:
    return build_environments(config.builder, config.params, run.client.get_tokenizer(), run.builder_arguments)


def open_teacher_data(
    tokenizer: Tokenizer, resources: Mapping[str, Any], config: TeacherDataConfig, seed: int
) -> tuple[Any, Any]:
    """Build the training and held-out data of a dataset; the held-out data may be None."""
    if config.environment:
        return build_environments(config.environment.builder, config.environment.params, tokenizer, resources)
    assert config.data is not None
    return open_datasets(config.data.builder, config.data.params, tokenizer, seed, resources)
