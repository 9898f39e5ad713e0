"""Terms on the workers of Prefect's task runners: equal results, equal messages, and isolated failures."""

from __future__ import annotations

import os
import signal
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory
from typing import Literal
from uuid import UUID

import broken_terms  # noqa: F401  # registers its terms
import pytest
import stubborn_terms  # noqa: F401  # registers its terms
import torch
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_SSL_CERT_FILE, PREFECT_API_URL, temporary_settings
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner
from pydantic import ValidationError
from ragged_batches import make_batch

from blocks.errors import ConfigError
from flows.config.train import TaskRunnerConfig
from flows.runs.task_runner import open_dask, open_ray, open_task_runner, single_certificate_authority
from objectives import Batch, Evaluation, Objective, ObjectiveError, evaluate_term, prepare_features, regularizer
from objectives.execution.term_loop import Features
from tasks.common.event_loop import open_workers
from tasks.common.task import opaque_argument, step_task, submit
from tasks.training.terms import TaskTermExecutor

KINDS = [pytest.param("processes", marks=pytest.mark.process)] + [
    pytest.param(kind, marks=pytest.mark.slow) for kind in ("dask", "ray")
]
FNS = ("surprise", "lengths", "where", "hangs", "raises", "nan", "shape", "keeps_to_itself", "dies")
OPEN = {"dask": open_dask, "ray": open_ray}
BATCH, OUTPUTS = make_batch([3, 0, 4])
OUTPUTS = replace(OUTPUTS, logprobs_DT=OUTPUTS.logprobs_DT.float())


@dataclass(frozen=True)
class Outcomes:
    """Evaluations and errors of the terms on one task runner, by the name of a case.

    Attributes:
        met: processes of two terms, each of which waited for the other.
    """

    kind: str
    flow_run_id: str
    met: list[float] = field(default_factory=list)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)


def require(kind: str) -> None:
    if kind in ("dask", "ray"):
        reason = f"the extra {kind} is not installed: pip install -c constraints.txt -e '.[{kind}]'"
        pytest.importorskip(f"prefect_{kind}", reason=reason)


@contextmanager
def executor_of(objective: Objective, config: TaskRunnerConfig | None) -> Iterator[TaskTermExecutor]:
    with (
        open_workers(),
        open_task_runner(config) as task_runner,
        closing(TaskTermExecutor(objective.runner, task_runner, objective.regularizers)) as executor,
    ):
        yield executor


def evaluate(executor: TaskTermExecutor, term, batch: Batch) -> Evaluation:
    features: Features | None = None
    if term.term.prepare:
        loaded: Future[Batch] = Future()
        loaded.set_result(batch)
        features = executor.prepare(term, loaded)
    return executor.evaluate(term, features, OUTPUTS, batch, True)()


def meet(executor: TaskTermExecutor) -> list[float]:
    """Evaluate two terms that wait for each other; return the processes in which they ran."""
    with TemporaryDirectory() as folder:
        entries = [
            {"name": f"meets_{n}", "fn": "test_meets", "params": {"folder": folder, "number": n}, "timeout_s": 120.0}
            for n in range(2)
        ]
        with Objective(regularizers=entries) as objective:
            pending = [executor.evaluate(term, None, OUTPUTS, BATCH, True) for term in objective.regularizers]
            return [wait().metrics["pid"] for wait in pending]


@flow(name="terms-on-workers")
def run_terms(kind: Literal["processes", "dask", "ray"]) -> Outcomes:
    outcomes = Outcomes(kind, flow_run.get_id())
    with (
        Objective(regularizers=[{"name": f"test_{fn}"} for fn in FNS]) as objective,
        executor_of(objective, TaskRunnerConfig(kind=kind, workers=2)) as executor,
    ):
        terms = dict(zip(FNS, objective.regularizers, strict=True))
        outcomes.met.extend(meet(executor))
        cases = {
            **{fn: terms[fn] for fn in ("surprise", "lengths", "where", "raises", "nan", "shape")},
            "limited": replace(terms["surprise"], timeout_s=60.0),
            "kept_here": replace(terms["surprise"], execution="thread"),
            "hangs": replace(terms["hangs"], timeout_s=0.5),
            "keeps_to_itself": terms["keeps_to_itself"],
            "dies": terms["dies"],
            "after": terms["surprise"],
        }
        for case, term in cases.items():
            try:
                batch = replace(BATCH, datums=len) if case == "where" else BATCH
                outcomes.evaluations[case] = evaluate(executor, term, batch)
            except (ObjectiveError, ConfigError) as error:
                outcomes.errors[case] = error
    return outcomes


@pytest.fixture(scope="module", params=KINDS)
def outcomes(request: pytest.FixtureRequest, prefect_server: str) -> Outcomes:
    require(request.param)
    return run_terms(request.param)


