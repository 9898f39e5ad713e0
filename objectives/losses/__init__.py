"""Losses of the service, as functions of target logprobs: the engine and the client run these same lines.

Those of the service are sums over tokens, never means; those of preferences give one value per pair or answer. The
arguments before the ``*`` are tensors of one value per token, packed datum by datum, or pairs; those after it are the
loss's parameters, named as in the SDK's ``loss_fn_config`` where it has them.
"""

from objectives.losses.bradley_terry import bradley_terry
from objectives.losses.built_in import BUILT_IN, BuiltInLoss, find_built_in
from objectives.losses.cispo import cispo
from objectives.losses.cross_entropy import compute_mean_nll, cross_entropy
from objectives.losses.dpo import dpo, ipo
from objectives.losses.dro import dro
from objectives.losses.gspo import gspo
from objectives.losses.importance_sampling import importance_sampling
from objectives.losses.kto import kto
from objectives.losses.pairs import PairLogprobs, pair_logprobs
from objectives.losses.ppo import ppo
from objectives.losses.ratios import RatioMetrics, compute_ratio_metrics
from objectives.losses.reference_free import orpo, simpo
from objectives.losses.stable_reinforce import stable_reinforce

__all__ = [
    "BUILT_IN",
    "BuiltInLoss",
    "PairLogprobs",
    "RatioMetrics",
    "bradley_terry",
    "cispo",
    "compute_mean_nll",
    "compute_ratio_metrics",
    "cross_entropy",
    "dpo",
    "dro",
    "find_built_in",
    "gspo",
    "importance_sampling",
    "ipo",
    "kto",
    "orpo",
    "pair_logprobs",
    "ppo",
    "simpo",
    "stable_reinforce",
]
