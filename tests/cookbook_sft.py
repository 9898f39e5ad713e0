"""Supervised runs of tinker-cookbook's own loop on the data of the tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import tinker
from tinker_cookbook.supervised import train as supervised
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

from examples.gsm8k import Gsm8kBuilder

ROWS = Path(__file__).parents[1] / "examples" / "data" / "gsm8k_train.jsonl"
BATCH_SIZE = 4


def write_builder_params(folder: Path, num_steps: int) -> dict[str, Any]:
    """Write the rows of an epoch of `num_steps` batches; return the parameters of `Gsm8kBuilder`."""
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(ROWS.read_text().splitlines()[: BATCH_SIZE * num_steps]))
    common = {"renderer_name": "qwen3_instruct", "max_length": 256, "batch_size": BATCH_SIZE}
    return {"train_path": str(rows), "common_config": common}


def train_with_cookbook(directory: Path, builder_params: dict[str, Any], **changes: Any) -> None:
    """Train the tiny model of the service in `TINKER_BASE_URL`."""
    with tinker.ServiceClient() as service:
        info = service.create_lora_training_client(base_model="tiny", rank=1).result().get_info()
    name = str(info.model_data.tokenizer_id)
    common = ChatDatasetBuilderCommonConfig(model_name_for_tokenizer=name, **builder_params["common_config"])
    builder = Gsm8kBuilder(common_config=common, train_path=builder_params["train_path"])
    fields: dict[str, Any] = {"learning_rate": 1e-2, "lora_rank": 4, "save_every": 0, "eval_every": 0}
    config = supervised.Config(
        log_path=str(directory), model_name=name, recipe_name="test", dataset_builder=builder,
        **fields | {"infrequent_eval_every": 0} | changes,
    )  # fmt: skip
    asyncio.run(supervised.main(config))
