"""Reference models: the base model, a checkpoint or sampler weights, scored once per datum at the price of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from engine_process import API_KEY
from mlflow import MlflowClient
from sft_config import sft_fields
from tinker import types

from blocks import RunStorage
from blocks.errors import ServiceError
from flows.config.train import SftConfig
from flows.estimates.supervised import estimate
from flows.runs.result import TrainResult
from flows.sft import sft
from objectives.batch import Batch, pack_targets
from tasks.common.event_loop import open_workers
from tasks.training.checkpoints import read_records
from tasks.training.datums import Datums
from tasks.training.reference import REFERENCE_NAME, Reference

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")


def run(folder: Path, name: str, mlflow_uri: str, engine_url: str, **changes: Any) -> TrainResult:
    fields = sft_fields(folder, name, mlflow_uri, engine_url) | {"num_steps": 4, "eval_every": 0, "adam": {"eps": 1e-2}}
    fields["objective"] = {"regularizers": [{"name": "kl", "weight": 0.1}], "backend": "client"}
    return sft(SftConfig.model_validate(fields | changes))


def kl_of(result: TrainResult, mlflow_uri: str) -> list[float]:
    points = MlflowClient(mlflow_uri).get_metric_history(result.mlflow_run_id, "term/kl/value")
    return [point.value for point in sorted(points, key=lambda point: point.step)]


def test_base_model_is_queried_once_per_datum(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    first = run(tmp_path, "two-passes", mlflow_uri, engine_url, num_steps=2, num_epochs=1)
    directory = RunStorage(url=str(tmp_path / "runs")).run_directory("two-passes")
    cached = directory.read_bytes(REFERENCE_NAME) or b""
    assert cached.count(b"\n") == 1
    distances = kl_of(first, mlflow_uri)
    assert distances[0] == pytest.approx(0, abs=1e-9)  # scoring and a forward pass round differently
    assert distances[1] > 1e-6

    fused = run(tmp_path, "one-pass", mlflow_uri, engine_url, num_steps=2, objective=one_pass())
    assert kl_of(fused, mlflow_uri) == pytest.approx(distances, abs=1e-6)


def test_reference_on_a_service_without_scores_of_ends(
    tmp_path: Path, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run warns and scores whole sequences, with the same values as without the option and with it."""
    runs = [
        run(tmp_path, option, mlflow_uri, engine_url, num_steps=2, prompt_logprobs_last_n=option)
        for option in ("auto", "off")
    ]
    send = tinker.SamplingClient._send_asample_request
    monkeypatch.setattr(
        tinker.SamplingClient, "_send_asample_request", lambda client, *args: send(client, *args[:-1], None)
    )
    runs.append(run(tmp_path, "fallback", mlflow_uri, engine_url, num_steps=2))
    values = [kl_of(result, mlflow_uri) for result in runs]
    assert values[0] == pytest.approx(values[1], abs=1e-7)
    assert values[2] == pytest.approx(values[1], abs=1e-7)
    tags = [MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags for result in runs]
    warnings = [run_tags.get("tinker_flows.warning.prompt_logprobs_last_n", "") for run_tags in tags]
    assert warnings[:2] == ["", ""]
    assert "score whole sequences" in warnings[2]


def one_pass() -> dict[str, Any]:
    return {"regularizers": [{"name": "kl", "weight": 0.1}], "backend": "server"}


def test_one_snapshot_of_the_reference_serves_a_whole_run(
    tmp_path: Path, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "teacher", mlflow_uri, engine_url, num_steps=2)
    path = read_records(RunStorage(url=str(tmp_path / "runs")).run_directory("teacher")).checkpoints[0].state_path
    opened: list[str] = []
    snapshot = tinker.TrainingClient.save_weights_and_get_sampling_client

    def count(client: tinker.TrainingClient, *args: Any, **options: Any) -> Any:
        opened.append("snapshot")
        return snapshot(client, *args, **options)

    monkeypatch.setattr(tinker.TrainingClient, "save_weights_and_get_sampling_client", count)
    result = run(tmp_path, "long", mlflow_uri, engine_url, num_steps=4, num_epochs=2, reference=path)
    assert len(kl_of(result, mlflow_uri)) == 4
    assert opened == ["snapshot"]


