"""The exceptions of everything outside `objectives`.

TinkerFlowsError            what a user can mend; its message is one sentence for the user
├── ConfigError             (ValueError)    a config, data file or name that cannot be run
├── ServiceError            (RuntimeError)  the Tinker service, MLflow or Prefect refused or did not answer
└── StorageError            (OSError)       what a run keeps could not be read or written
"""


class TinkerFlowsError(Exception):
    """Root of the errors a user can mend."""


class ConfigError(TinkerFlowsError, ValueError):
    """A config, a data file or a name that cannot be run."""


class ServiceError(TinkerFlowsError, RuntimeError):
    """A service that refused a request or did not answer."""


class StorageError(TinkerFlowsError, OSError):
    """A run's directory that could not be read or written."""
