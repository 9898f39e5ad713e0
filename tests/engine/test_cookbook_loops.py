"""tinker-cookbook's unmodified training loops finish on the engine, and their models learn."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
import pytest
import tinker
from engine_process import API_KEY
from tinker import types
from tinker_cookbook.preference import train_dpo
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl import train as rl
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.supervised.types import ChatDatasetBuilder, ChatDatasetBuilderCommonConfig, SupervisedDataset
from tinker_cookbook.tokenizer_utils import get_tokenizer

pytestmark = pytest.mark.slow

RENDERER = "qwen3_instruct"
NUM_BATCHES, BATCH_SIZE = 12, 4
NUM_RL_BATCHES = 25


@pytest.fixture(autouse=True)
def service(engine_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    monkeypatch.setenv("TINKER_BASE_URL", engine_url)


def model_name() -> str:
    """Return the served model's directory, from which the cookbook loads the tokenizer."""
    rest = tinker.RestClient(base_url=os.environ["TINKER_BASE_URL"], api_key=API_KEY)
    with tinker.ServiceClient() as service:
        info = service.create_lora_training_client(base_model="tiny", rank=1).result().get_info()
    assert rest.get_server_capabilities().result().supported_models
    return str(info.model_data.tokenizer_id)


def logged_values(log_path: Path, name: str) -> list[float]:
    """Return a metric of each step from the cookbook's log."""
    lines = [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class RepeatedConversations(SupervisedDataset):
    """Dataset that repeats the same short conversations; with two answers, pairs of a good and a bad one for DPO."""

    def __init__(self, name: str, answers: Sequence[str]) -> None:
        renderer = get_renderer(RENDERER, get_tokenizer(name))
        self._data = [
            conversation_to_datum(
                [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": answer}], renderer, 64
            )
            for n in range(BATCH_SIZE)
            for answer in answers
        ]

    def get_batch(self, index: int) -> list[types.Datum]:
        return self._data

    def __len__(self) -> int:
        return NUM_BATCHES


@chz.chz
class RepeatedConversationsBuilder(ChatDatasetBuilder):
    answers: tuple[str, ...]

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        return RepeatedConversations(self.common_config.model_name_for_tokenizer, self.answers), None


def conversations(name: str, *answers: str) -> RepeatedConversationsBuilder:
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=name, renderer_name=RENDERER, max_length=64, batch_size=BATCH_SIZE
    )
    return RepeatedConversationsBuilder(common_config=common, answers=answers)


class LowBytes(Env):
    """One-turn environment. Its reward is the share of sampled tokens below 64: a quarter by chance."""

    async def initial_observation(self) -> tuple[types.ModelInput, list[str]]:
        return types.ModelInput.from_ints(list(b"say: ")), []

    async def step(self, action: Any, *, extra: Any = None) -> StepResult:
        reward = sum(token < 64 for token in action) / max(len(action), 1)
        return StepResult(reward, True, types.ModelInput.empty(), [])


@dataclass(frozen=True)
class LowBytesGroup(EnvGroupBuilder):
    async def make_envs(self) -> Sequence[Env]:
        return [LowBytes() for _ in range(8)]


class LowBytesDataset(RLDataset):
    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [LowBytesGroup() for _ in range(BATCH_SIZE)]

    def __len__(self) -> int:
        return NUM_RL_BATCHES


@chz.chz
class LowBytesBuilder(RLDatasetBuilder):
    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        return LowBytesDataset(), None


def test_supervised_loop_learns(tmp_path: Path) -> None:
    name = model_name()
    config = supervised.Config(
        log_path=str(tmp_path), model_name=name, recipe_name="test", renderer_name=RENDERER,
        dataset_builder=conversations(name, "It is a number."), learning_rate=1e-2, lr_schedule="constant", lora_rank=8,
        save_every=6, eval_every=0,
    )  # fmt: skip
    asyncio.run(supervised.main(config))
    losses = logged_values(tmp_path, "train_mean_nll")
    assert len(losses) == NUM_BATCHES
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("mode", ["sync", "stream", "async"])
@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
def test_rl_loop_learns(tmp_path: Path, mode: str, loss_fn: types.LossFnType) -> None:
    stream = rl.StreamMinibatchConfig(groups_per_batch=BATCH_SIZE, num_minibatches=2) if mode == "stream" else None
    asynchronous = rl.AsyncConfig(max_steps_off_policy=2, groups_per_batch=BATCH_SIZE) if mode == "async" else None
    config = rl.Config(
        log_path=str(tmp_path), model_name=model_name(), recipe_name="test", renderer_name=RENDERER,
        dataset_builder=LowBytesBuilder(), learning_rate=2e-2, max_tokens=16, lora_rank=8, loss_fn=loss_fn,
        save_every=6, eval_every=0, stream_minibatch_config=stream, async_config=asynchronous, num_groups_to_log=0,
    )  # fmt: skip
    asyncio.run(rl.main(config))
    rewards = logged_values(tmp_path, "env/all/reward/total")
    assert len(rewards) >= NUM_RL_BATCHES - 2
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.1


def test_dpo_loop_learns(tmp_path: Path) -> None:
    name = model_name()
    config = train_dpo.Config(
        log_path=str(tmp_path), model_name=name, recipe_name="test", renderer_name=RENDERER,
        dataset_builder=conversations(name, "It is a number.", "Who knows?"), learning_rate=1e-2, lora_rank=8,
        lr_schedule="constant", save_every=6, eval_every=0, infrequent_eval_every=0, num_epochs=1,
    )  # fmt: skip
    train_dpo.main(config)
    losses = logged_values(tmp_path, "dpo_loss")
    assert len(losses) == NUM_BATCHES
    assert losses[-1] < 0.5 * losses[0]
    assert logged_values(tmp_path, "accuracy")[-1] == 1.0
