"""Evaluate a checkpoint or the base model, compare it with a baseline, and register it if it meets a condition.

python -m flows.evaluate --config examples/evaluate.yaml checkpoint=RUN@best
"""

if __name__ == "__main__":  # first, so that --help does not wait for the imports below
    from flows.runs.cli import main

    main("flows.evaluate:evaluate", "flows.evaluate:EvaluateConfig", __doc__, show="flows.evaluate:show_evaluation")

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Self, cast

import tinker
from prefect import flow
from prefect.runtime import flow_run
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationInfo, field_validator, model_validator
from rich.table import Table
from tinker_cookbook.eval.evaluators import Evaluator
from tinker_cookbook.tokenizer_utils import Tokenizer, register_tokenizer

from blocks.errors import ConfigError
from blocks.terminal import TextConsole, print_notice
from blocks.urls import hide_credentials
from flows.config.base import (
    CHECKPOINT,
    CHECKPOINT_HELP,
    BuilderConfig,
    EvaluatorConfig,
    NamedConfig,
    TrackedConfig,
    WeightsConfig,
)
from flows.config.promotion import (
    PromoteIf,
    check_approval,
    check_confidence,
    check_measured,
    check_model_name,
    check_promote_if,
)
from flows.config.train import BudgetConfig
from flows.monitoring.events import emit
from flows.monitoring.run_tags import (
    APPROVAL_TAG,
    forget_rejection,
    note_end,
    note_evaluation,
    note_pending_approval,
    note_rejection,
)
from flows.runs.blocks import open_service, storage_of
from flows.runs.checkpoints.approval import Answer, Question, ask
from flows.runs.checkpoints.checkpoint_refs import NamedCheckpoint, find_checkpoint, find_steps, with_model
from flows.runs.checkpoints.promotion import Measurement, check_scores, find_rejection
from flows.runs.result import as_state
from flows.runs.rights import apply_rights
from flows.runs.run import open_builder_arguments
from flows.runs.tracking.mlflow_run import open_measurement
from flows.training.budget import EvaluationLedger
from tasks.common.digests import digest_text
from tasks.common.sampling import open_sampler, open_training_client
from tasks.common.service_errors import service_errors
from tasks.evaluation.evaluators import (
    ConfiguredEvaluator,
    EvaluationResult,
    HeldOutNLL,
    build_evaluators,
    evaluate_sampler,
)
from tasks.evaluation.evaluators import evaluate as evaluate_trainer
from tasks.evaluation.intervals import compare_scores
from tasks.reports.evaluation_page import write_curves
from tasks.reports.html import markdown_table
from tasks.reports.summary import describe_cost
from tasks.reports.tables import write_table
from tasks.supervised.dataset import build_dataset
from tasks.training.batch_source import SampledTokens
from tasks.training.held_out import BatchValues
from tasks.training.reference import scored_tokens
from tasks.training.token_meter import TokenMeter
from tasks.training.tracking.metrics import MetricsLog
from tasks.training.tracking.model_registry import Promotion, promote_from

# Artifact of the MLflow run: the result of a flow run that waits for a person.
UNAPPROVED = "unapproved_result.json"


