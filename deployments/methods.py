"""The methods that a run can have: where the flow of each is, and its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from blocks.errors import ConfigError

if TYPE_CHECKING:
    from prefect import Flow

    from flows.config import NamedConfig
    from flows.result import TrainResult


@dataclass(frozen=True, slots=True)
class Method:
    """A method by import path: a module of `flows` takes seconds to import, and is needed only when a run is.

    Attributes:
        what: for the help.
        flow, config: as in `flows.sft:sft`.
    """

    what: str
    flow: str
    config: str


METHODS: Mapping[str, Method] = {
    "sft": Method("supervised fine-tuning", "flows.sft:sft", "flows.sft:SftConfig"),
    "dpo": Method("learning from preferences between answers", "flows.dpo:dpo", "flows.dpo:DpoConfig"),
    "on_policy_distillation": Method(
        "learning how likely a teacher finds what the student samples",
        "flows.distill:on_policy_distillation",
        "flows.distill_config:OnPolicyConfig",
    ),
    "off_policy_distillation": Method(
        "learning what a teacher writes, or its likeliest tokens",
        "flows.distill:off_policy_distillation",
        "flows.distill_config:OffPolicyConfig",
    ),
    "self_distillation": Method(
        "learning from earlier weights that are shown more",
        "flows.distill:self_distillation",
        "flows.distill_config:SelfConfig",
    ),
    "prompt_distillation": Method(
        "learning to answer without a long prompt as with it",
        "flows.distill:prompt_distillation",
        "flows.distill_config:PromptConfig",
    ),
    "rl": Method("reinforcement learning on the rewards of environments", "flows.rl:rl", "flows.rl:RlConfig"),
    "rlhf": Method(
        "a warm start, a reward model from comparisons, and reinforcement learning against it",
        "flows.rlhf:rlhf",
        "flows.rlhf_config:RlhfConfig",
    ),
}


def flow_of(method: str) -> Flow[..., TrainResult]:
    """The flow of a method.

    Raises:
        ConfigError: there is no such method.
    """
    return _load(_find(method).flow)


def config_type_of(method: str) -> type[NamedConfig]:
    """The config of a method.

    Raises:
        ConfigError: there is no such method.
    """
    return _load(_find(method).config)


def _find(method: str) -> Method:
    if method not in METHODS:
        raise ConfigError(f"There is no method {method!r}: give one of {', '.join(METHODS)}.")
    return METHODS[method]


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
