"""Loss functions on packed tensors, for a training loop or an evaluation without an objective.

Policy losses take one value per token, with all datums one after the other. `dpo`, `ipo`, `simpo` and `orpo` take
`PairLogprobs`, `bradley_terry` takes the scores of pairs, and `kto` one log-ratio per completion.
"""

from objectives.losses import (
    PairLogprobs,
    bradley_terry,
    cispo,
    compute_mean_nll,
    conservative_ppo,
    cross_entropy,
    dapo,
    dpo,
    dr_grpo,
    dro,
    enhanced_ppo,
    grpo,
    gspo,
    importance_sampling,
    ipo,
    kto,
    orpo,
    pair_logprobs,
    ppo,
    simpo,
    stable_reinforce,
)

__all__ = [
    "PairLogprobs",
    "bradley_terry",
    "cispo",
    "compute_mean_nll",
    "conservative_ppo",
    "cross_entropy",
    "dapo",
    "dpo",
    "dr_grpo",
    "dro",
    "enhanced_ppo",
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
