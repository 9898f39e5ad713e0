"""Toy model whose sequences can be enumerated, for the exact gradients of expected scores.

The toy has two prompts and six tokens. A sequence has up to four tokens; the last of the six tokens ends it early. The
toy's parameters are the logits of the next token by prompt and previous token. The gradient of an expected score is a
sum over all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs, pack

NUM_PROMPTS, NUM_TOKENS, MAX_LENGTH, END = 2, 6, 4, 5

Sequences = list[tuple[int, ...]]
Row = tuple[int, tuple[int, ...]]


def enumerate_sequences() -> Sequences:
    """Return every sequence that the toy can sample."""
    finished = [(*body, END) for length in range(MAX_LENGTH) for body in product(range(NUM_TOKENS - 1), repeat=length)]
    return finished + list(product(range(NUM_TOKENS - 1), repeat=MAX_LENGTH))


SEQUENCES = enumerate_sequences()


def draw_logits(seed: int, spread: float = 0.7) -> Tensor:
    """Logits by prompt, previous token (the last index is the start) and token, float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_PROMPTS, NUM_TOKENS + 1, NUM_TOKENS)
    return spread * torch.randn(shape, generator=generator, dtype=torch.float64)


def row_logprobs(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logprobs of the tokens of completions, packed, ``(N,)``."""
    prompts, previous, targets = (
        [index for row in rows for index in column(row)] for column in (_prompts, _previous, lambda row: row[1])
    )
    return logits.log_softmax(-1)[torch.tensor(prompts), torch.tensor(previous), torch.tensor(targets)]


def sequence_logprobs(logits: Tensor, prompt: int, sequences: Sequences) -> list[Tensor]:
    """Logprobs of the tokens of each sequence after a prompt."""
    packed = row_logprobs(logits, [(prompt, sequence) for sequence in sequences])
    return list(packed.split([len(sequence) for sequence in sequences]))


def _prompts(row: Row) -> list[int]:
    return [row[0]] * len(row[1])


def _previous(row: Row) -> list[int]:
    return [NUM_TOKENS, *row[1][:-1]]


def score(prompt: int, sequence: Sequence[int]) -> float:
    """Black box: share of tokens that the prompt forbids, plus a penalty on length."""
    return sum(token in (prompt, 2) for token in sequence) / len(sequence) + 0.1 * len(sequence)


def make_case(logits: Tensor, sampler: Tensor | None, rows: Sequence[Row]) -> tuple[Batch, Outputs]:
    """Pack completions, given as pairs of prompt and sequence, with their logprobs."""
    targets_DT, offsets_D = pack([torch.tensor(sequence) for _, sequence in rows])
    sampling = None
    if sampler is not None:
        sampling = row_logprobs(sampler, rows).detach()
    batch = Batch(
        targets_DT,
        torch.ones(len(targets_DT)),
        offsets_D,
        sampling_logprobs_DT=sampling,
        labels_D={"prompt": torch.tensor([prompt for prompt, _ in rows])},
    )
    return batch, Outputs(row_logprobs(logits, rows), sampling_logprobs_DT=sampling)


def scores_of(rows: Sequence[Row], offset: float) -> Tensor:
    """Scores with an offset per prompt, which must not change an estimate."""
    return torch.tensor([score(*row) + offset * (1 + row[0]) for row in rows], dtype=torch.float64)


def expected_score_gradient(
    logits: Tensor, candidates: Sequences = SEQUENCES, power: float = 1.0, *, mean: bool = False
) -> Tensor:
    """Exact gradient of the expected score under ``p ** power``, normalized over the candidates; mean over prompts.

    Args:
        mean: whether p is that of the mean logprob of a sequence instead of the sum.
    """
    logits = logits.clone().requires_grad_()
    values: list[Tensor] = []
    for prompt in range(NUM_PROMPTS):
        logprobs = sequence_logprobs(logits, prompt, candidates)
        sums = torch.stack([lp.mean() if mean else lp.sum() for lp in logprobs])
        values.append((power * sums).softmax(0) @ scores_of([(prompt, sequence) for sequence in candidates], 0.0))
    return torch.autograd.grad(torch.stack(values).mean(), logits)[0]


def divergence_gradient(logits: Tensor, reference: Tensor, *, forward: bool = False) -> Tensor:
    """Exact gradient of the divergence between the toy's distributions over sequences, averaged over prompts.

    Args:
        reference: logits of q.
        forward: True for KL(q || p) instead of KL(p || q).
    """
    logits = logits.clone().requires_grad_()
    values: list[Tensor] = []
    for prompt in range(NUM_PROMPTS):
        p, q = (
            torch.stack([lp.sum() for lp in sequence_logprobs(model, prompt, SEQUENCES)])
            for model in (logits, reference)
        )
        values.append(q.exp() @ (q - p) if forward else p.exp() @ (p - q))
    return torch.autograd.grad(torch.stack(values).mean(), logits)[0]


def sample_rows(sampler: Tensor, generator: torch.Generator, num_samples: int) -> list[Row]:
    """Draw completions of each prompt."""
    rows: list[Row] = []
    for prompt in range(NUM_PROMPTS):
        packed = row_logprobs(sampler, [(prompt, sequence) for sequence in SEQUENCES])
        weights = torch.segment_reduce(packed, "sum", lengths=torch.tensor([*map(len, SEQUENCES)])).exp()
        drawn = weights.multinomial(num_samples, replacement=True, generator=generator)
        rows += [(prompt, SEQUENCES[index]) for index in drawn.tolist()]
    return rows
