"""Training with the real SDK on a real engine."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from engine_process import EngineProcess
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

from engine.compute.base import BaseModel
from engine.compute.lora import LoraSpec
from engine.compute.optimizer import Optimizer
from engine.errors import RequestError

ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0)


def step(trainer: tinker.TrainingClient, batch: list[types.Datum], params: types.AdamParams = ADAM) -> float:
    output = trainer.forward_backward(batch, "cross_entropy")
    updated = trainer.optim_step(params)
    loss = output.result().metrics["loss:sum"]
    updated.result()
    return loss


def logprobs(trainer: tinker.TrainingClient, batch: list[types.Datum]) -> torch.Tensor:
    outputs = trainer.forward(batch, "cross_entropy").result().loss_fn_outputs
    return torch.cat([output["logprobs"].to_torch() for output in outputs])


def adapter_file(engine: EngineProcess, path: str) -> dict[str, torch.Tensor]:
    run, kind, name = path.removeprefix("tinker://").split("/")
    (file,) = (engine.state / "runs" / run.replace(":", "_") / kind).glob(f"{name}@*/adapter_model.safetensors")
    return load_file(file)


def test_loss_falls(trainer: tinker.TrainingClient, batch: list[types.Datum]) -> None:
    losses = [step(trainer, batch[:2]) for _ in range(12)]
    assert losses[-1] < losses[0] / 2


def test_step_matches_peft_and_torch(
    engine: EngineProcess, tiny_path: Path, trainer: tinker.TrainingClient, batch: list[types.Datum]
) -> None:
    """A plain training loop with peft and torch.optim.AdamW gives the same weights."""
    adapter = adapter_file(engine, trainer.save_state("start").result().path)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    plain = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=32, target_modules=layers),
    )
    assert not set_peft_model_state_dict(plain, adapter).unexpected_keys
    weights = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(weights, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)

    def plain_loss() -> torch.Tensor:
        total = torch.zeros(())
        for datum in batch:
            logits = plain(torch.tensor([datum.model_input.to_ints()])).logits[0]
            chosen = logits.log_softmax(-1).gather(1, datum.loss_fn_inputs["target_tokens"].to_torch()[:, None])
            total = total - (chosen[:, 0] * datum.loss_fn_inputs["weights"].to_torch()).sum()
        return total

    for _ in range(4):
        loss = plain_loss()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()
        adam.zero_grad()
        output, updated = trainer.forward_backward(batch, "cross_entropy"), trainer.optim_step(ADAM)
        assert output.result().metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
        assert updated.result().metrics == {"unclipped_grad_l2:mean": pytest.approx(norm.item(), rel=1e-4)}
    trained = adapter_file(engine, trainer.save_state("end").result().path)
    expected = {
        name.replace(".default", ""): parameter.detach()
        for name, parameter in plain.named_parameters()
        if parameter.requires_grad
    }
    torch.testing.assert_close(trained, expected, atol=1e-5, rtol=1e-4)


def test_a_norm_that_is_never_reached_changes_nothing(
    service: tinker.ServiceClient, trainer: tinker.TrainingClient, batch: list[types.Datum]
) -> None:
    other = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    for client, norm in ((trainer, 0.0), (other, 1e12)):
        client.forward_backward(batch, "cross_entropy")
        metrics = client.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=norm)).result().metrics
        assert bool(metrics) == bool(norm), "without clipping the service computes no norm"
    torch.testing.assert_close(logprobs(trainer, batch), logprobs(other, batch), atol=1e-6, rtol=0)


def make_optimizer(base: BaseModel, gradient: float) -> tuple[Optimizer, dict[str, torch.Tensor]]:
    """Return the optimizer and the weights of an adapter with this number as each element of the gradient."""
    adapter = base.new_adapter(LoraSpec(rank=4, seed=1))
    parameters = dict(adapter.named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, gradient)
    return Optimizer(adapter), parameters


@pytest.mark.parametrize("gradient", [1e19, 3e38])
def test_clipping_a_gradient_whose_norm_overflows_float32(base: BaseModel, gradient: float) -> None:
    optimizer, weights = make_optimizer(base, gradient)
    num_elements = sum(weight.numel() for weight in weights.values())
    norm = optimizer.step(types.AdamParams(grad_clip_norm=1.0))
    assert norm == pytest.approx(gradient * num_elements**0.5, rel=1e-6)
    moments = torch.cat([value.flatten() for name, value in optimizer.state().items() if name.endswith("exp_avg")])
    torch.testing.assert_close(moments, torch.full_like(moments, 0.1 / num_elements**0.5))


@pytest.mark.parametrize(
    ("gradient", "sentence"),
    [
        (math.nan, "The gradient is not finite, so it was dropped"),
        (math.inf, "The gradient is not finite, so it was dropped"),
        (1e20, r"The gradient has an element of size 1e\+20, whose square is not finite, so it was dropped"),
    ],
)
@pytest.mark.parametrize("norm", [0.0, 1e38])
def test_a_gradient_that_would_break_the_moments_is_dropped(
    base: BaseModel, gradient: float, sentence: str, norm: float
) -> None:
    optimizer, weights = make_optimizer(base, gradient)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    with pytest.raises(RequestError, match=sentence):
        optimizer.step(types.AdamParams(grad_clip_norm=norm))
    assert not optimizer.state()
    for name, weight in weights.items():
        assert weight.grad is None
        assert torch.equal(weight, before[name])


def test_gradients_of_one_step_add_up(
    service: tinker.ServiceClient, trainer: tinker.TrainingClient, batch: list[types.Datum]
) -> None:
    """Two forward_backwards before a step equal one with both batches; a forward between them changes nothing."""
    other = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    step(other, batch)
    trainer.forward_backward(batch[:1], "cross_entropy")
    trainer.forward(batch, "cross_entropy")
    step(trainer, batch[1:])
    torch.testing.assert_close(logprobs(trainer, batch), logprobs(other, batch), atol=1e-5, rtol=0)


def test_adapters_are_independent(
    service: tinker.ServiceClient, trainer: tinker.TrainingClient, batch: list[types.Datum]
) -> None:
    other = service.create_lora_training_client(base_model="tiny", rank=8, seed=2, train_unembed=False).result()
    before = logprobs(other, batch)
    other.forward_backward(batch[:1], "cross_entropy").result()
    step(trainer, batch)
    assert torch.equal(logprobs(other, batch), before)
    assert not torch.equal(logprobs(trainer, batch), before)
    alone = service.create_lora_training_client(base_model="tiny", rank=8, seed=2, train_unembed=False).result()
    step(alone, batch[:1])
    other.optim_step(ADAM).result()
    assert torch.equal(logprobs(other, batch), logprobs(alone, batch))


def test_seed_determines_initial_weights(service: tinker.ServiceClient, batch: list[types.Datum]) -> None:
    def after_a_step(seed: int) -> torch.Tensor:
        client = service.create_lora_training_client(base_model="tiny", rank=4, seed=seed).result()
        step(client, batch)
        step(client, batch)
        return logprobs(client, batch)

    assert torch.equal(after_a_step(5), after_a_step(5))
    assert not torch.equal(after_a_step(5), after_a_step(6))


def test_several_targets_per_position(trainer: tinker.TrainingClient) -> None:
    """Dense and sparse (T, K) targets give (T, K) logprobs, in the order of the batch, for mixed K."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randint(1, 256, (5, 3), generator=generator)
    sparse = torch.zeros(6, 9, dtype=torch.int64)
    sparse[2, 4] = 65
    tokens = [types.ModelInput.from_ints(list(range(60, 60 + length))) for length in (5, 6, 5)]
    flat = types.Datum(
        model_input=tokens[2],
        loss_fn_inputs={"target_tokens": dense[:, 0].numpy(), "weights": np.ones(5, np.float32)},
    )
    batch = [
        types.Datum(model_input=tokens[0], loss_fn_inputs={"target_tokens": dense, "weights": torch.rand(5, 3)}),
        types.Datum(model_input=tokens[1], loss_fn_inputs={"target_tokens": sparse, "weights": (sparse > 0).float()}),
        flat,
    ]
    output = trainer.forward_backward(batch, "cross_entropy").result()
    shapes = [tuple(datum["logprobs"].to_torch().shape) for datum in output.loss_fn_outputs]
    assert shapes == [(5, 3), (6, 9), (5,)]
    first, _, last = (datum["logprobs"].to_torch() for datum in output.loss_fn_outputs)
    torch.testing.assert_close(first[:, 0], last)
    trainer.optim_step(ADAM).result()


def test_custom_loss_trains(trainer: tinker.TrainingClient, batch: list[types.Datum]) -> None:
    def squared(data: list[types.Datum], logprobs_D: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = torch.stack([(logprobs_T**2).mean() for logprobs_T in logprobs_D]).sum()
        return loss, {"squared": loss.item()}

    values = []
    for _ in range(4):
        output = trainer.forward_backward_custom(batch, squared)
        updated = trainer.optim_step(ADAM)
        values.append(output.result().metrics["squared"])
        updated.result()
    assert values[-1] < values[0]


def test_tokenizer_loads(trainer: tinker.TrainingClient) -> None:
    tokenizer = trainer.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("Betti")) == "Betti"
