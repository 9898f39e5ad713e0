"""The exceptions of everything outside `objectives`.

TinkerFlowsError            what a user can mend; its message is one sentence for the user
├── ConfigError             (ValueError)    a config, data file or name that cannot be run
├── ServiceError            (RuntimeError)  the Tinker service, MLflow or Prefect refused or did not answer
│   ├── AbsentError                         no server answers at an address
│   ├── ServiceLostError                    the Tinker service failed in a way that a new client can get over
│   └── NotFiniteError                      an answer with NaN or infinity in it, or a request refused for one
│       └── PoisonedError                   the weights are to blame, not what was sent
├── GuardError          (RuntimeError)   a guard ended the run
│   └── RolledBackError                     a guard ended this attempt: the run goes on without the bad step
└── StorageError            (OSError)       what a run keeps could not be read or written
"""

from __future__ import annotations


class TinkerFlowsError(Exception):
    """Root of the errors a user can mend."""


class ConfigError(TinkerFlowsError, ValueError):
    """A config, a data file or a name that cannot be run."""


class ServiceError(TinkerFlowsError, RuntimeError):
    """A service that refused a request or did not answer."""


class AbsentError(ServiceError):
    """No server answers at an address: it is misspelt, or the server is away."""


class ServiceLostError(ServiceError):
    """A Tinker service that failed, or that lost the run's model: a new client from the last checkpoint goes on."""


class NotFiniteError(ServiceError):
    """An answer that holds NaN or infinity, or a request that was refused for one."""


class PoisonedError(NotFiniteError):
    """What is not finite comes of the weights, which an update before has broken."""


class GuardError(TinkerFlowsError, RuntimeError):
    """A guard that ended the run, before any checkpoint held what it is about."""


class RolledBackError(GuardError):
    """A guard that ended this attempt: opened again at its last checkpoint, the run passes over the bad step."""


class StorageError(TinkerFlowsError, OSError):
    """A run's directory that could not be read or written."""


def reason(error: BaseException) -> str:
    """What an exception of another library says, as a part of one sentence.

    >>> reason(ValueError("It is not\\n  so."))
    'It is not so'
    >>> reason(PermissionError(13, "Permission denied", "/root"))
    'Permission denied'
    >>> reason(TimeoutError())
    'TimeoutError'
    """
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    text = " ".join(text.split())
    return (text if len(text) <= 200 else f"{text[:200]}...").removesuffix(".")


def storage_error(verb: str, path: object, error: Exception) -> StorageError:
    """The sentence for storage that could not be used: `verb` is what was tried, as in "write"."""
    return StorageError(
        f"Could not {verb} {path} ({reason(error)}): mend that storage (its room, permissions or keys) and start the "
        "same command again; what was saved before is kept."
    )
