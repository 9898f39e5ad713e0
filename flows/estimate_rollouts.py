"""Estimate of a run that samples: from an earlier run of the same config, or bounds from `rollout.max_tokens`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlflow.entities import Run
from tinker_cookbook.rl.types import EnvGroupBuilder, InitialObservationOverflow, RLDataset
from tinker_cookbook.tokenizer_utils import register_tokenizer

from flows.config.base import SERVICE_PATH
from flows.config.distill import GroupsConfig, OnPolicyConfig, SelfConfig
from flows.config.rl import RlConfig
from flows.config.train import BASE_MODEL
from flows.runs.blocks import open_service, service_url, tracking_of
from flows.runs.mlflow_run import MAX_PARAM_LENGTH, changed_fields_of
from flows.runs.prices import price_of
from flows.training.schedule import Schedule
from flows.training.trainer import num_passes
from objectives.objective import Objective
from tasks.common.service_errors import service_errors
from tasks.common.task import inline_tasks
from tasks.distillation.mixture import Mixture
from tasks.distillation.prompts import PromptGroup
from tasks.rl.environments.reward_model import RewardModelGroupBuilder
from tasks.rl.group_batches import GroupBatches
from tasks.rl.rollout_source import build_environments
from tasks.training.batch_source import SampledTokens
from tasks.training.metrics import metric_values

SamplingMethod = RlConfig | OnPolicyConfig | SelfConfig

# Prefixes of settings that do not change the tokens of a step.
_FREE_FIELDS = (
    *("run_name", "num_steps", "num_epochs", "seed", "learning_rate", "budget", "checkpoint", "transcripts"),
    *("tracking", "experiment", "storage", "base_url", "if_exists"),
)
_COUNTS = ("num_train_tokens", "num_prefill_tokens", "num_sample_tokens", "num_cached_tokens", "usd")


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Tokens of a run and their price.

    Attributes:
        num_train_tokens: Tokens in all passes of training clients.
        sampled: Prompt and sampled tokens of all samplers: rollouts, evaluations, reference and teachers.
        usd: Dollars; None if no price is known.
    """

    num_train_tokens: int
    sampled: SampledTokens
    usd: float | None


@dataclass(frozen=True, slots=True)
class RolloutEstimate:
    """Estimate of a whole run that samples.

    Attributes:
        run_name, model: Name and base model of the run.
        num_steps: Number of steps.
        low, high: Bounds of the cost; equal if an earlier run gives the cost.
        like: Earlier run of the same config, whose mean cost per step counts; empty for an interval.
        excluded: Costs that the interval leaves out, as phrases.
    """

    run_name: str
    model: str
    num_steps: int
    low: TokenCosts
    high: TokenCosts
    like: str
    excluded: tuple[str, ...] = ()


class GroupSizes(NamedTuple):
    """Counts over several groups; prompt tokens are those of each rollout's first turn.

    Attributes:
        num_rollouts: Rollouts of all groups.
        num_prompt_tokens: Prompt tokens of all rollouts.
        num_shared_tokens: Prompt tokens that repeat those of the group's first rollout; a prefix cache may hold them.
        num_teacher_tokens: Prompt tokens of all rollouts as the teacher sees them.
        num_reward_tokens: Tokens of all rollouts as a reward model sees them, with empty answers; 0 without one.
    """

    num_rollouts: int = 0
    num_prompt_tokens: int = 0
    num_shared_tokens: int = 0
    num_teacher_tokens: int = 0
    num_reward_tokens: int = 0

    def plus(self, other: GroupSizes) -> GroupSizes:
        """Return the sums of both."""
        return GroupSizes(*(a + b for a, b in zip(self, other, strict=True)))

    def sampling(self, num_tokens: int) -> SampledTokens:
        """Return the tokens for sampling one completion of this length per rollout."""
        return SampledTokens(self.num_prompt_tokens, self.num_rollouts * num_tokens, self.num_shared_tokens)

    def rewarding(self, num_tokens: int) -> SampledTokens:
        """Return the tokens of a reward model that scores answers, for which they have this many tokens."""
        return SampledTokens(self.num_reward_tokens + self.num_rollouts * num_tokens, self.num_rollouts)

    def scoring(self, num_tokens: int, *, by_teacher: bool = False) -> SampledTokens:
        """Return the tokens of scoring completions of this length; a score costs one sampled token."""
        num_prompt_tokens = self.num_teacher_tokens if by_teacher else self.num_prompt_tokens
        return SampledTokens(num_prompt_tokens + self.num_rollouts * num_tokens, self.num_rollouts)


