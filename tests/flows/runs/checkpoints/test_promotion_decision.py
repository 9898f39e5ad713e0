"""Decision to promote a checkpoint with a confidence."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from flows.runs.checkpoints import promotion
from flows.runs.checkpoints.promotion import Measurement, describe_difference, find_rejection
from tasks.training.held_out import BatchValues


def measurement(right: int, problems: str = "a", num: int = 8) -> Measurement:
    return Measurement(right / num, BatchValues([1.0] * right + [0.0] * (num - right), [1] * num, problems))


def measurement_of(scores: np.ndarray) -> Measurement:
    return Measurement(float(scores.mean()), BatchValues(scores.tolist(), [1] * len(scores), "a"))


@pytest.mark.parametrize(
    ("condition", "checkpoint", "baseline", "rejection"),
    [
        ("test/m > baseline", measurement(5), measurement(0), ""),
        ("test/m < baseline", measurement(0), measurement(5), ""),
        ("test/m > baseline", measurement(0), measurement(5), "test/m is 0, but promote_if requires > 0.625"),
        ("test/m > baseline", measurement(4), measurement(0), "by 0.5 on 8 problems, which happens by chance"),
        ("test/m > baseline", measurement(5, "b"), measurement(0), "were measured on different problems"),
        ("test/m > baseline", Measurement(0.5, None), measurement(0), "test/m has no score for each problem"),
        ("test/m > baseline", Measurement(None, None), measurement(0), "the metric was not measured"),
        (None, measurement(0), measurement(5), ""),
    ],
)
def test_rejection(condition: str | None, checkpoint: Measurement, baseline: Measurement, rejection: str) -> None:
    """Of 8 problems, 5 better answers are significant at 5 % (1 / 32), and 4 are not (1 / 16)."""
    reason = find_rejection(condition, 0.95, checkpoint, baseline)
    assert rejection in reason
    assert bool(reason) == bool(rejection)


def test_advice_follows_from_the_confidence_and_the_number_of_checkpoints() -> None:
    """2 ** -8 is less than 5 %, but neither less than 0.1 % nor less than 5 % / 20."""

    def advice(confidence: float, num_candidates: int = 1) -> str:
        better, equal = measurement(4), measurement(0)
        return find_rejection("test/m > baseline", confidence, better, equal, num_candidates).rpartition(": ")[2]

    assert "use more problems; with these, a true difference of 0." in advice(0.95)
    assert advice(0.999) == "no result on 8 problems can meet it; use at least 10 problems"
    assert advice(0.95, 20) == "no result on 8 problems can meet it; use at least 9 problems"
    effects = [float(advice(0.95, num).split("difference of ")[1].split(" is")[0]) for num in (1, 5)]
    assert effects[0] < effects[1]


def test_a_condition_without_a_confidence_states_the_uncertainty() -> None:
    better, equal = measurement(5), measurement(0)
    low, high = stats.ttest_1samp([1.0] * 5 + [0.0] * 3, 0).confidence_interval(0.95)
    text = describe_difference("test/m > 0.5", better, equal, 3)
    start = f"test/m of the checkpoint minus that of the baseline is 0.625 (95 % interval {low:.3g} to {high:.3g}; "
    assert text.startswith(f"{start}smallest detectable difference 0.")
    assert text.endswith(" with 8 problems). This ignores that keep_best chose among 3 checkpoints.")
    four = describe_difference("test/m > 0.5", measurement(2, num=4), measurement(0, num=4))
    assert "; no difference is detectable with 4 problems)." in four
    unscored = describe_difference("test/m < baseline", Measurement(1.5, None), Measurement(2.0, None))
    assert unscored.endswith("is -0.5, without an interval, because the two have no scores of the same problems.")
    assert describe_difference("test/m > 0.5", better, Measurement(None, None)) == ""


def test_a_low_level_is_within_reach_of_the_random_sign_flips() -> None:
    """30 better answers to 30 problems at a level of 0.001 / 20."""
    best, equal = measurement(30, num=30), measurement(0, num=30)
    assert find_rejection("test/m > baseline", 0.999, best, equal, 20) == ""


def test_the_best_of_several_checkpoints_needs_more_evidence() -> None:
    assert find_rejection("test/m > baseline", 0.95, measurement(7), measurement(0), 5) == ""  # 5 / 128
    reason = find_rejection("test/m > baseline", 0.95, measurement(6), measurement(0), 5)  # 5 / 64
    assert "with a probability of 0.0781 (0.0156 times the 5 checkpoints that keep_best compared)" in reason


@pytest.mark.parametrize(
    ("num_candidates", "relation"),
    [(1, "independent"), (5, "independent"), (20, "independent"), (20, "related"), (20, "by_another_metric")],
)
def test_runs_that_learn_nothing_are_rarely_promoted(
    num_candidates: int, relation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 runs: at most 5 % promote the best of equal checkpoints, within the binomial bound of 0.1 %.

    The scores of a run's checkpoints are independent, or each checkpoint repeats most answers of the previous one, or
    the metric of `keep_best` is another one of the same answers.
    """
    # The decision alone: the advice to the user simulates the power of the test.
    monkeypatch.setattr(promotion, "_advice", lambda differences, level: "use more problems")
    generator, num_runs, num_problems, num_samples = np.random.default_rng(0), 500, 10, 4
    num_promoted = num_uncorrected = 0
    for _ in range(num_runs):
        rates = generator.beta(0.5, 0.5, num_problems)
        answers = generator.random((num_candidates + 1, num_problems, num_samples)) < rates[:, None]
        if relation == "related":
            for checkpoint in range(2, num_candidates + 1):
                is_repeated = generator.random(num_problems) < 0.8
                answers[checkpoint, is_repeated] = answers[checkpoint - 1, is_repeated]
        scores, solved = answers.mean(axis=2), answers.any(axis=2).mean(axis=1)
        selected_by = solved if relation == "by_another_metric" else scores.mean(axis=1)
        best = measurement_of(scores[1 + int(selected_by[1:].argmax())])
        gate = ("test/m > baseline", 0.95, best, measurement_of(scores[0]))
        if not find_rejection(*gate):
            num_uncorrected += 1
            num_promoted += not find_rejection(*gate, num_candidates)
    bound = stats.binom.ppf(0.999, num_runs, 0.05)
    assert num_promoted <= bound
    if (num_candidates, relation) == (20, "independent"):
        assert num_uncorrected > bound


def test_scores_of_groups_count_by_the_sizes_of_the_groups() -> None:
    better = Measurement(1.0, BatchValues([1.0] * 2 + [0.0], [3, 3, 1], "a"))
    baseline = Measurement(1 / 7, BatchValues([0.0] * 2 + [1.0], [3, 3, 1], "a"))
    reason = find_rejection("test/m > baseline", 0.95, better, baseline)
    assert f"by {5 / 7:.3g} on 3 problems" in reason
