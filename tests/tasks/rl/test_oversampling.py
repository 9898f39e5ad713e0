"""Over-sampling: a step trains on the groups that finish first, and a resumed run on the same ones."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from random_groups import Decoder
from source_steps import finish, numbers_of, take
from tinker import types
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, RLDataset, StepResult, TrajectoryGroup
from waiting import wait_for

from blocks.errors import ConfigError
from blocks.storage import RunDirectory, RunStorage
from flows.config.distill import OnPolicyConfig
from flows.config.rl import RlConfig
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.oversampling import OVERSAMPLED_NAME, Oversampling, OversamplingRecord
from tasks.rl.rollout_source import MinibatchSettings, RolloutSettings, RolloutSource
from tasks.rl.rollouts.group_progress import GroupProgress
from tasks.rl.rollouts.group_rollout import Group, RetryWholeGroup, RunningGroup
from tasks.rl.rollouts.sampling_distribution import SamplingDistribution
from tasks.training.batch_source import SampledTokens

pytestmark = pytest.mark.usefixtures("without_task_runs")

MAX_TOKENS = 3000
ANY_TOKEN = list(range(264))  # the tiny model's vocabulary
PROMPT_LENGTH = 2
SENT = r'tinker_engine_http_responses_total\{route="/asample",status="200"\}'
SETTINGS = RolloutSettings(
    0,
    MAX_TOKENS,
    SamplingDistribution(),
    RetryWholeGroup(max_retries=0),
    AdvantageSettings(),
    oversampling_factor=1.5,
)


@dataclass(frozen=True)
class Member(Env):
    """Environment of `num_turns` turns of one token, whose prompt names its group; the last turn may be endless."""

    number: int
    reward: float
    behaviour: str
    event: threading.Event | None
    turns: list[int] = field(default_factory=list)

    def _prompt(self, *, endless: bool) -> tuple[types.ModelInput, StopCondition]:
        return types.ModelInput.from_ints([self.number + 1, 2]), [] if endless else ANY_TOKEN

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        return self._prompt(endless=self.behaviour == "endless")

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        while self.event and not self.event.is_set():
            await asyncio.sleep(0.005)
        if self.behaviour == "fails":
            raise ValueError("this one is broken")
        self.turns.append(len(action))
        if self.behaviour == "endless at last" and len(self.turns) == 1:
            prompt, stop = self._prompt(endless=True)
            return StepResult(0.0, False, prompt, stop)
        return StepResult(self.reward, True, types.ModelInput.empty(), [])


@dataclass(frozen=True)
class Numbered(EnvGroupBuilder):
    """Group of two members."""

    number: int
    behaviour: str
    event: threading.Event | None
    is_constant: bool

    async def make_envs(self) -> Sequence[Env]:
        rewards = (1.0, 1.0 if self.is_constant else 0.0)
        return [Member(self.number, reward, self.behaviour, self.event) for reward in rewards]


@dataclass(frozen=True)
class NumberedGroups(RLDataset):
    """Groups in batches of four, so that a step starts six; by default a group takes one turn of one token."""

    behaviours: Mapping[int, str] = field(default_factory=dict)
    delayed: Mapping[int, threading.Event] = field(default_factory=dict)
    constant: frozenset[int] = frozenset()

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [
            Numbered(number, self.behaviours.get(number, ""), self.delayed.get(number), number in self.constant)
            for number in range(4 * index, 4 * index + 4)
        ]

    def __len__(self) -> int:
        return 6


def open_source(
    dataset: NumberedGroups, directory: RunDirectory, settings: RolloutSettings = SETTINGS, **minibatches: Any
) -> RolloutSource:
    source = RolloutSource(dataset, None, cast(Any, Decoder()), settings, MinibatchSettings(**minibatches))
    source.oversampling = OversamplingRecord(directory)
    source.begin(0, 4, {})
    return source


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunStorage(url=str(tmp_path)).run_directory("oversampled")


def engine_count(url: str, pattern: str) -> float:
    match = re.search(rf"^{pattern} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return float(match[1]) if match else 0.0


def num_engine_samples(url: str) -> float:
    return engine_count(url, r'tinker_engine_tokens_total\{use="sampled"\}')


def is_constant(url: str, pattern: str) -> bool:
    """Return whether a metric of the engine does not change for a moment."""
    before = engine_count(url, pattern)
    time.sleep(0.3)
    return engine_count(url, pattern) == before


def pending_groups(
    directory: RunDirectory, sizes: Sequence[int] = (1, 1), num_groups: int = 3
) -> tuple[Oversampling, list[Future[Group]]]:
    """Minibatches from groups whose results the test sets."""
    results = [Future[Group]() for _ in range(num_groups)]
    builders = [Numbered(number, "", None, False) for number in range(num_groups)]

    def start(selected: Mapping[int, EnvGroupBuilder]) -> Sequence[RunningGroup]:
        return [RunningGroup(results[index], GroupProgress()) for index in selected]

    oversampling = Oversampling(0, builders, sizes, start, OversamplingRecord(directory))
    oversampling.begin()
    return oversampling, results


FINISHED = Group((), TrajectoryGroup([], [], []), ())


def test_a_run_that_is_closed_stores_no_groups_of_a_minibatch(directory: RunDirectory) -> None:
    oversampling, results = pending_groups(directory)
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(oversampling.take, number) for number in range(2)]
        oversampling.close()
        for result in results:  # groups that end with the run fail
            result.set_result(Group((), None, ()))
        for minibatch in waiting:
            with pytest.raises(CancelledError):
                minibatch.result(20)
    assert directory.read_bytes(OVERSAMPLED_NAME) is None


def test_a_failed_minibatch_neither_blocks_the_next_one_nor_keeps_its_groups(directory: RunDirectory) -> None:
    oversampling, results = pending_groups(directory)
    results[0].set_exception(ConfigError("broken"))
    with pytest.raises(ConfigError, match="broken"):
        oversampling.take(0)
    results[1].set_result(FINISHED)
    results[2].set_result(FINISHED)
    assert oversampling.take(1) == [FINISHED]

    # The second minibatch is stored and the first one is not, so a restart may choose other groups for both.
    again, results = pending_groups(directory)
    for result in (results[1], results[2], results[0]):
        result.set_result(FINISHED)
    assert (again.take(0), again.take(1)) == ([FINISHED], [FINISHED])
    stored = [OversamplingRecord(directory).get(0, part) for part in range(2)]
    assert [part.groups for part in stored if part] == [(1,), (2,)]


def test_no_minibatch_takes_the_stored_groups_of_one_that_fails(directory: RunDirectory) -> None:
    oversampling, results = pending_groups(directory, sizes=(2, 1), num_groups=4)
    for result in results:
        result.set_result(FINISHED)
    assert len(oversampling.take(0)) == 2

    again, results = pending_groups(directory, sizes=(2, 1), num_groups=4)
    results[1].set_exception(ConfigError("broken"))
    results[0].set_result(FINISHED)
    with pytest.raises(ConfigError, match="broken"):
        again.take(0)
    results[3].set_result(FINISHED)
    assert again.take(1) == [FINISHED]
    stored = [OversamplingRecord(directory).get(0, part) for part in range(2)]
    assert [part.groups for part in stored if part] == [(0, 1), (3,)]


def test_longest_groups_are_cancelled_on_the_engine(engine_url: str, snapshots: Any, directory: RunDirectory) -> None:
    """Six groups are started for four; two of them would sample thousands of tokens."""
    behaviours = {1: "endless", 4: "endless at last"}
    before = num_engine_samples(engine_url)
    last = threading.Event()
    with closing(open_source(NumberedGroups(behaviours, {5: last}), directory)) as source:
        pending = source.load(0, snapshots)
        # The SDK cannot cancel a request that it is still sending, so the last group ends after all others have sent
        # their requests.
        wait_for(lambda: num_engine_samples(engine_url) - before >= 2 * 5, "the first turns")
        wait_for(lambda: is_constant(engine_url, SENT), "the end of sending")
        last.set()
        step = finish(source, 0, pending)
    assert step.numbers == [[0, 2, 3, 5]]
    # The four groups and the first turn of group 4 have sampled one token per member; the open requests of the groups
    # 1 and 4 have prompts, and their tokens are unknown.
    num_prompt_tokens = 2 * PROMPT_LENGTH * (4 + 1 + 2)
    assert step.sampled.num_prefill_tokens == num_prompt_tokens
    assert step.sampled.num_sample_tokens == 2 * 5
    assert step.metrics["oversampling/cancelled_groups"] == 2
    assert step.metrics["oversampling/cancelled_tokens"] == 2
    assert step.metrics["oversampling/uncounted_tokens_max"] == 2 * 2 * MAX_TOKENS
    assert step.metrics["oversampling/length_kept"] == 1
    assert step.metrics["oversampling/length_all_max"] == (2 * 5 + 2 * 2 * MAX_TOKENS) / (2 * 7)
    assert step.metrics["env/all/total_episodes"] == 2 * 4
    # The engine stops sampling for them: it is idle before it has counted any of their tokens.
    wait_for(lambda: is_constant(engine_url, "tinker_engine_busy_seconds"), "an idle engine")
    assert num_engine_samples(engine_url) - before == 2 * 5


def test_resumed_source_trains_on_the_same_groups(snapshots: Any, directory: RunDirectory) -> None:
    """A resumed run takes the stored groups, although others finish first now."""
    early = NumberedGroups({0: "endless", 3: "endless"})
    with closing(open_source(early, directory)) as source:
        whole = [take(source, step, snapshots) for step in range(2)]
    assert whole[0].numbers == [[1, 2, 4, 5]]
    late = NumberedGroups(delayed={number: threading.Event() for number in (0, 3)})
    with closing(open_source(late, directory)) as source:
        resumed = [take(source, step, snapshots) for step in range(2)]
    assert [step.numbers for step in resumed] == [step.numbers for step in whole]
    assert [step.tokens for step in resumed] == [step.tokens for step in whole]
    for key in ("cancelled_groups", "cancelled_tokens", "uncounted_tokens_max", "length_kept", "length_all_max"):
        name = f"oversampling/{key}"
        assert [step.metrics[name] for step in resumed] == [step.metrics[name] for step in whole]
    # The resumed run starts the stored groups alone, so it does not pay for the cancelled ones again.
    assert resumed[0].sampled == SampledTokens(2 * 4 * PROMPT_LENGTH, 2 * 4, 4 * PROMPT_LENGTH)
    assert whole[0].sampled.num_prefill_tokens == 2 * 6 * PROMPT_LENGTH


def test_minibatches_of_a_stream_take_groups_as_they_finish(snapshots: Any, tmp_path: Path) -> None:
    events = {number: threading.Event() for number in range(6)}
    directory = RunStorage(url=str(tmp_path)).run_directory("stream")
    with closing(open_source(NumberedGroups(delayed=events), directory, num_minibatches=2)) as source:
        first, second = source.load(0, snapshots)
        for number in (5, 2):
            events[number].set()
        assert numbers_of(first.result()) == [2, 5], "the first minibatch trains while other groups are sampled"
        for number in (3, 0):
            events[number].set()
        assert numbers_of(second.result()) == [0, 3]
        tokens = [first.result().target_tokens_DT.tolist(), second.result().target_tokens_DT.tolist()]
    lines = (directory.read_bytes(OVERSAMPLED_NAME) or b"").splitlines()
    assert len(lines) == 2

    # A run that is killed after its first minibatch has stored the groups of this one alone.
    killed = RunStorage(url=str(tmp_path)).run_directory("killed")
    killed.append_line(OVERSAMPLED_NAME, lines[0].decode())
    events = {number: threading.Event() for number in (0, 2, 5)}
    with closing(open_source(NumberedGroups(delayed=events), killed, num_minibatches=2)) as source:
        first, second = source.load(0, snapshots)
        for number in (2, 5):
            events[number].set()
        assert numbers_of(first.result()) == [2, 5]
        assert first.result().target_tokens_DT.tolist() == tokens[0]
        others = numbers_of(second.result())
        assert len(others) == 2
        assert set(others) < {1, 3, 4}
    assert len((killed.read_bytes(OVERSAMPLED_NAME) or b"").splitlines()) == 2


def test_failed_groups_do_not_take_the_place_of_slower_ones(snapshots: Any, directory: RunDirectory) -> None:
    behaviours = {0: "fails", 1: "fails", 6: "fails", 7: "fails", 8: "fails"}
    with closing(open_source(NumberedGroups(behaviours), directory)) as source:
        steps = [take(source, step, snapshots) for step in range(2)]
    assert steps[0].numbers == [[2, 3, 4, 5]]
    # Three of the groups 6 to 11 succeed, so that the batch is smaller.
    assert steps[1].numbers == [[9, 10, 11]]
    assert steps[1].metrics["oversampling/cancelled_groups"] == 0, "the step waits for all of its groups"


def test_a_failed_service_ends_the_step(snapshots: Any, directory: RunDirectory) -> None:
    class Lost:
        def save_weights_and_get_sampling_client(self) -> Lost:
            return self

        def result(self) -> Any:
            raise ConfigError("the weights are lost")

    with closing(open_source(NumberedGroups(), directory, num_minibatches=2)) as source:
        for minibatch in source.load(0, cast(Any, Lost())):
            with pytest.raises(ConfigError, match="the weights are lost"):
                minibatch.result()


def test_refills_follow_the_groups_of_an_oversampled_step(snapshots: Any, directory: RunDirectory) -> None:
    """A step starts the groups 0 to 5, keeps four, of which two are constant, and refills with 6 and 7."""
    dataset = NumberedGroups({4: "endless", 5: "endless"}, constant=frozenset({1, 3}))
    shape = AdvantageSettings(drop_constant=True)
    settings = replace(SETTINGS, refill_rounds=1, shape=shape)
    for _ in range(2):
        with closing(open_source(dataset, directory, settings)) as source:
            steps = [take(source, step, snapshots) for step in range(2)]
        assert steps[0].numbers == [[0, 2, 6, 7]]
        assert set(steps[1].numbers[0]) < set(range(8, 14)), "the next step follows the refills"


def test_invalid_settings(snapshots: Any, directory: RunDirectory) -> None:
    fields: dict[str, Any] = {
        "run_name": "oversampled",
        "model": "tiny",
        "environment": {"builder": "examples.letters:LettersBuilder"},
        "rollout": {"oversampling_factor": 1.25},
    }
    assert RlConfig.model_validate(fields).rollout.settings(0, AdvantageSettings()).oversampling_factor == 1.25
    with pytest.raises(ValueError, match="oversampling_factor requires the mode sync or stream"):
        RlConfig.model_validate(fields | {"schedule": {"mode": "async"}})
    with pytest.raises(ConfigError, match=r"starts 32 groups for the 16 of a step, but the environments have 24"):
        open_source(NumberedGroups(), directory, replace(SETTINGS, oversampling_factor=2), groups_per_batch=16)
    distillation = {"run_name": "distilled", "model": "tiny", "datasets": [{"environment": fields["environment"]}]}
    assert OnPolicyConfig.model_validate(distillation).rollout.oversampling_factor == 1
    with pytest.raises(ValueError, match="oversampling_factor"):
        OnPolicyConfig.model_validate(distillation | {"rollout": fields["rollout"]})
