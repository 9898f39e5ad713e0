"""What the service asks for a million tokens, from a small table that the user can replace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from blocks.errors import ConfigError
from flows.blocks_of import service_url
from tasks.source import Sampled

TABLE = Path(__file__).with_name("prices.yaml")

_HOSTED = (".thinkingmachines.ai", ".thinkingmachines.dev")
_HERE = ("", "localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Price:
    """Dollars per million tokens.

    Attributes:
        prefill: of prompts that are sampled from, where the service has not seen them before.
        sample: of tokens sampled.
        train: of tokens in any pass of a training client, forward ones and those of weight 0 among them.
    """

    prefill: float
    sample: float
    train: float

    def of_training(self, num_tokens: int) -> float:
        """Dollars for passes of so many tokens by a training client.

        >>> Price(prefill=0.2, sample=0.6, train=0.44).of_training(2_000_000)
        0.88
        """
        return num_tokens * self.train / 1e6

    def of_sampling(self, sampled: Sampled) -> float:
        """Dollars for what was sampled, every prompt as if the service saw it first.

        >>> Price(prefill=0.2, sample=0.6, train=0.44).of_sampling(Sampled(1_000_000, 500_000))
        0.5
        """
        return (sampled.num_prefill_tokens * self.prefill + sampled.num_sample_tokens * self.sample) / 1e6


FREE = Price(0.0, 0.0, 0.0)


def price_of(model: str, base_url: str, table: str = "") -> Price | None:
    """The price of a model on the service that a config names; None where nobody said one.

    A table of the user's own goes before the project's, which holds for the hosted service only. A service on this
    machine costs nothing.

    Args:
        base_url: as in the config: a URL, `block:NAME`, `local`, or empty.
        table: path of a YAML or JSON file in the form of `TABLE`; empty for none.

    Raises:
        ConfigError: the table cannot be read, or is none.
    """
    if table and (found := _read(Path(table)).get(model)):
        return found
    host = urlsplit(service_url(base_url)).hostname or ""
    if host in _HERE:
        return FREE
    return _read(TABLE).get(model) if host.endswith(_HOSTED) else None


def priced_models() -> dict[str, Price]:
    """The models of the hosted service whose prices the project has."""
    return _read(TABLE)


def _read(path: Path) -> dict[str, Price]:
    try:
        rows = yaml.safe_load(path.read_text())
        return {
            row["tinker_id"]: Price(*(_dollars(row[key]) for key in ("prefill", "sample", "train"))) for row in rows
        }
    except OSError as error:
        raise ConfigError(
            f"The table of prices {path} could not be read ({error.strerror}): set budget.prices to one that can."
        ) from error
    except (yaml.YAMLError, TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"The table of prices {path} is none ({type(error).__name__}: {' '.join(str(error).split())[:200]}): write "
            "a list of {tinker_id, prefill, sample, train}, in dollars per million tokens, as https://tinker-docs."
            "thinkingmachines.ai/tinker/models.json has it."
        ) from error


def _dollars(value: Any) -> float:
    dollars = float(str(value).removeprefix("$").replace(",", ""))
    if not 0 <= dollars < float("inf"):
        raise ValueError(f"{value} is no price")
    return dollars