class EvaluateConfig(WeightsConfig, TrackedConfig, NamedConfig):
    """Evaluation of a checkpoint or the base model."""

    checkpoint: str = Field(title="Checkpoint", description=CHECKPOINT_HELP, pattern=CHECKPOINT)
    steps: Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)] = Field(
        default="",
        title="Steps",
        description="Further checkpoints of the same run to evaluate: steps such as `10,20`, or `all`, which leaves "
        "out the origin of a fork or of initial weights. Their metrics are logged at their steps and drawn as charts "
        "over steps.",
        pattern=r"^(all|\d+(, ?\d+)*)?$",
    )
    baseline: str | None = Field(
        default=None,
        title="Baseline",
        description=f"Weights to compare with: {CHECKPOINT_HELP}",
        pattern=CHECKPOINT,
    )
    data: BuilderConfig | None = Field(
        default=None,
        title="Data",
        description="`SupervisedDatasetBuilder` of tinker-cookbook and its parameters. Its held-out data gives "
        "`test/nll`, `test/nll_per_token` and `test/bits_per_byte`.",
    )
    evaluators: tuple[EvaluatorConfig, ...] = Field(
        default=(), title="Evaluators", description="Evaluators, as in a training run."
    )
    budget: BudgetConfig = Field(
        default=BudgetConfig(),
        title="Budget",
        description="Time and cost limits of one start. The evaluation stops before the evaluator that would exceed a "
        "limit, and keeps what it has measured.",
    )
    register_as: str | None = Field(
        default=None,
        min_length=1,
        title="Register as",
        description="Name of the registered model in MLflow that gets the checkpoint as a new version.",
    )
    promote_if: str | None = Field(
        default=None,
        title="Promote if",
        description="Condition for registering the checkpoint: a metric, one of < <= > >=, and a number or `[NUMBER "
        "*] baseline`. `baseline` is the same metric of the checkpoint in the field `baseline`.",
        examples=["test/nll < 0.98 * baseline"],
    )
    promote_confidence: float | None = Field(
        default=None,
        ge=0.5,
        le=0.999,
        title="Promote with confidence",
        description="Confidence with which the checkpoint must be better than the baseline on the same problems. At "
        "0.95, a checkpoint that is only as good as the baseline is registered in at most 5 % of cases. This "
        "does not hold for a checkpoint that was chosen on the same problems, as by `keep_best`. Only for the "
        "three metrics of held-out data and those of evaluators that grade answers. Unset: compare the two values and "
        "ignore their uncertainty.",
    )
    needs_approval: bool = Field(
        default=False,
        title="Needs approval",
        description="Ask a person before the checkpoint is registered, once `promote_if` holds. An evaluation of a "
        "deployment is suspended until someone submits the form in the Prefect UI; one from a terminal asks in the "
        "terminal.",
    )

    @field_validator("register_as")
    @classmethod
    def _check_register_as(cls, value: str | None) -> str | None:
        return check_model_name(value)

    @field_validator("promote_if")
    @classmethod
    def _check_promote_if(cls, value: str | None, info: ValidationInfo) -> str | None:
        if check_promote_if(value) and PromoteIf.parse(value or "").of_baseline and not info.data.get("baseline"):
            raise ValueError("it needs a baseline: set baseline to the weights to compare with")
        return value

    @model_validator(mode="after")
    def _check_confidence(self) -> Self:
        check_confidence(self.promote_if, self.promote_confidence)
        return self

    @field_validator("needs_approval")
    @classmethod
    def _check_needs_approval(cls, value: bool, info: ValidationInfo) -> bool:
        return check_approval(value, info.data.get("register_as"))


@dataclass(frozen=True, slots=True)
class EvaluateResult:
    """Result of an evaluation.

    Attributes:
        metrics: Metrics of the checkpoint.
        cost: Tokens of the whole evaluation and, with a known price, dollars, by the names of a training run's metrics.
        by_step: Metrics of the other checkpoints of the run, by step.
        baseline: Metrics of the baseline; empty without one.
        differences: Differences between checkpoint and baseline, with intervals, for metrics that have a score for each
            problem.
        stopped: Sentence that says where and why the budget stopped the evaluation; empty if it did not.
        not_promoted: Reason why `promote_if` or a person prevented registration; empty if neither did.
        condition: Condition in `promote_if` with the values that met it; empty without one, or if it does not hold.
        version: Version of the registered model; empty if the checkpoint was not registered.
    """

    run_name: str
    metrics: dict[str, float]
    cost: dict[str, float]
    by_step: dict[int, dict[str, float]]
    baseline: dict[str, float]
    differences: dict[str, float]
    stopped: str
    not_promoted: str
    condition: str
    version: str
    flow_run_id: str
    tracking_uri: str
    mlflow_run_id: str


