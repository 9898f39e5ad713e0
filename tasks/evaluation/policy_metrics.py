"""Metrics that compare two policies on sampled answers to the same prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from objectives.batch import Batch, Outputs, pack
from objectives.terms.token.kl import kl

NGRAMS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean, and its standard error over prompts; the error is NaN for a single prompt."""

    mean: float
    error: float


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error of independent values.

    >>> estimate([1.0, 3.0])
    Estimate(mean=2.0, error=1.0)
    """
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(float(np.mean(values)), error)


def ratio_scores(
    sums_D: Sequence[float], sizes_D: Sequence[float], problems_D: Sequence[int], num_problems: int
) -> list[float]:
    """Scores of problems whose mean is the total of the sums divided by the total of the sizes.

    The standard error of the scores is that of a ratio estimator over clusters. If two policies have scores of the same
    problems, the mean and the standard error of the differences are those of the difference of the two ratios.

    Source: Cochran 1977, "Sampling Techniques", chapters 6 and 9.

    Args:
        problems_D: number of the problem of each answer, below `num_problems`; some problems may have no answer.

    >>> ratio_scores([1.0, 3.0, 8.0], [1, 1, 2], [0, 0, 1], 2)  # the ratio of the totals is 3
    [2.0, 4.0]
    """
    sums_P, sizes_P = (np.bincount(problems_D, values, num_problems) for values in (sums_D, sizes_D))
    ratio = sums_P.sum() / sizes_P.sum()
    return (ratio + (sums_P - ratio * sizes_P) / sizes_P.mean()).tolist()


def clustered(sums_D: Sequence[float], sizes_D: Sequence[float], problems_D: Sequence[int]) -> Estimate:
    """Ratio of the totals of sums and sizes, with a standard error that allows for alike answers to one problem.

    >>> clustered([1.0, 3.0], [1, 1], [0, 1])
    Estimate(mean=2.0, error=1.0)
    """
    problems, index_D = np.unique(np.asarray(problems_D), return_inverse=True)
    return estimate(ratio_scores(sums_D, sizes_D, index_D.tolist(), len(problems)))


def kl_per_token(
    own_D: Sequence[Sequence[float]], other_D: Sequence[Sequence[float]], problems_D: Sequence[int]
) -> Estimate:
    """KL(own || other) in nats per token, by the k3 estimator on answers sampled from the policy of `own_D`.

    The estimate is non-negative and unbiased for the divergence of the next-token distributions along the policy's own
    answers.

    Args:
        problems_D: number of the problem that each answer belongs to.

    >>> kl_per_token([[-1.0, -2.0]], [[-1.0, -2.0]], [0]).mean
    0.0
    """
    target_DT, offsets_D = pack([torch.tensor(own) for own in own_D])
    reference_DT = pack([torch.tensor(other) for other in other_D])[0]
    batch = Batch(torch.zeros(target_DT.shape, dtype=torch.int64), torch.ones(target_DT.shape), offsets_D)
    value_DT, _ = kl(Outputs(target_DT, ref_logprobs_DT=reference_DT), batch, estimator="k3")
    sizes_D = offsets_D.diff().tolist()
    return clustered([float(part.sum()) for part in value_DT.split(sizes_D)], sizes_D, problems_D)


def kl_per_answer(
    own_D: Sequence[Sequence[float]], other_D: Sequence[Sequence[float]], problems_D: Sequence[int]
) -> Estimate:
    """KL(own || other) in nats per answer, by the k1 estimator, which is unbiased for whole answers.

    >>> kl_per_answer([[-1.0, -2.0], [-1.0]], [[-2.0, -2.0], [-1.0]], [0, 1]).mean
    0.5
    """
    sums_D = [sum(own) - sum(other) for own, other in zip(own_D, other_D, strict=True)]
    return clustered(sums_D, [1.0] * len(sums_D), problems_D)


def entropy_per_token(own_D: Sequence[Sequence[float]]) -> float:
    """Entropy of the next-token distribution in nats, estimated as the mean of -logprob on a policy's own answers.

    >>> entropy_per_token([[-1.0, -2.0], [-3.0]])
    2.0
    """
    return -float(np.mean([value for own in own_D for value in own]))


def perplexity(logprobs_D: Sequence[Sequence[float]]) -> float:
    """Exponential of the mean negative logprob per token.

    >>> perplexity([[math.log(0.5)], [math.log(0.5), math.log(0.5)]])
    2.0
    """
    return math.exp(entropy_per_token(logprobs_D))


def distinct(n: int, texts: Sequence[str]) -> float:
    """Share of distinct n-grams among all n-grams of words; NaN if no text has n words.

    Source: Li et al. 2016, "A Diversity-Promoting Objective Function for Neural Conversation Models"
    (arXiv:1510.03055).

    >>> distinct(1, ["a a b", "b"])
    0.5
    """
    grams = [gram for text in texts for gram in _ngrams(text, n)]
    return len(set(grams)) / len(grams) if grams else math.nan


def vendi(texts: Sequence[str]) -> float:
    """Vendi score: the effective number of distinct answers, between 1 and the number of answers.

    The score is the exponential of the entropy of the eigenvalues of K / G, where K contains the cosines between the
    answers' counts of words and word pairs. Two pairs of identical answers score 2.

    Source: Friedman and Dieng 2023, "The Vendi Score: A Diversity Evaluation Metric for Machine Learning"
    (arXiv:2210.02410).

    >>> round(vendi(["a b", "a b", "c d", "c d"]), 6)
    2.0
    """
    counts = [Counter([*_ngrams(text, 1), *_ngrams(text, 2)]) or Counter([("",)]) for text in texts]
    vocabulary = {gram: index for index, gram in enumerate(dict.fromkeys(gram for count in counts for gram in count))}
    rows_GV = np.zeros((len(texts), len(vocabulary)))
    for row, count in zip(rows_GV, counts, strict=True):
        for gram, number in count.items():
            row[vocabulary[gram]] = number
    rows_GV /= np.linalg.norm(rows_GV, axis=1, keepdims=True)
    eigenvalues = np.linalg.eigvalsh(rows_GV @ rows_GV.T / len(texts)).clip(min=0)
    positive = eigenvalues[eigenvalues > 1e-12]
    # Rounded, so that equal scores differ by exactly 0 and not by a rounding error.
    return round(float(np.exp(-(positive * np.log(positive)).sum())), 9)


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
