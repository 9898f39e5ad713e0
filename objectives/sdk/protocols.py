"""Protocols of the Tinker SDK objects that this package uses, so that it needs no import of the SDK."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import Field
from typing import Any, ClassVar, Protocol, TypeVar

from torch import Tensor

T_co = TypeVar("T_co", covariant=True)


class TensorData(Protocol):
    """Part of `tinker.TensorData`."""

    def to_torch(self) -> Tensor: ...


class ModelInput(Protocol):
    """Part of `tinker.ModelInput`; chunks of text have ``tokens``, images do not."""

    @property
    def chunks(self) -> Sequence[object]: ...


class Datum(Protocol):
    """Part of `tinker.Datum`, a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def model_input(self) -> ModelInput: ...

    @property
    def loss_fn_inputs(self) -> Mapping[str, TensorData]: ...


DatumT = TypeVar("DatumT", bound=Datum)


class ConcurrentFuture(Protocol[T_co]):
    """Part of `concurrent.futures.Future`."""

    def result(self, timeout: float | None = None) -> T_co: ...

    def exception(self, timeout: float | None = None) -> BaseException | None: ...

    def add_done_callback(self, fn: Callable[[ConcurrentFuture[T_co]], object], /) -> None: ...


class ApiFuture(Protocol[T_co]):
    """Part of `tinker.APIFuture`."""

    def result(self, timeout: float | None = None) -> T_co: ...

    async def result_async(self, timeout: float | None = None) -> T_co: ...

    def __await__(self) -> Generator[Any, Any, T_co]: ...

    def future(self) -> ConcurrentFuture[T_co]: ...


class ForwardBackwardOutput(Protocol):
    """Part of `tinker.ForwardBackwardOutput`."""

    @property
    def loss_fn_output_type(self) -> str: ...

    @property
    def loss_fn_outputs(self) -> Sequence[Mapping[str, TensorData]]: ...

    @property
    def metrics(self) -> dict[str, float]: ...


FutureT_co = TypeVar("FutureT_co", bound=ApiFuture[ForwardBackwardOutput], covariant=True)
FutureT = TypeVar("FutureT", bound=ApiFuture[ForwardBackwardOutput])


class LossHandle(Protocol):
    """Part of the SDK's handle of a custom loss; ``loss_id`` is None if the service cannot run it."""

    @property
    def loss_id(self) -> str | None: ...


class Tokenizer(Protocol):
    """Part of a Hugging Face tokenizer."""

    def decode(self, token_ids: list[int], /) -> object: ...


class TrainingClient(Protocol[FutureT_co]):
    """Part of `tinker.TrainingClient`; ``FutureT_co`` is the SDK's future of a forward and backward pass.

    ``data`` and ``loss_fn`` have types of the SDK, which a protocol cannot name without importing them.
    """

    def get_tokenizer(self) -> Tokenizer: ...

    def forward(
        self, data: Any, loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> FutureT_co: ...

    def forward_backward(
        self, data: Any, loss_fn: Any, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> FutureT_co: ...

    def forward_backward_custom(self, data: Any, loss_fn: Any) -> FutureT_co: ...


class ServiceClient(Protocol):
    """Part of `tinker.ServiceClient`."""

    def create_custom_loss(self, fn: Callable[..., Any], input_ranks: Any) -> ApiFuture[LossHandle]: ...
