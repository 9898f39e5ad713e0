"""Share of each term in the gradient, by the number of rows of the batch: the same rows, repeated.

The rows are GSM8K solutions with a corrupted copy each, on the tiny model. The table also has the shares under the
convention of release 0.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import tinker
from rich.table import Table
from tqdm import tqdm

from benchmarks.scratch import scratch_home
from blocks.servers.processes import local_engine
from objectives.objective import Objective
from objectives.sdk.training_loop import forward_backward_regularized
from tasks.supervised.dataset import build_dataset

TERMS = (
    {"name": "confidence", "weight": 1.0},
    {"name": "logic", "weight": 1.0, "estimator": "minimum_risk_mean"},
    {"name": "topology", "weight": 1.0, "estimator": "minimum_risk_mean"},
)
NUM_ROWS = 8


def measure(*, copies: Sequence[int] = (1, 4, 16)) -> Table:
    """Return one row per batch size and convention."""
    names = ["base", *(str(term["name"]) for term in TERMS)]
    table = Table(title="shares: share of the gradient by batch size", title_justify="left")
    for column in ("convention", "rows", *names):
        table.add_column(column, justify="left" if column == "convention" else "right")
    with scratch_home(), local_engine(model="tiny", dtype="float32", threads=1) as service, service.get_client() as sdk:
        client = sdk.create_lora_training_client("tiny", rank=8, seed=0).result()
        rows = _rows(client)
        for convention in ("this release", "release 0.1"):
            for number in tqdm(copies, desc=f"shares, {convention}"):
                shares = _shares(client, rows * number, is_old=convention == "release 0.1")
                table.add_row(convention, str(len(rows) * number), *(f"{shares[name]:.4f}" for name in names))
    return table


def _rows(client: tinker.TrainingClient) -> list[tinker.Datum]:
    common = {"renderer_name": "qwen3_instruct", "max_length": 768, "batch_size": NUM_ROWS // 2}
    params = {"contrast": True, "common_config": common}
    source = build_dataset("examples.gsm8k:Gsm8kBuilder", params, client.get_tokenizer(), 0)
    return source.train.get_batch(0)


def _shares(client: tinker.TrainingClient, rows: list[tinker.Datum], *, is_old: bool) -> dict[str, float]:
    """Return the share of each gradient; the weights of the model do not change."""
    with Objective(regularizers=TERMS) as objective:
        if is_old:
            objective.keep_conventions_of_0_1()
        metrics = forward_backward_regularized(client, rows, objective, step=0, num_steps=1).result().metrics
    return {key.split("/")[1]: value for key, value in metrics.items() if key.endswith("/grad_share")}
