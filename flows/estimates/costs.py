"""Estimated costs: tokens by part and base model, their price, and the cost of an earlier run of the same config."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass, field
from typing import Any, NamedTuple

from tinker_cookbook.rl.preference_envs import PairwisePreferenceGroupBuilder, get_pairs_chunked
from tinker_cookbook.rl.types import EnvGroupBuilder, InitialObservationOverflow
from tinker_cookbook.tokenizer_utils import Tokenizer, register_tokenizer

from flows.config.base import SERVICE_PATH, BuilderConfig, RunConfig, ServiceConfig, TrackedConfig
from flows.config.distill import TeacherConfig
from flows.config.train import BASE_MODEL, TrainConfig
from flows.monitoring.run_tags import PRICES_TAG
from flows.runs.blocks import open_service, storage_of, tracking_of
from flows.runs.checkpoints.checkpoint_refs import find_checkpoint
from flows.runs.prices import digest_prices, price_of
from flows.runs.start.fork import check_end, is_fork, starts_of
from flows.runs.start.resume import origin_step
from flows.runs.tracking.mlflow_run import MAX_PARAM_LENGTH, changed_fields_of
from flows.training.schedule import Schedule
from tasks.common.builders import takes
from tasks.common.event_loop import open_workers
from tasks.common.sampling import open_training_client
from tasks.common.task import inline_tasks
from tasks.distillation.prompts import PromptGroup
from tasks.evaluation.evaluators import ConfiguredEvaluator
from tasks.evaluation.sampled import SampledEvaluator
from tasks.preference.preference_models import verdict_tokens
from tasks.reports.summary import STOPPED_TAG
from tasks.rl.environments.pairwise import ChosenAnswerGroupBuilder
from tasks.rl.environments.reward_model import RewardModelGroupBuilder
from tasks.training.batch_source import SampledTokens
from tasks.training.checkpoints import resumable, step_of
from tasks.training.token_meter import TokenMeter
from tasks.training.tracking.metric_names import safe_name
from tasks.training.tracking.metrics import metric_values

# Settings and groups of settings that do not change the tokens of a step.
_FREE_FIELDS = (
    *("run_name", "num_steps", "num_epochs", "seed", "learning_rate", "budget", "transcripts_every"),
    *("tracking", "experiment", "storage", "base_url", "if_exists", "mlflow_tags", "register_prompts"),
    *("checkpoint", "checkpoint_every", "checkpoint_every_seconds", "checkpoint_every_tokens", "checkpoint_kind"),
    *("keep_best", "keep_last", "ttl_seconds", "register_as", "promote_if", "promote_confidence", "needs_approval"),
    *("health", "alerts", "max_restarts", "accept_changes", "granularity", "task_runner"),
    *("adam", "lr_schedule", "engine"),
)


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Tokens of a run, or of a part of it, and their price.

    Attributes:
        num_train_tokens: Tokens in all passes of training clients.
        sampled: Prompt and sampled tokens of samplers.
        usd: Dollars; None if no price is known.
    """

    num_train_tokens: int
    sampled: SampledTokens
    usd: float | None


@dataclass(frozen=True, slots=True)
class CostRange:
    """Bounds of a cost."""

    low: TokenCosts
    high: TokenCosts


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Estimate of a run or an evaluation.

    Attributes:
        run_name, model: Name and base model.
        num_steps: Number of steps; of an evaluation, the number of evaluated checkpoints.
        low, high: Bounds of the cost; equal if an earlier run gives the cost.
        like: Earlier run of the same config that gives the cost; empty if there is none.
        like_num_steps: Number of steps of the earlier run; 0 without an earlier run, and for an evaluation.
        parts: Bounds of each part of the cost; empty if an earlier run gives the cost.
        excluded: Costs that the bounds leave out, as phrases.
        first_step: First step; for a fork, the step of the checkpoint that it continues.
        num_measured: Number of measured steps; the other steps are assumed to have as many prompts of the same length.
            0 if no step is measured.
    """

    run_name: str
    model: str
    num_steps: int
    low: TokenCosts
    high: TokenCosts
    like: str = ""
    like_num_steps: int = 0
    parts: Mapping[str, CostRange] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    first_step: int = 0
    num_measured: int = 0


class PriceList(NamedTuple):
    """Prices of the models of a run.

    Attributes:
        model: Trained model; its price also applies to models without a known price.
        url: URL of the service.
        table: Path of the user's table; empty for none.
    """

    model: str
    url: str
    table: str

    def usd(self, model: str, num_train_tokens: int, sampled: SampledTokens) -> float | None:
        """Return the price of a model's tokens in dollars; None if the trained model has no known price."""
        price = price_of(self.model, self.url, self.table)
        if price is None:
            return None
        price = price_of(model, self.url, self.table) or price
        return price.of_training(num_train_tokens) + price.of_sampling(sampled)


