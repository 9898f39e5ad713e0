"""Prefect blocks for the Tinker service, MLflow tracking and run storage. Register: `prefect block register -m blocks`.

Blocks load lazily: the Tinker SDK and MLflow take seconds to import, and most modules of this package need neither.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from objectives.config.aliases import install

if TYPE_CHECKING:
    from blocks.service import TinkerService
    from blocks.storage import RunStorage
    from blocks.tracking import MLflowTracking

# MLflow reads this when it is imported. Its telemetry changes os.environ in a thread; a request that reads the proxies
# from os.environ at that moment raises a KeyError, which ends the run.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

install()

__all__ = ["MLflowTracking", "RunStorage", "TinkerService"]

_MODULES = {"MLflowTracking": "blocks.tracking", "RunStorage": "blocks.storage", "TinkerService": "blocks.service"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
