"""Freed memory stays with the engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Python allocates objects of this size with malloc, as torch does its tensors.
COUNT_FAULTS = """
import resource
from engine.allocator import keep_freed_memory


def fill_blocks():
    return len([b"x" * 2**21 for _ in range(20)])


if not keep_freed_memory():
    raise SystemExit(3)
fill_blocks()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill_blocks()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.process
def test_freed_memory_is_used_again() -> None:
    # The blocks have 10,240 pages; by default, nearly all of them are mapped again.
    shown = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True)
    if shown.returncode == 3:
        pytest.skip("the C library is not glibc")
    assert int(shown.stdout) < 100, shown.stderr
