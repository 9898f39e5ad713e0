"""Time that a sweep adds to each trial, and processor utilization with four concurrent trials.

The trials are short supervised runs on the tiny model with different seeds, on one engine, one Prefect server and one
MLflow store. The peer is a plain loop that calls the same flow with the same configs. The sweep first runs one trial at
a time; its whole duration counts, including the start of the trials' process, the record and the report. It then runs
four trials at once, and the second figure is the busy share of all processors while four trials run; its peer is the
sweep with one trial at a time. Other processes count too, so run it on an idle machine.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.rows import Row
from benchmarks.scratch import environment, scratch_home, scratch_prefect_server
from blocks.servers.processes import local_engine
from flows.config.train import SftConfig
from flows.runs.cli import silence_console_logs
from flows.sft import sft
from flows.sweep import sweep
from flows.sweeps.config import SweepConfig

MAX_ADDED_S, MIN_SHARE = 1.5, 0.9
CONCURRENCY = 4


def measure(*, num_trials: int | None = None, num_steps: int = 5) -> list[Row]:
    """Return a row for the time per trial and one for the processor utilization.

    Args:
        num_trials: number of trials of each side; default: the environment variable `TRIALS`, or 100.
    """
    num_trials = num_trials or int(os.environ.get("TRIALS", "100"))
    with (
        scratch_home() as home,
        scratch_prefect_server(),
        local_engine(model="tiny", dtype="float32", threads=1) as engine,
        environment(TINKER_API_KEY=engine.api_key.get_secret_value() if engine.api_key else ""),
    ):
        silence_console_logs()
        base = _base(engine.resolved_url, num_steps)
        sft(SftConfig.model_validate(base | {"run_name": "warm-up"}))
        loop_s = _seconds(lambda: _loop(base, num_trials))
        sequential = _config("sequential", base, num_trials, concurrency=1)
        with _processor_shares(home / "runs" / "sequential", num_trials) as sequential_shares:
            sweep_s = _seconds(lambda: sweep(sequential))
        with _processor_shares(home / "runs" / "concurrent", num_trials - CONCURRENCY) as shares:
            concurrent_s = _seconds(lambda: sweep(_config("concurrent", base, num_trials, concurrency=CONCURRENCY)))
    added = (sweep_s - loop_s) / num_trials
    used = sum(shares) / max(1, len(shares))
    return [
        Row(
            f"sweep_overhead: seconds per trial of {num_steps} steps, {num_trials} sequential trials",
            "s",
            ours=[sweep_s / num_trials],
            peer=[loop_s / num_trials],
            peer_name="the same flow called in a plain loop",
            note=f"the sweep adds {added:.2f} s per trial (at most {MAX_ADDED_S:g} s: "
            f"{_verdict(added <= MAX_ADDED_S)}); "
            f"{CONCURRENCY} concurrent trials take {concurrent_s / num_trials:.2f} s per trial",
        ),
        Row(
            f"sweep_overhead: share of {os.cpu_count()} cores in use, {CONCURRENCY} concurrent trials",
            "%",
            ours=[100 * used],
            peer=[100 * sum(sequential_shares) / max(1, len(sequential_shares))],
            peer_name="the same sweep with one trial at a time",
            note=f"at least {100 * MIN_SHARE:g} %: {_verdict(used >= MIN_SHARE)}; other processes count too",
        ),
    ]


def _base(url: str, num_steps: int) -> dict[str, Any]:
    common = {"renderer_name": "qwen3_instruct", "max_length": 512, "batch_size": 4}
    return {
        "model": "tiny",
        "base_url": url,
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "num_steps": num_steps,
        "eval_every": 0,
        "data": {"builder": "examples.gsm8k:Gsm8kBuilder", "params": {"common_config": common}},
        "objective": {"regularizers": [{"name": "logic", "weight": 1.0}]},
    }


def _config(run_name: str, base: dict[str, Any], num_trials: int, concurrency: int) -> SweepConfig:
    return SweepConfig(
        run_name=run_name,
        base=base,
        seeds=tuple(range(num_trials)),
        metric="train_mean_nll",
        concurrency=concurrency,
    )


def _loop(base: dict[str, Any], num_trials: int) -> None:
    for seed in range(num_trials):
        sft(SftConfig.model_validate(base | {"run_name": f"loop-{seed}", "seed": seed}))


def _seconds(run: Any) -> float:
    started = perf_counter()
    run()
    return perf_counter() - started


@contextmanager
def _processor_shares(directory: Path, num_trials: int) -> Iterator[list[float]]:
    """Sample the busy share of all processors every second while fewer than `num_trials` trials have ended."""
    shares: list[float] = []
    stop = threading.Event()

    def sample() -> None:
        previous = _ticks()
        while not stop.wait(1.0):
            now = _ticks()
            record = directory / "trials.jsonl"
            lines = record.read_text().splitlines() if record.exists() else []
            # A line for the single search point, then one per ended trial.
            if lines and len(lines) - 1 < num_trials:
                shares.append((now[0] - previous[0]) / max(1, now[1] - previous[1]))
            previous = now

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield shares
    finally:
        stop.set()
        sampler.join()


def _ticks() -> tuple[int, int]:
    """Return the busy ticks and all ticks of all processors since boot."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"
