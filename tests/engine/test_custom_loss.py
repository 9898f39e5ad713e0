"""Traced losses compared with their Python functions, and invalid graphs."""

from __future__ import annotations

import json
import math
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from tinker.types import CreateCustomLossRequest, CustomLossInput
from tinker.types.custom_loss_graph import CustomLossNode

from engine.compute.datum import Datum
from engine.custom_loss.graph import MAX_NODES, read_graph
from engine.custom_loss.limits import Limits, TooLargeError
from engine.custom_loss.loss import CustomLoss
from engine.custom_loss.operations import FUNCTIONS
from engine.errors import EngineError, RequestError
from engine.service.custom_losses import CustomLossStore

RANKS = {"logprobs": 1, "advantages": 1, "beta": 0}


def sdk_request(fn: Any, ranks: dict[str, int]) -> CreateCustomLossRequest:
    """Return the request that the SDK uploads for a function, after a JSON round trip."""
    handle = trace_loss(fn, ranks, "session")  # pyright: ignore[reportArgumentType]
    request = CreateCustomLossRequest(
        session_id="session",
        custom_loss_seq_id=0,
        name=handle.name,
        inputs=list(handle.inputs),
        graph=encode_graph(handle),
    )
    return CreateCustomLossRequest.model_validate_json(request.model_dump_json())


def upload(fn: Any, ranks: dict[str, int]) -> CustomLoss:
    request = sdk_request(fn, ranks)
    return CustomLoss(read_graph(request.name, request.inputs, request.graph.nodes))


def make_datum(length: int, width: int | None = None, **inputs: torch.Tensor) -> Datum:
    shape = (length,) if width is None else (length, width)
    return Datum(torch.arange(length), torch.arange(math.prod(shape)).reshape(shape), inputs)


def arithmetic(logprobs, advantages, beta):
    x = (2 - logprobs) / (1 + advantages**2) - 3 * logprobs % 2 + abs(logprobs) / 0.5
    return (x * beta).sum() + -logprobs.mean(), {"custom/x:sum": x.sum()}


def slices(logprobs, advantages, beta):
    n = logprobs.shape[0]
    pairs = logprobs[:, None] - logprobs[None]
    x = (
        logprobs[1:, ...] * advantages[:-1]
        + logprobs[::2].sum()
        + logprobs[[0, -1]].sum()
        + logprobs[advantages > 0].sum()
    )
    return x.sum() + pairs.tril().exp().sum() / n + math.log(n) * logprobs[-1], {}


def reductions(logprobs, advantages, beta):
    best, where = torch.max(logprobs, dim=0)
    spread = logprobs.std() + torch.logsumexp(logprobs, 0) + logprobs.cumsum(0).amax() + torch.var_mean(logprobs)[0]
    order = torch.argsort(advantages)
    return best + spread + logprobs.gather(0, order)[:2].prod() + where * 0.0, {"custom/best:mean": best.detach()}


def functional(logprobs, advantages, beta):
    x = F.softplus(logprobs).sum() + F.relu(logprobs + 1).mean() - F.logsigmoid(beta * logprobs).sum()
    y = F.huber_loss(logprobs, advantages, reduction="sum") + F.mse_loss(logprobs, advantages)
    z = F.log_softmax(logprobs, dim=0)[0] + torch.softmax(logprobs, 0).max() + F.gelu(logprobs).sum()
    return x + y + z + F.binary_cross_entropy_with_logits(logprobs, advantages.sigmoid()), {}


def special(logprobs, advantages, beta):
    x = torch.special.expit(logprobs) + torch.special.xlogy(advantages.abs(), logprobs.exp()) + torch.erf(logprobs)
    return x.sum() + torch.linalg.vector_norm(logprobs) + torch.norm(logprobs) + torch.fft.rfft(
        logprobs
    ).abs().sum(), {}


