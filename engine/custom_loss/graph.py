"""Graph of a traced loss: validated nodes in order, each a known operation on earlier nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinker.types.custom_loss_graph import CustomLossNode
from tinker.types.custom_loss_input import CustomLossInput

from engine.custom_loss.arguments import Ref, decode
from engine.custom_loss.operations import FUNCTIONS, METHODS, Operation
from engine.errors import RequestError

MAX_NODES = 1000
_MAX_INPUTS = 16
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
# torch does not validate output_size, and the operation would write beyond its memory.
_REJECTED_ARGUMENTS = ("out", "generator", "output_size")


@dataclass(frozen=True, slots=True)
class Call:
    """One operation: its node's name, its title in errors, and its arguments with `Ref` for other nodes."""

    name: str
    title: str
    operation: Operation
    args: tuple[object, ...]
    kwargs: dict[str, object]


@dataclass(frozen=True, slots=True)
class Graph:
    """Loss of one datum.

    Attributes:
        name: the client's name for the loss.
        ranks: rank of each input; the logprobs come first, the others are ``loss_fn_inputs``.
        calls: operations in the order they run.
        loss: name of the node with the loss.
        metrics: names of the nodes with the metrics, by ``custom/<name>:<reduction>``.
    """

    name: str
    ranks: Mapping[str, int]
    calls: Sequence[Call]
    loss: str
    metrics: Mapping[str, str]


def read_graph(name: str, inputs: Sequence[CustomLossInput], nodes: Sequence[CustomLossNode]) -> Graph:
    """Validate the graph sent by a client.

    Raises:
        RequestError: the graph is invalid; the message names the node, if one node is at fault.
    """
    title = f"The custom loss {name[:64]!r}"
    ranks = _read_inputs(title, inputs)
    num_operations = len(nodes) - len(ranks) - 1  # without the output
    if num_operations < 0:
        raise RequestError(
            f"{title} has {len(nodes)} nodes and {len(ranks)} inputs: send a node for each input, and the output."
        )
    if num_operations > MAX_NODES:
        raise RequestError(f"{title} has {num_operations} operations: use at most {MAX_NODES}.")
    seen: dict[str, None] = {}
    calls: list[Call] = []
    for node, expected in zip(nodes, [*ranks, *[None] * (len(nodes) - len(ranks))], strict=True):
        location = f"{title} is rejected at its node {node.name[:64]!r}"
        if node.name in seen:
            raise RequestError(f"{location}: another node has this name.")
        if expected is not None and (node.op, node.target) != ("placeholder", expected):
            raise RequestError(f"{location}: the input {expected!r} is expected here, in the declared order.")
        if expected is None and node is not nodes[-1]:
            calls.append(_read_call(location, node, seen))
        seen[node.name] = None
    loss, metrics = _read_output(title, nodes[-1], seen)
    return Graph(name, ranks, calls, loss, metrics)


def _read_inputs(title: str, inputs: Sequence[CustomLossInput]) -> dict[str, int]:
    ranks = {declared.name: int(declared.rank) for declared in inputs}
    if not inputs or inputs[0].name != "logprobs" or ranks["logprobs"] == 0 or len(ranks) != len(inputs):
        raise RequestError(
            f"{title} has the inputs {', '.join(ranks) or 'none'}: declare 'logprobs' first, of rank 1 or 2, and then "
            "each of the loss_fn_inputs it reads once."
        )
    if len(ranks) > _MAX_INPUTS or not all(_INPUT.fullmatch(name) for name in ranks):
        raise RequestError(
            f"{title} has {len(ranks)} inputs ({', '.join(ranks)[:200]}): use at most {_MAX_INPUTS}, named in at "
            "most 64 lowercase letters, digits and underscores, not beginning with a digit."
        )
    return ranks


def _read_call(location: str, node: CustomLossNode, seen: Mapping[str, None]) -> Call:
    known = {"call_function": FUNCTIONS, "call_method": METHODS}.get(node.op)
    if known is None:
        raise RequestError(f"{location}: it is of type {node.op}, but a loss consists of functions and methods only.")
    operation = known.get(node.target)
    if operation is None:
        raise RequestError(
            f"{location}: this engine does not support the operation {node.target[:100]!r}; use other operations, "
            "or run the loss client-side, as a callable (data, logprobs)."
        )
    try:
        args = tuple(decode(node.args, seen.__contains__))
        kwargs = decode({"dict": node.kwargs}, seen.__contains__)
    except RequestError as error:
        raise RequestError(f"{location}: {error}.") from error
    for rejected in _REJECTED_ARGUMENTS:
        if kwargs.pop(rejected, None) is not None:
            raise RequestError(f"{location}: the argument {rejected!r} is not supported.")
    if isinstance(kwargs.get("device"), str):  # such as "cuda"; graphs run on the CPU
        del kwargs["device"]
    return Call(node.name, node.target, operation, args, kwargs)


def _read_output(title: str, node: CustomLossNode, seen: Mapping[str, None]) -> tuple[str, dict[str, str]]:
    earlier = {name for name in seen if name != node.name}
    try:
        returned = decode(node.args, earlier.__contains__) if node.op == "output" else None
    except RequestError as error:
        raise RequestError(f"{title} is rejected at its output: {error}.") from error
    match returned:
        case [[Ref(loss), dict() as metrics]]:  # matches a list and a tuple
            pass
        case _:
            raise RequestError(f"{title} must end with an output of (loss, metrics), and the loss must be a node.")
    for key, value in metrics.items():
        if not _METRIC.fullmatch(key) or not isinstance(value, Ref):
            raise RequestError(
                f"{title} has the metric {key[:100]!r}: metrics must be tensors called custom/<name>:sum or "
                "custom/<name>:mean, in lowercase."
            )
    return loss, {key: value.name for key, value in metrics.items()}
