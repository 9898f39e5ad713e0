"""Real programs and functions as scorers, including scorers that hang or fail."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from ragged_batches import make_batch
from test_evaluate import bind, evaluate, finite_differences

from objectives import ObjectiveError, prepare_features

pytestmark = pytest.mark.process

COUNT = [sys.executable, "-c", "import sys; print('digits:', sum(map(str.isdigit, sys.stdin.read())))"]


def test_a_command_scores_each_text():
    batch, outputs = make_batch([2, 2, 1], texts=["1 23", "none", "é 4"])
    bound = bind("simulation", params={"scorer": COUNT})
    evaluation = evaluate(bound, outputs, batch)
    assert prepare_features(bound, batch) == [3.0, 0.0, 1.0]
    assert evaluation.metrics == {
        "score_mean": pytest.approx(4 / 3),
        "score_max": 3.0,
        "timed_out": 0.0,
        "trained_prompts": 1.0,
    }
    assert evaluation.gradient_DT.tolist() == pytest.approx(finite_differences(bound, outputs, batch), abs=1e-7)


def test_a_function_scores_each_text(tmp_path, monkeypatch):
    (tmp_path / "my_simulator.py").write_text("class Of:\n    length = len\n")
    monkeypatch.syspath_prepend(tmp_path)
    batch, _ = make_batch([1, 1], texts=["four", ""])
    assert prepare_features(bind("simulation", params={"scorer": "my_simulator:Of.length"}), batch) == [4.0, 0.0]


def test_a_timeout_kills_the_scorer_and_its_children(tmp_path):
    pids = tmp_path / "pids"
    script = f"if [ $(cat) = slow ]; then sleep 3600 & echo $! >> {pids}; wait; fi; echo 0.5"
    batch, outputs = make_batch([1, 1], texts=["slow", "fast"])
    bound = bind("simulation", params={"scorer": ["sh", "-c", script], "timeout_s": 3, "timeout_score": 7})
    assert prepare_features(bound, batch) == [None, 0.5]
    (pid,) = map(int, Path(pids).read_text().split())
    while is_running(pid):  # the child would otherwise sleep for an hour
        time.sleep(0.01)
    metrics = evaluate(bound, outputs, batch).metrics
    assert metrics == {"score_mean": 3.75, "score_max": 7.0, "timed_out": 1.0, "trained_prompts": 1.0}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (["sh", "-c", "echo 1; echo no disk >&2; exit 3"], "exited with code 3 and printed 'no disk'; run it"),
        (["sh", "-c", "echo 0.5; exit 1"], "exited with code 1 and printed '0.5'; run it"),
        (["sh", "-c", "echo fine; echo warning >&2"], "output 'fine' is not a finite number"),
        (["echo", "nan"], "output 'nan' is not a finite number"),
        (["true"], "output '' is not a finite number"),
        (["no-such-program"], "it raised FileNotFoundError"),
        ("no_such_module:score", "ModuleNotFoundError: No module named "),
    ],
)
def test_a_failing_scorer_fails_the_term(scorer, message):
    batch, _ = make_batch([1], texts=["text"])
    with pytest.raises(ObjectiveError) as error:
        prepare_features(bind("simulation", params={"scorer": scorer}), batch)
    assert message in str(error.value)
    assert "'simulation' failed preparing" in str(error.value)


@pytest.mark.parametrize("params", [{}, {"scorer": []}, {"scorer": "a b"}, {"scorer": ["x"], "timeout_s": 0}])
def test_wrong_parameters_raise(params):
    with pytest.raises(ObjectiveError, match="The parameters of term 'simulation' are wrong"):
        bind("simulation", params=params)


def test_a_batch_without_texts_raises():
    batch, _ = make_batch([1, 1], texts=["only one"])
    with pytest.raises(ObjectiveError, match="2 datums but 1 texts"):
        prepare_features(bind("simulation", params={"scorer": COUNT}), batch)
