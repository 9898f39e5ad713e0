"""Estimate of a run that samples: from an earlier run of the same config, or bounds from `rollout.max_tokens`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from tinker_cookbook.rl.preference_envs import PairwisePreferenceGroupBuilder
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

from flows.config.distill import GroupsConfig, OnPolicyConfig, SelfConfig
from flows.config.rl import RlConfig
from flows.estimates.costs import (
    Bill,
    CostEstimate,
    EvaluatorSizes,
    GroupSizes,
    PriceList,
    earlier_runs,
    estimate_session_of_run,
    measure,
    ranges,
    reference_model,
    schedule_of,
    teacher_model,
    total,
)
from flows.runs.blocks import service_url
from flows.training.plan import num_passes
from flows.training.schedule import Schedule
from objectives.objective import Objective
from tasks.distillation.mixture import Mixture
from tasks.evaluation.evaluators import build_evaluators
from tasks.preference.preference_models import verdict_tokens
from tasks.rl.group_batches import GroupBatches
from tasks.rl.rollout_source import build_environments

# Groups that are measured at least, in whole steps; each has to open its environments.
_NUM_MEASURED = 64

SamplingMethod = RlConfig | OnPolicyConfig | SelfConfig
ModelGroup = tuple[str, EnvGroupBuilder]  # base model of the teacher, or the trained model; and a group


class RunGroups(NamedTuple):
    """Groups of a run, whose environments are not open yet.

    Attributes:
        schedule: Steps of the run.
        at: Returns the groups of a step.
        num_trained: Maximum number of groups of a step that are trained on; over-sampling starts more.
        models: Base model of each dataset's teacher; without teachers, the trained model.
        tests: Held-out groups of each dataset.
        evaluators: Evaluators of the config.
    """

    schedule: Schedule
    at: Callable[[int], list[ModelGroup]]
    num_trained: int
    models: Sequence[str]
    tests: Sequence[RLDataset | None]
    evaluators: EvaluatorSizes


@dataclass(frozen=True, slots=True)
class RunSizes:
    """Sizes of a run's groups.

    Attributes:
        num_measured: Number of steps whose groups are measured.
        started: Groups of the measured steps, by the teacher's model; without teachers, by the trained model.
        trained: Groups of the measured steps that are trained on; without over-sampling, all of them.
        held_out: Held-out groups, by teacher's model.
        evaluators: Evaluators of the config.
        has_unknown_judge: True if answers are compared by a model whose tokens are unknown.
    """

    num_measured: int
    started: Mapping[str, GroupSizes]
    trained: GroupSizes
    held_out: Mapping[str, GroupSizes]
    evaluators: EvaluatorSizes
    has_unknown_judge: bool = False

    @property
    def all_started(self) -> GroupSizes:
        return total(self.started.values())

    @property
    def all_held_out(self) -> GroupSizes:
        return total(self.held_out.values())


def estimate_rollouts(config: SamplingMethod, ignored: Sequence[str] = ()) -> CostEstimate:
    """Estimate a run by the cost of an earlier run of the same config, or by the length of its completions.

    Args:
        ignored: Settings in which the earlier run may differ, such as paths of weights.

    Raises:
        ConfigError: The config, the environment or the prices are invalid.
        ServiceError: The service does not respond.
    """
    prices = PriceList(config.model, service_url(config.base_url), config.budget.prices)
    with _open_groups(config) as groups:
        schedule = groups.schedule
        num_steps = len(schedule.steps)
        # A run that is shorter than the period between evaluations has too many evaluations per step.
        rarely = config.infrequent_eval_every if schedule.evaluates_rarely else 0
        min_steps = min(num_steps, max(config.eval_every, rarely, 1))
        earlier = next((run for run in earlier_runs(config, prices, ignored) if run.num_steps >= min_steps), None)
        if earlier:
            costs, basis = earlier.scaled_to(num_steps), (earlier.name, earlier.num_steps)
            return CostEstimate(
                config.run_name, config.model, num_steps, costs, costs, *basis, first_step=schedule.first
            )
        sizes = _measure(groups)
    with Objective.from_spec(config.objective) as objective:
        bills = [_count(config, objective, sizes, schedule, Bill(prices), is_high=high) for high in (False, True)]
        excluded = tuple(_excluded(config, objective, sizes))
    low, high, parts = ranges(*bills)
    return CostEstimate(
        config.run_name,
        config.model,
        num_steps,
        low,
        high,
        parts=parts,
        excluded=excluded,
        first_step=schedule.first,
        num_measured=sizes.num_measured,
    )


def _count(
    config: SamplingMethod, objective: Objective, sizes: RunSizes, schedule: Schedule, bill: Bill, *, is_high: bool
) -> Bill:
    """Count the tokens of a run whose completions have one token each, or the maximum."""
    length = config.rollout.max_tokens if is_high else 1
    trained, held_out = sizes.trained, sizes.all_held_out
    # Other steps are assumed to have as many prompts of the same length.
    share = 1 / sizes.num_measured
    of_all_steps = len(schedule.steps) * share
    refills = config.rollout.refill_rounds if is_high else 0
    # Groups that over-sampling cancels may have sampled nothing, or everything.
    started = sizes.all_started if is_high else trained
    bill.add("rollouts", config.model, started.sampling(length), of_all_steps)
    bill.add("rollouts", config.model, trained.sampling(length), of_all_steps * refills)

    # In the lower bound, dropped groups leave one rollout to train on.
    num_batch_tokens = trained.num_batch_tokens(length) * share
    is_dropped = isinstance(config, RlConfig) and (config.advantage.drop_constant or config.rollout.truncated == "mask")
    is_dropped = is_dropped or (isinstance(config, OnPolicyConfig) and config.hindsight is not None)
    if is_dropped and not is_high:
        num_batch_tokens = trained.num_batch_tokens(length) // max(trained.num_rollouts, 1)
    passes = [num_passes(objective, at, config.guards.needs_forward_pass) if is_high else 1 for at in schedule.steps]
    measured = sum(objective.measures_effects(at) for at in schedule.steps)
    # A final forward pass over the last batch checks the final weights.
    bill.add_training("training", config.model, round(num_batch_tokens * (sum(passes) + measured + 1)))

    num_scores = len(schedule.steps) if is_high or not is_dropped else 0
    advantage = config.advantage if isinstance(config, RlConfig) else None
    has_penalty = bool(advantage and advantage.kl_coefficient)
    num_referenced = sum(has_penalty or objective.needs_at("ref_logprobs", at) for at in schedule.steps)
    if num_referenced:
        num_scored = min(num_scores, num_referenced)
        bill.add("reference", reference_model(config), trained.scoring(length), num_scored * share)
    if config.compute_post_kl:
        bill.add("compute_post_kl", config.model, trained.scoring(length), num_scores * share)
    has_teacher = not isinstance(config, RlConfig)
    for model, of_teacher in sizes.started.items() if has_teacher else ():
        bill.add("teachers", model, of_teacher.scoring(length, by_teacher=True), num_scores * share)
    if not isinstance(config, RlConfig):
        bill.add_probe(config, config.datasets[0].teacher if isinstance(config, OnPolicyConfig) else config.teacher)
    num_evaluations = schedule.num_often
    bill.add("evaluations", config.model, held_out.sampling(length), num_evaluations)
    sizes.evaluators.add_to(bill, num_evaluations, schedule.num_rarely, is_high=is_high)
    num_text_tokens = length if is_high else 0  # the stop token is no part of the answer
    for part, groups, times in (
        ("reward model", started, of_all_steps),
        ("reward model", trained, of_all_steps * refills),
        ("evaluations", held_out, num_evaluations),
    ):
        if groups.reward_model:
            bill.add(part, groups.reward_model, groups.rewarding(num_text_tokens, is_high=is_high), times)
    if has_teacher and not (isinstance(config, OnPolicyConfig) and config.hindsight):
        for model, of_teacher in sizes.held_out.items():
            bill.add("evaluations", model, of_teacher.scoring(length, by_teacher=True), num_evaluations)
    return bill


def _excluded(config: SamplingMethod, objective: Objective, sizes: RunSizes) -> Iterator[str]:
    """Yield the costs that the bounds leave out."""
    yield "turns of a rollout after the first, retries, clients of the user's own code"
    if sizes.has_unknown_judge:
        yield "the model that compares answers"
    yield from sizes.evaluators.others
    if isinstance(config, RlConfig) and config.schedule.mode == "async":
        yield "groups that are sampled again because they became too old"
    if isinstance(config, OnPolicyConfig) and config.hindsight:
        yield "the text that hindsight adds to the teacher's prompts"
    if objective.regularizers:
        yield "terms of the objective on held-out groups"


@contextmanager
def _open_groups(config: SamplingMethod) -> Iterator[RunGroups]:
    """Build the environments and evaluators of a run."""
    if isinstance(config, RlConfig):
        datasets = [GroupsConfig(environment=config.environment)]
    elif isinstance(config, OnPolicyConfig):
        datasets = list(config.datasets)
    else:
        questions = config.questions.builder(config.teacher_prompt, config.batch_size)
        datasets = [GroupsConfig(environment=questions, teacher=config.teacher)]
    models = [teacher_model(config, dataset.teacher) for dataset in datasets]
    environments = [dataset.environment for dataset in datasets]
    with estimate_session_of_run(config, {"environment": environments}) as (resources, tokenizer):
        entries = build_evaluators(config.evaluators, config.infrequent_evaluators, resources)
        evaluators = EvaluatorSizes.of(entries, tokenizer)
        built = [build_environments(entry.builder, entry.params, tokenizer, resources) for entry in environments]
        if isinstance(config, RlConfig):
            ((train, _),), schedule = built, config.schedule
            batches = GroupBatches(
                train,
                schedule.groups_per_batch,
                can_refill=config.rollout.refill_rounds > 0,
                num_parts=schedule.num_minibatches * schedule.num_substeps,
                oversampling_factor=config.rollout.oversampling_factor,
            )
            steps_per_epoch, num_trained = batches.num_steps, batches.num_trained

            def groups_at(step: int) -> list[ModelGroup]:
                return [(models[0], group) for group in batches.at(step)]

        else:
            weights = [dataset.weight for dataset in datasets]
            mixture = Mixture([train for train, _ in built], weights, config.batch_size, config.seed)
            steps_per_epoch, num_trained = len(mixture), config.batch_size

            def groups_at(step: int) -> list[ModelGroup]:
                return [(models[item.dataset], item.value) for item in mixture.at(step)]

        tests = [test for _, test in built]
        yield RunGroups(schedule_of(config, steps_per_epoch), groups_at, num_trained, models, tests, evaluators)


def _measure(groups: RunGroups) -> RunSizes:
    """Measure the groups of the first steps and the held-out groups."""
    steps: list[list[ModelGroup]] = []
    numbers = groups.schedule.steps
    while len(steps) < len(numbers) and sum(map(len, steps)) < _NUM_MEASURED:
        steps.append(groups.at(numbers[len(steps)]))
    # Over-sampling may cancel any group; assume the last ones.
    trained = _measure_by_model(chain(*(step[: groups.num_trained] for step in steps)))
    cancelled = _measure_by_model(chain(*(step[groups.num_trained :] for step in steps)))
    started = {model: sizes.plus(cancelled.get(model, GroupSizes())) for model, sizes in trained.items()}
    held_out = _measure_by_model(
        (model, group)
        for model, test in zip(groups.models, groups.tests, strict=True)
        for group in (_groups_of(test) if test is not None else [])
    )
    has_unknown_judge = _has_unknown_judge(group for _, group in chain(*steps))
    return RunSizes(len(steps), started, total(trained.values()), held_out, groups.evaluators, has_unknown_judge)


def _measure_by_model(groups: Iterable[ModelGroup]) -> dict[str, GroupSizes]:
    by_model: dict[str, list[EnvGroupBuilder]] = {}
    for model, group in groups:
        by_model.setdefault(model, []).append(group)
    return {model: measure(of_model) for model, of_model in by_model.items()}


def _groups_of(dataset: RLDataset) -> list[EnvGroupBuilder]:
    return [group for index in range(len(dataset)) for group in dataset.get_batch(index)]


def _has_unknown_judge(groups: Iterable[EnvGroupBuilder]) -> bool:
    return any(
        isinstance(group, PairwisePreferenceGroupBuilder)
        and verdict_tokens(group.preference_model, group.convo_prefix) is None
        for group in groups
    )
