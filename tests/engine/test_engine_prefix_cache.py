"""Prefix cache: samples that continue cached tokens, compared with plain transformers and with an engine without it."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_jobs import finish_in_random_order, make_job
from tinker import types
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from engine.compute.base import BaseModel
from engine.compute.datum import Datum
from engine.compute.lora import Adapter, LoraSpec
from engine.compute.loss import bind_loss
from engine.compute.train import exhaust
from engine.compute.trainer import Trainer
from engine.memory.adapter_store import AdapterStore
from engine.memory.budget import MemoryBudget
from engine.models import load_model
from engine.sampling.batch import Batch, bytes_per_token
from engine.sampling.job import SampleJob, SampleResult
from engine.sampling.prefix_cache import BLOCK, PrefixCache, block_keys, num_shared
from engine.sampling.request import SamplingRequest
from engine.service.sampling_queue import SamplingQueue
from engine.service.settings import Settings
from engine.service.worker import Worker
from engine.tiny import byte_tokenizer

CACHE = 2**26


def random_adapter(base: BaseModel, seed: int) -> Adapter:
    adapter = base.new_adapter(LoraSpec(rank=4, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, tensor in adapter.named_parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return adapter


def merged(path: Path, adapter: Adapter | None) -> PreTrainedModel:
    """Load the model with transformers alone in float64, and add an adapter to its weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, tie_word_embeddings=False)
    if adapter is not None:
        with torch.no_grad():
            for name, factors in adapter.factors.items():
                model.get_submodule(name).weight += adapter.scale * factors.b.double() @ factors.a.double()
    return model


def plain_logprobs(model: PreTrainedModel, prompt_T: Tensor, tokens: Sequence[int]) -> Tensor:
    """Compute the logprobs of a completion with one pass over the whole sequence."""
    whole = torch.cat([prompt_T, torch.tensor(tokens, dtype=torch.int64)])
    with torch.inference_mode():
        logprobs = model(whole[None], use_cache=False).logits[0].float().log_softmax(dim=1)
    return logprobs[len(prompt_T) - 1 : -1].gather(1, whole[len(prompt_T) :, None])[:, 0]


def run(batch: Batch, jobs: Sequence[SampleJob], adapters: Sequence[Adapter | None]) -> tuple[list[SampleResult], int]:
    """Complete jobs that are added at once; return the results and the number of prompt tokens computed."""
    requests = [SamplingRequest(job, adapter) for job, adapter in zip(jobs, adapters, strict=True)]
    num_computed = batch.add([row for request in requests for row in request.rows])
    while batch.rows:
        batch.step()
    return [request.result() for request in requests], num_computed


def cached_tokens(batch: Batch) -> int:
    return batch._prefix_cache.num_tokens


def tokens(seed: int, length: int) -> Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


def next_turn(prompt_T: Tensor, result: SampleResult, seed: int, length: int) -> Tensor:
    return torch.cat([prompt_T, torch.tensor(result.sequences[0].tokens), tokens(seed, length)])


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.integers(0, 2**32))
def test_logprobs_equal_those_of_transformers(base: BaseModel, tiny_path: Path, plan: int) -> None:
    """Episodes of several turns with common system prompts, groups, prompt scores and adapters, added in any order.

    The same jobs in new batches have the same tokens, most of them in a cache so small that blocks are removed. One
    sequence may differ: the cache changes the last bits, and a draw at the boundary of two tokens gives either.
    """
    chance = random.Random(plan)
    adapters = [None, random_adapter(base, 1), random_adapter(base, 2)]
    models = [merged(tiny_path, adapter) for adapter in adapters]
    systems = [tokens(seed, length) for seed, length in ((1, 0), (2, 33), (3, 100))]
    batch = Batch(base, bytes_per_token(base) * chance.choice([300, 1000, 100_000]), chance.choice([64, 1024]))
    episodes = [
        (chance.randrange(3), torch.cat([chance.choice(systems), tokens(seed, chance.randint(1, 50))]))
        for seed in range(6)
    ]
    num_different = 0
    for turn in range(3):
        jobs = [
            replace(
                make_job(seed, max_tokens=chance.randint(1, 40), num_samples=chance.choice([1, 1, 3])),
                prompt_T=prompt_T,
                temperature=chance.choice([0.0, 1.0]),
                prompt_logprobs=chance.choice([0, 0, len(prompt_T), chance.randint(1, len(prompt_T))]),
            )
            for seed, (_, prompt_T) in enumerate(episodes)
        ]
        requests = [SamplingRequest(job, adapters[index]) for job, (index, _) in zip(jobs, episodes, strict=True)]
        waiting = [row for request in requests for row in request.rows]
        finish_in_random_order(batch, waiting, chance)
        for request, job, (index, prompt_T) in zip(requests, jobs, episodes, strict=True):
            result = request.result()
            (alone,), _ = run(Batch(base, CACHE, 1024), [job], [adapters[index]])
            for ours, theirs in zip(result.sequences, alone.sequences, strict=True):
                num_different += ours.tokens != theirs.tokens
                expected = plain_logprobs(models[index], prompt_T, ours.tokens)
                torch.testing.assert_close(torch.tensor(ours.logprobs), expected, atol=5e-4, rtol=0)
            if job.prompt_logprobs:
                assert result.prompt.logprobs_T is not None
                scored = plain_logprobs(models[index], prompt_T[:1], prompt_T[1:].tolist())
                scored[: -job.prompt_logprobs] = float("nan")
                torch.testing.assert_close(
                    result.prompt.logprobs_T[1:], scored.float(), atol=5e-4, rtol=0, equal_nan=True
                )
        episodes = [
            (index, next_turn(prompt_T, request.result(), 10 * turn + number, chance.randint(1, 40)))
            for number, (request, (index, prompt_T)) in enumerate(zip(requests, episodes, strict=True))
        ]
    assert num_different <= 1


