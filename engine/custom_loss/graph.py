"""A traced loss as it was sent, checked: nodes in order, each of a known operation on what came before."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker.types.custom_loss_graph import CustomLossNode
from tinker.types.custom_loss_input import CustomLossInput

from engine.custom_loss.encoded import Ref, decode
from engine.custom_loss.operations import FUNCTIONS, METHODS, Operation
from engine.errors import RequestError

MAX_NODES = 1000
_MAX_INPUTS = 16
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
# The last one is believed, not checked: it would be memory that an operation writes to.
_REFUSED_ARGUMENTS = ("out", "generator", "output_size")


@dataclass(frozen=True, slots=True)
class Call:
    """One operation: its node's name, what it is called in errors, and its arguments with `Ref` for other nodes."""

    name: str
    title: str
    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Graph:
    """A loss of one datum.

    Attributes:
        name: what the client calls it.
        ranks: of each input, the logprobs first; the others are ``loss_fn_inputs``.
        calls: in the order they run.
        loss: the node whose value is the loss.
        metrics: by ``custom/<name>:<reduction>``, the node whose value each is.
    """

    name: str
    ranks: Mapping[str, int]
    calls: Sequence[Call]
    loss: str
    metrics: Mapping[str, str]


def read_graph(name: str, inputs: Sequence[CustomLossInput], nodes: Sequence[CustomLossNode]) -> Graph:
    """Check what a client sent.

    Raises:
        RequestError: whatever is wrong with it, by the name of the node.
    """
    title = f"The custom loss {name[:64]!r}"
    ranks = _read_inputs(title, inputs)
    if not 0 < len(nodes) - len(ranks) <= MAX_NODES:
        raise RequestError(
            f"{title} has {len(nodes)} nodes and {len(ranks)} inputs, where each input, at most {MAX_NODES} operations "
            "and the output are expected: make it smaller."
        )
    seen: dict[str, None] = {}
    calls: list[Call] = []
    for node, expected in zip(nodes, [*ranks, *[None] * (len(nodes) - len(ranks))], strict=True):
        where = f"{title} is refused at its node {node.name[:64]!r}"
        if node.name in seen:
            raise RequestError(f"{where}: another node has this name.")
        if expected is not None and (node.op, node.target) != ("placeholder", expected):
            raise RequestError(f"{where}: the input {expected!r} is expected there, in the order that was declared.")
        if expected is None and node is not nodes[-1]:
            calls.append(_read_call(where, node, seen))
        seen[node.name] = None
    loss, metrics = _read_output(title, nodes[-1], seen)
    return Graph(name, ranks, calls, loss, metrics)


def _read_inputs(title: str, inputs: Sequence[CustomLossInput]) -> dict[str, int]:
    ranks = {each.name: int(each.rank) for each in inputs}
    if not inputs or inputs[0].name != "logprobs" or ranks["logprobs"] == 0 or len(ranks) != len(inputs):
        raise RequestError(
            f"{title} takes {', '.join(ranks) or 'nothing'}: its inputs are 'logprobs' first, of rank 1 or 2, and then "
            "each of the loss_fn_inputs that it reads, once."
        )
    if len(ranks) > _MAX_INPUTS or not all(_INPUT.fullmatch(each) for each in ranks):
        raise RequestError(
            f"{title} has {len(ranks)} inputs: at most {_MAX_INPUTS} are offered, named in lowercase letters, digits "
            "and underscores."
        )
    return ranks


def _read_call(where: str, node: CustomLossNode, seen: Mapping[str, None]) -> Call:
    known = {"call_function": FUNCTIONS, "call_method": METHODS}.get(node.op)
    if known is None:
        raise RequestError(f"{where}: it is a {node.op}, and a loss consists of functions and methods only.")
    operation = known.get(node.target)
    if operation is None:
        raise RequestError(
            f"{where}: {node.target[:100]!r} is not an operation that this engine offers; write the loss with others, "
            "or run it client-side, as a callable (data, logprobs)."
        )
    try:
        args = tuple(decode(node.args, seen.__contains__))
        kwargs = decode({"dict": node.kwargs}, seen.__contains__)
    except RequestError as error:
        raise RequestError(f"{where}: {error}.") from error
    for refused in _REFUSED_ARGUMENTS:
        if kwargs.pop(refused, None) is not None:
            raise RequestError(f"{where}: the argument {refused!r} is not offered.")
    if isinstance(kwargs.get("device"), str):
        del kwargs["device"]
    return Call(node.name, node.target, operation, args, kwargs)


def _read_output(title: str, node: CustomLossNode, seen: Mapping[str, None]) -> tuple[str, dict[str, str]]:
    before = {name for name in seen if name != node.name}
    try:
        returned = decode(node.args, before.__contains__) if node.op == "output" else None
    except RequestError as error:
        raise RequestError(f"{title} is refused at its output: {error}.") from error
    match returned:
        case [(Ref(loss), dict() as metrics) | [Ref(loss), dict() as metrics]]:
            pass
        case _:
            raise RequestError(f"{title} has to end with an output of (loss, metrics), the loss a node.")
    for key, value in metrics.items():
        if not _METRIC.fullmatch(key) or not isinstance(value, Ref):
            raise RequestError(
                f"{title} has the metric {key[:100]!r}: it has to be a tensor called custom/<name>:sum or "
                "custom/<name>:mean, in lowercase."
            )
    return loss, {key: value.name for key, value in metrics.items()}