class GroupSizes(NamedTuple):
    """Counts over several groups; prompt tokens are those of each rollout's first turn.

    Attributes:
        num_rollouts: Rollouts of all groups.
        num_prompt_tokens: Prompt tokens of all rollouts.
        num_shared_tokens: Prompt tokens that repeat those of the group's first rollout; a prefix cache may hold them.
        num_teacher_tokens: Prompt tokens of all rollouts as the teacher sees them.
        reward_model: Base model of the reward model or judge; empty without one, and if its tokens are unknown.
        num_reward_tokens: Tokens of all requests to the reward model or judge, with empty answers.
        num_shown: Number of answers in these requests.
        num_verdicts: Number of these requests.
        max_reply_tokens: Maximum tokens of all replies; the minimum is one token each.
    """

    num_rollouts: int = 0
    num_prompt_tokens: int = 0
    num_shared_tokens: int = 0
    num_teacher_tokens: int = 0
    reward_model: str = ""
    num_reward_tokens: int = 0
    num_shown: int = 0
    num_verdicts: int = 0
    max_reply_tokens: int = 0

    def plus(self, other: GroupSizes) -> GroupSizes:
        """Return the sums of both; the groups of a run have the same reward model."""
        sums = {key: value + getattr(other, key) for key, value in self._asdict().items() if key != "reward_model"}
        return GroupSizes(**sums, reward_model=self.reward_model or other.reward_model)

    def sampling(self, num_tokens: int) -> SampledTokens:
        """Return the tokens for sampling one completion of this length per rollout."""
        return SampledTokens(self.num_prompt_tokens, self.num_rollouts * num_tokens, self.num_shared_tokens)

    def rewarding(self, num_tokens: int, *, is_high: bool) -> SampledTokens:
        """Return the tokens of the reward model or judge for answers of `num_tokens` tokens.

        Its tokenizer is assumed to need as many tokens as that of the policy.
        """
        num_replied = self.max_reply_tokens if is_high else self.num_verdicts
        return SampledTokens(self.num_reward_tokens + self.num_shown * num_tokens, num_replied)

    def scoring(self, num_tokens: int, *, by_teacher: bool = False) -> SampledTokens:
        """Return the tokens for scoring one completion of this length per rollout; a score costs one sampled token."""
        num_prompt_tokens = self.num_teacher_tokens if by_teacher else self.num_prompt_tokens
        num = self.num_rollouts
        return SampledTokens(num_prompt_tokens + num * num_tokens, num, num_scoring_tokens=num)

    def num_batch_tokens(self, num_tokens: int) -> int:
        """Return the tokens of a batch of completions of this length; a datum has no input for its last token."""
        return self.num_prompt_tokens + self.num_rollouts * (num_tokens - 1)


