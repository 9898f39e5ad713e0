"""Source of on-policy rollouts on the groups of any tinker-cookbook dataset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from math import fsum
from statistics import fmean
from threading import Event
from typing import Any, TypeVar

import tinker
import torch
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, TrajectoryGroup
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from blocks.errors import ConfigError
from blocks.terminal import print_notice
from blocks.tinker_internals import BackcompatSamplingClientFuture
from objectives.batch import Batch, unpack
from objectives.labels import MEMBER
from objectives.losses.policy.correction import Correction
from objectives.term import BASE
from objectives.term_weights.targets import TargetSpec
from tasks.common.builders import NO_RESOURCES, build
from tasks.common.prompt_scores import supports_last_n
from tasks.common.sampling import wait_for_snapshot
from tasks.common.task import Pending, call, opaque_argument, retried_task, step_task
from tasks.evaluation.grading_metrics import digest_problems
from tasks.rl.advantages import AdvantageSettings, fit_critic
from tasks.rl.critic import Critic
from tasks.rl.group_batches import GroupBatches, split
from tasks.rl.health import REWARD, HealthWatch
from tasks.rl.mismatch import compute_mismatch_metrics
from tasks.rl.named_rewards import NamedRewards, RewardWeights, weighted_groups
from tasks.rl.oversampling import Oversampling, OversamplingRecord, compute_oversampling_metrics
from tasks.rl.rollouts.completer import SnapshotCompleter
from tasks.rl.rollouts.custom_completer import CompleterSpec
from tasks.rl.rollouts.group_progress import GroupProgress, TokenCounter
from tasks.rl.rollouts.group_rollout import (
    Group,
    HeldOutStrategy,
    RetryWholeGroup,
    RewardedGroup,
    RolloutThreads,
    RunningGroup,
)
from tasks.rl.rollouts.hang_watch import HangWatch
from tasks.rl.rollouts.sampling_distribution import MAX_MEAN_ERROR, SamplingDistribution, check_service
from tasks.rl.rollouts.truncation import is_truncated
from tasks.rl.trajectories import (
    apply_kl_penalty,
    can_teach,
    compute_critic_metrics,
    compute_group_metrics,
    compute_logprob_errors,
    compute_mean_kl,
    compute_policy_metrics,
    compute_post_kl,
    count_tokens,
    first_error,
    groups_to_pack,
    has_several_turns,
    has_trained_tokens,
    pack_groups,
    rollouts_of,
)
from tasks.rl.transcripts.rollout_log import Transcript, make_transcript
from tasks.training.batch_source import BatchSource, MetricWarning, SampledTokens, TrainedBatch
from tasks.training.held_out import EvaluatedBatch, GradedMetrics
from tasks.training.reference import Reference, load_reference, score_sequences, scored_tokens
from tasks.training.tracking.metric_names import safe_name

T = TypeVar("T")

_CLIPPED = f"term/{BASE}/clip_fraction"
# Policy part of a base loss with further parts, such as an entropy or a penalty.
_POLICY_PART = f"term/{BASE}/policy"


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Settings of rollouts.

    Attributes:
        seed: seed of the run.
        max_tokens: maximum tokens per turn.
        distribution: temperature, top-k and top-p of the samples.
        strategy: retries of failed rollouts.
        shape: settings of advantages.
        completer: completer of the user; None for the service's sampling.
        mask_truncated: train on no rollout whose last completion reached the token limit.
        refill_rounds: maximum rounds in which the next groups of the data replace groups that teach nothing.
        oversampling_factor: started groups per trained group; the slowest ones are cancelled.
    """

    seed: int
    max_tokens: int
    distribution: SamplingDistribution
    strategy: RetryWholeGroup
    shape: AdvantageSettings
    completer: CompleterSpec | None = None
    mask_truncated: bool = False
    refill_rounds: int = 0
    oversampling_factor: float = 1.0

    def with_service_logprobs(self) -> RolloutSettings:
        """Return the settings with the logprobs that the service returns, whatever the distribution."""
        return replace(self, distribution=replace(self.distribution, logprobs="service"))

    def policy(self, sampler: tinker.SamplingClient, *key: int, merges: bool = True) -> SnapshotCompleter:
        """Completer of a snapshot; the run's seed and `key` determine its seeds."""
        return SnapshotCompleter(
            sampler, self.max_tokens, self.distribution, (self.seed, *key), custom=self.completer, merges=merges
        )


