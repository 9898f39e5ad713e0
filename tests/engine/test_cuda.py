"""The engine on a CUDA device, against plain torch and transformers on the same device, and the speed of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from engine_process import API_KEY, running_engine
from metric_history import curve, history
from mlflow_store import new_store
from rich.console import Console
from rl_config import rl_fields
from sampling_jobs import make_job
from sft_config import sft_fields
from test_engine_losses import CASES
from tinker import types
from torch import Tensor
from torch.func import functional_call
from train_steps import ADAM, train
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks import engine_sampling, engine_vs_torch
from benchmarks.history import FOLDER, save
from benchmarks.rows import table
from engine.compute.base import BaseModel
from engine.compute.datum import Datum
from engine.compute.lora import Adapter, LoraSpec
from engine.compute.loss import bind_loss
from engine.compute.train import exhaust, iterate_loss
from engine.compute.trainer import Trainer
from engine.models import DtypeName, load_model, resolve_model
from engine.part import owner
from engine.sampling.batch import Batch
from engine.sampling.prefix_cache import BLOCK
from engine.sampling.request import SamplingRequest
from flows.config.rl import RlConfig
from flows.config.train import SftConfig
from flows.rl import rl
from flows.sft import sft

DEVICE = "cuda"
GOLDEN_SFT = Path(__file__).parents[1] / "flows/golden_sft.json"
SIZES = [(40, 1), (7, 2), (23, 3), (40, 4)]  # tokens and seed of each datum
# Of a logprob in nats, and of a gradient's norm.
TOLERANCES = {"float32": (2e-4, 1e-3), "bfloat16": (0.25, 0.1), "autocast-bf16": (0.25, 0.1)}

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="PyTorch finds no CUDA device, so the engine is not tested on one."
)


class Peer:
    """The model in plain transformers and float32, with the same rounded weights as the engine's."""

    def __init__(self, path: Path, dtype: DtypeName) -> None:
        stored = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=stored).float().to(DEVICE)

    def logprobs(self, adapter: Adapter | None, tokens_T: Tensor) -> Tensor:
        """Compute the logprobs ``(T - 1, V)`` after each token but the last; differentiable in the adapter."""
        weights = dict(self._model.named_parameters())
        if adapter is not None:
            weights["lm_head.weight"] = self._model.get_output_embeddings().weight
            for name, (a, b) in adapter.factors.items():
                weights[f"{name}.weight"] = weights[f"{name}.weight"] + adapter.scale * b @ a
        inputs = {"input_ids": tokens_T[None, :-1].to(DEVICE), "use_cache": False}
        output: Any = functional_call(self._model, weights, kwargs=inputs, tie_weights=False)
        return output.logits[0].log_softmax(dim=1)


@pytest.fixture(scope="module", params=TOLERANCES)
def dtype(request: pytest.FixtureRequest) -> DtypeName:
    return request.param


@pytest.fixture(scope="module")
def device_base(tiny_path: Path, dtype: DtypeName) -> BaseModel:
    return BaseModel(load_model(tiny_path, DEVICE, dtype, "tiny"))


@pytest.fixture(scope="module")
def peer(tiny_path: Path, dtype: DtypeName) -> Peer:
    return Peer(tiny_path, dtype)


