"""The environments of a run: any tinker-cookbook dataset of groups, played by the weights that a step starts from."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

import tinker
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinker_cookbook.rl.metric_util import RLTestSetEvaluator
from tinker_cookbook.rl.types import RLDataset
from tinker_cookbook.tokenizer_utils import Tokenizer, get_tokenizer
from torch import Tensor

from blocks.errors import ConfigError
from objectives.batch import Batch
from tasks.data import build
from tasks.locked import lock
from tasks.options import Pending, call, step_task, submit, whole
from tasks.policy import Policy
from tasks.rollout import Group, Patient, rollout
from tasks.service_errors import service_errors
from tasks.trajectories import Shape, compute_group_metrics, compute_policy_metrics, pack_groups

_GATHERING = ThreadPoolExecutor(max_workers=2, thread_name_prefix="rollouts")


@dataclass(frozen=True, slots=True)
class Play:
    """How environments are played.

    Attributes:
        seed: of the run.
        max_tokens: the most that the policy says in one turn.
        temperature: of its sampling.
        strategy: what becomes of a rollout that fails.
    """

    seed: int
    max_tokens: int
    temperature: float
    strategy: Patient

    def policy(self, sampler: tinker.SamplingClient, *key: int) -> Policy:
        return Policy(sampler, self.max_tokens, self.temperature, (self.seed, *key))


class RolloutSource:
    """The environments of a run.

    Attributes:
        train: the groups of each step.
        test: held-out groups; None without.
    """

    sampled = True

    def __init__(
        self, train: RLDataset, test: RLDataset | None, tokenizer: Tokenizer, play: Play, shape: Shape
    ) -> None:
        if len(train) == 0:
            raise ConfigError("The environments have no whole batch: give them more problems or a smaller batch_size.")
        self.train, self.test = train, test
        self._tokenizer, self._play, self._shape = tokenizer, play, shape
        self._groups: dict[int, Sequence[Group]] = {}

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train)

    def load(self, step: int, client: tinker.TrainingClient) -> Pending[Batch]:
        """Take a snapshot of the weights, and play the groups of a step with it, each as a task."""
        snapshot = client.save_weights_and_get_sampling_client()
        builders = self.train.get_batch(step % len(self.train))

        def play() -> Batch:
            with service_errors("take a snapshot of the weights to sample from"):
                sampler = snapshot.result()
            playing = [
                submit(rollout, whole(each), self._play.policy(sampler, step, index), self._play.strategy, step, index)
                for index, each in enumerate(builders)
            ]
            self._groups[step] = [each.result() for each in playing]
            return self.gather(step, self._groups[step])

        return _GATHERING.submit(copy_context().run, play)

    def gather(self, step: int, groups: Sequence[Group]) -> Batch:
        """The batch of a step, of what became of its groups."""
        return call(gather, whole(groups), self._shape, self._tokenizer)

    def metrics(self, step: int, batch: Batch, logprobs_DT: Tensor, terms: Mapping[str, float]) -> dict[str, float]:
        return compute_group_metrics(self._groups.pop(step)) | compute_policy_metrics(batch, logprobs_DT)


class HeldOutEnvironments(SamplingClientEvaluator):
    """tinker-cookbook's evaluation of held-out groups, by the run's own way to play; metrics are `test/env/...`."""

    def __init__(self, dataset: RLDataset, play: Play) -> None:
        self._evaluator = RLTestSetEvaluator(dataset, play.max_tokens, strategy=play.strategy)
        self._play = play

    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        # All groups share it, and with the same draws for each would be right or wrong together.
        return await self._evaluator.eval_token_completer(replace(self._play.policy(sampling_client), by_prompt=True))


def build_environments(
    builder: str, params: Mapping[str, Any], tokenizer: Tokenizer, play: Play, shape: Shape
) -> RolloutSource:
    """Construct an `RLDatasetBuilder` by import path and call it.

    Raises:
        ConfigError: no such builder, wrong parameters, or problems that it cannot read.
    """
    lock(get_tokenizer(tokenizer.name_or_path))  # theirs, which is another object
    train, test = build("environment", builder, params, tokenizer, lambda made: asyncio.run(made()))
    return RolloutSource(train, test, tokenizer, play, shape)


@step_task(name="batch")
def gather(groups: Sequence[Group], shape: Shape, tokenizer: Tokenizer) -> Batch:
    """`pack_groups` as a task."""
    return pack_groups(groups, shape, tokenizer)
