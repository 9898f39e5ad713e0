"""Exceptions that a user may see, of every package except `objectives` and `engine`, which have their own.

TinkerFlowsError            an error the user can fix; its message is one sentence
├── ConfigError             (ValueError)    an invalid config, data file or name
│   └── UserCodeError                       a user-supplied function failed; another attempt may succeed
├── CredentialsError                        a config contains a URL with a user name, a password or a secret
├── ServiceError            (RuntimeError)  the Tinker service, MLflow or Prefect rejected a request or did not respond
│   ├── UnreachableError                    no server responds at the address
│   ├── ServiceLostError                    the Tinker service failed; a new client can recover
│   └── NotFiniteError                      NaN or infinity in a response, or a request rejected because of it
│       └── PoisonedError                   the model's weights are not finite
├── EvaluatorError          (RuntimeError)  an evaluator raised an error or returned something other than metrics
├── GuardError              (RuntimeError)  a guard ended the run
│   └── RolledBackError                     a guard ended this attempt; the run resumes without the bad step
└── StorageError            (OSError)       a run directory could not be read or written
    └── LostRunError                        another process has taken over the run, or its directory was removed
ExplainedInterrupt          (KeyboardInterrupt)  a run was stopped, and the terminal has said how to continue it
"""

from __future__ import annotations

import os


def traceback_is_requested() -> bool:
    """Return whether `TINKER_FLOWS_TRACEBACK` asks for a traceback in addition to the error message."""
    return os.environ.get("TINKER_FLOWS_TRACEBACK", "0") not in ("", "0")


class TinkerFlowsError(Exception):
    """Base class of errors that the user can fix."""


class ConfigError(TinkerFlowsError, ValueError):
    """Invalid config, data file or name."""


class UserCodeError(ConfigError):
    """A user-supplied function failed, for the reason in the message; another attempt may succeed."""


class CredentialsError(TinkerFlowsError):
    """A config contains a URL with a user name, a password or a secret; the message does not show it.

    It is not a ValueError, because pydantic would turn it into an error that shows the value.
    """


class ServiceError(TinkerFlowsError, RuntimeError):
    """A service rejected a request or did not respond."""


class UnreachableError(ServiceError):
    """No server responds at the address: the address is misspelled or the server is down."""


class ServiceLostError(ServiceError):
    """The Tinker service failed or lost the run's model; a new client can resume from the last checkpoint."""


class NotFiniteError(ServiceError):
    """NaN or infinity in a response, or a request that the service rejected because of one."""


class PoisonedError(NotFiniteError):
    """NaN or infinity caused by the model's weights, which an earlier update corrupted."""


class EvaluatorError(TinkerFlowsError, RuntimeError):
    """An evaluator raised an error or returned something other than metrics."""


class GuardError(TinkerFlowsError, RuntimeError):
    """A guard ended the run before a checkpoint could contain the problem."""


class ExplainedInterrupt(KeyboardInterrupt):
    """Ctrl-C or a cancel of a run, after the terminal has said how to continue."""


class RolledBackError(GuardError):
    """A guard ended this attempt; the run resumes from its last checkpoint and skips the bad step."""


class StorageError(TinkerFlowsError, OSError):
    """A run directory or another file of the project could not be read or written."""


class LostRunError(StorageError):
    """This process may no longer write the run: another process has taken it over, or its directory was removed."""


def reason(error: BaseException) -> str:
    """Return the message of a third-party exception as a clause for a one-sentence error.

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


def first_line(error: BaseException) -> str:
    """Return an error's type and first line, without the traceback that Dask and Ray add.

    >>> first_line(ValueError("It is not so.\\n  File ..."))
    'ValueError: It is not so.'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def storage_error(verb: str, path: object, error: Exception, remedy: str = "") -> StorageError:
    """Build the error for a failed storage operation.

    Args:
        verb: the operation, as in "write".
        remedy: imperative clause if the cause is known.
    """
    remedy = remedy or "fix that storage (free space, permissions or keys)"
    return StorageError(
        f"Could not {verb} {path} ({reason(error)}): {remedy} and run the same command again; "
        "everything saved earlier is intact."
    )