def make_adapter(base: BaseModel, seed: int) -> Adapter:
    adapter = base.new_adapter(LoraSpec(rank=4, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for factors in adapter.factors.values():
            factors.b.copy_(torch.randn(factors.b.shape, generator=generator) * 0.05)
    return adapter


def make_datum(length: int, seed: int, inputs: Sequence[str]) -> Datum:
    generator = torch.Generator().manual_seed(seed)
    tokens_T = torch.randint(0, 256, (length + 1,), generator=generator)
    values = {
        "weights": torch.rand(length, generator=generator),
        "logprobs": -6 * torch.rand(length, generator=generator),
        "advantages": torch.randn(length, generator=generator),
        "sequence_ratio_mask": torch.ones(length),
    }
    return Datum(tokens_T[:-1], tokens_T[1:], {name: values[name] for name in inputs})


def test_weights_and_adapters_are_on_the_device(device_base: BaseModel) -> None:
    tensors = [*device_base.loaded.model.parameters(), *dict(make_adapter(device_base, 1).named_parameters()).values()]
    assert {tensor.device.type for tensor in tensors} == {DEVICE}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients(device_base: BaseModel, peer: Peer, dtype: DtypeName, name: str) -> None:
    """Every built-in loss of a ragged batch in several micro-batches, against its formula under autograd."""
    nats, relative = TOLERANCES[dtype]
    formula: Callable[..., Any]
    formula, params, inputs = CASES[name]
    adapter = make_adapter(device_base, 1)
    loss = bind_loss(name, params)
    data = [loss.prepare(make_datum(length, seed, inputs), 0) for length, seed in SIZES]
    output = exhaust(iterate_loss(device_base, adapter, data, loss, max_tokens=60, backward=True))
    ours = {key: parameter.grad for key, parameter in adapter.named_parameters()}
    for _, parameter in adapter.named_parameters():
        parameter.grad = None
    total = 0.0
    for datum, logprobs_T in zip(data, output.logprobs_D, strict=True):
        whole_T = torch.cat([datum.tokens_T, datum.targets[-1:]])
        expected_T = peer.logprobs(adapter, whole_T).gather(1, datum.targets[:, None].to(DEVICE))[:, 0]
        value, _ = formula(expected_T, *(datum.inputs[key].to(DEVICE) for key in inputs))
        value.backward()
        total += value.item()
        torch.testing.assert_close(logprobs_T, expected_T.detach().cpu(), atol=nats, rtol=0)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=relative, abs=relative)
    for key, parameter in adapter.named_parameters():
        gradient, expected = ours[key], parameter.grad
        assert gradient is not None
        assert expected is not None
        assert (gradient - expected).norm() <= relative * expected.norm(), key


def test_updates_equal_adamw(device_base: BaseModel) -> None:
    """Three updates on the device, the last one after the state has been on disk, equal AdamW on the CPU."""
    trainer = Trainer(device_base, LoraSpec(rank=4, seed=1), 1024)
    loss = bind_loss("cross_entropy", {})
    datum = make_datum(40, 1, ["weights"])
    params = types.AdamParams(learning_rate=1e-2, weight_decay=0.1)
    expected = {name: p.detach().cpu().clone().requires_grad_() for name, p in trainer.adapter.named_parameters()}
    adam = torch.optim.AdamW(
        expected.values(), lr=1e-2, betas=(params.beta1, params.beta2), eps=params.eps, weight_decay=0.1
    )
    for step in range(3):
        exhaust(trainer.forward_backward([datum], loss, forward_only=False))
        if step == 2:
            state = {name: tensor.cpu() for name, tensor in trainer.tensors().items()}
            trainer = Trainer(device_base, LoraSpec(rank=4, seed=2), 1024)
            trainer.restore(state, None)
        for name, parameter in trainer.adapter.named_parameters():
            assert parameter.grad is not None
            expected[name].grad = parameter.grad.cpu()
        trainer.optim_step(params)
        adam.step()
    for name, parameter in trainer.adapter.named_parameters():
        torch.testing.assert_close(parameter.detach().cpu(), expected[name].detach(), atol=1e-6, rtol=1e-5)


def test_samples(device_base: BaseModel, peer: Peer, dtype: DtypeName) -> None:
    """Groups, limits, adapters and prompt scores in one batch, then a second turn that continues cached tokens.

    In float32, greedy tokens are the likeliest ones of the plain model.
    """
    nats, _ = TOLERANCES[dtype]
    adapters = [None, make_adapter(device_base, 1), make_adapter(device_base, 2)]
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"num_samples": 3, "topk_sample": 4},
        {"top_k": 5, "top_p": 0.9},
        {"prompt_logprobs": 70, "prompt_draws": 2},
    ]
    batch = Batch(device_base, 2**26, 128)
    jobs = [make_job(seed, length=70, max_tokens=30, **option) for seed, option in enumerate(options)]
    for turn in range(2):
        requests = [SamplingRequest(job, adapter) for job in jobs for adapter in adapters]
        num_computed = batch.add([row for request in requests for row in request.rows])
        if turn:
            assert num_computed == sum(
                len(request.job.prompt_T) - (0 if request.job.scores_prompt else 2 * BLOCK) for request in requests
            )
        while batch.rows:
            batch.step()
        for request in requests:
            prompt_T, result = request.job.prompt_T, request.result()
            for sequence in result.sequences:
                whole_T = torch.cat([prompt_T, torch.tensor(sequence.tokens)])
                with torch.inference_mode():
                    full = peer.logprobs(request.adapter, whole_T).cpu()
                sampled = full[len(prompt_T) - 1 :]
                expected = sampled.gather(1, whole_T[len(prompt_T) :, None])[:, 0]
                torch.testing.assert_close(torch.tensor(sequence.logprobs), expected, atol=nats, rtol=0)
                if request.job.temperature == 0:
                    assert (sampled.amax(dim=1) - expected).max() <= (0 if dtype == "float32" else 2 * nats)
                if sequence.top is not None:
                    at_top = sampled.gather(1, sequence.top.tokens.long())
                    torch.testing.assert_close(sequence.top.logprobs, at_top, atol=nats, rtol=0)
            if (scores := result.prompt).logprobs_T is not None:
                expected = full[: len(prompt_T) - 1].gather(1, prompt_T[1:, None])[:, 0]
                torch.testing.assert_close(scores.logprobs_T[1:], expected, atol=nats, rtol=0)
                assert scores.draws is not None
                drawn, logprobs = scores.draws
                at_drawn = full[: len(prompt_T) - 1].gather(1, drawn)
                torch.testing.assert_close(logprobs, at_drawn, atol=nats, rtol=0)
        # The second prompts begin with two cached blocks, and end with the base model's completion.
        jobs = [
            replace(
                job,
                prompt_T=torch.cat(
                    [job.prompt_T[: 2 * BLOCK], torch.tensor(request.result().sequences[0].tokens[:20])]
                ),
                prompt_logprobs=2 * BLOCK + 20 if job.scores_prompt else 0,
            )
            for job, request in zip(jobs, requests[:: len(adapters)], strict=True)
        ]


