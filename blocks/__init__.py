"""Prefect blocks: the Tinker service, MLflow tracking and run storage. `prefect block register -m blocks`."""

from blocks.service import TinkerService
from blocks.storage import RunStorage
from blocks.tracking import MLflowTracking

__all__ = ["MLflowTracking", "RunStorage", "TinkerService"]