@pytest.mark.parametrize("case", ["surprise", "lengths", "limited", "kept_here"])
def test_workers_give_bitwise_equal_results(outcomes: Outcomes, case: str):
    fn = "lengths" if case == "lengths" else "surprise"
    (term,) = Objective(regularizers=[{"name": f"test_{fn}"}]).regularizers
    prepared = replace(BATCH, features=prepare_features(term, BATCH))
    expected, evaluation = evaluate_term(term, OUTPUTS, prepared, first_step=True), outcomes.evaluations[case]
    assert torch.equal(evaluation.gradient_DT, expected.gradient_DT)
    assert evaluation.value == expected.value
    pid = evaluation.metrics["prepared_by" if fn == "lengths" else "pid"]
    assert (pid == os.getpid()) == (case == "kept_here")


def test_a_worker_has_one_thread_and_no_datums_of_the_service(outcomes: Outcomes):
    where = outcomes.evaluations["where"].metrics
    assert (where["threads"], where["datums"]) == (1, 0)


def test_terms_run_concurrently(outcomes: Outcomes):
    assert len(set(outcomes.met)) == 2
    assert os.getpid() not in outcomes.met


@pytest.mark.parametrize(
    ("fn", "message"), [("raises", "KeyError: 'colour'"), ("nan", "nan"), ("shape", "(3,) per datum")]
)
def test_failures_have_the_same_message_as_inline(outcomes: Outcomes, fn: str, message: str):
    (term,) = Objective(regularizers=[{"name": f"test_{fn}"}]).regularizers
    with pytest.raises(ObjectiveError) as error:
        evaluate_term(term, OUTPUTS, BATCH, True)
    assert str(outcomes.errors[fn]) == str(error.value)
    assert message in str(error.value)


def test_a_time_limit_ends_the_wait_for_a_worker(outcomes: Outcomes):
    assert "'test_hangs' failed evaluating: it took longer than its timeout_s of 0.5 s" in str(outcomes.errors["hangs"])
    assert "set execution='process' to kill it" in str(outcomes.errors["hangs"])


def test_the_server_shows_the_task_runs_of_the_workers(outcomes: Outcomes):
    filters = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(outcomes.flow_run_id)]))
    wanted = {
        ("prepare-test_lengths", "COMPLETED"),
        ("term-test_lengths", "COMPLETED"),
        ("term-test_raises", "FAILED"),
    }
    if outcomes.kind != "processes":  # the pool's process forwards its events through the pipe that ends with it
        wanted.add(("term-test_dies", "CRASHED"))
    missing, deadline = wanted, time.monotonic() + 120
    with get_client(sync_client=True) as client:
        while missing and time.monotonic() < deadline:
            time.sleep(0.5)
            missing = wanted - {(run.name, run.state_type) for run in client.read_task_runs(flow_run_filter=filters)}
    assert not missing


def test_unpicklable_features_of_a_worker_raise(outcomes: Outcomes):
    message = "'test_keeps_to_itself' failed preparing: its result cannot be pickled"
    assert message in str(outcomes.errors["keeps_to_itself"])


def test_a_dead_worker_is_reported(outcomes: Outcomes):
    message = str(outcomes.errors["dies"])
    if outcomes.kind == "processes":
        assert isinstance(outcomes.errors["dies"], ConfigError)
        assert "Prefect's process pool does not recover" in message
        assert isinstance(outcomes.errors["after"], ConfigError)
    else:
        assert "'test_dies' failed evaluating: its worker of the task runner did not finish it" in message
        assert outcomes.evaluations["after"].gradient_DT.any()


@pytest.mark.parametrize("kind", ["dask", "ray"])
def test_a_missing_extra_raises(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, f"prefect_{kind}", None)
    with pytest.raises(ConfigError, match=rf"needs the extra '{kind}', .*pip install 'tinker-flows\[{kind}\]'"):
        OPEN[kind](TaskRunnerConfig(kind=kind)).__enter__()


def test_a_term_that_no_worker_can_import_raises():
    @regularizer("test_local_to_a_worker")
    def local(outputs, batch):
        return outputs.logprobs_DT

    objective = Objective(regularizers=[{"name": "test_local_to_a_worker"}])
    with pytest.raises(ObjectiveError, match=r"cannot run on a worker .*local cannot be imported .*to 'thread'"):
        TaskTermExecutor(objective.runner, ProcessPoolTaskRunner(max_workers=1), objective.regularizers)
    TaskTermExecutor(objective.runner, ThreadPoolTaskRunner(), objective.regularizers).close()


@pytest.mark.parametrize("execution", ["dask", "ray"])
def test_the_executions_of_release_0_1_say_what_replaces_them(execution: str):
    with pytest.raises(ObjectiveError, match=f"set task_runner.kind to '{execution}', remove this execution"):
        Objective(regularizers=[{"name": "length", "execution": execution}])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "threads", "address": "tcp://host:1"}, "has no effect for kind 'threads'"),
        ({"kind": "dask", "address": "tcp://host:1", "workers": 2}, "workers=2 has no effect for the cluster at"),
    ],
)
def test_settings_without_effect_raise(fields: dict[str, object], message: str):
    with pytest.raises(ValidationError, match=message):
        TaskRunnerConfig.model_validate(fields)