def test_captured_passes_give_the_gradients_of_single_kernels(device_base: BaseModel, dtype: DtypeName) -> None:
    """Two adapters of a rank share a graph, a third has another rank, and shapes alternate and are rounded."""
    nats, relative = TOLERANCES[dtype]
    loss = bind_loss("cross_entropy", {})
    adapters = [
        make_adapter(device_base, 1),
        make_adapter(device_base, 2),
        device_base.new_adapter(LoraSpec(rank=8, seed=3)),
    ]
    batches = [
        [loss.prepare(make_datum(length, seed, ["weights"]), 0) for length, seed in sizes]
        for sizes in (SIZES, SIZES[1:3], [(130, 5)] * 9)
    ]

    def compute(adapter: Adapter, data: Sequence[Datum]) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        output = exhaust(iterate_loss(device_base, adapter, data, loss, max_tokens=4096, backward=True))
        gradients = {name: parameter.grad for name, parameter in adapter.named_parameters()}
        for _, parameter in adapter.named_parameters():
            parameter.grad = None
        return output.logprobs_D, gradients

    graphs = device_base._graphs
    if dtype == "autocast-bf16":
        assert graphs is None
        return
    assert graphs is not None
    device_base._graphs = None
    expected = [[compute(adapter, data) for data in batches] for adapter in adapters]
    device_base._graphs = graphs
    for _ in range(3):
        for adapter, expected_of_adapter in zip(adapters, expected, strict=True):
            for data, (logprobs_D, gradients) in zip(batches, expected_of_adapter, strict=True):
                computed_D, computed = compute(adapter, data)
                torch.testing.assert_close(computed_D, logprobs_D, atol=nats, rtol=0)
                for name, gradient in gradients.items():
                    ours = computed[name]
                    assert gradient is not None
                    assert ours is not None
                    assert (ours - gradient).norm() <= relative * gradient.norm(), name
    assert sum(captured is not None for captured in graphs._passes.values()) >= 6


def test_captured_passes_accumulate(device_base: BaseModel, dtype: DtypeName) -> None:
    """The gradient of two equal micro-batches is twice that of one, also if a graph computes them."""
    loss = bind_loss("cross_entropy", {})
    adapter = make_adapter(device_base, 1)
    data = [loss.prepare(make_datum(50, 1, ["weights"]), 0)] * 2
    gradients = []
    for num_datums in (1, 1, 1, 2):
        exhaust(iterate_loss(device_base, adapter, data[:num_datums], loss, max_tokens=50, backward=True))
        gradients.append({name: parameter.grad for name, parameter in adapter.named_parameters()})
        for _, parameter in adapter.named_parameters():
            parameter.grad = None
    for name, once in gradients[2].items():
        twice = gradients[3][name]
        assert once is not None
        assert twice is not None
        torch.testing.assert_close(twice, 2 * once, rtol=TOLERANCES[dtype][1], atol=1e-6)


