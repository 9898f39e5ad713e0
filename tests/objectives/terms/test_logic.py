from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import SOLUTIONS, make_batch
from test_evaluate import bind

from objectives import Batch, ObjectiveError, prepare_features
from objectives.terms.text.annotations import MAX_STEPS, evaluate_program, read_solution
from objectives.terms.text.extractors import extractor
from objectives.terms.text.logic import CheckCounts, check_annotations, logic
from objectives.terms.text.topology import betti_numbers


def batch_of(texts: list[str]) -> Batch:
    return make_batch([1] * len(texts), texts=texts)[0]


def verdict(text: str) -> CheckCounts:
    return check_annotations(batch_of([text]))[0]


@pytest.mark.parametrize(
    ("annotation", "holds"),
    [
        ("2+2=4", True),
        ("2+2=5", False),
        ("18*.5=9.00", True),
        ("18*.5=9.01", False),
        ("10/3=3", True),
        ("10/3=3.3", True),
        ("10/3=3.33", True),
        ("10/3=3.4", False),
        ("10/3=3.34", False),
        ("2/3=.67", True),
        ("2/3=.66", False),
        ("5/2=2", True),
        ("5/2=3", True),
        ("1/3=33%", True),
        ("1/3=34%", False),
        ("1/3=2/6", True),
        ("1/3=3333/10000", False),
        ("5/0=7", False),
        ("0/0=0", False),
        ("7=5/0", False),
        ("9**9=387420489", True),
    ],
)
def test_an_annotation_holds_up_to_rounding(annotation, holds):
    cores = () if holds else (1,)  # a wrong calculation is a core of its own
    assert verdict(f"<<{annotation}>>") == CheckCounts(int(not holds), int(holds), 0, 0, cores)


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("<<2*x=10>> <<x+1=6>>", ()),
        ("<<2*x=10>> <<x+1=7>>", (2,)),
        ("<<2*x=10>> <<x+1=7>> <<x-1=4>> <<x=9>>", (2, 2)),
        ("<<x+y=10>> <<x-y=4>> <<2*x=14>>", ()),
        ("<<x+y=10>> <<x-y=4>> <<2*x=20>>", (3,)),
        ("<<z=1>> <<x+y=10>> <<1+1=2>> <<x-y=4>> <<2*x=20>> <<1+1=3>>", (3, 1)),
    ],
)
def test_unknowns_are_shared_within_a_text(text, cores):
    """A core contains only the contradicting annotations."""
    assert (verdict(text).violated, verdict(text).core_sizes) == (len(cores), cores)


def test_unknowns_are_separate_between_texts():
    assert [counts.violated for counts in check_annotations(batch_of(["<<x=1>>", "<<x=5>>"]))] == [0, 0]


NUMBERS = st.integers(-99, 99) | st.decimals(0, 99, places=2)


@given(NUMBERS, st.sampled_from("+-*/"), NUMBERS, NUMBERS)
def test_z3_agrees_with_exact_arithmetic(a, operator_, b, result):
    """Reference: fractions instead of a solver."""
    text = f"<<({a}){operator_}({b})={result}>>"
    (step,) = read_solution(text).steps
    left, right = evaluate_program(step.left), evaluate_program(step.right)
    assert right is not None
    holds = left is not None and abs(left - right) <= step.tolerance
    assert verdict(text).violated == int(not holds)


def test_scores_and_metrics():
    batch, outputs = make_batch([1] * 3, texts=["<<1+1=2>> <<1+1=3>> <<1+?=2>>", "no annotation", "<<1=2>>"])
    batch = replace(batch, features=check_annotations(batch))
    scores_D, metrics = logic(outputs, batch)
    assert scores_D.tolist() == [0.5, 0.0, 1.0]
    assert logic(outputs, batch, unchecked=0.75)[0].tolist() == [0.5, 0.75, 1.0]
    assert metrics == {
        "checked": 3,
        "violated": 2,
        "undecided": 0,
        "unparsable": 1,
        "unstated": 0,
        "unchecked": 1,
        "core_mean": 1.0,
        "core_max": 1,
    }


def test_real_solutions_hold_and_corrupted_ones_do_not():
    texts = list(SOLUTIONS[:60])
    assert all(
        counts.violated == counts.undecided == counts.unparsable == 0 for counts in check_annotations(batch_of(texts))
    )
    actual = [counts.violated for counts in check_annotations(batch_of([spoil(text) for text in texts]))]
    assert actual == [int("<<" in text) for text in texts]


def spoil(text: str) -> str:
    """Insert a 9 before the result of the first annotation."""
    before, mark, after = text.partition("<<")
    return before + mark + after.replace("=", "=9", 1)


def test_large_systems_are_decided_independently_of_earlier_texts():
    rows = [f"{(7 * i**9) % 89**9}x+{(i**11) % 97**9}y-{i}/{i + 1}z={i**7}" for i in range(1, MAX_STEPS + 1)]
    system = "".join(f"<<{row}>>" for row in rows)
    first, _, again = check_annotations(batch_of([system, "<<x=1>>", system]))
    assert first == again == CheckCounts(MAX_STEPS - 3, 3, 0, 0, core_sizes=(4,) * (MAX_STEPS - 3))


def test_annotations_beyond_the_solver_limit_are_undecided(monkeypatch):
    monkeypatch.setattr("objectives.terms.text.logic.MAX_SOLVER_STEPS", 60)
    text = "<<1+1=2>> <<3x+7y-z=4>> <<x+y-5z=1>> <<1+1=3>>"
    assert verdict(text) == CheckCounts(violated=0, held=1, undecided=3, unparsable=0)


def test_a_registered_extractor_is_selected_by_name():
    @extractor("test_lines")
    def read_lines(text):
        return read_solution("".join(f"<<{line}>>" for line in text.splitlines()))

    batch, outputs = make_batch([1, 1], texts=["x=2\nx+1=7", "1+1=2"])
    bound = bind("logic", params={"extractor": "test_lines"})
    batch = replace(batch, features=prepare_features(bound, batch))
    assert bound.term(outputs, batch)[0].tolist() == [0.5, 0.0]
    assert betti_numbers(batch, extractor="test_lines")[0].steps == 2
    with pytest.raises(
        ObjectiveError,
        match=r"'extractor' is 'latex', but value error, no extractor is registered as 'latex', only .*gsm8k",
    ):
        bind("topology", params={"extractor": "latex"})
    with pytest.raises(
        ObjectiveError, match=r"'gsm8k' of .* is already registered by objectives\.terms\.text\.annotations"
    ):
        extractor("gsm8k")(read_lines)


def test_checks_are_thread_safe():
    batch = batch_of(list(SOLUTIONS[:20]))
    expected = check_annotations(batch)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(check_annotations, [batch] * 8)) == [expected] * 8
