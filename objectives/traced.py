"""A term as a function of one datum that torch.fx can follow, held to what the term is on a batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from objectives.batch import Batch, Outputs, unpack
from objectives.errors import ObjectiveError, UntraceableError
from objectives.estimators import ESTIMATORS
from objectives.evaluate import evaluate_term
from objectives.one_datum import OneDatum, TermTracer
from objectives.pointwise import Kind, check_pointwise
from objectives.reductions import sum_by_datum, trained_datums
from objectives.regularizer import Regularizer
from objectives.term import own_params

# Of the greatest number: between the two ways there is rounding, of float32.
_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Case:
    """What there is for a term to read of a datum.

    Attributes:
        ranks: of each input by name, the logprobs first: of `Outputs` and `Batch`, as far as they are given.
    """

    ranks: Mapping[str, int]

    @classmethod
    def of(cls, outputs: Outputs, batch: Batch) -> Case:
        """That of a batch; the logprobs of `outputs` need not be the current ones."""
        return cls({name: tensor.ndim for name, tensor in _packed(outputs, batch).items()})

    def mask(self, inputs: Mapping[str, Any]) -> Any:
        """The trained tokens of a datum, ``(T,)``, from tensors or proxies."""
        trained = inputs["weights"] != 0
        return trained.any(-1) if self.ranks["weights"] == 2 else trained


def split_inputs(outputs: Outputs, batch: Batch) -> list[dict[str, Tensor]]:
    """Of each datum the inputs of its `Case`, by name."""
    packed = {name: unpack(tensor, batch.offsets_D) for name, tensor in _packed(outputs, batch).items()}
    return [{name: parts_D[d] for name, parts_D in packed.items()} for d in range(batch.num_datums)]


def _packed(outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
    found = {
        "logprobs": outputs.logprobs_DT,
        "weights": batch.weights_DT,
        "target_tokens": batch.target_tokens_DT,
        "ref_logprobs": outputs.ref_logprobs_DT,
        "sampling_logprobs": outputs.sampling_logprobs_DT,
        "advantages": batch.advantages_DT,
    }
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def stand_ins(case: Case, inputs: Mapping[str, Any]) -> tuple[Outputs, OneDatum]:
    """What a term is traced on: the outputs and the batch of one datum, made of proxies."""
    outputs = Outputs(inputs["logprobs"], inputs.get("ref_logprobs"), inputs.get("sampling_logprobs"))
    datum = OneDatum(inputs.get("target_tokens"), inputs["weights"], case.mask(inputs), inputs.get("advantages"))
    return outputs, datum


@dataclass(frozen=True, slots=True)
class TracedTerm:
    """A term on one datum.

    Attributes:
        regularizer: the term.
        kind: ``"token"`` for a value per token, ``"datum"`` for one number.
        graph: what computes it.
        inputs: what it reads, in order.
    """

    regularizer: Regularizer
    kind: Kind
    graph: GraphModule
    inputs: tuple[str, ...]

    def loss(self, inputs: Mapping[str, Any], mask: Any, scale: Any) -> Any:
        """The datum's part of the weighted term, 0-d, of tensors or proxies.

        Args:
            mask: its trained tokens.
            scale: 0-d, as `scales` says.
        """
        # Not called but run: the call of a module by proxies would be one node, which no service takes.
        value = self.graph.forward(*(inputs[name] for name in self.inputs))
        if self.kind == "datum":
            return torch.where(scale != 0, value, 0.0) * scale
        return torch.where(mask, value, 0.0).sum() * scale

    def scales(self, batch: Batch, weight: float) -> Tensor:
        """What the weight and the reduction over the batch leave of each datum's sum (or number), float32 ``(D,)``."""
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
    """Trace a term, and try it on a batch.

    Args:
        outputs: with any logprobs.

    Raises:
        UntraceableError: it is not a sum over tokens or datums of what each of them says by itself, or torch.fx cannot
            follow it, or it is not itself when traced.
    """
    _refuse(regularizer)
    case = Case.of(outputs, batch)
    graph = _trace(regularizer, case)
    kind = check_pointwise(graph, case.ranks)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        if not node.users:
            graph.erase_node(node)
    inputs = tuple(node.name for node in placeholders if node.users)
    if "logprobs" not in inputs:
        raise UntraceableError("its value does not depend on the logprobs")
    traced = TracedTerm(regularizer, kind, GraphModule(torch.nn.Module(), graph), inputs)
    _try(traced, case, outputs, batch)
    return traced


