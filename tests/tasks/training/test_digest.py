"""Digest of a batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from objectives.batch import Batch
from tasks.common.digests import digest_batch


def test_equal_batches_have_equal_digests_and_any_change_shows() -> None:
    def batch(weight: float = 1.0, target: int = 3, end: int = 2) -> Batch:
        return Batch(torch.tensor([1, 2, target]), torch.tensor([0.0, weight, 1.0]), torch.tensor([0, end, 3]))

    assert digest_batch(batch()) == digest_batch(replace(batch()))
    changed = {digest_batch(other) for other in (batch(), batch(0.5), batch(target=4), batch(end=1))}
    assert len(changed) == 4
