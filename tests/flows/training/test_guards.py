"""Guards and budgets on real runs: bad steps are neither trained on nor saved, and no limit is exceeded."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import bad_batches
import numpy
import pytest
import torch
import yaml
from engine_process import EngineProcess
from mlflow import MlflowClient
from mlflow.entities import Run
from rl_config import rl_fields
from saved_weights import saved_weights
from sft_config import sft_fields
from tinker import types
from tinker_cookbook.tokenizer_utils import get_tokenizer

from blocks.errors import ConfigError, GuardError, PoisonedError, RolledBackError, ServiceError
from blocks.files.local import home
from blocks.files.local_directory import LocalDirectory
from deployments.command_line import main
from engine.models import resolve_model
from flows.config.train import BudgetConfig, GuardConfig, SftConfig
from flows.estimates.supervised import estimate
from flows.rl import RlConfig, rl
from flows.runs.prices import FREE, TABLE, Price, digest_prices, price_of
from flows.runs.result import TrainResult
from flows.sft import sft
from flows.training import budget
from flows.training.budget import Ledger
from flows.training.guards import Guard, spike_score
from objectives.batch import Batch
from objectives.gradients.linearize import Linearized
from objectives.objective import Objective
from tasks.supervised.dataset import build_dataset
from tasks.training.batch_source import SampledTokens
from tasks.training.forward_backward import read_outputs

BAD = {"not_finite": [3], "spikes": [5]}
SPIKES = {"spike_window": 4, "spike_threshold": 50.0}


@pytest.fixture
def fields(
    tmp_path: Path, engine_url: str, mlflow_uri: str, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Return a run with cross-entropy only, whose updates are sent one step ahead."""
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    fields = sft_fields(tmp_path, "guarded", mlflow_uri, engine_url)
    data = {"builder": "bad_batches:BadBatchBuilder", "params": fields["data"]["params"]}
    return fields | {"objective": {}, "eval_every": 0, "checkpoint_every": 4, "data": data}


def with_bad_batches(fields: dict[str, Any], run_name: str, policy: str) -> dict[str, Any]:
    data = {**fields["data"], "params": {**fields["data"]["params"], **BAD}}
    return fields | {"run_name": run_name, "data": data, "guards": {"not_finite": policy, "spike": policy, **SPIKES}}


def run_of(fields: dict[str, Any]) -> Run:
    client = MlflowClient(fields["tracking"])
    experiment = client.get_experiment_by_name("tinker-flows")
    assert experiment
    runs = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{fields['run_name']}'")
    return next(run for run in runs if run.data.params["storage"] == fields["storage"])


def points(run_id: str, uri: str, key: str) -> dict[int, float]:
    history = MlflowClient(uri).get_metric_history(run_id, key)
    assert len({point.step for point in history}) == len(history), key
    return {point.step: point.value for point in history}


def priced(folder: Path) -> str:
    """Write a price table with the tiny model, in the service's format."""
    prices = folder / "prices.json"
    prices.write_text(json.dumps([{"tinker_id": "tiny", "prefill": "$1", "sample": "$1", "train": "$2,000"}]))
    return str(prices)


