"""Targets of several kinds of terms: the mean over the last quarter of a run, compared with the limit.

Each run uses the default gains and has two targets. The active target would be missed without control; a run with the
term at weight 0 shows this. The inactive target is met anyway: its multiplier starts above its lower bound and should
fall to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from rich.table import Table
from tqdm import tqdm

from benchmarks.scratch import KEY, bench_engine, environment, scratch_home, scratch_prefect_server
from blocks.files.local import home
from engine.models import resolve_model
from flows.config.train import TrainConfig
from objectives.config.spec import RegularizerSpec
from tasks.reports.tables import TargetRow, target_rows
from tinker_flows import DpoConfig, RlConfig, SftConfig, dpo, rl, run, sft

DATA = Path(__file__).parent.parent / "examples" / "data"
FLOWS = {"sft": (sft, SftConfig), "dpo": (dpo, DpoConfig), "rl": (rl, RlConfig)}
BASE_LOSSES = {"sft": "cross_entropy", "dpo": "dpo", "rl": "importance_sampling"}
INACTIVE_START = 0.05  # initial multiplier of the inactive target


def _conversations(path: Path, renderer: str, batch_size: int) -> dict[str, Any]:
    common = {"renderer_name": renderer, "max_length": 192, "batch_size": batch_size}
    params = {"file_path": str(path), "test_size": 8, "common_config": common}
    return {"builder": "tinker_cookbook.supervised.data:FromConversationFileBuilder", "params": params}


SFT = {"learning_rate": 3e-3, "num_epochs": 99, "data": _conversations(DATA / "sums.jsonl", "role_colon", 4)}
RL = {
    "learning_rate": 1.5e-3,
    "lr_schedule": "constant",
    "transcripts_every": 0,
    "rollout": {"max_tokens": 8},
    "environment": {
        "builder": "examples.letters:LettersBuilder",
        "params": {"renderer_name": "role_colon", "letters": "ae", "group_size": 8},
    },
}
DPO = {
    "learning_rate": 3e-3,
    "num_epochs": 99,
    "renderer_name": "role_colon",
    "batch_size": 4,
    "comparisons": {
        "builder": "tinker_cookbook.preference.preference_datasets:ComparisonBuilderFromJsonl",
        "params": {"train_path": str(DATA / "preferences_train.jsonl")},
    },
}
SMOL = {"learning_rate": 5e-4, "num_epochs": 99, "data": _conversations(DATA / "sums.jsonl", "qwen3_instruct", 4)}


@dataclass(frozen=True, slots=True)
class Case:
    """Training with an active and an inactive target.

    Attributes:
        term: regularizer with the active target.
        fields: fields of the flow's config.
    """

    model: str
    flow: str
    term: Mapping[str, Any]
    fields: Mapping[str, Any]
    num_steps: int
    seeds: Sequence[int]


SEEDS = (0, 1, 2)
REPETITION = {"name": "repetition", "params": {"n": 1}}
ENTROPY = {"name": "negative_entropy", "target": {"metric": "entropy", "at_least": 4.5}}
CASES = (
    Case("tiny", "sft", {"name": "kl", "target": {"at_most": 0.3}}, SFT, 100, SEEDS),
    Case(
        "tiny",
        "sft",
        {**REPETITION, "target": {"at_most": 0.3}},
        {**SFT, "candidates": {"num": 4, "max_tokens": 32}},
        160,
        SEEDS,
    ),
    Case("tiny", "dpo", {"name": "kl", "target": {"at_most": 0.05}}, DPO, 80, SEEDS),
    Case("tiny", "rl", ENTROPY, RL, 120, SEEDS),
    Case("smollm2-135m", "sft", {"name": "kl", "target": {"at_most": 0.2}}, SMOL, 120, (0,)),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Targets of one run.

    Attributes:
        active: result of the active target.
        inactive: last multiplier of the inactive target.
    """

    active: TargetRow
    inactive: float


