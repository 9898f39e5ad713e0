"""Check that a traced term is pointwise: its values depend on one token, or one datum, at a time.

The service evaluates a loss datum by datum. A term whose value at a token depends only on this token's inputs, or on
sums over tokens of its datum that `objectives.reductions` computes, has the same values and gradients in any batch, so
the sum over datums equals the value of the batch. A term with, for example, a mean over all tokens can be traced, too,
but has another value when it is evaluated datum by datum. The operations listed below are known to be pointwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch.fx import Graph, Node

from objectives.errors import UntraceableError
from objectives.proxies import BY_DATUM, PREFIX_BY_DATUM

Kind = Literal["number", "token", "several", "datum"]
"""Value of a node. ``number`` is not computed from the datum, ``token`` is a tensor ``(T,)``, ``several`` is a tensor
``(T, K)``, and ``datum`` is one number per datum."""

_POINTWISE = """
abs absolute add addcdiv addcmul and_ asinh atan bool ceil celu clamp clamp_max clamp_min clip clone copysign cosh
detach div divide double elu eq erf erfc exp exp2 expm1 float floor floordiv fmax fmin fmod frac ge gelu greater
greater_equal gt hardsigmoid hardtanh heaviside invert isfinite isinf isnan le leaky_relu lerp less less_equal log log10
log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid lt
masked_fill maximum minimum mod mul multiply nan_to_num ne neg negative not_equal ones_like or_ pos positive pow
reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sinh softplus softsign sqrt square sub
subtract tanh threshold to true_divide truediv trunc type_as where xlogy xor zeros_like
"""
_POINTWISE_NAMES = frozenset(_POINTWISE.split())
# Reductions over the K targets of a position.
_OVER_TARGETS = frozenset(("all", "amax", "amin", "any", "logsumexp", "mean", "prod", "sum"))
_KEEPING_TARGETS = frozenset(("cumsum", "log_softmax", "softmax"))


def check_pointwise(graph: Graph, ranks: Mapping[str, int]) -> Kind:
    """Return the kind of a term's traced value, ``"token"`` or ``"datum"``.

    Args:
        graph: graph without dead code; its output is the value.
        ranks: number of dimensions of the inputs, by name.

    Raises:
        UntraceableError: the value may depend on more than one token or datum, is constant or has K numbers per
            position; or the graph has an operation that the service does not have.
    """
    kinds: dict[Node, Kind] = {}
    value = None
    for node in graph.nodes:
        if node.op == "placeholder":
            kinds[node] = "token" if ranks[node.name] == 1 else "several"
        elif node.op == "output":
            value = node.args[0]
        else:
            kinds[node] = _kind(node, kinds)
    if not isinstance(value, Node) or kinds[value] == "number":
        raise UntraceableError("its value does not depend on the datum")
    if kinds[value] == "several":
        raise UntraceableError("its value has K numbers per position; sum over them")
    return kinds[value]


def _kind(node: Node, kinds: Mapping[Node, Kind]) -> Kind:
    """Return the kind of a node's value, given the kinds of all earlier nodes."""
    if node.op == "get_attr":
        raise UntraceableError("it creates a tensor, which the service does not have; write its numbers as constants")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    input_kinds: set[Kind] = {kinds[source] for source in node.all_input_nodes if kinds[source] != "number"}
    if node.meta.get(BY_DATUM) and input_kinds == {"token"}:
        return "datum"
    if node.meta.get(PREFIX_BY_DATUM) and input_kinds == {"token"}:
        return "token"
    if name == "getattr":
        return _attribute(node)
    # `math.exp` has the name of a pointwise operation, but accepts only one number.
    if getattr(node.target, "__module__", None) != "math" and name in _POINTWISE_NAMES:
        if len(input_kinds) > 1:
            raise UntraceableError(f"its operation {name} combines values per token with values per datum or target")
        return input_kinds.pop() if input_kinds else "number"
    kind = _reshaped(name, node, input_kinds) or _over_targets(name, node, input_kinds)
    if kind is None:
        raise UntraceableError(f"its operation {name} may combine several tokens")
    return kind


def _attribute(node: Node) -> Kind:
    if node.args[1] not in ("dtype", "device"):
        raise UntraceableError(f"it reads the attribute {node.args[1]} of a tensor, which differs on the service")
    return "number"


def _reshaped(name: str, node: Node, input_kinds: set[Kind]) -> Kind | None:
    """Kind of an operation that reshapes along the axis of the targets; None for other operations."""
    everything = slice(None)
    match name, *input_kinds, node.args[1:]:
        case "getitem", "several", ((first, int()),) if first == everything:  # x[:, 0]
            return "token"
        # x[:, 1:] of several targets, or x[:, None] of one
        case ("getitem", "several", ((first, slice()),)) | ("getitem", "token", ((first, None),)) if (
            first == everything
        ):
            return "several"
        case "unsqueeze", "token", (-1,):
            return "several"
        case "cat", "several", _ if _dim(node) in (-1, 1):
            return "several"
    return None


def _over_targets(name: str, node: Node, input_kinds: set[Kind]) -> Kind | None:
    if input_kinds != {"several"} or _dim(node) not in (-1, 1):
        return None
    if name in _KEEPING_TARGETS or (name in _OVER_TARGETS and _keeps_dim(node)):
        return "several"
    return "token" if name in _OVER_TARGETS else None


def _dim(node: Node) -> object:
    return node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)


def _keeps_dim(node: Node) -> bool:
    return bool(node.kwargs.get("keepdim", len(node.args) > 2 and node.args[2]))
