"""Prefect tasks, grouped by capability."""

import blocks  # noqa: F401  # before MLflow, whose telemetry it disables
from objectives.aliases import install

install()