@dataclass(frozen=True, slots=True)
class RunSizes:
    """Sizes of a run's groups.

    Attributes:
        steps_per_epoch: Steps per epoch.
        step: Groups of the first step, by teacher's model; of the trained model's name without teachers.
        trained: Groups of the first step that are trained on: all of them without over-sampling.
        held_out: Held-out groups, by teacher's model.
        reward_model: Base model of the reward model; None without one.
    """

    steps_per_epoch: int
    step: Mapping[str, GroupSizes]
    trained: GroupSizes
    held_out: Mapping[str, GroupSizes]
    reward_model: str | None = None

    @property
    def all_of_step(self) -> GroupSizes:
        return _total(self.step.values())

    @property
    def all_held_out(self) -> GroupSizes:
        return _total(self.held_out.values())


@dataclass
class _Bill:
    """Tokens of the passes of training clients, and of samplers by base model."""

    num_train_tokens: int = 0
    sampled: dict[str, SampledTokens] = field(default_factory=dict)

    def add(self, model: str, tokens: SampledTokens, times: int = 1) -> None:
        scaled = SampledTokens(*(times * count for count in (tokens.num_prefill_tokens, tokens.num_sample_tokens)))
        cached = SampledTokens(num_cached_tokens=times * tokens.num_cached_tokens)
        self.sampled[model] = self.sampled.get(model, SampledTokens()) + scaled + cached

    def costs(self, config: SamplingMethod) -> TokenCosts:
        """Return the tokens with their price; a model without a price costs as much as the trained one."""
        url = service_url(config.base_url)
        price = price_of(config.model, url, config.budget.prices)
        usd = None
        if price:
            usd = price.of_training(self.num_train_tokens)
            for model, tokens in self.sampled.items():
                usd += (price_of(model, url, config.budget.prices) or price).of_sampling(tokens)
        return TokenCosts(self.num_train_tokens, sum(self.sampled.values(), SampledTokens()), usd)


def estimate_rollouts(config: SamplingMethod) -> RolloutEstimate:
    """Estimate a run by the cost of an earlier run of the same config, or by the length of its completions.

    Raises:
        ConfigError: The config, the environment or the prices are invalid.
        ServiceError: The service does not respond.
    """
    with Objective.from_spec(config.objective) as objective, _sizes_of(config) as sizes:
        schedule = Schedule(config, sizes.steps_per_epoch)
        if earlier := _earlier_run(config, schedule.num_steps):
            name, costs = earlier
            return RolloutEstimate(config.run_name, config.model, schedule.num_steps, costs, costs, name)
        bills = [_count(config, objective, sizes, schedule, is_high=is_high) for is_high in (False, True)]
        low, high = (bill.costs(config) for bill in bills)
    excluded = tuple(_excluded(config))
    return RolloutEstimate(config.run_name, config.model, schedule.num_steps, low, high, "", excluded)


