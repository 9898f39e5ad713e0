"""Secrets of the project home: the key of the engine and the login of the servers that it starts."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from blocks.errors import storage_error
from blocks.files.local import file_lock, open_private

USER = "tinker-flows"


@dataclass(frozen=True, slots=True)
class Login:
    """Login of the Prefect server and of the MLflow server."""

    user: str
    password: str

    @property
    def of_prefect(self) -> str:
        """Login in the form of Prefect, `USER:PASSWORD`."""
        return f"{self.user}:{self.password}"

    @property
    def exports(self) -> dict[str, str]:
        """Environment variables with which the clients of both servers log in."""
        return {
            "PREFECT_API_AUTH_STRING": self.of_prefect,
            "MLFLOW_TRACKING_USERNAME": self.user,
            "MLFLOW_TRACKING_PASSWORD": self.password,
        }


def server_login(home: Path) -> Login:
    """Return the login of the servers of a project home.

    Raises:
        StorageError: the file of the password cannot be written.
    """
    return Login(USER, permanent_secret(password_file(home)))


def password_file(home: Path) -> Path:
    """Return the file with the password of `server_login`."""
    return home / "servers.key"


def permanent_secret(path: Path, prefix: str = "") -> str:
    """Return the secret in a file; create the file if missing. The secret never changes, so exports stay valid.

    Raises:
        StorageError: the file cannot be written.
    """
    with file_lock(path.with_name(f".{path.name}.lock")):
        try:
            with open_private(path, "a+") as file:
                file.seek(0)
                secret = file.read()
                if not secret:
                    secret = prefix + secrets.token_urlsafe(24)
                    file.write(secret)
        except OSError as error:
            raise storage_error("write the secret to", path, error) from error
    return secret
