"""Reinforcement learning on environments: each step plays its groups with the weights that the step before made.

python -m flows.rl --config examples/rl.yaml learning_rate=1e-4
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from collections.abc import Sequence
from typing import Literal, Self

from prefect import flow
from pydantic import Field, model_validator

from blocks.errors import ConfigError
from flows.command_line import main
from flows.config import BuilderConfig, Config
from flows.result import TrainResult, as_state
from flows.run import open_run
from flows.segments import in_segments
from flows.train import train
from flows.train_config import TrainConfig
from objectives.objective import Objective
from objectives.spec import ObjectiveSpec
from tasks.evaluate import build_evaluator
from tasks.rollout import Patient
from tasks.rollouts import HeldOutEnvironments, Play, build_environments
from tasks.trajectories import Shape

# Beside the logprobs of the sampled tokens under the current weights.
GIVEN = ("ref_logprobs", "sampling_logprobs", "advantages")


class RolloutConfig(Config):
    """How environments are played."""

    max_tokens: int = Field(default=256, ge=1, title="Tokens", description="The most that are sampled in one turn.")
    temperature: float = Field(default=1.0, gt=0, le=10, title="Temperature", description="Of the sampling.")
    max_retries: int = Field(
        default=2,
        ge=0,
        title="Retries",
        description="How often a group with too few successes is played again, with fresh environments.",
    )
    min_successful: int | None = Field(
        default=None,
        ge=1,
        title="Enough members",
        description="Rollouts of a group that are enough where others fail; unset means all of them.",
    )
    timeout_s: float | None = Field(
        default=None, gt=0, title="Time limit (s)", description="Of one attempt at a group; unset is no limit."
    )


class AdvantageConfig(Config):
    """How rewards become advantages."""

    baseline: Literal["group_mean", "leave_one_out"] = Field(
        default="group_mean",
        title="Baseline",
        description="What a reward is compared with: the mean of its group, or of the group's other members.",
    )
    scale: bool = Field(
        default=False,
        title="Scale",
        description="Divide by the standard deviation of the group, as GRPO does; for `group_mean`.",
    )
    drop_constant: bool = Field(
        default=False,
        title="Drop constant groups",
        description="Leave out groups whose members all earned the same, which teach nothing by themselves.",
    )

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        if self.scale and self.baseline != "group_mean":
            raise ValueError("scale goes with the baseline group_mean alone: leave it out, or take that baseline")
        return self


class RlConfig(TrainConfig):
    """A reinforcement learning run, on-policy."""

    environment: BuilderConfig = Field(
        title="Environment", description="A tinker-cookbook RLDatasetBuilder and its parameters."
    )
    rollout: RolloutConfig = Field(
        default=RolloutConfig(), title="Rollouts", description="How the environments are played."
    )
    advantage: AdvantageConfig = Field(
        default=AdvantageConfig(), title="Advantages", description="How rewards become what is trained on."
    )
    objective: ObjectiveSpec = Field(
        default=ObjectiveSpec.model_validate({"base_loss": "importance_sampling"}),
        title="Objective",
        description="The base loss, of those that read advantages, and its weighted regularizers.",
    )


@flow(name="rl", flow_run_name="{config.run_name}")
def rl(config: RlConfig) -> TrainResult:
    """Train a model on the rewards of environments, from the start of the run or its last checkpoint."""
    rollouts = config.rollout
    strategy = Patient(rollouts.max_retries, rollouts.min_successful, rollouts.timeout_s)
    play = Play(config.seed, rollouts.max_tokens, rollouts.temperature, strategy)
    shape = Shape(config.advantage.baseline, config.advantage.scale, config.advantage.drop_constant)
    with Objective.from_spec(config.objective) as objective:
        objective.check_needs(GIVEN)
        if objective.base is None:
            raise ConfigError(
                "objective.base_loss is cross_entropy, which would learn whatever was sampled, whatever its reward: "
                "take importance_sampling, ppo, grpo or another loss that reads advantages."
            )
        evaluators = [build_evaluator(each.builder, each.params) for each in config.evaluators]

        def attempt(restarts: Sequence[str]) -> TrainResult:
            with open_run(config, restarts, lora_rank=config.lora_rank, seed=config.seed) as run:
                environment = config.environment
                source = build_environments(
                    environment.builder, environment.params, run.client.get_tokenizer(), play, shape
                )
                held_out = [HeldOutEnvironments(source.test, play)] if source.test is not None else []
                return as_state(train(run, config, source, objective, [*held_out, *evaluators]))

        return in_segments(config, attempt)


if __name__ == "__main__":
    main(rl, RlConfig)