def measure(*, cases: Sequence[Case] = CASES) -> Table:
    """Return one row per case and seed."""
    columns = (
        "model",
        "flow",
        "target",
        "without the target",
        "with the target",
        "ratio to the limit",
        "multiplier",
        "result",
    )
    table = Table(title="targets: mean over the last quarter of the run", title_justify="left")
    for column in (*columns, "inactive multiplier"):
        table.add_column(column, overflow="fold")
    with scratch_home() as folder, scratch_prefect_server():
        for model in dict.fromkeys(case.model for case in cases):
            with _service(folder, model):
                for case in tqdm([case for case in cases if case.model == model], desc=f"targets, {model}"):
                    _add_rows(table, folder, case)
    return table


@contextmanager
def _service(folder: Path, model: str) -> Iterator[None]:
    path = str(resolve_model(model, home() / "cache"))
    with bench_engine(folder, path) as url, environment(TINKER_BASE_URL=url, TINKER_API_KEY=KEY):
        yield


def _add_rows(table: Table, folder: Path, case: Case) -> None:
    target = RegularizerSpec.model_validate(case.term).target
    assert target is not None
    mean_without = _mean_without_target(folder, case)
    for seed in case.seeds:
        measured = _train_with_targets(folder, case, seed)
        row = measured.active
        table.add_row(
            case.model,
            case.flow,
            f"{row.name}: {target}",
            f"{mean_without:.3g}" if seed == case.seeds[0] else "",
            f"{row.mean:.3g} ± {row.half_width:.2g}",
            f"{row.mean / target.limit:.2f} ± {row.half_width / abs(target.limit):.2f}",
            f"{row.multiplier:.3g}",
            row.result,
            f"{INACTIVE_START:g} to {measured.inactive:g}",
            end_section=seed == case.seeds[-1],
        )


def _mean_without_target(folder: Path, case: Case) -> float:
    """Mean over the last quarter of a run with the term at weight 0, for the first seed."""
    term = {key: value for key, value in case.term.items() if key != "target"} | {"weight": 0.0}
    history = _train(folder, case, [term], case.seeds[0])
    metric = case.term["target"].get("metric", "value")
    values = [value for _, value in history[f"term/{term['name']}/{metric}"]]
    last = values[-max(1, len(values) // 4) :]
    return sum(last) / len(last)


def _train_with_targets(folder: Path, case: Case, seed: int) -> Measured:
    # The mean squared probability stays far below this limit in all cases.
    limit = {"at_most": 0.99, "initial": INACTIVE_START}
    inactive_term = {"name": "l2", "params": {"of": "probabilities"}, "target": limit}
    history = _train(folder, case, [case.term, inactive_term], seed)
    specs = [RegularizerSpec.model_validate(term) for term in (case.term, inactive_term)]
    active, inactive = target_rows(history, {spec.name: spec.target for spec in specs if spec.target})
    return Measured(active, inactive.multiplier)


def _train(
    folder: Path, case: Case, terms: Sequence[Mapping[str, Any]], seed: int
) -> dict[str, list[tuple[int, float]]]:
    """Train once; return the history of the terms' metrics."""
    flow, config_type = FLOWS[case.flow]
    variant = "without" if len(terms) == 1 else "target"
    config: TrainConfig = config_type.model_validate(
        {
            "run_name": f"{case.model}-{case.flow}-{terms[0]['name']}-{variant}-{seed}",
            "model": str(resolve_model(case.model, home() / "cache")),
            "storage": str(folder / "runs"),
            "tracking": f"sqlite:///{folder / 'mlflow.db'}",
            "lora_rank": 8,
            "eval_every": 0,
            "checkpoint_every": 1000,
            "granularity": "segment",
            "num_steps": case.num_steps,
            "seed": seed,
            **case.fields,
            "objective": {"base_loss": BASE_LOSSES[case.flow], "regularizers": terms, "watch": {"effect_every": 0}},
        }
    )
    result = run(flow, config)
    client = MlflowClient(result.tracking_uri)
    history: dict[str, list[tuple[int, float]]] = {}
    for key in client.get_run(result.mlflow_run_id).data.metrics:
        if key.startswith("term/"):
            points = client.get_metric_history(result.mlflow_run_id, key)
            history[key] = sorted((point.step, point.value) for point in points)
    return history
