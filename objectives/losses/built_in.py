"""The losses that a service knows by name, with what each of them reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from objectives.errors import ObjectiveError
from objectives.losses.cispo import cispo
from objectives.losses.cross_entropy import cross_entropy
from objectives.losses.dro import dro
from objectives.losses.gspo import gspo
from objectives.losses.importance_sampling import importance_sampling
from objectives.losses.ppo import ppo
from objectives.losses.ratios import (
    RatioMetrics,
    Threshold,
    compute_ratio_metrics,
    sequence_log_ratios,
    token_log_ratios,
)
from objectives.losses.stable_reinforce import stable_reinforce

CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"


@dataclass(frozen=True, slots=True)
class BuiltInLoss:
    """A loss function with its place in the protocol.

    Attributes:
        name: the SDK's ``loss_fn``.
        fn: the function.
        inputs: the SDK's ``loss_fn_inputs`` that it takes behind the logprobs, in order.
        decisive: the one of them whose zeros leave a token without a gradient; ``None`` where every token has one.
        defaults: the SDK's ``loss_fn_config``, with default values; all are numbers of at least 0.
        by_sequence: whether it looks at sequences, and so takes their offsets last.
        read_for: inputs that are read for one parameter only: where that is 0, the function is given ``None``.
        explain: more metrics of a policy loss, from the arguments of the function.
    """

    name: str
    fn: Callable[..., Tensor]
    inputs: tuple[str, ...]
    decisive: str | None
    defaults: Mapping[str, float] = field(default_factory=dict)
    by_sequence: bool = False
    read_for: Mapping[str, str] = field(default_factory=dict)
    explain: Callable[..., dict[str, float]] | None = None

    @property
    def is_policy_loss(self) -> bool:
        """Whether it compares the policy with the one that sampled the data."""
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
        """The loss of packed sequences, 0-d.

        Args:
            inputs: by the names of `inputs`, each shaped as the logprobs.
            offsets_D: ``(D + 1,)``: sequence ``d`` is ``[offsets_D[d], offsets_D[d + 1])``; ``None`` for a single one.
            params: all of `defaults`; the bounds of a clip may be one number per token.
        """
        return self.fn(logprobs_DT, *self._given(inputs, offsets_D, params), **params)

    def _given(
        self, inputs: Mapping[str, Tensor], offsets_D: Tensor | None, params: Mapping[str, Threshold]
    ) -> list[Tensor | None]:
        read = self.needed(params)
        given = [inputs[name] if name in read else None for name in self.inputs]
        return [*given, offsets_D] if self.by_sequence else given

    def needed(self, params: Mapping[str, Threshold]) -> tuple[str, ...]:
        """Those of `inputs` that are read under these parameters.

        >>> find_built_in("ppo").needed({"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
        ('logprobs', 'advantages')
        """
        return tuple(name for name in self.inputs if name not in self.read_for or params[self.read_for[name]] != 0)

    def compute_metrics(
        self, logprobs_DT: Tensor, inputs: Mapping[str, Tensor], offsets_D: Tensor, params: Mapping[str, Threshold]
    ) -> RatioMetrics:
        """What to watch of a policy loss; arguments as of `compute`."""
        sampling_DT, advantages_DT = inputs["logprobs"], inputs["advantages"]
        if "sequence_ratio_mask" in self.inputs:
            log_ratio_DT = sequence_log_ratios(logprobs_DT, sampling_DT, inputs["sequence_ratio_mask"], offsets_D)
        else:
            log_ratio_DT = token_log_ratios(logprobs_DT, sampling_DT, advantages_DT)
        low, high = params.get(CLIP_LOW, 0.0), params.get(CLIP_HIGH, math.inf)
        return compute_ratio_metrics(log_ratio_DT, advantages_DT != 0, offsets_D, low, high)

    def explained(
        self, logprobs_DT: Tensor, inputs: Mapping[str, Tensor], offsets_D: Tensor, params: Mapping[str, Threshold]
    ) -> dict[str, float]:
        """What the loss says of itself beside its ratios; arguments as of `compute`."""
        if self.explain is None:
            return {}
        return self.explain(logprobs_DT.detach(), *self._given(inputs, offsets_D, params), **params)

    def check_params(self, config: Mapping[str, object]) -> dict[str, float]:
        """All parameters, checked and with their defaults.

        Raises:
            ObjectiveError: an unknown name, or a value that is no number of at least 0.

        >>> find_built_in("ppo").check_params({"clip_high_threshold": 1.3})
        {'clip_low_threshold': 0.8, 'clip_high_threshold': 1.3}
        """
        for name, value in config.items():
            if name not in self.defaults:
                known = f"it takes {', '.join(self.defaults)}" if self.defaults else "it takes none"
                raise ObjectiveError(f"The loss {self.name!r} has no parameter {name!r}: {known}.")
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ObjectiveError(
                    f"The parameter {name!r} of the loss {self.name!r} is {value!r}, where a number of at least 0 is "
                    "expected."
                )
        params = {name: float(config.get(name, default)) for name, default in self.defaults.items()}  # pyright: ignore[reportArgumentType]
        if self.clips and params[CLIP_LOW] > params[CLIP_HIGH]:
            raise ObjectiveError(
                f"The loss {self.name!r} is to clip ratios between {params[CLIP_LOW]} and {params[CLIP_HIGH]}: give "
                f"{CLIP_LOW} and {CLIP_HIGH} in ascending order; they bound the ratio itself, so 0.8 and not 0.2."
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
        BuiltInLoss("dro", dro, POLICY_INPUTS, None, {"beta": 0.05}),
        BuiltInLoss(
            "gspo",
            gspo,
            (*POLICY_INPUTS, "sequence_ratio_mask"),
            "advantages",
            {CLIP_LOW: 1 - 3e-4, CLIP_HIGH: 1 + 4e-4},
            by_sequence=True,
        ),
        BuiltInLoss("stable_reinforce", stable_reinforce, POLICY_INPUTS, "advantages", {"kl_coeff": 0.01}),
    )
}


def find_built_in(name: str) -> BuiltInLoss:
    """The loss of this name.

    Raises:
        ObjectiveError: there is none.
    """
    if name not in BUILT_IN:
        raise ObjectiveError(f"The loss {name!r} is unknown: it is one of {', '.join(BUILT_IN)}.")
    return BUILT_IN[name]
