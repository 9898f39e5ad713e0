"""Overhead of the service: a one-token step through SDK, HTTP and engine, against the same step in process.

With one token on the tiny model, the computation is negligible: the difference is the SDK, four HTTP requests, queues
and thread switches. A server that does nothing measures the share of the SDK and HTTP.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import tinker
import torch
from tinker import types
from tqdm import tqdm

from benchmarks.null_server import null_server
from benchmarks.rows import Row
from benchmarks.scratch import scratch_home
from blocks.files.local import home
from blocks.servers.processes import local_engine
from engine.compute.base import BaseModel
from engine.compute.datum import Datum
from engine.compute.lora import LoraSpec
from engine.compute.loss import bind_loss
from engine.compute.train import exhaust
from engine.compute.trainer import Trainer
from engine.models import load_model, resolve_model

BUDGET_MS = 5.0
RANK = 8
ADAM = types.AdamParams(learning_rate=1e-4)
Step = Callable[[], None]


def measure(*, repetitions: int = 200) -> list[Row]:
    """Return one row; its repetitions are single steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            scratch_home(),
            local_engine(model="tiny", dtype="float32", threads=1) as service,
            service.get_client() as session,
            null_server() as url,
            tinker.ServiceClient(base_url=url, api_key="tml-null") as null_session,
        ):
            sides = (_sdk_step(session), _in_process(), _sdk_step(null_session))
            for _ in range(10):
                _times(sides)
            ours, peer, floor = zip(
                *(_times(sides) for _ in tqdm(range(repetitions), desc="engine_service")), strict=True
            )
    finally:
        torch.set_num_threads(threads)
    return [_row(list(ours), list(peer), list(floor))]


def _row(ours: list[float], peer: list[float], floor: list[float]) -> Row:
    added = statistics.median(one - other for one, other in zip(ours, peer, strict=True))
    own = statistics.median(one - other - sdk for one, other, sdk in zip(ours, peer, floor, strict=True))
    return Row(
        "engine_service: forward_backward + optim_step of 1 token, tiny model",
        "ms",
        ours,
        peer,
        peer_name="the same computation in process",
        note=f"adds {added:.1f} ms; the SDK and a server that does nothing take {statistics.median(floor):.1f} ms, "
        f"the service {own:.1f} ms (budget {BUDGET_MS:.0f} ms: {'holds' if own <= BUDGET_MS else 'EXCEEDED'})",
    )


def _times(sides: tuple[Step, ...]) -> tuple[float, ...]:
    """Return the milliseconds of one step of each side."""
    times = []
    for step in sides:
        started = perf_counter()
        step()
        times.append(1000 * (perf_counter() - started))
    return tuple(times)


def _sdk_step(session: tinker.ServiceClient) -> Step:
    client = session.create_lora_training_client("tiny", rank=RANK, seed=0).result()
    inputs = {
        "target_tokens": types.TensorData(data=[2], dtype="int64"),
        "weights": types.TensorData(data=[1.0], dtype="float32"),
    }
    datum = types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs=inputs)

    def step() -> None:
        output, updated = client.forward_backward([datum], "cross_entropy"), client.optim_step(ADAM)
        output.result()
        updated.result()

    return step


def _in_process() -> Step:
    base = BaseModel(load_model(resolve_model("tiny", home() / "cache"), "cpu", "float32", "tiny"))
    trainer = Trainer(base, LoraSpec(RANK, seed=0), micro_batch_tokens=1024)
    loss = bind_loss("cross_entropy", {})
    datum = Datum(torch.tensor([1]), torch.tensor([2]), {"weights": torch.ones(1)})

    def step() -> None:
        exhaust(trainer.forward_backward([datum], loss, forward_only=False))
        trainer.optim_step(ADAM)

    return step