@dataclass
class Bill:
    """Tokens of training passes and of samplers, by part of the run and base model."""

    prices: PriceList
    _train: dict[tuple[str, str], int] = field(default_factory=dict)
    _sampled: dict[tuple[str, str], SampledTokens] = field(default_factory=dict)

    def add(self, part: str, model: str, tokens: SampledTokens, times: float = 1) -> None:
        """Count the tokens of a sampler, `times` over."""
        self._sampled[part, model] = self._sampled.get((part, model), SampledTokens()) + tokens.times(times)

    def add_probe(self, config: TrainConfig, teacher: TeacherConfig) -> None:
        """Count the request that checks whether the first teacher's service can score the end of a sequence alone."""
        if config.prompt_logprobs_last_n == "auto":
            self.add("teachers", teacher_model(config, teacher), SampledTokens(3, 1, num_scoring_tokens=1))

    def add_training(self, part: str, model: str, num_tokens: int) -> None:
        """Count the tokens of passes of a training client."""
        self._train[part, model] = self._train.get((part, model), 0) + num_tokens

    @property
    def parts(self) -> list[str]:
        """Parts in the order in which they were added."""
        return list(dict.fromkeys(part for part, _ in (*self._train, *self._sampled)))

    def costs(self, *parts: str) -> TokenCosts:
        """Return the tokens of the parts with their price, which is None if the price of one part is unknown."""
        usds: list[float | None] = []
        num_train_tokens, sampled = 0, SampledTokens()
        for key in dict.fromkeys((*self._train, *self._sampled)):
            part, model = key
            if part in parts:
                num_of_key, sampled_of_key = self._train.get(key, 0), self._sampled.get(key, SampledTokens())
                usds.append(self.prices.usd(model, num_of_key, sampled_of_key))
                num_train_tokens += num_of_key
                sampled += sampled_of_key
        known = [usd for usd in usds if usd is not None]
        return TokenCosts(num_train_tokens, sampled, sum(known) if len(known) == len(usds) else None)


def ranges(low: Bill, high: Bill) -> tuple[TokenCosts, TokenCosts, dict[str, CostRange]]:
    """Return the bounds of the whole cost, and of each part that has a cost."""
    parts = {part: CostRange(low.costs(part), high.costs(part)) for part in high.parts}
    parts = {part: bounds for part, bounds in parts.items() if _has_tokens(bounds.high)}
    return low.costs(*low.parts), high.costs(*high.parts), parts


def _has_tokens(costs: TokenCosts) -> bool:
    return costs.num_train_tokens > 0 or costs.sampled != SampledTokens()


def teacher_model(config: TrainConfig, teacher: TeacherConfig) -> str:
    """Return the base model of a teacher, which its checkpoint determines if the config does not.

    Raises:
        ConfigError: The checkpoint does not exist.
    """
    return teacher.model or find_checkpoint(teacher.checkpoint, storage_of(config)).model or config.model


def reference_model(config: TrainConfig) -> str:
    """Return the base model whose price a config's reference has; for a `tinker://` path, assume the trained model."""
    name = config.reference
    return config.model if name == BASE_MODEL or name.startswith(SERVICE_PATH) else name


def total(sizes: Iterable[GroupSizes]) -> GroupSizes:
    """Return the sums of several sizes."""
    result = GroupSizes()
    for part in sizes:
        result = result.plus(part)
    return result


def measure(groups: Sequence[EnvGroupBuilder]) -> GroupSizes:
    """Measure groups by the prompt of their first rollout, because the rollouts of a group share a problem."""
    return asyncio.run(_measure(groups))


async def _measure(groups: Sequence[EnvGroupBuilder]) -> GroupSizes:
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
        of_prompts = (num * prompt.length, (num - 1) * prompt.length, num * shown.length)
        sizes = sizes.plus(GroupSizes(num, *of_prompts, *_of_rewards(group, num)))
    return sizes


