"""Importable terms that fail in every way that a user's term can, and some that work."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import torch

from objectives.term import regularizer

RELEASE = threading.Event()


@regularizer("test_where", "monitor")
def where(outputs, batch):
    return {
        "pid": os.getpid(),
        "thread": threading.get_ident() % 2**31,
        "threads": torch.get_num_threads(),
        "datums": float(batch.datums is not None),
    }


@regularizer("test_meets", "monitor")
def meets(outputs, batch, *, folder: str, number: int = 0):
    """Wait until another call has started, too."""
    (Path(folder) / str(number)).touch()
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.01)
    return {"pid": os.getpid()}


@regularizer("test_surprise")
def surprise(outputs, batch, *, power: int = 2):
    return outputs.logprobs_DT**power, {"pid": os.getpid()}


def count_and_ask(batch, *, slow_s: float = 0.0):
    time.sleep(slow_s)
    return {"lengths": batch.offsets_D.diff().float(), "pid": os.getpid()}


@regularizer("test_lengths", "scored", prepare=count_and_ask)
def lengths(outputs, batch):
    assert os.getpid() != batch.features["pid"] or outputs.logprobs_DT.requires_grad
    return batch.features["lengths"], {"prepared_by": batch.features["pid"]}


@regularizer("test_hangs")
def hangs(outputs, batch, *, slow_s: float = 0.0):
    if slow_s:
        time.sleep(slow_s)
    else:
        RELEASE.wait(60)
    return outputs.logprobs_DT


@regularizer("test_dies")
def dies(outputs, batch):
    sys.stdout.flush()
    os._exit(7)


@regularizer("test_keeps_to_itself", "scored", prepare=lambda batch: lambda: None)
def keeps_to_itself(outputs, batch):
    return torch.ones(batch.num_datums)


@regularizer("test_meddles")
def meddles(outputs, batch, *, field: str):
    record = batch if hasattr(batch, field) else outputs
    with torch.no_grad():
        getattr(record, field).zero_()
    return outputs.logprobs_DT * 2


@regularizer("test_clashes")
def clashes(outputs, batch, *, metric: str):
    return outputs.logprobs_DT, {metric: 1.0}


async def look_up(batch):
    await asyncio.sleep(0.01)
    return len(batch.texts_D)


@regularizer("test_awaited", prepare=look_up)
async def awaited(outputs, batch, *, slow_s: float = 0.0, blocking: bool = False):
    await asyncio.sleep(slow_s)
    if blocking:
        RELEASE.wait(60)
    return outputs.logprobs_DT * batch.features, {"thread": threading.get_ident() % 2**31}
