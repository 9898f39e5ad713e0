"""Look up a flow by its name or import path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_type_hints

from prefect import Flow

from blocks.errors import ConfigError, reason
from flows.config.rlhf import RlhfConfig
from flows.config.train import TrainConfig
from objectives.config.aliases import current_path
from objectives.config.import_path import import_path
from objectives.config.import_policy import NotAllowedError

# Config of a flow whose runs a sweep can compare.
SweptConfig = TrainConfig | RlhfConfig


@dataclass(frozen=True, slots=True)
class TrainFlow:
    """Training flow, the type of its `config` parameter, and the module that defines it."""

    flow: Flow[..., Any]
    config_type: type[SweptConfig]
    module: str


def find_flow(path: str) -> TrainFlow:
    """Find a flow by name, such as `sft`, or by import path, `package.module:name`.

    Raises:
        ConfigError: The flow does not exist, a run of a deployment may not import it, or its config is neither a
            TrainConfig nor an RlhfConfig.

    >>> find_flow("sft").config_type.__name__
    'SftConfig'
    """
    location = current_path(path if ":" in path else f"flows.{path}:{path}")
    try:
        flow = import_path(location)
    except NotAllowedError as error:
        raise ConfigError(str(error)) from error
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"The flow {path!r} could not be imported ({reason(error)}): set the name of a flow of this project, such "
            "as sft, or package.module:name."
        ) from error
    config_type = get_type_hints(flow.fn).get("config") if isinstance(flow, Flow) else None
    if not isinstance(flow, Flow) or not (isinstance(config_type, type) and issubclass(config_type, SweptConfig)):
        raise ConfigError(
            f"{path!r} is no training flow: set a Prefect flow whose parameter `config` is a TrainConfig or "
            "an RlhfConfig."
        )
    return TrainFlow(flow, config_type, location.partition(":")[0])
