"""Memory budget: idle trainers and adapters move to disk and return bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import tinker
import torch
from engine_process import API_KEY, EngineProcess, running_engine
from tinker import types

from engine.compute.base import BaseModel
from engine.compute.datum import Datum
from engine.compute.lora import LoraSpec
from engine.compute.loss import bind_loss
from engine.compute.train import exhaust
from engine.compute.trainer import Trainer
from engine.memory.budget import MemoryBudget

PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=8, seed=1)


@pytest.fixture(scope="module")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine whose budget holds one model of rank 128, but not two."""
    with running_engine(tmp_path_factory.mktemp("small"), arguments=["--memory-limit", "1"]) as engine:
        yield engine


def train_in_turns(url: str, batch: list[types.Datum]) -> tuple[list[float], list[list[int]]]:
    """Train two models in turns, so that both are evicted with a gradient, and sample from a snapshot of each step."""
    losses, samplers = [], []
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        trainers = [
            service.create_lora_training_client(base_model="tiny", rank=128, seed=seed).result() for seed in (1, 2)
        ]
        for _ in range(3):
            for first in range(2):
                for trainer in trainers:
                    output = trainer.forward_backward(batch[first:], "cross_entropy")
                    losses.append(output.result().metrics["loss:sum"])
            for trainer in trainers:
                trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
                samplers.append(trainer.save_weights_and_get_sampling_client())
        tokens = [list(s.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens) for s in [*samplers, *samplers]]
    return losses, tokens


def gauge(engine: EngineProcess, name: str) -> float:
    lines = httpx.get(f"{engine.url}/metrics").text.splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"tinker_engine_{name} ")]
    return float(value)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_eviction_changes_no_number(small_engine: EngineProcess, engine_url: str, batch: list[types.Datum]) -> None:
    assert train_in_turns(small_engine.url, batch) == train_in_turns(engine_url, batch)
    assert gauge(small_engine, "evictions") > 10
    # The end of the session freed its memory and its files.
    assert gauge(small_engine, "adapter_bytes") == 0
    assert not list((small_engine.state / "evicted").glob("*/*"))


def test_files_of_a_killed_engine_are_removed(tmp_path: Path) -> None:
    (tmp_path / "0123").mkdir()
    (tmp_path / "0123" / "a.safetensors").write_bytes(b"x")
    first, second = MemoryBudget(1, tmp_path), MemoryBudget(1, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    first.close()
    second.close()
    assert not list(tmp_path.iterdir())


def test_engines_that_start_together_keep_their_folders(tmp_path: Path) -> None:
    def start_repeatedly(_: int) -> None:
        for _ in range(50):
            budget = MemoryBudget(2**20, tmp_path)
            path = budget.write({"a": torch.ones(1)})
            assert budget.read(path)["a"] == 1
            budget.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(start_repeatedly, range(4)))


def test_size_of_a_trainer(base: BaseModel) -> None:
    """It counts the weights, the moments once there are any, and the gradient until the optimizer step."""
    trainer = Trainer(base, LoraSpec(rank=4, seed=1), 1024)
    loss = bind_loss("cross_entropy", {})
    tokens_T = torch.arange(8)
    sizes = [trainer.num_bytes]
    for _ in range(2):
        exhaust(trainer.forward_backward([Datum(tokens_T, tokens_T, {})], loss, forward_only=False))
        sizes.append(trainer.num_bytes)
        assert sizes[-1] == sum(tensor.nbytes for tensor in trainer.tensors().values())
        trainer.optim_step(types.AdamParams())
        sizes.append(trainer.num_bytes)
    weights = trainer.adapter.num_bytes
    steps = 4 * len(list(trainer.adapter.named_parameters()))
    assert sizes == [weights, 2 * weights, 3 * weights + steps, 4 * weights + steps, 3 * weights + steps]