def _of_rewards(group: EnvGroupBuilder, num_rollouts: int) -> tuple[str, int, int, int, int]:
    """Return the last five fields of a group's sizes."""
    if isinstance(group, RewardModelGroupBuilder):
        model = group.reward_model.teacher.sampler.get_base_model()
        return model, num_rollouts * group.num_scored_tokens(), num_rollouts, num_rollouts, num_rollouts
    if isinstance(group, PairwisePreferenceGroupBuilder):
        tokens = verdict_tokens(group.preference_model, group.convo_prefix)
        if tokens:
            num_pairs = 2 * num_rollouts  # with the chosen answer, in both orders
            if not isinstance(group, ChosenAnswerGroupBuilder):
                num_pairs = len(get_pairs_chunked(num_rollouts, group.tournament_pattern, group.matchup_group_size))
            num_calls = num_pairs * tokens.num_calls
            num_prompt_tokens = num_pairs * tokens.num_prompt_tokens
            return tokens.model, num_prompt_tokens, 2 * num_calls, num_calls, num_pairs * tokens.max_reply_tokens
    return "", 0, 0, 0, 0


class AnswerSizes(NamedTuple):
    """Tokens of one evaluation by an evaluator that answers the problems of a file.

    Attributes:
        low, high: Tokens of answers with one token each, and with the maximum.
    """

    name: str
    is_infrequent: bool
    low: SampledTokens
    high: SampledTokens

    @classmethod
    def of(cls, entry: ConfiguredEvaluator, tokenizer: Tokenizer) -> AnswerSizes | None:
        """Measure an evaluator; return None if it does not answer the problems of a file."""
        evaluator = entry.evaluator
        if not isinstance(evaluator, SampledEvaluator):
            return None
        low, high = (evaluator.count_tokens(tokenizer, length) for length in (1, evaluator.sampling.max_tokens))
        return cls(entry.name, entry.is_infrequent, low, high)


class EvaluatorSizes(NamedTuple):
    """Tokens of the evaluators of a config.

    Attributes:
        measured: Evaluators whose answers have bounds.
        others: Names of the other evaluators.
    """

    measured: Sequence[AnswerSizes]
    others: Sequence[str]

    @classmethod
    def of(cls, evaluators: Sequence[ConfiguredEvaluator], tokenizer: Tokenizer) -> EvaluatorSizes:
        """Measure evaluators."""
        sizes = {entry.name: AnswerSizes.of(entry, tokenizer) for entry in evaluators}
        measured = [size for size in sizes.values() if size]
        return cls(measured, [name for name, size in sizes.items() if size is None])

    def at_most(self, num_often: int, num_rarely: int) -> SampledTokens:
        """Return the tokens of all evaluations of a run, if each answer has the maximum length.

        Args:
            num_often: Number of evaluations by `evaluators`.
            num_rarely: Number of evaluations by `infrequent_evaluators`.
        """
        tokens = SampledTokens()
        for entry in self.measured:
            tokens += entry.high.times(num_rarely if entry.is_infrequent else num_often)
        return tokens

    def add_to(self, bill: Bill, num_often: int, num_rarely: int, *, is_high: bool) -> None:
        """Count the answers of all evaluations of a run, with one part per evaluator; see `at_most`."""
        for entry in self.measured:
            num_times = num_rarely if entry.is_infrequent else num_often
            bill.add(entry.name, bill.prices.model, entry.high if is_high else entry.low, num_times)


@contextmanager
def estimate_session(config: ServiceConfig) -> Iterator[tuple[dict[str, Any], Tokenizer]]:
    """Open the service of a config; yield the optional arguments of builders, and the tokenizer of the model."""
    with open_service(config) as service, inline_tasks():
        service.check_model(config.model)
        with service.session() as session:
            client = open_training_client(session, "", config.model)
            assert client is not None, "the base model has a training client"
            register_tokenizer(config.model, client.get_tokenizer)
            resources = {"session": session, "base_model": config.model, "token_meter": TokenMeter()}
            yield resources, client.get_tokenizer()


