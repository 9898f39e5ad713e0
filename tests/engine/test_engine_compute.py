"""Gradients and logprobs of a batch, compared with a slow and simple reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import EXPERTS, SIZES, loaded_with
from transformers import GPT2Config, LlamaConfig, MixtralConfig, PreTrainedConfig

from engine.compute.base import BaseModel
from engine.compute.datum import Datum
from engine.compute.lora import Adapter, Factors, LoraSpec
from engine.compute.loss import bind_loss
from engine.compute.train import exhaust, iterate_loss
from engine.compute.training_graphs import TrainingGraphs
from engine.errors import RequestError
from engine.models import load_model

WIDE = 10**6
CROSS_ENTROPY = bind_loss("cross_entropy", {})


def random_datum(length: int, width: int | None, generator: torch.Generator) -> Datum:
    shape = (length,) if width is None else (length, width)
    weights = torch.randn(shape, generator=generator)
    return Datum(
        tokens_T=torch.randint(0, 256, (length,), generator=generator),
        targets=torch.randint(0, 256, shape, generator=generator),
        inputs={"weights": weights.where(torch.rand(shape, generator=generator) < 0.6, 0.0)},
    )


def trained_adapter(base: BaseModel, spec: LoraSpec) -> Adapter:
    """Make an adapter with nonzero B, so that no gradient vanishes."""
    generator = torch.Generator().manual_seed(3)
    adapter = base.new_adapter(spec)
    return Adapter(
        spec,
        {
            name: Factors(a, (torch.randn(b.shape, generator=generator) * 0.02).requires_grad_())
            for name, (a, b) in adapter.factors.items()
        },
    )


def reference_pass(base: BaseModel, adapter: Adapter, data: list[Datum]) -> tuple[list[torch.Tensor], float]:
    """Compute one datum at a time, with a full log-softmax and plain autograd."""
    logprobs_D, total = [], 0.0
    for datum in data:
        with base.using(adapter):
            hidden_TH = base.hidden(datum.tokens_T[None])[0]
        logits_TV = hidden_TH @ base.head.weight.t()
        if "lm_head" in adapter.factors:
            a, b = adapter.factors["lm_head"]
            logits_TV = logits_TV + adapter.scale * hidden_TH @ a.t() @ b.t()
        targets_TK = datum.targets.reshape(len(datum.targets), -1)
        logprobs = logits_TV.log_softmax(-1).gather(1, targets_TK).reshape(datum.targets.shape)
        loss = -(logprobs * datum.inputs["weights"]).sum()
        loss.backward()
        total += loss.item()
        logprobs_D.append(logprobs.detach())
    return logprobs_D, total


def take_gradients(adapter: Adapter) -> dict[str, torch.Tensor]:
    gradients = {name: p.grad for name, p in adapter.named_parameters() if p.grad is not None}
    for _, parameter in adapter.named_parameters():
        parameter.grad = None
    return gradients


@settings(max_examples=12, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 24), st.sampled_from([None, None, 1, 3])), min_size=1, max_size=6),
    max_tokens=st.sampled_from([1, 30, WIDE]),
    unembed=st.booleans(),
)
def test_gradients_and_logprobs_match_autograd(
    base: BaseModel, shapes: list[tuple[int, int | None]], max_tokens: int, unembed: bool
) -> None:
    adapter = trained_adapter(base, LoraSpec(4, 0, train_unembed=unembed))
    generator = torch.Generator().manual_seed(len(shapes))
    data = [random_datum(length, width, generator) for length, width in shapes]
    expected, total = reference_pass(base, adapter, data)
    expected_gradients = take_gradients(adapter)
    output = exhaust(iterate_loss(base, adapter, data, CROSS_ENTROPY, max_tokens, backward=True))
    torch.testing.assert_close(output.logprobs_D, expected, atol=1e-5, rtol=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-4, abs=1e-4)
    actual_gradients = take_gradients(adapter)
    # Of a gradient that nearly cancels only rounding is left, in proportion to what was summed.
    scale = max(gradient.abs().max().item() for gradient in expected_gradients.values())
    for name, parameter in adapter.named_parameters():
        zero = torch.zeros_like(parameter)
        expected_gradient = expected_gradients.get(name, zero)
        actual_gradient = actual_gradients.get(name, zero)
        torch.testing.assert_close(actual_gradient, expected_gradient, atol=1e-5 * scale + 1e-6, rtol=1e-5)


def test_same_batch_gives_same_bits(base: BaseModel) -> None:
    adapter = trained_adapter(base, LoraSpec(4, 0))
    generator = torch.Generator().manual_seed(0)
    data = [random_datum(length, None, generator) for length in (5, 40, 17, 17, 3)]
    first = exhaust(iterate_loss(base, adapter, data, CROSS_ENTROPY, 64, backward=True)).logprobs_D
    first_gradients = take_gradients(adapter)
    second = exhaust(iterate_loss(base, adapter, data, CROSS_ENTROPY, 64, backward=True)).logprobs_D
    torch.testing.assert_close(second, first, atol=0, rtol=0)
    torch.testing.assert_close(take_gradients(adapter), first_gradients, atol=0, rtol=0)


def test_forward_leaves_no_gradient(base: BaseModel) -> None:
    adapter = trained_adapter(base, LoraSpec(4, 0))
    data = [random_datum(9, None, torch.Generator().manual_seed(0))]
    forward = exhaust(iterate_loss(base, adapter, data, CROSS_ENTROPY, WIDE, backward=False))
    assert not take_gradients(adapter)
    backward = exhaust(iterate_loss(base, adapter, data, CROSS_ENTROPY, WIDE, backward=True))
    torch.testing.assert_close(forward.logprobs_D, backward.logprobs_D)


@pytest.mark.parametrize("dtype", ["bfloat16", "autocast-bf16"])
def test_half_precision_stays_close(base: BaseModel, tiny_path: Path, dtype: str) -> None:
    half = BaseModel(load_model(tiny_path, "cpu", dtype, "tiny"))  # pyright: ignore[reportArgumentType]
    spec = LoraSpec(4, 0)
    generator = torch.Generator().manual_seed(0)
    data = [random_datum(12, None, generator) for _ in range(3)]
    exact = exhaust(iterate_loss(base, trained_adapter(base, spec), data, CROSS_ENTROPY, WIDE, backward=True))
    adapter = trained_adapter(half, spec)
    rounded = exhaust(iterate_loss(half, adapter, data, CROSS_ENTROPY, WIDE, backward=True))
    assert all(gradient.dtype == torch.float32 for gradient in take_gradients(adapter).values())
    torch.testing.assert_close(rounded.logprobs_D, exact.logprobs_D, atol=0.15, rtol=0.05)


def test_rounded_passes_without_a_mask(base: BaseModel) -> None:
    """A pass as it is captured on a GPU, padded and without the mask of transformers, has the same hidden states."""
    adapter = trained_adapter(base, LoraSpec(rank=2, seed=1))
    graphs = TrainingGraphs(base._launch)
    for shape in [(3, 20), (9, 65), (1, 128)]:
        tokens_BT = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))
        with base.using(adapter):
            expected_BTH = base.hidden(tokens_BT)
            computed_BTH = graphs.hidden(adapter, [name for name in adapter.factors if name != "lm_head"], tokens_BT)
        torch.testing.assert_close(computed_BTH, expected_BTH, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "empty"),
    [
        (LlamaConfig(**SIZES), []),
        (MixtralConfig(**EXPERTS), ["train_mlp"]),
        (GPT2Config(**SIZES), ["train_attn", "train_mlp"]),
    ],
    ids=["llama", "mixtral", "gpt2"],
)
def test_options_without_layers_are_named(base: BaseModel, config: PreTrainedConfig, empty: list[str]) -> None:
    """Experts and the Conv1D of GPT-2 get no adapter."""
    other = BaseModel(loaded_with(base, config))
    assert other.options_without_layers == empty
    if empty:
        spec = LoraSpec(4, 0, train_attn="train_attn" in empty, train_unembed=False)
        with pytest.raises(
            RequestError, match=f"because the model has no linear layers for {' and '.join(empty)}: set"
        ):
            other.new_adapter(spec)


def test_an_adapter_has_modules(base: BaseModel) -> None:
    with pytest.raises(RequestError, match=r"^The adapter has no modules to train: set another of train_mlp"):
        base.new_adapter(LoraSpec(4, 0, train_attn=False, train_mlp=False, train_unembed=False))
