"""Small random models of other architectures than the built-in ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.compute.base import BaseModel
from engine.models import LoadedModel

SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
EXPERTS: dict[str, Any] = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}


def loaded_with(base: BaseModel, config: PreTrainedConfig) -> LoadedModel:
    """Return a small random model with the tokenizer and settings of ``base``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").requires_grad_(False).eval()
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.2)
    model.config.use_cache = False
    return replace(base.loaded, model=model)
