"""Forks from weights that cannot be trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker
from engine_process import API_KEY
from sft_config import sft_fields

from blocks.errors import ConfigError, ServiceError
from flows.config.train import SftConfig
from flows.runs.blocks import storage_of
from flows.runs.run import _resumed_client
from flows.runs.start.fork import starts_of


def fork(tmp_path: Path, path: str) -> SftConfig:
    return SftConfig.model_validate(sft_fields(tmp_path, "fork", "") | {"resume": path})


def test_missing_checkpoint_announces_no_other(
    tmp_path: Path, engine_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    service = tinker.ServiceClient(base_url=engine_url, api_key=API_KEY)
    trained = service.create_lora_training_client("tiny", rank=1).result()
    config = fork(tmp_path, f"tinker://{trained.model_id}/weights/none")
    with pytest.raises(ServiceError, match="none of the 1 checkpoints that 'fork' can start from"):
        _resumed_client(service, config, starts_of(config, storage_of(config)))
    assert "previous checkpoint" not in capsys.readouterr().err


def test_sampler_weights_are_rejected(tmp_path: Path) -> None:
    config = fork(tmp_path, "tinker://a:train:0/sampler_weights/final")
    with pytest.raises(ConfigError, match="can only be sampled from: use the path of a checkpoint with optimizer"):
        starts_of(config, storage_of(config))
