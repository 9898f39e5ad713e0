"""Which traced terms mean the same on one datum as on a batch: those that look at one token, or one datum, at a time.

A term whose token values come from that token's inputs alone has the same values and gradients whatever else is in the
batch, so that the sum of its datums is the batch's. One that takes a mean over all tokens is another function datum by
datum, though it can be traced all the same. The operations below are known not to look beyond a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch.fx import Graph, Node

from objectives.errors import UntraceableError
from objectives.one_datum import BY_DATUM

Kind = Literal["number", "token", "several", "datum"]
"""What a node holds: no tensor of the datum, ``(T,)``, ``(T, K)``, or one number of the datum."""

_POINTWISE = """
abs absolute add addcdiv addcmul and_ asinh atan bool ceil celu clamp clamp_max clamp_min clip clone copysign cosh
detach div divide double elu eq erf erfc exp exp2 expm1 float floor floordiv fmax fmin fmod frac ge gelu greater
greater_equal gt hardsigmoid hardtanh heaviside invert isfinite isinf isnan le leaky_relu lerp less less_equal log log10
log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logsigmoid lt
masked_fill maximum minimum mod mul multiply nan_to_num ne neg negative not_equal ones_like or_ pos positive pow
reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign silu sinh softplus softsign sqrt square sub
subtract tanh threshold to true_divide truediv trunc type_as where xlogy xor zeros_like
"""
_ONE_BY_ONE = frozenset(_POINTWISE.split())
# Over the K targets of a position; never over its tokens.
_OVER_TARGETS = frozenset(("all", "amax", "amin", "any", "logsumexp", "mean", "prod", "sum"))
_KEEPING_TARGETS = frozenset(("cumsum", "log_softmax", "softmax"))


def check_pointwise(graph: Graph, ranks: Mapping[str, int]) -> Kind:
    """What a term's traced value is: ``"token"`` or ``"datum"``.

    Args:
        graph: without dead code; its output is the value.
        ranks: of the inputs, by name.

    Raises:
        UntraceableError: the value may depend on more than its token or its datum, or on nothing.
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
        raise UntraceableError("its value has K numbers at each position: add them up")
    return kinds[value]


def _kind(node: Node, kinds: Mapping[Node, Kind]) -> Kind:
    if node.op == "get_attr":
        raise UntraceableError("it makes a tensor of its own, which is not sent: write its numbers into the formula")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    given: set[Kind] = {kinds[each] for each in node.all_input_nodes if kinds[each] != "number"}
    if node.meta.get(BY_DATUM) and given == {"token"}:
        return "datum"
    if name == "getattr":
        return _attribute(node)
    if getattr(node.target, "__module__", None) != "math" and name in _ONE_BY_ONE:
        if len(given) > 1:
            raise UntraceableError(f"its {name} joins numbers of tokens with others of datums or targets")
        return given.pop() if given else "number"
    kind = _reshaped(name, node, given) or _over_targets(name, node, given)
    if kind is None:
        raise UntraceableError(f"its operation {name} may look beyond a single token")
    return kind


def _attribute(node: Node) -> Kind:
    if node.args[1] not in ("dtype", "device"):
        raise UntraceableError(f"it reads the {node.args[1]} of a tensor, which is another on the service")
    return "number"


def _reshaped(name: str, node: Node, given: set[Kind]) -> Kind | None:
    """Along the axis of the targets only."""
    everything = slice(None)
    match name, *given, node.args[1:]:
        case "getitem", "several", ((first, int()),) if first == everything:
            return "token"
        case ("getitem", "several", ((first, slice()),)) | ("getitem", "token", ((first, None),)) if (
            first == everything
        ):
            return "several"
        case "unsqueeze", "token", (-1,):
            return "several"
        case "cat", "several", _ if _dim(node) in (-1, 1):
            return "several"
    return None


def _over_targets(name: str, node: Node, given: set[Kind]) -> Kind | None:
    if given != {"several"} or _dim(node) not in (-1, 1):
        return None
    if name in _KEEPING_TARGETS or (name in _OVER_TARGETS and _keeps(node)):
        return "several"
    return "token" if name in _OVER_TARGETS else None


def _dim(node: Node) -> Any:
    return node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)


def _keeps(node: Node) -> bool:
    return bool(node.kwargs.get("keepdim", len(node.args) > 2 and node.args[2]))
