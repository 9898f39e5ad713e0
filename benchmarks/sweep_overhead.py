"""What a sweep costs beside its trials, and how much of the machine four trials at once use.

The trials are supervised runs of a few steps on the tiny model, each with another seed, on one engine, one Prefect
server and one MLflow store. The peer is a plain loop that calls the same flow with the same configs, one after the
other; the sweep runs one at a time too, and its whole time counts: its process, its record, its report. Then it runs
four at once, and what is counted is how much of the machine's processors was busy, whoever with, while four trials were
under way: a figure that only an idle machine gives.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from prefect.settings import PREFECT_API_URL, temporary_settings

from benchmarks.rows import Row
from benchmarks.scratch import environment, scratch_home
from blocks.processes import local_engine, local_prefect_server
from flows.command_line import keep_prefect_off_the_terminal
from flows.sft import SftConfig, sft
from flows.sweep import sweep
from flows.sweeps.config import SweepConfig

BUDGET_S, BUDGET_SHARE = 1.5, 0.9
AT_ONCE = 4


def measure(*, num_trials: int | None = None, num_steps: int = 5) -> list[Row]:
    """Rows for the time per trial and for the share of the processors in use.

    Args:
        num_trials: of each kind; `TRIALS` of the environment, or a hundred, unless given.
    """
    num_trials = num_trials or int(os.environ.get("TRIALS", "100"))
    with (
        scratch_home() as home,
        local_prefect_server() as url,
        temporary_settings({PREFECT_API_URL: url}),
        local_engine(model="tiny", dtype="float32", threads=1) as engine,
        environment(TINKER_API_KEY=engine.api_key.get_secret_value() if engine.api_key else ""),
    ):
        keep_prefect_off_the_terminal()
        base = _base(engine.resolved_url, num_steps)
        sft(SftConfig.model_validate(base | {"run_name": "warm-up"}))
        loop_s = _seconds(lambda: _loop(base, num_trials))
        one_by_one = _config("one-by-one", base, num_trials, concurrency=1)
        with _watching(home / "runs" / "one-by-one", num_trials) as shares_alone:
            sweep_s = _seconds(lambda: sweep(one_by_one))
        with _watching(home / "runs" / "at-once", num_trials - AT_ONCE) as shares:
            at_once_s = _seconds(lambda: sweep(_config("at-once", base, num_trials, concurrency=AT_ONCE)))
    added = (sweep_s - loop_s) / num_trials
    used = sum(shares) / max(1, len(shares))
    return [
        Row(
            f"sweep_overhead: seconds per trial of {num_steps} steps, {num_trials} one after another",
            "s",
            ours=[sweep_s / num_trials],
            peer=[loop_s / num_trials],
            peer_name="the same flow called in a plain loop",
            note=f"the sweep adds {added:.2f} s per trial (budget {BUDGET_S:g} s: {_verdict(added <= BUDGET_S)}); "
            f"{AT_ONCE} at once take {at_once_s / num_trials:.2f} s per trial",
        ),
        Row(
            f"sweep_overhead: share of {os.cpu_count()} cores in use, {AT_ONCE} trials at once",
            "%",
            ours=[100 * used],
            peer=[100 * sum(shares_alone) / max(1, len(shares_alone))],
            peer_name="the same sweep with one at a time",
            note=f"budget {100 * BUDGET_SHARE:g} %: {_verdict(used >= BUDGET_SHARE)}; other processes count too",
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
def _watching(directory: Path, num_trials: int) -> Iterator[list[float]]:
    """How much of all processors was busy, second by second, from the first point until so many trials have ended."""
    shares: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        before = _ticks()
        while not ended.wait(1.0):
            now = _ticks()
            record = directory / "trials.jsonl"
            lines = record.read_text().splitlines() if record.exists() else []
            if lines and len(lines) - 1 < num_trials:
                shares.append((now[0] - before[0]) / max(1, now[1] - before[1]))
            before = now

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield shares
    finally:
        ended.set()
        watching.join()


def _ticks() -> tuple[int, int]:
    """Of all processors since the machine started: those that were busy, and all."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _verdict(holds: bool) -> str:
    return "holds" if holds else "EXCEEDED"
