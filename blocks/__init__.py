"""Prefect blocks for the Tinker service, MLflow tracking and run storage. Register: `prefect block register -m blocks`.

Blocks load lazily: the Tinker SDK and MLflow take seconds to import, and most modules of this package need neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blocks.service import TinkerService
    from blocks.storage import RunStorage
    from blocks.tracking import MLflowTracking

__all__ = ["MLflowTracking", "RunStorage", "TinkerService"]

_MODULES = {"MLflowTracking": "blocks.tracking", "RunStorage": "blocks.storage", "TinkerService": "blocks.service"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
