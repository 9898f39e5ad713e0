"""Prefect tasks, grouped by capability."""

import blocks  # noqa: F401  # before MLflow, whose telemetry it disables
from objectives.config.aliases import install

install()
