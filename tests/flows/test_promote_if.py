"""The gate before a promotion: its grammar, and runs that it lets through and holds back."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from engine_process import API_KEY
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.events.filters import EventFilter, EventNameFilter
from sft_config import sft_fields

from blocks.errors import ConfigError
from flows.config_file import load_config
from flows.promote_if import PromoteIf
from flows.recorded import deliver_events
from flows.refused import EVENT, TAG
from flows.result import TrainResult
from flows.sft import SftConfig, sft


@pytest.mark.parametrize(
    ("text", "value", "baseline", "refusal"),
    [
        ("test/nll < 0.98 * baseline", 1.95, 2.0, ""),
        (
            "test/nll < 0.98 * baseline",
            1.97,
            2.0,
            "test/nll is 1.97, and .* < 1.96, which is 0.98 times the baseline 2",
        ),
        ("test/nll<baseline", 2.0, 2.0, "test/nll is 2, and promote_if asks for < 2, which is 1 times"),
        ("test/nll <= baseline", 2.0, 2.0, ""),
        ("test/exact_match >= 0.5", 0.5, None, ""),
        ("test/exact_match > .5", 0.5, None, "test/exact_match is 0.5, and promote_if asks for > 0.5$"),
        ("eval/x > -1e-3", 0.0, None, ""),
        ("test/nll > 1", float("nan"), None, "test/nll is nan"),
        ("test/nll < baseline", 1.0, None, "its baseline was not measured"),
        ("test/nll < 3", None, None, "it was not measured"),
    ],
)
def test_a_condition_holds_or_says_why_not(text: str, value: Any, baseline: Any, refusal: str) -> None:
    said = PromoteIf.parse(text).refusal(value, baseline)
    assert bool(said) == bool(refusal)
    if refusal:
        assert re.search(refusal, said)


@pytest.mark.parametrize(
    "text",
    ["", "test/nll", "test/nll <", "< 3", "test/nll == 3", "test/nll < 3 * 4", "test/nll < baseline * 2", "a < b",
     "test/nll < 1e999", "__import__('os') < 3", "test/nll < 3; x", "test/nll < nan", "test/nll < baseline baseline"],
)  # fmt: skip
def test_what_is_no_condition_is_told_before_the_run(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sft_fields(tmp_path, "run", "") | {"register_as": "m", "promote_if": text}))
    with pytest.raises(ConfigError, match=r"'promote_if' is .*give a "):
        load_config(SftConfig, path, [])


def test_a_condition_needs_a_model_and_evaluations(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sft_fields(tmp_path, "run", "") | {"promote_if": "test/nll < 3"}))
    with pytest.raises(ConfigError, match="set register_as too"):
        load_config(SftConfig, path, [])
    with pytest.raises(ConfigError, match=r"'eval_every' is 0, but .*promote_if asks for an evaluation"):
        load_config(SftConfig, path, ["register_as=m", "eval_every=0"])


@pytest.mark.usefixtures("prefect_server")
class TestRuns:
    """One run, held back at first, then let through; and a fork of it."""

    @pytest.fixture(scope="class")
    def fields(self, tmp_path_factory: pytest.TempPathFactory, mlflow_uri: str, engine_url: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TINKER_API_KEY", API_KEY)
            few = {"objective": {}, "num_steps": 4, "eval_every": 4, "register_as": "gated"}
            yield sft_fields(tmp_path_factory.mktemp("gate"), "gate", mlflow_uri, engine_url) | few

    @pytest.fixture(scope="class")
    def held_back(self, prefect_server: str, fields: dict[str, Any]) -> TrainResult:
        return train(fields, promote_if="test/nll < 0.01 * baseline")

    def test_a_refusal_is_said_everywhere_and_is_no_error(self, held_back: TrainResult, mlflow_uri: str) -> None:
        client = MlflowClient(mlflow_uri)
        values = {p.step: p.value for p in client.get_metric_history(held_back.mlflow_run_id, "test/nll")}
        assert list(values) == [0, 4]
        why = (
            f"The checkpoint at step 4 is not promoted: test/nll is {values[4]:.6g}, and promote_if asks for < "
            f"{0.01 * values[0]:.6g}, which is 0.01 times the baseline {values[0]:.6g}."
        )
        assert held_back.not_promoted == why
        run = client.get_run(held_back.mlflow_run_id)
        assert (run.info.status, run.data.tags[TAG]) == ("FINISHED", why)
        assert client.search_model_versions("name = 'gated'") == []
        assert why.replace("<", "&lt;") in (Path(held_back.directory) / "report.html").read_text()
        with get_client(sync_client=True) as prefect:
            state = prefect.read_flow_run(held_back.flow_run_id).state
        assert state is not None
        assert (state.name, state.message, state.is_completed()) == ("NotPromoted", why, True)

    def test_it_is_an_event_that_automations_can_act_on(self, held_back: TrainResult) -> None:
        deliver_events()
        found = []
        for _ in range(60):
            with get_client(sync_client=True) as prefect:
                query = {"filter": EventFilter(event=EventNameFilter(name=[EVENT])).model_dump(mode="json")}
                found = prefect._client.post("/events/filter", json=query).json()["events"]
            if found:
                break
            time.sleep(0.5)
        assert found[0]["payload"]["why"] == held_back.not_promoted
        assert found[0]["resource"]["prefect.resource.name"] == "gate"

    def test_the_same_run_is_promoted_once_the_condition_holds(
        self, held_back: TrainResult, fields: dict[str, Any], mlflow_uri: str
    ) -> None:
        again = train(fields, promote_if="test/nll < baseline")
        client = MlflowClient(mlflow_uri)
        assert again.not_promoted == ""
        assert TAG not in client.get_run(held_back.mlflow_run_id).data.tags
        (version,) = client.search_model_versions("name = 'gated'")
        assert version.run_id == held_back.mlflow_run_id

    def test_the_baseline_of_a_fork_is_its_own_start(
        self, held_back: TrainResult, fields: dict[str, Any], mlflow_uri: str
    ) -> None:
        fork = train(fields, run_name="forked", resume="gate@2", promote_if="test/nll < baseline")
        points = MlflowClient(mlflow_uri).get_metric_history(fork.mlflow_run_id, "test/nll")
        assert sorted(point.step for point in points) == [2, 4]
        assert fork.not_promoted == ""

    def test_a_metric_that_nothing_measures_is_told_before_the_first_step(self, fields: dict[str, Any]) -> None:
        with pytest.raises(
            ConfigError, match=r"asks for test/accuracy, which no evaluation measures; there are test/bi"
        ):
            train(fields, run_name="typo", promote_if="test/accuracy > 0.5")


def train(fields: dict[str, Any], **changes: object) -> TrainResult:
    return sft(SftConfig.model_validate(fields | changes))
