"""Traced losses against the functions they were traced from, and graphs that no client would trace."""

from __future__ import annotations

import json
import math
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
from engine.custom_loss.loss import CustomLoss
from engine.errors import RequestError
from engine.service.custom_losses import CustomLosses

RANKS = {"logprobs": 1, "advantages": 1, "beta": 0}


def as_sent(fn: Any, ranks: dict[str, int]) -> CreateCustomLossRequest:
    """What the SDK uploads for a function, after its way through JSON."""
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
    sent = as_sent(fn, ranks)
    return CustomLoss(read_graph(sent.name, sent.inputs, sent.graph.nodes))


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
def test_a_traced_loss_is_the_function_it_was_traced_from(fn) -> None:
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
    assert value.metrics_B == [{key: pytest.approx(each.item(), rel=1e-6) for key, each in metrics.items()}]


def test_several_targets_per_token_and_a_sum_over_datums() -> None:
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
    assert bool(loss.trained(data[0]).all())


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"beta": torch.tensor(1.0)}, r"Datum 3 has no advantages in its loss_fn_inputs, and the custom loss"),
        ({"beta": torch.ones(6), "advantages": torch.ones(6)}, "Datum 3 has beta of rank 1, .* declared rank 0"),
        ({"beta": torch.ones(1), "advantages": torch.ones(6, 1)}, "Datum 3 has advantages of rank 2"),
    ],
)
def test_a_datum_that_does_not_fit_is_named(inputs, says) -> None:
    with pytest.raises(RequestError, match=says):
        upload(arithmetic, RANKS).prepare(make_datum(6, **inputs), 3)


def run(fn: Any, length: int = 6, **changes: torch.Tensor) -> float:
    loss = upload(fn, RANKS)
    inputs = {"advantages": torch.ones(length), "beta": torch.ones(1), **changes}
    datum = loss.prepare(make_datum(length, **inputs), 0)
    return loss.compute(-torch.rand(length).requires_grad_(), [datum]).total.item()


@pytest.mark.parametrize(
    ("fn", "says"),
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
        (lambda logprobs, advantages, beta: (logprobs.grad.sum(), {}), "the attribute 'grad' is not offered"),
        (
            lambda logprobs, advantages, beta: (logprobs.sum() * (logprobs.shape[0] ** 999), {}),
            "failed at pow_1 (operator.pow) on a datum of 6 tokens: 6 ** 999 is beyond",
        ),
    ],
)
def test_a_loss_that_fails_says_where(fn, says) -> None:
    with pytest.raises(RequestError) as refused:
        run(fn)
    assert says in str(refused.value)
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


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
        (many_pieces, 6),
        (many_results, 4000),
    ],
)
def test_what_would_take_too_much_memory_is_refused_before_it_does(fn, length) -> None:
    with pytest.raises(RequestError, match=r"failed at .*(more than|not supported|without output_size)"):
        run(fn, length)


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> CustomLossNode:
    return CustomLossNode(op=op, name=name, target=target, args=list(args), kwargs=kwargs)  # pyright: ignore[reportArgumentType]


LOGPROBS = node("placeholder", "logprobs", "logprobs")
SUM = node("call_method", "sum_1", "sum", {"ref": "logprobs"})
OUTPUT = node("output", "output", "output", {"tuple": [{"ref": "sum_1"}, {"dict": {}}]})


def refuse(nodes: list[CustomLossNode], inputs: list[tuple[str, int]] | None = None) -> str:
    declared = [CustomLossInput(name=name, rank=rank) for name, rank in inputs or [("logprobs", 1)]]  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError) as refused:
        read_graph("hostile", declared, nodes)
    assert str(refused.value).endswith(".")
    assert len(str(refused.value)) < 500
    return str(refused.value)


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
def test_an_operation_that_is_not_listed_is_refused(op, target) -> None:
    said = refuse([LOGPROBS, node(op, "bad", target, {"ref": "logprobs"}), SUM, OUTPUT])
    assert f"is refused at its node 'bad': {target!r} is not an operation that this engine offers" in said


def calling(*args: Any, **kwargs: Any) -> list[CustomLossNode]:
    return [LOGPROBS, node("call_method", "a", "exp", *args, **kwargs), SUM, OUTPUT]


def returning(value: Any) -> list[CustomLossNode]:
    return [LOGPROBS, SUM, node("output", "output", "output", value)]


def with_metric(key: str) -> list[CustomLossNode]:
    return returning({"tuple": [{"ref": "sum_1"}, {"dict": {key: {"ref": "sum_1"}}}]})


