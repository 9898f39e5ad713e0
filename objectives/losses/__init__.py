"""Losses of the service, as functions of target logprobs: the engine and the client run these same lines.

All are sums over tokens, never means. The arguments before the ``*`` are tensors of one value per token, packed
datum by datum; those after it are the loss's parameters, named as in the SDK's ``loss_fn_config``.
"""

from objectives.losses.built_in import BUILT_IN, BuiltInLoss, find_built_in
from objectives.losses.cispo import cispo
from objectives.losses.cross_entropy import compute_mean_nll, cross_entropy
from objectives.losses.dro import dro
from objectives.losses.gspo import gspo
from objectives.losses.importance_sampling import importance_sampling
from objectives.losses.ppo import ppo
from objectives.losses.ratios import RatioMetrics, compute_ratio_metrics
from objectives.losses.stable_reinforce import stable_reinforce

__all__ = [
    "BUILT_IN",
    "BuiltInLoss",
    "RatioMetrics",
    "cispo",
    "compute_mean_nll",
    "compute_ratio_metrics",
    "cross_entropy",
    "dro",
    "find_built_in",
    "gspo",
    "importance_sampling",
    "ppo",
    "stable_reinforce",
]
