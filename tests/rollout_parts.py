"""Completers and hooks that tests name by import path, and a training client for tests of rollouts."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import chz
import tinker
from mlflow import MlflowClient
from tinker import types
from tinker_cookbook.completers import StopCondition, TokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.rollout_runner import RolloutHooks, RolloutState
from tinker_cookbook.rl.types import Action, ActionExtra, Env, Metrics, RLDataset, StepResult, Trajectory, Transition

from examples.letters import LetterEnv, LetterGroup, Letters, LettersBuilder
from tinker_flows import HookAction


@dataclass
class Short(TokenCompleter):
    """Completer that stops after `length` tokens."""

    sampling_client: tinker.SamplingClient
    temperature: float
    seed: int
    length: int = 3

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        params = types.SamplingParams(stop=stop, max_tokens=self.length, temperature=self.temperature, seed=self.seed)
        response = await self.sampling_client.sample(model_input, 1, params)
        (sequence,) = response.sequences
        return TokensWithLogprobs(sequence.tokens, sequence.logprobs, sequence.stop_reason)


@dataclass
class OneOf(TokenCompleter):
    """Constrained decoding: one of a few tokens, drawn from the policy's distribution over them."""

    sampling_client: tinker.SamplingClient
    seed: int
    tokens: Sequence[int] = (97, 98)

    async def __call__(
        self, model_input: tinker.ModelInput, stop: StopCondition, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        logprobs = [
            (await self.sampling_client.compute_logprobs(model_input.append_int(token)))[-1] or 0.0
            for token in self.tokens
        ]
        total = math.log(sum(map(math.exp, logprobs)))
        (token,) = random.Random(self.seed).choices(self.tokens, [math.exp(value) for value in logprobs])
        return TokensWithLogprobs([token], [logprobs[self.tokens.index(token)] - total], "stop")


def charge_even_tokens(state: RolloutState, price: float) -> HookAction | None:
    """Charge turns that contain an even token."""
    is_even = any(token % 2 == 0 for token in state.transitions[-1].ac.tokens)
    return HookAction("even", -price) if is_even else None


class Empty:
    """Class without a method of a hook."""


class Half:
    """Class with one of the four methods of tinker-cookbook's hooks."""

    async def on_grade(self, state: RolloutState) -> None:
        """Do nothing."""


class Recording(RolloutHooks):
    """Hook that records its calls, and ends the episode at a turn."""

    calls: list[str]

    def __init__(self, calls: list[str], last_turn: int = 1) -> None:
        self.calls, self._last_turn = calls, last_turn

    async def on_turn_begin(self, state: RolloutState) -> None:
        self.calls.append(f"begin {state.turn_index}")

    async def on_turn_end(self, state: RolloutState) -> list[HookAction]:
        self.calls.append(f"end {state.turn_index}")
        return [HookAction("enough", reward=-0.5, stop=True)] if state.turn_index == self._last_turn else []

    async def on_stop_reason(self, reason: str, state: RolloutState) -> str | None:
        self.calls.append(f"stop {reason}")
        return reason


class Continued(Recording):
    """Hook that records which turns have ended the episode, and overrules its own stop."""

    async def on_turn_end(self, state: RolloutState) -> list[HookAction]:
        self.calls.append(str([turn.episode_done for turn in state.transitions]))
        return await super().on_turn_end(state)

    async def on_stop_reason(self, reason: str, state: RolloutState) -> str | None:
        return None if reason == "enough" else reason


@dataclass(frozen=True)
class Snapshots:
    """Training client whose weights never change."""

    sampler: tinker.SamplingClient

    def save_weights_and_get_sampling_client(self) -> Snapshots:
        return self

    def result(self) -> tinker.SamplingClient:
        return self.sampler


@dataclass(frozen=True)
class DelayedLetterEnv(LetterEnv):
    """Environment that answers late."""

    delay_s: float = 0.0

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        await asyncio.sleep(self.delay_s)
        return await super().step(action, extra=extra)


@chz.chz
class DelayedLettersBuilder(LettersBuilder):
    """Builder of letters some of which answer late.

    Attributes:
        delay_s: delay in seconds.
        delayed: delayed letters.
    """

    delay_s: float
    delayed: str

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        train, _ = await LettersBuilder.__call__(self)
        assert isinstance(train, Letters)
        groups = [
            LetterGroup(
                DelayedLetterEnv(
                    group.env.renderer,
                    group.env.letter,
                    group.env.num_letters,
                    self.delay_s if group.env.letter in self.delayed else 0.0,
                ),
                group.group_size,
            )
            for group in train.groups
        ]
        return Letters(groups, self.num_batches), Letters(groups, num_batches=1)


@dataclass(frozen=True)
class Tag:
    """Tag of an MLflow run."""

    tracking: str
    experiment: str
    name: str

    async def wait(self) -> None:
        """Wait until a run has the tag."""
        while not await asyncio.to_thread(self._exists):
            await asyncio.sleep(0.2)

    def _exists(self) -> bool:
        client = MlflowClient(self.tracking)
        experiment = client.get_experiment_by_name(self.experiment)
        assert experiment is not None
        return bool(client.search_runs([experiment.experiment_id], f"tags.`{self.name}` LIKE '%'"))


@dataclass(frozen=True)
class SilentLetterEnv(LetterEnv):
    """Environment that answers only once a run has a tag."""

    tag: Tag | None = None

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        if self.tag:
            await self.tag.wait()
        return await super().step(action, extra=extra)


@dataclass(frozen=True)
class SilentRewards(LetterGroup):
    """Group whose rewards are known only once a run has a tag."""

    tag: Tag | None = None

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, Metrics]]:
        if self.tag:
            await self.tag.wait()
        return await super().compute_group_rewards(trajectory_group, env_group)


@chz.chz
class SilentLettersBuilder(LettersBuilder):
    """Builder of letters of which the last one answers only once a run has a tag.

    Attributes:
        part: what waits for the tag: `turns` or `rewards`.
        is_held_out: whether the letters are held out; the training groups then answer at once.
    """

    tracking: str
    experiment: str
    tag: str
    part: str
    is_held_out: bool = False

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        train, _ = await LettersBuilder.__call__(self)
        assert isinstance(train, Letters)
        *groups, last = train.groups
        tag = Tag(self.tracking, self.experiment, self.tag)
        if self.part == "rewards":
            silent = SilentRewards(last.env, last.group_size, tag)
        else:
            env = SilentLetterEnv(last.env.renderer, last.env.letter, last.env.num_letters, tag)
            silent = LetterGroup(env, last.group_size)
        letters = Letters([*groups, silent], self.num_batches)
        return (train, letters) if self.is_held_out else (letters, None)


def describe_prompt(prompt: types.ModelInput, history: Sequence[Transition]) -> list[float]:
    """Features of a critic: the last letter of the prompt's question."""
    return [float(prompt.to_ints()[5]), float(len(history))]


def describe_badly(prompt: types.ModelInput, history: Sequence[Transition]) -> list[float]:
    """Features of a critic that are no numbers."""
    return [float("nan")]