LONG = [node("call_method", f"n{i}", "exp", {"ref": "logprobs"}) for i in range(MAX_NODES)]
CYCLE = [node("call_method", name, "exp", {"ref": other}) for name, other in (("a", "b"), ("b", "a"))]


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([], "has 0 nodes and 1 inputs"),
        ([LOGPROBS], "has 1 nodes and 1 inputs"),
        ([LOGPROBS, SUM], "has to end with an output of (loss, metrics)"),
        ([SUM, OUTPUT], "the input 'logprobs' is expected there"),
        ([LOGPROBS, SUM, SUM, OUTPUT], "another node has this name"),
        ([LOGPROBS, *LONG, SUM, OUTPUT], "at most 1000"),
        ([LOGPROBS, *CYCLE, SUM, OUTPUT], "it refers to 'b', and no node of that name comes before"),
        (calling({"ref": "a"}), "it refers to 'a', and no node"),
        ([LOGPROBS, node("get_attr", "a", "weight"), SUM, OUTPUT], "it is a get_attr, and a loss consists of"),
        ([LOGPROBS, node("call_module", "a", "linear", {"ref": "logprobs"}), SUM, OUTPUT], "it is a call_module"),
        ([LOGPROBS, node("placeholder", "b", "beta"), SUM, OUTPUT], "it is a placeholder"),
        ([LOGPROBS, SUM, OUTPUT, node("output", "again", "output")], "it is a output"),
        (returning({"ref": "sum_1"}), "has to end with an output"),
        (returning({"tuple": [1.0, {"dict": {}}]}), "has to end with an output"),
        (returning({"tuple": [{"ref": "output"}, {"dict": {}}]}), "it refers to 'output'"),
        (with_metric("loss:sum"), "has the metric 'loss:sum'"),
        (with_metric("custom/a:max"), "has the metric 'custom/a:max'"),
        (calling({"pickle": "gASV"}), "the argument {'pickle': 'gASV'} is unknown"),
        (calling({"dtype": "__class__"}), "the argument {'dtype': '__class__'} is unknown"),
        (calling({"ref": ["x"]}), "the argument {'ref':"),
        (calling({"ref": "logprobs", "more": 1}), "is no object of one key"),
        (calling(2**80), "is beyond"),
        (calling("x" * 300), "a text has 300 characters"),
        (calling([0] * 2000), "an argument has 2000 items"),
        (calling({"ref": "logprobs"}, out={"ref": "logprobs"}), "the argument 'out' is not offered"),
    ],
)
def test_a_graph_that_is_none_is_refused(nodes, says) -> None:
    assert says in refuse(nodes)


def test_arguments_are_not_nested_without_end() -> None:
    nested: Any = {"ref": "logprobs"}
    for _ in range(50):
        nested = [nested]
    assert "nested more than 16 deep" in refuse([LOGPROBS, node("call_method", "a", "exp", nested), SUM, OUTPUT])


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([("advantages", 1)], "its inputs are 'logprobs' first"),
        ([("logprobs", 0)], "of rank 1 or 2"),
        ([("logprobs", 1), ("logprobs", 1)], "once"),
        ([("logprobs", 1), ("Beta", 1)], "named in lowercase"),
        ([("logprobs", 1), *[(f"x{i}", 1) for i in range(16)]], "has 17 inputs: at most 16"),
    ],
)
def test_inputs_that_are_none_are_refused(inputs, says) -> None:
    assert says in refuse([LOGPROBS, SUM, OUTPUT], inputs)


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
def test_operators_are_not_those_of_texts_and_lists(args) -> None:
    target, *operands = args
    nodes = [LOGPROBS, node("call_function", "bad", f"operator.{target}", *operands), SUM, OUTPUT]
    graph = read_graph("hostile", [CustomLossInput(name="logprobs", rank=1)], nodes)
    with pytest.raises(RequestError, match="is not offered: use tensors and numbers"):
        CustomLoss(graph).compute(torch.zeros(3), [make_datum(3)])


def test_a_kept_loss_is_found_by_the_next_run_of_the_engine(tmp_path: Path) -> None:
    asked = as_sent(clipped, RANKS)
    content = json.loads(asked.model_dump_json())
    loss_id = CustomLosses(tmp_path).create(content, asked)
    again = CustomLosses(tmp_path)
    assert again.find("session", loss_id).inputs == ("advantages", "beta")
    assert again.create(content, asked) == loss_id
    with pytest.raises(RequestError, match="already created with other content"):
        again.create({**content, "name": "other"}, asked)
    for session, wrong in (("other", loss_id), ("session", "session:loss:7"), ("session", "session:loss:../0")):
        with pytest.raises(RequestError, match="has no custom loss"):
            again.find(session, wrong)
    again.forget("session")
    with pytest.raises(RequestError, match="has no custom loss"):
        again.find("session", loss_id)
