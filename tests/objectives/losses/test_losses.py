"""Built-in losses, compared with reference implementations in plain loops over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from objectives import ObjectiveError
from objectives.losses import BUILT_IN, find_built_in

# Values per token of one sequence. lp0 is the point at which stop-gradients are evaluated.
Tokens = list[float]


def clip(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


def plain_importance_sampling(lp: Tokens, q: Tokens, A: Tokens, mask: Tokens, lp0: Tokens) -> float:
    return -sum(math.exp(p - s) * a for p, s, a in zip(lp, q, A, strict=True))


def plain_ppo(lp, q, A, mask, lp0, **bounds):
    low, high = bounds.get("clip_low_threshold", 0.8), bounds.get("clip_high_threshold", 1.2)
    total = 0.0
    for p, s, a in zip(lp, q, A, strict=True):
        r = math.exp(p - s)
        total += min(r * a, clip(r, low, high) * a)
    return -total


def plain_cispo(lp, q, A, mask, lp0, **bounds):
    low, high = bounds.get("clip_low_threshold", 0.0), bounds.get("clip_high_threshold", 4.0)
    return -sum(clip(math.exp(p0 - s), low, high) * a * p for p, s, a, p0 in zip(lp, q, A, lp0, strict=True))


def plain_dro(lp, q, A, mask, lp0, beta=0.05):
    return -sum(p * a - 0.5 * beta * (p - s) ** 2 for p, s, a in zip(lp, q, A, strict=True))


def plain_gspo(lp, q, A, mask, lp0, **bounds):
    low, high = bounds.get("clip_low_threshold", 0.9997), bounds.get("clip_high_threshold", 1.0004)
    marked = [i for i, flag in enumerate(mask) if flag]
    product = math.prod(math.exp(lp0[i] - q[i]) for i in marked)
    s = product ** (1 / len(marked)) if marked else 1.0
    total = 0.0
    for p, a, p0 in zip(lp, A, lp0, strict=True):
        s_t = s * math.exp(p) / math.exp(p0)
        total += min(s_t * a, clip(s_t, low, high) * a)
    return -total


def plain_stable_reinforce(lp, q, A, mask, lp0, kl_coeff=0.01):
    total = 0.0
    for p, s, a, p0 in zip(lp, q, A, lp0, strict=True):
        if a:
            r = math.exp(p - s)
            total += -min(1.0, math.exp(p0 - s)) * a * p + kl_coeff * (r - 1 - (p - s))
    return total


PLAIN: dict[str, Callable[..., float]] = {
    "importance_sampling": plain_importance_sampling,
    "ppo": plain_ppo,
    "cispo": plain_cispo,
    "dro": plain_dro,
    "gspo": plain_gspo,
    "stable_reinforce": plain_stable_reinforce,
}
OTHER_PARAMS = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "dro": {"beta": 2.0},
    "gspo": {"clip_low_threshold": 0.6, "clip_high_threshold": 1.7},
    "stable_reinforce": {"kl_coeff": 0.7},
}


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Logprobs, inputs of a policy loss and offsets, including prompt tokens and empty sequences."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    count = sum(lengths)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    near = draw(st.sampled_from([0.01, 0.5, 2.0]))
    mask = (torch.rand(count, generator=generator) < 0.7).double()
    logprobs = -4 * torch.rand(count, generator=generator, dtype=torch.float64) - 0.01
    inputs = {
        "logprobs": logprobs + near * torch.randn(count, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(count, generator=generator, dtype=torch.float64) * mask,
        "sequence_ratio_mask": mask,
    }
    return logprobs, inputs, torch.tensor([0, *lengths]).cumsum(0)


def split_sequences(logprobs, inputs, offsets, at):
    columns = [column.tolist() for column in (logprobs, *inputs.values(), at)]
    return [[column[start:end] for column in columns] for start, end in pairwise(offsets.tolist())]


@given(rollouts())
@pytest.mark.parametrize("given_params", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_value_and_gradient_match_the_formula(name, given_params, case):
    logprobs, inputs, offsets = case
    loss, reference = find_built_in(name), PLAIN[name]
    params = OTHER_PARAMS[name] if given_params else {}

    def slow(at_token: int, step: float) -> float:
        moved = logprobs.clone()
        if step:
            moved[at_token] += step
        return sum(reference(*columns, **params) for columns in split_sequences(moved, inputs, offsets, logprobs))

    leaf = logprobs.clone().requires_grad_()
    value = loss.compute(leaf, inputs, offsets, loss.check_params(params))
    value.backward()
    assert value.ndim == 0
    assert value.item() == pytest.approx(slow(0, 0), rel=1e-12, abs=1e-12)
    assert leaf.grad is not None
    after, at, before = ([slow(i, step) for i in range(len(logprobs))] for step in (1e-6, 0, -1e-6))
    # A ratio within a step of its clip threshold has two slopes.
    assume(all(abs(b + a - 2 * m) < 1e-10 for a, m, b in zip(after, at, before, strict=True)))
    slopes = [(a - b) / 2e-6 for a, b in zip(after, before, strict=True)]
    assert leaf.grad.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", PLAIN)
def test_gradient_through_a_model_matches_finite_differences(name):
    """Finite differences over every weight of a float64 linear layer with a softmax."""
    generator = torch.Generator().manual_seed(3)
    features, targets = torch.randn(9, 4, generator=generator).double(), torch.randint(0, 5, (9,), generator=generator)
    start = torch.randn(4, 5, generator=generator).double()
    offsets = torch.tensor([0, 2, 6, 9])

    def logprobs(weight):
        return (features @ weight).log_softmax(-1).gather(1, targets[:, None])[:, 0]

    inputs = {
        "logprobs": logprobs(start) + 0.3 * torch.randn(9, generator=generator).double(),
        "advantages": torch.randn(9, generator=generator).double(),
        "sequence_ratio_mask": torch.tensor([0.0, 1, 1, 1, 1, 0, 1, 1, 1]).double(),
    }
    loss, params = find_built_in(name), OTHER_PARAMS[name]
    weight = start.clone().requires_grad_()
    loss.compute(logprobs(weight), inputs, offsets, loss.check_params(params)).backward()

    def slow(step):
        moved = logprobs(start + step)
        columns = split_sequences(moved, inputs, offsets, logprobs(start))
        return sum(PLAIN[name](*sequence, **params) for sequence in columns)

    steps = 1e-6 * torch.eye(20).double().reshape(20, 4, 5)
    slopes = [(slow(step) - slow(-step)) / 2e-6 for step in steps]
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-7)


@given(rollouts())
@pytest.mark.parametrize("name", PLAIN)
def test_metrics_match_plain_loops(name, case):
    logprobs, inputs, offsets = case
    loss = find_built_in(name)
    params = loss.check_params(OTHER_PARAMS[name])
    actual = loss.compute_metrics(logprobs, inputs, offsets, params)
    low, high = params.get("clip_low_threshold", 0.0), params.get("clip_high_threshold", math.inf)
    for d, (lp, q, A, mask, _) in enumerate(split_sequences(logprobs, inputs, offsets, logprobs)):
        trained = [i for i, a in enumerate(A) if a]
        logs = [lp[i] - q[i] for i in trained]
        if name == "gspo":
            marked = [i for i, flag in enumerate(mask) if flag]
            logs = [sum(lp[i] - q[i] for i in marked) / max(1, len(marked))] * len(trained)
        ratios = [math.exp(log_ratio) for log_ratio in logs] or [1.0]
        expected = (
            sum(ratios) / len(ratios),
            max(ratios),
            sum(not low <= ratio <= high for ratio in ratios) / len(ratios) if trained else 0.0,
            -sum(logs) / len(logs) if trained else 0.0,
        )
        assert [float(metric[d]) for metric in actual] == pytest.approx(expected)


@pytest.mark.parametrize("name", PLAIN)
def test_every_loss_has_the_reinforce_gradient_on_policy(name):
    torch.manual_seed(0)
    logprobs = (-torch.rand(6, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(6, dtype=torch.float64)
    inputs = {"logprobs": logprobs.detach(), "advantages": advantages, "sequence_ratio_mask": torch.ones(6)}
    loss = find_built_in(name)
    loss.compute(logprobs, inputs, torch.tensor([0, 2, 6]), loss.check_params({})).backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "dro"])
def test_a_token_without_advantage_has_no_gradient_at_any_distance(name):
    logprobs = torch.tensor([-1.0, -2000.0, -0.0], requires_grad=True)
    inputs = {
        "logprobs": torch.tensor([-1.1, 0.0, -2000.0]),
        "advantages": torch.tensor([1.0, 0.0, 0.0]),
        "sequence_ratio_mask": torch.tensor([1.0, 0.0, 0.0]),
    }
    loss = find_built_in(name)
    value = loss.compute(logprobs, inputs, torch.tensor([0, 3]), loss.check_params({}))
    value.backward()
    assert value.isfinite()
    assert logprobs.grad is not None
    assert logprobs.grad[1:].tolist() == [0, 0]


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_clip_bounds_can_differ_by_token(name):
    torch.manual_seed(1)
    logprobs, sampling = -torch.rand(4, dtype=torch.float64), -torch.rand(4, dtype=torch.float64)
    low, high = torch.tensor([0.9, 0.1, 0.9, 0.1]), torch.tensor([1.1, 9.0, 1.1, 9.0])
    loss = find_built_in(name)

    def compute(at: slice, low, high) -> float:
        ones = torch.ones(4, dtype=torch.float64)[at]
        inputs = {"logprobs": sampling[at], "advantages": ones, "sequence_ratio_mask": ones}
        params = {"clip_low_threshold": low, "clip_high_threshold": high}
        return loss.compute(logprobs[at], inputs, torch.arange(len(ones) + 1), params).item()

    values = [compute(slice(i, i + 1), float(low[i]), float(high[i])) for i in range(4)]
    assert compute(slice(0, 4), low, high) == pytest.approx(sum(values))


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "ppo",
            {"epsilon": 0.2},
            "has no parameter 'epsilon'; its parameters are clip_low_threshold, clip_high_threshold",
        ),
        ("cross_entropy", {"beta": 1.0}, "The loss 'cross_entropy' has no parameter 'beta'; it has no parameters"),
        (
            "dro",
            {"beta": -1.0},
            "The parameter 'beta' of the loss 'dro' is -1.0; set it to a finite number of at least 0",
        ),
        ("dro", {"beta": float("nan")}, "is nan; set it to a finite number of at least 0"),
        ("stable_reinforce", {"kl_coeff": "a"}, "is 'a'; set it to a finite number of at least 0"),
        ("ppo", {"clip_high_threshold": 0.2}, "has clip_low_threshold=0.8 above clip_high_threshold=0.2"),
    ],
)
def test_a_wrong_parameter_raises_one_sentence(name, config, message):
    with pytest.raises(ObjectiveError) as error:
        find_built_in(name).check_params(config)
    assert message in str(error.value)
    assert str(error.value).endswith(".")


def test_an_unknown_loss_raises():
    with pytest.raises(ObjectiveError, match=r"The loss 'grpo' is unknown; use one of cross_entropy, .*gspo"):
        find_built_in("grpo")


def test_defaults_match_the_functions():
    for loss in BUILT_IN.values():
        assert dict(loss.defaults) == (loss.fn.__kwdefaults__ or {})
