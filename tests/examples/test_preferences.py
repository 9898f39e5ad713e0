"""Example preference pairs: the stored files and their balance."""

from __future__ import annotations

import json

import pytest

from examples.preferences import DATA, comparisons


def test_stored_files_equal_the_output_of_the_script():
    rows = comparisons()
    parts = {"train": rows[:256], "test": rows[256:]}
    for name, part in parts.items():
        assert [json.loads(line) for line in (DATA / f"preferences_{name}.jsonl").read_text().splitlines()] == part
    train_prompts, test_prompts = (
        {row["comparison"]["prompt_conversation"][0]["content"] for row in part} for part in parts.values()
    )
    assert not train_prompts & test_prompts


def test_position_and_length_do_not_reveal_the_chosen_completion():
    rows = comparisons()
    assert 0.4 < sum(row["label"] == "A" for row in rows) / len(rows) < 0.6
    lengths = [
        [
            len(row["comparison"][f"completion_{letter}"][0]["content"])
            for letter in (row["label"], "BA"["AB".index(row["label"])])
        ]
        for row in rows
    ]
    mean_chosen, mean_rejected = (sum(column) / len(rows) for column in zip(*lengths, strict=True))
    assert mean_chosen == pytest.approx(mean_rejected, abs=2)
