"""Reinforcement learning on environments.

python -m flows.rl --config examples/rl.yaml learning_rate=1e-3
"""

if __name__ == "__main__":  # first, so that --help does not wait for the imports below
    from flows.runs.cli import main

    main("flows.rl:rl", "flows.config.rl:RlConfig", __doc__)

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial

from mlflow.exceptions import MlflowException
from prefect import flow
from prefect.logging import get_run_logger

from blocks.errors import ConfigError, reason
from flows.config.rl import HealthConfig, RlConfig
from flows.monitoring.run_tags import note_warning, warn_of_metrics
from flows.runs.result import TrainResult
from flows.runs.retries import run_with_approval
from flows.runs.rights import apply_rights
from flows.runs.run import Run, open_run
from flows.runs.start.config_record import FORMAT_OF_CORRECTIONS, recorded_format
from flows.runs.teachers import open_reference
from flows.training.trainer import Trainer
from objectives.base_loss import PolicyLoss
from objectives.config.aliases import renamed_attribute
from objectives.losses.policy.correction import CORRECTABLE
from objectives.objective import Objective
from tasks.common.task import call, opaque_argument
from tasks.evaluation.evaluators import build_evaluators
from tasks.rl.async_rollout_source import AsyncRolloutSource
from tasks.rl.health import HealthLimits, HealthWatch, mismatch_limit
from tasks.rl.oversampling import OversamplingRecord
from tasks.rl.rollout_source import (
    HeldOutEnvironments,
    MinibatchSettings,
    RolloutSettings,
    RolloutSource,
    build_environments,
)
from tasks.rl.rollouts.hang_watch import HANG_FIX, HangWatch
from tasks.rl.transcripts.mlflow_traces import write_traces
from tasks.rl.transcripts.rollout_log import Transcript
from tasks.rl.transcripts.rollout_page import write_transcript
from tasks.training.batch_source import MetricWarning
from tasks.training.reference import Reference

__getattr__ = partial(renamed_attribute, "flows.rl")  # names of release 0.1

# Inputs that the base loss and the terms may read, in addition to the current logprobs.
AVAILABLE_INPUTS = ("ref_logprobs", "sampling_logprobs", "advantages", "values", "returns")


@flow(name="rl", flow_run_name="{config.run_name}", on_running=[apply_rights])
def rl(config: RlConfig) -> TrainResult:
    """Train a model on the rewards of environments, or resume the run from its last checkpoint."""
    settings = config.rollout.settings(config.seed, config.advantage.settings(), config.rewards)
    with Objective.from_spec(config.objective, config.seed) as objective:
        objective.check_needs(AVAILABLE_INPUTS)
        if objective.base is None:
            raise ConfigError(
                "objective.base_loss is cross_entropy, which would imitate every sample regardless of its reward: use "
                "importance_sampling, ppo, grpo or another loss that reads advantages."
            )

        objective.correct(config.base_correction())

        def attempt(restarts: Sequence[str]) -> TrainResult:
            with (
                open_run(config, restarts, config.adapter) as run,
                _watch_hangs(config, run) as hangs,
                closing(_open_source(config, settings, run)) as source,
            ):
                # A run that was started before corrections existed continues without them.
                started_with = recorded_format(run.directory)
                if started_with < FORMAT_OF_CORRECTIONS:
                    objective.correct(None)
                correction = describe_correction(config, objective, started_with)
                get_run_logger().info("Correction between sampler and trainer: %s.", correction)
                run.log.tag("tinker_flows.correction", correction)
                if config.advantage.critic:
                    get_run_logger().info(
                        "Critic: ridge regression on %s and the group's mean return, fitted after each step. As long "
                        "as critic/num_turns is 0, the group's mean return is the baseline.",
                        config.advantage.critic.features,
                    )

                evaluators = build_evaluators(config.evaluators, config.infrequent_evaluators, run.builder_arguments)
                reference = None
                if config.advantage.kl_coefficient or objective.needs("ref_logprobs"):
                    reference = open_reference(run, config, uses_cache=False)
                _configure_source(source, config, run, objective, reference)
                test = source.test
                held_out = [HeldOutEnvironments(test, source.settings, source.tokenizer)] if test is not None else []
                if hangs:
                    source.watch_hangs(hangs)
                    for groups in held_out:
                        groups.hangs = hangs
                return Trainer(run, config, source, objective, [*held_out, *evaluators], reference).train()

        return run_with_approval(config, attempt)


