"""Policy losses that no service has: as base losses of an objective, their linearized form is what a service trains."""

from __future__ import annotations

from objectives.errors import ObjectiveError
from objectives.losses.built_in import BUILT_IN, CLIP_HIGH, CLIP_LOW, POLICY_INPUTS, BuiltInLoss
from objectives.losses.conservative_ppo import conservative_metrics, conservative_ppo
from objectives.losses.enhanced_ppo import enhanced_metrics, enhanced_ppo
from objectives.losses.group_relative import dapo, dr_grpo, grpo

_CLIP = {CLIP_LOW: 0.8, CLIP_HIGH: 1.2}

CLIENT_SIDE: dict[str, BuiltInLoss] = {
    loss.name: loss
    for loss in (
        BuiltInLoss("grpo", grpo, POLICY_INPUTS, "advantages", _CLIP, by_sequence=True),
        BuiltInLoss("dr_grpo", dr_grpo, POLICY_INPUTS, "advantages", _CLIP, by_sequence=True),
        BuiltInLoss("dapo", dapo, POLICY_INPUTS, "advantages", {CLIP_LOW: 0.8, CLIP_HIGH: 1.28}),
        BuiltInLoss(
            "enhanced_ppo",
            enhanced_ppo,
            (*POLICY_INPUTS, "ref_logprobs", "values", "returns"),
            None,
            {**_CLIP, "value_coeff": 0.5, "entropy_coeff": 0.01, "kl_coeff": 0.05},
            read_for={"ref_logprobs": "kl_coeff", "values": "value_coeff", "returns": "value_coeff"},
            explain=enhanced_metrics,
        ),
        BuiltInLoss(
            "conservative_ppo",
            conservative_ppo,
            POLICY_INPUTS,
            None,
            {"kl_coeff": 1.0, "kl_target": 0.01, "cutoff_coeff": 1000.0},
            explain=conservative_metrics,
        ),
    )
}

BASE_LOSSES: dict[str, BuiltInLoss] = BUILT_IN | CLIENT_SIDE


def find_base_loss(name: str) -> BuiltInLoss:
    """The loss of the service or of the client that has this name.

    Raises:
        ObjectiveError: there is none.
    """
    if name not in BASE_LOSSES:
        raise ObjectiveError(f"The loss {name!r} is unknown: it is one of {', '.join(BASE_LOSSES)}.")
    return BASE_LOSSES[name]
