"""Guards and budgets on real runs: what is not fit is not trained on nor saved, and no limit is exceeded."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bad_batches  # noqa: F401  # registers its term
import pytest
import torch
import yaml
from engine_process import EngineProcess
from mlflow import MlflowClient
from mlflow.entities import Run
from saved_weights import saved_weights
from sft_config import sft_fields
from tinker import types

from blocks.errors import ConfigError, GuardError, PoisonedError
from deployments.command_line import main
from flows.budget import BudgetConfig, Ledger
from flows.guards import spike_score
from flows.prices import FREE, TABLE, Price, price_of
from flows.result import TrainResult
from flows.sft import SftConfig, sft
from objectives.batch import Batch
from tasks.forward import read_outputs

BAD = {"not_finite": [3], "spikes": [5]}
SPIKES = {"spike_window": 4, "spike_threshold": 50.0}


@pytest.fixture
def fields(
    tmp_path: Path, engine_url: str, mlflow_uri: str, prefect_server: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Cross-entropy alone, whose updates are sent one step ahead."""
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
    found = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{fields['run_name']}'")
    return next(run for run in found if run.data.params["storage"] == fields["storage"])


def points(run_id: str, uri: str, key: str) -> dict[int, float]:
    found = MlflowClient(uri).get_metric_history(run_id, key)
    assert len({point.step for point in found}) == len(found), key
    return {point.step: point.value for point in found}


def priced(folder: Path) -> str:
    """A table in which the tiny model has a price, in the form of the service's own."""
    prices = folder / "prices.json"
    prices.write_text(json.dumps([{"tinker_id": "tiny", "prefill": "$1", "sample": "$1", "train": "$2,000"}]))
    return str(prices)


def check_passed_over(result: TrainResult, policy: str) -> None:
    """Steps 3 and 5 took no part, the run says so, and every step is logged once."""
    uri, run_id = result.tracking_uri, result.mlflow_run_id
    assert list(points(run_id, uri, "loss/total")) == [0, 1, 2, 4, 6, 7]
    assert points(run_id, uri, "guard/passed_over") == {3: 1.0, 5: 1.0}
    assert points(run_id, uri, "guard/num_passed_over") == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2, 7: 2}
    losses = points(run_id, uri, "loss/total")
    bad = points(run_id, uri, "guard/bad_loss")
    assert list(bad) == [5]
    assert bad[5] > 5 * max(losses.values())
    tags = MlflowClient(uri).get_run(run_id).data.tags
    assert tags["tinker_flows.guard.3"].startswith(f"{policy}: ")
    assert "not finite" in tags["tinker_flows.guard.3"]
    assert "robust deviations above" in tags["tinker_flows.guard.5"]
    lines = (Path(result.directory) / "guards.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 5]


def test_skipped_and_rolled_back_runs_end_with_the_same_weights(fields: dict[str, Any], engine: EngineProcess) -> None:
    """Two ways to leave out the same steps: before their updates, or by going on from a checkpoint without them."""
    skipped = sft(SftConfig.model_validate(with_bad_batches(fields, "skips", "skip")))
    check_passed_over(skipped, "skip")
    assert skipped.resumed_from == 0
    rolled = sft(SftConfig.model_validate(with_bad_batches(fields, "rolls", "rollback")))
    check_passed_over(rolled, "rollback")
    assert rolled.resumed_from == 4  # step 3 came before any checkpoint, step 5 behind the one at 4
    tags = run_of(fields | {"run_name": "rolls"}).data.tags
    assert tags["tinker_flows.restart.1"].startswith("Step 3 is passed over")
    assert saved_weights(engine.state, skipped.state_path) == saved_weights(engine.state, rolled.state_path)


def test_poisoned_weights_are_never_recorded(fields: dict[str, Any]) -> None:
    """The first update breaks the weights, and the save right behind it holds them before anything can be seen."""
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
    with pytest.raises(GuardError, match=r"stopped at step 1, after 1 steps on end that were passed over"):
        sft(SftConfig.model_validate(fields))
    records = (Path(fields["storage"]) / "poisoned" / "checkpoints.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in records] == [1]  # without step 0: the weights of the beginning


def test_a_run_ends_within_its_budget_and_goes_on_with_a_higher_one(
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
        f"The run ended at a checkpoint before step {first.num_steps}: it would have cost $"
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
    # What was estimated, and one look back more, where the first part ended.
    expected = estimated["num_train_tokens"] + tokens[first.num_steps - 1]
    assert last.metrics["cost/num_train_tokens"] == expected
    assert last.metrics["cost/usd"] == pytest.approx(expected * 2000 / 1e6)
    assert last.metrics["cost/hours"] > 0


def test_hours_are_counted_over_parts() -> None:
    ledger = Ledger(BudgetConfig(hours=2.0), FREE, {"hours": 1.5})
    assert ledger.end_before(7, 10) == ""
    assert (
        Ledger(BudgetConfig(hours=2.0), FREE, {"hours": 2.5})
        .end_before(7, 10)
        .startswith("The run ended at a checkpoint before step 7: it would have taken 2.5 hours")
    )


def test_prices() -> None:
    hosted = "https://tinker.thinkingmachines.dev/services/tinker-prod"
    assert price_of("Qwen/Qwen3-8B", hosted) == Price(0.195, 0.6, 0.44)
    assert price_of("gpt-17", hosted) is None
    assert price_of("Qwen/Qwen3-8B", "https://tinker.example.org") is None
    assert price_of("Qwen/Qwen3-8B", "https://tinker.example.org", str(TABLE)) == Price(0.195, 0.6, 0.44)
    assert price_of("tiny", "local") == price_of("tiny", "http://127.0.0.1:8000") == FREE
    with pytest.raises(ConfigError, match="nobody said what the model costs"):
        Ledger(BudgetConfig(usd=1.0), None, {})


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "could not be read"), ("{}{", "is none"), ("[{tinker_id: a}]", "is none"), ("[1]", "is none")],
)
def test_a_table_of_prices_that_is_none(tmp_path: Path, content: str | None, expected: str) -> None:
    table = tmp_path / "prices.yaml"
    if content is not None:
        table.write_text(content)
    with pytest.raises(ConfigError, match=expected):
        price_of("tiny", "local", str(table))


