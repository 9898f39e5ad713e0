"""Kill -9 at random moments: a resumed run ends with the weights of an uninterrupted one, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from dpo_config import dpo_fields
from forked_program import ROOT, ForkedProgram, start_program
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling
from rl_config import rl_fields
from saved_weights import saved_weights
from sft_config import sft_fields

NUM_STEPS = 24


def command(config: Path, run_name: str, method: str = "sft") -> list[str]:
    return ["-m", f"flows.{method}", "--config", str(config), f"run_name={run_name}"]


def environment(home: Path, prefect_url: str) -> dict[str, str]:
    """Environment of a command that starts its own engine."""
    variables = {**os.environ, "TINKER_FLOWS_HOME": str(home), "PREFECT_API_URL": prefect_url}
    variables.pop("TINKER_API_KEY", None)
    return variables


def finish(process: ForkedProgram) -> str:
    assert process.wait(240) == 0, process.output()
    return process.output()


def wait_for_step(run_name: str, process: ForkedProgram | subprocess.Popen[bytes], mlflow_uri: str, step: int) -> None:
    """Wait until MLflow has the metrics of a step (-1: the run), or the process has ended."""
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline and last_step(run_name, mlflow_uri) < step:
        time.sleep(0.02)


def find_run(run_name: str, mlflow_uri: str) -> list[Run]:
    client = MlflowClient(mlflow_uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return list(client.search_runs(experiments, f"attributes.run_name = '{run_name}'"))


def last_step(run_name: str, mlflow_uri: str) -> int:
    """Return the last logged step; -1 without steps, -2 without a run."""
    runs = find_run(run_name, mlflow_uri)
    points = [p for run in runs for p in MlflowClient(mlflow_uri).get_metric_history(run.info.run_id, "loss/total")]
    return max((point.step for point in points), default=-1 if runs else -2)


def final_weights(directory: Path, home: Path) -> dict[str, bytes]:
    """Read every tensor of the final checkpoint, including optimizer state, from the engine's files."""
    record = json.loads((directory / "checkpoints.jsonl").read_text().splitlines()[-1])
    assert record["final"]
    return saved_weights(home / "engine", record["state_path"])


def with_one_completion(fields: dict[str, Any]) -> dict[str, Any]:
    """Change the data of an sft run to one completion per prompt."""
    fields["data"]["params"]["contrast"] = False
    return fields


