"""Supervised training on K weighted targets per position."""

from __future__ import annotations

from pathlib import Path

import chz
import pytest
import tinker
import torch
from mlflow import MlflowClient
from sft_config import sft_fields
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset
from transformers import AutoModelForCausalLM

from blocks.errors import ConfigError
from engine.models import resolve_model
from flows.config.train import SftConfig
from flows.sft import sft
from tasks.training.datums import pack_datums

INPUT = [10, 11, 12, 13, 14]
TARGETS = [[11, 20, 30], [12, 21, 31], [13, 22, 32], [14, 23, 33], [15, 24, 34]]
WEIGHTS = [[0.0, 0.0, 0.0], [0.7, 0.2, 0.1], [0.5, 0.5, 0.0], [0.9, 0.1, 0.0], [0.2, 0.3, 0.5]]


def soft_datum(targets: list[list[int]] = TARGETS, weights: list[list[float]] = WEIGHTS) -> tinker.Datum:
    tensors = {"target_tokens": torch.tensor(targets), "weights": torch.tensor(weights)}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(INPUT[: len(targets)]),
        loss_fn_inputs={name: tinker.TensorData.from_torch(tensor) for name, tensor in tensors.items()},
    )


class SoftTargets(SupervisedDataset):
    def get_batch(self, index: int) -> list[tinker.Datum]:
        return [soft_datum(), soft_datum(TARGETS[:3], WEIGHTS[:3])]

    def set_epoch(self, seed: int = 0) -> None:
        """Keep the order."""

    def __len__(self) -> int:
        return 2


@chz.chz
class SoftTargetBuilder(ChatDatasetBuilder):
    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset]:
        return SoftTargets(), SoftTargets()


@pytest.mark.usefixtures("prefect_server")
def test_loss_and_held_out_loss_are_those_of_plain_torch(
    tmp_path: Path, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    terms = {"regularizers": [{"name": "negative_entropy_topk", "weight": 0.1}]}
    changes = {"num_steps": 3, "eval_every": 3, "num_epochs": 2, "objective": terms}
    fields = sft_fields(tmp_path, "soft", mlflow_uri, engine_url) | changes
    fields["data"]["builder"] = "test_soft_target_sft:SoftTargetBuilder"
    fields["data"]["params"].pop("contrast")
    result = sft(SftConfig.model_validate(fields))
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny", tmp_path / "cache"), dtype=torch.float32)
    with torch.no_grad():
        logprobs_TV = model(torch.tensor([INPUT])).logits[0].log_softmax(-1)
    logprobs_TK = logprobs_TV.gather(1, torch.tensor(TARGETS))
    weighted_TK = torch.tensor(WEIGHTS) * logprobs_TK
    # The second datum is the start of the first.
    mean = -float((weighted_TK.sum() + weighted_TK[:3].sum()) / (4 + 2))
    client = MlflowClient(mlflow_uri)
    for key in ("train_mean_nll", "test/nll"):
        points = {point.step: point.value for point in client.get_metric_history(result.mlflow_run_id, key)}
        assert points[0] == pytest.approx(mean, rel=1e-4)
        assert points[max(points)] < points[0]


def test_targets_of_another_shape_are_refused() -> None:
    narrow = soft_datum([row[:2] for row in TARGETS], [row[:2] for row in WEIGHTS])
    with pytest.raises(ConfigError, match=r"shape \(5, 2\), and the first has \(5, 3\)"):
        pack_datums([soft_datum(), narrow], None)  # pyright: ignore[reportArgumentType]
