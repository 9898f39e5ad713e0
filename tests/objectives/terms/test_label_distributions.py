"""Terms over K targets per position against plain torch on logits over a whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from objectives.batch import Batch, Outputs
from objectives.losses import cross_entropy
from objectives.terms.token.divergence import divergence_topk
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
