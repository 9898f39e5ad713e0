"""Grading of code by its unit tests, in the sandbox."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import threading
from collections.abc import Mapping

from tasks.common.graders import find_code
from tasks.sandbox.runner import Limits, Outcome, run_program

# All runs of a process share its processors; a program that waits for one would use up its time limit.
_PROCESSORS = threading.BoundedSemaphore(os.cpu_count() or 1)


async def run_tests_async(answer: str, row: Mapping[str, str], limits: Limits) -> tuple[bool, Outcome]:
    """Run `run_tests` in a thread, at most one program per processor at a time."""

    def run() -> tuple[bool, Outcome]:
        with _PROCESSORS:
            return run_tests(answer, row, limits)

    return await asyncio.to_thread(run)


def run_tests(answer: str, row: Mapping[str, str], limits: Limits) -> tuple[bool, Outcome]:
    """Run an answer's code with the unit tests of its problem; return True if they pass, and the program's outcome.

    Args:
        answer: text with the whole function or its body.
        row: problem as in HumanEval: `prompt` ends with the signature and docstring of the function `entry_point`, and
            `test` defines ``check(candidate)``.
        limits: resource limits of the program.
    """
    code, name = find_code(answer), row["entry_point"]
    # A whole function redefines the one of the prompt; other code continues the prompt as the function's body.
    is_function = re.search(rf"^(async )?def {re.escape(name)}\b", code, re.MULTILINE) is not None
    # The secret is printed only after the tests, so code that exits early fails.
    secret = secrets.token_hex(16)
    parts = [row["prompt"] + ("\n" if is_function else "") + code, row["test"], f"check({name})", f"print({secret!r})"]
    outcome = run_program("\n\n".join(parts) + "\n", limits)
    return outcome.exit_code == 0 and outcome.output.rstrip().endswith(secret), outcome