@dataclass(frozen=True, slots=True)
class MinibatchSettings:
    """Split of a step's groups into updates and minibatches.

    Attributes:
        groups_per_batch: groups per step; None for the batches of the dataset.
        num_substeps: consecutive updates per step.
        num_minibatches: minibatches per update, each trained on as soon as its groups are complete.
    """

    groups_per_batch: int | None = None
    num_substeps: int = 1
    num_minibatches: int = 1

    @property
    def num_parts(self) -> int:
        """Number of minibatches per step."""
        return self.num_substeps * self.num_minibatches


class RolloutSource(BatchSource):
    """Source of rollouts that are sampled from the weights at the start of each step.

    Attributes:
        problems: groups of each step.
        test: held-out groups, or None.
        reference: reference of the KL penalty, or None for no penalty.
        rewards: named rewards, or None to train on the environments' total reward.
        health: watch of the metrics, or None for no warnings.
        correction: correction of the base loss, for its metrics; None for no correction.
        show: callback that gets the step and its transcript after the step, or None.
        measures_post_kl: score the sampled tokens again after the update of their step.
        scores_last_n: request these scores only from the first sampled token on (`prompt_logprobs_last_n`), if the
            service can.
        oversampling: stored groups of the run; None without over-sampling.
    """

    sampled = True
    reference: Reference | None = None
    rewards: NamedRewards | None = None
    health: HealthWatch | None = None
    correction: Correction | None = None
    show: Callable[[int, Transcript], None] | None = None
    measures_post_kl: bool = False
    scores_last_n: bool = False
    oversampling: OversamplingRecord | None = None

    def __init__(
        self,
        train: RLDataset,
        test: RLDataset | None,
        tokenizer: Tokenizer,
        settings: RolloutSettings,
        minibatches: MinibatchSettings,
    ) -> None:
        super().__init__()
        self.problems = GroupBatches(
            train,
            minibatches.groups_per_batch,
            can_refill=settings.refill_rounds > 0,
            num_parts=minibatches.num_parts,
            oversampling_factor=settings.oversampling_factor,
        )
        self.test = test
        self.num_minibatches = minibatches.num_minibatches
        self.tokenizer, self.settings, self.num_parts = tokenizer, settings, minibatches.num_parts
        self._threads = RolloutThreads()
        # One thread waits for the groups of a step while the other starts those of the next. A wait is always for
        # groups that an earlier call of this pool started, so the pool cannot deadlock.
        self._gathering = ThreadPoolExecutor(max_workers=2, thread_name_prefix="gather")
        # Groups of each step by minibatch; the metrics of a step are computed after the next step has started.
        self._groups: dict[int, list[list[Group]]] = {}
        self._passed_over: list[tuple[list[list[Group]], Oversampling | None]] = []
        self._distances: dict[int, list[float]] = {}
        self._oversampled: dict[int, Oversampling] = {}
        self._sampled = SampledTokens()
        # All tokens of rollouts so far, and those that belong to trained steps.
        self._counter, self._counted = TokenCounter(), SampledTokens()
        self._is_checked = False
        self._is_closed = False
        self._has_scored = False
        self._first_step = 0
        self._has_warned_of_failure = False
        # True once a rollout has taken several turns.
        self._has_several_turns = False
        # Critics of the newest steps, each fitted on the steps before; empty without a critic.
        self._critics: dict[int, Critic] = {}
        # Newest step that is loaded, and the number of groups that refills took before it.
        self._refilled_before = (-1, 0)
        # Client of the run, and the newest snapshot with the step that starts from its weights.
        self._client: tinker.TrainingClient | None = None
        self._snapshot: tuple[int, BackcompatSamplingClientFuture] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return self.problems.num_steps

    def begin(self, step: int, num_steps: int, state: Mapping[str, Any]) -> None:
        self._first_step = step
        self.problems.num_refilled = state.get("num_refilled", 0)
        self._has_several_turns = state.get("has_several_turns", False)
        if self.rewards:
            self.rewards.begin(num_steps, state.get("rewards", {}))
        if self.health:
            self.health.restore(state.get("health", {}))
        if critic := self.settings.shape.critic:
            self._critics = {step: critic.restored(state.get("critic", {}))}

    def state(self, step: int) -> dict[str, Any]:
        loaded, num_refilled = self._refilled_before
        refilled = {"num_refilled": num_refilled if loaded == step else self.problems.num_refilled}
        return (
            ({"rewards": self.rewards.state(step)} if self.rewards else {})
            | ({"health": self.health.state()} if self.health else {})
            | ({"critic": critic.state()} if (critic := self._critic_at(step)) else {})
            | (refilled if self.settings.refill_rounds else {})
            | ({"has_several_turns": True} if self._has_several_turns else {})
        )

    def observe(self, step: int, metrics: Mapping[str, float]) -> Sequence[MetricWarning]:
        return self.health.observe(step, metrics) if self.health else ()

    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """Take a snapshot of the weights and roll out the groups of a step, each as a task.

        Minibatches have fixed groups, independent of the order of completion, so that a resumed run repeats them. With
        over-sampling, they take the groups that finish first, which the run stores (`Oversampling`).
        """
        self.start_step(step)
        snapshot = self.take_snapshot(step, client)
        self._refilled_before = (step, self.problems.num_refilled)
        builders = self.problems.at(step)

        def start(builders: Mapping[int, EnvGroupBuilder]) -> list[RunningGroup]:
            sampler = self.wait_for_sampler(snapshot)
            return [
                self._threads.start(builder, self.policy(sampler, step, index), self.settings.strategy, step, index)
                for index, builder in builders.items()
            ]

        parts = split(self.problems.num_trained if self.oversampling else len(builders), self.num_parts)
        if self.oversampling:
            sizes = [len(part) for part in parts]
            oversampling = Oversampling(step, builders, sizes, start, self.oversampling)
            self._oversampled[step] = oversampling
            self._submit(oversampling.begin)
            gather = oversampling.take
        else:
            rollouts = self._submit(start, dict(enumerate(builders)))

            def gather(number: int) -> list[Group]:
                return [rollouts.result()[index].pending.result() for index in parts[number]]

        refill = _Refill(self, step, start, len(builders), len(parts))

        def wait(number: int) -> list[Group]:
            if not self.settings.refill_rounds:
                return gather(number)
            return refill.complete(number, len(parts[number]), partial(gather, number))

        return self.start_gathering(step, [partial(wait, number) for number in range(len(parts))])

    def watch_hangs(self, hangs: HangWatch) -> None:
        """Watch the groups of the steps that are loaded from now on."""
        self._threads.hangs = hangs

    def policy(self, sampler: tinker.SamplingClient, *key: int) -> SnapshotCompleter:
        """Completer of a group; once a rollout has taken several turns, members do not wait for each other's turns."""
        policy = self.settings.policy(sampler, *key, merges=not self._has_several_turns)
        return replace(policy, progress=GroupProgress(self._counter))

    def can_teach(self, group: Group) -> bool:
        """Check whether the newest step can train on a group; see `can_teach`."""
        mix = self.rewards.current if self.rewards else None
        return can_teach(group, mix, self.settings.shape, mask_truncated=self.settings.mask_truncated)

    def take_snapshot(self, step: int, client: tinker.TrainingClient) -> BackcompatSamplingClientFuture:
        """Request a snapshot of the weights after all updates before a step."""
        self._client, snapshot = client, client.save_weights_and_get_sampling_client()
        self._snapshot = (step, snapshot)
        return snapshot

    def wait_for_sampler(self, snapshot: BackcompatSamplingClientFuture) -> tinker.SamplingClient:
        """Wait for a snapshot; check the service's logprobs with the first one of the run.

        Raises:
            ConfigError: the logprobs of samples cannot be computed; see `check_service`.
            ServiceError: the service failed.
        """
        sampler = wait_for_snapshot(snapshot)
        if not self._is_checked and self.settings.completer is None:
            check_service(sampler, self.tokenizer, self.settings.distribution)
        self._is_checked = True
        return sampler

    def start_step(self, step: int) -> None:
        """Fit the critic on the groups of the step before, and set the weights of the named rewards of a step."""
        self.fit_critic(step - 1)
        if self.rewards:
            self.rewards.start(step)

    def fit_critic(self, step: int) -> None:
        """Fit the critic of step + 1 on the complete groups of a step, unless that critic exists."""
        critic = self._critic_at(step)
        if critic is None or step not in self._groups or step + 1 in self._critics:
            return
        groups = [group.trajectories for part in self._groups[step] for group in part if group.trajectories is not None]
        weighted = weighted_groups(groups, self.rewards.weights_at(step)) if self.rewards else groups
        self._critics = {step: critic, step + 1: fit_critic(weighted, self.settings.shape, critic)}

    def skip(self, step: int) -> None:
        if critic := self._critic_at(step):
            self._critics = {step: critic, step + 1: critic}
        if self.rewards:
            self.rewards.skip(step)
        # Minibatches of the step may still be gathered, so their tokens are counted at the next step.
        self._passed_over.append((self._groups.pop(step, []), self._oversampled.pop(step, None)))
        self._distances.pop(step, None)

    def _count_passed_over(self) -> None:
        """Count the tokens of the steps whose updates were skipped."""
        for parts, oversampling in self._passed_over:
            self.count(count_tokens([group for part in parts for group in part]))
            if oversampling and oversampling.cancelled and not oversampling.is_repeated:
                self.count(oversampling.cancelled.sampled)
        self._passed_over = []

    def _critic_at(self, step: int) -> Critic | None:
        """Critic that is fitted on the steps before a step; None without a critic."""
        # A step that is skipped after a restart is not loaded and has no critic; the critic before it still holds.
        newest = max((known for known in self._critics if known <= step), default=None)
        return None if newest is None else self._critics[newest]

    def start_gathering(self, step: int, waits: Sequence[Callable[[], list[Group]]]) -> list[Pending[Batch]]:
        """Start to build the minibatches of a step, each from the groups that one of `waits` returns.

        A KL penalty is relative to the mean KL of the step, so its minibatches wait for each other. In a stream of
        minibatches, it is relative to the mean of the minibatch, as in tinker-cookbook.
        """
        self._groups[step] = minibatches_groups = [list[Group]() for _ in waits]

        def gather_groups(index: int) -> Batch:
            groups = waits[index]()
            minibatches_groups[index].extend(groups)
            return self.gather(step, groups)

        def gather_alone(index: int) -> Batch:
            scored = self._score(step, gather_groups(index))
            return self._penalize(step, [minibatches_groups[index]], [scored])[0]

        if self.reference is None:
            return [self._submit(gather_groups, index) for index in range(len(waits))]
        if self.num_minibatches > 1 or len(waits) == 1:
            return [self._submit(gather_alone, index) for index in range(len(waits))]
        scored = [
            self._submit(lambda index: self._score(step, gather_groups(index)), index) for index in range(len(waits))
        ]
        penalized = self._submit(
            lambda: self._penalize(step, minibatches_groups, [minibatch.result() for minibatch in scored])
        )
        return [self._submit(lambda index: penalized.result()[index], index) for index in range(len(waits))]

    def _submit(self, function: Callable[..., T], *arguments: object) -> Future[T]:
        return self._gathering.submit(copy_context().run, function, *arguments)

    def gather(self, step: int, groups: Sequence[Group]) -> Batch:
        """Build a minibatch of a step from its groups.

        Raises:
            ConfigError: see `pack_groups` and `check_errors`.
            concurrent.futures.CancelledError: the source is closed, so the groups may be incomplete.
        """
        if self._is_closed:
            raise CancelledError("the run is closed")
        if step == self._first_step:
            check_errors(groups, self.settings.distribution)
        self._has_several_turns = self._has_several_turns or has_several_turns(groups)
        mix = self.rewards.record(step, groups) if self.rewards else None
        shape = replace(self.settings.shape, critic=self._critic_at(step))
        masks = self.settings.mask_truncated
        return call(gather, opaque_argument(groups), opaque_argument(shape), self.tokenizer, mix, masks)

    def _score(self, step: int, batch: Batch) -> tuple[Batch, Tensor]:
        """Return a minibatch with the reference's logprobs."""
        assert self.reference is not None
        return batch, call(load_reference, self.reference, opaque_argument(batch), step)

    def _penalize(
        self, step: int, minibatches: Sequence[Sequence[Group]], scored: Sequence[tuple[Batch, Tensor]]
    ) -> list[Batch]:
        """Add the KL penalty to minibatches with the reference's logprobs, relative to their common mean.

        A minibatch whose rollouts are all masked has a rollout only because a batch needs one: it gets no penalty.
        """
        shape = self.settings.shape
        penalized = [not self._masks_all(step, groups) for groups in minibatches]
        trained = list(compress(scored, penalized))
        if not trained:
            return [batch for batch, _ in scored]
        mean = compute_mean_kl([batch for batch, _ in trained], [reference_DT for _, reference_DT in trained])
        self._distances.setdefault(step, []).append(mean)
        return [
            apply_kl_penalty(batch, reference_DT, shape.kl_coefficient, shape.kl_discount_factor, mean)[0]
            if is_penalized
            else batch
            for is_penalized, (batch, reference_DT) in zip(penalized, scored, strict=True)
        ]

    def _masks_all(self, step: int, groups: Sequence[Group]) -> bool:
        if not self.settings.mask_truncated:
            return False
        mix = self.rewards.weights_at(step) if self.rewards else None
        packed = [groups[number] for number in groups_to_pack(groups, mix, self.settings.shape)]
        return all(is_truncated(trajectory) for trajectory, _ in rollouts_of(packed))

    def metrics(self, step: int, trained: Sequence[TrainedBatch], terms: Mapping[str, float]) -> dict[str, float]:
        self.fit_critic(step)
        self._count_passed_over()
        parts = self._groups.pop(step)
        groups = [group for part in parts for group in part]
        self.count(count_tokens(groups))
        self._warn_of_failure(step, groups)
        if self.show:
            self.show(step, make_transcript(parts, trained, terms))
        distances = self._distances.pop(step, [])
        return (
            compute_group_metrics(groups)
            | self._cancelled_metrics(step, groups)
            | self._use_metrics(step, groups)
            | ({"critic/num_turns": critic.num_turns} if (critic := self._critic_at(step)) else {})
            | self.policy_metrics(trained, terms)
            | (self.rewards.metrics(step, parts, self.settings.shape) if self.rewards else {})
            | ({"kl_policy_base": fsum(distances) / len(distances)} if distances else {})
            | (self._measure_post_kl(step, trained) if self.measures_post_kl else {})
            | self._limit_metrics(step, groups)
        )

    def _warn_of_failure(self, step: int, groups: Sequence[Group]) -> None:
        """Warn of the first group of this process that failed."""
        failed = [group for group in groups if group.trajectories is None and group.errors]
        if failed and not self._has_warned_of_failure:
            self._has_warned_of_failure = True
            self._warnings["rollout.failed"] = (
                f"A group of step {step} failed in all attempts and is not trained on ({first_error(failed)}): check "
                "the environment, or accept smaller groups by rollout.min_successful. The metrics rollout_errors/... "
                "count all failures."
            )

    def _cancelled_metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Count the tokens of cancelled groups and return their metrics; empty without over-sampling."""
        oversampling = self._oversampled.pop(step, None)
        if oversampling is None:
            return {}
        cancelled = oversampling.cancelled
        assert cancelled is not None, "the last minibatch of the step has cancelled the other groups"
        if not oversampling.is_repeated:
            self.count(cancelled.sampled)
        return compute_oversampling_metrics(groups, cancelled)

    def _use_metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Return the share of dropped groups and groups sampled per trained group; empty without `drop_constant`."""
        if not self.settings.shape.drop_constant:
            return {}
        mix = self.rewards.weights_at(step) if self.rewards else None
        num_trained = sum(
            can_teach(group, mix, self.settings.shape, mask_truncated=self.settings.mask_truncated) for group in groups
        )
        return {
            "rollout/discarded": 1 - num_trained / len(groups),
            "rollout/groups_per_trained": len(groups) / max(num_trained, 1),
        }

    def _limit_metrics(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Return the shares of rollouts that lost their reward at a limit, or are masked because they are truncated."""
        rollouts, metrics = list(rollouts_of(groups)), dict[str, float]()
        termination = self.settings.strategy.termination
        if termination and termination.zero_reward_on_limit:
            lowered = fmean("zero_reward_on_limit" in rollout_metrics for _, rollout_metrics in rollouts)
            metrics["rollout/zero_reward_on_limit"] = lowered
            if step == self._first_step and all(trajectory.stop_reason is None for trajectory, _ in rollouts):
                self._warnings["rollout.termination"] = (
                    "rollout.termination.zero_reward_on_limit has no effect so far, because the environment has "
                    "reported no stop reason in the first step: report stop/REASON in the metrics of the last turn, or "
                    "remove zero_reward_on_limit."
                )
        if self.settings.mask_truncated:
            masked = metrics["rollout/masked"] = fmean(is_truncated(trajectory) for trajectory, _ in rollouts)
            if masked == 1:
                self._warnings["rollout.masked"] = (
                    f"rollout.truncated masks all rollouts of step {step}, so their rewards teach nothing: raise "
                    "rollout.max_tokens, or penalize long completions instead."
                )
        return metrics

    @property
    def targets(self) -> Mapping[str, TargetSpec]:
        return self.rewards.targets if self.rewards else {}

    def pop_warnings(self) -> dict[str, str]:
        missing = self.rewards.pop_warnings() if self.rewards else {}
        return super().pop_warnings() | {f"rewards.{safe_name(name)}": text for name, text in missing.items()}

    def policy_metrics(self, trained: Sequence[TrainedBatch], terms: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the trained policy and of the value baseline."""
        return (
            compute_policy_metrics(trained)
            | compute_mismatch_metrics(trained, self.correction)
            | compute_critic_metrics(trained)
            | {"policy_loss": terms.get(_POLICY_PART, terms["loss/base"])}
            | ({"clip_fraction": terms[_CLIPPED]} if _CLIPPED in terms else {})
        )

    def _measure_post_kl(self, step: int, trained: Sequence[TrainedBatch]) -> dict[str, float]:
        """Score the sampled tokens of a step with the next step's snapshot, which contains the step's updates."""
        assert self._client is not None
        assert self._snapshot is not None
        version, snapshot = self._snapshot
        if version != step + 1:  # the last step, or one before a skipped step
            snapshot = self.take_snapshot(step + 1, self._client)
        sequences_M = [
            [datum.model_input.append_int(int(targets[-1])) for datum, targets in _datums_of(minibatch.batch)]
            for minibatch in trained
        ]
        sequences = [sequence for part in sequences_M for sequence in part]
        sampler = wait_for_snapshot(snapshot)
        firsts = None
        if self._can_score_last_n(sampler):
            masks_M = [unpack(minibatch.batch.mask_DT, minibatch.batch.offsets_D) for minibatch in trained]
            firsts = [int(mask_T.int().argmax()) for masks_D in masks_M for mask_T in masks_D]
        logprobs = iter(call(score_again, sampler, opaque_argument(sequences), opaque_argument(firsts)))
        self._sampled += scored_tokens(sum(sequence.length - 1 for sequence in sequences), len(sequences))
        return compute_post_kl(trained, [torch.cat([next(logprobs) for _ in part]) for part in sequences_M])

    def _can_score_last_n(self, sampler: tinker.SamplingClient) -> bool:
        """Return whether the service scores only the last tokens; the first call asks it and warns if it does not."""
        if self.scores_last_n and not self._has_scored and not supports_last_n(sampler):
            self.scores_last_n = False
            self._warnings["prompt_logprobs_last_n"] = (
                "The service does not know prompt_logprobs_last_n, so compute_post_kl scores whole sequences: set "
                "prompt_logprobs_last_n to off, or update the service."
            )
        self._has_scored = True
        return self.scores_last_n

    def count(self, sampled: SampledTokens) -> None:
        """Count tokens of rollouts towards the steps trained so far."""
        self._sampled += sampled
        self._counted += sampled

    def take_sampled(self) -> SampledTokens:
        sampled, self._sampled = self._sampled, SampledTokens()
        return sampled

    def sampled_for(self, step: int) -> tuple[SampledTokens, SampledTokens]:
        groups = [group for part in self._groups.get(step, ()) for group in part]
        return count_tokens(groups), self._sampled + self._counter.sampled.beyond(self._counted)

    def stop_sampling(self) -> SampledTokens:
        unused = self._counter.sampled.beyond(self._counted)
        self._counted += unused
        return unused

    def close(self) -> None:
        self._is_closed = True
        for oversampling in self._oversampled.values():
            oversampling.close()
        self._threads.close()
        self._gathering.shutdown(wait=False, cancel_futures=True)


class _Refill:
    """Refills of a step: the next groups of the data, which replace groups that teach nothing.

    The minibatches take refills in their own order, whichever groups finish first, so that a resumed run takes the same
    groups.
    """

    def __init__(
        self,
        source: RolloutSource,
        step: int,
        start: Callable[[Mapping[int, EnvGroupBuilder]], list[RunningGroup]],
        num_groups: int,
        num_parts: int,
    ) -> None:
        self._source, self._step, self._start = source, step, start
        self._num_groups = num_groups  # groups of the step that are started
        self._is_complete = [Event() for _ in range(num_parts)]

    def complete(self, number: int, num_needed: int, gather: Callable[[], list[Group]]) -> list[Group]:
        """Sample further groups for a minibatch, until `num_needed` groups can teach or the rounds are over.

        Args:
            gather: waits for the minibatch's own groups. If it fails, the next minibatch does not wait for this one.

        Returns:
            All groups of the minibatch, including those that teach nothing.
        """
        source = self._source
        try:
            groups = gather()
            if number:
                self._is_complete[number - 1].wait()
            for _ in range(source.settings.refill_rounds):
                num_missing = num_needed - sum(map(source.can_teach, groups))
                if not num_missing:
                    break
                builders = source.problems.refill(self._step, num_missing)
                running = self._start(dict(enumerate(builders, start=self._num_groups)))
                self._num_groups += num_missing
                groups = [*groups, *(group.pending.result() for group in running)]
            return groups
        finally:
            self._is_complete[number].set()


class HeldOutGroups(SamplingClientEvaluator):
    """Evaluator that rolls out held-out groups.

    Attributes:
        hangs: watch of the groups; None for no watch.
        step: step before which the groups are evaluated.
        evaluated: batches of the last evaluation.
    """

    hangs: HangWatch | None = None
    step: int = 0
    evaluated: Sequence[EvaluatedBatch] = ()

    def strategy(self, of_a_group: RetryWholeGroup) -> HeldOutStrategy:
        """Return the strategy of the numbered groups of the next evaluation."""
        return HeldOutStrategy(of_a_group, self.hangs, self.step)


def number_groups(builders: Sequence[EnvGroupBuilder]) -> list[RewardedGroup]:
    """Number held-out groups, for their seeds and for warnings."""
    return [RewardedGroup(builder, number) for number, builder in enumerate(builders)]


class HeldOutEnvironments(HeldOutGroups):
    """Evaluator of held-out groups with the run's rollout settings; the metrics are `test/env/...`.

    The mean reward has a score for each group, for paired comparisons: the group's share of the sum of rewards, scaled
    so that the mean of the scores is the metric.
    """

    scored_metrics = (f"test/{REWARD}",)

    def __init__(self, dataset: RLDataset, settings: RolloutSettings, tokenizer: Tokenizer) -> None:
        self._evaluator = RLTestSetEvaluator(dataset, settings.max_tokens)
        self._groups = number_groups(self._evaluator.env_group_builders_P)
        self._evaluator.env_group_builders_P[:] = self._groups
        self._settings, self._tokenizer = settings, tokenizer
        self._batch_size = max(len(dataset.get_batch(0)), 1) if self._groups else 0
        self._has_several_turns = False

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        if not self._groups:
            raise ConfigError(
                "The held-out problems of the environments have no full batch: add problems, or set eval_every to 0."
            )
        self._evaluator.strategy = self.strategy(self._settings.strategy)
        policy = self._settings.policy(sampling_client, merges=not self._has_several_turns)
        metrics = await self._evaluator.eval_token_completer(policy)
        groups = [group for builder in self._groups if (group := builder.take_group())]
        if failed := [builder for builder in self._groups if builder.cleanup_errors]:
            error = failed[0].cleanup_errors[0]
            print_notice(
                f"warning: cleanup of {len(failed)} held-out groups failed ({error.error_type}: {error.error_message})."
            )
        self._has_several_turns = has_several_turns(groups)
        batches = [groups[start : start + self._batch_size] for start in range(0, len(groups), self._batch_size)]
        self.evaluated = [self._pack(batch) for batch in batches if any(map(has_trained_tokens, batch))]
        completed = [group.trajectories for group in groups if group.trajectories is not None]
        rewards_G = [group.get_total_rewards() for group in completed]
        share = len(rewards_G) / max(sum(map(len, rewards_G)), 1)
        problems = digest_problems(first_prompt(group) for group in completed)
        return GradedMetrics(metrics, {f"test/{REWARD}": [share * fsum(rewards) for rewards in rewards_G]}, problems)

    def _pack(self, groups: Sequence[Group]) -> EvaluatedBatch:
        shape = replace(self._settings.shape, drop_constant=False)
        batch = pack_groups(groups, shape, self._tokenizer)
        assert batch.snapshot_logprobs_DT is not None
        members_D = zip(batch.labels_D["group"].tolist(), batch.labels_D[MEMBER].tolist(), strict=True)
        trained = [group.trajectories for group in groups if group.trajectories]
        scores_D = tuple(_scores(trained[group], member) for group, member in members_D)
        return EvaluatedBatch(batch, batch.snapshot_logprobs_DT, scores_D)


def first_prompt(group: TrajectoryGroup) -> str:
    """Return the prompt of a group as text; empty if no member has taken a turn."""
    turns = [turn for trajectory in group.trajectories_G for turn in trajectory.transitions[:1]]
    return turns[0].ob.model_dump_json() if turns else ""


def _scores(group: TrajectoryGroup, member: int) -> dict[str, float]:
    """Reward of a trajectory and its parts: the metrics of its group and the sums over its turns."""
    parts: dict[str, float] = {}
    turns = [turn.metrics for turn in group.trajectories_G[member].transitions]
    for metrics in (*turns, group.metrics_G[member]):
        for name, value in metrics.items():
            parts[name] = parts.get(name, 0.0) + float(value)
    return {"reward": group.get_total_rewards()[member], **parts}


def build_environments(
    builder: str, params: Mapping[str, Any], tokenizer: Tokenizer, resources: Mapping[str, Any] = NO_RESOURCES
) -> tuple[RLDataset, RLDataset | None]:
    """Construct an `RLDatasetBuilder` by import path; return its training groups and its held-out groups.

    Args:
        resources: open resources of the run for builders with matching parameters; see `build`.

    Raises:
        ConfigError: the builder does not exist, rejects its parameters, cannot read its problems or has no full batch.
    """
    train, test = build("environment", builder, params, tokenizer, lambda instance: asyncio.run(instance()), resources)
    if len(train) == 0:
        raise ConfigError("The environments have no full batch: add problems or reduce batch_size.")
    return train, test


def _datums_of(batch: Batch) -> Iterator[tuple[tinker.Datum, Tensor]]:
    """Datums of a batch with their targets."""
    return zip(batch.datums, unpack(batch.target_tokens_DT, batch.offsets_D), strict=True)


def check_errors(groups: Sequence[Group], distribution: SamplingDistribution) -> None:
    """Check that the logprobs of the samples are exact enough to train on.

    Raises:
        ConfigError: the mean of the bounds of their errors is too large.
    """
    error = compute_logprob_errors(groups).get("rollout/logprob_error", 0.0)
    if error > MAX_MEAN_ERROR:
        raise ConfigError(
            f"The logprobs of samples of {distribution.describe()} have an error of up to {error:.2g} nats in the "
            f"mean, because the {distribution.num_requested} likeliest tokens have too little of the probability: "
            "raise rollout.num_candidates, sample with temperature 1, or set rollout.logprobs to service to train on "
            "biased logprobs."
        )


@retried_task(name="post_kl")
def score_again(
    sampler: tinker.SamplingClient, sequences: Sequence[tinker.ModelInput], firsts: Sequence[int] | None
) -> list[Tensor]:
    """Return the logprobs of all tokens but the first of each sequence under the weights after an update.

    Args:
        firsts: see `score_sequences`; earlier logprobs are NaN.

    Raises:
        ServiceError: the service failed.
    """
    return score_sequences(sampler, sequences, "score the samples after the update", firsts)


@step_task(name="batch")
def gather(
    groups: Sequence[Group],
    shape: AdvantageSettings,
    tokenizer: Tokenizer,
    mix: RewardWeights | None = None,
    mask_truncated: bool = False,
) -> Batch:
    """Pack the groups of a minibatch."""
    return pack_groups(groups, shape, tokenizer, mix, mask_truncated=mask_truncated)