def _configure_source(
    source: RolloutSource, config: RlConfig, run: Run, objective: Objective, reference: Reference | None
) -> None:
    """Set the options of a source that `_open_source` does not pass to its constructor."""
    source.reference = reference if config.advantage.kl_coefficient else None
    source.correction = objective.correction
    source.rewards = config.named_rewards()
    source.measures_post_kl = config.compute_post_kl
    source.scores_last_n = config.prompt_logprobs_last_n == "auto"
    source.show = partial(_write_transcript, config, run)
    if config.health:
        source.health = HealthWatch(_health_limits(config, config.health))
    if config.rollout.oversampling_factor > 1:
        source.oversampling = OversamplingRecord(run.directory)


def _health_limits(config: RlConfig, health: HealthConfig) -> HealthLimits:
    limits = health.model_dump()
    if health.mismatch_above == "auto":
        on_policy = config.schedule.mode == "sync" and config.schedule.num_substeps == 1
        limit = mismatch_limit(config.model, on_policy=on_policy)
        limits["mismatch_above"] = math.inf if config.rollout.completer else limit
    return HealthLimits(**limits)


def _watch_hangs(config: RlConfig, run: Run) -> AbstractContextManager[HangWatch | None]:
    """Watch for groups that no longer respond, and warn of them; yield None if `health` is null."""
    if config.health is None:
        return nullcontext()

    def report(warning: MetricWarning) -> None:
        warn_of_metrics(run.log, config.run_name, "health", [warning])

    fix = f"{HANG_FIX}, and rollout.termination.grader_timeout_seconds ends hanging rewards"
    return closing(HangWatch(_health_limits(config, config.health), config.rollout.timeout_s, report, fix))


def describe_correction(config: RlConfig, objective: Objective, started_with: int) -> str:
    """Describe the correction in effect; if samples of older weights are not corrected by default, say why.

    Args:
        started_with: format version that the run was started with.
    """
    if objective.correction is not None:
        return ", ".join(f"{name} {value}" for name, value in objective.correction.changes().items())
    if config.schedule.mode == "sync" or config.correction == "none":
        return "none"
    if started_with < FORMAT_OF_CORRECTIONS:
        return "none: the run was started before corrections existed"
    assert objective.base is not None, "checked by the flow"
    name = objective.base.term.name
    if isinstance(objective.base.term.evaluate, PolicyLoss):
        if name in CORRECTABLE:
            return "none: rollout.completer samples from a distribution of its own"
        return f"none: a correction would change the penalty of {name}, which depends on the sampler's logprobs"
    return f"none: the base loss {name} is a registered term, and only policy losses have corrections"


def _write_transcript(config: RlConfig, run: Run, step: int, transcript: Transcript) -> None:
    every = config.transcripts_every
    if every and step % every == 0:
        tokenizer = run.client.get_tokenizer()
        call(write_transcript, run.directory, run.log, tokenizer, step, opaque_argument(transcript))
        try:
            call(write_traces, run.log, tokenizer, step, opaque_argument(transcript))
        except (MlflowException, TypeError, ValueError) as error:  # the transcript itself is written
            text = (
                f"The traces of the rollouts of step {step} in MLflow are incomplete ({reason(error)}); the run's "
                "directory has their transcript."
            )
            note_warning(run.log, "traces", text)


def _open_source(config: RlConfig, settings: RolloutSettings, run: Run) -> RolloutSource:
    if recorded_format(run.directory) < FORMAT_OF_CORRECTIONS:
        settings = settings.with_service_logprobs()
    schedule, environment, tokenizer = config.schedule, config.environment, run.client.get_tokenizer()
    train_data, test = build_environments(environment.builder, environment.params, tokenizer, run.builder_arguments)
    cut = MinibatchSettings(schedule.groups_per_batch, schedule.num_substeps, schedule.num_minibatches)
    if schedule.mode == "async":
        return AsyncRolloutSource(train_data, test, tokenizer, settings, cut, schedule.max_steps_off_policy)
    return RolloutSource(train_data, test, tokenizer, settings, cut)
