"""Losses as functions of target logprobs: of those of the service, the engine and the client run these same lines.

Those of the service are sums over tokens, never means; those of the client say what they divide by; those of
preferences give one value per pair or answer. The arguments before the ``*`` are tensors of one value per token, packed
datum by datum, or pairs; those after it are the loss's parameters, named as in the SDK's ``loss_fn_config`` where it
has them.
"""

from objectives.losses.bradley_terry import bradley_terry
from objectives.losses.built_in import BUILT_IN, BuiltInLoss, find_built_in
from objectives.losses.cispo import cispo
from objectives.losses.client_side import BASE_LOSSES, CLIENT_SIDE, find_base_loss
from objectives.losses.conservative_ppo import conservative_ppo
from objectives.losses.cross_entropy import compute_mean_nll, cross_entropy
from objectives.losses.dpo import dpo, ipo
from objectives.losses.dro import dro
from objectives.losses.enhanced_ppo import enhanced_ppo
from objectives.losses.group_relative import dapo, dr_grpo, grpo
from objectives.losses.gspo import gspo
from objectives.losses.importance_sampling import importance_sampling
from objectives.losses.kto import kto
from objectives.losses.pairs import PairLogprobs, pair_logprobs
from objectives.losses.ppo import ppo
from objectives.losses.ratios import RatioMetrics, compute_ratio_metrics
from objectives.losses.reference_free import orpo, simpo
from objectives.losses.stable_reinforce import stable_reinforce

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
