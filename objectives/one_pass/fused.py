"""Fusion of an objective into one loss per datum that the service computes, so that a step takes one pass, not two.

    batch ──> trace_terms (once) ──> fuse ──> create_custom_loss (once per set of terms due at the same step)
    step  ──> inputs of every datum: the tensors that the terms read, and a scale per term from weight and reduction

The scales are inputs, so a weight schedule needs no new upload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from objectives.base_loss import PolicyLoss
from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError, UntraceableError
from objectives.gradients.linearize import Linearized
from objectives.losses import cross_entropy
from objectives.objective import Objective
from objectives.one_pass.traced import (
    InputSignature,
    TracedTerm,
    make_datum_proxies,
    split_inputs,
    trace_term,
    with_named_parameters,
)
from objectives.proxies import TensorLike
from objectives.sdk.protocols import Datum
from objectives.term import BASE, Regularizer

# Limit of tinker 0.38, including the logprobs.
_MAX_INPUTS = 16
# Relative to the sum of the absolute per-token loss weights plus the absolute value of the loss. The service and the
# client both sum in float32, so smaller differences are rounding.
_TOLERANCE = 1e-3

Inputs: TypeAlias = Mapping[str, TensorLike]
"""Inputs of a loss by name: tensors, or `torch.fx` proxies of tensors while a loss is traced."""


@dataclass(frozen=True, slots=True)
class FusedLoss:
    """Base loss and traced terms as one loss of one datum.

    Attributes:
        signature: the available inputs.
        base: the base loss; ``None`` for cross_entropy.
        terms: the weighted terms.
        inputs: names of the inputs of the loss, the logprobs first.
    """

    signature: InputSignature
    base: PolicyLoss | TracedTerm | None
    terms: tuple[TracedTerm, ...]
    inputs: tuple[str, ...]

    @property
    def ranks(self) -> dict[str, int]:
        """Number of dimensions of every input, for `create_custom_loss`."""
        return {name: self.signature.ranks.get(name, 0) for name in self.inputs}

    def function(self) -> Callable[..., tuple[TensorLike, dict[str, TensorLike]]]:
        """Return the loss for `create_custom_loss`, ``(logprobs, *inputs) -> (loss, {})``."""

        def compute(inputs: Inputs) -> tuple[TensorLike, dict[str, TensorLike]]:
            mask = self.signature.mask(inputs)
            if self.base is None:
                loss = cross_entropy(inputs["logprobs"], inputs["weights"])
            elif isinstance(self.base, PolicyLoss):
                loss = self.base.compute_datum(*make_datum_proxies(self.signature, inputs))
            else:
                loss = self.base.loss(inputs, mask, inputs[_scale_name(0)])
            for number, term in enumerate(self.terms, start=1):
                loss = loss + term.loss(inputs, mask, inputs[_scale_name(number)])
            return loss, {}

        function = with_named_parameters(self.inputs, compute)
        function.__name__ = "objective"
        return function

    def build_data(self, outputs: Outputs, batch: Batch, weight_of: Callable[[Regularizer], float]) -> list[Datum]:
        """Build the service's datums with the inputs of the loss.

        Args:
            outputs: tensors of the batch; the values of the logprobs are ignored.
            weight_of: function that returns the factor of a term, or of the base loss, in the sum.
        """
        scales = {
            _scale_name(number): term.scales(batch, weight_of(term.regularizer)) for number, term in self._scaled()
        }
        data: list[Datum] = []
        for d, (datum, tensors) in enumerate(zip(batch.datums, split_inputs(outputs, batch), strict=True)):
            inputs: dict[str, object] = {name: tensors[name] for name in self.inputs if name in tensors}
            inputs |= {name: scale_D[d] for name, scale_D in scales.items()}
            del inputs["logprobs"]
            inputs["target_tokens"] = datum.loss_fn_inputs["target_tokens"]
            data.append(replace(datum, loss_fn_inputs=inputs))  # The SDK's datum converts tensors.
        return data

    def _scaled(self) -> list[tuple[int, TracedTerm]]:
        base = [(0, self.base)] if isinstance(self.base, TracedTerm) else []
        return [*base, *enumerate(self.terms, start=1)]


def fuse(signature: InputSignature, base: PolicyLoss | TracedTerm | None, terms: Sequence[TracedTerm]) -> FusedLoss:
    """Fuse the base loss and traced terms.

    Raises:
        UntraceableError: the loss has too many inputs.
    """
    required = {name for term in terms for name in term.inputs} | {"logprobs", "weights"}
    if isinstance(base, PolicyLoss):
        required |= {"sampling_logprobs", "advantages"}
        if base.correction and base.correction.reads_snapshot:
            required |= {"untempered_logprobs"} & set(signature.ranks)
    elif base is not None:
        required |= {*base.inputs, _scale_name(0)}
    required |= {_scale_name(number) for number in range(1, len(terms) + 1)}
    if len(required) > _MAX_INPUTS:
        raise UntraceableError(
            f"the {len(terms)} terms have {len(required)} inputs in total, but the service allows {_MAX_INPUTS}"
        )
    scales = [_scale_name(number) for number in range(len(terms) + 1)]
    inputs = tuple(name for name in (*signature.ranks, *scales) if name in required)
    return FusedLoss(signature, base, tuple(terms), inputs)


def trace_base(objective: Objective, outputs: Outputs, batch: Batch) -> PolicyLoss | TracedTerm | None:
    """Return the base loss as a function of one datum.

    Returns:
        None for cross_entropy, a `PolicyLoss` as it is, and any other loss traced.

    Raises:
        UntraceableError: the base loss cannot be traced.
    """
    if objective.base is None:
        return None
    if isinstance(objective.base.term.evaluate, PolicyLoss):
        return objective.base.term.evaluate
    return _trace(objective.base, outputs, batch)


def trace_terms(objective: Objective, outputs: Outputs, batch: Batch) -> dict[str, TracedTerm]:
    """Trace the terms that train on the batch itself, by name.

    Monitors and terms on sampled candidates are left out: both are evaluated on the client.

    Raises:
        UntraceableError: a term cannot be traced (the message names it), or the objective has a ``balance``.
    """
    if objective.balance is not None:
        raise UntraceableError("the `balance` needs the gradients of all terms before the update")
    traced = [term for term in objective.regularizers if term.term.kind != "monitor" and not term.on_candidates]
    return {regularizer.name: _trace(regularizer, outputs, batch) for regularizer in traced}


def check_trained(step: int, loss_sum: float, linearized: Linearized) -> None:
    """Check that the service's loss equals the objective as evaluated on the client.

    Args:
        loss_sum: the service's ``loss:sum``.
        linearized: the objective at the logprobs that the service returned.

    Raises:
        ObjectiveError: the values differ.
    """
    total = linearized.total
    size = float(linearized.loss_weights_DT.abs().sum()) + abs(total)
    if abs(loss_sum - total) > _TOLERANCE * size:
        raise ObjectiveError(
            f"At step {step} the service's loss was {loss_sum:g} but the objective's is {total:g}, so a term depends "
            "on more than its arguments, such as a clock or a counter; set the objective's backend to 'client'."
        )


def _trace(regularizer: Regularizer, outputs: Outputs, batch: Batch) -> TracedTerm:
    try:
        return trace_term(regularizer, outputs, batch)
    except UntraceableError as error:
        subject = "the base loss" if regularizer.name == BASE else f"term {regularizer.name!r}"
        raise UntraceableError(f"{subject} cannot be traced: {error}") from error


def _scale_name(number: int) -> str:
    return f"scale_{number}"
