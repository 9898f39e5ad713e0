"""Promotion conditions: grammar, and runs that are and are not promoted."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from engine_process import API_KEY
from hypothesis import given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.utils.validation import _validate_model_name as mlflow_check
from prefect.client.orchestration import get_client
from prefect.events.filters import EventFilter, EventNameFilter
from sft_config import sft_fields

from blocks.errors import ConfigError
from flows.config.loader import load_config
from flows.config.promotion import PromoteIf, check_model_name
from flows.config.train import SftConfig
from flows.monitoring.drain import deliver_events
from flows.monitoring.run_tags import REJECTED_EVENT, REJECTED_TAG
from flows.runs.result import TrainResult
from flows.sft import sft


@given(st.text("a./: \t", max_size=6))
def test_names_are_refused_that_the_registry_refuses(name: str) -> None:
    try:
        mlflow_check(name)
    except MlflowException:
        with pytest.raises(ValueError, match="the registry of MLflow does not accept this name"):
            check_model_name(name)
    else:
        assert check_model_name(name) == name


def test_a_name_that_the_registry_refuses_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sft_fields(tmp_path, "run", "") | {"register_as": "team/model"}))
    with pytest.raises(ConfigError, match="'register_as' is 'team/model', but the registry of MLflow"):
        load_config(SftConfig, path, [])


@pytest.mark.parametrize(
    ("text", "value", "baseline", "rejection"),
    [
        ("test/nll < 0.98 * baseline", 1.95, 2.0, ""),
        (
            "test/nll < 0.98 * baseline",
            1.97,
            2.0,
            "test/nll is 1.97, but .* < 1.96, which is 0.98 times the baseline 2",
        ),
        ("test/nll<baseline", 2.0, 2.0, "test/nll is 2, but promote_if requires < 2, which is 1 times"),
        ("test/nll <= baseline", 2.0, 2.0, ""),
        ("test/exact_match >= 0.5", 0.5, None, ""),
        ("test/exact_match > .5", 0.5, None, "test/exact_match is 0.5, but promote_if requires > 0.5$"),
        ("eval/x > -1e-3", 0.0, None, ""),
        ("test/nll > 1", float("nan"), None, "test/nll is nan"),
        ("test/nll < baseline", 1.0, None, "its baseline was not measured"),
        ("test/nll < 3", None, None, "the metric was not measured"),
    ],
)
def test_rejection(text: str, value: Any, baseline: Any, rejection: str) -> None:
    message = PromoteIf.parse(text).rejection(value, baseline)
    assert bool(message) == bool(rejection)
    if rejection:
        assert re.search(rejection, message)


@pytest.mark.parametrize(
    "text",
    ["", "test/nll", "test/nll <", "< 3", "test/nll == 3", "test/nll < 3 * 4", "test/nll < baseline * 2", "a < b",
     "test/nll < 1e999", "__import__('os') < 3", "test/nll < 3; x", "test/nll < nan", "test/nll < baseline baseline"],
)  # fmt: skip
def test_invalid_condition_is_a_config_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sft_fields(tmp_path, "run", "") | {"register_as": "m", "promote_if": text}))
    with pytest.raises(ConfigError, match=r"'promote_if' is .*use "):
        load_config(SftConfig, path, [])


def test_condition_requires_register_as_and_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sft_fields(tmp_path, "run", "") | {"promote_if": "test/nll < 3"}))
    with pytest.raises(ConfigError, match="it needs register_as"):
        load_config(SftConfig, path, [])
    with pytest.raises(ConfigError, match=r"'eval_every' is 0, but .*promote_if needs an evaluation"):
        load_config(SftConfig, path, ["register_as=m", "eval_every=0"])


@pytest.mark.usefixtures("prefect_server")
class TestRuns:
    """Run that is promoted only after its condition is relaxed, and a fork of it."""

    @pytest.fixture(scope="class")
    def fields(self, tmp_path_factory: pytest.TempPathFactory, mlflow_uri: str, engine_url: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TINKER_API_KEY", API_KEY)
            short = {"objective": {}, "num_steps": 4, "eval_every": 4, "register_as": "gated"}
            yield sft_fields(tmp_path_factory.mktemp("gate"), "gate", mlflow_uri, engine_url) | short

    @pytest.fixture(scope="class")
    def rejected_run(self, prefect_server: str, fields: dict[str, Any]) -> TrainResult:
        return train(fields, promote_if="test/nll < 0.01 * baseline")

    def test_rejection_is_reported_and_the_run_completes(self, rejected_run: TrainResult, mlflow_uri: str) -> None:
        client = MlflowClient(mlflow_uri)
        values = {p.step: p.value for p in client.get_metric_history(rejected_run.mlflow_run_id, "test/nll")}
        assert list(values) == [0, 4]
        why = (
            f"The checkpoint at step 4 is not promoted: test/nll is {values[4]:.6g}, but promote_if requires < "
            f"{0.01 * values[0]:.6g}, which is 0.01 times the baseline {values[0]:.6g}."
        )
        assert rejected_run.not_promoted == why
        run = client.get_run(rejected_run.mlflow_run_id)
        assert (run.info.status, run.data.tags[REJECTED_TAG]) == ("FINISHED", why)
        assert client.search_model_versions("name = 'gated'") == []
        assert why.replace("<", "&lt;") in (Path(rejected_run.directory) / "report.html").read_text()
        with get_client(sync_client=True) as prefect:
            state = prefect.read_flow_run(rejected_run.flow_run_id).state
        assert state is not None
        assert (state.name, state.message, state.is_completed()) == ("NotPromoted", why, True)

    def test_rejection_emits_an_event(self, rejected_run: TrainResult) -> None:
        deliver_events()
        events = []
        for _ in range(60):
            with get_client(sync_client=True) as prefect:
                query = {"filter": EventFilter(event=EventNameFilter(name=[REJECTED_EVENT])).model_dump(mode="json")}
                answer = prefect._client.post("/events/filter", json=query).json()["events"]
            # Other tests share the server.
            events = [event for event in answer if event["resource"]["prefect.resource.name"] == "gate"]
            if events:
                break
            time.sleep(0.5)
        assert events[0]["payload"]["why"] == rejected_run.not_promoted

    def test_resumed_run_is_promoted_when_the_condition_holds(
        self, rejected_run: TrainResult, fields: dict[str, Any], mlflow_uri: str
    ) -> None:
        again = train(fields, promote_if="test/nll < baseline")
        client = MlflowClient(mlflow_uri)
        assert again.not_promoted == ""
        assert REJECTED_TAG not in client.get_run(rejected_run.mlflow_run_id).data.tags
        (version,) = client.search_model_versions("name = 'gated'")
        assert version.run_id == rejected_run.mlflow_run_id

    def test_fork_uses_its_own_first_evaluation_as_baseline(
        self, rejected_run: TrainResult, fields: dict[str, Any], mlflow_uri: str
    ) -> None:
        fork = train(fields, run_name="forked", resume="gate@2", promote_if="test/nll < baseline")
        points = MlflowClient(mlflow_uri).get_metric_history(fork.mlflow_run_id, "test/nll")
        assert sorted(point.step for point in points) == [2, 4]
        assert fork.not_promoted == ""

    def test_a_later_evaluation_is_no_baseline(self, rejected_run: TrainResult, fields: dict[str, Any]) -> None:
        """Without `promote_if`, a fork evaluates its first weights only if they are due."""
        late = {"run_name": "late", "resume": "gate@2"}
        train(fields, **late, register_as=None)
        again = train(fields, **late, promote_if="test/nll <= baseline")
        assert "promote_if requires test/nll, but its baseline was not measured" in again.not_promoted

    @pytest.mark.parametrize(
        ("field", "value"), [("promote_if", "test/accuracy > 0.5"), ("keep_best", {"metric": "test/accuracy"})]
    )
    def test_unmeasured_metric_fails_before_the_first_step(
        self, fields: dict[str, Any], field: str, value: object
    ) -> None:
        with pytest.raises(
            ConfigError, match=rf"{field} requires test/accuracy, which no evaluation measures; use one of test/bi"
        ):
            train(fields, run_name="typo", **{field: value})


def train(fields: dict[str, Any], **changes: object) -> TrainResult:
    return sft(SftConfig.model_validate(fields | changes))
