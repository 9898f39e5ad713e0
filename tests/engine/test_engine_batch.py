"""The running batch against one row at a time: joining, leaving, adapters, memory."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_jobs import make_job

from engine.compute.base import BaseModel
from engine.compute.lora import Adapter, LoraSpec
from engine.sampling.batch import Batch, bytes_per_token
from engine.sampling.job import Continuation
from engine.sampling.request import Request, Row

CACHE = 2**26


@pytest.fixture(scope="module")
def adapters(base: BaseModel) -> list[Adapter | None]:
    """The base model itself, and two adapters that change it much."""
    made: list[Adapter | None] = [None]
    for seed in (1, 2):
        adapter = base.new_adapter(LoraSpec(rank=4 * seed, seed=seed))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, tensor in adapter.named_parameters():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
        made.append(adapter)
    return made


def without_cache(base: BaseModel, request: Request) -> list[Continuation]:
    """The slow twin: each token from a fresh pass over everything before it."""
    for row in request.rows:
        while not row.done:
            batch = Batch(base, CACHE, 1024)
            batch.join([row])
    return [row.continuation() for row in request.rows]


def assert_same(ours: list[Continuation], theirs: list[Continuation]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.tokens == other.tokens
        assert one.stopped == other.stopped
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=5e-4, rtol=0)


LIMITS = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.6, "top_k": 50, "top_p": 0.95}]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.integers(0, 2**32))
def test_company_changes_nothing(base: BaseModel, adapters: list[Adapter | None], plan: int) -> None:
    """Rows that join and leave at random, of all lengths, limits and adapters, are those of each alone."""
    chance = random.Random(plan)
    jobs = [
        make_job(
            chance.randrange(1000), chance.randint(1, 40), chance.randint(1, 16), num_samples=chance.choice([1, 1, 3]),
            **chance.choice(LIMITS),
        )
        for _ in range(8)
    ]  # fmt: skip
    chosen = [chance.choice(adapters) for _ in jobs]
    requests = [Request(job, adapter) for job, adapter in zip(jobs, chosen, strict=True)]
    waiting = [row for request in requests for row in request.rows]
    chance.shuffle(waiting)
    batch = Batch(base, CACHE, chance.choice([16, 1024]))
    while waiting or batch.rows:
        count = chance.randint(0, 4)
        if waiting[:count]:
            batch.join(waiting[:count])
        del waiting[:count]
        if batch.rows and chance.random() < 0.1:  # as when memory is short
            row = chance.choice(batch.rows)
            batch.leave(lambda other: other is row)  # noqa: B023 - called at once
            waiting.append(row)
        if batch.rows:
            batch.step()
    for request, job, adapter in zip(requests, jobs, chosen, strict=True):
        assert_same(list(request.result().sequences), without_cache(base, Request(job, adapter)))


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.integers(0, 2**32))
def test_company_changes_no_bit_where_the_batch_is_deterministic(
    base: BaseModel, adapters: list[Adapter | None], plan: int
) -> None:
    """Nor does the order in which rows come, some of them of one prompt, some longer than a slot begins with."""
    chance = random.Random(plan)
    jobs = [
        make_job(chance.randrange(8), chance.choice([1, 9, 40, 120]), chance.randint(1, 16), **chance.choice(LIMITS))
        for _ in range(24)
    ]
    chosen = [chance.choice(adapters) for _ in jobs]

    def play(most: int) -> list[Continuation]:
        requests = [Request(job, adapter) for job, adapter in zip(jobs, chosen, strict=True)]
        waiting = [row for request in requests for row in request.rows]
        chance.shuffle(waiting)
        batch = Batch(base, CACHE, 1024, deterministic=True)
        while waiting or batch.rows:
            if joining := waiting[: chance.randint(1, most)]:
                batch.join(joining)
            del waiting[: len(joining)]
            if batch.rows:
                batch.step()
        return [each for request in requests for each in request.result().sequences]

    assert play(1) == play(24)


def test_a_deterministic_batch_never_lets_a_row_step_aside(base: BaseModel) -> None:
    rows = [row for seed in range(2) for row in Request(make_job(seed, max_tokens=800), None).rows]
    assert Batch(base, 1000 * bytes_per_token(base), 1024).fits(rows)
    assert not Batch(base, 1000 * bytes_per_token(base), 1024, deterministic=True).fits(rows)


def test_rows_step_aside_where_memory_is_short(base: BaseModel) -> None:
    """Room for about two rows at full length: the four finish nevertheless, with the same tokens."""
    jobs = [make_job(seed, max_tokens=60) for seed in range(4)]
    requests = [Request(job, None) for job in jobs]
    batch = Batch(base, 130 * bytes_per_token(base), 1024)
    waiting: list[Row] = [request.rows[0] for request in requests]
    stepped_aside = 0
    batch.join(waiting)
    waiting = []
    while batch.rows or waiting:
        out = batch.make_room()
        stepped_aside += len(out)
        waiting += out
        assert sum(1 for _ in batch.rows) * max((row.num_tokens for row in batch.rows), default=0) <= 130
        if not batch.rows:
            batch.join([waiting.pop(0)])
        if batch.rows:
            batch.step()
    assert stepped_aside >= 2
    for request, job in zip(requests, jobs, strict=True):
        assert_same(list(request.result().sequences), without_cache(base, Request(job, None)))


def test_a_long_row_makes_room_for_itself(base: BaseModel) -> None:
    """Past the tokens that slots begin with, and next to a short row."""
    jobs = [make_job(1, length=120, max_tokens=30), make_job(2, length=3, max_tokens=200)]
    requests = [Request(job, None) for job in jobs]
    batch = Batch(base, CACHE, 1024)
    for request in requests:
        batch.join(request.rows)
    while batch.rows:
        batch.step()
    for request, job in zip(requests, jobs, strict=True):
        assert_same(list(request.result().sequences), without_cache(base, Request(job, None)))


def test_admission_counts_the_longest_row(base: BaseModel) -> None:
    batch = Batch(base, 1000 * bytes_per_token(base), 1024)
    short, long = Request(make_job(1), None).rows[0], Request(make_job(2, length=900), None).rows[0]
    assert batch.fits([long])
    assert batch.fits([short] * 5)
    assert not batch.fits([short] * 5 + [long])
