"""Table of `tinker-flows status`: whole run names at 80 columns, and the metric that says something about a run."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from blocks.terminal import TextConsole
from deployments.status import RunStatus, _main_metric, _table

RUN: Any = SimpleNamespace(fields={})


@pytest.mark.parametrize("writer", ["", "process 4711 on host, flow run 1"])
@pytest.mark.parametrize("name", ["demo-all-steps", "without-logic-and-topology-2"])
def test_run_names_are_whole_at_80_columns(name: str, writer: str) -> None:
    run = RunStatus(
        name,
        "tiny",
        "finished",
        "",
        "",
        step=24,
        num_steps=24,
        checkpoint_step=24,
        metric="test/nll",
        value=1.204,
        writer=writer,
        mlflow_run_id="79ea61b8" * 4,
    )
    console = TextConsole(width=80, file=(stream := io.StringIO()))
    console.print(_table([run], console.width))
    text = stream.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(word in text for word in (name, "finished", "24 of 24", "test/nll", "1.204"))
    assert ("79ea61b8" in text) == (len(name) < 20 and not writer)


def shown(width: int, name: str, metric: str, writer: str = "") -> str:
    run = RunStatus(
        name,
        "tiny",
        "running" if writer else "finished",
        "",
        "",
        step=24,
        num_steps=24,
        checkpoint_step=24,
        metric=metric,
        value=0.1234,
        writer=writer,
        mlflow_run_id="79ea61b8" * 4,
    )
    console = TextConsole(width=width, file=(stream := io.StringIO()))
    console.print(_table([run], console.width))
    text = stream.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    assert all(word in text for word in (name, run.state, "24 of 24"))
    return text


@pytest.mark.parametrize(("metric_step", "is_shown"), [(24, False), (23, False), (20, True)])
def test_step_of_an_older_value_is_shown(metric_step: int, is_shown: bool) -> None:
    """The batch of step 23 is the last one that 24 steps train on."""
    run = RunStatus("demo", "tiny", "finished", "", "", 24, 24, 24, "", "test/nll", 1.204, metric_step)
    console = TextConsole(width=100, file=(stream := io.StringIO()))
    console.print(_table([run], console.width))
    assert (f"at step {metric_step}" in stream.getvalue()) == is_shown


@pytest.mark.parametrize("writer", ["", "process 4711 on host, flow run 1"])
@pytest.mark.parametrize("metric", ["test/env/all/reward/total", "env/all/reward/total", "test/term/consistency/value"])
@pytest.mark.parametrize("length", [20, 32, 38, 44])
def test_metrics_of_long_names_are_shortened(length: int, metric: str, writer: str) -> None:
    text = shown(80, "r" * length, metric, writer)
    assert metric.rpartition("/")[2] in text
    assert "0.1234" in text


def test_the_shortened_name_of_a_metric_keeps_what_it_can() -> None:
    reward = "test/env/all/reward/total"
    assert reward in shown(80, "r" * 20, reward)
    assert " test/reward/total " in shown(80, "r" * 32, reward)
    assert " …/reward/total " in shown(80, "r" * 36, reward)
    assert "0.1234" not in shown(80, "r" * 50, reward)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"teacher_kl": 0.3, "env/all/reward/total": 0.0}, "teacher_kl"),
        ({"teacher_kl": 0.3, "test/teacher_kl": 0.2, "env/all/reward/total": 0.0}, "test/teacher_kl"),
        ({"teacher_kl": 0.3, "env/all/reward/total": 0.5}, "env/all/reward/total"),
        ({"env/all/reward/total": 0.0}, "env/all/reward/total"),
    ],
)
def test_distillation_without_rewards_shows_the_teacher(metrics: dict[str, float], expected: str) -> None:
    assert _main_metric(RUN, metrics) == expected