def test_second_turn_computes_only_its_new_tokens(base: BaseModel) -> None:
    """Four whole blocks fit into the 129 tokens with keys, out of 70 + 60 + 20."""
    batch = Batch(base, CACHE, 1024)
    job = make_job(1, length=70, max_tokens=60)
    (first,), num_computed = run(batch, [job], [None])
    assert num_computed == 70
    second = replace(job, prompt_T=next_turn(job.prompt_T, first, seed=2, length=20))
    _, num_computed = run(batch, [second], [None])
    assert num_computed == 150 - 4 * BLOCK
    # An equal prompt needs the hidden state of its last token.
    _, num_computed = run(batch, [second], [None])
    assert num_computed == 150 - 4 * BLOCK
    _, num_computed = run(batch, [replace(second, prompt_T=second.prompt_T[: 4 * BLOCK])], [None])
    assert num_computed == BLOCK


def test_common_system_prompt_is_computed_once(base: BaseModel) -> None:
    """In one prefill and in later ones; of the system prompt of 100 tokens, three whole blocks are shared."""
    system = tokens(0, 100)
    jobs = [replace(make_job(seed), prompt_T=torch.cat([system, tokens(seed, 20)])) for seed in range(1, 12)]
    batch = Batch(base, CACHE, 1024)
    _, num_computed = run(batch, jobs[:8], [None] * 8)
    assert num_computed == 3 * BLOCK + 8 * (120 - 3 * BLOCK)
    _, num_computed = run(batch, jobs[8:], [None] * 3)
    assert num_computed == 3 * (120 - 3 * BLOCK)


def test_nested_beginnings_are_computed_once(base: BaseModel) -> None:
    """Prompts A B, A B', A C and A C' with A, B and C of 64 tokens each."""
    a, b, c = tokens(1, 64), tokens(2, 64), tokens(3, 64)
    prompts = [torch.cat([a, part, tokens(seed, 10)]) for seed, part in ((4, b), (5, b), (6, c), (7, c))]
    jobs = [replace(make_job(seed), prompt_T=prompt_T) for seed, prompt_T in enumerate(prompts)]
    _, num_computed = run(Batch(base, CACHE, 1024), jobs, [None] * 4)
    assert num_computed == 64 + 64 + 64 + 4 * 10


@pytest.mark.parametrize(
    ("scores", "num_computed"),
    [
        ({"prompt_logprobs": 100}, 100),
        ({"prompt_logprobs": 30}, 100 - 2 * BLOCK),  # needs the hidden states from position 69 on
        ({"prompt_logprobs": 3}, 100 - 3 * BLOCK),  # and from position 96 on
        ({"prompt_logprobs": 4}, 100 - 2 * BLOCK),
        ({"prompt_logprobs": 3, "topk_prompt": 2}, 100),
        ({"prompt_draws": 1}, 100),
        ({"prompt_targets": torch.zeros(99, 1, dtype=torch.int64)}, 100),
    ],
)
def test_scored_prompt_is_computed_from_its_first_score(
    base: BaseModel, scores: dict[str, Any], num_computed: int
) -> None:
    batch = Batch(base, CACHE, 1024)
    job = make_job(1, length=100)
    run(batch, [job], [None])
    assert run(batch, [replace(job, **scores)], [None])[1] == num_computed


