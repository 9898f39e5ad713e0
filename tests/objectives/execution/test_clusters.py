"""Terms on workers of real Dask and Ray clusters: equal results and messages, and cleanup."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import broken_terms  # noqa: F401  # registers its terms
import pytest
import stubborn_terms  # noqa: F401  # registers its terms
import torch
from ragged_batches import make_batch

from objectives import Evaluation, Objective, ObjectiveError, evaluate_term, prepare_features, regularizer

MODULES = {"dask": "distributed", "ray": "ray"}
EXECUTIONS = [
    pytest.param(
        execution,
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(
                importlib.util.find_spec(module) is None,
                reason=f"the extra {execution} is not installed: pip install -c constraints.txt -e '.[{execution}]'",
            ),
        ],
    )
    for execution, module in MODULES.items()
]


@pytest.fixture(autouse=True)
def no_cluster_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "DASK_SCHEDULER_ADDRESS", "DASK_SCHEDULER__ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module", params=EXECUTIONS)
def objective(request: pytest.FixtureRequest) -> Iterator[Objective]:
    """Objective per execution, whose local cluster starts once and ends with the objective."""
    fns = ("surprise", "lengths", "where", "hangs", "raises", "nan", "shape", "dies", "keeps_to_itself")
    with Objective(regularizers=[{"name": f"test_{fn}", "execution": request.param} for fn in fns]) as objective:
        yield objective
    assert not [line for line in _processes_below(os.getpid()) if "local_dask" in line or "raylet" in line]


def term_of(objective: Objective, fn: str, **fields):
    (term,) = [regularizer for regularizer in objective.regularizers if regularizer.name == f"test_{fn}"]
    fields["params"] = {**term.params, **fields.get("params", {})}
    return replace(term, **fields)


def run(objective: Objective, term, batch, outputs) -> Evaluation:
    features = objective.runner.prepare(term, batch)
    return objective.runner.evaluate(term, outputs, replace(batch, features=features), first_step=True)


@pytest.mark.parametrize("fn", ["surprise", "lengths"])
@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_workers_give_bitwise_equal_results(objective, fn, timeout_s):
    batch, outputs = make_batch([3, 0, 4])
    outputs = replace(outputs, logprobs_DT=outputs.logprobs_DT.float())
    term = term_of(objective, fn, timeout_s=timeout_s)
    evaluation = run(objective, term, batch, outputs)
    expected = evaluate_term(term, outputs, replace(batch, features=prepare_features(term, batch)), first_step=True)
    assert torch.equal(evaluation.gradient_DT, expected.gradient_DT)
    assert evaluation.value == expected.value
    assert evaluation.metrics["pid" if fn == "surprise" else "prepared_by"] != os.getpid()


def test_a_worker_has_one_thread_and_no_datums_of_the_service(objective):
    batch, outputs = make_batch([2])
    where = run(objective, term_of(objective, "where"), replace(batch, datums=len), outputs).metrics
    assert (where["threads"], where["datums"]) == (1, 0)


@pytest.mark.parametrize(("fn", "message"), [("raises", "KeyError: 'colour'"), ("nan", "nan"), ("shape", "shape (3,)")])
def test_failures_have_the_same_message_as_inline(objective, fn, message):
    batch, outputs = make_batch([2, 2])
    sentences = []
    for evaluate in (objective.runner.evaluate, evaluate_term):
        with pytest.raises(ObjectiveError) as error:
            evaluate(term_of(objective, fn), outputs, batch, True)
        sentences.append(str(error.value))
    assert sentences[0] == sentences[1]
    assert message in sentences[0]


def test_a_hanging_worker_is_killed_and_replaced(objective):
    batch, outputs = make_batch([2])
    hangs = term_of(objective, "hangs", timeout_s=0.5)
    with pytest.raises(ObjectiveError, match=r"evaluating: .*timeout_s of 0\.5 s, and its worker was killed"):
        run(objective, hangs, batch, outputs)
    quick = term_of(objective, "hangs", params={"slow_s": 0.01})
    assert run(objective, quick, batch, outputs).gradient_DT.any()


def test_a_dead_worker_is_reported_and_replaced(objective):
    batch, outputs = make_batch([2])
    with pytest.raises(ObjectiveError, match=r"'test_dies' failed evaluating: its worker of the .* did not finish"):
        run(objective, term_of(objective, "dies"), batch, outputs)
    assert run(objective, term_of(objective, "surprise"), batch, outputs).gradient_DT.any()


def test_unpicklable_features_of_a_worker_raise(objective):
    batch, _ = make_batch([2])
    with pytest.raises(ObjectiveError, match="'test_keeps_to_itself' failed preparing: what it made cannot leave"):
        objective.runner.prepare(term_of(objective, "keeps_to_itself"), batch)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_cluster_ends_with_a_run_that_is_killed(execution: str, tmp_path: Path):
    script = tmp_path / "run.py"
    # As a user writes it: without a guard against being imported.
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import os, stubborn_terms\n"
        "from ragged_batches import make_batch\n"
        "from objectives import Objective\n"
        f"entries = [{{'name': f'test_{{name}}', 'execution': {execution!r}}} for name in ('where', 'hangs')]\n"
        "objective = Objective(regularizers=entries)\n"
        "where, hangs = objective.regularizers\n"
        "batch, outputs = make_batch([2])\n"
        "objective.runner.evaluate(where, outputs, batch, True)\n"
        "print('hanging', flush=True)\n"
        "objective.runner.evaluate(hangs, outputs, batch, True)\n"
    )
    run = subprocess.Popen([sys.executable, script], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        assert run.stdout.readline() == "hanging\n"
        time.sleep(2)  # it hangs
        pids = {int(line.split()[0]) for line in _processes_below(run.pid)}
        assert len(pids) >= 3
    finally:
        run.kill()
        run.wait()
    deadline = time.monotonic() + 120  # the agents of Ray itself look for their raylet once in half a minute
    while any(_is_there(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not [pid for pid in pids if _is_there(pid)]


@pytest.mark.parametrize("execution", ["dask", "ray"])
def test_a_missing_extra_raises_on_construction(execution: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, MODULES[execution], None)
    with pytest.raises(
        ObjectiveError,
        match=rf"'length' cannot run in a worker of {execution}: .*pip install 'tinker-flows\[{execution}\]'",
    ):
        Objective(regularizers=[{"name": "length", "execution": execution}])


@pytest.mark.parametrize("execution", ["dask", "ray"])
def test_a_term_that_no_worker_can_import_raises_on_construction(execution: str):
    @regularizer(f"test_local_{execution}")
    def local(outputs, batch):
        return outputs.logprobs_DT

    with pytest.raises(ObjectiveError, match=rf"cannot run in a worker of {execution}: .*local cannot be imported"):
        Objective(regularizers=[{"name": f"test_local_{execution}", "execution": execution}])


def _processes_below(parent: int) -> list[str]:
    """List the descendants of a process, as lines of pid and command."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [(int(pid), int(ppid), args) for pid, ppid, args in (line.split(None, 2) for line in listed.splitlines())]
    below, actual = {parent}, []
    while new := [(pid, args) for pid, ppid, args in rows if ppid in below and pid not in below]:
        below |= {pid for pid, _ in new}
        actual += [f"{pid} {args}" for pid, args in new]
    return actual


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
