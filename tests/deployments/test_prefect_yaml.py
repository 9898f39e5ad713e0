"""deployments/prefect.yaml: every flow is in it, a server takes all of it, and a worker runs it as it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.states import Running, Scheduled
from prefect.utilities.callables import parameter_schema
from prefect_deployments import deploy_all, process_worker, run_to_its_end

from flows.config import RunConfig

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deployments" / "prefect.yaml"
WRITTEN: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())["deployments"]
LIMITS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
NAMES = [each["name"] for each in WRITTEN]
ENTRIES = {(each["name"], each["entrypoint"]) for each in WRITTEN}


@pytest.fixture(scope="module")
def deployed(prefect_server: str) -> dict[str, DeploymentResponse]:
    """The deployments that a server has after one `prefect deploy --all`, by the name of their flow."""
    deploy_all(prefect_server)
    with get_client(sync_client=True) as client:
        # Other tests have deployments of their own.
        there = [each for each in client.read_deployments() if (each.name, each.entrypoint) in ENTRIES]
        return {client.read_flow(each.flow_id).name: each for each in there}


def test_every_flow_is_in_the_file() -> None:
    flows = {f"flows/{path.name}:{flow}" for path in (ROOT / "flows").glob("*.py") for flow in flows_of(path)}
    assert {each["entrypoint"] for each in WRITTEN} == flows


def flows_of(path: Path) -> Iterator[str]:
    """The names of the flows that a module of its own defines, not what it imports."""
    if re.search(r"^@flow\b", path.read_text(), re.MULTILINE):
        module = import_module(f"flows.{path.stem}")
        own = (
            value
            for value in vars(module).values()
            if isinstance(value, Flow) and value.fn.__module__ == module.__name__
        )
        yield from (each.fn.__name__ for each in own)


@pytest.mark.parametrize("written", WRITTEN, ids=NAMES)
def test_the_server_has_all_that_the_file_says(
    deployed: dict[str, DeploymentResponse], written: dict[str, Any]
) -> None:
    found = deployed[written["entrypoint"].partition(":")[2]]
    assert found.name == written["name"]
    assert found.entrypoint == written["entrypoint"]
    assert found.work_pool_name == "tinker-flows"
    assert found.tags == written["tags"]
    assert found.description == written["description"]
    assert found.parameters == written["parameters"]
    assert found.enforce_parameter_schema
    assert found.pull_steps == [{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}]
    assert found.global_concurrency_limit is not None
    assert found.global_concurrency_limit.limit == written["concurrency_limit"]["limit"]
    assert found.concurrency_options is not None
    assert found.concurrency_options.collision_strategy == written["concurrency_limit"]["collision_strategy"]
    assert not any(schedule.active for schedule in found.schedules)


@pytest.mark.parametrize("written", WRITTEN, ids=NAMES)
def test_every_field_of_the_form_has_a_title_a_meaning_a_default_and_limits(written: dict[str, Any]) -> None:
    path, name = written["entrypoint"].split(":")
    flow = getattr(import_module(path.removesuffix(".py").replace("/", ".")), name)
    schema = parameter_schema(flow).model_dump()
    for model, fields in schema["definitions"].items():
        for field, shown in fields.get("properties", {}).items():
            assert shown.get("title"), (model, field)
            assert shown.get("description"), (model, field)
            # An empty object is what the form begins with anyway.
            assert "default" in shown or field in fields.get("required", ()) or shown["type"] == "object", (
                model,
                field,
            )
            kinds = {each.get("type") for each in [shown, *shown.get("anyOf", ()), *shown.get("oneOf", ())]}
            if kinds & {"integer", "number"} and model != "Range":  # of values of another field, which has limits
                assert LIMITS & shown.keys(), (model, field)


def test_one_schedule_is_there_to_be_switched_on(deployed: dict[str, DeploymentResponse]) -> None:
    assert [each.schedule.cron for each in deployed["sft"].schedules] == ["0 2 * * *"]


def test_a_run_name_takes_the_time_for_which_it_was_scheduled(
    prefect_server: str, deployed: dict[str, DeploymentResponse], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = datetime(2026, 11, 22, 2, 0, tzinfo=UTC)
    with get_client(sync_client=True) as client:
        run = client.create_flow_run_from_deployment(deployed["sft"].id, state=Scheduled(scheduled_time=planned))
        monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(run.id))  # as in the process that a worker starts
        client.set_flow_run_state(run.id, Running())
        client.set_flow_run_state(run.id, Scheduled(name="AwaitingRetry"), force=True)
        config = RunConfig(run_name="sft-{start}", model="tiny")
    assert config.run_name == "sft-20261122-020000"
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID")
    assert RunConfig.model_validate(config.model_dump()) == config
    assert re.fullmatch(r"sft-\d{8}-\d{6}", RunConfig(run_name="sft-{start}", model="tiny").run_name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_worker_runs_each_of_them_as_it_is(
    tmp_path: Path, prefect_server: str, deployed: dict[str, DeploymentResponse]
) -> None:
    """Without a key: what it needs is started with it."""
    deploy_all(prefect_server)  # once more changes what is there
    with process_worker(prefect_server, tmp_path / "home", tmp_path / "worker.log"):
        trained = run_to_its_end(deployed["sft"].id)
        runs = {name: run_to_its_end(each.id) for name, each in deployed.items() if name not in ("sft", "export")}
        # The one that needs a checkpoint, which nobody has on the first day.
        named = {"checkpoint": f"{trained.name}@final", "output": str(tmp_path / "exported")}
        config = deployed["export"].parameters["config"] | named
        runs |= {"sft": trained, "export": run_to_its_end(deployed["export"].id, {"config": config})}
    for name, run in runs.items():
        assert run.state is not None
        assert run.state.is_completed(), (name, run.state.message, (tmp_path / "worker.log").read_text()[-3000:])
    assert (tmp_path / "exported" / "adapter" / "adapter_config.json").exists()