def test_scores_of_a_group_share_its_prompt(base: BaseModel, tiny_path: Path) -> None:
    """Completions of one prompt of 80 tokens, each scored from its first sampled token on by one request."""
    prompt = tokens(0, 80)
    whole = [torch.cat([prompt, tokens(seed, 20)]) for seed in range(1, 5)]
    jobs = [replace(make_job(1, max_tokens=1), prompt_T=tokens_T, prompt_logprobs=20) for tokens_T in whole]
    results, num_computed = run(Batch(base, CACHE, 1024), jobs, [None] * 4)
    assert num_computed == 2 * BLOCK + 4 * (100 - 2 * BLOCK)
    for tokens_T, result in zip(whole, results, strict=True):
        assert result.prompt.logprobs_T is not None
        expected = plain_logprobs(merged(tiny_path, None), prompt, tokens_T[80:].tolist())
        torch.testing.assert_close(result.prompt.logprobs_T[80:], expected.float(), atol=1e-4, rtol=0)


def test_adapters_share_no_block(base: BaseModel) -> None:
    batch = Batch(base, CACHE, 1024)
    adapters = [None, random_adapter(base, 1), random_adapter(base, 2)]
    jobs = [make_job(1, length=100)] * 3
    _, num_computed = run(batch, jobs, adapters)
    assert num_computed == 300
    _, num_computed = run(batch, jobs, adapters)
    assert num_computed == 300 - 3 * 3 * BLOCK


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.integers(0, 2**32))
def test_rows_and_cache_share_one_memory_bound(base: BaseModel, plan: int) -> None:
    chance = random.Random(plan)
    limit = 2000 * bytes_per_token(base)
    batch = Batch(base, limit, 1024)

    def check() -> None:
        buffers = sum(buffer.nbytes for buffer in (*batch._kv_cache._keys, *batch._kv_cache._values))
        blocks = [block for part in batch._prefix_cache._all() for block in part.values()]
        assert buffers + sum(block.data_F.untyped_storage().nbytes() for block in blocks) <= limit

    def step() -> None:
        batch.make_room()
        batch.step()
        check()

    for _ in range(15):
        job = make_job(chance.randrange(100), chance.randint(1, 200), chance.randint(1, 60))
        (row,) = SamplingRequest(job, None).rows
        while not batch.has_room([row]):
            step()
        batch.add([row])
        check()
        for _ in range(chance.randint(0, 10)):
            if batch.rows:
                step()


def test_prompts_fill_the_memory_that_rows_leave(base: BaseModel) -> None:
    batch = Batch(base, 2000 * bytes_per_token(base), 1024)
    for seed in range(30):
        run(batch, [make_job(seed, length=100, max_tokens=1)], [None])
    assert 2000 - BLOCK < cached_tokens(batch) <= 2000


def test_least_recently_used_blocks_go_first() -> None:
    """Across adapters; and a block goes after those that follow it, which are of no use without it."""
    cache, adapters = PrefixCache(), [Adapter(LoraSpec(1, 0), {}) for _ in range(2)]
    layers = [(torch.zeros(1, 1, 4 * BLOCK, 2),) * 2]
    old, new, other = (block_keys(tokens(seed, 4 * BLOCK)) for seed in range(3))
    cache.put(adapters[0], old, layers, 0)
    cache.put(adapters[1], other, layers, 0)
    cache.put(adapters[0], new, layers, 0)
    cache.read(adapters[0], old)
    cache.shrink(10 * BLOCK)
    assert [cache.find(adapters[0], old), cache.find(adapters[1], other), cache.find(adapters[0], new)] == [4, 2, 4]
    cache.shrink(6 * BLOCK)
    assert [cache.find(adapters[0], old), cache.find(adapters[1], other), cache.find(adapters[0], new)] == [4, 0, 2]
    cache.shrink(0)
    assert cache.num_tokens == 0


