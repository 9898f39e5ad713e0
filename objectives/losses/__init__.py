"""Losses as functions of target logprobs.

The service's losses are sums over tokens; the engine and the client run the same functions. Client-side losses document
their normalization. Preference losses return one value per pair or completion.

Arguments before the ``*`` are tensors with one value per token, packed datum by datum, or pairs. Arguments after it are
the loss's parameters, with the names of the SDK's ``loss_fn_config``.
"""

from objectives.losses.cross_entropy import compute_mean_nll, cross_entropy
from objectives.losses.policy.enhanced_ppo import enhanced_ppo
from objectives.losses.policy.group_relative import dapo, dr_grpo, grpo
from objectives.losses.policy.gspo import gspo
from objectives.losses.policy.importance_weighted import cispo, importance_sampling, ppo
from objectives.losses.policy.penalized import conservative_ppo, dro, stable_reinforce
from objectives.losses.policy.ratios import RatioMetrics, compute_ratio_metrics
from objectives.losses.preference.pairs import PairLogprobs, pair_logprobs
from objectives.losses.preference.reference_based import dpo, ipo, kto
from objectives.losses.preference.reference_free import bradley_terry, orpo, simpo
from objectives.losses.registry import BASE_LOSSES, BUILT_IN, CLIENT_SIDE, BuiltInLoss, find_base_loss, find_built_in

__all__ = [
    "BASE_LOSSES",
    "BUILT_IN",
    "CLIENT_SIDE",
    "BuiltInLoss",
    "PairLogprobs",
    "RatioMetrics",
    "bradley_terry",
    "cispo",
    "compute_mean_nll",
    "compute_ratio_metrics",
    "conservative_ppo",
    "cross_entropy",
    "dapo",
    "dpo",
    "dr_grpo",
    "dro",
    "enhanced_ppo",
    "find_base_loss",
    "find_built_in",
    "grpo",
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
