"""The sft flow from data to final checkpoint."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from uuid import UUID

import pytest
import tinker
import torch
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas import TaskRun
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterId
from sft_config import sft_fields

from flows.config.train import SftConfig
from flows.monitoring.drain import deliver_events, wait_until_recorded
from flows.runs.result import TrainResult
from flows.sft import sft
from objectives.batch import Outputs, pack
from objectives.gradients.balance import step_seed
from objectives.objective import Objective
from tasks.supervised.dataset import build_dataset

GOLDEN = Path(__file__).with_name("golden_sft.json")
pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sft")


@pytest.fixture(scope="module")
def finished(folder: Path, engine_url: str, mlflow_uri: str, prefect_server: str) -> TrainResult:
    """Run once for several tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-test")
        return sft(SftConfig.model_validate(sft_fields(folder, "whole", mlflow_uri, engine_url)))


def history(result: TrainResult, key: str) -> list[tuple[int, float]]:
    points = MlflowClient(result.tracking_uri).get_metric_history(result.mlflow_run_id, key)
    return sorted((point.step, point.value) for point in points)


def test_golden_loss_curve(finished: TrainResult) -> None:
    """A changed curve needs UPDATE_GOLDEN=1 and an explanation in docs/log.md."""
    keys = ("loss/total", "train_mean_nll", "test/nll", "term/logic/value", "term/topology/value")
    curves = {key: history(finished, key) for key in keys}
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert curves.keys() == golden.keys()
    for key, points in curves.items():
        assert [step for step, _ in points] == [step for step, _ in golden[key]]
        # Kernels of other processors round differently; the resume test compares bits on one machine.
        # The absolute tolerance is that of float32 values near 1, from which small values are computed.
        expected = pytest.approx([value for _, value in golden[key]], rel=1e-4, abs=1e-6)
        assert [value for _, value in points] == expected


def test_loss_decreases(finished: TrainResult) -> None:
    nll = [value for _, value in history(finished, "test/nll")]
    assert nll[-1] < nll[0] - 0.1


def test_every_term_is_logged_once_per_step(finished: TrainResult) -> None:
    for name in ("base", "topology", "logic", "confidence"):
        for field in ("value", "weight", "contribution", "grad_norm", "grad_share", "cosine_to_base", "duration_s"):
            assert [step for step, _ in history(finished, f"term/{name}/{field}")] == list(range(8)), (name, field)


def test_contributions_add_up_to_the_total(finished: TrainResult) -> None:
    names = ("base", "topology", "logic", "confidence")
    parts = [dict(history(finished, f"term/{name}/contribution")) for name in names]
    for step, total in history(finished, "loss/total"):
        assert total == pytest.approx(sum(part[step] for part in parts), rel=1e-6)


def test_weight_schedule_is_followed(finished: TrainResult) -> None:
    weights = [value for _, value in history(finished, "term/confidence/weight")]
    assert weights == pytest.approx([0.5 * step / 7 for step in range(8)])


def recorded_task_runs(finished: TrainResult) -> list[TaskRun]:
    deliver_events()
    wait_until_recorded(UUID(finished.flow_run_id), "report")
    flow_run = FlowRunFilter(id=FlowRunFilterId.model_validate({"any_": [finished.flow_run_id]}))
    with get_client(sync_client=True) as client:
        return client.read_task_runs(flow_run_filter=flow_run, limit=200)


def test_each_step_consists_of_task_runs(finished: TrainResult) -> None:
    runs = recorded_task_runs(finished)
    names = [run.name for run in runs]
    assert {run.state_name for run in runs} == {"Completed"}
    for term in ("topology", "logic", "confidence"):
        assert names.count(f"term-{term}") == 8
    for term in ("topology", "logic"):
        assert names.count(f"prepare-{term}") == 8
    for step in range(8):
        assert names.count(f"batch-{step}") == 1
    assert sum(name.startswith("forward_backward-") for name in names) == 8
    assert sum(name.startswith("optim_step-") for name in names) == 8


