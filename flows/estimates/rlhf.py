"""Estimate of RLHF: one estimate per stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flows.config.dpo import DpoConfig
from flows.config.rlhf import RlhfConfig
from flows.config.train import SftConfig
from flows.estimates.costs import CostEstimate
from flows.estimates.rollouts import estimate_rollouts
from flows.estimates.supervised import Estimate, estimate
from flows.rlhf import within_budget

# Settings of the policy that name weights of earlier stages.
_WEIGHTS = ("init_from", "environment.params.path", "environment.params.preference_model_builder.path")


@dataclass(frozen=True, slots=True)
class RlhfEstimate:
    """Estimate of all stages.

    Attributes:
        run_name, model: Name and base model.
        stages: Estimate of each stage: `sft`, `reward` and `policy`, as far as the config has them.
        usd_low, usd_high: Estimates of the supervised stages plus the lower or the upper bound of the policy, in
            dollars; None if the price of a stage is unknown. A supervised stage adds the same amount to both, an
            estimate from above: two passes where a step may need them, and the maximum length for all that is sampled.
            So `usd_low` is no lower bound.
    """

    run_name: str
    model: str
    stages: Mapping[str, Estimate | CostEstimate]
    usd_low: float | None
    usd_high: float | None


def estimate_rlhf(config: RlhfConfig) -> RlhfEstimate:
    """Estimate each stage; the base model stands for the weights of earlier stages, which do not change the tokens.

    Raises:
        ConfigError: The config, the data or the prices are invalid.
        ServiceError: The service does not respond.
    """
    supervised = dict(_supervised_stages(config))
    # An earlier run is comparable even if it differs in these paths of weights. Unless it is given, the reference is
    # one of them: the warm start.
    is_reference_given = "reference" in config.policy.training
    may_differ = _WEIGHTS if is_reference_given else (*_WEIGHTS, "reference")
    policy = within_budget(config.policy_stage("", ""), config.budget, [])
    stages: dict[str, Estimate | CostEstimate] = {name: estimate(stage) for name, stage in supervised.items()}
    stages["policy"] = estimate_rollouts(policy, may_differ)
    low, high = (_total([_usd(stage, is_high=is_high) for stage in stages.values()]) for is_high in (False, True))
    return RlhfEstimate(config.run_name, config.model, stages, low, high)


def _supervised_stages(config: RlhfConfig) -> Iterator[tuple[str, SftConfig | DpoConfig]]:
    if config.warm_start:
        yield "sft", within_budget(config.warm_start_stage(), config.budget, [])
    if config.judge is None:
        yield "reward", within_budget(config.reward_stage(), config.budget, [])


def _usd(stage: Estimate | CostEstimate, *, is_high: bool) -> float | None:
    if isinstance(stage, Estimate):
        return stage.usd
    return (stage.high if is_high else stage.low).usd


def _total(usds: list[float | None]) -> float | None:
    known = [usd for usd in usds if usd is not None]
    return sum(known) if len(known) == len(usds) else None
