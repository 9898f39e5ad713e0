"""deployments/prefect.yaml: it contains every flow, a server accepts it, and a worker runs every deployment."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.client.schemas.responses import DeploymentResponse
from prefect.states import Running, Scheduled
from prefect.utilities.callables import parameter_schema
from prefect_deployments import deploy_all, process_worker, run_to_its_end

from flows.config.base import RunConfig

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deployments" / "prefect.yaml"
SPECS: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["deployments"]
# A Range applies to another field, which has limits; the values of terms have none.
UNLIMITED = {
    "AlertConfig": {"above", "below"},
    "Range": {"low", "high"},
    "TargetSpec": {"at_most", "at_least", "equals", "initial", "lower", "upper"},
}
LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
NAMES = [spec["name"] for spec in SPECS]
ENTRIES = {(spec["name"], spec["entrypoint"]) for spec in SPECS}


@pytest.fixture(scope="module")
def deployed(prefect_server: str) -> dict[str, DeploymentResponse]:
    """Deployments of a server after `prefect deploy --all`, by the name of their flow."""
    deploy_all(prefect_server)
    with get_client(sync_client=True) as client:
        # Other tests create deployments on the same server.
        deployments = [
            deployment
            for deployment in client.read_deployments()
            if (deployment.name, deployment.entrypoint) in ENTRIES
        ]
        return {client.read_flow(deployment.flow_id).name: deployment for deployment in deployments}


def test_every_flow_is_in_the_file() -> None:
    flows = {f"flows/{path.name}:{flow}" for path in (ROOT / "flows").glob("*.py") for flow in flows_of(path)}
    assert {spec["entrypoint"] for spec in SPECS} == flows


def flows_of(path: Path) -> Iterator[str]:
    """Yield the names of the flows that a module defines itself."""
    if re.search(r"^@flow\b", path.read_text(), re.MULTILINE):
        module = import_module(f"flows.{path.stem}")
        own_flows = (
            value
            for value in vars(module).values()
            if isinstance(value, Flow) and value.fn.__module__ == module.__name__
        )
        yield from (flow.fn.__name__ for flow in own_flows)


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_deployments_match_the_file(deployed: dict[str, DeploymentResponse], spec: dict[str, Any]) -> None:
    deployment = deployed[spec["entrypoint"].partition(":")[2]]
    assert deployment.name == spec["name"]
    assert deployment.entrypoint == spec["entrypoint"]
    assert deployment.work_pool_name == "tinker-flows"
    assert deployment.tags == spec["tags"]
    assert deployment.description == spec["description"]
    assert deployment.parameters == spec["parameters"]
    assert deployment.enforce_parameter_schema
    assert deployment.pull_steps == [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}]
    assert deployment.global_concurrency_limit is not None
    assert deployment.global_concurrency_limit.limit == spec["concurrency_limit"]["limit"]
    assert deployment.concurrency_options is not None
    assert deployment.concurrency_options.collision_strategy == spec["concurrency_limit"]["collision_strategy"]
    assert not any(schedule.active for schedule in deployment.schedules)


@pytest.mark.parametrize("spec", SPECS, ids=NAMES)
def test_every_form_field_has_title_description_default_and_limits(spec: dict[str, Any]) -> None:
    path, name = spec["entrypoint"].split(":")
    flow = getattr(import_module(path.removesuffix(".py").replace("/", ".")), name)
    schema = parameter_schema(flow).model_dump()
    for model, fields in schema["definitions"].items():
        for field, shown in fields.get("properties", {}).items():
            assert shown.get("title"), (model, field)
            assert shown.get("description"), (model, field)
            # The form starts with an empty object by default, and leaves a number or a text without a default empty.
            is_empty = shown.get("type") in ("object", "integer", "number", "string")
            assert "default" in shown or field in fields.get("required", ()) or is_empty, (model, field)
            kinds = {option.get("type") for option in [shown, *shown.get("anyOf", ()), *shown.get("oneOf", ())]}
            if kinds & {"integer", "number"} and field not in UNLIMITED.get(model, ()):
                assert LIMITS & shown.keys(), (model, field)


def test_one_schedule_exists_and_is_inactive(deployed: dict[str, DeploymentResponse]) -> None:
    assert [schedule.schedule.cron for schedule in deployed["sft"].schedules] == ["0 2 * * *"]


def test_an_active_schedule_creates_runs(prefect_server: str, deployed: dict[str, DeploymentResponse]) -> None:
    """The server's scheduler calls the same function as this request."""
    deployment = deployed["sft"]
    (schedule,) = deployment.schedules
    until = datetime.now(UTC) + timedelta(days=3)
    with get_client(sync_client=True) as client:
        client.update_deployment_schedule(deployment.id, schedule.id, active=True)
        try:
            response = client._client.post(
                f"/deployments/{deployment.id}/schedule", json={"end_time": until.isoformat(), "min_runs": 3}
            )
            assert response.status_code == 200, response.text
            planned = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment.id]))
            runs = [run for run in client.read_flow_runs(flow_run_filter=planned) if run.auto_scheduled]
            times = [run.expected_start_time for run in runs if run.expected_start_time]
            assert len(times) == 3
            assert {(time.hour, time.minute) for time in times} == {(2, 0)}
        finally:
            client.update_deployment_schedule(deployment.id, schedule.id, active=False)
    with get_client(sync_client=True) as client:
        assert not any(run.auto_scheduled for run in client.read_flow_runs(flow_run_filter=planned))


def test_start_in_a_run_name_is_the_scheduled_time(
    prefect_server: str, deployed: dict[str, DeploymentResponse], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = datetime(2026, 11, 22, 2, 0, tzinfo=UTC)
    with get_client(sync_client=True) as client:
        run = client.create_flow_run_from_deployment(deployed["sft"].id, state=Scheduled(scheduled_time=planned))
        monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(run.id))  # set by a worker in the process of a run
        client.set_flow_run_state(run.id, Running())
        client.set_flow_run_state(run.id, Scheduled(name="AwaitingRetry"), force=True)
        config = RunConfig(run_name="sft-{start}", model="tiny")
    assert config.run_name == "sft-20261122-020000"
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID")
    assert RunConfig.model_validate(config.model_dump()) == config
    assert re.fullmatch(r"sft-\d{8}-\d{6}", RunConfig(run_name="sft-{start}", model="tiny").run_name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_worker_runs_every_deployment_with_its_defaults(
    tmp_path: Path, prefect_server: str, deployed: dict[str, DeploymentResponse]
) -> None:
    """The runs have no API key and start their own services."""
    deploy_all(prefect_server)  # deploying again updates the deployments
    with process_worker(prefect_server, tmp_path / "home", tmp_path / "worker.log"):
        trained = run_to_its_end(deployed["sft"].id)
        runs = {
            name: run_to_its_end(deployment.id)
            for name, deployment in deployed.items()
            if name not in ("sft", "export")
        }
        # Export needs a checkpoint, which no default can provide.
        fields = {"checkpoint": f"{trained.name}@final", "output": str(tmp_path / "exported")}
        config = deployed["export"].parameters["config"] | fields
        runs |= {"sft": trained, "export": run_to_its_end(deployed["export"].id, {"config": config})}
    for name, run in runs.items():
        assert run.state is not None
        assert run.state.is_completed(), (name, run.state.message, (tmp_path / "worker.log").read_text()[-3000:])
    assert (tmp_path / "exported" / "adapter" / "adapter_config.json").exists()
