"""The environments of a run: any tinker-cookbook dataset of groups, played by the weights that a step starts from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from math import fsum
from typing import Any

import tinker
from tinker.lib.public_interfaces.backcompat_sampling_client_future import BackcompatSamplingClientFuture
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.types import RLDataset
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer

from blocks.errors import ConfigError
from objectives.batch import Batch
from objectives.regularizer import BASE
from tasks.advantages import Shape
from tasks.data import NOTHING, build
from tasks.locked import lock
from tasks.options import Pending, call, step_task, submit, whole
from tasks.policy import Policy
from tasks.problems import Problems, split
from tasks.reference import Reference, load_reference
from tasks.rollout import Group, Patient, cancel_coroutines, rollout
from tasks.service_errors import service_errors
from tasks.source import Sampled, Source, Trained
from tasks.trajectories import (
    compute_critic_metrics,
    compute_group_metrics,
    compute_policy_metrics,
    count_tokens,
    pack_groups,
    penalize_distance,
)
from tasks.transcript import Transcript, make_transcript

_CLIPPED = f"term/{BASE}/clip_fraction"
# One waits for a step's groups while another already plays those of the next.
_GATHERING = ThreadPoolExecutor(max_workers=2, thread_name_prefix="rollouts")


@dataclass(frozen=True, slots=True)
class Play:
    """How environments are played.

    Attributes:
        seed: of the run.
        max_tokens: the most that the policy says in one turn.
        temperature: of its sampling.
        strategy: what becomes of a rollout that fails.
        shape: how rewards become what is trained on.
    """

    seed: int
    max_tokens: int
    temperature: float
    strategy: Patient
    shape: Shape

    def policy(self, sampler: tinker.SamplingClient, *key: int) -> Policy:
        return Policy(sampler, self.max_tokens, self.temperature, (self.seed, *key))


@dataclass(frozen=True, slots=True)
class Cut:
    """How the groups of a step are cut up.

    Attributes:
        groups_per_batch: groups of a step; None for those of a batch of the dataset.
        num_substeps: updates of a step, one after the other.
        num_minibatches: of an update, each trained on as soon as its groups are played.
    """

    groups_per_batch: int | None = None
    num_substeps: int = 1
    num_minibatches: int = 1

    @property
    def num_parts(self) -> int:
        return self.num_substeps * self.num_minibatches


class RolloutSource(Source):
    """The environments of a run, played by the weights that each step starts from.

    Attributes:
        problems: the groups of each step.
        test: held-out groups; None without.
        reference: what the reward loses with the distance from it; None where it does not.
        show: what is done with the transcript of a step when it was trained on; None for nothing.
    """

    sampled = True
    reference: Reference | None = None
    show: Callable[[int, Transcript], None] | None = None

    def __init__(self, train: RLDataset, test: RLDataset | None, tokenizer: Tokenizer, play: Play, cut: Cut) -> None:
        self.problems = Problems(train, cut.groups_per_batch)
        self.test = test
        self.num_minibatches = cut.num_minibatches
        self.tokenizer, self.play, self.num_parts = tokenizer, play, cut.num_parts
        # A step's groups, by minibatch, are asked for once more when the next one's are played already.
        self._groups: dict[int, list[list[Group]]] = {}
        self._distances: dict[int, list[float]] = {}
        self._sampled = Sampled()

    @property
    def steps_per_epoch(self) -> int:
        return self.problems.num_steps

    def load(self, step: int, client: tinker.TrainingClient) -> Sequence[Pending[Batch]]:
        """Take a snapshot of the weights, and play the groups of a step with it, each as a task.

        A minibatch is complete with its own groups, whichever are played first: a run that is resumed cuts as it did.
        """
        snapshot = client.save_weights_and_get_sampling_client()
        builders = self.problems.of_step(step)
        parts = split(len(builders), self.num_parts)

        def start() -> list[Pending[Group]]:
            sampler = wait_for_snapshot(snapshot)
            return [
                submit(rollout, whole(each), self.play.policy(sampler, step, index), self.play.strategy, step, index)
                for index, each in enumerate(builders)
            ]

        playing = _GATHERING.submit(copy_context().run, start)

        def wait(part: range) -> list[Group]:
            return [playing.result()[index].result() for index in part]

        return [self.start_gathering(step, partial(wait, part)) for part in parts]

    def start_gathering(self, step: int, wait: Callable[[], list[Group]]) -> Pending[Batch]:
        """Start on the batch of groups that are waited for."""
        played: list[Group] = []
        self._groups.setdefault(step, []).append(played)

        def gather_groups() -> Batch:
            groups = wait()
            played.extend(groups)
            return self.gather(step, groups)

        return _GATHERING.submit(copy_context().run, gather_groups)

    def gather(self, step: int, groups: Sequence[Group]) -> Batch:
        """The batch, or one minibatch, of a step, of what became of its groups."""
        batch = call(gather, whole(groups), self.play.shape, self.tokenizer)
        if self.reference is None:
            return batch
        reference_DT = call(load_reference, self.reference, whole(batch))
        batch, distance = penalize_distance(batch, reference_DT, self.play.shape.kl_coefficient)
        self._distances.setdefault(step, []).append(distance)
        return batch

    def metrics(self, step: int, trained: Sequence[Trained], terms: Mapping[str, float]) -> dict[str, float]:
        parts = self._groups.pop(step)
        groups = [each for part in parts for each in part]
        self._sampled += count_tokens(groups)
        if self.show:
            self.show(step, make_transcript(parts, trained, terms))
        distances = self._distances.pop(step, [])
        return (
            compute_group_metrics(groups)
            | compute_policy_metrics(trained)
            | compute_critic_metrics(trained)
            | {"policy_loss": terms["loss/base"]}
            | ({"clip_fraction": terms[_CLIPPED]} if _CLIPPED in terms else {})
            | ({"kl_policy_base": fsum(distances) / len(distances)} if distances else {})
        )

    def take_sampled(self) -> Sampled:
        taken, self._sampled = self._sampled, Sampled()
        return taken

    def close(self) -> None:
        cancel_coroutines()


def wait_for_snapshot(snapshot: BackcompatSamplingClientFuture) -> tinker.SamplingClient:
    """Raises: ServiceError, the service could not take it."""
    with service_errors("take a snapshot of the weights to sample from"):
        return snapshot.result()


class HeldOutEnvironments(SamplingClientEvaluator):
    """tinker-cookbook's evaluation of held-out groups, by the run's own way to play; metrics are `test/env/...`."""

    def __init__(self, dataset: RLDataset, play: Play) -> None:
        self._evaluator = RLTestSetEvaluator(dataset, play.max_tokens, strategy=play.strategy)
        self._play = play

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        # All groups share it, and with the same draws for each would be right or wrong together.
        return await self._evaluator.eval_token_completer(replace(self._play.policy(sampling_client), by_prompt=True))


def build_environments(
    builder: str, params: Mapping[str, Any], tokenizer: Tokenizer, of_run: Mapping[str, Any] = NOTHING
) -> tuple[RLDataset, RLDataset | None]:
    """Construct an `RLDatasetBuilder` by import path and call it: the groups to train on, and those held out.

    Args:
        of_run: what the run holds open, for builders that take it; see `build`.

    Raises:
        ConfigError: no such builder, wrong parameters, or problems that it cannot read.
    """
    lock(get_tokenizer(tokenizer.name_or_path))  # theirs, which is another object
    train, test = build("environment", builder, params, tokenizer, lambda made: asyncio.run(made()), of_run)
    if len(train) == 0:
        raise ConfigError("The environments have no whole batch: give them more problems or a smaller batch_size.")
    return train, test


@step_task(name="batch")
def gather(groups: Sequence[Group], shape: Shape, tokenizer: Tokenizer) -> Batch:
    """`pack_groups` as a task."""
    return pack_groups(groups, shape, tokenizer)
