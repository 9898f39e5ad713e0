"""Reinforcement learning on environments: each step plays its groups with the weights that the step before made.

python -m flows.rl --config examples/rl.yaml learning_rate=1e-4
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Literal, Self

from prefect import flow
from pydantic import Field, model_validator

from blocks.errors import ConfigError
from flows.command_line import main
from flows.config import BuilderConfig, Config
from flows.reference import open_reference
from flows.result import TrainResult, as_state
from flows.rollout_config import POLICY_LOSS, RolloutConfig
from flows.run import Run, open_run
from flows.segments import in_segments
from flows.train import train
from flows.train_config import TrainConfig
from objectives.objective import Objective
from objectives.spec import ObjectiveSpec
from tasks.advantages import Shape
from tasks.evaluate import build_evaluator
from tasks.off_policy import OffPolicySource
from tasks.options import call, whole
from tasks.rollouts import Cut, HeldOutEnvironments, Play, RolloutSource, build_environments
from tasks.traces import write_traces
from tasks.transcript import Transcript
from tasks.transcript_page import write_transcript

# Beside the logprobs of the sampled tokens under the current weights.
GIVEN = ("ref_logprobs", "sampling_logprobs", "advantages", "values", "returns")


class AdvantageConfig(Config):
    """How rewards become advantages."""

    estimator: Literal["group_mean", "leave_one_out", "discounted", "gae"] = Field(
        default="group_mean",
        title="Estimator",
        description="An answer's whole reward less the mean of its group, or of the group's other members, for each of "
        "its tokens; or each token's discounted return less the group's mean; or generalized advantage estimation with "
        "the mean of the others as critic.",
    )
    scale: bool = Field(
        default=False,
        title="Scale",
        description="Divide by the standard deviation of the group, as GRPO does; for `group_mean`.",
    )
    discount: float = Field(
        default=1.0,
        gt=0,
        le=1,
        title="Discount",
        description="What a reward is worth one token earlier; for `discounted` and `gae`.",
    )
    decay: float = Field(default=0.95, ge=0, le=1, title="Decay", description="Lambda of `gae`.")
    drop_constant: bool = Field(
        default=False,
        title="Drop constant groups",
        description="Leave out groups whose members all earned the same, which teach nothing by themselves.",
    )
    kl_coefficient: float = Field(
        default=0.0,
        ge=0,
        title="KL in the reward",
        description="What a nat of distance from `reference` costs; the regularizer `kl` has it in the loss instead.",
    )

    @model_validator(mode="after")
    def _check_estimator(self) -> Self:
        if self.scale and self.estimator != "group_mean":
            raise ValueError("scale goes with the estimator group_mean alone: leave it out, or take that one")
        if self.discount != 1 and self.estimator not in ("discounted", "gae"):
            raise ValueError("discount goes with the estimators discounted and gae: leave it out, or take one of them")
        if self.decay != type(self).model_fields["decay"].default and self.estimator != "gae":
            raise ValueError("decay goes with the estimator gae alone: leave it out, or take that one")
        return self


class ModeConfig(Config):
    """When groups are played, and how those of a step are trained on."""

    mode: Literal["sync", "stream", "async"] = Field(
        default="sync",
        title="Mode",
        description="`sync` plays all groups of a step, then trains; `stream` trains on each minibatch as soon as its "
        "groups are played; `async` plays the groups of later steps meanwhile, with older weights.",
    )
    groups_per_batch: int | None = Field(
        default=None,
        ge=1,
        title="Groups of a step",
        description="Taken from the environments one after the other; unset means a batch of theirs.",
    )
    num_minibatches: int = Field(
        default=1, ge=1, title="Minibatches", description="Of an update, whose gradients add up; not in mode `sync`."
    )
    num_substeps: int = Field(
        default=1, ge=1, title="Updates", description="Of a step, each on its share of the groups, one after the other."
    )
    max_steps_off_policy: int = Field(
        default=1,
        ge=1,
        title="Steps off-policy",
        description="How many updates old the weights may be that played what a step trains on, in mode `async`; older "
        "groups are played again.",
    )

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.mode == "sync" and self.num_minibatches > 1:
            raise ValueError("num_minibatches goes with the modes stream and async: leave it out, or take one of them")
        if self.mode == "stream" and self.num_minibatches == 1:
            raise ValueError("the mode stream trains on several minibatches: set num_minibatches to 2 or more")
        if self.mode != "async" and self.max_steps_off_policy > 1:
            raise ValueError("max_steps_off_policy goes with the mode async alone: leave it out, or take that mode")
        return self


class RlConfig(TrainConfig):
    """A reinforcement learning run."""

    environment: BuilderConfig = Field(
        title="Environment", description="A tinker-cookbook RLDatasetBuilder and its parameters."
    )
    rollout: RolloutConfig = Field(
        default=RolloutConfig(), title="Rollouts", description="How the environments are played."
    )
    advantage: AdvantageConfig = Field(
        default=AdvantageConfig(), title="Advantages", description="How rewards become what is trained on."
    )
    schedule: ModeConfig = Field(
        default=ModeConfig(), title="Schedule", description="When groups are played, and how they are trained on."
    )
    transcripts_every: int = Field(
        default=20,
        ge=0,
        title="Transcripts every",
        description="Steps between pages of what was played, in the run's directory and in MLflow, where each group is "
        "a trace, too; 0 is never.",
    )
    objective: ObjectiveSpec = Field(
        default=POLICY_LOSS,
        title="Objective",
        description="The base loss, of those that read advantages, and its weighted regularizers.",
    )

    @model_validator(mode="after")
    def _check_guards(self) -> Self:
        cut = self.schedule
        if self.guards.looks_first and cut.num_minibatches * cut.num_substeps > 1:
            raise ValueError(
                "guards.skip leaves out a whole step, and one of several minibatches or updates is trained on by then: "
                "take rollback or stop"
            )
        return self


@flow(name="rl", flow_run_name="{config.run_name}")
def rl(config: RlConfig) -> TrainResult:
    """Train a model on the rewards of environments, from the start of the run or its last checkpoint."""
    play = config.rollout.play(config.seed, Shape(**config.advantage.model_dump()))
    with Objective.from_spec(config.objective) as objective:
        objective.check_needs(GIVEN)
        if objective.base is None:
            raise ConfigError(
                "objective.base_loss is cross_entropy, which would learn whatever was sampled, whatever its reward: "
                "take importance_sampling, ppo, grpo or another loss that reads advantages."
            )
        evaluators = [build_evaluator(each.builder, each.params) for each in config.evaluators]

        def attempt(restarts: Sequence[str]) -> TrainResult:
            with (
                open_run(config, restarts, lora_rank=config.lora_rank, seed=config.seed) as run,
                closing(_open_source(config, play, run)) as source,
            ):
                held_out = [HeldOutEnvironments(source.test, play)] if source.test is not None else []
                reference = None
                if config.advantage.kl_coefficient or objective.needs("ref_logprobs"):
                    reference = open_reference(run, config, keeps=False)
                source.reference = reference if config.advantage.kl_coefficient else None
                source.show = partial(_show, config, run)
                return as_state(train(run, config, source, objective, [*held_out, *evaluators], reference))

        return in_segments(config, attempt)


def _show(config: RlConfig, run: Run, step: int, transcript: Transcript) -> None:
    every = config.transcripts_every
    if every and step % every == 0:
        tokenizer = run.client.get_tokenizer()
        call(write_transcript, run.directory, run.log, tokenizer, step, whole(transcript))
        call(write_traces, run.log, tokenizer, step, whole(transcript))


def _open_source(config: RlConfig, play: Play, run: Run) -> RolloutSource:
    schedule, environment, tokenizer = config.schedule, config.environment, run.client.get_tokenizer()
    train_on, test = build_environments(environment.builder, environment.params, tokenizer, run.for_builders)
    cut = Cut(schedule.groups_per_batch, schedule.num_substeps, schedule.num_minibatches)
    if schedule.mode == "async":
        return OffPolicySource(train_on, test, tokenizer, play, cut, schedule.max_steps_off_policy)
    return RolloutSource(train_on, test, tokenizer, play, cut)


if __name__ == "__main__":
    main(rl, RlConfig)
