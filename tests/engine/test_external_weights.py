"""External weights of architectures whose module names peft treats in a special way."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from random_models import EXPERTS, SIZES, loaded_with
from transformers import BioGptConfig, GPTNeoXConfig, MixtralConfig, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from engine.checkpoints.external import external_files
from engine.compute.base import BaseModel
from engine.compute.lora import LoraSpec
from engine.compute.trainer import Trainer
from engine.errors import RequestError

MOE: dict[str, Any] = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 16}
DENSE: dict[str, Any] = {"mlp_only_layers": [0]}


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoXConfig(**SIZES),
        BioGptConfig(**SIZES),
        MixtralConfig(**EXPERTS),
        Qwen2MoeConfig(**MOE, **SHARED),
    ],
    ids=lambda config: config.model_type,
)
def test_peft_loads_external_weights(base: BaseModel, config: PreTrainedConfig, tmp_path: Path) -> None:
    loaded = loaded_with(base, config)
    plain = deepcopy(loaded.model)
    other = BaseModel(loaded)
    trainer = Trainer(other, LoraSpec(4, 1), 1024)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for factors in trainer.adapter.factors.values():
            factors.b.normal_(std=0.1, generator=generator)
    for name, content in external_files(trainer.external_weights(), trainer.adapter.spec, "tiny", ()).items():
        (tmp_path / name).write_bytes(content)
    tokens_BT = torch.arange(40)[None]
    with torch.no_grad(), other.using(trainer.adapter):
        expected_TV = other.logits(other.hidden(tokens_BT)[0])
        computed_TV = PeftModel.from_pretrained(plain, tmp_path).eval()(tokens_BT).logits[0]
    torch.testing.assert_close(computed_TV, expected_TV, atol=1e-4, rtol=1e-4)


def test_adapters_that_peft_would_load_into_experts_are_not_exported(base: BaseModel) -> None:
    other = BaseModel(loaded_with(base, Qwen3MoeConfig(**MOE, **DENSE)))
    with pytest.raises(RequestError, match=r"of the dense layer model\.layers\.0\.mlp\.down_proj, which peft"):
        Trainer(other, LoraSpec(4, 1), 1024).external_weights()
    assert Trainer(other, LoraSpec(4, 1, train_mlp=False), 1024).external_weights()
