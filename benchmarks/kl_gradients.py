"""Bias and spread of the gradients of the KL terms, against the exact gradient of KL(policy || reference).

The model is a Markov chain: its logits of the next token depend on the previous token only. The exact divergence
over whole completions of any length follows from the distribution over the states at each position.
"""

from __future__ import annotations

import torch
from rich.table import Table
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.config.term_lookup import find_term

NUM_TOKENS = 6
LENGTHS = (4, 16, 64)
SAMPLERS = {"on-policy": 0.0, "slightly stale": 0.05, "stale": 0.3}
ESTIMATES = (("kl", "k3"), ("kl", "k1"), ("kl_unweighted", "k3"), ("kl_unweighted", "k2"))


def measure(*, num_completions: int = 20_000) -> Table:
    """Return cosine, ratio of norms and spread by length, sampler and estimate.

    The spread is the root mean square distance between the gradient of one completion and the mean over all, divided by
    the norm of the exact gradient; a batch of n completions divides it by the root of n.

    Args:
        num_completions: samples of each row.
    """
    table = Table(title="Gradient of a KL term against that of the divergence", title_justify="left")
    for column in ("length", "sampler", "mean |log policy/sampler|", "term", "cosine", "ratio of norms", "spread"):
        table.add_column(column, justify="left" if column in ("sampler", "term") else "right")
    policy, reference = _draw_logits(0, 0.7), _draw_logits(2, 0.7)
    for length in LENGTHS:
        leaf = policy.clone().requires_grad_()
        (exact,) = torch.autograd.grad(exact_divergence(leaf, reference, length), leaf)
        for sampler_name, staleness in SAMPLERS.items():
            sampler = policy + staleness * _draw_logits(1, 1.0)
            states_DT = _sample(sampler, length, num_completions, seed=3)
            for name, estimator in ESTIMATES:
                gradients, log_ratio = _gradients(name, estimator, policy, sampler, reference, states_DT)
                mean, true = gradients.mean(0), exact.flatten()
                cosine = float(mean @ true / mean.norm() / true.norm())
                spread = (gradients - mean).square().sum(1).mean().sqrt() / true.norm()
                numbers = (f"{cosine:.3f}", f"{float(mean.norm() / true.norm()):.2f}", f"{float(spread):.1f}")
                table.add_row(str(length), sampler_name, f"{log_ratio:.3f}", f"{name} {estimator}", *numbers)
    return table


def exact_divergence(policy: Tensor, reference: Tensor, length: int) -> Tensor:
    """KL(p || q) between completions of a length, from the distribution over the states at each position."""
    p, q = policy.log_softmax(-1), reference.log_softmax(-1)
    states = torch.zeros(NUM_TOKENS + 1, dtype=p.dtype).index_fill(0, torch.tensor(NUM_TOKENS), 1.0)
    total = p.new_zeros(())
    for _ in range(length):
        total = total + states @ (p.exp() * (p - q)).sum(-1)
        states = torch.cat([states @ p.exp(), p.new_zeros(1)])
    return total


def _draw_logits(seed: int, spread: float) -> Tensor:
    """Logits by previous token (the last index is the start) and token, float64."""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(NUM_TOKENS + 1, NUM_TOKENS, generator=generator, dtype=torch.float64)


def _sample(logits: Tensor, length: int, num_completions: int, seed: int) -> Tensor:
    """Draw the states of completions, the start included, ``(D, length + 1)``."""
    generator = torch.Generator().manual_seed(seed)
    states = [torch.full((num_completions,), NUM_TOKENS)]
    for _ in range(length):
        states.append(logits.softmax(-1)[states[-1]].multinomial(1, generator=generator)[:, 0])
    return torch.stack(states, 1)


def _gradients(
    name: str, estimator: str, policy: Tensor, sampler: Tensor, reference: Tensor, states_DT: Tensor
) -> tuple[Tensor, float]:
    """Return each completion's gradient with respect to the logits, and the mean |log ratio| of policy to sampler.

    The gradients are ``(D, parameters)``.
    """
    previous, targets = states_DT[:, :-1].flatten(), states_DT[:, 1:].flatten()
    lengths_D = torch.full((len(states_DT),), states_DT.shape[1] - 1)
    batch = Batch(targets, torch.ones(len(targets)), torch.cat([torch.zeros(1).long(), lengths_D.cumsum(0)]))
    models = (policy, sampler, reference)
    logprobs, sampling_logprobs, ref_logprobs = (model.log_softmax(-1)[previous, targets] for model in models)
    leaf = logprobs.clone().requires_grad_()
    values_DT, _ = find_term(name)(Outputs(leaf, ref_logprobs, sampling_logprobs), batch, estimator=estimator)
    (by_token,) = torch.autograd.grad(values_DT.sum(), leaf)
    # d log p(target | previous) / d logits[previous] = onehot(target) - p(. | previous)
    gradients = torch.zeros(len(states_DT), *policy.shape, dtype=policy.dtype)
    rows = torch.arange(len(states_DT)).repeat_interleave(lengths_D)
    gradients.index_put_((rows, previous, targets), by_token, accumulate=True)
    gradients.index_put_((rows, previous), -by_token[:, None] * policy.softmax(-1)[previous], accumulate=True)
    return gradients.flatten(1), float((logprobs - sampling_logprobs).abs().mean())