def test_spikes_are_far_above_the_median() -> None:
    losses = [2.0, 2.1, 1.9, 2.2, 1.8]
    assert spike_score(2.0, losses) == 0
    assert spike_score(1.0, losses) < 0
    assert spike_score(2.1, losses) == pytest.approx(0.6745)
    assert spike_score(2.02, [2.0] * 5) == pytest.approx(0.6745)  # losses that do not differ at all


def test_logprobs_that_are_not_finite_are_laid_to_the_weights() -> None:
    """As a hosted service gives them; the local engine refuses the request."""
    batch = Batch(torch.tensor([1, 2, 3]), torch.ones(3), torch.tensor([0, 3]))
    logprobs = types.TensorData.from_torch(torch.tensor([-1.0, float("nan"), -2.0]))
    answer = types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[{"logprobs": logprobs}], metrics={}
    )
    with pytest.raises(PoisonedError, match="returned 1 logprobs of 3 that are not finite"):
        read_outputs(answer, batch)


@pytest.mark.slow
def test_a_term_that_is_not_finite_at_one_step(fields: dict[str, Any]) -> None:
    """What `on_error` lets through is the guard's; the step leaves no trace in what the objective remembers."""
    objective = {"regularizers": [{"name": "test_nan_at_spikes", "weight": 0.1}], "balance": {"method": "gradnorm"}}
    config = with_bad_batches(fields, "term", "skip") | {"objective": objective}
    config["guards"] = {"not_finite": "skip"}
    result = sft(SftConfig.model_validate(config))
    assert points(result.mlflow_run_id, result.tracking_uri, "guard/passed_over") == {3: 1.0, 5: 1.0}
    tags = MlflowClient(result.tracking_uri).get_run(result.mlflow_run_id).data.tags
    assert "Term 'test_nan_at_spikes' has the value nan" in tags["tinker_flows.guard.5"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_killed_runs_pass_over_the_same_steps(fields: dict[str, Any], tmp_path: Path, policy: str) -> None:
    """kill -9 at random moments; the weights at the end are those of a run that was never stopped, bit for bit."""
    home = tmp_path / "home"
    path = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "TINKER_FLOWS_HOME": str(home), "PYTHONPATH": path}
    environment.pop("TINKER_API_KEY")

    def start(run_name: str) -> subprocess.Popen[bytes]:
        config = tmp_path / f"{run_name}.yaml"
        changed = {"base_url": "local", "num_steps": 12, "checkpoint_every": 2}
        config.write_text(yaml.safe_dump(with_bad_batches(fields, run_name, policy) | changed))
        command = [sys.executable, "-m", "flows.sft", "--config", str(config)]
        return subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2], start_new_session=True)

    def final(run_name: str) -> dict[str, bytes]:
        lines = (Path(fields["storage"]) / run_name / "checkpoints.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["final"]
        return saved_weights(home / "engine", json.loads(lines[-1])["state_path"])

    assert start("whole").wait(timeout=280) == 0
    seed = random.SystemRandom().randrange(10**6)
    print(f"moments drawn with seed {seed}")
    moments = random.Random(seed)
    record = Path(fields["storage"]) / "killed" / "guards.jsonl"
    for num_lines in (1, 2):  # right behind a decision, and then at any time
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
    decided = [json.loads(line)["step"] for line in record.read_text().splitlines()]
    assert decided == [3, 5]
    run = run_of(fields | {"run_name": "killed"})
    assert list(points(run.info.run_id, fields["tracking"], "loss/total")) == [0, 1, 2, 4, *range(6, 12)]


@pytest.mark.slow
def test_a_budget_that_is_spent_stays_spent(fields: dict[str, Any], tmp_path: Path) -> None:
    """The same command with the same budget does nothing; one too small for the first step is refused."""
    config = SftConfig.model_validate(fields | {"budget": {"prices": priced(tmp_path), "usd": 25.0}})
    first = sft(config)
    assert 0 < first.num_steps < 8
    again = sft(config)
    assert (again.num_steps, again.resumed_from) == (first.num_steps, first.num_steps)
    assert again.stopped.startswith(f"The run ended at a checkpoint before step {first.num_steps}: ")
    with pytest.raises(ConfigError, match=r"before step 0: .*Nothing is done yet"):
        sft(config.model_copy(update={"run_name": "none", "budget": BudgetConfig(prices=priced(tmp_path), usd=0.01)}))