def shapes(logprobs, advantages, beta):
    both = torch.cat((logprobs, advantages)).view(2, -1)
    stacked = torch.stack([logprobs, advantages], dim=1).transpose(0, 1).reshape(-1)[:6]
    rows = both.unsqueeze(0).expand(3, -1, -1).permute(2, 0, 1).flatten()
    first, second = torch.split(logprobs, [1, 5])
    return (both @ stacked).sum() + rows.sum() + first.sum() * second.sum() + logprobs.repeat(2).sum(), {}


def creations(logprobs, advantages, beta):
    n = logprobs.shape[0]
    ramp = torch.arange(n, device=logprobs.device, dtype=torch.float32) / n
    ones = torch.ones_like(logprobs) + logprobs.new_zeros(n) + torch.full((n,), 0.5, dtype=logprobs.dtype)
    weights = torch.where(advantages > 0, ones, float("-inf")).clamp(min=-2).to(torch.float64)
    return (weights * ramp.double() * logprobs).sum(), {"custom/n:sum": ramp.sum()}


def clipped(logprobs, advantages, beta):
    ratio = torch.exp(logprobs - beta)
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    weight = (ratio.detach() * 2).clamp_(max=3.0)
    return -(objective + weight * advantages * logprobs).sum(), {"custom/clipped:mean": (ratio > 1.2).float().mean()}


def in_place(logprobs, advantages, beta):
    x = logprobs * 2
    x.mul_(advantages).add_(1.0)
    return x.masked_fill(advantages < 0, 0.0).square().sum(), {}


LOSSES = [arithmetic, slices, reductions, functional, special, shapes, creations, clipped, in_place]


@pytest.mark.parametrize("fn", LOSSES)
def test_traced_loss_equals_its_python_function(fn) -> None:
    generator = torch.Generator().manual_seed(0)
    loss = upload(fn, RANKS)
    advantages, logprobs = torch.randn(2, 6, generator=generator)
    logprobs = -logprobs.abs()
    datum = loss.prepare(make_datum(6, advantages=advantages, beta=torch.tensor([0.3])), 0)
    leaves = [logprobs.clone().requires_grad_() for _ in range(2)]
    value = loss.compute(leaves[0], [datum])
    value.total.backward()
    expected, metrics = fn(leaves[1] * 1, advantages, torch.tensor(0.3))
    expected.backward()
    assert value.total.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=1e-6, atol=0)
    assert value.metrics_B == [{key: pytest.approx(metric.item(), rel=1e-6) for key, metric in metrics.items()}]


def test_several_targets_per_token_sum_over_datums() -> None:
    def wide(logprobs, target_tokens):
        return (logprobs.logsumexp(-1) * target_tokens[:, 0]).sum(), {"custom/width:mean": (logprobs * 0 + 1).sum(1)[0]}

    loss = upload(wide, {"logprobs": 2, "target_tokens": 2})
    data = [make_datum(3, 2), make_datum(2, 4)]
    data = [loss.prepare(Datum(d.tokens_T, d.targets, {"target_tokens": d.targets}), i) for i, d in enumerate(data)]
    logprobs = torch.randn(14)
    value = loss.compute(logprobs, data)
    parts = [logprobs[:6].reshape(3, 2), logprobs[6:].reshape(2, 4)]
    expected = sum(wide(part, d.targets)[0] for part, d in zip(parts, data, strict=True))
    assert value.total.item() == pytest.approx(float(expected), rel=1e-6)
    assert value.metrics_B == [{"custom/width:mean": 2.0}, {"custom/width:mean": 4.0}]
    assert bool(loss.trained_mask(data[0]).all())


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"beta": torch.tensor(1.0)}, r"Datum 3 has no advantages in its loss_fn_inputs, but the custom loss"),
        ({"beta": torch.ones(6), "advantages": torch.ones(6)}, "Datum 3 has beta of rank 1, .* declares rank 0"),
        ({"beta": torch.ones(1), "advantages": torch.ones(6, 1)}, "Datum 3 has advantages of rank 2"),
    ],
)
def test_error_names_the_invalid_datum(inputs, message) -> None:
    with pytest.raises(RequestError, match=message):
        upload(arithmetic, RANKS).prepare(make_datum(6, **inputs), 3)


