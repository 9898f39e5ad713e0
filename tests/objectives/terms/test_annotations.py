from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import SOLUTIONS, make_batch

from objectives.errors import ObjectiveError
from objectives.terms.text.annotations import MAX_CHARS, MAX_STEPS, evaluate_program, read_solution
from objectives.terms.text.extractors import extract

NUMBERS = st.sampled_from(["0", "1", "7", "12", ".5", "2.", "3.25", "100"])
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " + ", " / ", "*-"]), inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
    ),
    max_leaves=12,
).filter(lambda source: len(source) <= MAX_CHARS)


def values(annotation: str) -> tuple[Fraction | None, Fraction | None] | None:
    solution = read_solution(f"<<{annotation}>>")
    if solution.num_unparsable:
        return None
    (step,) = solution.steps
    return evaluate_program(step.left), evaluate_program(step.right)


@pytest.mark.parametrize(
    ("annotation", "left", "right"),
    [
        ("48/2=24", 24, 24),
        ("5*.5=2.5", "5/2", "5/2"),
        ("18*.5=9.00", 9, 9),
        ("20%*50=10", 10, 10),
        ("1/4=25%", "1/4", "1/4"),
        ("20%(50)=10", 10, 10),
        ("20 % x 5=1", 1, 1),
        ("$1,200.50+$.50=$1,201", 1201, 1201),
        ("1,000,000/10=100,000", 100_000, 100_000),
        ("5x4=20", 20, 20),
        ("5 X (1+3) = 20", 20, 20),
        ("5×4=20", 20, 20),
        ("20÷5=4", 4, 4),
        ("3−5=−2", -2, -2),
        ("(2+3)(4)=20", 20, 20),
        ("2(3+4)=14", 14, 14),
        ("-(2+3)+-1=-6", -6, -6),
        ("+3=3", 3, 3),
        ("3^2=9", 9, 9),
        ("1\n+1=2", 2, 2),
        ("1.5**2=2.25", "9/4", "9/4"),
        ("007+01=8", 8, 8),
        ("0x10=16", 0, 16),
        ("0.1+0.2=0.3", "3/10", "3/10"),
        ("1/2=3/6", "1/2", "1/2"),
        ("5/0=7", None, 7),
        ("5/(3-3)=7", None, 7),
        ("2*x=10", None, 10),
        ("2x+3y-x/4=10", None, 10),
    ],
)
def test_readable_annotations(annotation, left, right):
    assert values(annotation) == tuple(value if value is None else Fraction(value) for value in (left, right))


@pytest.mark.parametrize(
    ("right", "tolerance"),
    [
        *((f"{sign}24", "1/2") for sign in ("", "+", "-", "−", "–", "$", "€", "£", "-$")),
        *((f"{sign}5.25", "1/200") for sign in ("", "$", "£")),
        ("5.5€", "1/20"),
        ("1,200", "1/2"),
        ("25%", "1/200"),
        ("3/4", 0),
        ("(5.5)", 0),
    ],
)
def test_a_stated_number_may_be_rounded(right, tolerance):
    (step,) = read_solution(f"<<1+1={right}>>").steps
    assert step.tolerance == Fraction(tolerance)


@pytest.mark.parametrize(
    "annotation",
    [
        "",
        "=",
        "5",
        "5=",
        "=5",
        "1=1=1",
        "5 apples=5",
        "5a=5",
        "10/3=3 1/3",
        "5.(3=1",
        "5+.=1",
        ". 5=5",
        "5)=5",
        "()=5",
        "*5=5",
        "5+=5",
        "x*y=4",
        "4/x=2",
        "x**2=4",
        "2**x=4",
        "2**2**2=16",
        "9**9**9**9=1",
        "(9**9)**9=1",
        "2**10=1024",
        "2**0=1",
        "2**-1=.5",
        "7//2=3",
        "7%2=1",
        "1e5=100000",
        "1_000=1000",
        "1.2.3=4",
        "1==1",
        "(1=1)",
        "[1]=1",
        "f(1)=1",
        "a.b=1",
        "1 if 1 else 1=1",
        "lambda:1=1",
        "__import__('os')=1",
        "'a'*9=1",
        "True=1",
        "...=1",
        "1;2=3",
        "1\x00=1",
        "١+١=2",
        "²=2",
        "(" * 90 + "1" + ")" * 90 + "=1",
        "-" * 200 + "1=1",
        "1+" * 80 + "1=81",
        "9" * 5000 + "=1",
    ],
)
def test_other_annotations_are_counted_as_unparsable(annotation):
    assert values(annotation) is None