def check_skipped_steps(result: TrainResult, policy: str) -> None:
    """Check that steps 3 and 5 were skipped and reported, and that every step is logged once."""
    uri, run_id = result.tracking_uri, result.mlflow_run_id
    assert list(points(run_id, uri, "loss/total")) == [0, 1, 2, 4, 6, 7]
    assert points(run_id, uri, "guard/passed_over") == {3: 1.0, 5: 1.0}
    assert points(run_id, uri, "guard/num_passed_over") == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2, 7: 2}
    losses = points(run_id, uri, "loss/total")
    bad = points(run_id, uri, "guard/bad_loss")
    assert list(bad) == [5]
    assert bad[5] > 5 * max(losses.values())
    tags = MlflowClient(uri).get_run(run_id).data.tags
    assert tags["tinker_flows.warning.guard.3"].startswith(f"Step 3 is skipped ({policy}). ")
    assert "not finite" in tags["tinker_flows.warning.guard.3"]
    assert "robust deviations above" in tags["tinker_flows.warning.guard.5"]
    lines = (Path(result.directory) / "guards.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 5]


def test_skipped_and_rolled_back_runs_end_with_the_same_weights(fields: dict[str, Any], engine: EngineProcess) -> None:
    """Skip the same steps in two ways: before their updates, or by a rollback to a checkpoint."""
    skipped = sft(SftConfig.model_validate(with_bad_batches(fields, "skips", "skip")))
    check_skipped_steps(skipped, "skip")
    assert skipped.resumed_from == 0
    rolled = sft(SftConfig.model_validate(with_bad_batches(fields, "rolls", "rollback")))
    check_skipped_steps(rolled, "rollback")
    assert rolled.resumed_from == 4  # step 3 precedes every checkpoint, step 5 follows the one at step 4
    tags = run_of(fields | {"run_name": "rolls"}).data.tags
    assert tags["tinker_flows.restart.1"].startswith("Step 3 is skipped")
    assert saved_weights(engine.state, skipped.state_path) == saved_weights(engine.state, rolled.state_path)


def test_a_step_whose_candidates_are_bad_leaves_nothing_behind(fields: dict[str, Any], engine: EngineProcess) -> None:
    """Compare a skipped step, whose supervised minibatch is good, with a rollback of the same step."""
    finals = {}
    for policy in ("skip", "rollback"):
        bad_batches.EVALUATED.clear()
        data = {**fields["data"], "params": {**fields["data"]["params"], "contrast": False}}
        term = {"name": "test_nan_at_second_candidates", "weight": 0.5, "on_error": "raise"}
        objective = {"regularizers": [term], "balance": {"method": "gradnorm"}}
        candidates = {"num": 2, "max_tokens": 8, "every": 1, "overlap": False}
        changes = {"run_name": policy, "data": data, "objective": objective, "candidates": candidates, "num_steps": 3}
        guards = {"not_finite": policy, "spike": "off"}
        result = sft(SftConfig.model_validate(fields | changes | {"guards": guards, "checkpoint_every": 1}))
        assert points(result.mlflow_run_id, result.tracking_uri, "guard/passed_over") == {1: 1.0}
        assert len(points(result.mlflow_run_id, result.tracking_uri, "candidates/num")) >= 2
        finals[policy] = saved_weights(engine.state, result.state_path)
    for name, tensor in finals["skip"].items():
        # The engine is not in its deterministic mode, so the last bits may differ.
        expected = numpy.frombuffer(finals["rollback"][name], numpy.float32)
        numpy.testing.assert_allclose(numpy.frombuffer(tensor, numpy.float32), expected, rtol=1e-3, atol=1e-5)


def test_batches_without_a_trained_token_are_found_before_the_first_step(fields: dict[str, Any]) -> None:
    data = {**fields["data"], "params": {**fields["data"]["params"], "untrained": [3, 5]}}
    stopping = fields | {"run_name": "stops", "data": data}
    expected = "The batches of 2 of 8 steps, first of step 3, have nothing to train .*or set guards.untrained to skip"
    with pytest.raises(ConfigError, match=expected):
        sft(SftConfig.model_validate(stopping))
    run = run_of(stopping)
    assert not points(run.info.run_id, fields["tracking"], "loss/total")
    data["params"]["not_finite"] = [4]
    # Steps 3 and 5 do not count as bad steps, so that step 4 is no second one in a row.
    guards = {"untrained": "skip", "not_finite": "skip", "max_in_a_row": 1}
    result = sft(SftConfig.model_validate(fields | {"data": data, "guards": guards}))
    assert list(points(result.mlflow_run_id, result.tracking_uri, "loss/total")) == [0, 1, 2, 6, 7]
    assert points(result.mlflow_run_id, result.tracking_uri, "guard/passed_over") == {3: 1.0, 4: 1.0, 5: 1.0}
    assert "2 of 8 steps are skipped" in run_of(fields).data.tags["tinker_flows.warning.guard.untrained"]


def test_estimate_leaves_out_the_steps_that_a_run_skips(
    fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {**fields["data"], "params": {**fields["data"]["params"], "untrained": [3, 5]}}
    skipping = fields | {"data": data, "guards": {"untrained": "skip"}}
    with pytest.raises(ConfigError, match="The batches of 2 of 8 steps, first of step 3, have nothing to train"):
        estimate(SftConfig.model_validate(skipping | {"guards": {}}))
    whole, estimated = (estimate(SftConfig.model_validate(config)) for config in (fields, skipping))
    sizes = num_tokens_of_batches(fields)
    assert whole.num_tokens == sum(sizes)
    assert estimated.num_tokens == sum(sizes) - sizes[3] - sizes[5]
    assert (estimated.num_steps, estimated.skipped_steps, estimated.num_forward_backwards) == (8, (3, 5), 6)
    assert estimated.num_train_tokens == whole.num_train_tokens - sizes[3] - sizes[5]

    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(skipping))
    with pytest.raises(SystemExit, match="0"):
        main(["estimate", "--config", str(config)])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "8, of which 2 are skipped for lack of anything to train (step 3, ...)" in shown


def num_tokens_of_batches(fields: dict[str, Any]) -> list[int]:
    """Count the tokens of the batch of each step without packing it."""
    tokenizer = get_tokenizer(str(resolve_model("tiny", home() / "cache")))
    train = build_dataset(fields["data"]["builder"], fields["data"]["params"], tokenizer, seed=0).train
    train.set_epoch(SftConfig.model_validate(fields).seed)
    return [sum(datum.model_input.length for datum in train.get_batch(index)) for index in range(8)]


def test_a_run_without_any_trained_token_is_refused(fields: dict[str, Any]) -> None:
    data = {**fields["data"], "params": {**fields["data"]["params"], "untrained": list(range(8))}}
    with pytest.raises(ConfigError, match="The batches of 8 of 8 steps, first of step 0, have nothing to train"):
        sft(SftConfig.model_validate(fields | {"data": data, "guards": {"untrained": "skip"}}))


def test_poisoned_weights_are_never_recorded(fields: dict[str, Any]) -> None:
    """The first update breaks the weights, and the service saves them before the guard can check them."""
    fields |= {"run_name": "poisoned", "learning_rate": 1e30, "checkpoint_every": 1}
    state = sft(SftConfig.model_validate(fields), return_state=True)
    assert state.is_failed()
    assert "The run stopped at step 0: The Tinker service could not" in (state.message or "")
    with pytest.raises(GuardError, match=r"stopped at step 0: .*loss is nan.*guards\.not_finite"):
        state.result()
    run = run_of(fields)
    assert run.info.status == "FAILED"
    assert "stopped at step 0" in run.data.tags["tinker_flows.stopped"]
    assert not (Path(fields["storage"]) / "poisoned" / "checkpoints.jsonl").exists()
    fields |= {"guards": {"not_finite": "skip", "max_in_a_row": 1}}
    limit = r"stopped at step 1 after 1 consecutive skipped steps: .*increase guards\.max_in_a_row"
    with pytest.raises(GuardError, match=limit):
        sft(SftConfig.model_validate(fields))
    records = (Path(fields["storage"]) / "poisoned" / "checkpoints.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == [1]  # without step 0: the initial weights


@pytest.mark.usefixtures("prefect_server", "api_key")
def test_broken_weights_that_show_first_in_sampling_are_rolled_back(
    tmp_path: Path, mlflow_uri: str, engine_url: str
) -> None:
    guards = {"not_finite": "rollback", "max_in_a_row": 1}
    fields = rl_fields(tmp_path, "sampled", mlflow_uri, engine_url) | {"learning_rate": 1e30, "guards": guards}
    fields |= {"num_steps": 4, "eval_every": 0, "checkpoint_every": 1}
    with pytest.raises(GuardError, match=r"stopped at step 1 after 1 consecutive skipped steps: .*sample a rollout"):
        rl(RlConfig.model_validate(fields))
    lines = (Path(fields["storage"]) / "sampled" / "guards.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0]


def test_run_stops_within_its_budget_and_resumes_with_a_higher_one(
    fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = priced(tmp_path)
    config = tmp_path / "run.yaml"
    fields |= {"run_name": "budget", "num_steps": 6, "eval_every": 3, "budget": {"prices": prices}}
    config.write_text(yaml.safe_dump(fields))
    with pytest.raises(SystemExit, match="0"):
        main(["estimate", "--config", str(config), "--json"])
    estimated = json.loads(capsys.readouterr().out)
    assert (estimated["num_steps"], estimated["num_forward_backwards"], estimated["num_evaluations"]) == (6, 6, 3)
    assert estimated["usd"] == pytest.approx(estimated["num_train_tokens"] * 2000 / 1e6)

    limit = estimated["usd"] / 2
    state = sft(SftConfig.model_validate(fields | {"budget": {"prices": prices, "usd": limit}}), return_state=True)
    first = state.result()
    assert (state.name, state.message) == ("BudgetSpent", first.stopped)
    assert 0 < first.num_steps < 6
    assert first.stopped.startswith(
        f"The run stopped at a checkpoint before step {first.num_steps}: it would have cost $"
    )
    run = run_of(fields)
    assert run.info.status == "FINISHED"
    assert run.data.tags["tinker_flows.stopped"] == first.stopped
    spent = json.loads((Path(first.directory) / "checkpoints.jsonl").read_text().splitlines()[-1])["spent"]
    assert 0.5 * limit < spent["usd"] <= limit
    assert first.metrics["cost/budget_share"] <= 1

    last = sft(SftConfig.model_validate(fields))
    assert (last.resumed_from, last.num_steps, last.stopped) == (first.num_steps, 6, "")
    assert "tinker_flows.stopped" not in run_of(fields).data.tags
    tokens = points(last.mlflow_run_id, last.tracking_uri, "num_tokens")
    # The estimate, plus one more check of the last weights where the first start stopped.
    expected = estimated["num_train_tokens"] + tokens[first.num_steps - 1]
    assert last.metrics["cost/num_train_tokens"] == expected
    assert last.metrics["cost/usd"] == pytest.approx(expected * 2000 / 1e6)
    assert last.metrics["cost/hours"] > 0


def test_hours_are_counted_over_restarts() -> None:
    assert Ledger(BudgetConfig(hours=2.0), FREE, {"hours": 1.5}).stop_reason(7, 10, SampledTokens()) == ""
    reason = Ledger(BudgetConfig(hours=2.0), FREE, {"hours": 2.5}).stop_reason(7, 10, SampledTokens())
    assert reason.startswith("The run stopped at a checkpoint before step 7: it would have taken 2.5 hours")


def test_hours_include_the_step_in_progress_and_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a step of half an hour, two more steps reach 1.5 hours."""
    clock = [0.0]
    monkeypatch.setattr(budget, "monotonic", lambda: clock[0])
    ledgers = {hours: Ledger(BudgetConfig(hours=hours), FREE, {}) for hours in (1.4, 1.6)}
    clock[0] = 1800.0
    for ledger in ledgers.values():
        ledger.end_step()
    assert "would have taken 1.5 hours with step 2" in ledgers[1.4].stop_reason(2, 10, SampledTokens())
    assert ledgers[1.6].stop_reason(2, 10, SampledTokens()) == ""


def test_prices() -> None:
    hosted = "https://tinker.thinkingmachines.dev/services/tinker-prod"
    assert price_of("Qwen/Qwen3-8B", hosted) == Price(0.195, 0.6, 0.44)
    assert price_of("gpt-17", hosted) is None
    assert price_of("Qwen/Qwen3-8B", "https://tinker.example.org") is None
    assert price_of("Qwen/Qwen3-8B", "https://tinker.example.org", str(TABLE)) == Price(0.195, 0.6, 0.44)
    assert price_of("tiny", "") == price_of("tiny", "http://127.0.0.1:8000") == FREE
    with pytest.raises(ConfigError, match="the price of the model is unknown"):
        Ledger(BudgetConfig(usd=1.0), None, {})


def test_digest_of_prices_depends_on_prices_alone(tmp_path: Path) -> None:
    rows = [{"tinker_id": name, "prefill": 1, "sample": 2, "train": 3} for name in ("a", "b")]
    tables = {
        "prices.json": json.dumps(rows),
        "copy.yaml": yaml.safe_dump([{**row, "prefill": "$1.00"} for row in reversed(rows)]),
        "other.json": json.dumps([rows[0], {**rows[1], "train": 4}]),
    }
    for name, content in tables.items():
        (tmp_path / name).write_text(content)
    local, copy, other = (digest_prices("", str(tmp_path / name)) for name in tables)
    assert local == copy == digest_prices("http://127.0.0.1:8000", str(tmp_path / "prices.json"))
    elsewhere = digest_prices("https://tinker.example.org", str(tmp_path / "prices.json"))
    assert len({local, other, elsewhere, digest_prices("")}) == 4, (
        "models without a price are free on this machine only"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "could not be read"),
        ("{}{", "is not valid YAML"),
        ("[{tinker_id: a}]", "is invalid"),
        ("[1]", "is invalid"),
    ],
)
def test_invalid_price_table(tmp_path: Path, content: str | None, expected: str) -> None:
    table = tmp_path / "prices.yaml"
    if content is not None:
        table.write_text(content)
    with pytest.raises(ConfigError, match=expected):
        price_of("tiny", "", str(table))


def test_spike_score() -> None:
    losses = [2.0, 2.1, 1.9, 2.2, 1.8]
    assert spike_score(2.0, losses) == 0
    assert spike_score(1.0, losses) < 0
    assert spike_score(2.1, losses) == pytest.approx(0.6745)
    assert spike_score(2.02, [2.0] * 5) == pytest.approx(0.6745)  # constant losses


def test_non_finite_logprobs_are_blamed_on_the_weights() -> None:
    """A hosted service returns such logprobs; the local engine rejects the request."""
    batch = Batch(torch.tensor([1, 2, 3]), torch.ones(3), torch.tensor([0, 3]))
    logprobs = types.TensorData.from_torch(torch.tensor([-1.0, float("nan"), -2.0]))
    output = types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[{"logprobs": logprobs}], metrics={}
    )
    with pytest.raises(PoisonedError, match="returned 1 logprobs of 3 that are not finite"):
        read_outputs(output, batch)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([3, 2], "returned 3 logprobs for datum 0, which has 2 target tokens"),
        ([2, 4], "returned 4 logprobs for datum 1, which has 3 target tokens"),
        ([5], "returned logprobs for 1 datums and 5 tokens but 2 and 5 were sent"),
    ],
)
def test_misplaced_logprobs_are_rejected(lengths: list[int], expected: str) -> None:
    batch = Batch(torch.arange(5), torch.ones(5), torch.tensor([0, 2, 5]))
    logprobs = [types.TensorData.from_torch(-torch.ones(length)) for length in lengths]
    output = types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[{"logprobs": part} for part in logprobs], metrics={}
    )
    with pytest.raises(ServiceError, match=expected):
        read_outputs(output, batch)


@pytest.mark.slow
def test_non_finite_term_at_one_step(fields: dict[str, Any]) -> None:
    """The guard catches values that `on_error` lets through, and the step leaves no trace in the objective's state."""
    objective = {"regularizers": [{"name": "test_nan_at_spikes", "weight": 0.1}], "balance": {"method": "gradnorm"}}
    config = with_bad_batches(fields, "term", "skip") | {"objective": objective}
    config["guards"] = {"not_finite": "skip"}
    result = sft(SftConfig.model_validate(config))
    assert points(result.mlflow_run_id, result.tracking_uri, "guard/passed_over") == {3: 1.0, 5: 1.0}
    tags = MlflowClient(result.tracking_uri).get_run(result.mlflow_run_id).data.tags
    assert "Term 'test_nan_at_spikes' has the value nan" in tags["tinker_flows.warning.guard.5"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_killed_runs_skip_the_same_steps(
    fields: dict[str, Any], tmp_path: Path, policy: str, moments: random.Random
) -> None:
    """Kill -9 at random moments; the final weights equal those of an uninterrupted run bit for bit."""
    home = tmp_path / "home"
    path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "TINKER_FLOWS_HOME": str(home), "PYTHONPATH": path}
    environment.pop("TINKER_API_KEY")

    def start(run_name: str) -> subprocess.Popen[bytes]:
        config = tmp_path / f"{run_name}.yaml"
        changes = {"base_url": "local", "num_steps": 12, "checkpoint_every": 2}
        config.write_text(yaml.safe_dump(with_bad_batches(fields, run_name, policy) | changes))
        command = [sys.executable, "-m", "flows.sft", "--config", str(config)]
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[3], start_new_session=True)

    def final(run_name: str) -> dict[str, bytes]:
        lines = (Path(fields["storage"]) / run_name / "checkpoints.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["final"]
        return saved_weights(home / "engine", json.loads(lines[-1])["state_path"])

    assert start("whole").wait(timeout=280) == 0
    record = Path(fields["storage"]) / "killed" / "guards.jsonl"
    for num_lines in (1, 2):  # directly after a decision, then at a random time
        process = start("killed")
        deadline = time.monotonic() + 240
        while process.poll() is None and time.monotonic() < deadline:
            if record.exists() and len(record.read_bytes().splitlines()) >= num_lines:
                break
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.5) * (num_lines - 1))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert start("killed").wait(timeout=280) == 0
    assert final("killed") == final("whole")
    skipped = [json.loads(line)["step"] for line in record.read_text().splitlines()]
    assert skipped == [3, 5]
    run = run_of(fields | {"run_name": "killed"})
    assert list(points(run.info.run_id, fields["tracking"], "loss/total")) == [0, 1, 2, 4, *range(6, 12)]


@pytest.mark.slow
def test_spent_budget_stays_spent(fields: dict[str, Any], tmp_path: Path) -> None:
    """Restarting with the same budget does nothing; a budget below the first step is an error."""
    config = SftConfig.model_validate(fields | {"budget": {"prices": priced(tmp_path), "usd": 25.0}})
    first = sft(config)
    assert 0 < first.num_steps < 8
    again = sft(config)
    assert (again.num_steps, again.resumed_from) == (first.num_steps, first.num_steps)
    assert again.stopped.startswith(f"The run stopped at a checkpoint before step {first.num_steps}: ")
    with pytest.raises(ConfigError, match=r"^No step was run: the run would have .* with step 0, but budget\."):
        sft(config.model_copy(update={"run_name": "none", "budget": BudgetConfig(prices=priced(tmp_path), usd=0.01)}))


@pytest.mark.parametrize(("skipped", "blamed"), [([], [2]), ([3], [2, 3]), ([3, 4], [2, 3, 4])])
def test_weights_that_break_before_skipped_steps_are_blamed_on_the_last_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: list[int], blamed: list[int]
) -> None:
    for name in ("note_warning", "note_end", "emit"):
        monkeypatch.setattr(f"flows.training.guards.{name}", lambda *_: None)
    log: Any = None
    finite = Linearized(torch.zeros(1), 1.0, 1.0, (), torch.zeros(0, 0), torch.zeros(0), {}, 1.0)
    with LocalDirectory(tmp_path / "run") as directory:
        for step in skipped:
            line = {"step": step, "kind": "untrained", "policy": "skip", "loss": None, "why": "No token."}
            directory.append_line("guards.jsonl", json.dumps(line))
        guard = Guard(GuardConfig(not_finite="rollback"), "run", directory, log, Objective())
        guard.check(2, lambda: finite)
        step = 3 + len(skipped)
        with pytest.raises(RolledBackError, match="Step 2 is skipped"), guard.checked_responses(step):
            raise PoisonedError("The weights are broken.")
        assert sorted(guard.skipped_steps) == blamed
        # With a guard of the restarted run, which trains no step before it: the problem is none of step 2's batch.
        again = Guard(GuardConfig(not_finite="rollback"), "run", directory, log, Objective())
        message = r"at step 2, which is skipped already: .*check the evaluation and the weights"
        with pytest.raises(GuardError, match=message), again.checked_responses(2):
            raise PoisonedError("The held-out data has the test/nll inf.")


def test_skipped_steps_follow_the_data_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that starts over may have other data; steps that an earlier start skipped for another reason stay."""
    warned: list[str] = []
    monkeypatch.setattr("flows.training.guards.note_warning", lambda log, key, text: warned.append(text))
    monkeypatch.setattr("flows.training.guards.forget_warning", lambda log, key: warned.clear())
    monkeypatch.setattr("flows.training.guards.emit", lambda *_: None)
    log: Any = None
    with LocalDirectory(tmp_path / "run") as directory:

        def check(untrained: list[int], policy: Literal["stop", "skip"] = "skip") -> list[int]:
            guard = Guard(GuardConfig(untrained=policy), "run", directory, log, Objective())
            guard.check_batches(untrained, 8)
            return sorted(guard.skipped_steps)

        assert check([3, 5]) == [3, 5]
        lines = directory.read_bytes("guards.jsonl")
        assert check([3, 5]) == [3, 5]
        assert directory.read_bytes("guards.jsonl") == lines
        with pytest.raises(ConfigError, match="have nothing to train"):
            check([3, 5], "stop")
        assert all("2 of 8 steps are skipped" in text for text in warned)
        spike = {"step": 6, "kind": "spike", "policy": "skip", "loss": 9.0, "why": "The loss is a spike."}
        directory.append_line("guards.jsonl", json.dumps(spike))
        assert check([5]) == [5, 6]
        assert "1 of 8 steps are skipped" in warned[-1]
        assert check([]) == [6]
        assert not warned, "the warning is removed"
        assert check([]) == [6]