def run(fn: Any, length: int = 6, **changes: torch.Tensor) -> float:
    loss = upload(fn, RANKS)
    inputs = {"advantages": torch.ones(length), "beta": torch.ones(1), **changes}
    datum = loss.prepare(make_datum(length, **inputs), 0)
    return loss.compute(-torch.rand(length).requires_grad_(), [datum]).total.item()


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda logprobs, advantages, beta: (logprobs * 1, {}), "returned torch.float32 of shape (6,) as its loss"),
        (lambda logprobs, advantages, beta: ((logprobs > 0).sum(), {}), "returned torch.int64 of shape () as its loss"),
        (lambda logprobs, advantages, beta: (logprobs.shape[0] * 1, {}), "returned a int as its loss"),
        (lambda logprobs, advantages, beta: (advantages.sum(), {}), "does not depend on the logprobs"),
        (lambda logprobs, advantages, beta: (logprobs.detach().sum(), {}), "does not depend on the logprobs"),
        (
            lambda logprobs, advantages, beta: (logprobs.sum(), {"custom/a:sum": logprobs}),
            "returned torch.float32 of shape (6,) as custom/a:sum",
        ),
        (
            lambda logprobs, advantages, beta: ((logprobs[:2] * advantages[:3]).sum(), {}),
            "failed at mul (operator.mul) on a datum of 6 tokens: The size of tensor a (2) must match",
        ),
        (lambda logprobs, advantages, beta: (logprobs[10], {}), "failed at getitem (operator.getitem)"),
        (lambda logprobs, advantages, beta: (logprobs.gather(0, advantages.long() * 99).sum(), {}), "failed at gather"),
        (lambda logprobs, advantages, beta: (logprobs.grad.sum(), {}), "the attribute 'grad' is not supported"),
        (
            lambda logprobs, advantages, beta: (logprobs.sum() * (logprobs.shape[0] ** 999), {}),
            "failed at pow_1 (operator.pow) on a datum of 6 tokens: 6 ** 999 is beyond",
        ),
    ],
)
def test_error_names_the_failing_node(fn, message) -> None:
    with pytest.raises(RequestError) as error:
        run(fn)
    assert message in str(error.value)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def huge_constant(logprobs, advantages, beta):
    return logprobs.sum() + torch.zeros(logprobs.shape[0] * 2**40).sum(), {}


def huge_without_device(logprobs, advantages, beta):
    return logprobs.sum() + torch.full((10**5, logprobs.shape[0] * 10**5), 1.0).sum(), {}


def huge_pairs(logprobs, advantages, beta):
    return (logprobs[:, None] * advantages).sum(), {}


def huge_repeat(logprobs, advantages, beta):
    return logprobs.repeat(2**30).sum(), {}


def huge_expand(logprobs, advantages, beta):
    return logprobs[:, None].expand(-1, 2**40).sum(), {}


def huge_index(logprobs, advantages, beta):
    pairs = (logprobs[:, None] * advantages[None]) > 9
    return logprobs[pairs.long()][:, pairs.long()].sum(), {}


def huge_inside(logprobs, advantages, beta):
    m = logprobs[:, None] + advantages[None, :400]
    return torch.einsum("ij,kl,ik,jl->", m, m, m, m), {}


def huge_by_value(logprobs, advantages, beta):
    return logprobs.repeat_interleave(advantages.long() * 10**9).sum(), {}


def huge_one_hot(logprobs, advantages, beta):
    return (F.one_hot(advantages.long() * 10**9, 10**10) * logprobs[:, None]).sum(), {}


def many_indices(logprobs, advantages, beta):
    x = (logprobs[:, None] * advantages).reshape(-1, 1, 1, 1, 1, 1, 1, 1)
    return logprobs.sum() + x.nonzero().sum(), {}


