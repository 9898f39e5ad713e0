"""Config as parameters of a Prefect deployment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import PrefectHTTPStatusError
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate
from sft_config import sft_fields

from flows.config.rollout import RolloutConfig
from flows.config.train import SftConfig
from flows.rl import rl
from flows.sft import sft
from objectives.config.spec import ObjectiveSpec

SERVE = """
import json, sys
from flows.rl import rl
from flows.sft import sft
from objectives.config.spec import ObjectiveSpec
sft.serve(name="small", parameters={"config": json.loads(sys.argv[1])}, print_starting_message=False)
"""


def test_every_field_has_a_title_and_a_description() -> None:
    schema = SftConfig.model_json_schema()
    for name, model in {"SftConfig": schema, **schema["$defs"]}.items():
        for field, properties in model.get("properties", {}).items():
            assert properties.get("title"), (name, field)
            assert properties.get("description"), (name, field)


def test_the_server_accepts_a_whole_config_and_the_form_shows_the_basics_first() -> None:
    """Fields that are None are no union with null in the form, and a caller may pass None for them anyway."""
    schema = parameter_schema(sft).model_dump()
    fields = sft_fields(Path("there"), "whole", "")
    validate({"config": SftConfig.model_validate(fields).model_dump(mode="json")}, schema, raise_on_error=True)
    config = schema["definitions"]["SftConfig"]
    basics = ["run_name", "model", "data", "learning_rate", "num_steps", "num_epochs", "lora_rank", "objective"]
    assert list(config["properties"])[: len(basics)] == basics
    assert list(config["properties"])[-2:] == ["guards", "budget"]
    assert config["properties"]["num_steps"]["type"] == "integer"
    assert "default" not in config["properties"]["num_steps"]
    with pytest.raises(ValidationError, match="less than the minimum of 1"):
        validate({"config": fields | {"num_steps": 0}}, schema, raise_on_error=True)


@pytest.mark.slow
def test_run_from_a_deployment(tmp_path: Path, prefect_server: str, engine_url: str, mlflow_uri: str) -> None:
    """Serve the flow, then start it through the API like the UI; an invalid value is rejected."""
    fields = sft_fields(tmp_path, "served", mlflow_uri, engine_url)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, json.dumps(fields)],
        env={
            **os.environ,
            "PREFECT_API_URL": prefect_server,
            "TINKER_API_KEY": "tml-test",
            "TINKER_BASE_URL": engine_url,
            "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        },
        cwd=Path(__file__).parents[3],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with get_client(sync_client=True) as client:
            deployment = wait_for(lambda: deployment_called(client, "small"), process)
            changed = {"config": fields | {"run_name": "from-the-form", "num_steps": 2, "eval_every": 0}}
            run = client.create_flow_run_from_deployment(deployment.id, parameters=changed)
            state = wait_for(lambda: (s := client.read_flow_run(run.id).state) and s.is_final() and s, process)
            assert state.is_completed(), state.message
            with pytest.raises(PrefectHTTPStatusError, match="409"):
                client.create_flow_run_from_deployment(
                    deployment.id, parameters={"config": fields | {"learning_rate": -1}}
                )
    finally:
        process.terminate()
        process.wait()
    records = (tmp_path / "runs" / "from-the-form" / "checkpoints.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["batch"] == 2
    assert sft.name == "sft"


def deployment_called(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    return next((deployment for deployment in client.read_deployments() if deployment.name == name), None)


def wait_for(condition, process: subprocess.Popen[bytes]):
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.2)
    raise AssertionError("the served deployment ended or took too long")


def test_the_form_has_no_null_and_leaves_groups_unset() -> None:
    """Prefect's form sends defaults, and an empty mapping for a builder that nobody has filled in."""
    for flow in (sft, rl):
        schema = parameter_schema(flow).model_dump()
        for model in schema["definitions"].values():
            for name, field in model.get("properties", {}).items():
                assert field.get("default", 0) is not None, name
    rollout = parameter_schema(rl).model_dump()["definitions"]["RolloutConfig"]["properties"]
    assert not [name for name, field in rollout["termination"]["properties"].items() if "default" in field]
    assert "Default: false." in rollout["termination"]["properties"]["zero_reward_on_limit"]["description"]
    assert RolloutConfig.model_validate({"hook": {}, "completer": {}}).hook is None
    assert ObjectiveSpec.model_validate({"balance": "off"}).balance is None
