"""Entry point `prefect.collections`: Prefect imports this module to discover the blocks."""

from __future__ import annotations

from blocks.service import TinkerService
from blocks.storage import RunStorage
from blocks.tracking import MLflowTracking

__all__ = ["MLflowTracking", "RunStorage", "TinkerService"]
