"""Terms on threads, on the event loop and in processes: equal results and isolated failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import broken_terms  # noqa: F401  # registers its terms
import pytest
import stubborn_terms
import torch
from ragged_batches import make_batch

from objectives import Evaluation, Objective, ObjectiveError, evaluate_term, prepare_features, regularizer
from objectives.errors import NotFiniteError

pytestmark = pytest.mark.process

EXECUTIONS = ("inline", "thread", "process")


@pytest.fixture(scope="module")
def objective() -> Iterator[Objective]:
    """Objective whose terms run in processes, which start once for all tests of this module."""
    names = ("surprise", "lengths", "hangs", "raises", "nan", "shape")
    entries = [{"name": f"{name}-process", "fn": f"test_{name}", "execution": "process"} for name in names]
    with Objective(regularizers=entries) as objective:
        yield objective


def bind(fn: str, execution: str, **fields):
    return Objective(
        regularizers=[{"name": f"{fn}-{execution}", "fn": f"test_{fn}", "execution": execution, **fields}]
    ).regularizers[0]


def run(objective: Objective, term, batch, outputs) -> Evaluation:
    features = objective.runner.prepare(term, batch)
    return objective.runner.evaluate(term, outputs, replace(batch, features=features), first_step=True)


@pytest.mark.parametrize("fn", ["surprise", "lengths"])
@pytest.mark.parametrize(
    ("execution", "timeout_s"),
    [("inline", None), ("thread", None), ("thread", 60.0), ("process", None), ("process", 60.0)],
)
def test_all_executions_are_bitwise_equal(objective, fn, execution, timeout_s):
    batch, outputs = make_batch([3, 0, 4])
    outputs = replace(outputs, logprobs_DT=outputs.logprobs_DT.float())
    term = bind(fn, execution, timeout_s=timeout_s)
    evaluation = run(objective, term, batch, outputs)
    expected = evaluate_term(term, outputs, replace(batch, features=prepare_features(term, batch)), first_step=True)
    assert torch.equal(evaluation.gradient_DT, expected.gradient_DT)
    assert evaluation.value == expected.value
    pid = evaluation.metrics["pid" if fn == "surprise" else "prepared_by"]
    assert (pid == os.getpid()) == (execution != "process")


def test_a_process_receives_parameters_and_is_reused(objective):
    batch, outputs = make_batch([2, 2])
    cube, square = (bind("surprise", "process", params={"power": power}) for power in (3, 2))
    first, second = (run(objective, term, batch, outputs) for term in (cube, square))
    assert first.value == pytest.approx((outputs.logprobs_DT**3).mean().item())
    assert second.value == pytest.approx((outputs.logprobs_DT**2).mean().item())
    assert first.metrics["pid"] == second.metrics["pid"]


def test_a_hanging_process_is_killed_and_replaced(objective):
    batch, outputs = make_batch([2])
    term = bind("hangs", "process", timeout_s=0.5)
    with pytest.raises(
        ObjectiveError, match=r"'hangs-process' failed evaluating: .*timeout_s of 0\.5 s, and its process"
    ):
        run(objective, term, batch, outputs)
    assert run(objective, bind("hangs", "process", params={"slow_s": 0.01}), batch, outputs).gradient_DT.any()


def test_a_hanging_thread_is_abandoned_and_its_term_refused_until_it_ends():
    batch, outputs = make_batch([2])
    stubborn_terms.RELEASE.clear()
    objective, term = Objective(), bind("hangs", "thread", timeout_s=0.2)
    try:
        with pytest.raises(
            ObjectiveError, match=r"timeout_s of 0\.2 s and continues .*set execution='process' to kill"
        ):
            run(objective, term, batch, outputs)
        before = threading.active_count()
        with pytest.raises(ObjectiveError, match="still busy with an earlier batch"):
            run(objective, term, batch, outputs)
        assert threading.active_count() == before
    finally:
        stubborn_terms.RELEASE.set()
    (hanging_thread,) = [
        thread for thread in threading.enumerate() if thread.name == "term-hangs-thread evaluating"
    ] or [None]
    if hanging_thread:
        hanging_thread.join(10)
    assert run(objective, term, batch, outputs).gradient_DT.any()


def test_async_terms_are_awaited_on_one_loop():
    batch, outputs = make_batch([2])
    objective = Objective()
    threads = {run(objective, bind("awaited", "async"), batch, outputs).metrics["thread"] for _ in range(3)}
    assert len(threads) == 1
    assert threads != {threading.get_ident() % 2**31}
    assert run(objective, bind("awaited", "thread"), batch, outputs).metrics["thread"] in threads


def test_an_async_term_is_cancelled_at_its_limit():
    batch, outputs = make_batch([2])
    term = bind("awaited", "async", timeout_s=0.2, params={"slow_s": 60})
    with pytest.raises(ObjectiveError, match=r"took longer than its timeout_s of 0\.2 s and was cancelled"):
        run(Objective(), term, batch, outputs)


def test_a_blocked_loop_is_abandoned_and_replaced():
    batch, outputs = make_batch([2])
    stubborn_terms.RELEASE.clear()
    try:
        with pytest.raises(ObjectiveError, match="blocks the event loop"):
            run(Objective(), bind("awaited", "async", timeout_s=0.2, params={"blocking": True}), batch, outputs)
        assert run(Objective(), bind("awaited", "async", timeout_s=5), batch, outputs).gradient_DT.any()
    finally:
        stubborn_terms.RELEASE.set()


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize(
    ("fn", "kind", "expected"),
    [
        ("raises", ObjectiveError, "KeyError: 'colour'"),
        ("nan", NotFiniteError, "nan"),
        ("shape", ObjectiveError, "shape (3,)"),
    ],
)
def test_failures_have_the_same_type_and_message_in_every_execution(objective, execution, fn, kind, expected):
    batch, outputs = make_batch([2, 2])
    with pytest.raises(ObjectiveError) as refused:
        run(objective, bind(fn, execution), batch, outputs)
    assert type(refused.value) is kind  # guards.not_finite catches only its own type
    message = str(refused.value)
    assert f"'{fn}-{execution}'" in message
    assert expected in message
    assert message.endswith(".")
    assert "\n" not in message


def test_a_dead_process_is_reported_with_its_status_and_replaced():
    batch, outputs = make_batch([2])
    with Objective(regularizers=[{"name": "test_dies", "execution": "process"}]) as objective:
        for _ in range(2):
            with pytest.raises(ObjectiveError, match="'test_dies' failed evaluating: its process ended with status 7"):
                run(objective, objective.regularizers[0], batch, outputs)


def test_unpicklable_features_of_a_process_raise():
    batch, _ = make_batch([2])
    with (
        Objective(regularizers=[{"name": "test_keeps_to_itself", "execution": "process"}]) as objective,
        pytest.raises(ObjectiveError, match="'test_keeps_to_itself' failed preparing: its result cannot be pickled"),
    ):
        objective.runner.prepare(objective.regularizers[0], batch)


def test_a_term_that_no_process_can_import_raises_on_construction():
    @regularizer("test_local")
    def local(outputs, batch):
        return outputs.logprobs_DT

    with pytest.raises(
        ObjectiveError, match=r"'test_local' cannot run in a process: .*<locals>\.local cannot be imported"
    ):
        Objective(regularizers=[{"name": "test_local", "execution": "process"}])
    with pytest.raises(ObjectiveError, match="'loss' cannot run in a process"):
        Objective(regularizers=[{"name": "loss", "fn": lambda data, logprobs: 0, "execution": "process"}])


@pytest.mark.parametrize("field", ["weights_DT", "target_tokens_DT", "offsets_D", "logprobs_DT", "ref_logprobs_DT"])
def test_a_term_that_changes_its_inputs_raises_without_effect(field):
    batch, outputs = make_batch([2, 3])
    batch = replace(batch, target_tokens_DT=batch.target_tokens_DT + 5)
    outputs = replace(outputs, ref_logprobs_DT=outputs.logprobs_DT.clone())
    before = {key: getattr(record, key).clone() for record, key in ((batch, "weights_DT"), (outputs, "logprobs_DT"))}
    record = batch if hasattr(batch, field) else outputs
    original = getattr(record, field).clone()
    with pytest.raises(ObjectiveError, match=rf"failed evaluating: it changed its input .*{field}.* in place"):
        run(Objective(), bind("meddles", "thread", params={"field": field}), batch, outputs)
    assert torch.equal(getattr(record, field), original)
    assert torch.equal(batch.weights_DT, before["weights_DT"])
    assert torch.equal(outputs.logprobs_DT, before["logprobs_DT"])


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("grad_share", "its metric names grad_share are reserved"),
        ("skipped", "its metric names skipped are reserved"),
        ("a\nb", "is invalid; use up to 100 letters"),
        ("", "is invalid; use up to 100 letters"),
        ("x" * 101, "is invalid; use up to 100 letters"),
    ],
)
def test_reserved_or_invalid_metric_names_raise(metric, message):
    batch, outputs = make_batch([2])
    with pytest.raises(ObjectiveError, match=message):
        run(Objective(), bind("clashes", "thread", params={"metric": metric}), batch, outputs)


def test_on_error_last_keeps_the_value_without_gradient():
    batch, outputs = make_batch([2, 2])
    objective, resumed = Objective(), Objective()
    runner, term = objective.runner, bind("hangs", "thread", timeout_s=5, on_error="last", params={"slow_s": 0.01})

    def fails() -> Evaluation:
        raise ObjectiveError("It failed.")

    stand_in, error = runner.settle(term, outputs, fails)
    assert stand_in is None
    assert str(error) == "It failed."
    good, error = runner.settle(term, outputs, partial(runner.evaluate, term, outputs, batch, first_step=True))
    assert good is not None
    assert error is None
    other_batch, other = make_batch([5])
    resumed.restore(json.loads(json.dumps(objective.state())))
    for any_runner in (runner, resumed.runner):
        stand_in, _ = any_runner.settle(term, other, fails)
        assert stand_in is not None
        assert (stand_in.value, stand_in.metrics) == (good.value, good.metrics)
        assert stand_in.gradient_DT.tolist() == [0.0] * other_batch.num_tokens
    assert runner.settle(bind("surprise", "thread", on_error="skip"), other, fails)[0] is None
    with pytest.raises(ObjectiveError, match="It failed"):
        runner.settle(bind("surprise", "thread"), other, fails)


def test_a_process_ends_with_its_objective():
    batch, outputs = make_batch([2])
    # `len` stands for datums, which are not sent to the process.
    with Objective(regularizers=[{"name": "test_where", "execution": "process"}]) as objective:
        where = objective.runner.evaluate(objective.regularizers[0], outputs, replace(batch, datums=len), True).metrics
    assert where["pid"] != os.getpid()
    assert where["datums"] == 0
    assert not Path(f"/proc/{int(where['pid'])}").exists()


def test_a_busy_process_is_killed_when_its_objective_ends():
    batch, outputs = make_batch([2])
    failures: list[str] = []

    def call(objective: Objective) -> None:
        try:
            objective.runner.evaluate(objective.regularizers[0], outputs, batch, first_step=True)
        except ObjectiveError as error:
            failures.append(str(error))

    entry = {"name": "busy", "fn": "test_hangs", "execution": "process", "params": {"slow_s": 600.0}}
    with Objective(regularizers=[entry]) as objective:
        thread = threading.Thread(target=call, args=(objective,))
        thread.start()
        while not (processes := list(objective.runner._processes.values())) or not processes[0]._lock.locked():
            time.sleep(0.01)
    thread.join()
    assert "its process ended with status" in failures[0]


@pytest.mark.slow
def test_a_process_ends_with_a_run_that_is_killed(tmp_path: Path):
    script = tmp_path / "run.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "import stubborn_terms, threading\n"
        "from ragged_batches import make_batch\n"
        "from objectives import Objective\n"
        "entries = [{'name': f'test_{name}', 'execution': 'process'} for name in ('where', 'hangs')]\n"
        "objective = Objective(regularizers=entries)\n"
        "where, hangs = objective.regularizers\n"
        "batch, outputs = make_batch([2])\n"
        "print(int(objective.runner.evaluate(where, outputs, batch, True).metrics['pid']), flush=True)\n"
        "threading.Timer(3, lambda: print('hanging', flush=True)).start()\n"
        "objective.runner.evaluate(hangs, outputs, batch, True)\n"
    )
    run = subprocess.Popen([sys.executable, script], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    idle = int(run.stdout.readline())
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    run.stdout.readline()
    pids = {idle, *map(int, children.read_text().split())}
    assert len(pids) == 2
    run.kill()
    run.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