@given(st.text(st.sampled_from("0123456789.+-*/()=<>#$%,x^ \n−×a'\"_[]{}:;!\\\x00٣²"), max_size=400))
def test_hostile_text_never_raises(text):
    for wrapped in (text, f"<<{text}>>", f"<<1+{text}={text}>>", f"#### {text}"):
        solution = read_solution(wrapped)
        for step in solution.steps:
            evaluate_program(step.left)
            evaluate_program(step.right)


@given(st.text(max_size=200))
def test_any_text_never_raises(text):
    read_solution(f"<<{text}={text}>> #### {text}")


@pytest.mark.parametrize(
    "text",
    [
        "<<" * 50_000,
        "<<1" * 50_000,
        "####" * 50_000,
        "#### " + "," * 100_000,
        "#### " + "1" * 100_000 + "-1",
        "#### " + "-" * 100_000,
        "<<1=" + "1" * 10**6 + ">>",
        "<<=>>" * 50_000,
    ],
)
def test_long_hostile_text_takes_linear_time(text):
    assert not read_solution(text).steps


def test_annotations_beyond_the_limit_are_counted_as_unparsable():
    solution = read_solution("<<1=1>>" * (MAX_STEPS + 5))
    assert (len(solution.steps), solution.num_unparsable) == (MAX_STEPS, 5)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 72", 72),
        ("#### 72<|im_end|>", 72),
        ("####72.", 72),
        ("#### $1,000.50 in all", "2001/2"),
        ("#### -7", -7),
        ("#### 1\n#### 2", 2),
        ("#### none", None),
        ("#### 3/4 of it", "3/4"),
        ("#### 20%", "1/5"),
        ("#### 12-2", None),
        ("#### 10 - 12 hours", None),
        ("#### 1/2/3", None),
        ("#### 1,000/3,000", "1/3"),
        ("#### 20%-30%", None),
        ("#### $5-$10", None),
        ("#### 5--6", None),
        ("#### 5 #### 6", 6),
        ("72", None),
    ],
)
def test_the_answer_is_the_number_after_the_last_marker(text, answer):
    assert read_solution(text).answer == (None if answer is None else Fraction(answer))


def test_every_annotation_of_real_solutions_is_parsed():
    solutions = [read_solution(text) for text in SOLUTIONS]
    assert sum(solution.num_unparsable for solution in solutions) == 0
    assert sum(len(solution.steps) for solution in solutions) > 3 * 0.9 * len(SOLUTIONS)
    assert all(solution.answer is not None for solution in solutions)


def test_a_batch_without_texts_raises():
    batch, _ = make_batch([1, 1], texts=["a"])
    with pytest.raises(ObjectiveError, match="2 datums but 1 texts"):
        extract(batch, "gsm8k")


@given(EXPRESSIONS)
def test_expressions_evaluate_as_in_python(source):
    """Reference: Python's `eval` on text of numbers and operators only."""
    exact = re.sub(r"[0-9]+\.?[0-9]*|\.[0-9]+", lambda number: f"Fraction('{number[0]}')", source)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        expected = None
    assert values(f"{source}=0") == (expected, 0)


def test_parsing_is_thread_safe():
    expected = [read_solution(text) for text in SOLUTIONS]
    with ThreadPoolExecutor(4) as pool:
        assert all(
            solutions == expected for solutions in pool.map(lambda _: [read_solution(t) for t in SOLUTIONS], range(8))
        )