def _count(
    config: SamplingMethod, objective: Objective, sizes: RunSizes, schedule: Schedule, *, is_high: bool
) -> _Bill:
    """Count the tokens of a run whose completions have one token each, or the maximum."""
    bill, length = _Bill(), config.rollout.max_tokens if is_high else 1
    step, held_out, num_steps = sizes.trained, sizes.all_held_out, schedule.num_steps
    refills = config.rollout.refill_rounds if is_high else 0
    # Groups that over-sampling cancels may have sampled nothing, or everything.
    started = sizes.all_of_step if is_high else step
    bill.add(config.model, started.sampling(length), num_steps)
    bill.add(config.model, step.sampling(length), num_steps * refills)

    # A datum has no input for its last token. Without refills, groups may be dropped down to one rollout.
    num_batch_tokens = step.num_prompt_tokens + step.num_rollouts * (length - 1)
    is_dropped = isinstance(config, RlConfig) and (config.advantage.drop_constant or config.rollout.truncated == "mask")
    is_dropped = is_dropped or (isinstance(config, OnPolicyConfig) and config.hindsight is not None)
    if is_dropped and not is_high:
        num_batch_tokens //= max(step.num_rollouts, 1)
    passes = [num_passes(objective, at, config.guards.needs_forward_pass) if is_high else 1 for at in range(num_steps)]
    measured = sum(objective.measures_effects(at) for at in range(num_steps))
    # A final forward pass over the last batch checks the final weights.
    bill.num_train_tokens = num_batch_tokens * (sum(passes) + measured + 1)

    num_scores = num_steps if is_high or not is_dropped else 0
    advantage = config.advantage if isinstance(config, RlConfig) else None
    if objective.needs("ref_logprobs") or (advantage and advantage.kl_coefficient):
        bill.add(_reference_model(config), step.scoring(length), num_scores)
    if config.compute_post_kl:
        bill.add(config.model, step.scoring(length), num_scores)
    has_teacher = not isinstance(config, RlConfig)
    for model, of_teacher in sizes.step.items() if has_teacher else ():
        bill.add(model, of_teacher.scoring(length, by_teacher=True), num_scores)
    num_evaluations = sum(schedule.evaluates_often_before(at) for at in range(num_steps + 1))
    bill.add(config.model, held_out.sampling(length), num_evaluations)
    if sizes.reward_model:
        num_text_tokens = length if is_high else 0  # the stop token is no part of the answer
        bill.add(sizes.reward_model, started.rewarding(num_text_tokens), num_steps)
        bill.add(sizes.reward_model, step.rewarding(num_text_tokens), num_steps * refills)
        bill.add(sizes.reward_model, held_out.rewarding(num_text_tokens), num_evaluations)
    if has_teacher and not (isinstance(config, OnPolicyConfig) and config.hindsight):
        for model, of_teacher in sizes.held_out.items():
            bill.add(model, of_teacher.scoring(length, by_teacher=True), num_evaluations)
    return bill


def _excluded(config: SamplingMethod) -> Iterator[str]:
    """Yield the costs that the interval leaves out."""
    yield "turns of a rollout after the first, retries, models that compare answers, clients of the user's own code"
    if config.evaluators or config.infrequent_evaluators:
        yield "evaluators"
    if isinstance(config, OnPolicyConfig) and config.hindsight:
        yield "the text that hindsight adds to the teacher's prompts"
    if config.report.num_examples:
        yield "terms of the objective on held-out groups"


def _reference_model(config: SamplingMethod) -> str:
    name = config.reference
    return config.model if name == BASE_MODEL or name.startswith(SERVICE_PATH) else name


@contextmanager
def _sizes_of(config: SamplingMethod) -> Iterator[RunSizes]:
    """Build the environments and measure the groups of the first step and the held-out groups."""
    if isinstance(config, RlConfig):
        datasets = [GroupsConfig(environment=config.environment)]
    elif isinstance(config, OnPolicyConfig):
        datasets = list(config.datasets)
    else:
        questions = config.questions.builder(config.teacher_prompt, config.batch_size)
        datasets = [GroupsConfig(environment=questions, teacher=config.teacher)]
    models = [dataset.teacher.model or config.model for dataset in datasets]
    with open_service(config) as service, inline_tasks():
        service.check_model(config.model)
        with service.session() as session:
            with service_errors(f"create a training client for {config.model}"):
                client = session.create_lora_training_client(config.model, rank=1).result()
            register_tokenizer(config.model, client.get_tokenizer)
            resources: dict[str, Any] = {"session": session, "base_model": config.model}
            built = [
                build_environments(
                    dataset.environment.builder, dataset.environment.params, client.get_tokenizer(), resources
                )
                for dataset in datasets
            ]
        if isinstance(config, RlConfig):
            ((train, _),) = built
            batches = GroupBatches(
                train,
                config.schedule.groups_per_batch,
                can_refill=config.rollout.refill_rounds > 0,
                oversampling_factor=config.rollout.oversampling_factor,
            )
            num_steps, first = batches.num_steps, {models[0]: list(batches.at(0))}
            num_cancelled = len(first[models[0]]) - batches.num_trained if config.rollout.oversampling_factor > 1 else 0
        else:
            weights = [dataset.weight for dataset in datasets]
            mixture = Mixture([train for train, _ in built], weights, config.batch_size, config.seed)
            num_steps, first, num_cancelled = len(mixture), dict[str, list[EnvGroupBuilder]](), 0
            for item in mixture.at(0):
                first.setdefault(models[item.dataset], []).append(item.value)
        held_out: dict[str, list[EnvGroupBuilder]] = {}
        for model, (_, test) in zip(models, built, strict=True):
            held_out.setdefault(model, []).extend(_groups_of(test) if test is not None else [])
        step, test_sizes = (
            {model: asyncio.run(_measure(groups)) for model, groups in of_part.items()} for of_part in (first, held_out)
        )
        trained = _total(step.values())
        if num_cancelled:
            trained = asyncio.run(_measure(first[models[0]][:-num_cancelled]))
        yield RunSizes(num_steps, step, trained, test_sizes, _reward_model_of(first.values()))