@flow(name="evaluate", flow_run_name="{config.run_name}", on_running=[apply_rights])
def evaluate(config: EvaluateConfig) -> EvaluateResult:
    """Evaluate weights, optionally alongside a baseline, and register them if they meet the condition."""
    checkpoint, others, baseline = find_weights(config)
    if config.register_as and not checkpoint.path:
        raise ConfigError("register_as needs a checkpoint, but checkpoint is the base model: set checkpoint to a run.")
    config = with_model(config, checkpoint, *([baseline] if baseline else []))
    with open_service(config) as service:
        service.check_model(config.model)
        tags = {"tinker.checkpoint": checkpoint.path or config.model, "tinker.base_model": config.model}
        open_log = partial(open_measurement, config, config.run_name, service.resolved_url, tags)
        with open_log() as log, service.session() as session:
            subject = [weights.path for weights in (checkpoint, baseline) if weights]
            result = _read_unapproved(log, subject) or _evaluate(session, config, checkpoint, others, baseline, log)
            waits = config.needs_approval and not result.not_promoted
            if waits:
                _store_unapproved(log, subject, result)
                note_pending_approval(log, _waiting(config))
            elif config.register_as and not result.not_promoted:
                result = replace(result, version=_register(session, config, checkpoint, log))
        if waits:  # outside of the block above, because the MLflow run must end before the flow run is suspended
            answer = ask(_question(config, subject, result))
            if answer is None:
                result = replace(result, not_promoted=_waiting(config))
            else:
                with open_log() as log, service.session() as session:
                    result = _conclude(session, config, checkpoint, log, result, answer)
    return as_state(result)


def _evaluate(
    session: tinker.ServiceClient,
    config: EvaluateConfig,
    checkpoint: NamedCheckpoint,
    others: Sequence[NamedCheckpoint],
    baseline: NamedCheckpoint | None,
    log: MetricsLog,
) -> EvaluateResult:
    """Measure all weights, log the metrics and write the tables; the result has no version yet."""
    meter = TokenMeter()
    resources = {"session": session, "base_model": config.model, "token_meter": meter}
    ledger = EvaluationLedger(log, meter, config)
    evaluators = build_evaluators(config.evaluators, resources=resources)
    measure = partial(_measure, session, config, evaluators, ledger, meter)
    held_out = HeldOutNLL.scored_metrics if config.data else ()
    check_scores(config.promote_if, config.promote_confidence, evaluators, held_out)
    of_baseline = measure(baseline) if baseline else EvaluationResult()
    note_evaluation(log, of_baseline, "baseline/")
    by_step: dict[int, EvaluationResult] = {}
    for other in others:
        if ledger.stopped:
            break
        by_step[other.step] = measure(other)
        note_evaluation(log, by_step[other.step], f"{other.step}/", other.step)
        log.log(other.step, by_step[other.step].metrics)
    measured = EvaluationResult() if ledger.stopped else measure(checkpoint)
    _note_stop(config, log, checkpoint.step, ledger)
    differences = _differences(measured.scores, of_baseline.scores)
    note_evaluation(log, measured)
    if config.promote_if and not (measured.skipped or ledger.stopped):
        check_measured("promote_if", PromoteIf.parse(config.promote_if).metric, measured.metrics)
    with_prefix = {f"baseline/{key}": value for key, value in of_baseline.metrics.items()}
    cost = ledger.metrics()
    log.log(checkpoint.step, measured.metrics | with_prefix | differences | cost)
    log.flush()
    rejection = _rejection(config, ledger.stopped, measured, of_baseline)
    if rejection:
        note_rejection(log, config.run_name, config.register_as or "", rejection)
    else:
        forget_rejection(log)
    result = EvaluateResult(
        run_name=config.run_name,
        metrics=measured.metrics,
        cost=cost,
        by_step={step: result.metrics for step, result in by_step.items()},
        baseline=of_baseline.metrics,
        differences=differences,
        stopped=ledger.stopped,
        not_promoted=rejection,
        condition="" if rejection else _met_condition(config, measured, of_baseline),
        version="",
        flow_run_id=flow_run.get_id() or "",
        tracking_uri=hide_credentials(log.client.tracking_uri),
        mlflow_run_id=log.run_id,
    )
    write_table(log, "evaluation", config.run_name, *_table(config, result), ledger.stopped)
    if by_step:
        if measured.metrics:
            by_step[checkpoint.step] = measured
        scores = {step: result.scores for step, result in by_step.items()}
        curves = {step: result.metrics for step, result in by_step.items()}
        write_curves(log, config.run_name, curves, scores, of_baseline.metrics, ledger.stopped)
    return result


