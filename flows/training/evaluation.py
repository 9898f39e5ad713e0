"""Evaluation of a training run: its evaluators, and the terms and examples on its held-out data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import cast

from tinker_cookbook.eval.evaluators import Evaluator

from blocks.errors import ConfigError
from blocks.terminal import print_notice
from flows.config.promotion import PromoteIf, check_measured
from flows.config.train import TrainConfig
from flows.monitoring.interrupts import StopRequest
from flows.monitoring.run_tags import note_evaluation, note_warning
from flows.runs.checkpoints.promotion import check_scores
from flows.runs.run import Run
from flows.training.budget import Ledger
from flows.training.candidates import open_examples
from flows.training.guards import Guard
from flows.training.schedule import Schedule
from objectives.batch import Batch
from objectives.errors import ObjectiveError
from objectives.objective import Objective
from tasks.evaluation.evaluators import ConfiguredEvaluator, EvaluationResult, HeldOutNLL, evaluate
from tasks.preference.pair_source import HeldOutPairs
from tasks.reports.summary import format_steps
from tasks.rl.rollout_source import HeldOutGroups
from tasks.training.candidates import CandidateSampler
from tasks.training.examples import append_examples, data_completions, example_inputs, first_prompts, measure_examples
from tasks.training.held_out import EvaluatedBatch, HeldOutData, HeldOutTerms, append_batch_values, measure_held_out
from tasks.training.reference import Reference
from tasks.training.terms import TaskTermExecutor
from tasks.training.tracking.metric_names import logged_name


class Evaluation:
    """Evaluations of the weights before the steps at which the schedule wants them.

    Each evaluation counts its tokens against the budget. Responses that are not finite follow the policy of the guard.
    """

    def __init__(  # noqa: PLR0913 - the parts of a run that an evaluation reads
        self,
        run: Run,
        config: TrainConfig,
        schedule: Schedule,
        evaluators: Sequence[Evaluator | ConfiguredEvaluator],
        objective: Objective,
        reference: Reference | None,
        candidates: CandidateSampler | None,
        executor: TaskTermExecutor,
        guard: Guard,
        ledger: Ledger,
    ) -> None:
        check_scores(config.promote_if, config.promote_confidence, evaluators)
        for held_out in (entry for entry in evaluators if isinstance(entry, HeldOutNLL) and entry.num_untrained):
            text = (
                f"{held_out.num_untrained} of {held_out.num_datums} held-out rows have no trained token and do not "
                "count: raise max_length, which may have cut them off, or remove the rows."
            )
            note_warning(run.log, "held_out_rows", text)
        self._run, self._config, self._schedule = run, config, schedule
        self._evaluators = evaluators
        self._objective, self._reference, self._candidates = objective, reference, candidates
        self._executor, self._guard, self._ledger = executor, guard, ledger
        self._examples = open_examples(run, config, evaluators)
        self._examples_s = 0.0
        self._is_checked = False
        self._failed_terms: Mapping[str, str] = {}  # reasons of the last evaluation
        self._not_finite: set[str] = set()
        self._has_warned_of_failed_groups = False

    def close(self) -> None:
        """Stop sampling examples."""
        if self._examples:
            self._examples.close()

    def run(self, step: int, stop: StopRequest | None = None) -> dict[str, float]:
        """Evaluate the weights before a step; return the metrics, which are empty if no evaluation is due.

        Args:
            stop: skips the terms and examples after a request to stop, because a resumed run evaluates again.

        Raises:
            ConfigError: `promote_if` or `keep_best` names a metric that the evaluation does not have.
        """
        often, rarely = self._schedule.evaluates_often_before(step), self._schedule.evaluates_rarely_before(step)
        if not (often or rarely):
            return {}
        began = perf_counter()
        when = f"after {format_steps(step, self._schedule.num_steps)}" if step else "before the first step"
        if self._evaluators:
            print_notice(f"{self._config.run_name}: evaluating the weights {when}")
        self._ledger.add(self.num_tokens(step))
        due = [
            entry
            for entry in self._evaluators
            if (rarely if isinstance(entry, ConfiguredEvaluator) and entry.is_infrequent else often)
        ]
        for entry in due:
            if isinstance(entry, HeldOutGroups):
                entry.step = step
        with self._guard.checked_responses(step):
            # Submitted: a synchronous flow cannot call an async task directly.
            result = cast(EvaluationResult, evaluate.submit(self._run.client, due, step, self._run.meter).result())
        note_evaluation(self._run.log, result, step=step)
        if stop and stop.requested:
            return result.metrics
        terms = self._measure_held_out(step) if often else HeldOutTerms()
        append_batch_values(self._run.directory, step, terms.by_batch, result.scores)
        metrics = result.metrics | terms.metrics
        if self.has_evaluators:
            metrics["time/evaluation"] = perf_counter() - began
        if self._examples_s:
            metrics["time/examples"], self._examples_s = self._examples_s, 0.0
        if not result.skipped and often and (rarely or not self._schedule.evaluates_rarely):
            self._check_measured(step, metrics, terms)
        self._warn_of_values(step, metrics)
        self._warn_of_failed_groups(step, metrics)
        return metrics

    def num_tokens(self, step: int) -> int:
        """Return the tokens of an evaluation before a step, without those that evaluators sample."""
        if not self._schedule.evaluates_often_before(step):
            return 0
        held_out = [entry for entry in self._evaluators if isinstance(entry, HeldOutNLL | HeldOutPairs)]
        return sum(evaluator.num_tokens for evaluator in held_out)

    @property
    def has_evaluators(self) -> bool:
        """Return whether evaluations measure anything."""
        return bool(self._evaluators)

    @property
    def samples(self) -> bool:
        """Return whether evaluations sample tokens: for the report's examples, or for evaluators with own answers."""
        others = [entry for entry in self._evaluators if not isinstance(entry, HeldOutNLL | HeldOutPairs)]
        return bool(self._examples or others) and bool(self._schedule.evaluations())

    def _check_measured(self, step: int, metrics: Mapping[str, float], terms: HeldOutTerms) -> None:
        """Check the metric of `promote_if`, and that of `keep_best` in the first complete evaluation.

        Before training, a missing metric is an error; later, that of `keep_best` is a warning.
        """
        if self._config.promote_if:
            check_measured("promote_if", PromoteIf.parse(self._config.promote_if).metric, metrics)
        best = self._config.keep_best
        if not (best and best.metric.startswith("test/")) or self._is_checked or terms.failed:
            return
        self._is_checked = True
        try:
            check_measured("keep_best", logged_name(best.metric), metrics)
        except ConfigError as error:
            if step == self._schedule.first:
                raise
            note_warning(self._run.log, "keep_best", str(error))

    def _warn_of_values(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn of each metric when it is first not finite."""
        for name in [name for name, value in metrics.items() if not math.isfinite(value)]:
            if name not in self._not_finite:
                self._not_finite.add(name)
                text = f"{name} is {metrics[name]} at step {step}: keep_best ignores it; check its evaluator."
                note_warning(self._run.log, f"not_finite.{name}", text)

    def _warn_of_failed_groups(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn when held-out groups first fail, because the means over the others are not those of all groups."""
        num_failed = metrics.get("test/rollout_errors/groups_skipped", 0.0)
        if num_failed and not self._has_warned_of_failed_groups:
            self._has_warned_of_failed_groups = True
            text = (
                f"The held-out metrics at step {step} leave out groups that failed in all attempts ({num_failed:.0f}): "
                "check the environment, or accept smaller groups by rollout.min_successful."
            )
            note_warning(self._run.log, "rollout.held_out_failed", text)

    def _measure_held_out(self, step: int) -> HeldOutTerms:
        """Measure the terms on the held-out data of this evaluation; before and after training, also store examples.

        The result is empty without held-out data or without terms.
        """
        held_out = next((entry for entry in self._evaluators if isinstance(entry, HeldOutData)), None)
        if held_out is None:
            return HeldOutTerms()
        if step in (self._schedule.first, self._schedule.num_steps):
            began = perf_counter()
            self._store_examples(step, held_out.evaluated)
            self._examples_s = perf_counter() - began
        terms, evaluated = self._objective.regularizers, held_out.evaluated
        if not terms:
            return HeldOutTerms()
        inputs = [([term for term in terms if not term.on_candidates], evaluated)]
        sampled = [term for term in terms if term.on_candidates]
        if sampled and self._candidates:
            batches = [entry.batch for entry in evaluated]
            inputs.append((sampled, self._sample(step, self._candidates, batches)))
        measured = HeldOutTerms()
        for measured_terms, batches in inputs:
            measured |= measure_held_out(measured_terms, batches, self._executor, self._reference, step)
        failed, self._failed_terms = self._failed_terms, measured.failed
        for name, reason in sorted(measured.failed.items() - failed.items()):
            text = f"Term {name} has no value on the held-out data: {reason}"
            note_warning(self._run.log, f"held_out.{name}", text)
        return measured

    def _store_examples(self, step: int, evaluated: Sequence[EvaluatedBatch]) -> None:
        """Store completions of held-out prompts with their scores, for the report."""
        num = self._config.report.num_examples
        try:
            inputs = example_inputs(evaluated)
            if self._examples:
                prompts = first_prompts(evaluated, num)
                num_prompts = sum(batch.num_datums for batch in prompts)
                noun = "examples" if num_prompts != 1 else "example"
                print_notice(f"{self._config.run_name}: sampling {num_prompts} {noun} for the report")
                samples = self._sample(step, self._examples, prompts)
                inputs = example_inputs(samples, data_completions(evaluated, num))
            tokenizer = self._run.client.get_tokenizer()
            examples = measure_examples(inputs, num, self._objective, self._executor, self._reference, tokenizer)
        except ObjectiveError as error:  # for example prompts with images
            text = f"The report has no examples of step {step}: {error}"
            note_warning(self._run.log, "examples", text)
        else:
            if examples:
                append_examples(self._run.directory, step, examples)

    def _sample(self, step: int, sampler: CandidateSampler, batches: Sequence[Batch]) -> list[EvaluatedBatch]:
        """Sample a completion of each prompt of held-out batches."""
        with self._guard.checked_responses(step):
            samples = sampler.sample_held_out(batches, self._run.client)
        self._ledger.add_sampled(sampler.take_sampled())
        return samples