def test_blocks_go_with_their_adapter(base: BaseModel, tmp_path: Path) -> None:
    """At once, not at the next garbage collection."""

    async def sample(queue: SamplingQueue) -> None:
        adapter = random_adapter(base, 1)
        job = make_job(1, length=100, num_samples=2)
        await asyncio.gather(queue.sample("client", job, lambda: adapter), queue.sample("client", job, lambda: None))
        assert cached_tokens(queue._batch) == 2 * 3 * BLOCK

    async def main() -> int:
        queue = SamplingQueue(
            base, Worker(), Settings(models=("tiny",), state=tmp_path, cache=tmp_path), base.num_bytes
        )
        await sample(queue)
        while queue.is_busy:
            await asyncio.sleep(0.001)
        return cached_tokens(queue._batch)

    gc.disable()
    try:
        assert asyncio.run(main()) == 3 * BLOCK
    finally:
        gc.enable()


def test_evicted_sampler_frees_its_blocks(base: BaseModel, tmp_path: Path) -> None:
    """An adapter that returns from disk computes its prompts again, with the same tokens."""
    batch, memory = Batch(base, CACHE, 1024), MemoryBudget(2**30, tmp_path)
    store = AdapterStore.from_snapshot(memory, base, random_adapter(base, 1))
    job = make_job(1, length=100)
    before, _ = run(batch, [job], [store.adapter()])
    store.evict()
    gc.collect()
    assert cached_tokens(batch) == 0
    after, num_computed = run(batch, [job], [store.adapter()])
    assert num_computed == 100
    assert after[0].sequences[0].tokens == before[0].sequences[0].tokens
    memory.close()


def test_training_changes_no_cached_weights(base: BaseModel, tiny_path: Path) -> None:
    """Snapshots before and after updates sample the same prompt, each with its own weights."""
    trainer = Trainer(base, LoraSpec(rank=4, seed=0), 1024)
    batch = Batch(base, CACHE, 1024)
    job = make_job(1, length=100)
    adapters, logprobs = [], []
    for _ in range(3):
        adapters.append(trainer.snapshot())
        (result,), _ = run(batch, [job], adapters[-1:])
        (again,), num_computed = run(batch, [job], adapters[-1:])
        assert num_computed == 100 - 3 * BLOCK
        assert again.sequences[0].tokens == result.sequences[0].tokens
        expected = plain_logprobs(merged(tiny_path, adapters[-1]), job.prompt_T, again.sequences[0].tokens)
        torch.testing.assert_close(torch.tensor(again.sequences[0].logprobs), expected, atol=5e-4, rtol=0)
        logprobs.append(again.sequences[0].logprobs[0])
        datum = Datum(job.prompt_T[:-1], job.prompt_T[1:], {})
        exhaust(trainer.forward_backward([datum], bind_loss("cross_entropy", {}), forward_only=False))
        trainer.optim_step(types.AdamParams(learning_rate=0.1))
    assert len(set(logprobs)) == 3


def test_deterministic_batch_caches_nothing(base: BaseModel) -> None:
    batch = Batch(base, CACHE, 1024, deterministic=True)
    job = make_job(1, length=100)
    for _ in range(2):
        _, num_computed = run(batch, [job], [None])
        assert num_computed == 100
    assert cached_tokens(batch) == 0


def save_mistral(path: Path, **changes: Any) -> BaseModel:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(path)
    config = MistralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        **changes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MistralForCausalLM(config)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim == 2:
                    weight.normal_(std=0.2)
        model.save_pretrained(path)
    return BaseModel(load_model(path, "cpu", "float32"))


def test_sliding_window_covers_cached_tokens(tmp_path: Path) -> None:
    """Windows of 40 tokens, which cross blocks, with a common beginning of 160 tokens that is computed in two parts."""
    base = save_mistral(tmp_path, sliding_window=40)
    model = merged(tmp_path, None)
    system = tokens(0, 160)
    batch = Batch(base, CACHE, 1024)
    run(batch, [replace(make_job(1), prompt_T=system[:70])], [None])
    jobs = [replace(make_job(seed, max_tokens=30), prompt_T=torch.cat([system, tokens(seed, 20)])) for seed in (2, 3)]
    results, num_computed = run(batch, jobs, [None, None])
    assert num_computed == 3 * BLOCK + 2 * 20
    for job, result in zip(jobs, results, strict=True):
        expected = plain_logprobs(model, job.prompt_T, result.sequences[0].tokens)
        torch.testing.assert_close(torch.tensor(result.sequences[0].logprobs), expected, atol=1e-4, rtol=0)


