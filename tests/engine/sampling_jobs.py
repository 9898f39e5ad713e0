"""Short sampling jobs on the tiny model."""

from __future__ import annotations

import random
from typing import Any

import torch

from engine.sampling.batch import Batch
from engine.sampling.job import SampleJob
from engine.sampling.request import Row

VOCAB = 264


def make_job(seed: int, length: int = 5, max_tokens: int = 12, **changes: Any) -> SampleJob:
    """Make a job with a prompt of random bytes; by default one completion without limits and stops."""
    fields: dict[str, Any] = {
        "num_samples": 1,
        "temperature": 1.0,
        "top_k": VOCAB,
        "top_p": 1.0,
        "stop_tokens": frozenset(),
        "stop_strings": (),
        "seed": seed,
    }
    prompt_T = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))
    return SampleJob(prompt_T=prompt_T, max_tokens=max_tokens, **{**fields, **changes})


def finish_in_random_order(batch: Batch, waiting: list[Row], chance: random.Random) -> None:
    """Generate all rows to their ends; rows join in random order, and some are removed and join again."""
    chance.shuffle(waiting)
    while waiting or batch.rows:
        count = chance.randint(0, 5)
        if waiting[:count]:
            batch.add(waiting[:count])
        del waiting[:count]
        if batch.rows and chance.random() < 0.1:  # as if memory were short
            row = chance.choice(batch.rows)
            batch.remove(lambda other: other is row)  # noqa: B023 - called at once
            waiting.append(row)
        if batch.rows:
            batch.step()
