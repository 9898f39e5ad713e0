"""The event loop of async terms belongs to a runner, or to a single call."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace

import pytest
from ragged_batches import make_batch

from objectives import Objective, ObjectiveError, evaluate_term
from objectives.event_loop import TermLoop, wait_for


async def loop_thread() -> threading.Thread:
    await asyncio.sleep(0)
    return threading.current_thread()


def test_calls_of_one_loop_share_its_thread_until_it_is_closed():
    loop = TermLoop()
    first, second = (loop.call(wait_for, loop_thread(), None) for _ in range(2))
    assert first is second
    assert first.is_alive()
    loop.close()
    assert not first.is_alive()
    third = loop.wait_for(loop_thread(), None)  # a closed loop can be used again
    loop.close()
    assert third is not first
    assert not third.is_alive()


def test_a_call_outside_a_runner_leaves_no_thread():
    assert not wait_for(loop_thread(), None).is_alive()


def test_close_cancels_what_is_awaited():
    loop, started, cancelled = TermLoop(), threading.Event(), threading.Event()

    async def forever() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(loop.wait_for, forever(), None)
        assert started.wait(60)
        loop.close()
        with pytest.raises(CancelledError):
            waiting.result(60)
    assert cancelled.is_set()


def test_an_objective_ends_the_loop_of_its_terms():
    threads = []

    async def thread_loss(data, logprobs):
        threads.append(await loop_thread())
        return sum(logprobs_T.sum() for logprobs_T in logprobs), {}

    batch, outputs = make_batch([2])
    batch = replace(batch, datums=("a datum",))
    with Objective(regularizers=[{"fn": thread_loss}]) as objective:
        (term,) = objective.regularizers
        for _ in range(2):
            objective.runner.evaluate(term, outputs, batch, first_step=True)
        assert threads[0] is threads[1]
        assert threads[0].is_alive()
    assert not threads[0].is_alive()
    evaluate_term(term, outputs, batch, first_step=True)
    assert not threads[2].is_alive()


def test_two_objectives_do_not_share_a_loop():
    objectives = [Objective(), Objective()]
    threads = [objective.runner._loop.wait_for(loop_thread(), None) for objective in objectives]
    objectives[0].runner.close()
    assert [thread.is_alive() for thread in threads] == [False, True]
    objectives[1].runner.close()


def test_an_exit_leaves_the_loop_running():
    async def leave() -> None:
        sys.exit(3)

    loop = TermLoop()
    thread = loop.wait_for(loop_thread(), None)
    with pytest.raises(ObjectiveError, match=r"^it called sys\.exit\(3\)$"):
        loop.wait_for(leave(), 5)
    assert loop.wait_for(loop_thread(), None) is thread
    loop.close()


def test_a_blocked_loop_ends_when_it_is_no_longer_blocked():
    loop, release = TermLoop(), threading.Event()
    blocked: list[threading.Thread] = []

    async def block() -> None:
        blocked.append(threading.current_thread())
        release.wait(60)

    with pytest.raises(ObjectiveError, match="blocks the event loop"):
        loop.wait_for(block(), 0.01)
    other = loop.wait_for(loop_thread(), None)
    assert other is not blocked[0]
    release.set()
    blocked[0].join(60)
    assert not blocked[0].is_alive()
    loop.close()
    assert not other.is_alive()
