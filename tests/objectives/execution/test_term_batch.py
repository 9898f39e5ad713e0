"""Batch that terms see next to `kto`, whose batches have completions with mismatched prompts."""

from __future__ import annotations

from dataclasses import replace

import torch

from objectives import Batch, Objective, Outputs
from objectives.execution.term_loop import StepPosition, evaluate_terms, prepare_terms
from objectives.labels import NONE, PROMPT
from objectives.sdk.training_loop import ThreadTermExecutor

LENGTHS = [3, 2, 4, 2, 3, 2]  # two pairs, then a completion with a mismatched prompt for each
NUM_OF_PAIRS = sum(LENGTHS[:4])
TERMS = [
    {"name": "l1", "weight": 0.5},
    {"name": "kl", "weight": 2.0},
    {"name": "length", "weight": 1.0, "estimator": "minimum_risk", "params": {"free": 0, "buffer": 4}},
]


def loss_weights(terms: list[dict[str, object]], batch: Batch, outputs: Outputs) -> torch.Tensor:
    """Return the loss weights of `kto` with terms at the first step."""
    objective, at = Objective("kto", terms), StepPosition(0, 4)
    with objective, ThreadTermExecutor(objective) as executor:
        due = prepare_terms(objective, batch, at, executor)
        return evaluate_terms(objective, due, outputs, batch, executor, at).loss_weights_DT


def test_terms_of_kto_see_the_pairs_alone() -> None:
    """What the terms add to the gradient equals what they add in a batch without the mismatched completions."""
    generator, size = torch.Generator().manual_seed(0), sum(LENGTHS)
    logprobs_DT, reference_DT = (-torch.rand(size, generator=generator, dtype=torch.float64) for _ in range(2))
    whole = Batch(
        torch.ones(size).long(),
        torch.ones(size),
        torch.tensor([0, *LENGTHS]).cumsum(0),
        tuple("x" * length for length in LENGTHS),
        sampling_logprobs_DT=reference_DT,
        labels_D={
            "pair": torch.tensor([0, 0, 1, 1, NONE, NONE]),
            "desirable": torch.tensor([1, 0, 1, 0, NONE, NONE]),
            PROMPT: torch.tensor([0, 0, 1, 1, 0, 1]),
        },
    )
    pairs = replace(
        whole,
        target_tokens_DT=whole.target_tokens_DT[:NUM_OF_PAIRS],
        weights_DT=whole.weights_DT[:NUM_OF_PAIRS],
        offsets_D=whole.offsets_D[:5],
        texts_D=whole.texts_D[:4],
        sampling_logprobs_DT=reference_DT[:NUM_OF_PAIRS],
        labels_D={name: label_D[:4] for name, label_D in whole.labels_D.items()},
    )
    added = [
        loss_weights(TERMS, batch, outputs) - loss_weights([], batch, outputs)
        for batch, outputs in (
            (whole, Outputs(logprobs_DT, reference_DT)),
            (pairs, Outputs(logprobs_DT[:NUM_OF_PAIRS], reference_DT[:NUM_OF_PAIRS])),
        )
    ]
    torch.testing.assert_close(added[0][:NUM_OF_PAIRS], added[1])
    assert bool((added[1].abs() > 1e-6).any())
    assert not added[0][NUM_OF_PAIRS:].any()
