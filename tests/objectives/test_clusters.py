"""Terms on workers of real Dask and Ray clusters: the numbers and sentences of every execution, nothing left."""

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
    """One objective of each execution, whose local cluster is started once and closed with it."""
    fns = ("surprise", "lengths", "where", "hangs", "raises", "nan", "shape", "dies", "keeps_to_itself")
    with Objective(regularizers=[{"name": f"test_{fn}", "execution": request.param} for fn in fns]) as objective:
        yield objective
    assert not [line for line in _processes_below(os.getpid()) if "local_dask" in line or "raylet" in line]


def term_of(objective: Objective, fn: str, **fields):
    (term,) = [each for each in objective.regularizers if each.name == f"test_{fn}"]
    fields["params"] = {**term.params, **fields.get("params", {})}
    return replace(term, **fields)


def run(objective: Objective, term, batch, outputs) -> Evaluation:
    features = objective.runner.prepare(term, batch)
    return objective.runner.evaluate(term, outputs, replace(batch, features=features), first_step=True)


@pytest.mark.parametrize("fn", ["surprise", "lengths"])
@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_worker_gives_the_same_bits(objective, fn, timeout_s):
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


@pytest.mark.parametrize(("fn", "says"), [("raises", "KeyError: 'colour'"), ("nan", "nan"), ("shape", "shape (3,)")])
def test_every_failure_is_the_sentence_that_it_is_inline(objective, fn, says):
    batch, outputs = make_batch([2, 2])
    sentences = []
    for evaluate in (objective.runner.evaluate, evaluate_term):
        with pytest.raises(ObjectiveError) as refused:
            evaluate(term_of(objective, fn), outputs, batch, True)
        sentences.append(str(refused.value))
    assert sentences[0] == sentences[1]
    assert says in sentences[0]


def test_what_hangs_is_killed_with_its_worker_and_the_next_batch_has_another(objective):
    batch, outputs = make_batch([2])
    hangs = term_of(objective, "hangs", timeout_s=0.5)
    with pytest.raises(ObjectiveError, match=r"evaluating: .*timeout_s of 0\.5 s, and its worker was killed"):
        run(objective, hangs, batch, outputs)
    quick = term_of(objective, "hangs", params={"slow_s": 0.01})
    assert run(objective, quick, batch, outputs).gradient_DT.any()


def test_a_worker_that_dies_is_named_and_replaced(objective):
    batch, outputs = make_batch([2])
    with pytest.raises(ObjectiveError, match=r"'test_dies' failed evaluating: its worker of the .* did not finish"):
        run(objective, term_of(objective, "dies"), batch, outputs)
    assert run(objective, term_of(objective, "surprise"), batch, outputs).gradient_DT.any()


def test_features_that_cannot_leave_a_worker_are_refused(objective):
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
    run = subprocess.Popen([sys.executable, script], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
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
def test_a_missing_extra_is_said_before_the_first_step(execution: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, MODULES[execution], None)
    with pytest.raises(
        ObjectiveError,
        match=rf"'length' cannot have a worker of {execution}: .*pip install 'tinker-flows\[{execution}\]'",
    ):
        Objective(regularizers=[{"name": "length", "execution": execution}])


@pytest.mark.parametrize("execution", ["dask", "ray"])
def test_a_term_that_no_worker_can_import_is_refused_at_once(execution: str):
    @regularizer(f"test_local_{execution}")
    def local(outputs, batch):
        return outputs.logprobs_DT

    with pytest.raises(ObjectiveError, match=rf"cannot have a worker of {execution}: .*local cannot be imported"):
        Objective(regularizers=[{"name": f"test_local_{execution}", "execution": execution}])


def _processes_below(parent: int) -> list[str]:
    """The processes that descend from one, as lines of pid and command."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [(int(pid), int(ppid), args) for pid, ppid, args in (line.split(None, 2) for line in listed.splitlines())]
    below, found = {parent}, []
    while new := [(pid, args) for pid, ppid, args in rows if ppid in below and pid not in below]:
        below |= {pid for pid, _ in new}
        found += [f"{pid} {args}" for pid, args in new]
    return found


def _is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