@pytest.mark.parametrize("num_adapters", [1, 2, 3])
def test_graphs_give_the_samples_of_single_kernels(device_base: BaseModel, dtype: DtypeName, num_adapters: int) -> None:
    """Rows join and leave, so that graphs of several sizes and adapters replace each other, as do the buffers."""
    adapters = [None, make_adapter(device_base, 1), make_adapter(device_base, 2)]
    results = []
    for with_graphs in (True, False):
        batch = Batch(device_base, 2**26, 4096)
        if not with_graphs:
            batch._graphs = None
        jobs = [make_job(seed, length=20 + 9 * seed, max_tokens=10 + 17 * seed, temperature=0.0) for seed in range(9)]
        requests = [SamplingRequest(job, adapters[seed % num_adapters]) for seed, job in enumerate(jobs)]
        for request in requests:
            batch.add(request.rows)
            for _ in range(7):
                batch.step()
        while batch.rows:
            batch.step()
        results.append([request.result().sequences[0] for request in requests])
    for captured, plain in zip(*results, strict=True):
        if dtype == "float32":
            assert captured.tokens == plain.tokens
        num_equal = next(
            (i for i, pair in enumerate(zip(captured.tokens, plain.tokens, strict=True)) if len(set(pair)) > 1),
            len(plain.tokens),
        )
        logprobs = torch.tensor([captured.logprobs[:num_equal], plain.logprobs[:num_equal]])
        torch.testing.assert_close(logprobs[0], logprobs[1], atol=TOLERANCES[dtype][0], rtol=0)


@pytest.mark.parametrize("shape", [(4, 512, 2048, 32000), (16, 1024, 3072, 8000)], ids=["head", "layers"])
def test_memory_of_a_pass(tmp_path: Path, dtype: DtypeName, shape: tuple[int, int, int, int]) -> None:
    """The estimate, by which passes are limited, is an upper bound, and less than three times the memory taken."""
    layers, hidden, intermediate, vocab = shape
    sizes: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, hidden_size=hidden, intermediate_size=intermediate, vocab_size=vocab)
    loaded = load_model(resolve_model("tiny", tmp_path), DEVICE, dtype, "tiny")
    model: Any = LlamaForCausalLM(config)
    model.to(DEVICE, loaded.model.dtype).requires_grad_(False)
    base = BaseModel(replace(loaded, model=model, vocab_size=vocab))
    adapter = base.new_adapter(LoraSpec(rank=8, seed=1))
    loss = bind_loss("cross_entropy", {})
    data = [loss.prepare(make_datum(512, seed, ["weights"]), 0) for seed in range(8)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    exhaust(iterate_loss(base, adapter, data, loss, max_tokens=8 * 512, backward=True))
    taken = (torch.cuda.max_memory_allocated() - before) / (8 * 512)
    assert taken < base.bytes_per_trained_token < 3 * taken


@pytest.fixture(scope="module")
def device_url(tmp_path_factory: pytest.TempPathFactory, dtype: DtypeName) -> Iterator[str]:
    """`base_url` of an engine on the device."""
    arguments = ["--device", DEVICE, "--dtype", dtype]
    with running_engine(tmp_path_factory.mktemp("engine"), arguments=arguments) as engine:
        yield engine.url


@pytest.fixture
def service(device_url: str) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=device_url, api_key=API_KEY) as service:
        yield service


def sdk_datum(length: int, seed: int, weights: Sequence[float] | None = None) -> types.Datum:
    datum = make_datum(length, seed, [])
    inputs: dict[str, Any] = {"target_tokens": datum.targets.tolist()} | (
        {} if weights is None else {"weights": weights}
    )
    return types.Datum(types.ModelInput.from_ints(datum.tokens_T.tolist()), inputs)


@pytest.mark.process
def test_training_and_sampling_through_the_sdk(service: tinker.ServiceClient, dtype: DtypeName) -> None:
    """The loss falls, and the sampler of the trained weights has the logprobs of a forward pass."""
    trainer = service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    data = [sdk_datum(40, 1)]
    losses = train(trainer, data, 5)
    assert losses[-1] < losses[0]
    client = trainer.save_weights_and_get_sampling_client().result()
    datum = make_datum(40, 1, [])
    tokens = [*datum.tokens_T.tolist(), int(datum.targets[-1])]
    scored = client.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:]
    trained = trainer.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
    torch.testing.assert_close(torch.tensor(scored), trained, atol=TOLERANCES[dtype][0], rtol=0)