def _groups_of(dataset: RLDataset) -> list[EnvGroupBuilder]:
    return [group for index in range(len(dataset)) for group in dataset.get_batch(index)]


async def _measure(groups: Sequence[EnvGroupBuilder]) -> GroupSizes:
    """Measure groups by the environments of their rollouts, which share a problem."""
    sizes = GroupSizes()
    for group in groups:
        environments = await group.make_envs()
        try:
            first = await environments[0].initial_observation()
        finally:
            await group.cleanup()
        if isinstance(first, InitialObservationOverflow):  # nothing is sampled
            continue
        prompt, _ = first
        shown = group.teacher_prompt if isinstance(group, PromptGroup) else prompt
        num = len(environments)
        num_scored = group.num_scored_tokens() if isinstance(group, RewardModelGroupBuilder) else 0
        measured = (num * prompt.length, (num - 1) * prompt.length, num * shown.length, num * num_scored)
        sizes = sizes.plus(GroupSizes(num, *measured))
    return sizes


def _reward_model_of(parts: Iterable[Sequence[EnvGroupBuilder]]) -> str | None:
    """Return the base model of the reward model of the groups, if any."""
    groups = (group for part in parts for group in part if isinstance(group, RewardModelGroupBuilder))
    group = next(groups, None)
    return group.reward_model.teacher.sampler.get_base_model() if group else None


def _total(sizes: Iterable[GroupSizes]) -> GroupSizes:
    total = GroupSizes()
    for part in sizes:
        total = total.plus(part)
    return total


def _earlier_run(config: SamplingMethod, num_steps: int) -> tuple[str, TokenCosts] | None:
    """Return the name of the newest run of the same config with a recorded cost, and the cost of `num_steps` steps.

    The tokens of a run on another service, or with other prices, are priced like those of the trained model.
    """
    tracking = tracking_of(config)
    client = tracking.get_client()
    wanted = _comparable({key: str(value)[:MAX_PARAM_LENGTH] for key, value in changed_fields_of(config).items()})
    with tracking.failures():
        name = config.model.replace("'", "")
        for run in client.search_runs([tracking.experiment_id(client)], f"params.model = '{name}'"):
            num_done = len(metric_values(client, run.info.run_id, "time/step"))
            costs = {key: run.data.metrics.get(f"cost/{key}") for key in _COUNTS}
            if not num_done or costs["num_train_tokens"] is None or _comparable(run.data.params) != wanted:
                continue
            scaled = {
                key: round(value / num_done * num_steps) for key, value in costs.items() if value and key != "usd"
            }
            sampled = SampledTokens(*(scaled.get(key, 0) for key in _COUNTS[1:4]))
            name_of_run, num_train_tokens = run.info.run_name or run.info.run_id, scaled["num_train_tokens"]
            if _has_prices_of(config, run) and costs["usd"] is not None:
                usd: float | None = costs["usd"] / num_done * num_steps
            else:
                price = price_of(config.model, service_url(config.base_url), config.budget.prices)
                usd = price.of_training(num_train_tokens) + price.of_sampling(sampled) if price else None
            return name_of_run, TokenCosts(num_train_tokens, sampled, usd)
    return None


def _has_prices_of(config: SamplingMethod, run: Run) -> bool:
    """Return whether a run was charged the prices that the config has now."""
    is_same_service = run.data.tags.get("tinker.base_url") == service_url(config.base_url)
    return is_same_service and run.data.params.get("budget.prices", "") == config.budget.prices


def _comparable(params: Mapping[str, str]) -> dict[str, str]:
    """Return the logged settings on which the cost of a step depends."""
    return {key: value for key, value in params.items() if not key.startswith(_FREE_FIELDS)}
