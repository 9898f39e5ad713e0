"""All losses through the real SDK: built in, as a client-side callable, and as a graph run by the engine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import tinker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from engine.compute.base import BaseModel
from engine.compute.datum import Datum
from engine.compute.lora import Adapter, LoraSpec
from engine.compute.loss import Loss, bind_loss
from engine.compute.train import exhaust, iterate_loss
from engine.errors import RequestError
from engine.wire.forward_backward import decode_datum

# With a large eps, the length of an Adam step is proportional to the gradient.
LINEAR = types.AdamParams(learning_rate=1.0, eps=100.0, beta1=0.0, beta2=0.0)
WIDE = 10**6


def cross_entropy(logprobs, weights):
    return -(logprobs * weights).sum(), {}


def importance_sampling(logprobs, old, advantages):
    return -(torch.exp(logprobs - old) * advantages).sum(), {}


def ppo(logprobs, old, advantages):
    ratio = torch.exp(logprobs - old)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages).sum(), {}


def cispo(logprobs, old, advantages):
    ratio = torch.exp(logprobs - old).clamp(0.0, 4.0)
    return -(ratio.detach() * logprobs * advantages).sum(), {}


def dro(logprobs, old, advantages):
    return -(logprobs * advantages - 0.5 * 0.3 * (logprobs - old) ** 2).sum(), {}


def gspo(logprobs, old, advantages, sequence_ratio_mask):
    log_ratio = (logprobs.detach() - old)[sequence_ratio_mask != 0].mean()
    ratio = torch.exp(log_ratio + (logprobs - logprobs.detach()))
    return -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages).sum(), {}


def stable_reinforce(logprobs, old, advantages):
    trained = (advantages != 0).float()
    log_ratio = logprobs - old
    weight = torch.exp(log_ratio.detach()).clamp(max=1.0)
    return (trained * (0.2 * (torch.exp(log_ratio) - 1 - log_ratio) - weight * advantages * logprobs)).sum(), {}


BOUNDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
Case = tuple[Callable[..., Any], dict[str, float], tuple[str, ...]]
POLICY = ("logprobs", "advantages")
CASES: dict[str, Case] = {
    "cross_entropy": (cross_entropy, {}, ("weights",)),
    "importance_sampling": (importance_sampling, {}, POLICY),
    "ppo": (ppo, BOUNDS, POLICY),
    "cispo": (cispo, {}, POLICY),
    "dro": (dro, {"beta": 0.3}, POLICY),
    "gspo": (gspo, BOUNDS, (*POLICY, "sequence_ratio_mask")),
    "stable_reinforce": (stable_reinforce, {"kl_coeff": 0.2}, POLICY),
}


def rollout(text: str, seed: int) -> types.Datum:
    """Make a prompt of three bytes with a completion, the inputs of all losses, and inputs to be ignored."""
    tokens = list(text.encode())
    generator = torch.Generator().manual_seed(seed)
    length = len(tokens) - 1
    completion_mask = (torch.arange(length) >= 3).float()
    old = (-5.5 + 0.2 * torch.randn(length, generator=generator)) * completion_mask
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": torch.tensor(tokens[1:]),
            "weights": torch.rand(length, generator=generator) * completion_mask,
            "logprobs": old,
            "old": old,
            "advantages": torch.randn(length, generator=generator) * completion_mask,
            "sequence_ratio_mask": completion_mask,
            "mask": completion_mask,
        },  # pyright: ignore[reportArgumentType]
    )


@pytest.fixture(scope="module")
def rollouts() -> list[types.Datum]:
    texts = ["to be or not to be", "a rose", "all that glitters", "is", "brevity is the soul of wit", "12345"]
    return [rollout(f"Q: {text}", seed) for seed, text in enumerate(texts)]


def logprobs_after_step(client: tinker.TrainingClient, rollouts: list[types.Datum]) -> torch.Tensor:
    client.optim_step(LINEAR).result()
    outputs = client.forward(rollouts, "cross_entropy").result().loss_fn_outputs
    return torch.cat([output["logprobs"].to_torch() for output in outputs])


@pytest.mark.parametrize("name", CASES)
def test_built_in_callable_and_graph_agree(
    service: tinker.ServiceClient, rollouts: list[types.Datum], name: str
) -> None:
    formula, config, inputs = CASES[name]
    # The sampling logprobs are named `old`, because a graph uses the name `logprobs` for its own input.
    input_names = [name.replace("logprobs", "old") for name in inputs]
    built_in, by_callable, by_graph = (
        service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result() for _ in range(3)
    )

    def custom(data: list[types.Datum], logprobs_D: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        losses = [
            formula(logprobs, *(datum.loss_fn_inputs[key].to_torch() for key in input_names))[0]
            for datum, logprobs in zip(data, logprobs_D, strict=True)
        ]
        return torch.stack(losses).sum(), {}

    handle = service.create_custom_loss(formula, {"logprobs": 1, **dict.fromkeys(input_names, 1)}).result()  # pyright: ignore[reportArgumentType]
    assert handle.loss_id is not None
    outputs = [
        built_in.forward_backward(rollouts, name, config).result(),  # pyright: ignore[reportArgumentType]
        by_callable.forward_backward_custom(rollouts, custom).result(),
        by_graph.forward_backward_custom(rollouts, handle).result(),
    ]
    losses = [output.metrics["loss:sum"] for output in outputs]
    assert losses[1:] == [pytest.approx(losses[0], rel=1e-6)] * 2
    before = [torch.cat([datum["logprobs"].to_torch() for datum in output.loss_fn_outputs]) for output in outputs]
    torch.testing.assert_close(before[1], before[0], rtol=1e-6, atol=1e-5)
    after = [logprobs_after_step(client, rollouts) for client in (built_in, by_callable, by_graph)]
    assert (after[0] - before[0]).abs().max() > 1e-3
    for other in after[1:]:
        torch.testing.assert_close(other, after[0], rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_chunks_add_up_and_forward_changes_nothing(engine_url: str, rollouts: list[types.Datum], name: str) -> None:
    """Three parallel chunks, the first one sent last, give the loss, metrics and gradient of one request."""
    _, config, _ = CASES[name]
    results = []
    for chunk_length in (1024, 2):
        with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
            flags = service.holder._client_config
            service.holder._client_config = flags.model_copy(update={"fwdbwd_max_chunk_len": chunk_length})
            client = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
            forward = client.forward(rollouts, name, config).result()  # pyright: ignore[reportArgumentType]
            backward = client.forward_backward(rollouts, name, config).result()  # pyright: ignore[reportArgumentType]
            assert forward.metrics == pytest.approx(backward.metrics, rel=1e-5)
            results.append((backward.metrics, logprobs_after_step(client, rollouts)))
    (whole, expected), (chunked, actual) = results
    assert all(re.fullmatch(r"[a-z0-9_]+:(sum|mean|max)", key) for key in whole)
    assert chunked == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=2e-5)


def test_policy_loss_metrics(trainer: tinker.TrainingClient, rollouts: list[types.Datum]) -> None:
    metrics = trainer.forward(rollouts, "ppo").result().metrics
    assert metrics.keys() == {"loss:sum", "ratio:mean", "ratio:max", "kl_k1:mean", "clip_fraction:mean"}
    assert 0 < metrics["clip_fraction:mean"] < 1
    assert trainer.forward(rollouts, "dro").result().metrics.keys() == {
        "loss:sum", "ratio:mean", "ratio:max", "kl_k1:mean"
    }  # fmt: skip
    assert trainer.forward(rollouts, "cross_entropy").result().metrics.keys() == {"loss:sum"}


def test_datum_can_set_its_own_clip_thresholds(trainer: tinker.TrainingClient, rollouts: list[types.Datum]) -> None:
    bounds = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
    tight = [
        types.Datum(datum.model_input, {**datum.loss_fn_inputs, **{key: [value] for key, value in bounds.items()}})
        for datum in rollouts[:2]
    ]
    mixed = trainer.forward([*tight, *rollouts[2:]], "ppo").result().metrics["loss:sum"]
    parts = [
        trainer.forward(rollouts[:2], "ppo", bounds).result().metrics["loss:sum"],
        trainer.forward(rollouts[2:], "ppo").result().metrics["loss:sum"],
    ]
    assert mixed == pytest.approx(sum(parts), rel=1e-5)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"clip_low_threshold": [3.0]}, "Datum 1 has clip_low_threshold=3 above clip_high_threshold=1.2; set them in"),
        (
            {"clip_high_threshold": [1.0, 0.5, 1.0]},
            "has clip_low_threshold=0.8 above clip_high_threshold=0.5; set them",
        ),
        ({"clip_low_threshold": [-3.0]}, "clip_low_threshold of datum 1 contains -3; use numbers of at least 0"),
    ],
)
def test_clip_thresholds_of_a_datum_are_checked(bounds: dict[str, list[float]], message: str) -> None:
    loss = bind_loss("ppo", {})
    tokens = torch.arange(3)
    inputs = {name: torch.ones(3) for name in POLICY} | {name: torch.tensor(value) for name, value in bounds.items()}
    with pytest.raises(RequestError, match=re.escape(message)):
        loss.prepare(Datum(tokens, tokens, inputs), 1)
    for one_number in (torch.tensor([1.2]), torch.tensor([[1.2]])):
        equal = {name: torch.ones(3) for name in POLICY} | {"clip_low_threshold": one_number}
        loss.prepare(Datum(tokens, tokens, equal), 1)


@pytest.mark.parametrize(
    ("name", "config", "without", "message"),
    [
        ("ppo", {}, "advantages", "Datum 0 has no advantages in its loss_fn_inputs, but the loss 'ppo' requires"),
        ("dro", {}, "logprobs", "Datum 0 has no logprobs in its loss_fn_inputs"),
        ("gspo", {}, "sequence_ratio_mask", "Datum 0 has no sequence_ratio_mask"),
        ("ppo", {"epsilon": 0.2}, "", "has no parameter 'epsilon'"),
        ("stable_reinforce", {"kl_coeff": "high"}, "", "'kl_coeff' of the loss 'stable_reinforce' is 'high'"),
        ("custom", {}, "", "has no custom loss None"),
        ("custom", {"loss_id": "../../x:loss:0"}, "", "has no custom loss '../../x:loss:0'"),
    ],
)
def test_missing_input_gives_one_sentence_and_client_continues(
    trainer: tinker.TrainingClient, rollouts: list[types.Datum], name: Any, config: Any, without: str, message: str
) -> None:
    incomplete = [
        types.Datum(datum.model_input, {key: value for key, value in datum.loss_fn_inputs.items() if key != without})
        for datum in rollouts
    ]
    with pytest.raises(tinker.RequestFailedError, match=re.escape(message)) as error:
        trainer.forward(incomplete, name, config).result()
    assert error.value.category == "user"
    assert trainer.forward_backward(rollouts, "ppo").result().metrics["loss:sum"]
    trainer.optim_step(LINEAR).result()


def with_spans(datum: types.Datum, sequence_id: str, *lengths: int) -> types.Datum:
    """Return a datum whose provenance spans have these lengths, unchecked by the SDK."""
    spans = [types.SampledProvenanceSpan(sequence_id=sequence_id, length=length) for length in lengths]
    return dataclasses.replace(datum, model_input_spans=spans, loss_fn_input_spans=spans)


def test_provenance_is_accepted_and_changes_no_loss(engine_url: str) -> None:
    """Samples with recorded stability, and datums that name them, as StableReinforce needs on the hosted service."""
    prompt = types.ModelInput.from_ints([5, 6, 7])
    with tinker.ServiceClient(base_url=engine_url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
        path = trainer.save_weights_for_sampler("provenance").result().path
        sampler = trainer.create_sampling_client(path, record_stability_info=True).result()
        params = types.SamplingParams(max_tokens=4, seed=1)
        (sequence,) = sampler.sample(prompt, 1, params).result().sequences
        num = len(sequence.tokens)
        whole = [*prompt.to_ints(), *sequence.tokens]
        inputs = {
            "target_tokens": types.TensorData(data=whole[1:], dtype="int64"),
            "logprobs": types.TensorData(data=[0.0, 0.0, *(sequence.logprobs or [])], dtype="float32"),
            "advantages": types.TensorData(data=[0.0, 0.0, *[1.0] * num], dtype="float32"),
        }
        plain = types.Datum(types.ModelInput.from_ints(whole[:-1]), inputs)
        from_prompt = types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=3)
        sampled = types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=num - 1)
        targets = [
            types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=2),
            types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=num),
        ]
        named = plain.with_provenance(model_input=[from_prompt, sampled], loss_fn_inputs=targets)
        losses = [trainer.forward([datum], "stable_reinforce").result().metrics for datum in (plain, named)]
        assert losses[0] == losses[1]


def test_wrong_provenance_is_one_sentence(trainer: tinker.TrainingClient, rollouts: list[types.Datum]) -> None:
    length = rollouts[0].model_input.length
    for wrong, message in (
        (with_spans(rollouts[0], "s", length - 1), f"of Datum 0 cover {length - 1} positions of {length}: tile it"),
        (with_spans(rollouts[0], "s", length, 1), f"cover {length + 1} positions of {length}: tile it exactly"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=re.escape(message)) as error:
            trainer.forward([wrong], "ppo").result()
        assert error.value.category == "user"
    assert trainer.forward([with_spans(rollouts[0], "s", length)], "ppo").result().metrics["loss:sum"]


def test_incomplete_provenance_is_refused() -> None:
    """Messages that the SDK does not build."""
    tokens = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=(1).to_bytes(4, "little")))
    targets = {"target_tokens": pb.Tensor(dtype=pb.DTYPE_INT64, dense=(1).to_bytes(8, "little"))}
    span = pb.ProvenanceSpan(sampled_tokens=pb.SampledProvenanceSpan(sequence_id="", length=1))
    for spans, message in (
        ({"model_input_spans": [span]}, "for one of model_input and loss_fn_inputs only"),
        ({"model_input_spans": [span], "loss_fn_input_spans": [span]}, "span of model_input without a sequence_id"),
        ({"model_input_spans": [pb.ProvenanceSpan()], "loss_fn_input_spans": [span]}, "without a sequence_id"),
    ):
        with pytest.raises(RequestError, match=message):
            decode_datum(pb.Datum(model_input=[tokens], loss_fn_inputs=targets, **spans), 0, ())


def test_policy_losses_take_one_target_per_token(trainer: tinker.TrainingClient) -> None:
    wide = types.Datum(
        types.ModelInput.from_ints([1, 2, 3]),
        {"target_tokens": torch.ones(3, 2).long(), "logprobs": torch.zeros(3, 2), "advantages": torch.ones(3, 2)},  # pyright: ignore[reportArgumentType]
    )
    with pytest.raises(tinker.RequestFailedError, match=r"of shape \(3, 2\), but the loss 'ppo' takes one target"):
        trainer.forward([wide], "ppo").result()


def reference_loss(name: str, logprobs: torch.Tensor, datum: Datum) -> torch.Tensor:
    formula, _, inputs = CASES[name]
    return formula(logprobs, *(datum.inputs[key] for key in inputs))[0]


def reference_gradients(base: BaseModel, adapter: Adapter, data: list[Datum], name: str) -> dict[str, torch.Tensor]:
    """Compute one datum at a time, with a full log-softmax, the plain formula and autograd."""
    for datum in data:
        with base.using(adapter):
            hidden_TH = base.hidden(datum.tokens_T[None])[0]
        a, b = adapter.factors["lm_head"]
        logits_TV = hidden_TH @ base.head.weight.t() + adapter.scale * hidden_TH @ a.t() @ b.t()
        logprobs = logits_TV.log_softmax(-1).gather(1, datum.targets[:, None])[:, 0]
        reference_loss(name, logprobs, datum).backward()
    return take_gradients(adapter)


def take_gradients(adapter: Adapter) -> dict[str, torch.Tensor]:
    gradients = {key: p.grad for key, p in adapter.named_parameters() if p.grad is not None}
    for _, parameter in adapter.named_parameters():
        parameter.grad = None
    return gradients


@settings(max_examples=5, deadline=None)
@given(lengths=st.lists(st.integers(4, 24), min_size=1, max_size=5), max_tokens=st.sampled_from([1, 40, WIDE]))
@pytest.mark.parametrize("name", CASES)
def test_gradients_match_autograd_for_any_micro_batches(
    base: BaseModel, name: str, lengths: list[int], max_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    adapter = base.new_adapter(LoraSpec(4, 0))
    for factors in adapter.factors.values():
        factors.b.data.copy_(torch.randn(factors.b.shape, generator=generator) * 0.02)
    _, config, inputs = CASES[name]
    loss: Loss = bind_loss(name, config)
    data = []
    for length in lengths:
        completion_mask = (torch.arange(length) >= 2).float()
        values = {
            "weights": torch.rand(length, generator=generator) * completion_mask,
            "logprobs": -5.5 + 0.2 * torch.randn(length, generator=generator),
            "advantages": torch.randn(length, generator=generator) * completion_mask,
            "sequence_ratio_mask": completion_mask,
        }
        tokens, targets = torch.randint(0, 256, (2, length), generator=generator)
        data.append(loss.prepare(Datum(tokens, targets, {key: values[key] for key in inputs}), 0))
    expected = reference_gradients(base, adapter, data, name)
    exhaust(iterate_loss(base, adapter, data, loss, max_tokens, backward=True))
    actual = take_gradients(adapter)
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(actual[key], gradient, atol=1e-5 * scale + 1e-7, rtol=1e-5)
