"""Whether an objective is one pass of the service or two, decided once, and what it has been uploaded as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch.fx import symbolic_trace

from objectives.base_loss import PolicyLoss
from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError, UntraceableError
from objectives.fused import FusedLoss, fuse, trace_base, trace_terms
from objectives.named_loss import NamedLoss, named_loss
from objectives.objective import Objective
from objectives.regularizer import Regularizer
from objectives.traced import Case, TracedTerm

# Of HTTP: the service knows the request and refuses it, or does not know it.
_REFUSED = (400, 404, 405, 422, 501)


class ServiceClient(Protocol):
    """What is used of a `tinker.ServiceClient`."""

    def create_custom_loss(self, fn: Any, input_ranks: Any) -> Any: ...


class ServiceLoss(Protocol):
    """A loss that the service has."""

    def data_at(self, outputs: Outputs, batch: Batch, weight_of: Callable[[Regularizer], float], /) -> list[Any]:
        """The service's datums with what the loss reads.

        Args:
            outputs: with any logprobs.
            weight_of: the weight of a term at the step.
        """
        ...

    def send(self, training_client: Any, data: list[Any]) -> Any:
        """Ask for the backward pass; the SDK's future."""
        ...


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A loss that was made for the objective.

    Attributes:
        fused: what it is.
        handle: the SDK's, for ``forward_backward_custom``.
    """

    fused: FusedLoss
    handle: Any

    def data_at(self, outputs: Outputs, batch: Batch, weight_of: Callable[[Regularizer], float]) -> list[Any]:
        return self.fused.data_at(outputs, batch, weight_of)

    def send(self, training_client: Any, data: list[Any]) -> Any:
        return training_client.forward_backward_custom(data, self.handle)


@dataclass(frozen=True, slots=True)
class _Traced:
    base: PolicyLoss | TracedTerm | None
    terms: Mapping[str, TracedTerm]


class OnePass:
    """The losses of an objective on one service client.

    A loss is made for each set of terms that are due together, when they first are. The weights of a step are inputs.

    Attributes:
        objective: the objective.
    """

    def __init__(self, objective: Objective, service_client: ServiceClient) -> None:
        self.objective, self._service_client = objective, service_client
        self._traced: dict[str, _Traced | NamedLoss | None] = {}
        self._uploaded: dict[tuple[str, ...], Uploaded] = {}
        self._notes: list[str] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="one-pass")

    def loss_at(self, step: int, outputs: Outputs, batch: Batch) -> ServiceLoss | None:
        """The loss of a step, which the service has; ``None`` where it takes two passes.

        Args:
            outputs: what there is beside the current logprobs; those are not read.

        Raises:
            ObjectiveError: the backend is ``server``, and the objective cannot be one pass; says why.
        """
        objective = self.objective
        if objective.backend == "client":
            return None
        case = Case.of(outputs, batch)
        there = str(case.ranks)
        if there not in self._traced:
            self._traced[there] = self._decide(outputs, batch)
        traced = self._traced[there]
        if traced is None or isinstance(traced, NamedLoss):
            return traced
        due = [each for each in objective.regularizers if each.due_at(step) and each.name in traced.terms]
        key = (there, *(each.name for each in due))
        if key not in self._uploaded:
            fused = fuse(case, traced.base, [traced.terms[each.name] for each in due])
            self._uploaded[key] = Uploaded(fused, _upload(self._service_client, fused))
        return self._uploaded[key]

    def then(self, pending: Any, measure: Callable[[Any], Any]) -> Any:
        """The SDK's future of what ``measure`` makes of an answer, in a thread, as soon as it is there."""
        measured: Future[Any] = Future()

        def work(answered: Future[Any]) -> None:
            try:
                measured.set_result(measure(answered.result()))
            except BaseException as error:  # noqa: BLE001 - whoever waits for the future raises it
                measured.set_exception(error)

        # One thread: the objective remembers its steps in their order.
        pending.future().add_done_callback(lambda answered: self._thread.submit(work, answered))
        return type(pending)(measured)

    def take_notes(self) -> list[str]:
        """What was decided since the last time, as sentences."""
        taken, self._notes = self._notes, []
        return taken

    def _decide(self, outputs: Outputs, batch: Batch) -> _Traced | NamedLoss | None:
        """What the objective is on the service; ``None`` where it takes two passes, with a note that says why."""
        objective = self.objective
        before, asked = objective.passes, objective.backend
        try:
            if before == 2:
                raise UntraceableError("its first steps took two")
            if (named := named_loss(objective)) is not None:
                objective.passes = 1
                self._notes.append("A step takes one pass of the service, which has the base loss by its name.")
                return named
            traced = _Traced(trace_base(objective, outputs, batch), trace_terms(objective, outputs, batch))
            # All of them, so that whether a step is one pass does not depend on what is due at it.
            _upload(self._service_client, fuse(Case.of(outputs, batch), traced.base, list(traced.terms.values())))
        except UntraceableError as error:
            if asked == "server":
                raise ObjectiveError(
                    f"The objective cannot be one pass, as the backend 'server' asks: {error}; take 'auto' or 'client'."
                ) from error
            changed = ", equal to those before to 1e-6 and not to the bit" if before == 1 else ""
            self._notes.append(f"A step takes two passes of the service{changed}, since {error}.")
            objective.passes = 2
            return None
        objective.passes = 1
        self._notes.append("A step takes one pass of the service: the base loss and every term trace.")
        return traced


_HANDLES: WeakKeyDictionary[ServiceClient, dict[tuple[str, str], Any]] = WeakKeyDictionary()


def _upload(service_client: ServiceClient, fused: FusedLoss) -> Any:
    """The handle of a loss on the service; a session takes each traced loss once, whoever made it."""
    function = fused.function()
    handles = _HANDLES.setdefault(service_client, {})
    key = (symbolic_trace(function).code, str(fused.ranks))
    if key not in handles:
        try:
            handle = service_client.create_custom_loss(function, fused.ranks).result()
        except Exception as error:
            if not _is_refusal(error):
                raise
            reason = " ".join(str(error).split()).rstrip(".")
            raise UntraceableError(f"the service refuses it as a loss ({reason})") from error
        if handle.loss_id is None:
            raise UntraceableError("the service does not run losses of its clients")
        handles[key] = handle
    return handles[key]


def _is_refusal(error: Exception) -> bool:
    """Whether the SDK, which this room does not import, or the service said no to the loss itself."""
    return (
        isinstance(error, ValueError)
        or getattr(error, "category", None) == "user"
        or getattr(error, "status_code", None) in _REFUSED
    )