def find_weights(config: EvaluateConfig) -> tuple[NamedCheckpoint, list[NamedCheckpoint], NamedCheckpoint | None]:
    """Look up the checkpoint, the checkpoints at further steps, and the baseline; the baseline may be None.

    Raises:
        ConfigError: A checkpoint does not exist, or there is nothing to measure.
    """
    if not (config.data or config.evaluators):
        raise ConfigError("The evaluation has no data and no evaluators: set data, evaluators or both.")
    storage = storage_of(config)
    checkpoint = find_checkpoint(config.checkpoint, storage)
    baseline = find_checkpoint(config.baseline, storage) if config.baseline else None
    return checkpoint, find_steps(checkpoint, config.steps, storage), baseline


def show_evaluation(result: EvaluateResult) -> None:
    """Print the metrics, their differences from the baseline, and the outcome of the registration."""
    table = Table(title=result.run_name)
    table.add_column("metric", overflow="fold")
    columns = _columns(result.by_step, "checkpoint", "baseline" if result.baseline else None)
    for column in (*columns, *(["difference", "p-value"] if result.differences else [])):
        table.add_column(column, justify="right")
    baseline = [result.baseline] if result.baseline else []
    for name, *values in _rows(*result.by_step.values(), result.metrics, *baseline):
        cells = ["" if value is None else f"{value:.6g}" for value in values]
        table.add_row(name, *cells, *(_difference_cells(result.differences, name) if result.differences else []))
    console = TextConsole()
    console.print(table)
    if result.differences:
        console.print("difference: checkpoint minus baseline on the same problems, with its 95 % interval")
    if result.stopped:
        console.print(result.stopped)
    because = f", because {result.condition}" if result.condition else ""
    if result.not_promoted or result.version:
        console.print(result.not_promoted or f"Registered as version {result.version}{because}.")
    console.print(f"cost         {describe_cost(result.cost)}")
    console.print(f"MLflow run   {result.mlflow_run_id} at {result.tracking_uri}")


def _measure(
    session: tinker.ServiceClient,
    config: EvaluateConfig,
    evaluators: Sequence[ConfiguredEvaluator],
    ledger: EvaluationLedger,
    meter: TokenMeter,
    checkpoint: NamedCheckpoint,
) -> EvaluationResult:
    """Evaluate a checkpoint within the budget; the ledger counts all tokens, including those of judges."""
    trainer = open_training_client(session, checkpoint.path, config.model)  # None for sampler weights
    if trainer:
        sampler, tokenizer = None, trainer.get_tokenizer()
    else:
        sampler, tokenizer = open_sampler(session, checkpoint.path, config.model)
        meter.watch(sampler, config.model)
    with open_held_out(config, session, tokenizer, meter) as held_out:
        due = [*held_out, *evaluators]

        def begin(entry: Evaluator | ConfiguredEvaluator) -> bool:
            name = f"the evaluator {entry.name}" if isinstance(entry, ConfiguredEvaluator) else "the held-out data"
            part = f"{name} ({due.index(entry) + 1} of {len(due)})"
            print_notice(f"{config.run_name}: measuring {checkpoint.name} with {part}")
            if isinstance(entry, ConfiguredEvaluator):
                return ledger.begin(name, checkpoint.name, 0, SampledTokens())
            assert isinstance(entry, HeldOutNLL)
            num_train_tokens = entry.num_tokens if trainer else 0
            scored = SampledTokens() if trainer else scored_tokens(entry.num_tokens, entry.num_datums)
            return ledger.begin(name, checkpoint.name, num_train_tokens, scored)

        # Submitted: a synchronous flow cannot call an async task directly.
        if trainer:
            submitted = evaluate_trainer.submit(trainer, due, checkpoint.step, meter, begin)
        else:
            assert sampler is not None
            submitted = evaluate_sampler.submit(sampler, due, begin)
        result = cast(EvaluationResult, submitted.result())
    ledger.end()
    return result