def test_checkpoint_as_reference(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    run(tmp_path, "teacher", mlflow_uri, engine_url, num_steps=2)
    directory = RunStorage(url=str(tmp_path / "runs")).run_directory("teacher")
    path = read_records(directory).checkpoints[0].state_path
    student = run(tmp_path, "student", mlflow_uri, engine_url, num_steps=2, reference=path, resume=path)
    distances = kl_of(student, mlflow_uri)
    assert distances[0] == pytest.approx(0, abs=1e-9)  # scoring and a forward pass round differently
    assert distances[1] > 1e-6

    sampler_path = read_records(directory).checkpoints[0].sampler_path
    by_sampler = run(tmp_path, "by-sampler", mlflow_uri, engine_url, num_steps=2, reference=sampler_path, resume=path)
    assert kl_of(by_sampler, mlflow_uri) == pytest.approx(distances, abs=1e-4)

    missing = "tinker://00000000-0000-0000-0000-000000000000/weights/none"
    with pytest.raises(ServiceError, match="open the reference tinker://0000"):
        run(tmp_path, "lost", mlflow_uri, engine_url, reference=missing)


def test_reference_is_billed_at_the_price_of_prompt_tokens(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """The bill is that of the run without a reference, plus each sequence once as a prompt, as the estimate says."""
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps([{"tinker_id": "tiny", "prefill": "$100", "sample": "$0", "train": "$10,000"}]))
    changes: dict[str, Any] = {"num_steps": 3, "num_epochs": 3, "budget": {"prices": str(prices)}}
    with_reference = run(tmp_path, "billed", mlflow_uri, engine_url, **changes)
    # Another term with two passes, without a reference.
    objective = {"regularizers": [{"name": "confidence", "weight": 0.1}], "backend": "client"}
    without = run(tmp_path, "unbilled", mlflow_uri, engine_url, objective=objective, **changes)
    assert with_reference.metrics["cost/num_train_tokens"] == without.metrics["cost/num_train_tokens"]
    tokens = MlflowClient(mlflow_uri).get_metric_history(with_reference.mlflow_run_id, "num_tokens")
    num_sequences = 3 * 2 * 2  # three steps of two problems with two completions; each adds its last token
    num_prefill_tokens = sum(point.value for point in tokens) + num_sequences
    assert with_reference.metrics["cost/num_prefill_tokens"] == num_prefill_tokens
    cost = with_reference.metrics["cost/usd"] - without.metrics["cost/usd"]
    assert cost == pytest.approx(num_prefill_tokens * 100 / 1e6)

    fields = json.loads((Path(with_reference.directory) / "config.json").read_text())
    fields.pop("format_version")
    estimated = estimate(SftConfig.model_validate(fields))
    assert estimated.reference.num_prefill_tokens == num_prefill_tokens
    assert estimated.usd == pytest.approx(with_reference.metrics["cost/usd"])


def test_steps_without_a_due_term_are_not_scored(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    kl = {"name": "kl", "weight": 0.1, "every": 2}
    changes: dict[str, Any] = {"num_steps": 3, "objective": {"regularizers": [kl], "backend": "client"}}
    result = run(tmp_path, "every-second", mlflow_uri, engine_url, **changes)
    assert len(kl_of(result, mlflow_uri)) == 2
    tokens = MlflowClient(mlflow_uri).get_metric_history(result.mlflow_run_id, "num_tokens")
    num_sequences = 2 * 2 * 2  # steps 0 and 2 of two problems with two completions; each adds its last token
    expected = sum(point.value for point in tokens if point.step != 1) + num_sequences
    assert result.metrics["cost/num_prefill_tokens"] == expected

    fields = json.loads((Path(result.directory) / "config.json").read_text())
    fields.pop("format_version")
    assert estimate(SftConfig.model_validate(fields)).reference.num_prefill_tokens == expected


def test_scores_equal_a_forward_pass(engine_url: str) -> None:
    """With K targets per position, which a sampler cannot score, the reference runs the forward pass itself."""
    session = tinker.ServiceClient(base_url=engine_url, api_key=API_KEY)
    trained = session.create_lora_training_client("tiny", rank=4).result()
    datums = [datum(list(range(3, 3 + length))) for length in (2, 17, 40)]
    trained.forward_backward(datums, "cross_entropy")
    trained.optim_step(types.AdamParams(learning_rate=0.1)).result()
    expected_D = [
        entry["logprobs"].to_torch() for entry in trained.forward(datums, "cross_entropy").result().loss_fn_outputs
    ]
    base = session.create_lora_training_client("tiny", rank=4).result().forward(datums, "cross_entropy").result()
    assert (base.loss_fn_outputs[1]["logprobs"].to_torch() - expected_D[1]).abs().max() > 0.1

    snapshot = trained.save_weights_and_get_sampling_client().result()
    reference = Reference(snapshot, lambda: trained, "trained", uses_cache=False)
    with open_workers():
        scores_DT = reference.logprobs(packed(datums), 1)
        torch.testing.assert_close(scores_DT, torch.cat(expected_D), atol=1e-4, rtol=0)
        assert reference.take_sampled(0).num_prefill_tokens == 0
        assert reference.take_sampled(1).num_prefill_tokens == 2 + 17 + 40
        assert reference.take_num_train_tokens(1) == 0

        soft = [datum(list(range(3, 3 + length)), num_targets=2) for length in (2, 17, 40)]
        scores_DTK = reference.logprobs(packed(soft), 2)
    torch.testing.assert_close(scores_DTK[:, 0], torch.cat(expected_D), atol=1e-4, rtol=0)
    assert reference.take_sampled(2).num_prefill_tokens == 0
    assert reference.take_num_train_tokens(2) == 1 + 16 + 39


def datum(tokens: list[int], num_targets: int = 1) -> tinker.Datum:
    """Return a datum whose first target at each position is the next token."""
    targets = torch.tensor(tokens[1:])
    if num_targets > 1:
        targets = torch.stack([targets + k for k in range(num_targets)], dim=1)
    inputs = {"target_tokens": targets, "weights": torch.ones(targets.shape)}
    return tinker.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={key: types.TensorData.from_torch(value) for key, value in inputs.items()},
    )


def packed(datums: list[tinker.Datum]) -> Batch:
    targets_D, weights_D = ([d.loss_fn_inputs[key].to_torch() for d in datums] for key in ("target_tokens", "weights"))
    return pack_targets(targets_D, weights_D, str, datums=Datums(datums))
