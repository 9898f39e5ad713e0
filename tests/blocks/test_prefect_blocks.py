"""Blocks in Prefect: descriptions, hidden secrets, loading, and registration with one command."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import httpx
import pytest
from prefect.blocks.core import Block
from prefect.testing.standard_test_suites.blocks import BlockStandardTestSuite
from pydantic import SecretStr

from blocks import MLflowTracking, RunStorage, TinkerService

KINDS = [MLflowTracking, RunStorage, TinkerService]

SAVED = [
    TinkerService(base_url="http://127.0.0.1:1", api_key=SecretStr("tml-hidden"), connect_timeout_s=3),
    MLflowTracking(tracking_uri="sqlite:///runs.db", experiment="mine"),
    RunStorage(
        url="s3://runs/here",
        endpoint_url="http://127.0.0.1:2",
        access_key=SecretStr("access-hidden"),
        secret_key=SecretStr("secret-hidden"),
    ),
]


class TestDescriptions(BlockStandardTestSuite):
    """Prefect's standard tests, except for the documentation URL and the image, which need the web."""

    test_has_a_documentation_url = None  # pyright: ignore[reportAssignmentType]
    test_has_a_valid_image = None  # pyright: ignore[reportAssignmentType]

    @pytest.fixture(params=KINDS)
    def block(self, request: pytest.FixtureRequest) -> type[Block]:
        return request.param

    def test_all_fields_have_a_title(self, block: type[Block]) -> None:
        assert [name for name, field in block.model_fields.items() if not field.title] == []


@pytest.mark.parametrize("block", SAVED, ids=lambda block: type(block).__name__)
def test_saved_blocks_round_trip_with_hidden_secrets(prefect_server: str, block: Block) -> None:
    kind = type(block)
    block.save("saved", overwrite=True)
    loaded = kind.load("saved")
    assert isinstance(loaded, kind)
    assert loaded.model_dump(exclude={"block_type_slug"}) == block.model_dump(exclude={"block_type_slug"})
    response = httpx.get(f"{prefect_server}/block_types/slug/{kind.get_block_type_slug()}/block_documents/name/saved")
    assert response.status_code == 200
    assert "hidden" not in response.text
    secrets = [name for name, value in block.model_dump().items() if isinstance(value, SecretStr)]
    fields: dict[str, Any] = response.json()["data"]
    assert all(fields[name] and set(fields[name]) == {"*"} for name in secrets)


def test_one_command_registers_every_block(prefect_server: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "prefect", "block", "register", "-m", "blocks"],
        env={**os.environ, "PREFECT_API_URL": prefect_server},
        capture_output=True,
        text=True,
        check=True,
    )
    for kind in KINDS:
        assert kind.get_block_type_name() in result.stdout
        assert httpx.get(f"{prefect_server}/block_types/slug/{kind.get_block_type_slug()}").status_code == 200


@pytest.mark.process
def test_prefect_loads_the_blocks_without_the_clients_of_their_servers() -> None:
    """Every Prefect server, worker and command imports the collection at its start."""
    clients = {"torch", "tinker", "mlflow", "s3fs", "botocore", "sqlalchemy"}
    code = f"import sys, blocks.collection; print(sorted({clients} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