def _refuse(regularizer: Regularizer) -> None:
    """Refuse what the spec or the declaration of a term says already."""
    term = regularizer.term
    if term.estimator not in (None, "unlikelihood"):
        raise UntraceableError(f"its estimator {term.estimator!r} compares the datums of a batch")
    if term.reduction == "none":
        raise UntraceableError("its value is one number for the whole batch")
    if term.prepare is not None:
        raise UntraceableError("it reads features that are prepared here")
    if inspect.iscoroutinefunction(term.evaluate):
        raise UntraceableError("it is an async function")
    if regularizer.execution in ("process", "dask", "ray") or regularizer.timeout_s is not None:
        raise UntraceableError("it has a process or a time limit of its own, which the service does not keep")
    if regularizer.on_error != "raise":
        raise UntraceableError(f"its on_error is {regularizer.on_error!r}, and one pass has all terms or none")


def _trace(regularizer: Regularizer, case: Case) -> Graph:
    term = regularizer.term

    def of_one(inputs: Mapping[str, Any]) -> Any:
        outputs, datum = stand_ins(case, inputs)
        returned = term.evaluate(outputs, datum, **own_params(term.evaluate, regularizer.params))
        value = returned[0] if isinstance(returned, tuple) else returned
        if term.estimator is None:
            return value
        estimator = ESTIMATORS[term.estimator]
        return estimator(outputs, datum, value.detach(), **own_params(estimator, regularizer.params))

    try:
        graph = TermTracer().trace(function_of(tuple(case.ranks), of_one))
    except UntraceableError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise UntraceableError(f"torch.fx cannot follow it ({type(error).__name__}: {reason})") from error
    graph.eliminate_dead_code()
    return graph


def function_of(names: tuple[str, ...], body: Any) -> Any:
    """``body``, which takes a mapping, as a function with these parameters: tracers read them off the signature."""
    listed = ", ".join(names)
    mapping = ", ".join(f"{name!r}: {name}" for name in names)
    return eval(f"lambda {listed}: body({{{mapping}}})", {"body": body})


def _try(traced: TracedTerm, case: Case, outputs: Outputs, batch: Batch) -> None:
    """Compare value and gradient with those of the term, at logprobs spread over all that occur."""
    size = outputs.logprobs_DT.numel()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    spread_DT = -torch.linspace(0.01, 10.0, size)[order].to(outputs.logprobs_DT).reshape_as(outputs.logprobs_DT)
    outputs = replace(outputs, logprobs_DT=spread_DT)
    try:
        expected = evaluate_term(traced.regularizer, outputs, batch, first_step=True)
        value, gradients_D = 0.0, []
        for inputs, scale in zip(split_inputs(outputs, batch), traced.scales(batch, 1.0), strict=True):
            inputs["logprobs"] = inputs["logprobs"].clone().requires_grad_()
            part = traced.loss(inputs, case.mask(inputs), scale)
            gradients_D.append(torch.autograd.grad(part, inputs["logprobs"])[0])
            value += part.item()
    except ObjectiveError as error:
        raise UntraceableError(f"it could not be tried ({str(error).rstrip('.')})") from error
    except RuntimeError as error:
        raise UntraceableError(f"it fails when traced ({' '.join(str(error).split())[:200].rstrip('.')})") from error
    gradient_DT = torch.cat(gradients_D)
    if not (_is_close(gradient_DT, expected.gradient_DT) and _is_close(torch.tensor(value), expected.value)):
        raise UntraceableError("traced, it has another value or gradient: it may read more than its arguments")


def _is_close(found: Tensor, expected: Tensor | float) -> bool:
    expected = torch.as_tensor(expected, dtype=found.dtype)
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())
