"""Running batch compared with one row at a time: added and removed rows, adapters, memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_models import EXPERTS, SIZES, loaded_with
from sampling_jobs import finish_in_random_order, make_job
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GraniteMoeConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from engine.compute.base import BaseModel, RowwiseActivation
from engine.compute.kv_cache import KVCache, layers_of
from engine.compute.linear import linear
from engine.compute.lora import Adapter, LoraSpec
from engine.listen import bind
from engine.models import ModelError, load_model
from engine.sampling.batch import Batch, bytes_per_token
from engine.sampling.cuda_graphs import DecodingGraphs
from engine.sampling.job import Completion
from engine.sampling.request import Row, SamplingRequest
from engine.serve import serve
from engine.service.settings import Settings
from engine.tiny import byte_tokenizer, random_llama

CACHE = 2**26


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    """A random model with three query heads of 64 dimensions per key head, like SmolLM2."""
    path = tmp_path_factory.mktemp("wide")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(path)
    config = random_llama(tokenizer).config
    config.update({"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3, "head_dim": 64})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return BaseModel(load_model(path, "cpu", "float32"))


@pytest.fixture(scope="module")
def adapters(base: BaseModel) -> list[Adapter | None]:
    return make_adapters(base)


def make_adapters(base: BaseModel) -> list[Adapter | None]:
    """Return the base model itself (None), and two adapters with large weights."""
    adapters: list[Adapter | None] = [None]
    for seed in (1, 2):
        adapter = base.new_adapter(LoraSpec(rank=4 * seed, seed=seed))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, tensor in adapter.named_parameters():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
        adapters.append(adapter)
    return adapters


def complete_without_cache(base: BaseModel, request: SamplingRequest) -> list[Completion]:
    """Slow reference: compute each token by a fresh pass over all earlier tokens."""
    for row in request.rows:
        while not row.done:
            batch = Batch(base, CACHE, 1024)
            batch.add([row])
    return [row.completion() for row in request.rows]


def assert_same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens
        assert one.stopped == other.stopped
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=5e-4, rtol=0)


LIMITS = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.6, "top_k": 50, "top_p": 0.95}]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.integers(0, 2**32))
def test_other_rows_change_no_completion(base: BaseModel, adapters: list[Adapter | None], plan: int) -> None:
    """Rows added and removed at random, with various lengths, limits and adapters, equal rows computed alone."""
    chance = random.Random(plan)
    jobs = [
        make_job(
            chance.randrange(1000), chance.randint(1, 40), chance.randint(1, 16), num_samples=chance.choice([1, 1, 3]),
            **chance.choice(LIMITS),
        )
        for _ in range(8)
    ]  # fmt: skip
    chosen = [chance.choice(adapters) for _ in jobs]
    requests = [SamplingRequest(job, adapter) for job, adapter in zip(jobs, chosen, strict=True)]
    waiting = [row for request in requests for row in request.rows]
    finish_in_random_order(Batch(base, CACHE, chance.choice([16, 1024])), waiting, chance)
    pairs = [
        pair
        for request, job, adapter in zip(requests, jobs, chosen, strict=True)
        for pair in zip(
            request.result().sequences, complete_without_cache(base, SamplingRequest(job, adapter)), strict=True
        )
    ]
    equal = [pair for pair in pairs if pair[0].tokens == pair[1].tokens]
    assert len(equal) >= len(pairs) - 1, "rounding seldom moves a draw to the neighbouring token"
    assert_same(*zip(*equal, strict=True))


@pytest.mark.parametrize(("model", "num_threads"), [("base", 1), ("wide", 2), ("wide", 3)])
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.integers(0, 2**32))
def test_other_rows_change_no_bit_of_a_deterministic_batch(
    request: pytest.FixtureRequest, model: str, num_threads: int, plan: int
) -> None:
    """Neither does the order of arrival, with equal prompts and with rows longer than the initial buffers."""
    base: BaseModel = request.getfixturevalue(model)
    adapters = make_adapters(base)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    chance = random.Random(plan)
    jobs = [
        make_job(chance.randrange(8), chance.choice([1, 9, 40, 120]), chance.randint(1, 16), **chance.choice(LIMITS))
        for _ in range(24)
    ]
    chosen = [chance.choice(adapters) for _ in jobs]

    def run(max_new_rows: int) -> list[Completion]:
        requests = [SamplingRequest(job, adapter) for job, adapter in zip(jobs, chosen, strict=True)]
        waiting = [row for request in requests for row in request.rows]
        chance.shuffle(waiting)
        batch = Batch(base, CACHE, 1024, deterministic=True)
        while waiting or batch.rows:
            if new_rows := waiting[: chance.randint(1, max_new_rows)]:
                batch.add(new_rows)
            del waiting[: len(new_rows)]
            if batch.rows:
                batch.step()
        return [completion for request in requests for completion in request.result().sequences]

    try:
        assert run(1) == run(24)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("num_adapters", [1, 2, 3])
def test_decoding_steps_of_graphs_equal_a_pass_over_all_tokens(
    base: BaseModel, adapters: list[Adapter | None], num_adapters: int
) -> None:
    """The first use captures no graph and so needs no GPU; there are more slots than rows."""
    batch = Batch(base, CACHE, 1024)
    batch._kv_cache = KVCache(2**16, slots_per_growth=5)
    requests = [
        SamplingRequest(make_job(seed, length=9 + 5 * seed), adapters[-1 - seed % num_adapters]) for seed in range(4)
    ]
    batch.add([row for request in requests for row in request.rows])
    batch.step()
    batch.remove(lambda row: row is requests[1].rows[0])  # the last row moves into its slot
    graphs = DecodingGraphs(base, batch._kv_cache)
    with torch.inference_mode():
        batch._kv_cache.begin_step()
        tokens_R = [row.tokens[-1] for row in batch.rows]
        logits_RV = graphs.logits(tokens_R, [row.request.adapter for row in batch.rows])
        for row, logits_V in zip(batch.rows, logits_RV, strict=True):
            with base.using(row.request.adapter):
                expected_V = base.logits(base.hidden(row.context_T()[None])[0, -1:])[0]
            torch.testing.assert_close(logits_V, expected_V, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(), False),
        (MixtralConfig(num_local_experts=2), True),
        (Qwen3MoeConfig(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8), True),
        (GraniteMoeConfig(**EXPERTS), True),
    ],
    ids=["llama", "mixtral", "qwen3_moe", "granitemoe"],
)
def test_mixtures_of_experts_are_not_captured(base: BaseModel, config: PreTrainedConfig, expected: bool) -> None:
    config.update(dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8))
    config.update({"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8})
    model = AutoModelForCausalLM.from_config(config)
    assert BaseModel(replace(base.loaded, model=model)).has_experts == expected


def test_deterministic_engine_checks_the_products_of_this_machine(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that sums in another order for some numbers of rows is refused by name."""
    assert base.keeps_bits()

    def by_size(x: Tensor, weight: Tensor) -> Tensor:
        y = linear(x, weight)
        return y * (1 + 1e-6) if len(x) == 7 else y

    monkeypatch.setattr("engine.compute.linear.linear", by_size)
    assert not base.keeps_bits()
    options = Settings(("tiny",), tmp_path, tmp_path, deterministic=True)
    expected = "not possible for tiny on this processor, whose matrix products give a row different bits"
    with bind(options.host, 0) as listener, pytest.raises(ModelError, match=expected):
        serve(options, listener, exit_with_stdin=False)