@step_task(name="where")
def name_runner(marker: object) -> str:
    context = FlowRunContext.get()
    assert context is not None
    return type(context.task_runner).__name__


@flow(name="own-task-runner")
def run_where() -> tuple[str, float]:
    with Objective(regularizers=[{"name": "test_where"}]) as objective, executor_of(objective, None) as executor:
        unpicklable = opaque_argument(threading.Lock())  # as clients and datasets are
        other = submit(name_runner, unpicklable).result()
        return other, evaluate(executor, objective.regularizers[0], BATCH).metrics["pid"]


@pytest.mark.process
def test_the_task_runner_of_a_flow_is_threads(prefect_server: str):
    assert run_where() == ("ThreadPoolTaskRunner", os.getpid())


@pytest.mark.slow
def test_a_dask_cluster_at_an_address_receives_the_terms_of_a_flow_and_keeps_running(prefect_server: str):
    require("dask")
    import distributed
    from prefect_dask import DaskTaskRunner

    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, protocol="tcp", dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        own = run_where.with_options(task_runner=DaskTaskRunner(address=cluster.scheduler_address))()
        with open_dask(TaskRunnerConfig(kind="dask", address=cluster.scheduler_address)) as runner:
            assert runner.client.submit(os.getpid, pure=False).result(60) == own[1]
        with distributed.Client(cluster.scheduler_address, set_as_default=False) as client:
            assert client.submit(sum, (1, 2)).result(60) == 3
    assert own[0] == "ThreadPoolTaskRunner"
    assert own[1] != os.getpid()


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_an_adaptive_dask_cluster_starts_its_first_worker_for_the_terms():
    require("dask")
    import distributed

    with distributed.LocalCluster(
        n_workers=0, threads_per_worker=1, protocol="tcp", dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        cluster.adapt(minimum=0, maximum=1)
        with open_dask(TaskRunnerConfig(kind="dask", address=cluster.scheduler_address)) as runner:
            assert runner.client.submit(os.getpid, pure=False).result(60) != os.getpid()


@pytest.mark.slow
def test_a_dask_cluster_that_cannot_be_reached_raises():
    require("dask")
    with pytest.raises(ConfigError, match=r"Dask cluster at tcp://127.0.0.1:9 cannot be reached or has no workers"):
        open_dask(TaskRunnerConfig(kind="dask", address="tcp://127.0.0.1:9")).__enter__()


@pytest.mark.process
def test_an_inline_term_runs_on_the_thread_that_waits_for_it(prefect_server: str):
    threads: dict[str, str] = {}

    def count(batch: Batch) -> list[int]:
        threads["prepare"] = threading.current_thread().name
        return batch.offsets_D.diff().tolist()

    @regularizer("test_inline_thread", kind="scored", prepare=count)
    def inline_thread(outputs, batch):
        threads["evaluate"] = threading.current_thread().name
        return outputs.logprobs_DT.new_tensor([float(length) for length in batch.features])

    @flow(name="inline-term")
    def run() -> tuple[str, dict[str, str], dict[str, str]]:
        here = threading.current_thread().name
        terms = [{"name": "test_inline_thread", "execution": "inline"}]
        with Objective(regularizers=terms) as objective, executor_of(objective, None) as executor:
            (term,) = objective.regularizers
            evaluate(executor, term, BATCH)
            trained = dict(threads)
            threads.clear()
            executor.measure(term, [(OUTPUTS, BATCH)])()
            return here, trained, dict(threads)

    here, trained, measured = run()
    assert trained == measured == {"prepare": here, "evaluate": here}


@pytest.mark.process
def test_processes_finish_the_step_after_ctrl_c(prefect_server: str):
    @flow(name="interrupted-workers")
    def run() -> tuple[Evaluation, Evaluation]:
        config = TaskRunnerConfig(kind="processes", workers=1)
        with (
            Objective(regularizers=[{"name": "test_surprise"}]) as objective,
            executor_of(objective, config) as executor,
        ):
            (term,) = objective.regularizers
            before = evaluate(executor, term, BATCH)
            os.kill(int(before.metrics["pid"]), signal.SIGINT)  # as a terminal sends it to all processes
            return before, evaluate(executor, term, BATCH)

    before, after = run()
    assert after.metrics["pid"] == before.metrics["pid"] != os.getpid()
    assert torch.equal(after.gradient_DT, before.gradient_DT)


def test_clients_of_a_server_without_tls_load_one_authority() -> None:
    before = PREFECT_API_SSL_CERT_FILE.value()
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}), single_certificate_authority():
        file = PREFECT_API_SSL_CERT_FILE.value()
        assert file
        assert len(ssl.create_default_context(cafile=file).get_ca_certs()) == 1
    with temporary_settings({PREFECT_API_URL: "https://prefect.example/api"}), single_certificate_authority():
        assert PREFECT_API_SSL_CERT_FILE.value() == before
    assert PREFECT_API_SSL_CERT_FILE.value() == before
