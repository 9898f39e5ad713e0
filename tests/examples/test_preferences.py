"""The example of preferences: its data is what its script writes."""

from __future__ import annotations

import json

import pytest

from examples.preferences import DATA, comparisons


def test_the_files_are_what_the_script_writes():
    rows = comparisons()
    parts = {"train": rows[:256], "test": rows[256:]}
    for name, part in parts.items():
        assert [json.loads(line) for line in (DATA / f"preferences_{name}.jsonl").read_text().splitlines()] == part
    asked, held_out = (
        {each["comparison"]["prompt_conversation"][0]["content"] for each in part} for part in parts.values()
    )
    assert not asked & held_out


def test_neither_place_nor_length_says_which_answer_is_the_better_one():
    rows = comparisons()
    assert 0.4 < sum(row["label"] == "A" for row in rows) / len(rows) < 0.6
    lengths = [
        [
            len(row["comparison"][f"completion_{each}"][0]["content"])
            for each in (row["label"], "BA"["AB".index(row["label"])])
        ]
        for row in rows
    ]
    mean_chosen, mean_rejected = (sum(each) / len(rows) for each in zip(*lengths, strict=True))
    assert mean_chosen == pytest.approx(mean_rejected, abs=2)