def many_indices_by_where(logprobs, advantages, beta):
    x = (logprobs[:, None] * advantages).reshape(-1, 1, 1, 1, 1, 1, 1, 1)
    return logprobs.sum() + torch.where(x)[0].sum(), {}


def many_pieces(logprobs, advantages, beta):
    return torch.zeros(logprobs.shape[0] * 10**6).split(1)[0].sum() + logprobs.sum(), {}


def many_results(logprobs, advantages, beta):
    x = logprobs[:, None] * advantages[:4000]
    for _ in range(20):
        x = x + 1
    return x.sum(), {}


@pytest.mark.parametrize(
    ("fn", "length"),
    [
        (huge_constant, 6),
        (huge_without_device, 6),
        (huge_pairs, 5000),
        (huge_repeat, 6),
        (huge_expand, 6),
        (huge_index, 400),
        (huge_inside, 400),
        (huge_by_value, 6),
        (huge_one_hot, 6),
        (many_indices, 2000),
        (many_indices_by_where, 2000),
        (many_pieces, 6),
        (many_results, 4000),
    ],
)
def test_oversized_values_are_rejected_before_allocation(fn, length) -> None:
    with pytest.raises(RequestError, match=r"failed at .*(more than|not supported|without output_size)"):
        run(fn, length)


def pairs(logprobs, advantages):
    return logprobs[:, None] * advantages


def slow_distances(logprobs, advantages, beta):
    x = pairs(logprobs, advantages)
    return torch.cdist(x, x, p=1.5).sum(), {}


def slow_norm(logprobs, advantages, beta):
    return torch.norm(pairs(logprobs, advantages), p="nuc"), {}


def slow_einsum(logprobs, advantages, beta):
    x = pairs(logprobs, advantages)
    return torch.einsum("ij,jk,kl,lm->im", x, x, x, x).sum(), {}


def slow_differences(logprobs, advantages, beta):
    return torch.diff(pairs(logprobs, advantages).flatten(), 10**6).sum(), {}


def slow_series(logprobs, advantages, beta):
    return torch.special.gammainc(advantages, pairs(logprobs, advantages)).sum(), {}


def slow_means(logprobs, advantages, beta):
    x = torch.outer(logprobs, advantages)
    return sum((x.mean() for _ in range(100)), start=logprobs.sum()), {}


def slow_log_sums(logprobs, advantages, beta):
    x = torch.outer(logprobs, advantages)
    total = logprobs.sum()
    for _ in range(100):
        total = total + torch.logsumexp(x, [0, 1])
    return total, {}


@pytest.mark.parametrize(
    "fn", [slow_distances, slow_norm, slow_einsum, slow_differences, slow_series, slow_log_sums, slow_means]
)
def test_work_of_minutes_is_rejected_before_it_runs(fn) -> None:
    """Without a limit each loss computes for minutes."""
    with pytest.raises(RequestError, match=r"failed at .* takes about .* FLOPs, more than 6.2e\+11"):
        run(fn, 4096)


