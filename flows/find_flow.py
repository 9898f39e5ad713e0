"""A flow by its name or import path, and the type of its config."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, get_type_hints

from prefect import Flow

from blocks.errors import ConfigError, reason
from flows.train_config import TrainConfig


@dataclass(frozen=True, slots=True)
class Found:
    """A flow that trains, the type of its `config`, and the module that it is in."""

    flow: Flow[..., Any]
    config_type: type[TrainConfig]
    module: str


def find_flow(path: str) -> Found:
    """The flow that a name, such as `sft`, or an import path, `package.module:name`, leads to.

    Raises:
        ConfigError: there is none, or its config is none of training.

    >>> find_flow("sft").config_type.__name__
    'SftConfig'
    """
    module, separator, name = path.partition(":")
    if not separator:
        module, name = f"flows.{path}", path
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"flow is {path!r}, which leads to nothing ({reason(error)}): give the name of a flow of this project, "
            "such as sft, or package.module:name."
        ) from error
    config_type = get_type_hints(found.fn).get("config") if isinstance(found, Flow) else None
    if not (isinstance(config_type, type) and issubclass(config_type, TrainConfig)):
        raise ConfigError(
            f"flow is {path!r}, which is no flow with a parameter `config` of a config of training (a TrainConfig)."
        )
    return Found(found, config_type, module)
