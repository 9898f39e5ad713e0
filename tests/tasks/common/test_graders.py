"""Graders, on real problems with right and wrong answers."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from blocks.errors import ConfigError
from tasks.common.graders import find_code, pass_at, same_number, same_text
from tasks.common.jsonl import read_rows
from tasks.sandbox.code_tests import run_tests
from tasks.sandbox.runner import Limits

DATA = Path(__file__).parents[3] / "examples" / "data"
PROBLEMS = read_rows(str(DATA / "humaneval.jsonl"), ("prompt", "test", "entry_point"))


def test_same_number_accepts_gsm8k_solutions_and_rejects_other_numbers() -> None:
    rows = read_rows(str(DATA / "gsm8k_test.jsonl"), ("question", "answer"))
    answers = [row["answer"] for row in rows]
    finals = [answer.rpartition("#### ")[2].replace(",", "") for answer in answers]
    for answer, final in zip(answers, finals, strict=True):
        for text in (answer, f"So it is \\boxed{{{final}}}.", f"The answer is ${final}", f"I count {final}"):
            assert same_number(text, answer), text
        assert not same_number(f"#### {float(final) + 1}", answer)
        assert not same_number("I do not know.", answer)


def test_text_is_compared_without_case_and_space() -> None:
    assert same_text("Yes\n", "yes")
    assert not same_text("", "")
    assert not same_text("yes, no", "yes")


@pytest.mark.process
@pytest.mark.parametrize("row", PROBLEMS[:3], ids=lambda row: row["task_id"])
def test_correct_code_passes_and_wrong_code_fails(row: dict[str, str]) -> None:
    solution = row["canonical_solution"]
    whole = f"Here:\n```python\n{row['prompt']}{solution}```\nThat is all."
    assert run_tests(whole, row, Limits())[0]
    assert run_tests(solution, row, Limits())[0]
    for wrong in ("    return None\n", "    import os; os._exit(0)\n", "    raise SystemExit\n", "I cannot.", ""):
        assert not run_tests(wrong, row, Limits())[0], wrong
    endless, outcome = run_tests("    while True: pass\n", row, Limits(seconds=1.0))
    assert (endless, outcome.timed_out) == (False, True)


def test_code_is_found_in_its_fence() -> None:
    assert find_code("```py\na\n```\n```\nb\n```") == "a\n"
    assert find_code("```\nno end") == "no end"
    assert find_code("x = 1") == "x = 1"
    assert find_code("```bash\npip install a\n```\nthen\n```Python\nimport a\n```") == "import a\n"


def test_pass_at_k_equals_enumeration() -> None:
    right = [True, False, False, True, False]
    for k in range(1, 6):
        draws = list(combinations(right, k))
        assert pass_at(k, 5, 2) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))


def test_unreadable_row_error_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(ConfigError, match=r"rows.jsonl could not be read \(No such file"):
        read_rows(str(path), ("question",))
    path.write_text(json.dumps({"question": "a"}) + "\n[1]\n")
    assert read_rows(str(path), ("question",), limit=1) == [{"question": "a"}]
    with pytest.raises(ConfigError, match=r"Line 2 of .* is not a JSON object with question"):
        read_rows(str(path), ("question",))
    path.write_text("")
    with pytest.raises(ConfigError, match="has no rows"):
        read_rows(str(path), ())
