"""Self-test of loaded models: the engine refuses what it cannot compute, and says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from random_models import EXPERTS, SIZES, loaded_with
from transformers import (
    CohereConfig,
    DeepseekV2Config,
    FalconH1Config,
    Gemma2Config,
    Lfm2Config,
    MixtralConfig,
    ModernBertDecoderConfig,
    OlmoConfig,
    PhimoeConfig,
    PreTrainedConfig,
)

from engine.compute.base import BaseModel
from engine.models import DtypeName, ModelError, load_model
from engine.sampling.self_test import checked_base

MAMBA: dict[str, Any] = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
LATENT: dict[str, Any] = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
ROUTED: dict[str, Any] = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast-bf16"])
def test_tiny_passes(dtype: DtypeName, tiny_path: Path) -> None:
    assert checked_base(load_model(tiny_path, "cpu", dtype)).loaded.dtype == dtype


@pytest.mark.parametrize(
    "config", [MixtralConfig(**EXPERTS), PhimoeConfig(**EXPERTS)], ids=lambda config: config.model_type
)
def test_routers_that_return_more_than_a_product_pass(base: BaseModel, config: PreTrainedConfig) -> None:
    assert checked_base(loaded_with(base, config)).has_experts


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (CohereConfig, {"logit_scale": 0.25}, "its logits are not the product"),
        (Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 30.0}, "its logits are not the product"),
        (FalconH1Config, {**MAMBA, "lm_head_multiplier": 0.5}, "its logits are not the product"),
        (Lfm2Config, {"layer_types": ["conv", "full_attention"]}, r"failed \(list index out of range\)"),
        (DeepseekV2Config, {**LATENT, **ROUTED, "v_head_dim": 12, "n_group": 1, "topk_group": 1}, "no attribute"),
        (OlmoConfig, {"clip_qkv": 0.5}, "is being modified inplace"),
        (ModernBertDecoderConfig, {"pad_token_id": 0}, "unexpected keyword argument"),
    ],
    ids=["cohere", "gemma2", "falcon_h1", "lfm2", "deepseek_v2", "olmo", "modernbert"],
)
def test_models_that_the_engine_cannot_compute_are_refused(
    base: BaseModel, architecture: type[PreTrainedConfig], changes: dict[str, Any], message: str
) -> None:
    config = architecture(**SIZES, **changes)
    with pytest.raises(ModelError, match=rf"^This engine cannot compute tiny \({config.model_type}\): .*{message}.*"):
        checked_base(loaded_with(base, config))
