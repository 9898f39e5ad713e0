"""Decision between one and two passes of the service per step, and upload of the objective as a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

from torch.fx import symbolic_trace

from objectives.base_loss import PolicyLoss
from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError, UntraceableError
from objectives.objective import Objective
from objectives.one_pass.fused import FusedLoss, fuse, trace_base, trace_terms
from objectives.one_pass.named_loss import NamedLoss, find_named_loss
from objectives.one_pass.traced import InputSignature, TracedTerm
from objectives.sdk.futures import map_future
from objectives.sdk.protocols import (
    ApiFuture,
    ConcurrentFuture,
    Datum,
    FutureT,
    LossHandle,
    ServiceClient,
    TrainingClient,
)
from objectives.term import Regularizer

# HTTP status codes of a service that rejects the loss or does not support custom losses.
_REJECTED = (400, 404, 405, 422, 501)

T = TypeVar("T")
U = TypeVar("U")


class ServiceLoss(Protocol):
    """Loss that the service computes."""

    def build_data(self, outputs: Outputs, batch: Batch, weight_of: Callable[[Regularizer], float], /) -> list[Datum]:
        """Build the service's datums with the inputs of the loss.

        Args:
            outputs: tensors of the batch; the values of the logprobs are ignored.
            weight_of: function that returns the factor of a term, or of the base loss, in the sum.
        """
        ...

    def send(self, training_client: TrainingClient[FutureT], data: list[Datum]) -> FutureT:
        """Send the forward and backward pass; return the future of the SDK."""
        ...


@dataclass(frozen=True, slots=True)
class UploadedLoss:
    """Fused loss with the SDK's handle for ``forward_backward_custom``."""

    fused: FusedLoss
    handle: LossHandle

    def build_data(self, outputs: Outputs, batch: Batch, weight_of: Callable[[Regularizer], float]) -> list[Datum]:
        return self.fused.build_data(outputs, batch, weight_of)

    def send(self, training_client: TrainingClient[FutureT], data: list[Datum]) -> FutureT:
        return training_client.forward_backward_custom(data, self.handle)


@dataclass(frozen=True, slots=True)
class _Traced:
    """Base loss and terms that torch.fx has traced, before they are fused for a set of terms."""

    base: PolicyLoss | TracedTerm | None
    terms: Mapping[str, TracedTerm]