def test_terms_that_need_only_the_data_are_prepared_ahead(finished: TrainResult) -> None:
    runs = recorded_task_runs(finished)
    ended = sorted(run.end_time for run in runs if run.name.startswith("forward_backward-"))
    prepared = sorted(run.start_time for run in runs if run.name == "prepare-logic")
    # `prepare` of step s + 1 starts before forward_backward of step s ends.
    assert all(begun < end for begun, end in zip(prepared[1:], ended[:-1], strict=True))


def test_record_of_the_run(finished: TrainResult, folder: Path) -> None:
    directory = folder / "runs" / "whole"
    records = [json.loads(line) for line in (directory / "checkpoints.jsonl").read_text().splitlines()]
    assert [record["batch"] for record in records] == [2, 4, 6, 8]
    assert [record["final"] for record in records] == [False, False, False, True]
    assert records[-1]["sampler_path"] == finished.sampler_path
    assert {record["mlflow_run_id"] for record in records} == {finished.mlflow_run_id}
    run = MlflowClient(finished.tracking_uri).get_run(finished.mlflow_run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["learning_rate"] == "0.01"
    assert run.data.params["objective.regularizers.logic.weight"] == "2.0"
    assert run.data.tags["prefect.flow_run_id"] == finished.flow_run_id
    assert run.data.tags["mlflow.source.name"] == "flows.sft"
    description = run.data.tags["mlflow.note.content"]
    assert f"/flow-run/{finished.flow_run_id})" in description
    for text in ("| model | tiny |", "| nll |", "tinker-flows sample whole@final", finished.report):
        assert text in description
    (entry,) = run.inputs.dataset_inputs
    assert entry.dataset.digest == run.data.tags["tinker_flows.first_batch"]


def test_report_has_every_term_and_its_charts(finished: TrainResult) -> None:
    page = Path(finished.report).read_text()
    assert page.count('class="plot"') == 7  # likelihood, three terms, shares, cosines, conflicts
    assert "src=" not in page
    assert 'href="http' not in page
    assert re.search(r"<dt>data</dt><dd>[\w.:]+, first batch [0-9a-f]{16}</dd>", page)
    for term in ("base", "topology", "logic", "confidence"):
        assert f"<td>{term}" in page
    artifacts = MlflowClient(finished.tracking_uri).list_artifacts(finished.mlflow_run_id)
    assert "report.html" in [artifact.path for artifact in artifacts]


def test_report_is_a_prefect_artifact(finished: TrainResult) -> None:
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["report-whole"])))
    (artifact,) = (artifact for artifact in artifacts if str(artifact.flow_run_id) == finished.flow_run_id)
    assert finished.report in str(artifact.data)
    assert "| logic |" in str(artifact.data)


def test_finished_run_is_not_trained_again(
    finished: TrainResult, folder: Path, engine_url: str, mlflow_uri: str
) -> None:
    again = sft(SftConfig.model_validate(sft_fields(folder, "whole", mlflow_uri, engine_url)))
    assert (again.resumed_from, again.num_steps, again.state_path) == (8, 8, finished.state_path)
    assert [step for step, _ in history(again, "loss/total")] == list(range(8))


def test_final_weights_can_be_sampled_from(finished: TrainResult, engine_url: str) -> None:
    client = tinker.ServiceClient(base_url=engine_url, api_key="tml-test")
    sampler = client.create_sampling_client(model_path=finished.sampler_path).result()
    prompt = tinker.ModelInput.from_ints([72, 105])
    sample = sampler.sample(prompt, num_samples=1, sampling_params=tinker.SamplingParams(max_tokens=4)).result()
    assert len(sample.sequences[0].tokens) > 0


