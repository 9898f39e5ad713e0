"""Prices of the service per million tokens, from a table that the user can override."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from blocks.errors import ConfigError
from flows.config.plain_data import parse_yaml
from tasks.common.digests import digest_text
from tasks.training.batch_source import SampledTokens

TABLE = Path(__file__).with_name("prices.yaml")

_HOSTED = (".thinkingmachines.ai", ".thinkingmachines.dev")
_HERE = ("", "localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per million tokens.

    Attributes:
        prefill: Price of prompt tokens that the service has not cached.
        sample: Price of sampled tokens.
        train: Price of tokens in any pass of a training client, including forward passes and tokens of weight 0.
        cached_prefill: Price of prompt tokens that the service has cached. None: they cost `prefill`.
    """

    prefill: float
    sample: float
    train: float
    cached_prefill: float | None = None

    def of_training(self, num_tokens: int) -> float:
        """Dollars for training passes over this many tokens.

        >>> Price(prefill=0.2, sample=0.6, train=0.44).of_training(2_000_000)
        0.88
        """
        return num_tokens * self.train / 1e6

    def of_sampling(self, sampled: SampledTokens) -> float:
        """Dollars for sampling.

        >>> Price(prefill=0.2, sample=0.6, train=0.44).of_sampling(SampledTokens(1_000_000, 500_000, 900_000))
        0.5
        >>> Price(prefill=0.2, sample=0.6, train=0.44, cached_prefill=0.1).of_sampling(SampledTokens(10**6, 0, 500_000))
        0.15
        """
        cached = self.prefill if self.cached_prefill is None else self.cached_prefill
        num_new = sampled.num_prefill_tokens - sampled.num_cached_tokens
        prompts = num_new * self.prefill + sampled.num_cached_tokens * cached
        return (prompts + sampled.num_sample_tokens * self.sample) / 1e6


FREE = Price(0.0, 0.0, 0.0)

# Month of the newest archived copy of the service's price page with which `TABLE` was compared.
PRICES_DATE = "2026-10"


def price_of(model: str, url: str, table: str = "") -> Price | None:
    """Return the price of a model on the service at ``url``; None if it is unknown.

    The user's table overrides the built-in one, which covers only the hosted service. On this machine, models that the
    user's table does not list are free.

    Args:
        url: URL of the service (`flows.runs.blocks.service_url`); empty for an engine that the run starts.
        table: Path of a YAML or JSON file in the format of `TABLE`; empty for none.

    Raises:
        ConfigError: The table is unreadable or invalid.
    """
    prices, others = _prices_on(url, table)
    return prices.get(model, others)


def digest_prices(url: str, table: str = "") -> str:
    """Return a digest of the prices of all models on a service, whatever the path of the table.

    Args:
        url, table: see `price_of`.

    Raises:
        ConfigError: The table is unreadable or invalid.
    """
    prices, others = _prices_on(url, table)
    return digest_text(repr((sorted(prices.items()), others)))


def _prices_on(url: str, table: str) -> tuple[dict[str, Price], Price | None]:
    """Return the known prices on a service by model, and the price of all other models; None if that is unknown."""
    own = _read(Path(table)) if table else {}
    host = urlsplit(url).hostname or ""
    if host in _HERE:
        return own, FREE
    return (_read(TABLE) if host.endswith(_HOSTED) else {}) | own, None


def priced_models() -> dict[str, Price]:
    """Return the built-in prices of the hosted service, by model."""
    return _read(TABLE)


def _read(path: Path) -> dict[str, Price]:
    try:
        rows = parse_yaml(path.read_bytes(), f"The price table {path}")
        return {row["tinker_id"]: _price(row) for row in rows}
    except ConfigError:  # from parse_yaml; a ValueError, too
        raise
    except OSError as error:
        raise ConfigError(
            f"The price table {path} could not be read ({error.strerror}): set budget.prices to a readable file."
        ) from error
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"The price table {path} is invalid ({type(error).__name__}: {' '.join(str(error).split())[:200]}): use a "
            "list of {tinker_id, prefill, sample, train}, in dollars per million tokens (cached_prefill is optional), "
            "as in https://tinker-docs.thinkingmachines.ai/tinker/models.json."
        ) from error


def _price(row: Mapping[str, Any]) -> Price:
    cached = row.get("cached_prefill")
    fields = (_dollars(row[key]) for key in ("prefill", "sample", "train"))
    return Price(*fields, cached_prefill=None if cached is None else _dollars(cached))


def _dollars(value: Any) -> float:
    dollars = float(str(value).removeprefix("$").replace(",", ""))
    if not 0 <= dollars < float("inf"):
        raise ValueError(f"{value} is not a valid price")
    return dollars
