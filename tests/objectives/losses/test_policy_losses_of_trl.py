"""Policy losses against TRL's `GRPOTrainer`: values and gradients from the same log-probabilities."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOTrainer

from objectives.losses import find_base_loss

LENGTHS = [4, 1, 7, 3]
LOW, HIGH = 0.7, 1.4
BOUNDS = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}


def padded(values_DT: Tensor) -> Tensor:
    return pad_sequence(values_DT.split(LENGTHS), batch_first=True)


def loss_of_trl(logprobs_DT: Tensor, sampling_DT: Tensor, advantages_D: Tensor, **settings: Any) -> Tensor:
    """Loss of `GRPOTrainer` with the settings of `GRPOConfig`; the sum over tokens is divided by `num_items`."""
    logprobs, mask = padded(logprobs_DT), padded(torch.ones_like(sampling_DT))
    num_items = settings.pop("num_items", 1.0)
    fields: dict[str, Any] = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon_low": 1 - LOW,
        "epsilon_high": HIGH - 1,
        "max_completion_length": 1,
    }
    trainer = SimpleNamespace(
        **{**fields, **settings},
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor
        ),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        beta=0.0,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1).long(),
        "prompt_mask": torch.ones(len(LENGTHS), 1),
        "completion_ids": torch.zeros_like(mask).long(),
        "completion_mask": mask,
        "advantages": advantages_D,
        "old_per_token_logps": padded(sampling_DT),
        "num_items_in_batch": torch.tensor(num_items),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("name", "params", "settings"),
    [
        ("grpo", BOUNDS, {"loss_type": "grpo"}),
        ("dr_grpo", BOUNDS, {"loss_type": "dr_grpo"}),
        ("dapo", BOUNDS, {"num_items": float(sum(LENGTHS))}),
        ("ppo", BOUNDS, {}),
        ("cispo", BOUNDS | {"clip_low_threshold": 0.0}, {"loss_type": "cispo", "epsilon_high": HIGH}),
        ("gspo", BOUNDS, {"importance_sampling_level": "sequence"}),
    ],
    ids=["grpo", "dr_grpo", "dapo", "ppo", "cispo", "gspo"],
)
def test_value_and_gradient(name: str, params: dict[str, float], settings: dict[str, Any], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sampling_DT, noise_DT = torch.randn(2, sum(LENGTHS), generator=generator, dtype=torch.float64)
    sampling_DT = -0.1 - sampling_DT.abs()
    advantages_D = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    values, gradients = [], []
    for is_ours in (True, False):
        logprobs_DT = (sampling_DT + 0.5 * noise_DT).requires_grad_()
        if is_ours:
            loss = find_base_loss(name)
            inputs = {
                "logprobs": sampling_DT,
                "advantages": advantages_D.repeat_interleave(torch.tensor(LENGTHS)),
                "sequence_ratio_mask": torch.ones_like(sampling_DT),
            }
            offsets_D = torch.tensor([0, *LENGTHS]).cumsum(0)
            value = loss.compute(logprobs_DT, inputs, offsets_D, loss.check_params(params))
        else:
            value = loss_of_trl(logprobs_DT, sampling_DT, advantages_D, **settings)
        values.append(value.item())
        gradients.append(torch.autograd.grad(value, logprobs_DT)[0])
    assert values[0] == pytest.approx(values[1], rel=1e-9)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)
