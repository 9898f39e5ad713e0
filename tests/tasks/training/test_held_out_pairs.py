"""Pairing of held-out batches by their content."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from blocks.files.local_directory import LocalDirectory
from objectives.batch import Batch, pack
from tasks.training.held_out import HELD_OUT_NAME, BatchValues, append_batch_values, digest_batches, read_batch_values


def batch_of(*datums: list[int], sampled: bool = False) -> Batch:
    """Batch whose datums have a prompt of two tokens."""
    targets_DT, offsets_D = pack([torch.tensor(datum) for datum in datums])
    weights_DT, _ = pack([torch.tensor([0.0, 0.0] + [1.0] * (len(datum) - 2)) for datum in datums])
    return Batch(targets_DT, weights_DT, offsets_D, sampling_logprobs_DT=-weights_DT if sampled else None)


def values_of(*batches: Batch) -> BatchValues:
    return BatchValues([1.0] * len(batches), [batch.num_datums for batch in batches], digest_batches(batches))


def test_batches_of_the_same_size_are_paired_by_content() -> None:
    first, second, other = batch_of([1, 2, 3], [4, 5, 6]), batch_of([1, 2, 7], [4, 5, 6]), batch_of([1, 2, 3], [4, 5])
    assert values_of(first, second).is_paired_with(values_of(first, second))
    for pair in ((second, first), (first, first), (first, other), (first,)):
        assert not values_of(first, second).is_paired_with(values_of(*pair))
    weighted = replace(first, weights_DT=first.weights_DT * 2)
    assert not values_of(first).is_paired_with(values_of(weighted))
    assert not values_of(first).is_paired_with(None)


def test_sampled_batches_are_paired_by_their_prompts() -> None:
    before, after = batch_of([1, 2, 3], [4, 5, 6], sampled=True), batch_of([1, 2, 8, 9], [4, 5, 7], sampled=True)
    elsewhere = batch_of([1, 3, 8, 9], [4, 5, 7], sampled=True)
    assert values_of(before).is_paired_with(values_of(after))
    assert not values_of(before).is_paired_with(values_of(elsewhere))


def test_values_without_a_digest_are_paired_by_size(tmp_path: Path) -> None:
    """As in files that were written before digests."""
    values = values_of(batch_of([1, 2, 3]))
    older = BatchValues([2.0], [1])
    assert values.is_paired_with(older)
    assert older.is_paired_with(values)
    assert not older.is_paired_with(BatchValues([2.0], [2]))
    directory = LocalDirectory(tmp_path)
    directory.append_line(HELD_OUT_NAME, '{"step": 0, "terms": {"a": {"values_B": [2.0], "num_datums_B": [1]}}}')
    scores = BatchValues([0.0, 1.0], [1, 1], "problems")
    append_batch_values(directory, 4, {"a": values}, {"test/exact_match": scores})
    append_batch_values(directory, 8, {}, {})
    assert read_batch_values(directory) == {0: {"a": older}, 4: {"a": values, "test/exact_match": scores}}
    assert len((tmp_path / HELD_OUT_NAME).read_text().splitlines()) == 2, "an evaluation without terms is not stored"
    assert len(asdict(values)["digest"]) == 16


def test_error_is_the_jackknife_of_independent_samples() -> None:
    """The error is that of the values without one sample each, which two of five values are."""
    values, sizes, groups = [1.0, 4.0, 2.0, 8.0, 3.0], [3.0, 1.0, 2.5, 0.5, 6.0], [0, 1, 2, 2, 3]
    left_out = [
        np.average(
            [value for value, group in zip(values, groups, strict=True) if group != sample],
            weights=[size for size, group in zip(sizes, groups, strict=True) if group != sample],
        )
        for sample in range(4)
    ]
    mean, error = BatchValues(values, sizes, groups_B=groups).mean()
    assert mean == pytest.approx(np.average(values, weights=sizes))
    assert error == pytest.approx(np.sqrt(3 / 4 * np.sum((np.array(left_out) - mean) ** 2)))


def test_mean_of_equal_values_ignores_those_without_weight() -> None:
    assert BatchValues([0.0, 2.0, 2.0], [0, 1, 1]).mean() == (2.0, 0.0)
