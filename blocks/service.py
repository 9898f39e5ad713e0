"""The Tinker service (hosted, compatible or local), as a Prefect block."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

import tinker
from prefect.blocks.core import Block
from pydantic import Field, SecretStr
from tinker.lib.base_url import resolve_base_url

from blocks.errors import ConfigError, ServiceError, reason
from blocks.reach import check_answers

T = TypeVar("T")


class TinkerService(Block):
    """A Tinker service: where it is and the key to it.

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
        description="How long the service may take to answer the first request before the run gives up.",
    )

    @property
    def resolved_url(self) -> str:
        """The URL in force, with environment and default filled in."""
        return resolve_base_url(self.base_url)

    def get_client(self) -> tinker.ServiceClient:
        """Open a session on the service; closing it is up to the caller, best by `with`.

        Raises:
            ServiceError: no answer within `connect_timeout_s`, or the key is refused.
        """
        client = tinker.ServiceClient(base_url=self.resolved_url, api_key=self._key)
        self._ask(lambda: client.holder)
        return client

    @contextmanager
    def session(self) -> Iterator[tinker.ServiceClient]:
        """`get_client`, whose session is finished at the end with how it went."""
        client = self.get_client()
        holder = client.holder
        status = "errored"
        try:
            yield client
            status = "success"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            # A service that is gone ends the session itself; the SDK's own close would wait for it for ever.
            with suppress(TimeoutError, tinker.TinkerError):
                client.close(status).result(timeout=10)
            holder.close()  # ends what still waits for an answer in other threads

    def check_model(self, model: str) -> None:
        """Refuse a base model that the service does not train.

        Raises:
            ConfigError: the model is unknown to the service.
            ServiceError: no answer within `connect_timeout_s`, or the key is refused.
        """
        names = self.models()
        if model not in names:
            raise ConfigError(
                f"The service at {self.resolved_url} has no model {model!r}; it offers {', '.join(names)}: "
                "set `model` to one of them."
            )

    def models(self) -> list[str]:
        """The base models that the service trains.

        Raises:
            ServiceError: no answer within `connect_timeout_s`, or the key is refused.
        """
        return sorted(self.context_lengths())

    def context_lengths(self) -> dict[str, int | None]:
        """The longest sequence, in tokens, of each of them; None where the service does not say.

        Raises:
            ServiceError: no answer within `connect_timeout_s`, or the key is refused.
        """
        capabilities = self._ask(
            lambda: tinker.RestClient(base_url=self.resolved_url, api_key=self._key).get_server_capabilities().result()
        )
        return {each.model_name: each.max_context_length for each in capabilities.supported_models if each.model_name}

    @property
    def _key(self) -> str | None:
        return self.api_key.get_secret_value() if self.api_key else None

    def _ask(self, request: Callable[[], T]) -> T:
        """Run a first request with a limit: the SDK itself goes on trying for minutes."""
        name = f"The Tinker service at {self.resolved_url}"
        absent = "check base_url and the network, or start a local one with `python -m engine`"
        check_answers(name, f"{self.resolved_url}/api/v1/healthz", self.connect_timeout_s, absent)
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(request())
            except BaseException as error:  # noqa: BLE001  # not handled here, but handed to whoever waits
                answer.set_exception(error)

        # A daemon, so that the process can end while the SDK is still trying.
        threading.Thread(target=run, name="tinker-connect", daemon=True).start()
        try:
            return answer.result(timeout=self.connect_timeout_s)
        except TimeoutError as error:
            raise ServiceError(f"{name} gave no good answer within {self.connect_timeout_s:g} s: {absent}.") from error
        except (tinker.AuthenticationError, tinker.PermissionDeniedError) as error:
            raise ServiceError(
                f"{name} refused the API key ({error.status_code}): "
                "set TINKER_API_KEY, or the key of the service block, to a valid one."
            ) from error
        except tinker.TinkerError as error:
            raise ServiceError(
                f"{name} could not be used ({reason(error)}): check base_url and TINKER_API_KEY."
            ) from error


def from_environment() -> bool:
    """True where TINKER_BASE_URL or TINKER_API_KEY name a service."""
    return bool(os.environ.get("TINKER_BASE_URL") or os.environ.get("TINKER_API_KEY"))
