"""Smoke tests: each benchmark completes at its smallest size and prints its rows; speed is not tested."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import (
    balance,
    digest_cost,
    dpo_vs_cookbook,
    effects,
    engine_sampling,
    engine_service,
    engine_tenants,
    engine_vs_torch,
    estimators,
    flow_vs_cookbook,
    long_run,
    objective_cost,
    objective_terms,
    one_pass,
    rl_learns,
    rl_load,
    rl_vs_cookbook,
    scale,
    sdk_terms,
    shares,
    step_overhead,
    sweep_overhead,
    terms_on_runners,
    up_ready,
)
from benchmarks.__main__ import BENCHMARKS
from benchmarks.rows import Row, describe_machine, table

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
    check(engine_vs_torch.measure(repetitions=1, steps=2, with_smollm=False), "engine_vs_torch", 2)


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
    check(flow_vs_cookbook.measure(repetitions=1, steps=4), "flow_vs_cookbook", 3)


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
def test_digest_cost() -> None:
    check(digest_cost.measure(repetitions=1, num_datums=4, num_tokens=32), "digest_cost", 2)


@pytest.mark.slow
def test_objective_cost() -> None:
    check(objective_cost.measure(repetitions=1, num_datums=4, num_tokens=32), "objective_cost", 2)


@pytest.mark.slow
def test_objective_terms() -> None:
    rows = objective_terms.measure(repetitions=1, seconds=0.01, shape=(4, 32), num_waiting=1)
    check(rows, "objective_terms", 2)
    assert "budget 2x and 150 ms" in rows[1].note


def test_estimators() -> None:
    table = estimators.measure(num_batches=1)
    names, data, offsets, cosines, norms = ([*column.cells] for column in table.columns)
    assert len(names) == 12
    exact = [(cosines[row], norms[row]) for row, name in enumerate(names) if name == "minimum_risk"]
    assert exact == [("1.0000", "1.000")] * 3
    assert {data[row] for row, name in enumerate(names) if name == "score_function"} == {
        "on-policy samples",
        "stale samples",
    }
    assert sorted(set(offsets)) == ["0", "1", "5"]


@pytest.mark.process
def test_sdk_terms() -> None:
    rows = sdk_terms.measure(repetitions=1, seconds=0.01, num_terms=2)
    check(rows, "sdk_terms", 2)
    assert all("budget 0.012 s" in row.note for row in rows)


@pytest.mark.process
def test_terms_on_runners() -> None:
    rows = terms_on_runners.measure(kinds=["threads"], repetitions=1, seconds=0.01, num_terms=2)
    check(rows, "terms_on_runners", 1)


@pytest.mark.process
def test_balance() -> None:
    table = balance.measure(model="tiny", steps=2, methods=("upgrad", "gradnorm"))
    names, *columns = ([*column.cells] for column in table.columns)
    assert names == ["before training", "none", "upgrad", "gradnorm"]
    values = [tuple(float(str(column[row])) for column in columns[: len(balance.NAMES)]) for row in range(len(names))]
    assert values[names.index("none")] != values[names.index("upgrad")]
    opposing = columns[len(balance.NAMES)]
    assert opposing[names.index("upgrad")] == "0%"


@pytest.mark.slow
def test_one_pass() -> None:
    rows = one_pass.measure(repetitions=1, steps=2, cycle_s=2.0)
    check(rows, "one_pass", 1)
    # A busy machine may miss a tick, and never has one to spare.
    assert rows[0].ours[0] < rows[0].peer[0]


@pytest.mark.slow
def test_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SCALE", raising=False)
    monkeypatch.setattr(scale, "RUNS_PER_PROCESS", 1)
    setups = [
        scale.Setup("fast", 1, cycle_s=1.0, window_s=5),
        scale.Setup("1", 1, cycle_s=3.0, window_s=9),
        scale.Setup("10", 2, cycle_s=3.0, window_s=9),
    ]
    console = Console(width=200)
    with console.capture() as capture:
        console.print(scale.measure(setups=setups, idle_s=1))
    shown = capture.get()
    assert re.search(r"service requests +│ +[1-9]", shown)
    assert re.search(r"prefect rows task_run +│ +[1-9]", shown)
    assert re.search(r"│ 10 +│ 2 +│ 3\.0 s │ \d\.\d+ \(\d\.\d+\)", shown)


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
    assert "at most 1.5 s" in rows[0].note


def test_ratios_pair_consecutive_measurements() -> None:
    row = Row("a", "ms", ours=[2.0, 6.0, 30.0], peer=[1.0, 2.0, 5.0], peer_name="b")
    assert row.ratios == [2.0, 3.0, 6.0]
    assert "3.00 (2.00-6.00)" in printed([row])


@pytest.mark.process
def test_describe_machine_lists_cores_and_versions() -> None:
    text = describe_machine()
    assert "cores" in text
    for package in ("python", "torch", "prefect", "tinker", "tinker-cookbook"):
        assert f"{package} " in text


@pytest.mark.process
def test_help_names_every_benchmark_and_an_unknown_one_is_rejected() -> None:
    command = [sys.executable, "-m", "benchmarks"]
    shown = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in BENCHMARKS)
    rejected = subprocess.run([*command, "nothing"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert rejected.returncode == 2
    assert "unknown benchmark 'nothing'" in rejected.stderr


def test_effects() -> None:
    rows = effects.measure(num_steps=2)
    assert rows.row_count == 4 + 6, "an effect per term, and a cosine per pair"


@pytest.mark.process
def test_shares_do_not_depend_on_the_batch_size() -> None:
    rows = shares.measure(copies=(1, 4))
    columns = {str(column.header): list(column.cells) for column in rows.columns}
    assert columns["rows"] == ["8", "32", "8", "32"]
    for name in ("base", "confidence", "logic", "topology"):
        small, large, *_ = map(float, columns[name])
        assert large == pytest.approx(small, rel=0.05, abs=1e-4)