class OnePass:
    """Decides whether the steps of an objective take one pass, and provides the service's loss of each step.

    The first step uploads the loss with all terms. Each set of terms that are due at the same step has its own loss,
    uploaded at the first such step; a base loss that the service has by name is not uploaded. The weights of a step are
    inputs of the loss. In a loop of your own, use it as a context manager, or call `close` after the last
    result, to end the thread that computes the metrics of the terms.

    Attributes:
        objective: the objective.
    """

    def __init__(self, objective: Objective, service_client: ServiceClient) -> None:
        self.objective, self._service_client = objective, service_client
        self._traced: dict[str, _Traced | NamedLoss | None] = {}
        self._uploaded: dict[tuple[str, ...], UploadedLoss] = {}
        self._notes: list[str] = []
        self._last: ConcurrentFuture[object] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="one-pass")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def loss_at(self, step: int, outputs: Outputs, batch: Batch) -> ServiceLoss | None:
        """Return the service's loss for a step; None if the step takes two passes.

        Args:
            outputs: tensors of the batch; the values of the logprobs are ignored.

        Raises:
            ObjectiveError: the backend is ``server`` but the objective needs two passes; the message has the reason.
        """
        objective = self.objective
        if objective.backend == "client":
            return None
        signature = InputSignature.of(outputs, batch)
        signature_key = str(signature.ranks)
        if signature_key not in self._traced:
            self._traced[signature_key] = self._decide(outputs, batch)
        traced = self._traced[signature_key]
        if traced is None or isinstance(traced, NamedLoss):
            return traced
        due = [term.name for term in objective.due(step) if term.name in traced.terms]
        key = (signature_key, *due)
        if key not in self._uploaded:
            fused = fuse(signature, traced.base, [traced.terms[name] for name in due])
            self._uploaded[key] = UploadedLoss(fused, _upload(self._service_client, fused))
        return self._uploaded[key]

    def map_result(self, pending: ApiFuture[T], function: Callable[[T], U]) -> ApiFuture[U]:
        """Return an SDK future of ``function(pending.result())``, computed in a thread when the result arrives.

        The thread has the context variables of the caller.
        """
        # A single thread keeps the order of steps, on which the objective's state depends.
        mapped = map_future(pending, function, partial(self._thread.submit, copy_context().run))
        self._last = mapped.future()
        return mapped

    def wait_for_metrics(self) -> None:
        """Wait for the metrics of the last step, which set the weights of terms with a target.

        An error is not raised here, but by the future of that step.
        """
        if self._last is not None:
            self._last.exception()

    def close(self) -> None:
        """Compute the results that have arrived, then end the thread."""
        self._thread.shutdown()

    def pop_notes(self) -> list[str]:
        """Return the decisions since the last call, one sentence each."""
        notes, self._notes = self._notes, []
        return notes

    def _decide(self, outputs: Outputs, batch: Batch) -> _Traced | NamedLoss | None:
        """Trace the objective or find its named loss; None for two passes, with a note of the reason."""
        objective = self.objective
        previous_passes = objective.passes
        try:
            if previous_passes == 2:
                raise UntraceableError("the first steps of the run took two passes")
            if (named := find_named_loss(objective)) is not None:
                objective.passes = 1
                self._notes.append("A step takes one pass of the service, which has the base loss by name.")
                return named
            traced = _Traced(trace_base(objective, outputs, batch), trace_terms(objective, outputs, batch))
            # Upload all terms once, so that the decision does not depend on the terms due at this step.
            signature = InputSignature.of(outputs, batch)
            _upload(self._service_client, fuse(signature, traced.base, list(traced.terms.values())))
        except UntraceableError as error:
            if objective.backend == "server":
                raise ObjectiveError(
                    f"The objective cannot run in one pass as the backend 'server' requires, because {error}; set the "
                    "backend to 'auto' or 'client'."
                ) from error
            changed = "; gradients differ from those of the earlier steps by up to 1e-6" if previous_passes == 1 else ""
            self._notes.append(f"A step takes two passes of the service, because {error}{changed}.")
            objective.passes = 2
            self._traced = dict.fromkeys(self._traced)  # batches with other inputs take two passes, too
            return None
        objective.passes = 1
        self._notes.append("A step takes one pass of the service: the base loss and every term can be traced.")
        return traced


# Process-wide, because handles belong to the client's session: all objectives of a client share its uploads, and the
# entry ends with the client.
_HANDLES: WeakKeyDictionary[ServiceClient, dict[tuple[str, str], LossHandle]] = WeakKeyDictionary()


def _upload(service_client: ServiceClient, fused: FusedLoss) -> LossHandle:
    """Upload a loss to the service, once per session, and return its handle."""
    function = fused.function()
    handles = _HANDLES.setdefault(service_client, {})
    key = (symbolic_trace(function).code, str(fused.ranks))
    if key not in handles:
        try:
            handle = service_client.create_custom_loss(function, fused.ranks).result()
        except Exception as error:
            if not _is_rejection(error):
                raise
            reason = " ".join(str(error).split()).rstrip(".")
            raise UntraceableError(f"the service rejects the loss ({reason})") from error
        if handle.loss_id is None:
            raise UntraceableError("the service does not run custom losses")
        handles[key] = handle
    return handles[key]


def _is_rejection(error: Exception) -> bool:
    """Check whether the SDK or the service rejected the loss itself; the SDK's error types are not importable here."""
    return (
        isinstance(error, ValueError)
        or getattr(error, "category", None) == "user"
        or getattr(error, "status_code", None) in _REJECTED
    )
