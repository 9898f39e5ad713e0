"""Registry of losses by name, with their inputs, parameters and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from objectives.errors import ObjectiveError
from objectives.losses.cross_entropy import cross_entropy
from objectives.losses.policy.enhanced_ppo import enhanced_metrics, enhanced_ppo
from objectives.losses.policy.group_relative import dapo, dr_grpo, grpo
from objectives.losses.policy.gspo import gspo
from objectives.losses.policy.importance_weighted import cispo, importance_sampling, ppo
from objectives.losses.policy.penalized import (
    conservative_ppo,
    conservative_ppo_metrics,
    dro,
    dro_metrics,
    stable_reinforce,
    stable_reinforce_metrics,
)
from objectives.losses.policy.ratios import (
    RatioMetrics,
    Threshold,
    compute_ratio_metrics,
    sequence_log_ratios,
    token_log_ratios,
)

CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"


@dataclass(frozen=True, slots=True)
class BuiltInLoss:
    """Loss function with its inputs and parameters, named as in the SDK if the service has the loss.

    Attributes:
        name: the SDK's ``loss_fn``.
        fn: function of the logprobs, the inputs, the offsets if `takes_offsets`, and the parameters by keyword.
        inputs: names in the SDK's ``loss_fn_inputs``, in the order of the function's arguments.
        gating_input: input whose zeros remove a token's gradient; ``None`` if every token has a gradient.
        defaults: the SDK's ``loss_fn_config`` with default values; all are numbers of at least 0.
        takes_offsets: true if the function works on sequences and takes their offsets after the inputs.
        optional_inputs: maps an input to the only parameter that uses it; the function receives ``None`` for the input
            if that parameter is 0.
        extra_metrics: function of the same arguments that returns the loss's own metrics. If the loss adds other parts
            to the policy surrogate, the metrics include ``policy``, the surrogate per token.
        reduction: ``"sum"`` over tokens, or ``"mean"`` over tokens or completions; the mean of each minibatch is
            weighted by its share of the update.
        unit: for a mean, what the gradient at one token shrinks with; see `objectives.term.Term.unit`.
    """

    name: str
    fn: Callable[..., Tensor]
    inputs: tuple[str, ...]
    gating_input: str | None
    defaults: Mapping[str, float] = field(default_factory=dict)
    takes_offsets: bool = False
    optional_inputs: Mapping[str, str] = field(default_factory=dict)
    extra_metrics: Callable[..., dict[str, float]] | None = None
    reduction: Literal["sum", "mean"] = "sum"
    unit: Literal["token", "sequence"] = "token"

    @property
    def is_policy_loss(self) -> bool:
        """True if the loss compares the policy with the policy that sampled the data."""
        return "advantages" in self.inputs

    @property
    def clips(self) -> bool:
        return CLIP_HIGH in self.defaults

    def compute(
        self,
        logprobs_DT: Tensor,
        inputs: Mapping[str, Tensor],
        offsets_D: Tensor | None,
        params: Mapping[str, Threshold],
    ) -> Tensor:
        """Compute the loss of packed sequences, a 0-d tensor.

        Args:
            inputs: tensors by the names of `inputs`, shaped like the logprobs.
            offsets_D: ``(D + 1,)``: sequence ``d`` is ``[offsets_D[d], offsets_D[d + 1])``; ``None`` for one sequence.
            params: values for all of `defaults`; clip bounds may be one number per token.
        """
        return self.fn(logprobs_DT, *self._arguments(inputs, offsets_D, params), **params)

    def _arguments(
        self, inputs: Mapping[str, Tensor], offsets_D: Tensor | None, params: Mapping[str, Threshold]
    ) -> list[Tensor | None]:
        required = self.required_inputs(params)
        arguments = [inputs[name] if name in required else None for name in self.inputs]
        return [*arguments, offsets_D] if self.takes_offsets else arguments

    def required_inputs(self, params: Mapping[str, Threshold]) -> tuple[str, ...]:
        """Return the names of the inputs that the loss reads with these parameters.

        >>> find_built_in("ppo").required_inputs({"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
        ('logprobs', 'advantages')
        """
        optional = self.optional_inputs
        return tuple(name for name in self.inputs if name not in optional or params[optional[name]] != 0)

    def compute_metrics(
        self, logprobs_DT: Tensor, inputs: Mapping[str, Tensor], offsets_D: Tensor, params: Mapping[str, Threshold]
    ) -> RatioMetrics:
        """Compute the ratio metrics of a policy loss; see `compute` for the arguments."""
        sampling_DT, advantages_DT = inputs["logprobs"], inputs["advantages"]
        if "sequence_ratio_mask" in self.inputs:
            log_ratio_DT = sequence_log_ratios(logprobs_DT, sampling_DT, inputs["sequence_ratio_mask"], offsets_D)
        else:
            log_ratio_DT = token_log_ratios(logprobs_DT, sampling_DT, advantages_DT)
        low, high = params.get(CLIP_LOW, 0.0), params.get(CLIP_HIGH, math.inf)
        return compute_ratio_metrics(log_ratio_DT, advantages_DT != 0, offsets_D, low, high)

    def compute_extra_metrics(
        self, logprobs_DT: Tensor, inputs: Mapping[str, Tensor], offsets_D: Tensor, params: Mapping[str, Threshold]
    ) -> dict[str, float]:
        """Compute the metrics specific to this loss; see `compute` for the arguments."""
        if self.extra_metrics is None:
            return {}
        return self.extra_metrics(logprobs_DT.detach(), *self._arguments(inputs, offsets_D, params), **params)

    def check_params(self, config: Mapping[str, object]) -> dict[str, float]:
        """Validate the parameters and fill in the defaults.

        Raises:
            ObjectiveError: a name is unknown, a value is not a number of at least 0, or the lower clip bound is above
                the upper one.

        >>> find_built_in("ppo").check_params({"clip_high_threshold": 1.3})
        {'clip_low_threshold': 0.8, 'clip_high_threshold': 1.3}
        """
        params = dict(self.defaults)
        for name, value in config.items():
            if name not in self.defaults:
                known = f"its parameters are {', '.join(self.defaults)}" if self.defaults else "it has no parameters"
                raise ObjectiveError(f"The loss {self.name!r} has no parameter {name!r}; {known}.")
            if isinstance(value, str):  # YAML reads 1e-1 as text
                with suppress(ValueError):
                    value = float(value)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ObjectiveError(
                    f"The parameter {name!r} of the loss {self.name!r} is {value!r}; set it to a finite number of "
                    "at least 0."
                )
            params[name] = float(value)
        if self.clips and params[CLIP_LOW] > params[CLIP_HIGH]:
            raise ObjectiveError(
                f"The loss {self.name!r} has {CLIP_LOW}={params[CLIP_LOW]} above {CLIP_HIGH}={params[CLIP_HIGH]}; set "
                "them in ascending order. They bound the ratio itself: 0.8, not 0.2."
            )
        return params


POLICY_INPUTS = ("logprobs", "advantages")

BUILT_IN: dict[str, BuiltInLoss] = {
    loss.name: loss
    for loss in (
        BuiltInLoss("cross_entropy", cross_entropy, ("weights",), "weights"),
        BuiltInLoss("importance_sampling", importance_sampling, POLICY_INPUTS, "advantages"),
        BuiltInLoss("ppo", ppo, POLICY_INPUTS, "advantages", {CLIP_LOW: 0.8, CLIP_HIGH: 1.2}),
        BuiltInLoss("cispo", cispo, POLICY_INPUTS, "advantages", {CLIP_LOW: 0.0, CLIP_HIGH: 4.0}),
        BuiltInLoss("dro", dro, POLICY_INPUTS, None, {"beta": 0.05}, extra_metrics=dro_metrics),
        BuiltInLoss(
            "gspo",
            gspo,
            (*POLICY_INPUTS, "sequence_ratio_mask"),
            "advantages",
            {CLIP_LOW: 1 - 3e-4, CLIP_HIGH: 1 + 4e-4},
            takes_offsets=True,
        ),
        BuiltInLoss(
            "stable_reinforce",
            stable_reinforce,
            POLICY_INPUTS,
            "advantages",
            {"kl_coeff": 0.01},
            extra_metrics=stable_reinforce_metrics,
        ),
    )
}


def find_built_in(name: str) -> BuiltInLoss:
    """Return the service's loss with this name.

    Raises:
        ObjectiveError: the name is unknown.
    """
    if name not in BUILT_IN:
        raise ObjectiveError(f"The loss {name!r} is unknown; use one of {', '.join(BUILT_IN)}.")
    return BUILT_IN[name]


_CLIP = {CLIP_LOW: 0.8, CLIP_HIGH: 1.2}


CLIENT_SIDE: dict[str, BuiltInLoss] = {
    loss.name: loss
    for loss in (
        BuiltInLoss("grpo", grpo, POLICY_INPUTS, "advantages", _CLIP, takes_offsets=True, reduction="mean"),
        BuiltInLoss(
            "dr_grpo",
            dr_grpo,
            POLICY_INPUTS,
            "advantages",
            _CLIP,
            takes_offsets=True,
            reduction="mean",
            unit="sequence",
        ),
        BuiltInLoss("dapo", dapo, POLICY_INPUTS, "advantages", {CLIP_LOW: 0.8, CLIP_HIGH: 1.28}, reduction="mean"),
        BuiltInLoss(
            "enhanced_ppo",
            enhanced_ppo,
            (*POLICY_INPUTS, "ref_logprobs", "values", "returns"),
            None,
            {**_CLIP, "value_coeff": 0.5, "entropy_coeff": 0.01, "kl_coeff": 0.05},
            optional_inputs={"ref_logprobs": "kl_coeff", "values": "value_coeff", "returns": "value_coeff"},
            extra_metrics=enhanced_metrics,
        ),
        BuiltInLoss(
            "conservative_ppo",
            conservative_ppo,
            POLICY_INPUTS,
            None,
            {"kl_coeff": 1.0, "kl_target": 0.01, "cutoff_coeff": 1000.0},
            extra_metrics=conservative_ppo_metrics,
        ),
    )
}


BASE_LOSSES: dict[str, BuiltInLoss] = BUILT_IN | CLIENT_SIDE


def find_base_loss(name: str) -> BuiltInLoss:
    """Return the service's or the client-side loss with this name.

    Raises:
        ObjectiveError: the name is unknown.
    """
    if name not in BASE_LOSSES:
        raise ObjectiveError(f"The loss {name!r} is unknown; use one of {', '.join(BASE_LOSSES)}.")
    return BASE_LOSSES[name]