@contextmanager
def open_held_out(
    config: EvaluateConfig, session: tinker.ServiceClient, tokenizer: Tokenizer, meter: TokenMeter | None = None
) -> Iterator[Sequence[HeldOutNLL]]:
    """Open the held-out data of the config; yield an empty list if the config has no `data`.

    Args:
        meter: counts the tokens that the builder of the data samples; None if nobody is charged for them.

    Raises:
        ConfigError: `data` has no held-out data.
    """
    # Builders and evaluators open the tokenizer by the service's name of the model.
    register_tokenizer(config.model, lambda: tokenizer)
    data = config.data
    if data is None:
        yield []
        return
    with open_builder_arguments(config, config.run_name, session, "data", data, meter) as arguments:
        source = build_dataset(data.builder, data.params, tokenizer, seed=0, resources=arguments)
        if source.test is None:
            raise ConfigError(
                f"The data source {data.builder} has no held-out data: add held-out data, or remove `data`."
            )
        yield [HeldOutNLL(source.test, source.tokenizer)]


def _note_stop(config: EvaluateConfig, log: MetricsLog, step: int, ledger: EvaluationLedger) -> None:
    """Tag the run, and emit an event, if the budget has stopped the evaluation of the checkpoint of a step."""
    if ledger.stopped:
        note_end(log, ledger.stopped)
        emit("budget", config.run_name, {"step": step, **ledger.state(), "message": ledger.stopped})


def _differences(scores: Mapping[str, BatchValues], baseline: Mapping[str, BatchValues]) -> dict[str, float]:
    """Return the differences to the baseline of all metrics that have a score for each problem."""
    metrics: dict[str, float] = {}
    for name in sorted(scores.keys() & baseline.keys()):
        difference = scores[name].minus(baseline[name])
        metrics |= compare_scores(difference.weighted_S, difference.mean()[1]).metrics(name)
    return metrics


def _rejection(config: EvaluateConfig, stopped: str, measured: EvaluationResult, baseline: EvaluationResult) -> str:
    """Return the reason not to promote the checkpoint, as a sentence; empty if there is none."""
    if stopped and (config.promote_if or config.register_as):
        return f"{config.checkpoint} is not promoted: the budget stopped its evaluation."
    metric = PromoteIf.parse(config.promote_if).metric if config.promote_if else ""
    checkpoint, other = (
        Measurement(result.metrics.get(metric), result.scores.get(metric)) for result in (measured, baseline)
    )
    rejection = find_rejection(config.promote_if, config.promote_confidence, checkpoint, other)
    return f"{config.checkpoint} is not promoted: {rejection}." if rejection else ""


def _met_condition(config: EvaluateConfig, measured: EvaluationResult, baseline: EvaluationResult) -> str:
    """Return the condition in `promote_if`, which holds, with its values; empty without one."""
    if not config.promote_if:
        return ""
    gate = PromoteIf.parse(config.promote_if)
    return gate.describe(measured.metrics[gate.metric], baseline.metrics.get(gate.metric))


def _register(
    session: tinker.ServiceClient, config: EvaluateConfig, checkpoint: NamedCheckpoint, log: MetricsLog
) -> str:
    """Register the checkpoint as a version of `register_as`; return the version."""
    lineage = {"tinker_flows.run_name": checkpoint.run_name, "tinker.base_model": config.model}
    alias = _alias_of(config.checkpoint)

    def save_for_sampling() -> str:
        trainer = open_training_client(session, checkpoint.path, config.model)
        if trainer is None:
            return checkpoint.path
        with service_errors(f"save {checkpoint.path} for sampling"):
            return trainer.save_weights_for_sampler(alias).result().path

    assert config.register_as
    promoted = Promotion(alias, checkpoint.step, checkpoint.path, lineage)
    return promote_from(checkpoint.key, log, config.register_as, promoted, save_for_sampling)


def _alias_of(checkpoint: str) -> str:
    """Return the alias of the version that a checkpoint is registered as.

    >>> _alias_of("mine@best"), _alias_of("mine@10"), _alias_of("best")
    ('best', 'promoted', 'promoted')
    """
    at = checkpoint.partition("@")[2]
    return at if at in ("best", "final") else "promoted"


