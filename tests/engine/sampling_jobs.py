"""Short sampling jobs on the tiny model."""

from __future__ import annotations

from typing import Any

import torch

from engine.sampling.job import SampleJob

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
