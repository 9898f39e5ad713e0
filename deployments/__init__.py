"""Commands and deployments: the `tinker-flows` command line, `tinker-flows up` and the setup of a Prefect server."""

import blocks  # noqa: F401  # before MLflow, whose telemetry it disables
