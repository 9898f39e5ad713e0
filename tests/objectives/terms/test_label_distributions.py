"""Terms over K targets per position against plain torch on logits over a whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from scipy.spatial.distance import jensenshannon
from torch import Tensor
from torch.nn import functional

from objectives.batch import Batch, Outputs
from objectives.losses import cross_entropy
from objectives.terms.token.divergence import divergence_topk, label_divergence_topk
from objectives.terms.token.entropy import negative_entropy_topk

NUM_POSITIONS, VOCABULARY = 3, 264  # of the tiny model


def draw_logits(seed: int) -> Tensor:
    return torch.randn(NUM_POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_vocabulary() -> Batch:
    targets = torch.arange(VOCABULARY).expand(NUM_POSITIONS, VOCABULARY)
    return Batch(targets, torch.ones(targets.shape), torch.tensor([0, NUM_POSITIONS]))


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits)[0]


def test_a_target_distribution_over_labels_has_the_gradient_of_its_divergence():
    labels, shares = torch.tensor([[5, 9, 200]] * NUM_POSITIONS), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    logits = draw_logits(0).requires_grad_()
    actual = gradient(cross_entropy(logits.log_softmax(-1).gather(1, labels), shares.expand_as(labels)), logits)
    target = torch.zeros(NUM_POSITIONS, VOCABULARY, dtype=torch.float64).scatter(1, labels, shares.expand(3, 3))
    other = draw_logits(0).requires_grad_()
    divergence = functional.kl_div(other.log_softmax(-1), target, reduction="sum")
    torch.testing.assert_close(actual, gradient(divergence, other))


def test_entropy_and_divergence_over_the_whole_vocabulary_agree_with_torch():
    logits, reference = draw_logits(0).requires_grad_(), draw_logits(1).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    outputs = Outputs(logprobs, ref_logprobs_DT=reference)
    entropy_DT = -negative_entropy_topk(outputs, whole_vocabulary())[0]
    divergence_DT = divergence_topk(outputs, whole_vocabulary())[0]
    exact = draw_logits(0).requires_grad_()
    policy = torch.distributions.Categorical(logits=exact)
    exact_divergence_DT = torch.distributions.kl_divergence(policy, torch.distributions.Categorical(logits=reference))
    for value_DT, exact_DT in ((entropy_DT, policy.entropy()), (divergence_DT, exact_divergence_DT)):
        # All other tokens count as one of probability 1e-6.
        torch.testing.assert_close(value_DT, exact_DT, rtol=0, atol=2e-5)
        slope = torch.autograd.grad(value_DT.sum(), logits, retain_graph=True)[0]
        torch.testing.assert_close(slope, torch.autograd.grad(exact_DT.sum(), exact, retain_graph=True)[0])


SHARES = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
LABELS = torch.tensor([[5, 9, 200]] * NUM_POSITIONS)


def over_vocabulary(shares: Tensor) -> Tensor:
    return torch.zeros(NUM_POSITIONS, VOCABULARY, dtype=torch.float64).scatter(1, LABELS, shares)


# Weights of datums with several positions are scaled to sum to 1 over the datum.
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["forward", "jensen_shannon"])
def test_divergence_from_a_target_distribution_is_that_over_the_vocabulary(kind: str, scale: float):
    logits = draw_logits(0).requires_grad_()
    batch = Batch(LABELS, SHARES * scale, torch.tensor([0, NUM_POSITIONS]))
    logprobs_DTV = logits.log_softmax(-1)
    value_DT = label_divergence_topk(Outputs(logprobs_DTV.gather(1, LABELS)), batch, kind=kind)[0]
    target_DTV = over_vocabulary(SHARES)
    if kind == "forward":
        expected_DT = functional.kl_div(logprobs_DTV, target_DTV, reduction="none").sum(-1)
    else:
        p_DTV = logprobs_DTV.exp()
        middle_DTV = ((p_DTV + target_DTV) / 2).log()
        to_middle = [functional.kl_div(middle_DTV, q_DTV, reduction="none").sum(-1) for q_DTV in (p_DTV, target_DTV)]
        expected_DT = sum(to_middle, torch.zeros(())) / 2
        distances = [jensenshannon(p, q) for p, q in zip(p_DTV[:2].detach(), target_DTV[:2], strict=True)]
        torch.testing.assert_close(value_DT[:2].detach(), torch.tensor(distances, dtype=torch.float64) ** 2)
    torch.testing.assert_close(value_DT[:2], expected_DT[:2])
    assert value_DT[2] == 0  # no label has a probability
    slopes = [torch.autograd.grad(values[:2].sum(), logits, retain_graph=True)[0] for values in (value_DT, expected_DT)]
    torch.testing.assert_close(*slopes)


def test_divergence_from_a_target_distribution_has_finite_gradients():
    """A label may have no probability under the policy, and no label under the target."""
    logprobs = torch.tensor([[0.0, -1e9, -200.0]] * NUM_POSITIONS, requires_grad=True)
    batch = Batch(LABELS, SHARES, torch.tensor([0, NUM_POSITIONS]))
    for kind in ("forward", "jensen_shannon"):
        value = label_divergence_topk(Outputs(logprobs), batch, kind=kind)[0].sum()
        assert torch.autograd.grad(value, logprobs)[0].isfinite().all()