SCHEDULE = {"schedule": "linear", "start": 0.0, "end": 0.5}
OBJECTIVES: dict[str, dict[str, Any]] = {
    # Learned weights, so that resuming needs the objective's state.
    "two passes": {"regularizers": [{"name": "topology"}, {"name": "logic"}], "balance": {"method": "gradnorm"}},
    # Random weights, which must not depend on how often the run was killed.
    "random": {"regularizers": [{"name": "confidence"}, {"name": "sparsity"}], "balance": {"method": "random"}},
    "one pass": {
        "regularizers": [{"name": "confidence", "weight": SCHEDULE}, {"name": "l2", "weight": 0.01, "every": 3}]
    },
    # Multipliers of targets, which are active from the first step; one pass, and two with a target on a metric.
    "targets": {
        "regularizers": [
            {"name": "confidence", "target": {"equals": -0.15}},
            {"name": "l2", "target": {"at_most": 0.01}, "params": {"of": "probabilities"}, "every": 3},
        ]
    },
    "targets on candidates": {
        "regularizers": [
            {"name": "repetition", "target": {"at_most": 0.1}, "params": {"n": 1}},
            {"name": "length", "target": {"metric": "tokens_mean", "at_most": 12.0}},
        ]
    },
    "candidates": {"regularizers": [{"name": "repetition", "weight": 3.0, "params": {"n": 1}}]},
    "tokens": {"regularizers": [{"name": "confidence"}]},
    "seconds": {},
    "dpo": {"base_loss": "dpo", "regularizers": [{"name": "kl", "weight": 0.01}]},
    "rl": {"base_loss": "importance_sampling", "regularizers": [{"name": "kl", "weight": 0.1}, {"name": "length"}]},
    "rl targets": {
        "base_loss": "importance_sampling",
        "regularizers": [
            {"name": "kl", "target": {"at_most": 0.01}},
            {"name": "negative_entropy", "target": {"metric": "entropy", "at_least": 6.0}},
        ],
    },
}
# rl samples must be equal bit for bit, and the transcripts show every token.
EXACT = {"engine": {"threads": 1, "deterministic": True}, "transcripts_every": 1}
STREAM = {"schedule": {"mode": "stream", "num_minibatches": 2}}
PENALIZED = {"compute_post_kl": True, "advantage": {"kl_coefficient": 0.05, "kl_discount_factor": 0.9}}
REFILLED = {"rollout": {"max_tokens": 8, "refill_rounds": 2}, "advantage": {"drop_constant": True}}
CRITIC = {"advantage": {"estimator": "gae", "decay": 0.9, "critic": {"steps": 3}}}
REWARDS = {
    "rewards": {"num_letters": {"target": {"at_least": 4.0}}, "total": {"weight": 0.5}},
    "reward_normalization": "decoupled",
}
SAMPLED = {"candidates": {"num": 2, "max_tokens": 24}, "engine": EXACT["engine"]}
TOKENS = {"checkpoint_every": 0, "checkpoint_every_tokens": 4000, "checkpoint_kind": "both"}
SECONDS = {"checkpoint_every": 0, "checkpoint_every_seconds": 1.5}
SAMPLER = {
    "builder": "tinker_flows:ExactMatch",
    "params": {
        "path": "examples/data/gsm8k_test.jsonl",
        "renderer_name": "qwen3_instruct",
        "limit": 2,
        "sampling": {"max_tokens": 4, "seed": 0},
    },
}
RARE = {"infrequent_evaluators": [SAMPLER], "infrequent_eval_every": 7, "engine": EXACT["engine"]}
OVERSAMPLED = {
    "rollout": {"max_tokens": 8, "oversampling_factor": 1.5, "refill_rounds": 1},
    "advantage": {"drop_constant": True},
}
METHODS: dict[str, tuple[str, Callable[[Path, str, str], dict[str, Any]]]] = {
    "two passes": ("sft", sft_fields),
    "random": ("sft", lambda *given: sft_fields(*given) | {"seed": 3}),
    "one pass": ("sft", sft_fields),
    "targets": ("sft", sft_fields),
    "targets on candidates": ("sft", lambda *given: with_one_completion(sft_fields(*given)) | SAMPLED),
    "candidates": ("sft", lambda *given: with_one_completion(sft_fields(*given)) | SAMPLED),
    "dpo": ("dpo", lambda *given: dpo_fields(*given) | {"engine": EXACT["engine"]}),  # the reference is sampled from
    "rl": ("rl", lambda *arguments: rl_fields(*arguments) | EXACT),
    "rl targets": ("rl", lambda *arguments: rl_fields(*arguments) | EXACT | STREAM | REWARDS),
    "rl stream": ("rl", lambda *arguments: rl_fields(*arguments) | EXACT | STREAM),
    "rl critic": ("rl", lambda *arguments: rl_fields(*arguments) | EXACT | CRITIC),
    "rl critic stream": ("rl", lambda *arguments: rl_fields(*arguments) | EXACT | STREAM | CRITIC),
    "rl refill": ("rl", lambda *arguments: rl_fields(*arguments) | EXACT | REFILLED),
    "rl refill stream": ("rl", lambda *arguments: rl_fields(*arguments) | EXACT | STREAM | REFILLED),
    "rl oversampled": ("rl", lambda *arguments: rl_fields(*arguments) | EXACT | OVERSAMPLED),
    "rl oversampled stream": ("rl", lambda *arguments: rl_fields(*arguments) | EXACT | STREAM | OVERSAMPLED),
    "tokens": ("sft", lambda *given: sft_fields(*given) | TOKENS | RARE),
    "seconds": ("sft", lambda *given: sft_fields(*given) | SECONDS),
    "rl penalized": ("rl", lambda *arguments: rl_fields(*arguments) | EXACT | PENALIZED),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "num_kills"),
    [
        ("two passes", 1),
        pytest.param("two passes", 3, marks=pytest.mark.slow),
        pytest.param("random", 2, marks=pytest.mark.slow),
        pytest.param("one pass", 2, marks=pytest.mark.slow),
        pytest.param("candidates", 2, marks=pytest.mark.slow),
        pytest.param("targets", 2, marks=pytest.mark.slow),
        pytest.param("targets on candidates", 2, marks=pytest.mark.slow),
        pytest.param("dpo", 2, marks=pytest.mark.slow),
        pytest.param("rl", 3, marks=pytest.mark.slow),
        pytest.param("rl stream", 2, marks=pytest.mark.slow),
        pytest.param("rl critic", 3, marks=pytest.mark.slow),
        pytest.param("rl critic stream", 2, marks=pytest.mark.slow),
        pytest.param("rl refill", 2, marks=pytest.mark.slow),
        pytest.param("rl refill stream", 2, marks=pytest.mark.slow),
        pytest.param("rl oversampled", 2, marks=pytest.mark.slow),
        pytest.param("rl oversampled stream", 2, marks=pytest.mark.slow),
        pytest.param("tokens", 2, marks=pytest.mark.slow),
        pytest.param("seconds", 2, marks=pytest.mark.slow),
        pytest.param("rl penalized", 2, marks=pytest.mark.slow),
        pytest.param("rl targets", 2, marks=pytest.mark.slow),
    ],
)
def test_killed_run_equals_uninterrupted_run(
    tmp_path: Path, prefect_server: str, mlflow_uri: str, kind: str, num_kills: int, moments: random.Random
) -> None:
    uninterrupted, killed = run_with_and_without_kills(tmp_path, prefect_server, mlflow_uri, kind, num_kills, moments)
    assert killed.weights == uninterrupted.weights
    assert len(uninterrupted.weights) > 0
    assert killed.curves == uninterrupted.curves
    assert killed.transcripts == uninterrupted.transcripts
    assert killed.lines == uninterrupted.lines
    if kind.startswith("rl refill"):
        assert max(line.get("rollout/discarded", 0) for line in killed.lines) > 0
    if kind != "seconds":
        assert killed.saved_steps == uninterrupted.saved_steps
    assert len(uninterrupted.transcripts) == (NUM_STEPS if kind.startswith("rl") else 0)


