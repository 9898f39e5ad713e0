"""A run that is stopped before its first checkpoint starts over, perhaps with corrected data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from metric_history import history
from sft_config import sft_fields

from blocks.errors import GuardError
from flows.config.train import SftConfig
from flows.monitoring.progress import step_callback
from flows.runs.result import TrainResult
from flows.sft import sft

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")

PRICES = [{"tinker_id": "tiny", "prefill": 1_000_000, "sample": 1_000_000, "train": 1_000_000}]


def conversations(answer: str) -> str:
    rows = [
        {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": answer}]}
        for n in range(8)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def lines_of(result: TrainResult) -> dict[int, dict[str, float]]:
    """Return the lines of metrics.jsonl by step."""
    text = (Path(result.directory) / "metrics.jsonl").read_text()
    return {line["step"]: line for line in map(json.loads, text.splitlines())}


def stop_after(step: int) -> Any:
    def stop(done: int, metrics: dict[str, float]) -> str:
        if done == step:
            raise GuardError("stopped by the test")
        return ""

    return step_callback(stop)


@pytest.mark.parametrize("origin", ["base", "parent@final"])
def test_metrics_are_those_of_the_corrected_data(origin: str, tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    path = tmp_path / "data.jsonl"
    common = {"renderer_name": "role_colon", "max_length": 100, "batch_size": 2}
    builder = "tinker_cookbook.supervised.data:FromConversationFileBuilder"
    data = {"builder": builder, "params": {"file_path": str(path), "test_size": 2, "common_config": common}}
    fields = sft_fields(tmp_path, "parent", mlflow_uri, engine_url)
    fields |= {"data": data, "num_steps": 3, "eval_every": 1, "checkpoint_every": 0, "objective": {}}
    path.write_text(conversations("a wrong answer"))
    if origin != "base":
        sft(SftConfig.model_validate(fields | {"num_steps": 1}))
    config = SftConfig.model_validate(fields | {"run_name": "corrected", "init_from": origin})
    with pytest.raises(GuardError, match="stopped by the test"), stop_after(1):
        sft(config)
    path.write_text(conversations("right"))
    result = sft(config)
    lines = lines_of(result)
    for key in ("train_mean_nll", "loss/total", "test/nll", "num_tokens"):
        assert history(result, key) == {step: line[key] for step, line in lines.items() if key in line}, key


def test_costs_count_each_repetition_and_the_last_check(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """Two kills at the same step, then the end of the budget."""
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps(PRICES))
    fields = sft_fields(tmp_path, "costly", mlflow_uri, engine_url)
    fields |= {"num_steps": 6, "eval_every": 0, "checkpoint_every": 0, "objective": {}}
    fields["budget"] = {"prices": str(prices)}
    whole = sft(SftConfig.model_validate(fields | {"run_name": "whole"}))
    per_step = {step: line["num_tokens"] for step, line in lines_of(whole).items() if "num_tokens" in line}
    for _ in range(2):
        with pytest.raises(GuardError, match="stopped by the test"), stop_after(2):
            sft(SftConfig.model_validate(fields))
    result = sft(SftConfig.model_validate(fields))
    spent = max(history(result, "cost/num_train_tokens").values())
    repeated = sum(per_step[step] for step in range(3))
    # Each stopped start has also sent the next update, because cross-entropy alone needs no forward pass.
    assert spent >= max(history(whole, "cost/num_train_tokens").values()) + 2 * repeated
