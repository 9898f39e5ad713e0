"""Environments: arguments of their builders, rewards, tools, and games of several players."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from scripted import last_metrics, rewards, roll_out
from tinker import types
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, RLDataset, StepResult
from tinker_cookbook.tokenizer_utils import get_tokenizer

from blocks.errors import ConfigError
from engine.tiny import byte_tokenizer
from examples.search_tool import Town
from flows.config.plain_data import read_yaml
from tasks.common.renderers import find_renderer_name
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.rollout_source import build_environments
from tasks.rl.trajectories import pack_groups

DATA = Path(__file__).parents[3] / "examples" / "data"
SHAPE = AdvantageSettings()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return get_tokenizer(str(folder))


class Built(NamedTuple):
    train: RLDataset
    test: RLDataset | None


def build(tokenizer: Any, builder: str, **params: Any) -> Built:
    return Built(*build_environments(builder, params, tokenizer))


@pytest.mark.parametrize(
    ("builder", "params"),
    [
        ("tinker_cookbook.recipes.math_rl.arithmetic_env:ArithmeticDatasetBuilder", {"n_batches": 2, "group_size": 4}),
        (
            "tinker_cookbook.recipes.multiplayer_rl.guess_number.env:GuessNumberDatasetBuilder",
            {"train_group_size": 4},
        ),
    ],
)
def test_cookbook_builders_get_the_renderer_and_the_tokenizer_of_the_model(
    tokenizer: Any, builder: str, params: dict[str, Any]
) -> None:
    source = build(tokenizer, builder, batch_size=2, **params)
    envs = asyncio.run(source.train.get_batch(0)[0].make_envs())
    prompt, stop = asyncio.run(envs[0].initial_observation())
    assert tokenizer.decode(prompt.to_ints()).endswith("<|im_start|>assistant\n")
    assert stop == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("name", "template", "renderer"),
    [
        ("Qwen/Qwen3-8B", "whatever", "qwen3"),
        ("/models/mine", "<|im_start|>", "qwen3_instruct"),
        ("mine", "<|start_header_id|>", "llama3"),
        ("mine", None, "role_colon"),
        ("mine", "[INST]", None),
    ],
)
def test_renderer_is_found_by_model_name_or_chat_template(
    name: str, template: str | None, renderer: str | None
) -> None:
    model: Any = SimpleNamespace(name_or_path=name, chat_template=template)
    assert find_renderer_name(name, model) == renderer


def test_gsm8k_rewards_the_number_and_the_format(tokenizer: Any) -> None:
    path = str(DATA / "gsm8k_train.jsonl")
    source = build(
        tokenizer, "tasks.rl.environments.gsm8k:Gsm8kBuilder", train_path=path, limit=1, batch_size=1, group_size=4
    )
    completions = [["48 + 24\n#### 72"], ["It is 72."], ["#### 71"], ["I do not know."]]
    group = roll_out(source.train.get_batch(0)[0], completions)
    assert rewards(group) == pytest.approx([1.0, 0.9, 0.0, -0.1])
    assert pack_groups([group], SHAPE, tokenizer).texts_D[0] == "48 + 24\n#### 72<|im_end|>"


def test_seed_determines_the_order_and_held_out_groups_have_one_member(tokenizer: Any) -> None:
    paths = {"train_path": str(DATA / "gsm8k_train.jsonl"), "test_path": str(DATA / "gsm8k_test.jsonl"), "limit": 8}
    builder = "tasks.rl.environments.gsm8k:Gsm8kBuilder"
    orders = []
    for seed in (0, 0, 1):
        source = build(tokenizer, builder, batch_size=3, group_size=2, seed=seed, **paths)
        assert (len(source.train), len(source.test or ())) == (2, 1)
        groups = [group for index in range(2) for group in source.train.get_batch(index)]
        envs = [asyncio.run(group.make_envs())[0] for group in groups]
        orders.append([env.get_question() for env in envs if hasattr(env, "get_question")])
    assert orders[0] == orders[1] != orders[2]
    assert source.test is not None
    assert [len(asyncio.run(group.make_envs())) for group in source.test.get_batch(0)] == [1] * 8


@pytest.mark.process
def test_humaneval_runs_code_in_the_sandbox_within_its_time_limit(tokenizer: Any) -> None:
    path = DATA / "humaneval.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    right = f"```python\n{row['prompt']}{row['canonical_solution']}```"
    endless = f"```python\n{row['prompt']}    while True: pass\n```"
    params = {"train_path": str(path), "limit": 1, "limits": {"seconds": 5}}
    source = build(tokenizer, "tasks.rl.environments.humaneval:HumanEvalBuilder", batch_size=1, group_size=3, **params)
    group = roll_out(source.train.get_batch(0)[0], [[right], [endless], ["I cannot."]])
    assert rewards(group) == pytest.approx([1.0, 0.0, -0.1])
    assert last_metrics(group, "timed_out") == [0.0, 1.0, 0.0]


def test_tool_output_is_in_the_next_prompt_and_not_trained_on(tokenizer: Any) -> None:
    source = build(tokenizer, "examples.search_tool:SearchBuilder", batch_size=1, group_size=4)
    builder = source.train.get_batch(0)[0]
    question = next(iter(asyncio.run(builder.make_envs()))).message_env.initial_messages[-1]["content"]  # type: ignore[attr-defined]
    name, facts = next((name, facts) for name, facts in Town(0).people.items() if name in question)
    kind = next(kind for kind in facts if kind in question)
    call = f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{name}"}}}}\n</tool_call>'
    lines = [
        [call, f"So it is.\nAnswer: {facts[kind]}"],
        [f"Answer: {facts[kind]}"],
        ["Answer: nothing"],
        [call, call, call],
    ]
    group = roll_out(builder, lines)
    assert rewards(group) == pytest.approx([1.0, 1.0, 0.0, -0.1])
    assert last_metrics(group, "searches") == [1, 0, 0, 3]
    assert group.trajectories is not None
    transitions = group.trajectories.trajectories_G[0].transitions
    assert f"{name} lives on {facts['street']}" in tokenizer.decode(transitions[1].ob.to_ints())
    batch = pack_groups([group], SHAPE, tokenizer)
    assert batch.num_datums == 4, "one datum per member, not one per turn"
    assert facts[kind] in batch.texts_D[0]
    assert "lives on" not in batch.texts_D[0], "the tool's output is not trained on"


def test_twenty_questions_end_with_the_right_guess(tokenizer: Any) -> None:
    source = build(tokenizer, "examples.twenty_questions:TwentyQuestionsBuilder", batch_size=1, group_size=2)
    game = source.train.get_batch(0)[0]
    word = asyncio.run(game.make_envs())[0].answer  # type: ignore[attr-defined]
    lines = [[f"Is it {word}?", f"Guess: {word}"], ["Is it nothing?"] * 20]
    group = roll_out(game, lines)
    assert rewards(group) == [1.0, 0.0]
    assert group.trajectories is not None
    won, lost = (trajectory.transitions for trajectory in group.trajectories.trajectories_G)
    assert (len(won), len(lost)) == (2, 20)
    assert [tokenizer.decode(game[1].ob.to_ints()).count("user\nyes<") for game in (won, lost)] == [1, 0]


def test_shorter_completions_of_a_group_win(tokenizer: Any) -> None:
    environment = read_yaml(DATA.parent / "shorter.yaml")["environment"]
    source = build(tokenizer, environment["builder"], **environment["params"] | {"group_size": 3})
    assert rewards(roll_out(source.train.get_batch(0)[0], [["I am"], ["I"], ["I am he"]])) == [0.0, 1.0, -1.0]


@pytest.mark.parametrize(("reward", "expected"), [("each", [1.0, 0.75, 0.5, 0.0]), ("all", [1.0, 0.0, 0.0, 0.0])])
def test_memory_test_rewards_each_digit_or_only_the_whole_secret(
    tokenizer: Any, reward: str, expected: list[float]
) -> None:
    source = build(
        tokenizer, "examples.memory_test:MemoryBuilder", batch_size=2, group_size=4, reward=reward, num_digits=4
    )
    first, second = source.train.get_batch(7)
    secret, other = (asyncio.run(group.make_envs())[0].get_reference_answer() for group in (first, second))  # type: ignore[attr-defined]
    assert secret != other
    lines = [[secret], [secret[:3] + "x"], [secret + "1234"], [""]]
    assert rewards(roll_out(first, lines)) == expected


@dataclass
class Table:
    """Game of two players, who add to a sum in turns; whoever reaches 10 wins."""

    total: int = 0
    to_move: int = 0
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)


@dataclass
class Player(Env):
    """Player at a table; waits for its turn."""

    index: int
    table: Table

    async def initial_observation(self) -> tuple[types.ModelInput, StopCondition]:
        return await self._my_turn(), []

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        async with self.table.moved:
            assert self.table.to_move == self.index or self.table.total >= 10
            won = False
            if self.table.total < 10:
                self.table.total += int(byte_tokenizer().decode(action[:-1]))
                self.table.to_move = 1 - self.index
                won = self.table.total >= 10
            self.table.moved.notify_all()
        following = await self._my_turn()
        over = self.table.total >= 10
        return StepResult(1.0 if won else -1.0 if over else 0.0, over, following, [])

    async def _my_turn(self) -> types.ModelInput:
        async with self.table.moved:
            await self.table.moved.wait_for(lambda: self.table.to_move == self.index or self.table.total >= 10)
        return types.ModelInput.from_ints(list(str(self.table.total).encode()))


class Match(EnvGroupBuilder):
    """Two players at one table."""

    async def make_envs(self) -> Sequence[Env]:
        table = Table()
        return [Player(index, table) for index in range(2)]


def test_members_of_a_group_can_play_one_game() -> None:
    group = roll_out(Match(), [["4", "3"], ["2", "1"]])
    assert group.trajectories is not None
    prompts = [
        [bytes(turn.ob.to_ints()).decode() for turn in trajectory.transitions]
        for trajectory in group.trajectories.trajectories_G
    ]
    assert prompts == [["0", "6"], ["4", "9"]]
    assert rewards(group) == [-1.0, 1.0]


def test_unusable_data_is_reported_in_one_sentence(tokenizer: Any) -> None:
    builder = "tasks.rl.environments.gsm8k:Gsm8kBuilder"
    with pytest.raises(ConfigError, match=r"^The data file nowhere.jsonl could not be read"):
        build(tokenizer, builder, train_path="nowhere.jsonl", batch_size=1, group_size=1)
    with pytest.raises(ConfigError, match="no full batch"):
        build(tokenizer, builder, train_path=str(DATA / "gsm8k_test.jsonl"), limit=1, batch_size=2, group_size=1)