@dataclass(frozen=True, slots=True)
class RunOutputs:
    """Final weights, metrics by step except timings, and samples of a run.

    Attributes:
        lines: Lines of metrics.jsonl, without timings.
        saved_steps: Steps of the recorded checkpoints.
    """

    weights: dict[str, bytes]
    curves: dict[str, list[tuple[int, float]]]
    transcripts: dict[str, str]
    lines: list[dict[str, float]]
    saved_steps: list[int]


def run_with_and_without_kills(
    tmp_path: Path, prefect_server: str, mlflow_uri: str, kind: str, num_kills: int, moments: random.Random
) -> tuple[RunOutputs, RunOutputs]:
    """Run once without interruption, and once with this many kills."""
    home = tmp_path / "home"
    config = tmp_path / "config.yaml"
    uninterrupted, killed = (f"{how}-{kind.replace(' ', '-')}-{num_kills}" for how in ("never-killed", "killed"))
    method, fields = METHODS[kind]
    changes = {
        "num_steps": NUM_STEPS,
        "eval_every": 4,
        "objective": OBJECTIVES[kind.split(" ")[0] if kind.startswith("rl") else kind],
    }
    config.write_text(yaml.safe_dump(fields(tmp_path, uninterrupted, mlflow_uri) | changes))
    directory = tmp_path / "runs" / killed
    starts = count()

    def start(run_name: str) -> ForkedProgram:
        log = tmp_path / f"{next(starts)}.log"
        return start_program(
            command(config, run_name, method), environment(home, prefect_server), log, new_session=True
        )

    if "oversampled" not in kind:
        finish(start(uninterrupted))

    for step in sorted(moments.sample(range(-1, NUM_STEPS - 6), num_kills)):
        process = start(killed)
        wait_for_step(killed, process, mlflow_uri, step)
        time.sleep(moments.uniform(0, 0.3))  # a random moment between two logged steps
        assert process.poll() is None, process.output()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
    checkpoints = directory / "checkpoints.jsonl"
    has_checkpoint = checkpoints.exists() and checkpoints.read_text().endswith("\n")
    output = finish(start(killed))

    if "oversampled" in kind:  # which groups finish first depends on time: repeat those of the killed run
        (tmp_path / "runs" / uninterrupted).mkdir()
        name = "oversampled.jsonl"
        shutil.copy(directory / name, tmp_path / "runs" / uninterrupted / name)
        finish(start(uninterrupted))
    whole = final_weights(tmp_path / "runs" / uninterrupted, home)

    # A run that is killed before its first checkpoint starts again at step 0.
    assert ("Resumed" in output) == has_checkpoint, output
    (uninterrupted_run,) = find_run(uninterrupted, mlflow_uri)
    (run,) = find_run(killed, mlflow_uri)  # a single run in spite of the kills
    assert run.data.params["learning_rate"] == uninterrupted_run.data.params["learning_rate"]
    client = MlflowClient(mlflow_uri)

    def is_timing(key: str) -> bool:
        return key.startswith(("time/", "throughput/", "cost/")) or "duration_s" in key

    def lines(name: str) -> list[dict[str, float]]:
        content = (tmp_path / "runs" / name / "metrics.jsonl").read_text()
        rows = [json.loads(line) for line in content.splitlines()]
        assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))  # the last is the final evaluation
        return [{key: value for key, value in row.items() if not is_timing(key)} for row in rows]

    def saved_steps(name: str) -> list[int]:
        records = map(json.loads, (tmp_path / "runs" / name / "checkpoints.jsonl").read_text().splitlines())
        return [record["step"] for record in records if "state_path" in record]

    def curves(of: Run) -> dict[str, list[tuple[int, float]]]:
        keys = [key for key in of.data.metrics if not is_timing(key)]
        points = {key: client.get_metric_history(of.info.run_id, key) for key in keys}
        return {key: sorted((point.step, point.value) for point in history) for key, history in points.items()}

    def transcripts(name: str) -> dict[str, str]:
        return {path.name: path.read_text() for path in (tmp_path / "runs" / name).glob("transcripts-*.html")}

    return (
        RunOutputs(
            whole,
            curves(uninterrupted_run),
            transcripts(uninterrupted),
            lines(uninterrupted),
            saved_steps(uninterrupted),
        ),
        RunOutputs(
            final_weights(directory, home), curves(run), transcripts(killed), lines(killed), saved_steps(killed)
        ),
    )


