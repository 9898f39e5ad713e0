"""What reinforcement learning makes of the processes: memory of many groups at once, the engine's busy time.

The memory is that of the flow and of the engine at their highest, against what they had when the first group began. The
busy time is what the engine's compute thread worked in mode async, of the time between the first steps and the last.
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
from blocks.home import home
from engine.models import resolve_model

LOOK_EVERY_S = 0.1
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Look:
    """At one moment: MiB of the two processes, tokens that the engine has sampled, seconds that it has computed."""

    time_s: float
    flow_mib: float
    engine_mib: float
    num_sampled: float
    busy_s: float


def measure(*, groups: int = 256, steps: int = 24, large: str = "smollm2-135m", large_steps: int = 10) -> list[Row]:
    """Two rows for memory and two for the busy time, of a model that computes next to nothing and of a larger one."""
    with scratch_home() as folder:
        bar = tqdm(total=3, desc="rl_load")
        model = str(resolve_model("tiny", home() / "cache"))
        with bench_engine(folder / "tiny", model) as url, environment(TINKER_BASE_URL=url, TINKER_API_KEY=KEY):
            busy = _busy_share(folder, model, url, steps)
            bar.update()
            schedule = {"groups_per_batch": groups}
            _, looks = _watched(folder / "many", url, flow_config(model, schedule, BUILDER, 3))
            bar.update()
        model = str(resolve_model(large, home() / "cache"))
        with bench_engine(folder / "large", model) as url, environment(TINKER_BASE_URL=url, TINKER_API_KEY=KEY):
            large_busy = _busy_share(folder, model, url, large_steps)
            bar.update()
    idle = next(each for each in reversed(looks) if each.num_sampled == looks[0].num_sampled)
    size = f"{groups} groups of {GROUP_SIZE} at once, {MAX_TOKENS} tokens"
    peaks = [max(each.flow_mib for each in looks)], [max(each.engine_mib for each in looks)]
    return [
        Row(f"rl_load: the flow's memory, {size}", "MiB", peaks[0], [idle.flow_mib], "before the first group"),
        Row(f"rl_load: the engine's memory, {size}", "MiB", peaks[1], [idle.engine_mib], "before the first group"),
        Row("rl_load: the engine at work in mode async, tiny", "s per s", [busy], [1.0], "all of the time"),
        Row(f"rl_load: the engine at work in mode async, {large}", "s per s", [large_busy], [1.0], "all of the time"),
    ]


def _busy_share(folder: Path, model: str, url: str, steps: int) -> float:
    run, looks = _watched(folder / f"async-{Path(model).name}", url, flow_config(model, MODES["async"], BUILDER, steps))
    moments = [point.timestamp / 1000 for point in run.points("loss/total")]
    first, last = moments[min(WARM_UP, len(moments) // 2)], moments[-1]
    between = [each for each in looks if first <= each.time_s <= last]
    return (between[-1].busy_s - between[0].busy_s) / (between[-1].time_s - between[0].time_s)


def _watched(folder: Path, url: str, config: dict[str, Any]) -> tuple[FlowRun, list[Look]]:
    with _looking(url) as looks:
        run = run_flow(["flows.rl"], folder, config)
    return run, looks


@contextmanager
def _looking(url: str) -> Iterator[list[Look]]:
    """Looks at the engine and the flow, while it is there, until the block ends."""
    looks: list[Look] = []
    done = Event()

    def look() -> None:
        while not done.wait(LOOK_EVERY_S):
            flow_mib = _flow_mib()
            if flow_mib:
                looks.append(_look(url, flow_mib))

    thread = Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        done.set()
        thread.join()


def _look(url: str, flow_mib: float) -> Look:
    text = httpx.get(f"{url}/metrics", headers={"X-API-Key": KEY}, timeout=30).raise_for_status().text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return Look(
        time.time(),
        flow_mib,
        float(figures["tinker_engine_resident_bytes"]) / MIB,
        float(figures.get('tinker_engine_tokens_total{use="sampled"}', 0)),
        float(figures["tinker_engine_busy_seconds"]),
    )


def _flow_mib() -> float:
    """0 where it is not there."""
    for process in psutil.Process().children():
        try:
            if "flows.rl" in process.cmdline():
                return process.memory_info().rss / MIB
        except psutil.Error:
            continue
    return 0.0
