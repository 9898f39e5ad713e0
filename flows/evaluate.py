"""Evaluation of weights that are there: of a run's checkpoint, a path or the base model, with a baseline and a gate.

python -m flows.evaluate --config examples/evaluate.yaml checkpoint=RUN@best
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import tinker
from prefect import flow
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import Field, ValidationInfo, field_validator
from rich.console import Console
from rich.table import Table
from tinker_cookbook.eval.evaluators import Evaluator
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError
from flows.blocks_of import service_of, storage_of
from flows.command_line import main
from flows.config import BuilderConfig, NamedConfig, TrackedConfig
from flows.measured import open_measurement
from flows.named_checkpoint import (
    CHECKPOINT,
    WHAT,
    NamedCheckpoint,
    WeightsConfig,
    find_checkpoint,
    with_model,
)
from flows.promote_if import PromoteIf, check_measured, check_promote_if
from flows.refused import note_refusal
from tasks.data import build_dataset
from tasks.evaluate import HeldOutNLL, build_evaluator, evaluate_sampler
from tasks.evaluate import evaluate as evaluate_trainer
from tasks.metrics import MetricsLog
from tasks.promote import Promoted, promote
from tasks.result_table import write_table
from tasks.service_errors import service_errors
from tasks.weights import open_sampler, open_trainer


class EvaluateConfig(WeightsConfig, TrackedConfig, NamedConfig):
    """An evaluation of weights that are there."""

    checkpoint: str = Field(title="Checkpoint", description=WHAT, pattern=CHECKPOINT)
    baseline: str | None = Field(
        default=None, title="Baseline", description=f"Evaluated too, and compared with: {WHAT}", pattern=CHECKPOINT
    )
    data: BuilderConfig | None = Field(
        default=None,
        title="Data",
        description="A tinker-cookbook SupervisedDatasetBuilder and its parameters: its held-out data gives `test/nll` "
        "and `test/bits_per_byte`.",
    )
    evaluators: tuple[BuilderConfig, ...] = Field(
        default=(), title="Evaluators", description="tinker-cookbook evaluators, as in a training run."
    )
    register_as: str | None = Field(
        default=None,
        min_length=1,
        title="Register as",
        description="Model of MLflow's registry that the checkpoint becomes a version of.",
    )
    promote_if: str | None = Field(
        default=None,
        title="Promote if",
        description="What the checkpoint has to fulfil for it: a metric, one of < <= > >=, and a number or `baseline`, "
        "which may be multiplied: that metric of the baseline.",
        examples=["test/nll < 0.98 * baseline"],
    )

    @field_validator("promote_if")
    @classmethod
    def _check_promote_if(cls, value: str | None, info: ValidationInfo) -> str | None:
        if check_promote_if(value) and PromoteIf.parse(value or "").of_baseline and not info.data.get("baseline"):
            raise ValueError("set baseline too, to what the checkpoint is compared with")
        return value


@dataclass(frozen=True, slots=True)
class EvaluateResult:
    """What an evaluation found.

    Attributes:
        metrics: of the checkpoint.
        baseline: of the baseline; empty where there is none.
        not_promoted: why the checkpoint does not fulfil `promote_if`; empty where it does, or nobody asked.
        version: of the registered model; empty where it was not registered.
    """

    run_name: str
    metrics: dict[str, float]
    baseline: dict[str, float]
    not_promoted: str
    version: str
    flow_run_id: str
    tracking_uri: str
    mlflow_run_id: str


@flow(name="evaluate", flow_run_name="{config.run_name}")
def evaluate(config: EvaluateConfig) -> EvaluateResult:
    """Evaluate weights, beside a baseline where one is named, and register them where they are good enough."""
    storage = storage_of(config)
    chosen = find_checkpoint(config.checkpoint, storage)
    baseline = find_checkpoint(config.baseline, storage) if config.baseline else None
    if config.register_as and not chosen.path:
        raise ConfigError("register_as has nothing to register: checkpoint is the base model; name a checkpoint.")
    if not (config.data or config.evaluators):
        raise ConfigError("There is nothing to evaluate with: give data, evaluators or both.")
    config = with_model(config, chosen, *([baseline] if baseline else []))
    evaluators = [build_evaluator(each.builder, each.params) for each in config.evaluators]
    with service_of(config) as service:
        service.check_model(config.model)
        tags = {"tinker.checkpoint": chosen.path or config.model, "tinker.base_model": config.model}
        with open_measurement(config, config.run_name, service.resolved_url, tags) as log, service.session() as session:
            before = _measure(session, config, baseline, evaluators) if baseline else {}
            metrics = _measure(session, config, chosen, evaluators)
            check_measured(config.promote_if, metrics)
            log.log(chosen.step, metrics | {f"baseline/{key}": value for key, value in before.items()})
            log.flush()
            refused = _refusal(config, metrics, before)
            if refused:
                note_refusal(log, config.run_name, config.register_as or "", refused)
            version = "" if refused or not config.register_as else _register(session, config, chosen, log)
            columns = ("metric", config.checkpoint, *([config.baseline] if config.baseline else []))
            write_table(log, "evaluation", config.run_name, columns, _rows(metrics, before))
        result = EvaluateResult(
            run_name=config.run_name,
            metrics=metrics,
            baseline=before,
            not_promoted=refused,
            version=version,
            flow_run_id=flow_run.get_id() or "",
            tracking_uri=log.client.tracking_uri,
            mlflow_run_id=log.run_id,
        )
    if not refused:
        return result
    return cast(EvaluateResult, Completed(name="NotPromoted", message=refused, data=result))


def show_evaluation(result: EvaluateResult) -> None:
    """Print what was measured, and what became of it."""
    table = Table(title=result.run_name)
    table.add_column("metric")
    for column in ["checkpoint", "baseline"] if result.baseline else ["checkpoint"]:
        table.add_column(column, justify="right")
    for name, *values in _rows(result.metrics, result.baseline):
        table.add_row(name, *("" if value is None else f"{value:.6g}" for value in values))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    if result.not_promoted or result.version:
        console.print(result.not_promoted or f"Registered as version {result.version}.")
    console.print(f"MLflow run   {result.mlflow_run_id} at {result.tracking_uri}")


def _measure(
    session: tinker.ServiceClient, config: EvaluateConfig, checkpoint: NamedCheckpoint, evaluators: Sequence[Evaluator]
) -> dict[str, float]:
    # Submitted, because an async task called by a synchronous flow is never run.
    trainer = open_trainer(session, checkpoint.path, config.model)
    if trainer:
        every = [*_held_out(config, trainer.get_tokenizer()), *evaluators]
        return cast("dict[str, float]", evaluate_trainer.submit(trainer, every, checkpoint.step).result())
    sampler, tokenizer = open_sampler(session, checkpoint.path, config.model)
    every = [*_held_out(config, tokenizer), *evaluators]
    return cast("dict[str, float]", evaluate_sampler.submit(sampler, every).result())


def _held_out(config: EvaluateConfig, tokenizer: Tokenizer) -> list[Evaluator]:
    if config.data is None:
        return []
    source = build_dataset(config.data.builder, config.data.params, tokenizer, seed=0)
    if source.test is None:
        raise ConfigError(
            f"The data source {config.data.builder} has no held-out data: give it some, or leave out data."
        )
    return [HeldOutNLL(source.test, source.tokenizer)]


def _refusal(config: EvaluateConfig, metrics: Mapping[str, float], baseline: Mapping[str, float]) -> str:
    if not config.promote_if:
        return ""
    gate = PromoteIf.parse(config.promote_if)
    refusal = gate.refusal(metrics.get(gate.metric), baseline.get(gate.metric))
    return f"{config.checkpoint} is not promoted: {refusal}." if refusal else ""


def _register(
    session: tinker.ServiceClient, config: EvaluateConfig, checkpoint: NamedCheckpoint, log: MetricsLog
) -> str:
    lineage = {"tinker_flows.run_name": checkpoint.run_name, "tinker.base_model": config.model}
    at = config.checkpoint.rpartition("@")[2]
    alias = at if at in ("best", "final") else "promoted"

    def save_for_sampling() -> str:
        trainer = open_trainer(session, checkpoint.path, config.model)
        if trainer is None:
            return checkpoint.path
        with service_errors(f"save {checkpoint.path} for sampling"):
            return trainer.save_weights_for_sampler(alias).result().path

    assert config.register_as
    return promote(
        log, config.register_as, Promoted(alias, checkpoint.step, checkpoint.path, lineage), save_for_sampling
    )


def _rows(metrics: Mapping[str, float], baseline: Mapping[str, float]) -> list[tuple[str, *tuple[float | None, ...]]]:
    return [
        (key, metrics.get(key), *([baseline.get(key)] if baseline else [])) for key in sorted({*metrics, *baseline})
    ]


if __name__ == "__main__":
    main(evaluate, EvaluateConfig, show=show_evaluation)