@contextmanager
def estimate_session_of_run(
    config: RunConfig, builders: Mapping[str, Sequence[BuilderConfig]]
) -> Iterator[tuple[dict[str, Any], Tokenizer]]:
    """Open the service of a run's config like `estimate_session`, with the run's directory for builders.

    The directory is locked only if a builder takes it, as builders of generated data do.

    Args:
        builders: Builders of the run's data by config field.
    """
    directory = storage_of(config).run_directory(config.run_name)
    with estimate_session(config) as (resources, tokenizer):
        is_taken = any(
            takes(field, entry.builder, entry.params, "directory")
            for field, of_field in builders.items()
            for entry in of_field
        )
        with open_workers(), directory if is_taken else nullcontext():
            yield resources | {"directory": directory}, tokenizer


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """Run with a recorded cost, whether it has finished, was interrupted, or is in progress.

    Attributes:
        name: Name of the run.
        num_steps: Steps whose metrics are recorded; 0 for an evaluation.
        costs: Recorded tokens with the prices that the config has now.
        is_stopped: Whether the budget or a guard stopped it early.
    """

    name: str
    num_steps: int
    costs: TokenCosts
    is_stopped: bool

    def scaled_to(self, num_steps: int) -> TokenCosts:
        """Return the cost of `num_steps` steps, at the mean cost per step.

        The cost of evaluations is scaled, too, so this run must be at least as long as the period between evaluations.
        """
        factor = num_steps / self.num_steps
        sampled = SampledTokens(*(round(count * factor) for count in astuple(self.costs.sampled)))
        usd = None if self.costs.usd is None else self.costs.usd * factor
        return TokenCosts(round(self.costs.num_train_tokens * factor), sampled, usd)


def schedule_of(config: TrainConfig, steps_per_epoch: int) -> Schedule:
    """Return the schedule of a whole run; a fork starts at the step of the checkpoint that it continues.

    Raises:
        ConfigError: The checkpoint does not exist, or is at or after the last step.
    """
    storage, first = storage_of(config), 0
    directory = storage.run_directory(config.run_name)
    if config.if_exists != "delete" and resumable(directory):
        first = origin_step(directory)
    elif is_fork(config):
        first = step_of(starts_of(config, storage)[0])
    schedule = Schedule(config, steps_per_epoch, first)
    check_end(config, first, schedule.num_steps)
    return schedule


def earlier_runs(config: TrackedConfig, prices: PriceList, ignored: Sequence[str] = ()) -> Iterator[EarlierRun]:
    """Yield the runs of the same config with a recorded cost, newest first.

    If a run was charged other prices than the config has now, all its tokens are priced like the trained model's.

    Args:
        ignored: Settings that may differ, in addition to those that never change the tokens of a step.
    """
    tracking = tracking_of(config)
    client = tracking.get_client()
    fields = {safe_name(key): str(value)[:MAX_PARAM_LENGTH] for key, value in changed_fields_of(config).items()}
    own_settings = _comparable(fields, ignored)
    with tracking.failures():
        name = prices.model.replace("'", "")
        for run in client.search_runs([tracking.experiment_id(client)], f"params.model = '{name}'"):
            num_train_tokens = run.data.metrics.get("cost/num_train_tokens")
            if num_train_tokens is None or _comparable(run.data.params, ignored) != own_settings:
                continue
            counts = {key: run.data.metrics.get(f"cost/{key}", 0.0) for key in asdict(SampledTokens())}
            sampled = SampledTokens(**{key: round(value) for key, value in counts.items()})
            has_same_prices = run.data.tags.get(PRICES_TAG) == digest_prices(prices.url, prices.table)
            usd = run.data.metrics.get("cost/usd") if has_same_prices else None
            if usd is None:
                usd = prices.usd(prices.model, round(num_train_tokens), sampled)
            num_steps = len(metric_values(client, run.info.run_id, "time/step"))
            costs = TokenCosts(round(num_train_tokens), sampled, usd)
            yield EarlierRun(run.info.run_name or run.info.run_id, num_steps, costs, STOPPED_TAG in run.data.tags)


def _comparable(params: Mapping[str, str], ignored: Sequence[str]) -> dict[str, str]:
    """Return the logged settings on which the cost of a step depends."""
    names = (*_FREE_FIELDS, *ignored)
    groups = tuple(f"{name}." for name in names)
    return {key: value for key, value in params.items() if key not in names and not key.startswith(groups)}
