"""Progress of a run in a terminal of 80 columns and in a file."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from flows.monitoring.progress import Pauses, Progress, TimeLeft, method_figures

SFT = {"loss/total": 6.9021, "loss/base": 6.1684, "train_mean_nll": 6.1684, "cost/usd": 0.0123}
RL = {"env/all/reward/total": 0.0149, "reward/short/value": 0.25, "train_mean_nll": 5.0, "loss/total": 0.02}
DPO = {"accuracy": 0.9, "margin": 3.72, "train_mean_nll": 6.0, "loss/total": 0.1, "cost/usd": 0.0}
DISTILL = {"teacher_kl": 0.31, "loss/total": 0.1}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


LOG: Any = None  # outside of a flow run, nothing is logged


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, name: str, metrics: Mapping[str, float]) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(name, 0, 24, LOG) as progress:
        for _ in range(6):
            progress.advance(metrics)
        print("a library objects", file=sys.stderr)
        progress.advance(metrics)
    return stream.getvalue()


@pytest.mark.parametrize("name", ["demo", "a-very-long-name-of-a-run-with-many-settings"])
@pytest.mark.parametrize(
    ("metrics", "label"),
    [(SFT, "nll=6.168"), (RL, "reward=0.0149"), (DPO, "accuracy=0.9"), (DISTILL, "teacher_kl=0.31")],
)
def test_the_bar_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, metrics: Mapping[str, float], label: str, name: str
) -> None:
    lines = re.split(r"[\r\n]", shown(monkeypatch, Terminal(), name, metrics))
    assert max(map(len, lines)) <= 80
    bars = [line for line in lines if "7/24" in line]
    assert label in bars[-1]
    assert len(re.findall(r"\|(.*)\|", bars[-1])[0]) >= 5
    assert not bars[-1].rstrip("]").endswith((",", "="))


def test_other_output_stands_on_lines_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = (line for line in re.split(r"[\r\n]", shown(monkeypatch, Terminal(), "demo", SFT)) if "objects" in line)
    assert "step/s" not in line
    assert "|" not in line


def test_a_file_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, io.StringIO(), "demo", SFT)
    assert "\r" not in text
    lines = [line for line in text.splitlines() if re.match(r"demo: \d", line)]
    assert [line.split(",")[0] for line in lines] == [f"demo: {step} of 24 steps" for step in (1, 3, 5)]
    assert "nll=6.168, loss=6.902, $0.0123" in lines[-1]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_time_left_has_the_evaluations_and_the_pace_has_not(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stderr", stream := Terminal() if terminal else io.StringIO())
    pauses = Pauses(dict.fromkeys([0, 5, 10], "often"), [10])
    with Progress("demo", 0, 10, LOG, pauses) as progress:
        progress.advance(SFT | {"time/step": 372.0, "time/evaluation": 370.0})
        progress.advance(SFT | {"time/step": 4.0})
    text = stream.getvalue()
    if terminal:  # 8 steps of 4 s and two evaluations
        assert "2/10 [12:52, 4 s/step," in text
    else:
        lines = [line.partition("$0.0123, ")[2] for line in text.splitlines()]
        assert lines == ["2 s/step, 0:12:38 left", "4 s/step, 0:12:52 left"]


def test_time_left_of_a_steady_run_does_not_jump() -> None:
    """Long evaluations, examples and checkpoints are expected from their first measurement on."""
    step_s, often_s, rarely_s, examples_s, save_s = 2.0, 100.0, 300.0, 50.0, 30.0
    kinds = {step: (True, step % 10 == 0) for step in range(0, 31, 5)}
    saves = [4, 8, 12, 16, 20, 24, 28, 30]
    time_left = TimeLeft(0, 30, Pauses(kinds, saves))
    evaluation_s = {step: rarely_s if is_rare else often_s for step, (_, is_rare) in kinds.items()}
    for step in range(30):
        evaluation = evaluation_s.get(step, 0.0) + examples_s * (step == 0)
        seconds = step_s + save_s * (step in saves) + evaluation
        examples = {"time/examples": examples_s} if step == 0 else {}
        time_left.add({"time/step": seconds, "time/evaluation": evaluation} | examples)
        rest = step_s * (29 - step) + save_s * sum(save > step for save in saves)
        rest += sum(seconds for later, seconds in evaluation_s.items() if later > step) + examples_s
        assert time_left.pace == step_s
        if step >= 5:  # each kind of work was measured
            assert time_left.seconds == pytest.approx(rest)


@pytest.mark.parametrize("first", [0, 3])
def test_a_checkpoint_after_each_step_is_part_of_the_pace(first: int) -> None:
    """The first step, which takes longer, does not fix the pace of the run."""
    time_left = TimeLeft(first, 10, Pauses({}, range(1, 11)))
    time_left.add({"time/step": 50.0})
    assert (time_left.pace, time_left.seconds) == (50.0, 50.0 * (9 - first))
    time_left.add({"time/step": 4.0})
    time_left.add({"time/step": 6.0})
    assert (time_left.pace, time_left.seconds) == (5.0, 5.0 * (7 - first))


def test_parts_of_a_reward_follow_it() -> None:
    assert method_figures(RL) == ["reward=0.0149", "short=0.25", "loss=0.02"]
    assert method_figures({}) == []