def flow_run_of(run_name: str) -> FlowRun:
    with get_client(sync_client=True) as client:
        return next(run for run in client.read_flow_runs() if run.name == run_name)


@pytest.mark.parametrize("how", ["Ctrl-C", pytest.param("the UI", marks=pytest.mark.slow)])
def test_stop_saves_the_current_step_and_leaves_no_processes(
    tmp_path: Path, prefect_server: str, mlflow_uri: str, how: str
) -> None:
    home = tmp_path / "home"
    config = tmp_path / "sft.yaml"
    # No checkpoint is due, and without regularizers each step is sent while the previous one is computed.
    objective = {} if how == "Ctrl-C" else {"regularizers": [{"name": "confidence"}]}
    rare = {"num_steps": 999, "num_epochs": 99, "checkpoint_every": 500, "eval_every": 0, "objective": objective}
    run_name = f"stopped-{how[-2:]}"
    config.write_text(yaml.safe_dump(sft_fields(tmp_path, run_name, mlflow_uri) | rare))
    process = subprocess.Popen(
        [sys.executable, *command(config, run_name)],
        env=environment(home, prefect_server),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    wait_for_step(run_name, process, mlflow_uri, 2)
    if how == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    else:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run_of(run_name).id, Cancelling())
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output.decode()
    assert output.decode().count("tinker-flows resume") == 1
    assert "Traceback" not in output.decode()
    assert f"Stopped. `tinker-flows resume {run_name} --storage {tmp_path / 'runs'}` resumes after " in output.decode()
    (run,) = find_run(run_name, mlflow_uri)
    assert run.info.status == "KILLED"
    (record,) = (tmp_path / "runs" / run_name / "checkpoints.jsonl").read_text().splitlines()
    assert json.loads(record)["step"] == last_step(run_name, mlflow_uri) + 1
    if how == "the UI":
        state = flow_run_of(run_name).state
        assert state is not None
        assert state.is_cancelled()
    engines = subprocess.run(["pgrep", "-f", f"engine.*--state {home}"], capture_output=True, text=True, check=False)
    assert engines.stdout == ""
