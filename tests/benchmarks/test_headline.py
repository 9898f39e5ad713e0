"""Parts of the headline benchmark: data, measures and the choice of settings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from benchmarks import headline
from benchmarks.headline import ARMS, SEEDS, choose, draw, interval, read, terms, validity
from objectives.batch import Batch, Outputs
from objectives.objective import Objective
from objectives.terms.text.logic import check_annotations


def violated(text: str) -> int:
    batch = Batch(torch.zeros(1).long(), torch.ones(1), torch.tensor([0, 1]), texts_D=(text,))
    return check_annotations(batch)[0].violated


@pytest.mark.parametrize("split", ["train", "explore", "confirm"])
def test_the_solver_finds_one_false_annotation_in_every_copy(split: str) -> None:
    """The check of the samples, which is independent of Z3, agrees on every annotation."""
    for problem in read(split):
        assert (violated(problem.right), violated(problem.wrong)) == (0, 1)
        for text, num_false in ((problem.right, 0), (problem.wrong, 1)):
            verdicts = [headline._holds(*sides) for sides in headline._ANNOTATION.findall(text)]
            assert verdicts.count(False) == num_false, text


def test_splits_share_no_problem() -> None:
    questions = [{problem.question for problem in read(split)} for split in ("train", "explore", "confirm")]
    assert not questions[0] & questions[1] | questions[0] & questions[2] | questions[1] & questions[2]


def test_every_arm_is_a_valid_objective_and_differs_by_its_terms_alone() -> None:
    configs = []
    for arm, settings in ARMS.items():
        for setting in settings or [{"weight": 5.0}]:
            Objective(regularizers=terms(arm, setting))
            config = headline.config(arm, setting, 1, "explore", Path("runs"))
            configs.append(config.model_dump(exclude={"run_name", "objective", "candidates"}))
    assert all(config == configs[0] for config in configs)


def test_shuffled_scores_are_those_of_the_solver_in_another_order() -> None:
    problems = read("explore")[:8]
    texts = tuple(text for problem in problems for text in (problem.right, problem.wrong))
    batch = Batch(torch.zeros(16).long(), torch.ones(16), torch.arange(17), texts_D=texts)
    batch = Batch(batch.target_tokens_DT, batch.weights_DT, batch.offsets_D, texts, check_annotations(batch))
    outputs = Outputs(torch.full((16,), -1.0))
    scores = torch.tensor([1 / features.checked if features.violated else 0.0 for features in batch.features])
    shuffled = headline.shuffled_logic.evaluate(outputs, batch)
    assert isinstance(shuffled, torch.Tensor)
    assert sorted(shuffled.tolist()) == pytest.approx(sorted(scores.tolist()))
    assert shuffled.tolist() != pytest.approx(scores.tolist())


def line(arm: str, setting: dict[str, Any], seed: int = 100, split: str = "explore", **figures: Any) -> dict[str, Any]:
    defaults = {"margins": [1.0, -1.0], "nll": 1.0, "annotations": [2, 0, 1, 1], "true_annotations": [1, 0, 1, 0]}
    return {"arm": arm, "setting": setting, "seed": seed, "split": split, "curve": {"0": 0.5}} | defaults | figures


def test_a_setting_that_costs_too_much_likelihood_is_not_chosen() -> None:
    weak, strong = ARMS["data"]
    lines = [
        line("cross-entropy", {}),
        line("data", dict(weak), margins=[2.0, 1.0]),
        line("data", dict(strong), margins=[9.0, 9.0], nll=1.2),
    ]
    assert choose(lines, "data") == choose(lines, "shuffled") == weak
    lines[-1]["nll"] = 1.05
    assert choose(lines, "data") == strong


def test_intervals() -> None:
    values = [0.1, 0.5, 0.3, 0.9]
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    shown = interval(values)
    assert (shown.low, shown.high) == pytest.approx((expected.low, expected.high))
    # Two samples for each of two problems: 1 of 2 and 1 of 2 annotations are true, in any resample.
    shares = validity([line("data", {})])
    assert (shares.mean, shares.low, shares.high) == (0.5, 0.5, 0.5)


def test_the_picture_shows_every_arm(tmp_path: Path) -> None:
    generator = random.Random(0)
    lines = [
        line(arm, {}, seed, "confirm", margins=[generator.gauss(1, 1) for _ in range(4)])
        for arm in ARMS
        for seed in SEEDS
    ]
    draw(lines, tmp_path / "headline.png")
    with Image.open(tmp_path / "headline.png") as image:
        assert np.asarray(image).std() > 0
        assert image.size == (1100, 374)
