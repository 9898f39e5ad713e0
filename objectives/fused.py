"""An objective as one loss of one datum, which a service runs by itself, so that a step is one pass and not two.

    batch ──> trace_terms (once) ──> fuse ──> create_custom_loss (once for each set of terms that are due together)
    step  ──> inputs of every datum: what the terms read, and the weight of each, divided as its reduction says

The weights are inputs, so that a schedule uploads nothing anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from objectives.base_loss import PolicyLoss
from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError, UntraceableError
from objectives.linearize import Linearized
from objectives.losses import cross_entropy
from objectives.objective import Objective
from objectives.regularizer import BASE, Regularizer
from objectives.traced import Case, TracedTerm, function_of, split_inputs, stand_ins, trace_term

# tinker 0.38's limit, the logprobs among them.
_MAX_INPUTS = 16
# Of the sizes of all that was added up, in float32.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class FusedLoss:
    """The base loss and some traced terms as one loss of one datum.

    Attributes:
        case: what there is to read.
        base: how the base loss is computed of a datum; ``None`` for cross_entropy.
        terms: the weighted terms, a base that is a term among them.
        inputs: the names of what the loss takes, the logprobs first.
    """

    case: Case
    base: PolicyLoss | TracedTerm | None
    terms: tuple[TracedTerm, ...]
    inputs: tuple[str, ...]

    @property
    def ranks(self) -> dict[str, int]:
        """Of every input, as `create_custom_loss` takes them."""
        return {name: self.case.ranks.get(name, 0) for name in self.inputs}

    def function(self) -> Callable[..., tuple[Any, dict[str, Any]]]:
        """The loss as `create_custom_loss` takes it: ``(logprobs, *inputs) -> (loss, {})``."""

        def compute(inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
            mask = self.case.mask(inputs)
            if self.base is None:
                loss = cross_entropy(inputs["logprobs"], inputs["weights"])
            elif isinstance(self.base, PolicyLoss):
                loss = self.base.of_one(*stand_ins(self.case, inputs))
            else:
                loss = self.base.loss(inputs, mask, inputs[_scale_of(0)])
            for number, term in enumerate(self.terms, start=1):
                loss = loss + term.loss(inputs, mask, inputs[_scale_of(number)])
            return loss, {}

        function = function_of(self.inputs, compute)
        function.__name__ = "objective"
        return function

    def data_at(self, outputs: Outputs, batch: Batch, weight_of: Callable[[Regularizer], float]) -> list[Any]:
        """The service's datums with what the loss reads.

        Args:
            outputs: with any logprobs.
            weight_of: the weight of a term at the step.
        """
        scales = {_scale_of(number): term.scales(batch, weight_of(term.regularizer)) for number, term in self._scaled()}
        data = []
        for d, (datum, found) in enumerate(zip(batch.datums, split_inputs(outputs, batch), strict=True)):
            inputs = {name: found[name] for name in self.inputs if name in found}
            inputs |= {name: scale_D[d] for name, scale_D in scales.items()}
            del inputs["logprobs"]
            inputs["target_tokens"] = datum.loss_fn_inputs["target_tokens"]
            data.append(replace(datum, loss_fn_inputs=inputs))  # the SDK's datum takes tensors
        return data

    def _scaled(self) -> list[tuple[int, TracedTerm]]:
        base = [(0, self.base)] if isinstance(self.base, TracedTerm) else []
        return [*base, *enumerate(self.terms, start=1)]


def fuse(case: Case, base: PolicyLoss | TracedTerm | None, terms: Sequence[TracedTerm]) -> FusedLoss:
    """Put traced terms together.

    Raises:
        UntraceableError: they have too many inputs.
    """
    read = {name for term in terms for name in term.inputs} | {"logprobs", "weights"}
    if isinstance(base, PolicyLoss):
        read |= {"sampling_logprobs", "advantages"}
    elif base is not None:
        read |= {*base.inputs, _scale_of(0)}
    read |= {_scale_of(number) for number in range(1, len(terms) + 1)}
    if len(read) > _MAX_INPUTS:
        raise UntraceableError(
            f"the {len(terms)} terms have {len(read)} inputs together, and a loss on the service takes {_MAX_INPUTS}"
        )
    scales = [_scale_of(number) for number in range(len(terms) + 1)]
    return FusedLoss(case, base, tuple(terms), tuple(name for name in (*case.ranks, *scales) if name in read))


def trace_base(objective: Objective, outputs: Outputs, batch: Batch) -> PolicyLoss | TracedTerm | None:
    """How the base loss is computed of one datum.

    Raises:
        UntraceableError: it cannot be.
    """
    if objective.base is None:
        return None
    if isinstance(objective.base.term.evaluate, PolicyLoss):
        return objective.base.term.evaluate
    return _trace(objective.base, outputs, batch)


def trace_terms(objective: Objective, outputs: Outputs, batch: Batch) -> dict[str, TracedTerm]:
    """Every term that trains, by name; monitors are computed here in any case.

    Raises:
        UntraceableError: one of them cannot be; names it.
    """
    if objective.balance is not None:
        raise UntraceableError("the `balance` needs the gradients of all terms before the update")
    training = [each for each in objective.regularizers if each.term.kind != "monitor"]
    return {each.name: _trace(each, outputs, batch) for each in training}


def check_trained(step: int, loss_sum: float, linearized: Linearized) -> None:
    """Hold what the service has trained to what the terms say here.

    Args:
        loss_sum: the service's ``loss:sum``.
        linearized: the same objective at the logprobs that it returned.

    Raises:
        ObjectiveError: they are two different objectives.
    """
    total = linearized.metrics["loss/total"]
    size = float(linearized.loss_weights_DT.abs().sum()) + abs(total)
    if abs(loss_sum - total) > _TOLERANCE * size:
        raise ObjectiveError(
            f"At step {step} the service's loss was {loss_sum:g} and the objective's is {total:g}: a term reads more "
            "than its arguments, such as a clock or a counter; set the objective's backend to 'client'."
        )


def _trace(regularizer: Regularizer, outputs: Outputs, batch: Batch) -> TracedTerm:
    try:
        return trace_term(regularizer, outputs, batch)
    except UntraceableError as error:
        what = "the base loss" if regularizer.name == BASE else f"term {regularizer.name!r}"
        raise UntraceableError(f"{what} does not trace: {error}") from error


def _scale_of(number: int) -> str:
    return f"scale_{number}"
