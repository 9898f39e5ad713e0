"""How two policies differ, from answers that both gave to the same questions: figures of one, and of the two."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from objectives.batch import Batch, Outputs, pack
from objectives.terms.kl import kl

NGRAMS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over answers or questions, and its standard error; the latter is NaN where there is only one."""

    mean: float
    error: float


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent values.

    >>> estimate([1.0, 3.0])
    Estimate(mean=2.0, error=1.0)
    """
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(float(np.mean(values)), error)


def kl_per_token(own_D: Sequence[Sequence[float]], other_D: Sequence[Sequence[float]]) -> Estimate:
    """KL(own || other) in nats per token: the k3 estimate, on answers sampled from the policy whose logprobs are `own`.

    Never negative, and unbiased for the divergence of the next token's distributions along the policy's own answers.

    >>> kl_per_token([[-1.0, -2.0]], [[-1.0, -2.0]]).mean
    0.0
    """
    target_DT, offsets_D = pack([torch.tensor(own) for own in own_D])
    reference_DT = pack([torch.tensor(other) for other in other_D])[0]
    batch = Batch(torch.zeros(target_DT.shape, dtype=torch.int64), torch.ones(target_DT.shape), offsets_D)
    value_DT, _ = kl(Outputs(target_DT, ref_logprobs_DT=reference_DT), batch, estimator="k3")
    means = [float(part.mean()) for part in value_DT.split(offsets_D.diff().tolist()) if len(part)]
    # Weighed by tokens, so that short answers do not count more.
    return Estimate(float(value_DT.mean()), estimate(means).error)


def kl_per_answer(own_D: Sequence[Sequence[float]], other_D: Sequence[Sequence[float]]) -> Estimate:
    """KL(own || other) in nats per answer: the k1 estimate, unbiased for the divergence of whole answers.

    >>> kl_per_answer([[-1.0, -2.0], [-1.0]], [[-2.0, -2.0], [-1.0]]).mean
    0.5
    """
    return estimate([sum(own) - sum(other) for own, other in zip(own_D, other_D, strict=True)])


def entropy_per_token(own_D: Sequence[Sequence[float]]) -> float:
    """Entropy of the next token's distribution in nats, met along a policy's own answers: the mean of -logprob.

    >>> entropy_per_token([[-1.0, -2.0], [-3.0]])
    2.0
    """
    return -float(np.mean([value for own in own_D for value in own]))


def perplexity(logprobs_D: Sequence[Sequence[float]]) -> float:
    """exp of the mean negative logprob per token.

    >>> perplexity([[math.log(0.5)], [math.log(0.5), math.log(0.5)]])
    2.0
    """
    return math.exp(entropy_per_token(logprobs_D))


def distinct(n: int, texts: Sequence[str]) -> float:
    """The share of different ones among all n-grams of words; 0 where there are none.

    Source: Li et al. 2016, "A Diversity-Promoting Objective Function for Neural Conversation Models"
    (arXiv:1510.03055).

    >>> distinct(1, ["a a b", "b"])
    0.5
    """
    found = [gram for text in texts for gram in _ngrams(text, n)]
    return len(set(found)) / len(found) if found else 0.0


def vendi(texts: Sequence[str]) -> float:
    """How many different answers these amount to, from 1 to their number: the Vendi score of their n-grams' cosines.

    The exponential of the entropy of the eigenvalues of K / G, where K has the cosines of the answers' counts of words
    and pairs of words. Unlike self-BLEU it counts: four answers in two versions amount to two.

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
    return float(np.exp(-(positive * np.log(positive)).sum()))


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
