"""Source of on-policy rollouts on the groups of any tinker-cookbook dataset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from math import fsum
from typing import Any

import tinker
import torch
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.types import RLDataset, TrajectoryGroup
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from blocks.errors import ConfigError
from blocks.tinker_internals import BackcompatSamplingClientFuture
from objectives.batch import Batch, unpack
from objectives.term import BASE
from tasks.common.builders import NO_RESOURCES, build
from tasks.common.sampling import wait_for_snapshot
from tasks.common.task import Pending, call, opaque_argument, retried_task, step_task
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.completer import SnapshotCompleter
from tasks.rl.custom_completer import CompleterSpec
from tasks.rl.group_batches import GroupBatches, split
from tasks.rl.group_rollout import Group, RetryWholeGroup, RewardedGroup, RolloutThreads
from tasks.rl.named_rewards import NamedRewards, RewardWeights
from tasks.rl.rollout_log import Transcript, make_transcript
from tasks.rl.trajectories import (
    apply_kl_penalty,
    compute_critic_metrics,
    compute_group_metrics,
    compute_policy_metrics,
    compute_post_kl,
    count_tokens,
    pack_groups,
)
from tasks.training.batch_source import BatchSource, SampledTokens, TrainedBatch
from tasks.training.held_out import EvaluatedBatch
from tasks.training.reference import Reference, load_reference, score_sequences, scored_tokens

_CLIPPED = f"term/{BASE}/clip_fraction"


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Settings of rollouts.

    Attributes:
        seed: seed of the run.
        max_tokens: maximum tokens per turn.
        temperature: sampling temperature.
        strategy: retries of failed rollouts.
        shape: settings of advantages.
        completer: completer of the user; None for the service's sampling.
    """

    seed: int
    max_tokens: int
    temperature: float
    strategy: RetryWholeGroup
    shape: AdvantageSettings
    completer: CompleterSpec | None = None

    def policy(self, sampler: tinker.SamplingClient, *key: int) -> SnapshotCompleter:
        """Completer of a snapshot; the run's seed and `key` determine its seeds."""
        return SnapshotCompleter(sampler, self.max_tokens, self.temperature, (self.seed, *key), custom=self.completer)


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
        show: callback that gets the step and its transcript after the step, or None.
        measures_post_kl: score the sampled tokens again after the update of their step.
    """

    sampled = True
    reference: Reference | None = None
    rewards: NamedRewards | None = None
    show: Callable[[int, Transcript], None] | None = None
    measures_post_kl: bool = False

    def __init__(
        self,
        train: RLDataset,
        test: RLDataset | None,
        tokenizer: Tokenizer,
        settings: RolloutSettings,
        minibatches: MinibatchSettings,
    ) -> None:
        self.problems = GroupBatches(train, minibatches.groups_per_batch)
        self.test = test
        self.num_minibatches = minibatches.num_minibatches
        self.tokenizer, self.settings, self.num_parts = tokenizer, settings, minibatches.num_parts
        self._threads = RolloutThreads()
        # One thread waits for the groups of a step while the other starts those of the next. A wait is always for
        # groups that an earlier call of this pool started, so the pool cannot deadlock.
        self._gathering = ThreadPoolExecutor(max_workers=2, thread_name_prefix="gather")
        # Groups of each step by minibatch; the metrics of a step are computed after the next step has started.
        self._groups: dict[int, list[list[Group]]] = {}
        self._distances: dict[int, list[float]] = {}
        self._sampled = SampledTokens()
        # Client of the run, and the newest snapshot with the step that starts from its weights.
        self._client: tinker.TrainingClient | None = None
        self._snapshot: tuple[int, BackcompatSamplingClientFuture] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return self.problems.num_steps

    def begin(self, step: int, num_steps: int, state: Mapping[str, Any]) -> None:
        if self.rewards:
            self.rewards.begin(num_steps, state.get("rewards", {}))

    def state(self, step: int) -> dict[str, Any]:
        return {"rewards": self.rewards.state(step)} if self.rewards else {}

    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """Take a snapshot of the weights and roll out the groups of a step, each as a task.

        Minibatches have fixed groups, independent of the order of completion, so that a resumed run repeats them.
        """
        self.start_rewards(step)
        snapshot = self.take_snapshot(step, client)
        builders = self.problems.at(step)
        parts = split(len(builders), self.num_parts)

        def start() -> list[Pending[Group]]:
            sampler = wait_for_snapshot(snapshot)
            return [
                self._threads.start(
                    builder, self.settings.policy(sampler, step, index), self.settings.strategy, step, index
                )
                for index, builder in enumerate(builders)
            ]

        rollouts = self._gathering.submit(copy_context().run, start)

        def wait(part: range) -> list[Group]:
            return [rollouts.result()[index].result() for index in part]

        return [self.start_gathering(step, partial(wait, part)) for part in parts]

    def take_snapshot(self, step: int, client: tinker.TrainingClient) -> BackcompatSamplingClientFuture:
        """Request a snapshot of the weights after all updates before a step."""
        self._client, snapshot = client, client.save_weights_and_get_sampling_client()
        self._snapshot = (step, snapshot)
        return snapshot

    def start_rewards(self, step: int) -> None:
        """Fix the weights of the named rewards of a step; the groups of the step before are complete."""
        if self.rewards:
            self.rewards.start(step)

    def start_gathering(self, step: int, wait: Callable[[], list[Group]]) -> Pending[Batch]:
        """Start to build a minibatch from the groups that `wait` returns."""
        minibatch_groups: list[Group] = []
        self._groups.setdefault(step, []).append(minibatch_groups)

        def gather_groups() -> Batch:
            groups = wait()
            minibatch_groups.extend(groups)
            return self.gather(step, groups)

        return self._gathering.submit(copy_context().run, gather_groups)

    def gather(self, step: int, groups: Sequence[Group]) -> Batch:
        """Build a minibatch of a step from its groups, with the KL penalty if there is a reference."""
        mix = self.rewards.take(step, groups) if self.rewards else None
        batch = call(gather, opaque_argument(groups), self.settings.shape, self.tokenizer, mix)
        if self.reference is None:
            return batch
        shape, reference_DT = self.settings.shape, call(load_reference, self.reference, opaque_argument(batch), step)
        batch, distance = apply_kl_penalty(batch, reference_DT, shape.kl_coefficient, shape.kl_discount_factor)
        self._distances.setdefault(step, []).append(distance)
        return batch

    def metrics(self, step: int, trained: Sequence[TrainedBatch], terms: Mapping[str, float]) -> dict[str, float]:
        parts = self._groups.pop(step)
        groups = [group for part in parts for group in part]
        self._sampled += count_tokens(groups)
        if self.show:
            self.show(step, make_transcript(parts, trained, terms))
        distances = self._distances.pop(step, [])
        return (
            compute_group_metrics(groups)
            | self.policy_metrics(trained, terms)
            | (self.rewards.metrics(step, parts, self.settings.shape) if self.rewards else {})
            | ({"kl_policy_base": fsum(distances) / len(distances)} if distances else {})
            | (self._measure_post_kl(step, trained) if self.measures_post_kl else {})
        )

    def policy_metrics(self, trained: Sequence[TrainedBatch], terms: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the trained policy and of the value baseline."""
        return (
            compute_policy_metrics(trained)
            | compute_critic_metrics(trained)
            | {"policy_loss": terms["loss/base"]}
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
        logprobs = iter(call(score_again, wait_for_snapshot(snapshot), opaque_argument(sequences)))
        self._sampled += scored_tokens(sum(sequence.length - 1 for sequence in sequences), len(sequences))
        return compute_post_kl(trained, [torch.cat([next(logprobs) for _ in part]) for part in sequences_M])

    def take_sampled(self) -> SampledTokens:
        sampled, self._sampled = self._sampled, SampledTokens()
        return sampled

    def close(self) -> None:
        self._threads.close()
        self._gathering.shutdown(wait=False, cancel_futures=True)


class HeldOutEnvironments(SamplingClientEvaluator):
    """Evaluator of held-out groups with the run's rollout settings; the metrics are `test/env/...`."""

    def __init__(self, dataset: RLDataset, settings: RolloutSettings, tokenizer: Tokenizer) -> None:
        self._evaluator = RLTestSetEvaluator(dataset, settings.max_tokens, strategy=settings.strategy)
        self._groups = [RewardedGroup(builder) for builder in self._evaluator.env_group_builders_P]
        self._evaluator.env_group_builders_P[:] = self._groups
        self._settings, self._tokenizer = settings, tokenizer
        self._batch_size = len(dataset.get_batch(0))
        self.evaluated: Sequence[EvaluatedBatch] = ()

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        # All groups share this completer, so their seeds must also depend on the prompt.
        metrics = await self._evaluator.eval_token_completer(
            replace(self._settings.policy(sampling_client), by_prompt=True)
        )
        groups = [trajectories for group in self._groups if (trajectories := group.take_group())]
        batches = [groups[start : start + self._batch_size] for start in range(0, len(groups), self._batch_size)]
        self.evaluated = [self._pack(batch) for batch in batches]
        return metrics

    def _pack(self, groups: Sequence[TrajectoryGroup]) -> EvaluatedBatch:
        shape = replace(self._settings.shape, drop_constant=False)
        batch = pack_groups([Group((), trajectories, ()) for trajectories in groups], shape, self._tokenizer)
        assert batch.sampling_logprobs_DT is not None
        return EvaluatedBatch(batch, batch.sampling_logprobs_DT)


def build_environments(
    builder: str, params: Mapping[str, Any], tokenizer: Tokenizer, resources: Mapping[str, Any] = NO_RESOURCES
) -> tuple[RLDataset, RLDataset | None]:
    """Construct an `RLDatasetBuilder` by import path; return its training groups and its held-out groups.

    Args:
        resources: open resources of the run for builders with matching parameters; see `build`.

    Raises:
        ConfigError: the builder does not exist, rejects its parameters or cannot read its problems.
    """
    train, test = build("environment", builder, params, tokenizer, lambda instance: asyncio.run(instance()), resources)
    if len(train) == 0:
        raise ConfigError("The environments have no full batch: add problems or reduce batch_size.")
    return train, test


def _datums_of(batch: Batch) -> Iterator[tuple[tinker.Datum, Tensor]]:
    """Datums of a batch with their targets."""
    return zip(batch.datums, unpack(batch.target_tokens_DT, batch.offsets_D), strict=True)


@retried_task(name="post_kl")
def score_again(sampler: tinker.SamplingClient, sequences: Sequence[tinker.ModelInput]) -> list[Tensor]:
    """Return the logprobs of all tokens but the first of each sequence under the weights after an update.

    Raises:
        ServiceError: the service failed.
    """
    return score_sequences(sampler, sequences, "score the samples after the update")


@step_task(name="batch")
def gather(
    groups: Sequence[Group], shape: AdvantageSettings, tokenizer: Tokenizer, mix: RewardWeights | None = None
) -> Batch:
    """Pack the groups of a minibatch."""
    return pack_groups(groups, shape, tokenizer, mix)
