"""Each benchmark runs to its end at its smallest size and prints its rows. How fast is no test's business."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import (
    dpo_vs_cookbook,
    engine_sampling,
    engine_service,
    engine_tenants,
    engine_vs_torch,
    flow_vs_cookbook,
    long_run,
    objective_cost,
    objective_terms,
    one_pass,
    rl_learns,
    rl_load,
    rl_vs_cookbook,
    step_overhead,
    sweep_overhead,
    up_ready,
)
from benchmarks.__main__ import BENCHMARKS
from benchmarks.machine import describe
from benchmarks.rows import Row, table

ROOT = Path(__file__).parent.parent.parent


def printed(rows: list[Row]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(rows))
    return capture.get()


def check(rows: list[Row], name: str, num_rows: int) -> None:
    assert len(rows) == num_rows
    assert printed(rows).count(f"{name}: ") == num_rows
    for row in rows:
        assert all(figure > 0 for figure in (*row.ours, *row.peer, *row.ratios))


@pytest.mark.slow
def test_step_overhead() -> None:
    rows = step_overhead.measure(repetitions=1, steps=1, large_steps=1)
    check(rows, "step_overhead", 5)
    assert "budget 30 ms" in rows[0].note


@pytest.mark.slow
def test_engine_vs_torch() -> None:
    check(engine_vs_torch.measure(repetitions=1, steps=1, with_smollm=False), "engine_vs_torch", 1)


@pytest.mark.slow
def test_engine_sampling() -> None:
    check(engine_sampling.measure(model="tiny", repetitions=1, num_prompts=4), "engine_sampling", 4)


@pytest.mark.slow
def test_engine_service() -> None:
    rows = engine_service.measure(repetitions=3)
    check(rows, "engine_service", 1)
    assert "budget 5 ms" in rows[0].note


@pytest.mark.slow
def test_engine_tenants() -> None:
    rows = engine_tenants.measure(model="tiny", repetitions=1)
    check(rows, "engine_tenants", 1)
    assert "MiB of the engine's memory" in rows[0].note


@pytest.mark.slow
def test_flow_vs_cookbook(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    check(flow_vs_cookbook.measure(repetitions=1, steps=4), "flow_vs_cookbook", 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rl_vs_cookbook(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    check(rl_vs_cookbook.measure(repetitions=1, steps=6), "rl_vs_cookbook", 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rl_learns(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    check(rl_learns.measure(seeds=1, steps=3), "rl_learns", 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rl_load(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    rows = rl_load.measure(groups=16, steps=6, large="tiny", large_steps=6)
    check(rows, "rl_load", 4)
    assert rows[2].ours[0] <= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dpo_vs_cookbook(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    rows = dpo_vs_cookbook.measure(repetitions=1, epochs=1, cycle_s=0.5)
    check(rows, "dpo_vs_cookbook", 2)
    for row in rows:
        apart = re.search(r"losses of the first 16 steps at most (\S+) apart: ours (.*); theirs (.*)", row.note)
        assert apart
        assert float(apart[1]) < 1e-4
        assert len(apart[2].split()) == len(apart[3].split()) == 16


@pytest.mark.slow
def test_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    memory, database = long_run.measure(steps=20)
    assert memory.unit == "MiB"
    assert database.ours[0] > 0


@pytest.mark.slow
def test_objective_cost() -> None:
    check(objective_cost.measure(repetitions=1, num_datums=4, num_tokens=32), "objective_cost", 2)


@pytest.mark.slow
def test_objective_terms() -> None:
    rows = objective_terms.measure(repetitions=1, seconds=0.01, shape=(4, 32), num_waiting=1)
    check(rows, "objective_terms", 2)
    assert "budget 2x and 150 ms" in rows[1].note


@pytest.mark.slow
def test_one_pass() -> None:
    rows = one_pass.measure(repetitions=1, steps=2, cycle_s=2.0)
    check(rows, "one_pass", 1)
    # A busy machine may miss a tick, and never has one to spare.
    assert rows[0].ours[0] < rows[0].peer[0]


@pytest.mark.slow
def test_up_ready() -> None:
    rows = up_ready.measure(repetitions=1)
    check(rows, "up_ready", 1)
    assert "budget 30 s" in rows[0].note


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sweep_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    rows = sweep_overhead.measure(num_trials=8, num_steps=2)
    check(rows, "sweep_overhead", 2)
    assert "budget 1.5 s" in rows[0].note


def test_ratios_are_of_figures_measured_next_to_each_other() -> None:
    row = Row("a", "ms", ours=[2.0, 6.0, 30.0], peer=[1.0, 2.0, 5.0], peer_name="b")
    assert row.ratios == [2.0, 3.0, 6.0]
    assert "3.00 (2.00-6.00)" in printed([row])


def test_the_machine_is_named() -> None:
    text = describe()
    assert "cores" in text
    for package in ("python", "torch", "prefect", "tinker", "tinker-cookbook"):
        assert f"{package} " in text


def test_help_names_every_benchmark_and_an_unknown_one_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks"]
    shown = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in BENCHMARKS)
    refused = subprocess.run([*command, "nothing"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "there is no benchmark 'nothing'" in refused.stderr
