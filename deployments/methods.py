"""Training methods of the command line, with the import paths of their flows and configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blocks.errors import ConfigError
from flows.config.methods import CONFIG_PATHS
from objectives.config.import_path import import_path
from objectives.errors import did_you_mean

if TYPE_CHECKING:
    from prefect import Flow

    from flows.config.base import NamedConfig
    from flows.runs.result import TrainResult


@dataclass(frozen=True, slots=True)
class Method:
    """Training method. Its flow and config are import paths, because modules of `flows` take seconds to import.

    Attributes:
        description: text for the help.
        flow, config: `module:name`, as in `flows.sft:sft`.
    """

    description: str
    flow: str
    config: str


METHODS: Mapping[str, Method] = {
    "sft": Method("supervised fine-tuning", "flows.sft:sft", CONFIG_PATHS["sft"]),
    "dpo": Method(
        "preference optimization on pairs of completions (DPO, IPO, KTO, SimPO, ORPO)",
        "flows.dpo:dpo",
        CONFIG_PATHS["dpo"],
    ),
    "on_policy_distillation": Method(
        "training on the student's own samples, scored token by token by a teacher",
        "flows.distill:on_policy_distillation",
        CONFIG_PATHS["on_policy_distillation"],
    ),
    "off_policy_distillation": Method(
        "training on a teacher's completions or its top-k token probabilities",
        "flows.distill:off_policy_distillation",
        CONFIG_PATHS["off_policy_distillation"],
    ),
    "self_distillation": Method(
        "distillation from earlier weights of the same model, which see a reference answer",
        "flows.distill:self_distillation",
        CONFIG_PATHS["self_distillation"],
    ),
    "prompt_distillation": Method(
        "training the model to answer without a long prompt as it does with the prompt",
        "flows.distill:prompt_distillation",
        CONFIG_PATHS["prompt_distillation"],
    ),
    "rl": Method("reinforcement learning with rewards from environments", "flows.rl:rl", CONFIG_PATHS["rl"]),
    "rlhf": Method(
        "supervised warm start, reward model from comparisons, then reinforcement learning against the reward model",
        "flows.rlhf:rlhf",
        CONFIG_PATHS["rlhf"],
    ),
}


def flow_of(method: str) -> Flow[..., TrainResult]:
    """Import the flow of a method.

    Raises:
        ConfigError: the method is unknown.
    """
    from prefect import Flow

    flow = import_path(find_method(method).flow)
    assert isinstance(flow, Flow)
    return flow


def config_type_of(method: str) -> type[NamedConfig]:
    """Import the config class of a method.

    Raises:
        ConfigError: the method is unknown.
    """
    from flows.config.base import NamedConfig

    config_type = import_path(find_method(method).config)
    assert isinstance(config_type, type)
    assert issubclass(config_type, NamedConfig)
    return config_type


def find_method(method: str) -> Method:
    """Find a method by its name.

    Raises:
        ConfigError: the method is unknown.
    """
    if method not in METHODS:
        guess = did_you_mean(method, METHODS)
        raise ConfigError(f"Unknown method {method!r}{guess or '.'} Use one of {', '.join(METHODS)}.")
    return METHODS[method]
