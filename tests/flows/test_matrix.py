"""Every method with every kind of term on the tiny model."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import chz
import pytest
import tinker
import torch
from distill_config import distill_fields, environment
from dpo_config import dpo_fields
from mlflow import MlflowClient
from rl_config import rl_fields
from rlhf_config import rlhf_fields
from run_config import run_fields
from tinker import types
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import SupervisedDataset
from torch import Tensor

from flows.config.base import Config
from flows.config.distill import OffPolicyConfig, OnPolicyConfig
from flows.config.dpo import DpoConfig
from flows.config.loader import validate_fields
from flows.config.rl import RlConfig
from flows.config.rlhf import RlhfConfig
from flows.config.train import SftConfig
from flows.distill import off_policy_distillation, on_policy_distillation
from flows.dpo import dpo
from flows.rl import rl
from flows.runs.result import TrainResult
from flows.sft import sft
from objectives import Batch, Outputs, regularizer

NUM_STEPS = 3
STEPS = {"num_steps": NUM_STEPS, "num_epochs": 9, "eval_every": 0, "checkpoint_every": NUM_STEPS}

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")


@regularizer("matrix_custom")
def matrix_custom(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Custom term: squared log-probabilities."""
    return outputs.logprobs_DT.square(), {"greatest": outputs.logprobs_DT.max()}


KINDS: dict[str, dict[str, Any]] = {
    "norm": {"name": "l2"},
    "distribution": {"name": "confidence"},
    "sparsity": {"name": "sparsity"},
    "kl": {"name": "kl"},
    "length": {"name": "length", "params": {"free": 2, "buffer": 8}},
    "repetition": {"name": "repetition"},
    "unlikely": {"name": "unlikely_repeats"},
    "topology": {"name": "topology"},
    "logic": {"name": "logic"},
    "knowledge": {"name": "knowledge"},
    "fairness": {"name": "worst_group"},
    "sequences": {"name": "orthogonality"},
    "custom": {"name": "matrix_custom"},
}


class Labelled(SupervisedDataset):
    """Dataset whose datums alternate between two groups."""

    def __init__(self, dataset: SupervisedDataset) -> None:
        self._dataset = dataset

    def get_batch(self, index: int) -> list[tinker.Datum]:
        return [_with_group(datum, number % 2) for number, datum in enumerate(self._dataset.get_batch(index))]

    def set_epoch(self, seed: int = 0) -> None:
        self._dataset.set_epoch(seed)

    def __len__(self) -> int:
        return len(self._dataset)


@chz.chz
class LabelledBuilder(FromConversationFileBuilder):
    """Conversations in two groups."""

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset | None]:
        train, test = FromConversationFileBuilder.__call__(self)
        return Labelled(train), test


def _with_group(datum: tinker.Datum, group: int) -> tinker.Datum:
    label = {"label:group": types.TensorData.from_torch(torch.tensor([group]))}
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs={**datum.loss_fn_inputs, **label})


Fields = Mapping[str, Any]


class Method(NamedTuple):
    """A method, and a small run of it.

    Attributes:
        fields: of its config, by folder, run name, tracking URI and the service's URL.
        group: the label of its datums that stands for groups.
    """

    run: Callable[[Any], TrainResult]
    config: type[Config]
    fields: Callable[[Path, str, str, str], Fields]
    base_loss: str
    group: str


def _sft_fields(folder: Path, name: str, tracking: str, url: str) -> Fields:
    file = {"file_path": "examples/data/sums.jsonl", "common_config": {"max_length": 256, "batch_size": 4}}
    data = {"builder": f"{__name__}:LabelledBuilder", "params": file}
    return run_fields(folder, name, tracking, url) | {"lora_rank": 4, "learning_rate": 1e-3, "data": data}


def _off_policy_fields(folder: Path, name: str, tracking: str, url: str) -> Fields:
    return distill_fields(folder, name, tracking, url) | {"datasets": [{"environment": environment(folder)}]}


