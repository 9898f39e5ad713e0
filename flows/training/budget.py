"""Cost of a run over all its restarts, and the check of its budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from time import monotonic
from types import MappingProxyType
from typing import Any, Protocol

from blocks.errors import ConfigError
from flows.config.train import BudgetConfig, TrainConfig
from flows.monitoring.events import emit
from flows.monitoring.run_tags import note_end, note_prices, note_warning
from flows.runs.blocks import service_url
from flows.runs.prices import Price, digest_prices, price_of
from flows.runs.run import Run
from tasks.training.batch_source import BatchSource, SampledTokens
from tasks.training.candidates import CandidateSampler
from tasks.training.reference import Reference
from tasks.training.token_meter import TokenMeter
from tasks.training.tracking.metrics import COST_PREFIX, MetricsLog

_SAMPLED = [field.name for field in fields(SampledTokens)]


class Ledger:
    """Time and tokens that a run has cost, over all its restarts."""

    def __init__(self, config: BudgetConfig, price: Price | None, spent: Mapping[str, float]) -> None:
        """Continue from the result of `cost_before_restart`.

        Raises:
            ConfigError: The budget has a limit in dollars, but the model has no known price.
        """
        if config.usd is not None and price is None:
            raise ConfigError(
                f"budget.usd is {config.usd:g}, but the price of the model is unknown: set budget.prices to a price "
                "table with the model, in the format of flows/runs/prices.yaml, or remove budget.usd."
            )
        self._budget, self._price = config, price
        self._num_tokens, self._usd = int(spent.get("num_train_tokens", 0)), spent.get("usd", 0.0)
        self._sampled = SampledTokens(*(int(spent.get(key, 0)) for key in _SAMPLED))
        # Checkpoints of older versions have no num_scoring_tokens. A count that starts here would look like that of the
        # whole run, so it is left out.
        self._counts_scoring = "num_scoring_tokens" in spent or not self._sampled.num_sample_tokens
        self._hours_before, self._began = spent.get("hours", 0.0), monotonic()
        self._step_began, self._step_hours = self._began, 0.0

    @property
    def hours(self) -> float:
        """Hours during which the run was open."""
        return self._hours_before + (monotonic() - self._began) / 3600

    def training_usd(self, num_tokens: int) -> float | None:
        """Return the cost in dollars of training passes over tokens; None if the price is unknown."""
        return self._price.of_training(num_tokens) if self._price else None

    def add(self, num_tokens: int, price: Price | None = None) -> None:
        """Count the tokens of a pass of a training client when it is requested.

        Args:
            price: price of another model; None for the trained model.
        """
        price = price or self._price
        self._num_tokens += num_tokens
        self._usd += price.of_training(num_tokens) if price else 0.0

    def add_sampled(self, sampled: SampledTokens, price: Price | None = None) -> None:
        """Count sampled tokens when the service has returned them; see `add`."""
        price = price or self._price
        self._sampled += sampled
        self._usd += price.of_sampling(sampled) if price else 0.0

    def stop_reason(self, step: int, num_tokens: int, sampled: SampledTokens, others_usd: float = 0.0) -> str:
        """Return the reason to stop before a step; empty within the budget.

        The next step and the one in progress are assumed to take as long as the last finished step.

        Args:
            num_tokens: tokens of the step's training passes.
            sampled: tokens of the step's rollouts, and of earlier ones that are not charged yet.
            others_usd: dollars of the step, and of earlier ones that are not charged yet, for other models.
        """
        usd = (self.training_usd(num_tokens) or 0.0) + (self._price.of_sampling(sampled) if self._price else 0.0)
        usd += others_usd
        limit = self.limit_exceeded(usd, 2 * self._step_hours, f"step {step}")
        if not limit:
            return ""
        if step == 0:
            return f"No step was run: the run {limit}; raise the budget."
        return f"The run stopped at a checkpoint before step {step}: it {limit}; raise the budget to resume it."

    def limit_exceeded(self, usd: float, hours: float, work: str) -> str:
        """Return the limit that further work would exceed, as a part of a sentence; empty within the budget.

        Args:
            usd, hours: Expected cost in dollars and duration of the work.
            work: The work, for the sentence.
        """
        budget, usd, hours = self._budget, self._usd + usd, self.hours + hours
        if budget.usd is not None and usd > budget.usd:
            return f"would have cost ${usd:.6g} with {work}, but budget.usd is {budget.usd:g}"
        if budget.hours is not None and hours > budget.hours:
            return f"would have taken {hours:.4g} hours with {work}, but budget.hours is {budget.hours:g}"
        return ""

    def end_step(self) -> dict[str, float]:
        """Record the duration of a step; return its cost metrics."""
        now = monotonic()
        self._step_hours, self._step_began = (now - self._step_began) / 3600, now
        return self.metrics()

    def metrics(self) -> dict[str, float]:
        """Return the cost of the run so far, as metrics."""
        shares = [
            spent / limit
            for spent, limit in ((self.hours, self._budget.hours), (self._usd, self._budget.usd))
            if limit is not None
        ]
        return {f"cost/{key}": value for key, value in self.state().items()} | (
            {"cost/budget_share": max(shares)} if shares else {}
        )

    def state(self) -> dict[str, Any]:
        """Return the cost so far as plain data for a checkpoint; without dollars if the price is unknown."""
        usd = {"usd": self._usd} if self._price else {}
        sampled = asdict(self._sampled) if self._sampled != SampledTokens() else {}
        if not self._counts_scoring:
            sampled.pop("num_scoring_tokens", None)
        return {"num_train_tokens": self._num_tokens, **sampled, "hours": self.hours, **usd}


class BudgetedConfig(Protocol):
    """Config with a model, its service and a budget."""

    @property
    def model(self) -> str: ...

    @property
    def base_url(self) -> str: ...

    @property
    def budget(self) -> BudgetConfig: ...


class MeteredLedger(Ledger):
    """Ledger that also charges the tokens counted by a meter, at the price of each model."""

    def __init__(
        self,
        log: MetricsLog,
        meter: TokenMeter,
        config: BudgetedConfig,
        spent: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        url, table = service_url(config.base_url), config.budget.prices
        super().__init__(config.budget, price_of(config.model, url, table), spent)
        note_prices(log, digest_prices(url, table))
        self._log, self._meter, self._config = log, meter, config
        self._prices: dict[str, Price | None] = {}

    def charge_metered(self) -> None:
        """Charge the tokens that the meter has counted: of teachers, reward models, judges and evaluations."""
        for model, sampled in self._meter.take().items():
            if model not in self._prices:
                self._prices[model] = price_of_other(self._log, self._config, model, "teacher or judge")
            self.add_sampled(sampled, self._prices[model])


class EvaluationLedger(MeteredLedger):
    """Ledger of an evaluation, which stops before an evaluator that would exceed the budget.

    An evaluator is expected to cost as much, and to take as long, as it did on the previously evaluated weights. On the
    first weights, only the cost of held-out data is known in advance.

    Attributes:
        stopped: Sentence that says where and why the evaluation stopped; empty if it did not.
    """

    stopped: str = ""
    _running: tuple[str, float, float] | None = None  # evaluator, with dollars and hours at its start

    def __init__(self, log: MetricsLog, meter: TokenMeter, config: BudgetedConfig) -> None:
        super().__init__(log, meter, config)
        self._last: dict[str, tuple[float, float]] = {}  # dollars and hours of each evaluator on the last weights

    def begin(self, evaluator: str, weights: str, num_train_tokens: int, sampled: SampledTokens) -> bool:
        """Start an evaluator and count the tokens of its training passes; return False if the budget does not cover it.

        Args:
            evaluator: Name under which the evaluator's cost is remembered, also for messages.
            weights: Name of the weights, for the message in `stopped`.
            num_train_tokens: Tokens of the evaluator's passes of a training client.
            sampled: The part of the evaluator's sampled tokens that is known in advance.

        Raises:
            ConfigError: The budget does not cover the first evaluator.
        """
        self.end()
        usd, hours = self._last.get(evaluator, (0.0, 0.0))
        if self._price:
            usd = max(usd, self._price.of_training(num_train_tokens) + self._price.of_sampling(sampled))
        work = "this part" if self._last else f"its first part, {evaluator}"
        if limit := self.limit_exceeded(usd, hours, work):
            if not self._last:
                raise ConfigError(f"Nothing was measured: the evaluation {limit}; raise the budget.")
            where = f"The evaluation stopped before {evaluator} on {weights}"
            self.stopped = f"{where}: it {limit}; raise the budget and start it again."
            return False
        self._running = (evaluator, self._usd, self.hours)
        self.add(num_train_tokens)
        return True

    def end(self) -> None:
        """Charge the tokens of the evaluator in progress, if any."""
        self.charge_metered()
        if self._running:
            evaluator, usd, hours = self._running
            self._last[evaluator] = (self._usd - usd, self.hours - hours)
            self._running = None


class RunLedger(MeteredLedger):
    """Ledger of a training run, which also charges the tokens of the reference.

    Attributes:
        stopped: Sentence that says why the budget ends the run; empty if it does not.
    """

    stopped: str = ""
    _charged_step: int | None = None  # the newest step that was charged
    _others_usd: float = 0.0  # of teachers and judges in the step in progress, without evaluations
    _most_others_usd: float = 0.0  # of the reference, teachers and judges in the most expensive step

    def __init__(self, run: Run, config: TrainConfig, reference: Reference | None, spent: Mapping[str, float]) -> None:
        """Continue from the cost before the restart, if there was one.

        Args:
            spent: Cost in the record of the checkpoint that the run starts from. The logged metrics can be higher, and
                then count instead (`cost_before_restart`).
        """
        super().__init__(run.log, run.meter, config, cost_before_restart(run.log, spent))
        self._run_name, self._reference = config.run_name, reference
        self._reference_price = price_of_other(run.log, config, reference.model, "reference") if reference else None

    def covers(self, step: int, num_tokens: int, sampled: SampledTokens) -> bool:
        """Return whether the budget covers a step; if not, set `stopped` and report it as a tag and an event.

        The reference, teachers and judges are expected to cost as much as in the most expensive step since the start
        or restart. Before the first such step, their cost is unknown and counts as 0. See `stop_reason` for the
        arguments.
        """
        num_uncharged = 0 if self._charged_step is None else step - self._charged_step
        self.stopped = self.stop_reason(step, num_tokens, sampled, num_uncharged * self._most_others_usd)
        if self.stopped:
            note_end(self._log, self.stopped)
            emit("budget", self._run_name, {"step": step, **self.state(), "message": self.stopped})
        return not self.stopped

    def charge_step(self, step: int, source: BatchSource, candidates: CandidateSampler | None, *, ends: bool) -> None:
        """Charge what the service has sampled and scored up to a step.

        Args:
            ends: whether the run ends here, which stops the sampling of rollouts.
        """
        self.add_sampled(source.take_sampled())
        if ends:
            self.add_sampled(source.stop_sampling())
        if candidates:
            self.add_sampled(candidates.take_sampled(None if ends else step))
        self.charge_others()
        before_usd = self._usd
        self.charge_reference(step)
        self._most_others_usd = max(self._most_others_usd, self._others_usd + self._usd - before_usd)
        self._charged_step, self._others_usd = step, 0.0

    def charge_others(self) -> None:
        """Charge what teachers and judges have processed for the step in progress; call it before an evaluation."""
        before_usd = self._usd
        self.charge_metered()
        self._others_usd += self._usd - before_usd

    def charge_reference(self, step: int) -> None:
        """Charge the tokens that the reference has processed since the last call, for a step and for earlier ones."""
        if self._reference:
            self.add_sampled(self._reference.take_sampled(step), self._reference_price)
            self.add(self._reference.take_num_train_tokens(step), self._reference_price)


def cost_before_restart(log: MetricsLog, state: Mapping[str, float]) -> dict[str, float]:
    """Return the cost of the run before its last restart: the maximum of the checkpoint's record and the metrics.

    The metrics also include the steps after the checkpoint: a crash lost them, but they were paid for. The maximum can
    be at an earlier step than the last one, if the run was killed while it repeated steps. Counts that neither has are
    left out.
    """
    keys = ("num_train_tokens", *_SAMPLED, "hours", "usd")
    known = log.step_keys()
    logged: dict[str, float] = {}
    for key in keys:
        if (name := f"{COST_PREFIX}{key}") in known:
            logged[key] = max(point.value for point in log.client.get_metric_history(log.run_id, name))
    return {key: max(state.get(key, 0.0), logged.get(key, 0.0)) for key in keys if key in state or key in logged}


def price_of_other(log: MetricsLog, config: BudgetedConfig, model: str, role: str) -> Price | None:
    """Return the price of a reference, teacher, reward model or judge; None to charge it at the trained model's price.

    Warns if the trained model's price is known, but that of the other model is not.

    Args:
        role: what the model is used for, as the warning says it; the first word is part of the name of the warning's
            tag.
    """
    if model == config.model:
        return None
    url = service_url(config.base_url)
    price = price_of(model, url, config.budget.prices)
    if price is None and price_of(config.model, url, config.budget.prices):
        text = (
            f"The price of the {role} model {model} is unknown: its tokens are charged at the price of "
            f"{config.model}; add it to the table of budget.prices."
        )
        note_warning(log, f"{role.partition(' ')[0]}_price", text)
    return price
