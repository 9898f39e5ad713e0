"""Example that compares training with and without terms: its data, and a short run on the tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from examples.gsm8k import DATA, read_problems
from examples.margins import MARGIN, NLL, draw, history, short_problems, show, train_both
from objectives.batch import Batch
from objectives.terms.text.annotations import read_solution
from objectives.terms.text.logic import check_annotations
from objectives.terms.text.topology import compute_shape


def test_terms_detect_all_wrong_solutions_and_no_right_ones():
    problems = short_problems()
    assert len(problems) > 30
    assert len({row["question"] for row in problems}) == len(problems)
    originals = {row["answer"] for row in read_problems(DATA / "gsm8k_train.jsonl")}
    for row in problems:
        assert row["answer"] in originals
        right, wrong = (_faults(row[solution]) for solution in ("answer", "wrong"))
        assert right == 0 < wrong, row


def _faults(text: str) -> int:
    batch = Batch(torch.zeros(1).long(), torch.ones(1), torch.tensor([0, 1]), texts_D=(text,))
    (verdict,) = check_annotations(batch)
    return verdict.violated + max(0, compute_shape(read_solution(text)).components - 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_margins_run_on_the_tiny_model(tmp_path: Path, prefect_server, engine_url, capsys):
    overrides = [
        "model=tiny",
        "lora_rank=4",
        f"base_url={engine_url}",
        f"storage={tmp_path}",
        f"tracking=sqlite:///{tmp_path / 'mlflow.db'}",
        "num_steps=4",
        "eval_every=2",
        "checkpoint_every=2",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", "tml-test")
        results = train_both(overrides)
    assert [result.run_name for result in results.values()] == ["margins-with-the-terms", "margins-without"]
    margins_with_terms, margins_without_terms = (history(result, MARGIN) for result in results.values())
    assert list(margins_with_terms) == list(margins_without_terms) == [0, 2, 4]
    assert margins_with_terms[0] == margins_without_terms[0]
    assert margins_with_terms[4] != margins_without_terms[4]
    assert all(value > 0 for result in results.values() for value in history(result, NLL).values())
    with_terms, without = results.values()
    assert "term/logic/value" in with_terms.metrics
    assert "term/logic/value" not in without.metrics
    show(results)
    assert f"{margins_with_terms[4]:8.3f} nats" in capsys.readouterr().out
    draw(results, tmp_path / "margins.png")
    with Image.open(tmp_path / "margins.png") as image:
        assert image.size == (880, 330)