def test_deterministic_engine_refuses_products_of_other_layers(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not base.has_other_products
    assert BaseModel(loaded_with(base, MixtralConfig(**EXPERTS))).has_other_products
    assert BaseModel(loaded_with(base, GPT2Config(**SIZES))).has_other_products
    monkeypatch.setattr(BaseModel, "has_other_products", True)
    options = Settings(("tiny",), tmp_path, tmp_path, deterministic=True)
    with bind(options.host, 0) as listener, pytest.raises(ModelError, match="not possible for tiny, which computes"):
        serve(options, listener, exit_with_stdin=False)


@pytest.mark.parametrize("config", [Starcoder2Config(**SIZES), PhiConfig(**SIZES)], ids=["act", "activation_fn"])
def test_activations_of_all_names_are_row_wise(base: BaseModel, config: PreTrainedConfig) -> None:
    modules = BaseModel(loaded_with(base, config)).decoder.modules()
    assert sum(isinstance(module, RowwiseActivation) for module in modules) == config.num_hidden_layers


@pytest.mark.parametrize("width", [4864, 500])
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU("tanh")])
def test_activations_give_a_row_the_same_bits_in_any_batch(activation: nn.Module, width: int) -> None:
    """torch alone does not, with three or more threads."""
    x = torch.randn(160, width, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch.inference_mode():
            rowwise = RowwiseActivation(activation)
            pairs = torch.cat([rowwise(pair) for pair in x.split(2)])
            groups = [x[:size] for size in range(2, 160)]
            assert not all(torch.equal(activation(group), pairs[: len(group)]) for group in groups)
            assert all(torch.equal(rowwise(group), pairs[: len(group)]) for group in groups)
            torch.testing.assert_close(pairs, activation(x))
    finally:
        torch.set_num_threads(threads)


def test_a_row_never_sees_what_its_slot_held_before() -> None:
    """The NaN of a removed row would reach the next row in its slot, in spite of the weight 0."""
    cache = KVCache(2**20)
    cache.add(layers_of(prefill_of(float("nan"), num_rows=2, num_tokens=9)), [0, 1], [9, 5])
    cache.add(layers_of(prefill_of(1.0, num_rows=1, num_tokens=4)), [0], [4])
    assert cache.drop([0, 1]) == [2]
    cache.add(layers_of(prefill_of(1.0, num_rows=1, num_tokens=3)), [0], [3])
    for buffer in (*cache._keys, *cache._values):
        assert torch.isfinite(buffer[: cache.num_rows]).all()


def prefill_of(value: float, num_rows: int, num_tokens: int) -> DynamicCache:
    cache = DynamicCache()
    cache.update(*(torch.full((num_rows, 2, num_tokens, 4), value) for _ in range(2)), 0)
    return cache


def test_deterministic_engine_requires_float32(tmp_path: Path) -> None:
    options = Settings(("tiny",), tmp_path, tmp_path, dtype="bfloat16", deterministic=True)
    with bind(options.host, 0) as listener, pytest.raises(ModelError, match=r"--dtype float32.*has cpu, bfloat16"):
        serve(options, listener, exit_with_stdin=False)


def test_deterministic_batch_never_evicts_rows(base: BaseModel) -> None:
    rows = [row for seed in range(2) for row in SamplingRequest(make_job(seed, max_tokens=800), None).rows]
    assert Batch(base, 1000 * bytes_per_token(base), 1024).has_room(rows)
    assert not Batch(base, 1000 * bytes_per_token(base), 1024, deterministic=True).has_room(rows)


def test_rows_are_evicted_if_memory_is_short(base: BaseModel) -> None:
    """Four rows in a cache for about two rows at full length finish with the same tokens."""
    jobs = [make_job(seed, max_tokens=60) for seed in range(4)]
    requests = [SamplingRequest(job, None) for job in jobs]
    batch = Batch(base, 130 * bytes_per_token(base), 1024)
    waiting: list[Row] = [request.rows[0] for request in requests]
    num_evicted = 0
    batch.add(waiting)
    waiting = []
    while batch.rows or waiting:
        evicted = batch.make_room()
        num_evicted += len(evicted)
        waiting += evicted
        assert sum(1 for _ in batch.rows) * max((row.num_tokens for row in batch.rows), default=0) <= 130
        if not batch.rows:
            batch.add([waiting.pop(0)])
        if batch.rows:
            batch.step()
    assert num_evicted >= 2
    for request, job in zip(requests, jobs, strict=True):
        assert_same(list(request.result().sequences), complete_without_cache(base, SamplingRequest(job, None)))


def test_buffers_grow_with_a_long_row(base: BaseModel) -> None:
    """Rows exceed the initial buffers, next to a short row."""
    jobs = [make_job(1, length=120, max_tokens=30), make_job(2, length=3, max_tokens=200)]
    requests = [SamplingRequest(job, None) for job in jobs]
    batch = Batch(base, CACHE, 1024)
    for request in requests:
        batch.add(request.rows)
    while batch.rows:
        batch.step()
    for request, job in zip(requests, jobs, strict=True):
        assert_same(list(request.result().sequences), complete_without_cache(base, SamplingRequest(job, None)))


def test_room_depends_on_the_longest_row(base: BaseModel) -> None:
    batch = Batch(base, 1000 * bytes_per_token(base), 1024)
    short, long = SamplingRequest(make_job(1), None).rows[0], SamplingRequest(make_job(2, length=900), None).rows[0]
    assert batch.has_room([long])
    assert batch.has_room([short] * 5)
    assert not batch.has_room([short] * 5 + [long])
