"""Fixtures of the engine tests: a session on the shared engine, and a base model in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tinker
import torch
from engine_process import API_KEY
from tinker import types
from transformers.utils.logging import disable_progress_bar

from engine.compute.base import BaseModel
from engine.models import load_model, resolve_model

torch.set_num_threads(1)
disable_progress_bar()

MakeDatum = Callable[..., types.Datum]


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("tiny", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def base(tiny_path: Path) -> BaseModel:
    return BaseModel(load_model(tiny_path, "cpu", "float32", "tiny"))


@pytest.fixture
def service(engine_url: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=engine_url, api_key=API_KEY) as client:
        yield client


@pytest.fixture
def trainer(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()


@pytest.fixture(scope="session")
def datum() -> MakeDatum:
    """Return a function that makes a datum from the bytes of a text; weights default to 1."""

    def make(text: str, weights: list[float] | None = None) -> types.Datum:
        tokens = list(text.encode())
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": tokens[1:],
                "weights": weights if weights is not None else [1.0] * (len(tokens) - 1),
            },
        )

    return make


@pytest.fixture(scope="session")
def batch(datum: MakeDatum) -> list[types.Datum]:
    return [datum("to be or not to be"), datum("a rose"), datum("all that glitters", [0.0] * 8 + [0.5, -0.2] * 4)]