@pytest.mark.process
def test_custom_loss(service: tinker.ServiceClient, dtype: DtypeName) -> None:
    """A loss that the engine computes trains like the cross-entropy whose weights are minus its derivatives."""

    def squares(logprobs, targets):
        return ((logprobs - targets) ** 2).sum(), {"custom/distance:sum": (logprobs - targets).abs().sum()}

    nats, relative = TOLERANCES[dtype]
    loss = service.create_custom_loss(squares, {"logprobs": 1, "targets": 1}).result()
    targets = [make_datum(length, seed, ["logprobs"]).inputs["logprobs"] for length, seed in SIZES]
    ours, peer = (service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result() for _ in range(2))
    plain = [sdk_datum(length, seed) for length, seed in SIZES]
    custom = [
        types.Datum(datum.model_input, {**datum.loss_fn_inputs, "targets": types.TensorData.from_torch(target)})
        for datum, target in zip(plain, targets, strict=True)
    ]
    for _ in range(3):
        outputs = peer.forward(plain, "cross_entropy").result().loss_fn_outputs
        distances = [output["logprobs"].to_torch() - target for output, target in zip(outputs, targets, strict=True)]
        weighted = [
            sdk_datum(length, seed, (-2 * distance_T).tolist())
            for (length, seed), distance_T in zip(SIZES, distances, strict=True)
        ]
        peer.forward_backward(weighted, "cross_entropy").result()
        metrics = ours.forward_backward_custom(custom, loss).result().metrics
        distances_N = torch.cat(distances)
        assert metrics["loss:sum"] == pytest.approx((distances_N**2).sum().item(), rel=relative)
        assert metrics["custom/distance:sum"] == pytest.approx(distances_N.abs().sum().item(), rel=relative)
        for trainer in (ours, peer):
            trainer.optim_step(ADAM).result()
    by_trainer = [trainer.forward(plain, "cross_entropy").result().loss_fn_outputs for trainer in (ours, peer)]
    for output, expected in zip(*by_trainer, strict=True):
        torch.testing.assert_close(
            output["logprobs"].to_torch(), expected["logprobs"].to_torch(), atol=10 * nats, rtol=0
        )


@pytest.mark.process
@pytest.mark.usefixtures("prefect_server", "api_key")
def test_a_flow_with_terms(tmp_path: Path, device_url: str, dtype: DtypeName) -> None:
    """The curves of a run on the device are those of the run on a CPU that is kept for the tests of the flow."""
    result = sft(SftConfig.model_validate(sft_fields(tmp_path, "sft", new_store(tmp_path), device_url)))
    _, relative = TOLERANCES[dtype]
    for key, points in json.loads(GOLDEN_SFT.read_text()).items():
        assert history(result, key) == pytest.approx(dict(points), rel=relative, abs=relative**2), key


@pytest.mark.process
@pytest.mark.usefixtures("prefect_server", "api_key")
def test_reinforcement_learning(tmp_path: Path, device_url: str, dtype: DtypeName) -> None:
    """Sampler and trainer agree about the tokens of each step, so that a run in sync is on-policy."""
    config = rl_fields(tmp_path, "rl", new_store(tmp_path), device_url) | {
        "objective": {"base_loss": "importance_sampling", "regularizers": [{"name": "kl", "weight": 0.01}]}
    }
    result = rl(RlConfig.model_validate(config))
    nats, _ = TOLERANCES[dtype]
    assert curve(result, "optim/kl_sample_train_v2") == pytest.approx([0.0] * 4, abs=nats**2)
    assert curve(result, "term/kl/value")[0] == pytest.approx(0, abs=nats)
    assert len(curve(result, "test/env/all/reward/total")) == 2


@pytest.mark.process
def test_two_engines_on_one_gpu(tmp_path: Path) -> None:
    """Two sessions train at the same time, each on its own engine, and get the same losses."""
    data = [sdk_datum(40, 1)]
    with (
        running_engine(tmp_path / "engines", arguments=["--device", DEVICE, "--device", DEVICE]) as front,
        tinker.ServiceClient(base_url=front.url, api_key=API_KEY) as first,
        tinker.ServiceClient(base_url=front.url, api_key=API_KEY) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        sessions = [service.holder.get_session_id() for service in (first, second)]
        assert {owner(session, 2) for session in sessions} == {0, 1}
        trainers = [
            service.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
            for service in (first, second)
        ]
        ours, theirs = pool.map(lambda trainer: train(trainer, data, 5), trainers)
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert ours[-1] < ours[0]
        path = trainers[0].save_state("trained").result().path
        assert path is not None
        continued = second.create_training_client_from_state_with_optimizer(path).result()
        assert train(continued, data, 1) == pytest.approx(train(trainers[0], data, 1), rel=1e-4)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_speed() -> None:
    """Training steps against torch and peft, and samples against `generate`; the ratios are saved."""
    rows = [
        row
        for dtype in ("float32", "bfloat16")
        for row in (
            *engine_vs_torch.measure(device=DEVICE, dtype=dtype),
            *engine_sampling.measure(device=DEVICE, dtype=dtype, num_tokens=256),
        )
    ]
    Console(width=120).print(table(rows))
    path = save(rows, FOLDER / "cuda")
    print(f"saved to {path}")