def _read_unapproved(log: MetricsLog, subject: Sequence[str]) -> EvaluateResult | None:
    """Return the result that this flow run stored before it was suspended; None if it stored none for these weights."""
    if UNAPPROVED not in [file.path for file in log.client.list_artifacts(log.run_id)]:
        return None
    with TemporaryDirectory() as folder:
        path = log.client.download_artifacts(log.run_id, UNAPPROVED, folder)
        stored = json.loads(Path(path).read_text())
    # A name such as RUN@best may mean another checkpoint by now.
    return TypeAdapter(EvaluateResult).validate_python(stored["result"]) if stored["subject"] == subject else None


def _store_unapproved(log: MetricsLog, subject: Sequence[str], result: EvaluateResult) -> None:
    """Store the result, so that the flow run need not evaluate again after it was suspended."""
    log.client.log_text(log.run_id, json.dumps({"subject": subject, "result": asdict(result)}), UNAPPROVED)


def _waiting(config: EvaluateConfig) -> str:
    return (
        f"{config.checkpoint} is not promoted, because it waits for approval: submit the form of the suspended run "
        "in the Prefect UI, or run this evaluation again in a terminal."
    )


def _question(config: EvaluateConfig, subject: Sequence[str], result: EvaluateResult) -> Question:
    question = f"Register {config.checkpoint} as a version of {config.register_as}?"
    columns, rows = _table(config, result)
    cells = [[name, *("" if value is None else f"{value:.6g}" for value in values)] for name, *values in rows]
    lines = [
        f"{name}: " + ", ".join(f"{column} {value}" for column, value in zip(columns[1:], values, strict=True) if value)
        for name, *values in cells
    ]
    key = f"approval-{digest_text(repr(subject))}"
    return Question(key, question, markdown_table(columns, cells), lines)


def _conclude(
    session: tinker.ServiceClient,
    config: EvaluateConfig,
    checkpoint: NamedCheckpoint,
    log: MetricsLog,
    result: EvaluateResult,
    answer: Answer,
) -> EvaluateResult:
    """Register the checkpoint if a person has approved it; otherwise report the refusal."""
    log.tag(APPROVAL_TAG, answer.describe())
    if answer.decision == "approve":
        version = _register(session, config, checkpoint, log)
        forget_rejection(log)
        return replace(result, version=version)
    refusal = f"{config.checkpoint} is not promoted: {answer.describe_refusal()}."
    note_rejection(log, config.run_name, config.register_as or "", refusal)
    return replace(result, not_promoted=refusal)


def _table(
    config: EvaluateConfig, result: EvaluateResult
) -> tuple[list[str], list[tuple[str, *tuple[float | None, ...]]]]:
    """Return the columns and rows of the table of all metrics."""
    columns = ["metric", *_columns(result.by_step, config.checkpoint, config.baseline)]
    baseline = [result.baseline] if config.baseline else []
    return columns, _rows(*result.by_step.values(), result.metrics | result.differences, *baseline)


def _difference_cells(differences: Mapping[str, float], metric: str) -> tuple[str, str]:
    """Return the difference of a metric with its interval, and the p-value; empty texts if it has none."""
    key = f"difference/{metric}"
    # Not by `key`, which for the upper bound of a metric names the upper bound of the metric's difference.
    if f"{key}_p_value" not in differences:
        return "", ""
    interval = ""
    if f"{key}_low" in differences:
        interval = f" ({differences[f'{key}_low']:.3g} to {differences[f'{key}_high']:.3g})"
    return f"{differences[key]:+.3g}{interval}", f"{differences[f'{key}_p_value']:.3g}"


def _columns(steps: Iterable[int], checkpoint: str, baseline: str | None) -> list[str]:
    return [*(f"step {step}" for step in steps), checkpoint, *([baseline] if baseline else [])]


def _rows(*columns: Mapping[str, float]) -> list[tuple[str, *tuple[float | None, ...]]]:
    keys = sorted({key for metrics in columns for key in metrics})
    return [(key, *(metrics.get(key) for metrics in columns)) for key in keys]
