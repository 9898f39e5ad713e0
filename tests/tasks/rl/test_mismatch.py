"""Distance between trainer and sampler, against loops over the tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean

import pytest
import torch

from objectives.batch import Batch
from objectives.losses.policy.correction import Correction
from tasks.rl.mismatch import STALENESS, compute_mismatch_metrics
from tasks.training.batch_source import TrainedBatch

LENGTHS, AGES = (9, 4, 1, 6), (0, 2, 2, 5)
CORRECTION = Correction(ratio="token", bound="mask", low=0.8, high=1.3)


def make_batch(seed: int, ages: tuple[int, ...] | None) -> TrainedBatch:
    """Completions after two prompt tokens each, with some advantages of 0."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.cat([torch.tensor([0.0, 0.0] + [1.0] * length) for length in LENGTHS])
    offsets_D = torch.tensor([0, *(length + 2 for length in LENGTHS)]).cumsum(0)
    sampling_DT = (-torch.rand(len(mask), generator=generator) - 0.1).double().where(mask != 0, 0.0)
    logprobs_DT = sampling_DT + 0.3 * torch.randn(len(mask), generator=generator)
    advantages_DT = torch.randn(len(mask), generator=generator).round() * mask
    labels = {} if ages is None else {STALENESS: torch.tensor(ages)}
    batch = Batch(
        torch.zeros(len(mask)).long(),
        mask,
        offsets_D,
        advantages_DT=advantages_DT,
        sampling_logprobs_DT=sampling_DT,
        labels_D=labels,
    )
    return TrainedBatch(batch, logprobs_DT)


def summarize(tokens: list[tuple[float, float]]) -> dict[str, float]:
    """Metrics of pairs of log-ratio and advantage."""
    ratios = [math.exp(log_ratio) for log_ratio, _ in tokens]
    summary = {
        "kl_v1": fmean(-log_ratio for log_ratio, _ in tokens),
        "kl_v2": fmean(log_ratio**2 / 2 for log_ratio, _ in tokens),
        "kl_k3": fmean(ratio - 1 - math.log(ratio) for ratio in ratios),
        "chi_square": fmean(ratio**2 for ratio in ratios) - 1,
        "ess": sum(ratios) ** 2 / sum(ratio**2 for ratio in ratios) / len(ratios),
    }
    trained = [not 0.8 <= math.exp(log_ratio) <= 1.3 for log_ratio, advantage in tokens if advantage]
    return summary | ({"masked": fmean(trained)} if trained else {})


@pytest.mark.parametrize("ages", [AGES, None])
def test_metrics_equal_loops_over_the_tokens(ages):
    trained = [make_batch(seed, ages) for seed in (0, 1)]
    bins, sequences = defaultdict(list), []
    for minibatch in trained:
        batch, start = minibatch.batch, 0
        assert batch.sampling_logprobs_DT is not None
        assert batch.advantages_DT is not None
        log_ratios = (minibatch.logprobs_DT - batch.sampling_logprobs_DT).tolist()
        for datum, length in enumerate(LENGTHS):
            first = start + 2
            sequences.append(math.exp(sum(log_ratios[first : first + length])))
            for index in range(length):
                token = (log_ratios[first + index], batch.advantages_DT[first + index].item())
                names = ["", f"position_{index * 4 // length + 1}/"]
                names += [f"staleness_{ages[datum]}/"] if ages else []
                for name in names:
                    bins[name].append(token)
            start = first + length
    expected = {
        f"mismatch/{name}{key}": value for name, tokens in bins.items() for key, value in summarize(tokens).items()
    }
    expected["mismatch/ess_sequence"] = sum(sequences) ** 2 / sum(ratio**2 for ratio in sequences) / len(sequences)
    assert compute_mismatch_metrics(trained, CORRECTION) == pytest.approx(expected)
    without = compute_mismatch_metrics(trained, None)
    assert without == pytest.approx({key: value for key, value in expected.items() if not key.endswith("masked")})
