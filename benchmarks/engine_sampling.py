"""Sampling through the SDK and the engine, against `transformers.generate` on the same prompts as one batch.

Both sample equally many tokens per prompt at temperature 1 from SmolLM2 in the same dtype with the same number of
threads. Our side sends separate requests that the engine batches; the peer receives one batch. Each repetition has
other prompts, so that the engine's prefix cache does not have them. Another row has a single request. Two more rows
compare an engine with `--deterministic`, whose samples do not depend on concurrent requests, with the default one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from time import perf_counter
from typing import Any

import tinker
import torch
from tinker import types
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.rows import Row, on_device
from benchmarks.scratch import GSM8K, scratch_home
from blocks.files.local import home
from blocks.servers.processes import local_engine
from engine.models import DtypeName, resolve_model
from examples.gsm8k import read_problems

Prompts = Sequence[list[int]]
Generate = Callable[[Prompts], float]


def measure(
    *,
    model: str = "smollm2-135m",
    repetitions: int = 3,
    num_prompts: int = 64,
    device: str = "cpu",
    dtype: DtypeName = "float32",
    num_tokens: int = 32,
) -> list[Row]:
    """Return a row for concurrent prompts and one for a single prompt; on a CPU, also both with `--deterministic`."""
    with scratch_home():
        path = str(resolve_model(model, home() / "cache"))
        tokenizer = AutoTokenizer.from_pretrained(path)
        questions = [tokenizer.encode(row["question"]) for row in read_problems(GSM8K)[:num_prompts]]
        batches = _fresh_batches(questions)
        threads = torch.get_num_threads()
        with (
            local_engine(model=model, dtype=dtype, threads=threads, device=device) as service,
            service.get_client() as session,
        ):
            sampler = session.create_sampling_client(base_model=model).result()
            sides = (_sdk(sampler, num_tokens), _transformers(path, device, dtype, num_tokens))
            rows = []
            for size in (num_prompts, 1):
                for side in sides:
                    side(next(batches)[: min(size, 2)])  # warm-up
                ours, peer = [], []
                for _ in tqdm(range(repetitions), desc=f"engine_sampling: {size} at once"):
                    batch = next(batches)[:size]
                    ours.append(sides[0](batch))
                    peer.append(sides[1](batch))
                name = f"{model}{on_device(device, dtype)}"
                rows.append(_row(name, size, num_tokens, ours, peer, f"transformers.generate, one batch, {dtype}"))
            if device != "cpu":
                return rows
            plain = sides[0]
            with (
                local_engine(model=model, dtype=dtype, threads=threads, deterministic=True) as other,
                other.get_client() as other_session,
            ):
                exact = _sdk(other_session.create_sampling_client(base_model=model).result(), num_tokens)
                for size in (num_prompts, 1):
                    exact(next(batches)[: min(size, 2)])
                    pairs = [(exact(batch[:size]), plain(batch[:size])) for batch in islice(batches, repetitions)]
                    ours, peer = ([pair[side] for pair in pairs] for side in (0, 1))
                    rows.append(_row(f"{model}, --deterministic", size, num_tokens, ours, peer, "the default engine"))
    return rows


def _fresh_batches(questions: Prompts) -> Iterator[Prompts]:
    """Yield the questions without their first token, then without their first two tokens, and so on.

    Each question is cut to 96 tokens.
    """
    for first in count(1):
        yield [question[first : first + 96] for question in questions]


def _row(
    setup: str, num_prompts: int, num_tokens: int, ours: Sequence[float], peer: Sequence[float], peer_name: str
) -> Row:
    requests = "1 request" if num_prompts == 1 else f"{num_prompts} concurrent requests"
    return Row(
        f"engine_sampling: {requests} of {num_tokens} tokens, {setup}", "tokens/s", ours, peer, peer_name=peer_name
    )


def _sdk(client: tinker.SamplingClient, num_tokens: int) -> Generate:
    params = types.SamplingParams(max_tokens=num_tokens, stop=[], temperature=1.0)

    def generate(prompts: Prompts) -> float:
        started = perf_counter()
        futures = [client.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
        num_sampled = sum(len(future.result().sequences[0].tokens) for future in futures)
        return num_sampled / (perf_counter() - started)

    return generate


def _transformers(path: str, device: str, dtype: DtypeName, num_tokens: int) -> Generate:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model.to(device)

    def generate(prompts: Prompts) -> float:
        width = max(len(prompt) for prompt in prompts)
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]).to(device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]).to(device)
        started = perf_counter()
        with torch.inference_mode():
            output = model.generate(
                input_ids=padded,
                attention_mask=mask,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
            )
        return output[:, width:].numel() / (perf_counter() - started)

    return generate
