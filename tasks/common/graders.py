"""Rule-based graders of answers."""

from __future__ import annotations

import math
import re

from tinker_cookbook.eval.benchmarks.gsm8k import check_gsm8k, extract_gsm8k_answer

_FENCE = re.compile(r"^[ ]*```[ ]*([^\s`]*)[^`\n]*\n(.*?)(?:^[ ]*```|\Z)", re.DOTALL | re.MULTILINE)


def same_number(answer: str, expected: str) -> bool:
    """Return True if both texts have the same final number.

    The final number is in a box, after `####`, after `answer is` or `answer:`, or in bold; otherwise, it is the last
    number of the text. A text in a box or after `####` that is no number is compared as text.

    >>> same_number("He pays 3 * 4 = 12 dollars.", "3 * 4 = <<3*4=12>>12\\n#### 12")
    True
    >>> same_number("He pays nothing.", "#### 12")
    False
    """
    return bool(extract_gsm8k_answer(answer)) and check_gsm8k(answer, extract_gsm8k_answer(expected))


def final_answer(answer: str) -> str:
    """Return the final number of an answer, or its text without case and extra spaces if it has no number.

    A text in a box or after `####` takes the place of the number.

    >>> final_answer("So it is 1,200 in all."), final_answer("It is 4."), final_answer(" New  York ")
    ('1200', '4', 'new york')
    """
    return extract_gsm8k_answer(answer).rstrip(".") or " ".join(answer.casefold().split())


def same_text(answer: str, expected: str) -> bool:
    """Return True if both texts are equal up to case and spaces, and not empty.

    >>> same_text(" New  York\\n", "new york")
    True
    """
    return answer.split() != [] and answer.casefold().split() == expected.casefold().split()


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """Return the probability that at least one of k answers, drawn from the sampled ones, is correct.

    `k` is at most `num_samples`.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), equation 1.

    >>> pass_at(2, num_samples=4, num_right=1)
    0.5
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def find_code(answer: str) -> str:
    """Return the Python code of an answer.

    It is the first fenced block whose language is `python`, `py` or not stated; without such a block, the whole text.

    >>> find_code("Here it is, ```x```:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    >>> find_code("``` bash\\nls\\n```\\n```\\nx = 1")
    'x = 1'
    """
    blocks = (match[2] for match in _FENCE.finditer(answer) if match[1].lower() in ("", "python", "py"))
    return next(blocks, answer)
