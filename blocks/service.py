"""Prefect block for a Tinker service: hosted, compatible or local."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from blocks.errors import ConfigError, ServiceError, reason
from blocks.urls import check_no_credentials, check_reachable

if TYPE_CHECKING:
    import tinker

T = TypeVar("T")


class TinkerService(Block):
    """Address and API key of a Tinker service.

    Example:
        ```python
        from blocks import TinkerService

        service = TinkerService.load("BLOCK_NAME")
        with service.get_client() as session:
            training_client = session.create_lora_training_client("Qwen/Qwen3-8B").result()
        ```
    """

    _block_type_name = "Tinker Service"
    _block_type_slug = "tinker-flows-tinker-service"
    _description = "The Tinker service that does the GPU work: hosted, compatible, or the local engine."

    base_url: str | None = Field(
        default=None,
        title="Base URL",
        description="URL of the service; unset means TINKER_BASE_URL, and without it the hosted service.",
    )
    api_key: SecretStr | None = Field(
        default=None,
        title="API key",
        description="Key that starts with tml-; unset means TINKER_API_KEY or the key of `tinker auth login`.",
    )
    connect_timeout_s: float = Field(
        default=60.0,
        gt=0,
        title="Connect timeout (s)",
        description="Time limit for each of connecting, the health check and the first request; then the run fails.",
    )

    @property
    def resolved_url(self) -> str:
        """Effective URL: the field, the environment or the default.

        Raises:
            ConfigError: the URL has a user name or password.
        """
        from blocks.tinker_internals import resolve_base_url

        url = resolve_base_url(self.base_url)
        check_no_credentials(url, "The URL of the Tinker service", "remove it and set TINKER_API_KEY")
        return url

    def get_client(self) -> tinker.ServiceClient:
        """Open a session on the service. The caller closes it, preferably with `with`.

        Raises:
            ConfigError: the URL has a user name or password.
            ServiceError: no response within `connect_timeout_s`, or the service rejects the key.
        """
        import tinker

        client = tinker.ServiceClient(base_url=self.resolved_url, api_key=self._key)
        self._request(lambda: client.holder)
        return client

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Use this service for clients that the `with` body opens with neither URL nor key."""
        from blocks.default_service import default_service

        with default_service(self.resolved_url, self._key):
            yield

    @contextmanager
    def session(self) -> Iterator[tinker.ServiceClient]:
        """Open a session as `get_client` does; close it at the end of the `with` body and report how the body ended.

        Clients that the body opens with neither URL nor key use the same service.
        """
        import tinker

        client = self.get_client()
        holder = client.holder
        status = "errored"
        try:
            with self.as_default():
                yield client
            status = "success"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            # Without a timeout, the SDK would wait forever for a service that is down.
            with suppress(TimeoutError, tinker.TinkerError):
                client.close(status).result(timeout=10)
            holder.close()  # cancels requests that other threads still wait for

    def check_model(self, model: str) -> None:
        """Raise an error unless the service trains the base model `model`.

        Raises:
            ConfigError: the service does not offer the model, or the URL has a user name or password.
            ServiceError: no response within `connect_timeout_s`, or the service rejects the key.
        """
        names = self.models()
        if model not in names:
            raise ConfigError(
                f"The service at {self.resolved_url} has no model {model!r}; it offers {', '.join(names)}: "
                "set `model` to one of them."
            )

    def models(self) -> list[str]:
        """List the base models that the service trains.

        Raises:
            ConfigError: the URL has a user name or password.
            ServiceError: no response within `connect_timeout_s`, or the service rejects the key.
        """
        return sorted(self.context_lengths())

    def context_lengths(self) -> dict[str, int | None]:
        """Return the maximum context length of each model in tokens; None if the service does not report it.

        Raises:
            ConfigError: the URL has a user name or password.
            ServiceError: no response within `connect_timeout_s`, or the service rejects the key.
        """
        import tinker

        capabilities = self._request(
            lambda: tinker.RestClient(base_url=self.resolved_url, api_key=self._key).get_server_capabilities().result()
        )
        models = capabilities.supported_models
        return {model.model_name: model.max_context_length for model in models if model.model_name}

    @property
    def _key(self) -> str | None:
        return self.api_key.get_secret_value() if self.api_key else None

    def _request(self, request: Callable[[], T]) -> T:
        """Run a first request with a time limit; without one, the SDK retries for minutes."""
        import tinker

        name = f"The Tinker service at {self.resolved_url}"
        remedy = "check base_url and the network, or start a local one with `python -m engine`"
        check_reachable(name, f"{self.resolved_url}/api/v1/healthz", self.connect_timeout_s, remedy)
        response: Future[T] = Future()

        def run() -> None:
            try:
                response.set_result(request())
            except BaseException as error:  # noqa: BLE001  # raised in the waiting thread
                response.set_exception(error)

        # A daemon thread lets the process exit while the SDK still retries.
        threading.Thread(target=run, name="tinker-connect", daemon=True).start()
        try:
            return response.result(timeout=self.connect_timeout_s)
        except TimeoutError as error:
            raise ServiceError(
                f"{name} did not complete a request within {self.connect_timeout_s:g} s: {remedy}."
            ) from error
        except (tinker.AuthenticationError, tinker.PermissionDeniedError) as error:
            raise ServiceError(
                f"{name} rejected the API key ({error.status_code}): "
                "set TINKER_API_KEY, or the key of the service block, to a valid one."
            ) from error
        except tinker.TinkerError as error:
            raise ServiceError(
                f"{name} could not be used ({reason(error)}): check base_url and TINKER_API_KEY."
            ) from error


def is_set_in_environment() -> bool:
    """Return whether TINKER_BASE_URL or TINKER_API_KEY selects a service."""
    return bool(os.environ.get("TINKER_BASE_URL") or os.environ.get("TINKER_API_KEY"))
