"""What Prefect loads to know the blocks, by the entry point `prefect.collections`."""

from __future__ import annotations

from blocks.service import TinkerService
from blocks.storage import RunStorage
from blocks.tracking import MLflowTracking

__all__ = ["MLflowTracking", "RunStorage", "TinkerService"]
