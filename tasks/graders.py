"""Graders: whether an answer is right, by rules alone."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping

from tinker_cookbook.eval.benchmarks.gsm8k import check_gsm8k, extract_gsm8k_answer

from tasks.sandbox import Limits, Outcome, run_program

_FENCE = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def same_number(answer: str, expected: str) -> bool:
    """True where the final number of both is the same: in a box, behind `####` or `answer:`, or the last one.

    >>> same_number("He pays 3 * 4 = 12 dollars.", "3 * 4 = <<3*4=12>>12\\n#### 12")
    True
    >>> same_number("He pays nothing.", "#### 12")
    False
    """
    return bool(extract_gsm8k_answer(answer)) and check_gsm8k(answer, extract_gsm8k_answer(expected))


def final_answer(answer: str) -> str:
    """What an answer comes to: its final number, or all of its text but for case and space.

    >>> final_answer("So it is 1,200 in all."), final_answer("It is 4."), final_answer(" New  York ")
    ('1200', '4', 'new york')
    """
    return extract_gsm8k_answer(answer).rstrip(".") or " ".join(answer.casefold().split())


def same_text(answer: str, expected: str) -> bool:
    """True where both are the same but for case and space.

    >>> same_text(" New  York\\n", "new york")
    True
    """
    return answer.split() != [] and answer.casefold().split() == expected.casefold().split()


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """The chance that at least one of k answers, drawn from the sampled ones, is right.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), equation 1.

    >>> pass_at(2, num_samples=4, num_right=1)
    0.5
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def find_code(answer: str) -> str:
    """The Python in an answer: its first fenced block, or all of it.

    >>> find_code("Here it is:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    """
    found = _FENCE.search(answer)
    return found[1] if found else answer


def run_tests(answer: str, row: Mapping[str, str], limits: Limits) -> tuple[bool, Outcome]:
    """Whether the code in an answer passes the unit tests of its problem, and how the program ended.

    Args:
        row: as in HumanEval: `prompt` is code that ends with the signature and docstring of the function
            `entry_point`, and `test` defines ``check(candidate)``.
    """
    code, name = find_code(answer), row["entry_point"]
    # A whole function takes the place of the signature; else what was answered is its body.
    is_whole = re.search(rf"^(async )?def {re.escape(name)}\b", code, re.MULTILINE) is not None
    # Printed behind the tests alone: a program that ends itself before them is not right.
    passed = secrets.token_hex(16)
    parts = [row["prompt"] + ("\n" if is_whole else "") + code, row["test"], f"check({name})", f"print({passed!r})"]
    outcome = run_program("\n\n".join(parts) + "\n", limits)
    return outcome.exit_code == 0 and outcome.output.rstrip().endswith(passed), outcome
