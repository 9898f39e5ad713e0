"""Checkpoints and model versions as Prefect assets on a real server, down to the rows of the data."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect.assets import Asset
from prefect.client.orchestration import get_client
from prefect.events.filters import EventFilter, EventNameFilter, EventResourceFilter
from sft_config import sft_fields
from waiting import wait_for

from flows.config.train import SftConfig
from flows.sft import sft
from tasks.common.assets import asset_key
from tasks.common.digests import digest_file

ROWS = [
    {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"{n + 1}"}]}
    for n in range(8)
]


@pytest.mark.parametrize("location", ["/a b/c%.jsonl", "s3://bucket/<x>/[y]", "/" + "long/" * 200, "/größe"])
def test_keys_are_accepted_by_prefect_and_distinct(location: str) -> None:
    key = Asset(key=asset_key(location)).key
    assert key != asset_key(location + "x")


def asset_events(key: str, name: str) -> list[dict[str, Any]]:
    """Events of an asset on the server, newest first."""
    with get_client(sync_client=True) as prefect:
        chosen = EventFilter(event=EventNameFilter(name=[name]), resource=EventResourceFilter(id=[key]))
        query = {"filter": chosen.model_dump(mode="json")}
        return prefect._client.post("/events/filter", json=query).json()["events"]


def materialization(key: str) -> dict[str, Any]:
    """Wait for the newest materialization of an asset."""

    def newest() -> dict[str, Any] | None:
        return next(iter(asset_events(key, "prefect.asset.materialization.succeeded")), None)

    return wait_for(newest, f"the asset {key}", 60)


@pytest.mark.parametrize("granularity", ["task", "segment"])
def test_a_version_leads_back_to_the_rows(
    granularity: str, tmp_path: Path, mlflow_uri: str, engine_url: str, prefect_server: str, api_key: None
) -> None:
    data = tmp_path / "my rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    fields = sft_fields(tmp_path, "run", mlflow_uri, engine_url) | {
        "data": {
            "builder": "tinker_cookbook.supervised.data:FromConversationFileBuilder",
            "params": {
                "file_path": str(data),
                "common_config": {"renderer_name": "role_colon", "max_length": 128, "batch_size": 4},
            },
        },
        "objective": {"regularizers": []},
        "num_steps": 2,
        "eval_every": 0,
        "checkpoint_every": 1,
        "register_as": f"assets-{granularity}",
        "granularity": granularity,
    }
    result = sft(SftConfig.model_validate(fields))

    version = materialization(f"mlflow://models/assets-{granularity}@final")
    assert version["payload"]["state_path"] == result.state_path
    (checkpoint_key,) = upstream(version)
    checkpoint = materialization(checkpoint_key)
    assert checkpoint["payload"]["step"] == 2
    assert checkpoint["payload"]["state_path"] == result.state_path
    first = materialization(checkpoint_key.replace("final", "000001"))
    assert first["payload"]["step"] == 1
    points = MlflowClient(mlflow_uri).get_metric_history(result.mlflow_run_id, "train_mean_nll")
    by_step = {point.step: point.value for point in points}
    for event, last_update in ((first, 0), (checkpoint, 1)):
        assert event["payload"]["train_mean_nll"] == pytest.approx(by_step[last_update])
    assert upstream(materialization(asset_key(result.report))) == [checkpoint_key]
    registered = MlflowClient(mlflow_uri).get_model_version_by_alias(f"assets-{granularity}", "final")
    lineage = (
        f"my rows.jsonl (digest {digest_file(data)}) → checkpoint final at step 2 → "
        f"assets-{granularity} version {registered.version}"
    )
    assert lineage in html.unescape(Path(result.report).read_text())
    (data_key,) = upstream(checkpoint)
    (described,) = {
        event["resource"]["prefect.asset.description"] for event in asset_events(data_key, "prefect.asset.referenced")
    }
    assert described == f"digest {digest_file(data)}; 8 rows; columns messages"


def upstream(event: dict[str, Any]) -> list[str]:
    """Keys of the assets that the asset of an event derives from."""
    return [
        related["prefect.resource.id"] for related in event["related"] if related["prefect.resource.role"] == "asset"
    ]
