"""Process load of reinforcement learning: peak memory with many concurrent groups, and utilization of the engine.

Peak memory of the flow and of the engine is compared with their memory before the first group. Utilization is the busy
time of the engine's compute thread in mode async, relative to the time from the end of the warm-up to the last step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import psutil
from tqdm import tqdm

from benchmarks.flow_run import FlowRun, run_flow
from benchmarks.rl_vs_cookbook import BUILDER, GROUP_SIZE, MAX_TOKENS, MODES, WARM_UP, flow_config
from benchmarks.rows import Row
from benchmarks.scratch import KEY, bench_engine, environment, scratch_home
from blocks.files.local import home
from engine.models import resolve_model

SAMPLE_EVERY_S = 0.1
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of both processes, tokens sampled by the engine so far and its compute seconds so far."""

    time_s: float
    flow_mib: float
    engine_mib: float
    num_sampled: float
    busy_s: float


def measure(*, groups: int = 256, steps: int = 24, large: str = "smollm2-135m", large_steps: int = 10) -> list[Row]:
    """Return two rows for memory and two for utilization, with the tiny model and a larger one."""
    with scratch_home() as folder:
        bar = tqdm(total=3, desc="rl_load")
        model = str(resolve_model("tiny", home() / "cache"))
        with bench_engine(folder / "tiny", model) as url, environment(TINKER_BASE_URL=url, TINKER_API_KEY=KEY):
            busy = _busy_share(folder / "async", model, url, steps)
            bar.update()
            schedule = {"groups_per_batch": groups}
            _, samples = _run_sampled(folder / "many", url, flow_config(model, schedule, BUILDER, 3))
            bar.update()
        model = str(resolve_model(large, home() / "cache"))
        with bench_engine(folder / "large", model) as url, environment(TINKER_BASE_URL=url, TINKER_API_KEY=KEY):
            large_busy = _busy_share(folder / "async-large", model, url, large_steps)
            bar.update()
    idle = next(sample for sample in reversed(samples) if sample.num_sampled == samples[0].num_sampled)
    size = f"{groups} concurrent groups of {GROUP_SIZE}, {MAX_TOKENS} tokens"
    peaks = [max(sample.flow_mib for sample in samples)], [max(sample.engine_mib for sample in samples)]
    return [
        Row(f"rl_load: the flow's memory, {size}", "MiB", peaks[0], [idle.flow_mib], "before the first group"),
        Row(f"rl_load: the engine's memory, {size}", "MiB", peaks[1], [idle.engine_mib], "before the first group"),
        Row("rl_load: engine utilization in mode async, tiny", "s per s", [busy], [1.0], "full utilization"),
        Row(f"rl_load: engine utilization in mode async, {large}", "s per s", [large_busy], [1.0], "full utilization"),
    ]


def _busy_share(folder: Path, model: str, url: str, steps: int) -> float:
    run, samples = _run_sampled(folder, url, flow_config(model, MODES["async"], BUILDER, steps))
    moments = [point.timestamp / 1000 for point in run.points("loss/total")]
    first, last = moments[min(WARM_UP, len(moments) // 2)], moments[-1]
    start = ([sample for sample in samples if sample.time_s <= first] or samples)[-1]
    end = next((sample for sample in samples if sample.time_s >= last), samples[-1])
    return (end.busy_s - start.busy_s) / (end.time_s - start.time_s)


def _run_sampled(folder: Path, url: str, config: dict[str, Any]) -> tuple[FlowRun, list[Sample]]:
    with _sampling(url) as samples:
        run = run_flow(["flows.rl"], folder, config)
    return run, samples


@contextmanager
def _sampling(url: str) -> Iterator[list[Sample]]:
    """Sample the engine and the running flow until the block ends."""
    samples: list[Sample] = []
    done = Event()

    def sample() -> None:
        while not done.wait(SAMPLE_EVERY_S):
            flow_mib = _flow_mib()
            if flow_mib:
                samples.append(_sample(url, flow_mib))

    thread = Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _sample(url: str, flow_mib: float) -> Sample:
    text = httpx.get(f"{url}/metrics", headers={"X-API-Key": KEY}, timeout=30).raise_for_status().text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return Sample(
        time.time(),
        flow_mib,
        float(figures["tinker_engine_resident_bytes"]) / MIB,
        float(figures.get('tinker_engine_tokens_total{use="sampled"}', 0)),
        float(figures["tinker_engine_busy_seconds"]),
    )


def _flow_mib() -> float:
    """Return the memory of the flow process; 0 if the flow is not running."""
    for process in psutil.Process().children():
        try:
            if "flows.rl" in process.cmdline():
                return process.memory_info().rss / MIB
        except psutil.Error:
            continue
    return 0.0
