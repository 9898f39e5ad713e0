"""What a run has cost, over all its parts, and whether its next step is within the budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from time import monotonic
from typing import Any

from pydantic import Field

from blocks.errors import ConfigError
from flows.config import Config
from flows.prices import Price
from tasks.metrics import MetricsLog
from tasks.source import Sampled

_SAMPLED = [each.name for each in fields(Sampled)]


class BudgetConfig(Config):
    """Limits of a whole run: it ends at a checkpoint before the step that would exceed one, and goes on with more."""

    hours: float | None = Field(
        default=None, gt=0, title="Hours", description="Of wall-clock time in which the run is open; unset is no limit."
    )
    usd: float | None = Field(
        default=None, gt=0, title="US dollars", description="For passes of the service; unset is no limit."
    )
    prices: str = Field(
        default="",
        title="Prices",
        description="Path of a table in the form of flows/prices.yaml, or of the service's models.json, whose prices "
        "go before the project's.",
    )


class Ledger:
    """The time and the passes that a run has cost, counted on over its parts."""

    def __init__(self, config: BudgetConfig, price: Price | None, spent: Mapping[str, float]) -> None:
        """Go on from what `spent_before` gives.

        Raises:
            ConfigError: there is a limit in dollars, and no price.
        """
        if config.usd is not None and price is None:
            raise ConfigError(
                f"budget.usd is {config.usd:g}, but nobody said what the model costs: set budget.prices to a table "
                "that names it, in the form of flows/prices.yaml, or leave out budget.usd."
            )
        self._config, self._price = config, price
        self._num_tokens, self._usd = int(spent.get("num_train_tokens", 0)), spent.get("usd", 0.0)
        self._sampled = Sampled(*(int(spent.get(key, 0)) for key in _SAMPLED))
        self._hours_before, self._began = spent.get("hours", 0.0), monotonic()
        self._step_began, self._step_hours = self._began, 0.0

    @property
    def hours(self) -> float:
        """In which the run was open."""
        return self._hours_before + (monotonic() - self._began) / 3600

    def add(self, num_tokens: int) -> None:
        """Count a pass of the training client over so many tokens, when it is asked for."""
        self._num_tokens += num_tokens
        self._usd += self._price.of_training(num_tokens) if self._price else 0.0

    def add_sampled(self, sampled: Sampled) -> None:
        """Count what was sampled, when the service has answered."""
        self._sampled += sampled
        self._usd += self._price.of_sampling(sampled) if self._price else 0.0

    def end_before(self, step: int, num_tokens: int) -> str:
        """Why the run is to end before a step whose passes have so many tokens; empty where it is not.

        The step is taken to last as long as the one before it, which is under way.
        """
        config, usd = self._config, self._usd + (self._price.of_training(num_tokens) if self._price else 0.0)
        hours = self.hours + 2 * self._step_hours
        if config.usd is not None and usd > config.usd:
            limit = f"would have cost ${usd:.6g} with step {step}, and budget.usd is {config.usd:g}"
        elif config.hours is not None and hours > config.hours:
            limit = f"would have taken {hours:.4g} hours with step {step}, and budget.hours is {config.hours:g}"
        else:
            return ""
        return f"The run ended at a checkpoint before step {step}: it {limit}; with a higher one it goes on."

    def end_step(self) -> dict[str, float]:
        """Note how long a step took; returns its metrics."""
        now = monotonic()
        self._step_hours, self._step_began = (now - self._step_began) / 3600, now
        return self.metrics()

    def metrics(self) -> dict[str, float]:
        """What the run has cost so far."""
        shares = [
            spent / limit
            for spent, limit in ((self.hours, self._config.hours), (self._usd, self._config.usd))
            if limit is not None
        ]
        return {f"cost/{key}": value for key, value in self.state().items()} | (
            {"cost/budget_share": max(shares)} if shares else {}
        )

    def state(self) -> dict[str, Any]:
        """What a later part of the run counts on from, as plain data; without dollars where nobody said a price."""
        usd = {"usd": self._usd} if self._price else {}
        sampled = asdict(self._sampled) if self._sampled != Sampled() else {}
        return {"num_train_tokens": self._num_tokens, **sampled, "hours": self.hours, **usd}


def spent_before(log: MetricsLog, state: Mapping[str, float]) -> dict[str, float]:
    """What the earlier parts of a run cost: the greater of its checkpoint's record and its chart.

    The chart also knows of the steps behind the checkpoint, which a crash has lost and somebody has paid for.
    """
    charted = log.client.get_run(log.run_id).data.metrics
    keys = ("num_train_tokens", *_SAMPLED, "hours", "usd")
    return {key: max(state.get(key, 0.0), charted.get(f"cost/{key}", 0.0)) for key in keys}