def save_with_rope(path: Path, kind: str) -> BaseModel:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128, **factors}
    return save_mistral(path, rope_parameters=rope)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_length_are_not_cached(tmp_path: Path, kind: str) -> None:
    base = save_with_rope(tmp_path, kind)
    assert base.keys_depend_on_length
    batch = Batch(base, CACHE, 1024)
    for _ in range(2):
        _, num_computed = run(batch, [make_job(1, length=100)], [None])
        assert num_computed == 100


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_do_not_depend_on_the_longest_row_that_the_context_allows(tmp_path: Path, kind: str) -> None:
    base = save_with_rope(tmp_path, kind)
    short, long = make_job(1, length=10, max_tokens=4), make_job(2, length=base.loaded.max_context, max_tokens=1)
    (alone,), _ = run(Batch(base, CACHE, 4096), [short], [None])
    (beside, _), _ = run(Batch(base, CACHE, 4096), [short, long], [None, None])
    computed, expected = (torch.tensor(result.sequences[0].logprobs) for result in (beside, alone))
    torch.testing.assert_close(computed, expected, atol=1e-4, rtol=0)


def test_keys_of_plain_models_do_not_depend_on_the_length(base: BaseModel) -> None:
    assert not base.keys_depend_on_length


@given(st.lists(st.lists(st.integers(0, 1), max_size=6).map(lambda blocks: [[b] * BLOCK for b in blocks]), max_size=6))
def test_shared_blocks_equal_a_comparison_of_tokens(sequences: list[list[list[int]]]) -> None:
    def common(one: list[list[int]], other: list[list[int]]) -> int:
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))

    expected = [
        max((common(one, other) for index, other in enumerate(sequences) if index != number), default=0)
        for number, one in enumerate(sequences)
    ]
    flat = [torch.tensor(sequence, dtype=torch.int64).flatten() for sequence in sequences]
    assert num_shared([block_keys(tokens_T) for tokens_T in flat]) == expected


def test_prefill_of_cached_prompts_is_not_split(base: BaseModel, tmp_path: Path) -> None:
    """Second turns of 40 episodes have 330 tokens, of which 10 are new: all but the first one are one pass."""
    shapes: list[torch.Size] = []

    def record(module: object, args: object, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            shapes.append(kwargs["input_ids"].shape)

    queue = SamplingQueue(base, Worker(), Settings(models=("tiny",), state=tmp_path, cache=tmp_path), base.num_bytes)
    jobs = [make_job(seed, length=320, max_tokens=1) for seed in range(40)]

    async def sample(jobs: Sequence[SampleJob]) -> None:
        await asyncio.gather(*(queue.sample("client", job, lambda: None) for job in jobs))

    async def main() -> None:
        await sample(jobs)
        hook = base.decoder.register_forward_pre_hook(record, with_kwargs=True)
        await sample([replace(job, prompt_T=torch.cat([job.prompt_T, tokens(99, 10)])) for job in jobs])
        hook.remove()

    asyncio.run(main())
    assert shapes == [(1, 10), (39, 10)]
    assert queue.prefill_tokens_requested == 40 * (320 + 330)
    assert queue.prefill_tokens_computed == 40 * (320 + 10)


@pytest.mark.process
def test_episode_through_the_sdk(trainer: tinker.TrainingClient) -> None:
    """The second turn has the logprobs that a training forward pass computes, before and after an update."""
    prompt = tokens(5, 80).tolist()
    for _ in range(2):
        client = trainer.save_weights_and_get_sampling_client().result()
        history = prompt
        for _ in range(2):
            params = types.SamplingParams(max_tokens=40, stop=[], seed=1)
            (sequence,) = client.sample(types.ModelInput.from_ints(history), 1, params).result().sequences
            whole = [*history, *sequence.tokens]
            datum = types.Datum(types.ModelInput.from_ints(whole[:-1]), {"target_tokens": whole[1:]})  # pyright: ignore[reportArgumentType]
            trained = trainer.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_torch()
            ours = torch.tensor(sequence.logprobs)
            torch.testing.assert_close(ours, trained[len(history) - 1 :], atol=1e-4, rtol=0)
            history = [*whole, *prompt[:15]]
        trainer.forward_backward([datum], "cross_entropy").result()
        trainer.optim_step(types.AdamParams(learning_rate=1e-2)).result()