def test_work_is_limited_for_all_datums_together(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = upload(arithmetic, RANKS)
    datum = loss.prepare(make_datum(6, advantages=torch.ones(6), beta=torch.ones(1)), 0)
    monkeypatch.setattr("engine.custom_loss.limits.MAX_FLOPS", 10**8)
    loss.compute(-torch.rand(6), [datum])
    with pytest.raises(RequestError, match="on the datums that are computed together"):
        loss.compute(-torch.rand(60), [datum] * 10)


@pytest.mark.parametrize(
    ("operation", "shapes", "expected"),
    [
        (torch.matmul, [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
        (torch.bmm, [(2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
        (torch.addmm, [(3, 7), (3, 5), (5, 7)], 2 * 3 * 5 * 7),
        (torch.exp, [(3, 5)], 256 * 15),
        (torch.logsumexp, [(3, 5)], 256 * 15),
        (torch.linalg.vector_norm, [(3, 5)], 256 * 15),
        (torch.Tensor.add_, [(3, 5)], 32 * 15),
        (FUNCTIONS["operator.mul"], [(3, 5)], 32 * 15),
        (FUNCTIONS["operator.pow"], [(3, 5)], 256 * 15),
        (torch.lgamma, [(3, 5)], 1024 * 15),
        (torch.add, [(3, 1), (5,)], 32 * 15),
        (torch.sort, [(3, 5)], 1024 * 15),
    ],
)
def test_work_is_estimated(operation, shapes, expected) -> None:
    limits = Limits()
    limits.check_before(operation, tuple(torch.zeros(shape) for shape in shapes), {})
    assert limits._flops == expected + 2**20


ROW = torch.zeros(1, 2**14)
FLAGS, INDEX, MASK = ROW > 0, torch.zeros(2**11).long(), torch.ones(1).bool()


@pytest.mark.parametrize(
    ("operation", "args"),
    [
        (torch.quantile, (ROW, torch.zeros(2**11), 0)),
        (torch.Tensor.nanquantile, (ROW, torch.zeros(2**11), 0)),
        (operator.getitem, (FLAGS, INDEX * 0)),
        (operator.getitem, (ROW[:, None], (MASK, INDEX))),
        (operator.getitem, (ROW[:, None].expand(4, -1, -1), (MASK.expand(4), [0] * 1024))),
        (operator.getitem, (ROW, [INDEX, FLAGS[:, 0]])),
    ],
)
def test_results_that_repeat_their_input_are_rejected_before_allocation(operation, args) -> None:
    with pytest.raises(TooLargeError, match="a result would have"):
        Limits().check_before(operation, args, {})


@pytest.mark.parametrize("index", [FLAGS, (MASK, slice(0, 9)), (slice(None), FLAGS[0]), (MASK, [0, 1, 2], None)])
def test_masks_are_accepted(index) -> None:
    limits = Limits()
    limits.check_before(operator.getitem, (FLAGS, index), {})
    limits.check_after(FLAGS[index])


def test_the_gradient_counts_as_work() -> None:
    for trained, factor in ((False, 1), (True, 3)):
        limits = Limits()
        args = torch.zeros(3, 5, requires_grad=trained), torch.zeros(5, 7)
        limits.check_before(torch.matmul, args, {})
        limits.check_before(torch.exp, args[:1], {})
        limits.check_before(torch.mean, args[:1], {})
        mean = 256 if trained else 32
        assert limits._flops == factor * (2 * 3 * 5 * 7 + 256 * 15 + mean * 15) + 3 * 2**20
    with torch.no_grad():
        limits = Limits()
        limits.check_before(torch.exp, (torch.zeros(3, requires_grad=True),), {})
    assert limits._flops == 256 * 3 + 2**20


def test_a_product_with_its_gradient_is_allowed() -> None:
    limits = Limits()
    args = torch.zeros(4096, 4096, requires_grad=True), torch.zeros(4096, 4096)
    limits.check_before(torch.matmul, args, {})
    for _ in range(10):
        limits.check_before(torch.logsumexp, (args[0], [0, 1]), {})


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> CustomLossNode:
    return CustomLossNode(op=op, name=name, target=target, args=list(args), kwargs=kwargs)  # pyright: ignore[reportArgumentType]


LOGPROBS = node("placeholder", "logprobs", "logprobs")
SUM = node("call_method", "sum_1", "sum", {"ref": "logprobs"})
OUTPUT = node("output", "output", "output", {"tuple": [{"ref": "sum_1"}, {"dict": {}}]})


def reject(nodes: list[CustomLossNode], inputs: list[tuple[str, int]] | None = None) -> str:
    declared = [CustomLossInput(name=name, rank=rank) for name, rank in inputs or [("logprobs", 1)]]  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError) as error:
        read_graph("hostile", declared, nodes)
    assert str(error.value).endswith(".")
    assert len(str(error.value)) < 500
    return str(error.value)


@pytest.mark.parametrize(
    ("op", "target"),
    [
        ("call_function", "os.system"),
        ("call_function", "builtins.eval"),
        ("call_function", "eval"),
        ("call_function", "torch.load"),
        ("call_function", "torch.hub.load"),
        ("call_function", "torch.manual_seed"),
        ("call_function", "torch.set_num_threads"),
        ("call_function", "torch.rand_like"),
        ("call_function", "torch.empty"),
        ("call_function", "torch.ops.aten.add"),
        ("call_function", "operator.attrgetter"),
        ("call_function", "operator.methodcaller"),
        ("call_function", "operator.call"),
        ("call_function", "math.factorial"),
        ("call_function", "torch.__init__"),
        ("call_method", "__class__"),
        ("call_method", "__reduce__"),
        ("call_method", "backward"),
        ("call_method", "item"),
        ("call_method", "tolist"),
        ("call_method", "numpy"),
        ("call_method", "register_hook"),
        ("call_method", "apply_"),
        ("call_method", "set_"),
        ("call_method", "resize_"),
        ("call_method", "data_ptr"),
    ],
)
def test_unlisted_operation_is_rejected(op, target) -> None:
    message = reject([LOGPROBS, node(op, "bad", target, {"ref": "logprobs"}), SUM, OUTPUT])
    assert f"is rejected at its node 'bad': this engine does not support the operation {target!r}" in message


def graph_with_arguments(*args: Any, **kwargs: Any) -> list[CustomLossNode]:
    return [LOGPROBS, node("call_method", "a", "exp", *args, **kwargs), SUM, OUTPUT]


def graph_returning(value: Any) -> list[CustomLossNode]:
    return [LOGPROBS, SUM, node("output", "output", "output", value)]


def graph_with_metric(key: str) -> list[CustomLossNode]:
    return graph_returning({"tuple": [{"ref": "sum_1"}, {"dict": {key: {"ref": "sum_1"}}}]})


LONG = [node("call_method", f"n{i}", "exp", {"ref": "logprobs"}) for i in range(MAX_NODES)]
CYCLE = [node("call_method", name, "exp", {"ref": other}) for name, other in (("a", "b"), ("b", "a"))]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "has 0 nodes and 1 inputs"),
        ([LOGPROBS], "has 1 nodes and 1 inputs"),
        ([LOGPROBS, SUM], "must end with an output of (loss, metrics)"),
        ([SUM, OUTPUT], "the input 'logprobs' is expected here"),
        ([LOGPROBS, SUM, SUM, OUTPUT], "another node has this name"),
        ([LOGPROBS, *LONG, SUM, OUTPUT], "has 1001 operations: use at most 1000"),
        ([LOGPROBS, *CYCLE, SUM, OUTPUT], "it refers to 'b', and no earlier node has this name"),
        (graph_with_arguments({"ref": "a"}), "it refers to 'a', and no earlier node"),
        ([LOGPROBS, node("get_attr", "a", "weight"), SUM, OUTPUT], "it is of type get_attr, but a loss consists of"),
        ([LOGPROBS, node("call_module", "a", "linear", {"ref": "logprobs"}), SUM, OUTPUT], "it is of type call_module"),
        ([LOGPROBS, node("placeholder", "b", "beta"), SUM, OUTPUT], "it is of type placeholder"),
        ([LOGPROBS, SUM, OUTPUT, node("output", "again", "output")], "it is of type output"),
        (graph_returning({"ref": "sum_1"}), "must end with an output"),
        (graph_returning({"tuple": [1.0, {"dict": {}}]}), "must end with an output"),
        (graph_returning({"tuple": [{"ref": "output"}, {"dict": {}}]}), "it refers to 'output'"),
        (graph_with_metric("loss:sum"), "has the metric 'loss:sum'"),
        (graph_with_metric("custom/a:max"), "has the metric 'custom/a:max'"),
        (graph_with_arguments({"pickle": "gASV"}), "the argument {'pickle': 'gASV'} is unknown"),
        (graph_with_arguments({"dtype": "__class__"}), "the argument {'dtype': '__class__'} is unknown"),
        (graph_with_arguments({"ref": ["x"]}), "the argument {'ref':"),
        (graph_with_arguments({"ref": "logprobs", "more": 1}), "is not an object with one key"),
        (graph_with_arguments(2**80), "is beyond"),
        (graph_with_arguments("x" * 300), "a text has 300 characters"),
        (graph_with_arguments([0] * 2000), "an argument has 2000 items"),
        (graph_with_arguments({"ref": "logprobs"}, out={"ref": "logprobs"}), "the argument 'out' is not supported"),
    ],
)
def test_invalid_graph_is_rejected(nodes, message) -> None:
    assert message in reject(nodes)


def test_a_graph_with_the_most_operations_is_accepted() -> None:
    graph = read_graph("long", [CustomLossInput(name="logprobs", rank=1)], [LOGPROBS, *LONG[1:], SUM, OUTPUT])
    assert len(graph.calls) == MAX_NODES


def test_deeply_nested_arguments_are_rejected() -> None:
    nested: Any = {"ref": "logprobs"}
    for _ in range(50):
        nested = [nested]
    assert "nested more than 16 deep" in reject([LOGPROBS, node("call_method", "a", "exp", nested), SUM, OUTPUT])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([("advantages", 1)], "declare 'logprobs' first"),
        ([("logprobs", 0)], "of rank 1 or 2"),
        ([("logprobs", 1), ("logprobs", 1)], "once"),
        (
            [("logprobs", 1), ("Beta", 1)],
            "has 2 inputs (logprobs, Beta): use at most 16, named in at most 64 lowercase",
        ),
        ([("logprobs", 1), *[(f"x{i}", 1) for i in range(16)]], "): use at most 16, named in"),
    ],
)
def test_invalid_inputs_are_rejected(inputs, message) -> None:
    assert message in reject([LOGPROBS, SUM, OUTPUT], inputs)


