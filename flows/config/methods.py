"""Import paths of the configs of the training methods."""

from __future__ import annotations

from collections.abc import Mapping

# Modules of configs take seconds to import, so this module names them only.
CONFIG_PATHS: Mapping[str, str] = {
    "sft": "flows.config.train:SftConfig",
    "dpo": "flows.config.dpo:DpoConfig",
    "on_policy_distillation": "flows.config.distill:OnPolicyConfig",
    "off_policy_distillation": "flows.config.distill:OffPolicyConfig",
    "self_distillation": "flows.config.distill:SelfConfig",
    "prompt_distillation": "flows.config.distill:PromptConfig",
    "rl": "flows.config.rl:RlConfig",
    "rlhf": "flows.config.rlhf:RlhfConfig",
}
