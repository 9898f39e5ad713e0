"""Plan of a run: the tokens that its steps are expected to take, and what the run says before it trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from mlflow.exceptions import MlflowException
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from blocks.terminal import print_notice
from flows.config.loader import field_values
from flows.config.train import TrainConfig
from flows.runs.pace import Pace, find_pace
from flows.training.budget import Ledger
from flows.training.evaluation import Evaluation
from flows.training.schedule import Schedule
from objectives.batch import Batch
from objectives.config.spec import RegularizerSpec
from objectives.objective import Objective
from objectives.term_weights.targets import TargetSpec
from tasks.reports.summary import format_hours
from tasks.training.batch_source import BatchSource, SampledTokens
from tasks.training.candidates import CandidateSampler
from tasks.training.tracking.metrics import MetricsLog


def num_passes(objective: Objective, step: int, needs_forward_pass: bool) -> int:
    """Return the maximum passes of the service over a batch: 2 if its update may need the logprobs first."""
    return 2 if objective.base is not None or objective.due(step) or needs_forward_pass else 1


def num_pass_tokens(objective: Objective, tokens_by_step: Mapping[int, int], passes_by_step: Mapping[int, int]) -> int:
    """Return the tokens of all passes over the batches of some steps.

    Includes a forward pass for each step whose effects are measured, and one over the last batch, which checks the
    final weights.

    Args:
        tokens_by_step: tokens of the batch of each step that is not skipped.
        passes_by_step: passes of the update of each of these steps.
    """
    in_passes = sum(
        num_tokens * (passes_by_step[step] + objective.measures_effects(step))
        for step, num_tokens in tokens_by_step.items()
    )
    return in_passes + (tokens_by_step[max(tokens_by_step)] if tokens_by_step else 0)


def extrapolate_tokens(
    steps: Sequence[int], counts: Mapping[int, int], first: int, before: tuple[int, int]
) -> tuple[dict[int, int], str]:
    """Return the tokens of the batch of each step, and the batches from which uncounted ones are extrapolated.

    Args:
        counts: tokens of the batches that are counted; may have other steps.
        first: tokens of the first of the batches.
        before: tokens and number of the batches that the run has trained on before, both 0 if there are none.
    """
    counted = {step: counts[step] for step in steps if step in counts}
    num_before, steps_before = before
    mean, basis = float(first), "the first batch"
    if counted:
        mean = sum(counted.values()) / len(counted)
        basis = f"{len(counted):,} of {len(steps):,} batches" if len(counted) < len(steps) else ""
    elif num_before:
        mean = num_before / max(1, steps_before)
        basis = f"the {f'{steps_before:,} steps' if steps_before != 1 else 'step'} trained so far"
    return {step: counted.get(step, round(mean)) for step in steps}, basis


def name_unplanned(config: TrainConfig, *, has_candidates: bool, samples: bool, has_reference: bool) -> str:
    """Return the kinds of tokens of a run that no plan counts, in words; empty for none.

    Args:
        has_candidates: whether terms train on sampled candidates.
        samples: whether the run samples rollouts, candidates or completions of held-out prompts.
        has_reference: whether a reference scores the batches.
    """
    teachers = any(field_values(config.model_dump(include={"datasets", "teacher"}), "teacher"))
    kinds = {
        "training passes over sampled candidates": has_candidates,
        "sampled tokens and their prompts": samples,
        "tokens scored by the reference": has_reference,
        "tokens of teachers": teachers,
    }
    *most, last = [name for name, is_present in kinds.items() if is_present] or [""]
    return f"{', '.join(most)} and {last}" if most else last


class PlannedTokens(NamedTuple):
    """Tokens of the remaining steps of a run.

    Attributes:
        in_batches: tokens of the batches.
        in_passes: tokens of all passes over batches and held-out data of training clients.
        usd: price of the passes; None if it is unknown.
        num_evaluations: evaluations that remain.
        besides: tokens that are not included, such as "sampled tokens"; empty for none.
        basis: batches from which the tokens are extrapolated, such as "the first batch"; empty if all were counted.
    """

    in_batches: int
    in_passes: int
    usd: float | None
    num_evaluations: int = 0
    besides: str = ""
    basis: str = ""


class ExpectedTokens:
    """Tokens that the steps of a run are expected to take, for its plan and its budget."""

    def __init__(  # noqa: PLR0913 - the parts of a run that take tokens
        self,
        config: TrainConfig,
        schedule: Schedule,
        source: BatchSource,
        objective: Objective,
        evaluation: Evaluation,
        candidates: CandidateSampler | None,
        *,
        has_reference: bool,
    ) -> None:
        self._config, self._schedule, self._source, self._objective = config, schedule, source, objective
        self._evaluation, self._candidates, self._has_reference = evaluation, candidates, has_reference

    def samples_candidates(self, step: int) -> bool:
        """Return whether candidates are sampled for a step: they are due, and so is a term that needs them."""
        is_due = step < self._schedule.num_steps and self._candidates is not None and self._candidates.is_due(step)
        return is_due and bool(self._objective.due(step, on_candidates=True))

    def of_rollouts(self, step: int, last_batches: Iterable[Batch]) -> tuple[int, SampledTokens]:
        """Return the tokens of a step whose rollouts have not started; see `of_step`.

        Args:
            last_batches: batches of the step before it; the rollouts are expected to have as many tokens.
        """
        num_tokens = sum(batch.num_tokens for batch in last_batches)
        expected, uncharged = self._source.sampled_for(step - 1)
        return (2 + self._objective.measures_effects(step)) * num_tokens, uncharged + expected

    def of_step(
        self, step: int, batch: Batch, num_minibatches: int, *, needs_logprobs: bool
    ) -> tuple[int, SampledTokens]:
        """Return the tokens of a step's passes, and the sampled tokens that the budget does not include yet.

        The passes include those over candidates, the evaluation before the step, the pass that checks its update and,
        for the last step, the evaluation after it.

        Args:
            batch: first minibatch; the others are assumed to be as long.
            needs_logprobs: whether the update needs a forward pass before it.
        """
        num_passes_after = 1 + self._objective.measures_effects(step)
        num_tokens = ((2 if needs_logprobs else 1) + num_passes_after) * batch.num_tokens * num_minibatches
        num_tokens += self._evaluation.num_tokens(step)
        num_tokens += self._evaluation.num_tokens(step + 1) if step + 1 == self._schedule.num_steps else 0
        _, uncharged = self._source.sampled_for(step)
        if self._candidates and self.samples_candidates(step):
            most = self._candidates.most_tokens(batch)
            num_tokens += (1 + num_passes_after) * (most.num_prefill_tokens + most.num_sample_tokens)
            uncharged += most
        # With overlap, the candidates of the next step are sampled before its budget is checked.
        if self._candidates and self._candidates.settings.overlap and self.samples_candidates(step + 1):
            uncharged += self._candidates.most_tokens(batch)
        return num_tokens, uncharged

    def of_run(
        self,
        steps: range,
        first_tokens: int,
        trained_tokens: int,
        skipped: Collection[int],
        ledger: Ledger,
        *,
        in_one_pass: bool,
    ) -> PlannedTokens:
        """Return the tokens of the remaining steps; those of uncounted batches are extrapolated.

        Args:
            first_tokens: tokens of the batches of the first of these steps.
            trained_tokens: tokens of the batches that the run has trained on; for a fork, without those of its parent.
            skipped: steps that the guard skips.
            in_one_pass: whether the service computes the first step's objective in one pass, and so that of the others.
        """
        remaining = [step for step in steps if step not in skipped]
        num_before = sum(step not in skipped for step in range(self._schedule.first, steps.start))
        tokens, basis = extrapolate_tokens(
            remaining, self._source.token_counts(), first_tokens, (trained_tokens, num_before)
        )
        passes = {step: num_passes(self._objective, step, self._config.guards.needs_forward_pass) for step in remaining}
        if remaining and passes[remaining[0]] == 2 and in_one_pass:
            passes = dict.fromkeys(remaining, 1)
        held_out = sum(self._evaluation.num_tokens(step) for step in range(steps.start, steps.stop + 1))
        in_passes = held_out + num_pass_tokens(self._objective, tokens, passes)
        has_candidates = bool(self._candidates) and any(term.on_candidates for term in self._objective.regularizers)
        samples = self._source.sampled or has_candidates or self._evaluation.samples
        besides = name_unplanned(
            self._config, has_candidates=has_candidates, samples=samples, has_reference=self._has_reference
        )
        evaluations = sum(step >= steps.start for step in self._schedule.evaluations())
        usd = ledger.training_usd(in_passes)
        return PlannedTokens(sum(tokens.values()), in_passes, usd, evaluations, besides, basis)


def announce_plan(
    log: MetricsLog, config: TrainConfig, steps: range, tokens: PlannedTokens, *, evaluates: bool
) -> None:
    """Say in the terminal and in Prefect's log what a run is going to do.

    Args:
        evaluates: whether the run has held-out data or evaluators.
        log: MLflow run; an earlier run of its experiment, or this run before its restart, gives the pace.
        steps: steps that remain.
    """
    method = flow_run.get_flow_name() or "training"
    pace = None
    with suppress(MlflowException):  # the plan then says that the time is unknown
        experiment_id = log.client.get_run(log.run_id).info.experiment_id
        pace = find_pace(log.client, experiment_id, config.model, method)
    for line in plan_lines(config, method, steps, tokens, pace, evaluates=evaluates):
        print_notice(f"{config.run_name}: {line}")
        get_run_logger().info("%s", line)


def plan_lines(
    config: TrainConfig,
    method: str,
    steps: range,
    tokens: PlannedTokens,
    pace: Pace | None = None,
    *,
    evaluates: bool = True,
) -> list[str]:
    """Return sentences about the model, data, loss, evaluations, checkpoints, price and duration of a run."""
    sources = config.model_dump(include={"data", "environment", "comparisons", "questions", "datasets"})
    data = [*field_values(sources, "builder"), *field_values(sources, "path")]
    on_data = f" on {data[0]}" if data else ""
    base = config.objective.base_loss
    regularizers = [term for term in config.objective.regularizers if term.enabled]
    terms = [f"{_weight_text(term, steps)} {term.name}" for term in regularizers if term.target is None]
    limits = [f"{term.name} {_limit_text(term.target)}" for term in regularizers if term.target]
    loss = " + ".join([base if isinstance(base, str) else base.name, *terms])
    periods = {"evaluation": config.eval_every}
    if config.infrequent_evaluators:
        periods["infrequent evaluation"] = config.infrequent_eval_every
    due = [f"{name} every {period} steps" for name, period in periods.items() if period]
    evaluations = ", ".join(due) or "no evaluation"
    if due and not evaluates:
        evaluations = "no evaluation, because there is no held-out data and no evaluator"
    cadences = {
        "steps": config.checkpoint_every,
        "s": config.checkpoint_every_seconds,
        "tokens": config.checkpoint_every_tokens,
    }
    every = " or ".join(f"{number:,g} {unit}" for unit, number in cadences.items() if number)
    saves = f"checkpoint every {every}" if every else "checkpoint at the end"
    num_steps = (
        f"{len(steps):,} of {steps.stop:,} steps"
        if steps.start
        else f"{steps.stop:,} step{'s' if steps.stop > 1 else ''}"
    )
    price = "price unknown" if tokens.usd is None else f"${tokens.usd:,.4g}"
    besides = f"; {tokens.besides} are not included" if tokens.besides else ""
    basis = f" (extrapolated from {tokens.basis})" if tokens.basis else ""
    duration = "time unknown"
    if pace:
        run = "its own pace" if pace.run_name == config.run_name else f"the pace of {pace.run_name}"
        hours = format_hours(pace.hours(tokens.in_batches, tokens.num_evaluations))
        omitted = ", without evaluations" if evaluates and pace.omits(tokens.num_evaluations) else ""
        duration = f"about {hours} at {run}{omitted}"
    return [
        f"{method} of {config.model}{on_data}, {num_steps}, learning rate {config.learning_rate:g}",
        f"loss {loss}{', with ' + ' and '.join(limits) if limits else ''}",
        f"{evaluations}, {saves}; about {tokens.in_passes:,} tokens in passes{basis}, {price}{besides}; {duration}",
    ]


def _weight_text(term: RegularizerSpec, steps: range) -> str:
    if term.weight is None or isinstance(term.weight, int | float):
        return f"{term.weight or 0:g} x"
    first, last = (term.weight.weight_at(step, steps.stop) for step in (steps.start, steps.stop - 1))
    return f"{first:g} x" if first == last else f"({first:g} to {last:g}) x"


def _limit_text(target: TargetSpec) -> str:
    limits = {"at most": target.at_most, "at least": target.at_least, "equal to": target.equals}
    return " and ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit is not None)