@pytest.mark.parametrize(
    "args",
    [
        ("mul", "text", 10**9),
        ("mul", [0], 10**9),
        ("mod", "%1000000000d", 5),
        ("add", [1], [2]),
        ("mul", {"tuple": [1]}, 9),
    ],
)
def test_operators_reject_strings_and_lists(args) -> None:
    target, *operands = args
    nodes = [LOGPROBS, node("call_function", "bad", f"operator.{target}", *operands), SUM, OUTPUT]
    graph = read_graph("hostile", [CustomLossInput(name="logprobs", rank=1)], nodes)
    with pytest.raises(RequestError, match="is not supported: use tensors and numbers"):
        CustomLoss(graph).compute(torch.zeros(3), [make_datum(3)])


def test_stored_loss_survives_a_restart(tmp_path: Path) -> None:
    request = sdk_request(clipped, RANKS)
    content = json.loads(request.model_dump_json())
    loss_id = CustomLossStore(tmp_path).create(content, request)
    restarted = CustomLossStore(tmp_path)
    assert restarted.find("session", loss_id).inputs == ("advantages", "beta")
    assert restarted.create(content, request) == loss_id
    with pytest.raises(RequestError, match="already created with other content"):
        restarted.create({**content, "name": "other"}, request)
    for session, wrong in (("other", loss_id), ("session", "session:loss:7"), ("session", "session:loss:../0")):
        with pytest.raises(RequestError, match="has no custom loss"):
            restarted.find(session, wrong)
    (stored,) = tmp_path.glob("custom_losses/session/*.json")
    stored.write_text(stored.read_text()[:-5])
    with pytest.raises(EngineError, match=f"The stored custom loss {stored} is damaged"):
        CustomLossStore(tmp_path).find("session", loss_id)
    restarted.delete_session("session")
    with pytest.raises(RequestError, match="has no custom loss"):
        restarted.find("session", loss_id)