def test_warnings_are_tags_and_learned_weights_are_in_the_checkpoint(
    folder: Path, engine_url: str, mlflow_uri: str
) -> None:
    fields = sft_fields(folder, "watched", mlflow_uri, engine_url) | {"num_steps": 2, "eval_every": 0}
    fields["objective"] = {
        "regularizers": [{"name": "logic", "weight": 3.0}],
        "watch": {"patience": 2, "dominance_above": 1e-6},
        "balance": {"method": "gradnorm"},
    }
    result = sft(SftConfig.model_validate(fields))
    tags = MlflowClient(result.tracking_uri).get_run(result.mlflow_run_id).data.tags
    assert (
        "'logic' has had more than 0% of the gradient for 2 consecutive evaluations"
        in tags["tinker_flows.warning.dominance.logic"]
    )
    record = json.loads((folder / "runs" / "watched" / "checkpoints.jsonl").read_text().splitlines()[-1])
    assert record["objective"]["balance"]["factors"].keys() == {"base", "logic"}
    assert history(result, "term/logic/weight_balanced")[0] == (0, 3.0)
    assert history(result, "term/logic/weight_balanced")[1][1] != 3.0


def test_random_weights_come_from_the_seed_of_the_run_and_the_step(
    folder: Path, engine_url: str, mlflow_uri: str
) -> None:
    fields = sft_fields(folder, "random", mlflow_uri, engine_url) | {"num_steps": 2, "eval_every": 0, "seed": 3}
    fields["objective"] = {"regularizers": [{"name": "confidence", "weight": 0.5}], "balance": {"method": "random"}}
    result = sft(SftConfig.model_validate(fields))
    for step in range(2):
        generator = torch.Generator().manual_seed(step_seed(3, step))
        shares_K = torch.randn(2, dtype=torch.float64, generator=generator).softmax(0)
        for name, weight, share in zip(("base", "confidence"), (1.0, 0.5), shares_K.tolist(), strict=True):
            (point,) = [value for at, value in history(result, f"term/{name}/weight_balanced") if at == step]
            assert point == pytest.approx(2 * share * weight)


def test_cross_entropy_alone_needs_no_forward_pass(folder: Path, engine_url: str, mlflow_uri: str) -> None:
    """Without regularizers, a step is one forward_backward and one optim_step, as in tinker-cookbook."""
    fields = sft_fields(folder, "plain", mlflow_uri, engine_url) | {"objective": {}, "num_steps": 2, "eval_every": 0}
    result = sft(SftConfig.model_validate(fields))
    losses = [value for _, value in history(result, "loss/total")]
    assert losses == [value for _, value in history(result, "loss/base")]
    assert losses[1] < losses[0]
    assert "term/base/grad_norm" in result.metrics


def test_one_step_equals_the_custom_loss_of_the_sdk(folder: Path, engine_url: str, mlflow_uri: str) -> None:
    """The linearized objective gives the same update as forward_backward_custom."""
    fields = sft_fields(folder, "one-step", mlflow_uri, engine_url) | {"num_steps": 1, "eval_every": 0, "seed": 3}
    fields["objective"] = {"regularizers": [{"name": "confidence", "weight": 5.0}]}
    config = SftConfig.model_validate(fields)
    result = sft(config)

    service = tinker.ServiceClient(base_url=engine_url, api_key="tml-test")
    client = service.create_lora_training_client("tiny", rank=4, seed=3).result()
    source = build_dataset(config.data.builder, config.data.params, client.get_tokenizer(), seed=3)
    batch = source.batch_at(0)
    objective = Objective.from_spec(config.objective)
    (confidence,) = objective.regularizers

    def loss(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        flat_DT, _ = pack(logprobs)
        base = -(flat_DT * batch.weights_DT).sum()
        term = confidence.term.evaluate(Outputs(flat_DT), batch, **confidence.params)
        value = (term[0] if isinstance(term, tuple) else term)[batch.mask_DT].mean()
        return base + 5.0 * batch.weights_DT.sum() * value, {}

    custom = client.forward_backward_custom(list(batch.datums), loss).result()
    client.optim_step(config.adam.params(config.learning_rate)).result()
    assert len(custom.loss_fn_outputs) == batch.num_datums
    after = client.forward(list(batch.datums), "cross_entropy").result()
    reloaded = service.create_training_client_from_state(result.state_path).result()
    ours = reloaded.forward(list(batch.datums), "cross_entropy").result()
    for mine, theirs in zip(ours.loss_fn_outputs, after.loss_fn_outputs, strict=True):
        torch.testing.assert_close(mine["logprobs"].to_torch(), theirs["logprobs"].to_torch(), rtol=0, atol=2e-4)
