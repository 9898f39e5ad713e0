"""Tracing of terms with `torch.fx` as functions of one datum, verified against the term on a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from objectives.batch import Batch, Outputs, unpack
from objectives.errors import ObjectiveError, UntraceableError
from objectives.estimators import ESTIMATORS, Estimator
from objectives.evaluate import evaluate_term
from objectives.one_pass.pointwise import Kind, check_pointwise
from objectives.proxies import OneDatum, TensorLike, TermTracer
from objectives.reductions import sum_by_datum, trained_datums
from objectives.term import Regularizer, own_params

# Relative to the largest absolute value; float32 rounding differs between the two computations.
_TOLERANCE = 1e-4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InputSignature:
    """Inputs that are available to the terms of a datum.

    Attributes:
        ranks: number of dimensions of each given field of `Outputs` and `Batch` by name, the logprobs first.
    """

    ranks: Mapping[str, int]

    @classmethod
    def of(cls, outputs: Outputs, batch: Batch) -> InputSignature:
        """Return the signature of a batch; the values of the logprobs are ignored."""
        return cls({name: tensor.ndim for name, tensor in _packed(outputs, batch).items()})

    def mask(self, inputs: Mapping[str, TensorLike]) -> TensorLike:
        """Mask of the trained tokens of a datum, ``(T,)``."""
        trained = inputs["weights"] != 0
        return trained.any(-1) if self.ranks["weights"] == 2 else trained


def split_inputs(outputs: Outputs, batch: Batch) -> list[dict[str, Tensor]]:
    """Return the inputs of each datum by name."""
    packed = {name: unpack(tensor, batch.offsets_D) for name, tensor in _packed(outputs, batch).items()}
    return [{name: parts_D[d] for name, parts_D in packed.items()} for d in range(batch.num_datums)]


def _packed(outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
    tensors = {
        "logprobs": outputs.logprobs_DT,
        "weights": batch.weights_DT,
        "target_tokens": batch.target_tokens_DT,
        "ref_logprobs": outputs.ref_logprobs_DT,
        "sampling_logprobs": outputs.sampling_logprobs_DT,
        "advantages": batch.advantages_DT,
        "untempered_logprobs": batch.untempered_logprobs_DT,
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def make_datum_proxies(signature: InputSignature, inputs: Mapping[str, TensorLike]) -> tuple[Outputs, OneDatum]:
    """Make the outputs and the batch of one datum from proxies, as the arguments of a traced term."""
    outputs = Outputs(inputs["logprobs"], inputs.get("ref_logprobs"), inputs.get("sampling_logprobs"))
    optional = inputs.get("advantages"), inputs.get("untempered_logprobs")
    datum = OneDatum(inputs.get("target_tokens"), inputs["weights"], signature.mask(inputs), *optional)
    return outputs, datum


@dataclass(frozen=True, slots=True)
class TracedTerm:
    """Traced term as a function of one datum.

    Attributes:
        regularizer: the term.
        kind: ``"token"`` for a value per token, ``"datum"`` for one number.
        graph: the traced computation.
        inputs: names of its inputs, in order.
    """

    regularizer: Regularizer
    kind: Kind
    graph: GraphModule
    inputs: tuple[str, ...]

    def loss(self, inputs: Mapping[str, TensorLike], mask: TensorLike, scale: TensorLike) -> TensorLike:
        """Compute the datum's part of the weighted term, 0-d.

        Args:
            mask: mask of the trained tokens.
            scale: 0-d; see `scales`.
        """
        # Call forward directly: a module call on proxies becomes a single node, which the service rejects.
        value = self.graph.forward(*(inputs[name] for name in self.inputs))
        if self.kind == "datum":
            # The value of a datum without trained tokens, whose scale is 0, may be infinite or NaN.
            return torch.where(scale != 0, value, 0.0) * scale
        return torch.where(mask, value, 0.0).sum() * scale

    def scales(self, batch: Batch, weight: float) -> Tensor:
        """Compute the factor of each datum's sum (or number) from weight and reduction, float32 ``(D,)``."""
        counts_D = sum_by_datum(torch.ones(batch.num_tokens), batch)
        trained_D = trained_datums(batch).to(torch.float64)
        reduction = self.regularizer.term.reduction
        if reduction == "sum":
            scale_D = trained_D
        elif self.kind == "datum":
            scale_D = trained_D / trained_D.sum()
        elif reduction == "token_mean":
            scale_D = trained_D / counts_D.sum()
        else:
            scale_D = trained_D / counts_D.clamp(min=1) / trained_D.sum()
        return (weight * scale_D).float()


