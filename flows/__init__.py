"""Flows, one module per method, and the parts they share."""

import blocks  # noqa: F401  # before MLflow, whose telemetry it disables
from objectives.config.aliases import install

install()
