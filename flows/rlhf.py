"""RLHF: a supervised warm start, a reward model from comparisons, and reinforcement learning against it.

tinker-flows run rlhf --config examples/rlhf.yaml
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from prefect import flow

from flows.blocks_of import storage_of
from flows.command_line import main
from flows.dpo import DpoConfig, dpo
from flows.named_checkpoint import find_checkpoint
from flows.result import TrainResult, as_state
from flows.rl import rl
from flows.rlhf_config import RlhfConfig
from flows.sft import SftConfig, sft


@flow(name="rlhf", flow_run_name="{config.run_name}")
def rlhf(config: RlhfConfig) -> TrainResult:
    """Train a policy against a reward model, each stage a run of its own; one that is finished is not repeated.

    Returns:
        What the last stage left: the policy's, or that of a stage whose budget or gate ends it here.
    """
    start = reward = ""
    if config.warm_start:
        warm_start = config.warm_start_stage()
        result = sft(warm_start)
        if _ends_here(result):
            return as_state(result)
        start = _weights(warm_start, result)
    if config.judge is None:
        stage = config.reward_stage()
        result = dpo(stage) if isinstance(stage, DpoConfig) else sft(stage)
        if _ends_here(result):
            return as_state(result)
        reward = _weights(stage, result)
    return as_state(rl(config.policy_stage(start, reward)))


def _ends_here(result: TrainResult) -> bool:
    """A stage that is not done, or not good enough, is nothing to build on."""
    return bool(result.stopped or result.not_promoted)


def _weights(config: SftConfig | DpoConfig, result: TrainResult) -> str:
    """The path of the best weights, where the stage keeps them, else of its last ones."""
    if config.keep_best is None:
        return result.state_path
    return find_checkpoint(f"{config.run_name}@best", storage_of(config)).path


if __name__ == "__main__":
    main(rlhf, RlhfConfig)