def trace_term(regularizer: Regularizer, outputs: Outputs, batch: Batch) -> TracedTerm:
    """Trace a term and verify it on a batch.

    Args:
        outputs: tensors of the batch; the values of the logprobs are ignored.

    Raises:
        UntraceableError: the term is not pointwise, its settings rule out tracing, `torch.fx` cannot trace it, or the
            traced function fails or has another value or gradient than the term on the batch.
    """
    _check_traceable(regularizer)
    signature = InputSignature.of(outputs, batch)
    graph = _trace(regularizer, signature)
    kind = check_pointwise(graph, signature.ranks)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        if not node.users:
            graph.erase_node(node)
    inputs = tuple(node.name for node in placeholders if node.users)
    if "logprobs" not in inputs:
        raise UntraceableError("its value does not depend on the logprobs")
    traced = TracedTerm(regularizer, kind, GraphModule(torch.nn.Module(), graph), inputs)
    _verify(traced, signature, outputs, batch)
    return traced


def _check_traceable(regularizer: Regularizer) -> None:
    """Reject terms whose spec or declaration rules out tracing."""
    term = regularizer.term
    if term.kind == "scored" and not (regularizer.estimator in ESTIMATORS and _estimator(regularizer).per_token):
        raise UntraceableError(f"its estimator {regularizer.estimator!r} compares the datums of a batch")
    if regularizer.metric is not None:
        raise UntraceableError(f"its target is on the metric {regularizer.metric!r}")
    if term.reduction == "none":
        raise UntraceableError("its value is one number for the whole batch")
    if term.prepare is not None:
        raise UntraceableError("it reads features that are prepared on the client")
    if inspect.iscoroutinefunction(term.evaluate):
        raise UntraceableError("it is an async function")
    if regularizer.execution == "process" or regularizer.timeout_s is not None:
        raise UntraceableError("it has a separate process or a time limit, which the service does not support")
    if regularizer.on_error != "raise":
        raise UntraceableError(f"its on_error is {regularizer.on_error!r}, but a single pass cannot skip a term")


def _estimator(regularizer: Regularizer) -> Estimator:
    assert regularizer.estimator is not None, "scored terms have an estimator"
    return ESTIMATORS[regularizer.estimator]


def _trace(regularizer: Regularizer, signature: InputSignature) -> Graph:
    term = regularizer.term

    def compute(inputs: Mapping[str, TensorLike]) -> TensorLike:
        outputs, datum = make_datum_proxies(signature, inputs)
        returned = term.evaluate(outputs, datum, **own_params(term.evaluate, regularizer.params))
        value: TensorLike = returned[0] if isinstance(returned, tuple) else returned
        if term.kind != "scored":
            return value
        estimate = _estimator(regularizer).function
        return estimate(outputs, datum, value.detach(), **own_params(estimate, regularizer.params))

    try:
        graph = TermTracer().trace(with_named_parameters(tuple(signature.ranks), compute))
    except UntraceableError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise UntraceableError(f"torch.fx cannot trace it ({type(error).__name__}: {reason})") from error
    graph.eliminate_dead_code()
    return graph


def with_named_parameters(names: tuple[str, ...], body: Callable[[Mapping[str, TensorLike]], T]) -> Callable[..., T]:
    """Wrap a function of a mapping as a function with named parameters, which tracers read from the signature."""
    parameters = ", ".join(names)
    mapping = ", ".join(f"{name!r}: {name}" for name in names)
    return eval(f"lambda {parameters}: body({{{mapping}}})", {"body": body})


def _verify(traced: TracedTerm, signature: InputSignature, outputs: Outputs, batch: Batch) -> None:
    """Compare value and gradient with those of the term, at logprobs spread over the usual range.

    On samples, the logprobs are spread around those of the sampler, so that no ratio of a long completion overflows.
    """
    size = outputs.logprobs_DT.numel()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    share_DT = torch.linspace(0.001, 1.0, size)[order].to(outputs.logprobs_DT).reshape_as(outputs.logprobs_DT)
    sampling_DT = outputs.sampling_logprobs_DT
    spread_DT = -10 * share_DT if sampling_DT is None else (sampling_DT + 0.5 - share_DT).clamp(max=-0.01)
    outputs = replace(outputs, logprobs_DT=spread_DT)
    try:
        expected = evaluate_term(traced.regularizer, outputs, batch, first_step=True)
        value, gradients_D = 0.0, []
        for inputs, scale in zip(split_inputs(outputs, batch), traced.scales(batch, 1.0), strict=True):
            inputs["logprobs"] = inputs["logprobs"].clone().requires_grad_()
            part = traced.loss(inputs, signature.mask(inputs), scale)
            gradients_D.append(torch.autograd.grad(part, inputs["logprobs"])[0])
            value += part.item()
    except ObjectiveError as error:
        raise UntraceableError(f"it failed on a test batch ({str(error).rstrip('.')})") from error
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise UntraceableError(f"the traced term failed on a test batch ({reason})") from error
    gradient_DT = torch.cat(gradients_D)
    if not (_is_close(gradient_DT, expected.gradient_DT) and _is_close(torch.tensor(value), expected.value)):
        raise UntraceableError(
            "the traced term has a different value or gradient, so it may depend on more than its arguments"
        )


def _is_close(actual: Tensor, expected: Tensor | float) -> bool:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    return bool((actual - expected).abs().max() <= _TOLERANCE * expected.abs().max())