def _reward_fields(folder: Path, name: str, tracking: str, url: str) -> Fields:
    config = RlhfConfig.model_validate(rlhf_fields(folder, name, tracking, url))
    return config.reward_stage().model_dump(exclude_unset=True) | {"run_name": name}


def _policy_fields(folder: Path, name: str, tracking: str, url: str) -> Fields:
    fields = rlhf_fields(folder, name, tracking, url)
    del fields["reward"]
    fields["judge"] = {
        "builder": "tasks.preference.preference_models:JudgeBuilder",
        "params": {"judge": f"{__name__}:longer"},
    }
    return RlhfConfig.model_validate(fields).policy_stage("", "").model_dump(exclude_unset=True) | {"run_name": name}


def longer(row: Mapping[str, str], first: str, second: str) -> float:
    return float(len(first) > len(second))


METHODS = {
    "sft": Method(sft, SftConfig, _sft_fields, "cross_entropy", "group"),
    "dpo": Method(dpo, DpoConfig, dpo_fields, "dpo", "desirable"),
    "rl": Method(rl, RlConfig, rl_fields, "importance_sampling", "group"),
    "on_policy": Method(on_policy_distillation, OnPolicyConfig, _off_policy_fields, "importance_sampling", "dataset"),
    "off_policy": Method(off_policy_distillation, OffPolicyConfig, _off_policy_fields, "cross_entropy", "dataset"),
    "reward": Method(dpo, DpoConfig, _reward_fields, "bradley_terry", "desirable"),
    "policy": Method(rl, RlConfig, _policy_fields, "ppo", "group"),
}


def terms_of(folder: Path, method: Method, *kinds: str) -> list[dict[str, Any]]:
    """Return terms of the given kinds that a method supports."""
    database = folder / "facts.db"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE facts (letter, following)")
        connection.execute("INSERT INTO facts VALUES ('i', 's')")
    connection.close()
    params: dict[str, dict[str, Any]] = {
        "fairness": {"label": method.group},
        "knowledge": {
            "source": str(database),
            "query": "SELECT following FROM facts WHERE letter = :letter",
            "pattern": r"(?P<letter>[a-z])(?P<value>[a-z])",
        },
    }
    return [KINDS[kind] | {"weight": 0.1, "params": KINDS[kind].get("params", params.get(kind, {}))} for kind in kinds]


def check(folder: Path, tracking: str, url: str, name: str, *kinds: str) -> None:
    """Run three steps of a method; check that every term has finite metrics at every step."""
    method = METHODS[name]
    run_name = f"matrix-{name}-{kinds[0] if len(kinds) == 1 else 'all'}"
    terms = terms_of(folder, method, *kinds)
    objective = {"base_loss": method.base_loss, "regularizers": terms}
    fields = {**method.fields(folder, run_name, tracking, url), **STEPS, "objective": objective}
    result = method.run(validate_fields(method.config, fields))
    assert result.num_steps == NUM_STEPS
    client = MlflowClient(tracking)
    for term in ("base", *(spec["name"] for spec in terms)):
        for figure in ("value", "contribution", "grad_norm"):
            points = client.get_metric_history(result.mlflow_run_id, f"term/{term}/{figure}")
            assert len(points) == NUM_STEPS, (term, figure)
            assert all(math.isfinite(point.value) for point in points), (term, figure)


@pytest.mark.parametrize("name", ["sft", "dpo", "rl"])
def test_method_with_all_kinds_of_terms(tmp_path: Path, engine_url: str, mlflow_uri: str, name: str) -> None:
    check(tmp_path, mlflow_uri, engine_url, name, *KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"sft", "dpo", "rl"}))
def test_other_methods_with_all_kinds_of_terms(tmp_path: Path, engine_url: str, mlflow_uri: str, name: str) -> None:
    check(tmp_path, mlflow_uri, engine_url, name, *KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", METHODS)
def test_method_with_one_kind_of_term(tmp_path: Path, engine_url: str, mlflow_uri: str, name: str, kind: str) -> None:
    check(tmp_path, mlflow_uri, engine_url, name, kind)
