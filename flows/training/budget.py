"""Cost of a run over all its restarts, and the check of its budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from time import monotonic
from typing import Any

from blocks.errors import ConfigError
from flows.config.train import BudgetConfig, TrainConfig
from flows.monitoring.run_tags import note_warning
from flows.runs.blocks import service_url
from flows.runs.prices import Price, price_of
from flows.runs.run import Run
from tasks.training.batch_source import SampledTokens
from tasks.training.metrics import MetricsLog
from tasks.training.reference import Reference

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
        self._hours_before, self._began = spent.get("hours", 0.0), monotonic()
        self._step_began, self._step_hours = self._began, 0.0

    @property
    def hours(self) -> float:
        """Hours during which the run was open."""
        return self._hours_before + (monotonic() - self._began) / 3600

    def price_of_pass(self, num_tokens: int) -> float | None:
        """Return the price in dollars of a training pass over tokens; None if it is unknown."""
        return self._price.of_training(num_tokens) if self._price else None

    def add(self, num_tokens: int, price: Price | None = None) -> None:
        """Count the tokens of a pass of a training client when it is requested; `price` is that of another model."""
        price = price or self._price
        self._num_tokens += num_tokens
        self._usd += price.of_training(num_tokens) if price else 0.0

    def add_sampled(self, sampled: SampledTokens, price: Price | None = None) -> None:
        """Count sampled tokens when the service has returned them; `price` is that of another model."""
        price = price or self._price
        self._sampled += sampled
        self._usd += price.of_sampling(sampled) if price else 0.0

    def stop_reason(self, step: int, num_tokens: int) -> str:
        """Return the reason to stop before a step whose passes have this many tokens; empty within the budget.

        The next step and the one in progress are assumed to take as long as the last finished step.
        """
        budget, usd = self._budget, self._usd + (self._price.of_training(num_tokens) if self._price else 0.0)
        hours = self.hours + 2 * self._step_hours
        if budget.usd is not None and usd > budget.usd:
            limit = f"would have cost ${usd:.6g} with step {step}, but budget.usd is {budget.usd:g}"
        elif budget.hours is not None and hours > budget.hours:
            limit = f"would have taken {hours:.4g} hours with step {step}, but budget.hours is {budget.hours:g}"
        else:
            return ""
        if step == 0:
            return f"No step was run: the run {limit}; raise the budget."
        return f"The run stopped at a checkpoint before step {step}: it {limit}; raise the budget to resume it."

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
        return {"num_train_tokens": self._num_tokens, **sampled, "hours": self.hours, **usd}


class RunLedger(Ledger):
    """Ledger of a training run, which also charges the tokens of the reference, teachers, reward models and judges."""

    def __init__(self, run: Run, config: TrainConfig, reference: Reference | None, spent: Mapping[str, float]) -> None:
        """Continue from the cost that the checkpoint at which the run starts has recorded."""
        price = price_of(config.model, service_url(config.base_url), config.budget.prices)
        super().__init__(config.budget, price, cost_before_restart(run.log, spent))
        self._run, self._config, self._reference = run, config, reference
        self._reference_price = price_of_other(run.log, config, reference.model, "reference") if reference else None
        self._prices: dict[str, Price | None] = {}

    def charge_metered(self) -> None:
        """Charge the tokens that the run's meter has counted: of teachers, reward models, judges and evaluations."""
        for model, sampled in self._run.meter.take().items():
            if model not in self._prices:
                self._prices[model] = price_of_other(self._run.log, self._config, model, "teacher or judge")
            self.add_sampled(sampled, self._prices[model])

    def charge_reference(self, step: int) -> None:
        """Charge the reference's tokens up to a step, all of whose minibatches have been sent."""
        if self._reference:
            self.add_sampled(self._reference.take_sampled(step), self._reference_price)
            self.add(self._reference.take_num_train_tokens(step), self._reference_price)


def cost_before_restart(log: MetricsLog, state: Mapping[str, float]) -> dict[str, float]:
    """Return the cost of the run before its last restart: the maximum of the checkpoint's record and the metrics.

    The metrics include the steps after the checkpoint, which a crash lost but which were paid for.
    """
    metrics = log.client.get_run(log.run_id).data.metrics
    keys = ("num_train_tokens", *_SAMPLED, "hours", "usd")
    return {key: max(state.get(key, 0.0), metrics.get(f"cost/{key}", 0.0)) for key in keys}


def price_of_other(log: MetricsLog, config: TrainConfig, model: str, role: str) -> Price | None:
    """Return the price of the reference's or a teacher's model; None if it is charged at the trained model's price.

    Warns if the price of another model is unknown.

    Args:
        role: role of the model for the warning, whose first word names its tag.
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
