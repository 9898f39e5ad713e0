"""Check the commits since this script was added: `area: imperative` in 72 characters, and a body that says why."""

from __future__ import annotations

import re
import subprocess
import sys

MAX_LENGTH = 72
SUBJECT = re.compile(r"[a-z0-9][a-z0-9_./, -]{0,30}: [a-z]")
SEPARATOR = "\x1e"


def git(*arguments: str) -> str:
    """Return the output of a git command; empty outside a git checkout."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout


def problems(subject: str, body: str) -> list[str]:
    """Return what is wrong with a commit message.

    >>> problems("retention: keep the best checkpoint when its TTL expires", "Users lost it.")
    []
    >>> problems("Say of each answer what the terms make of it", "")
    ["does not read 'area: imperative'", 'has no body that says why']
    """
    found = []
    if len(subject) > MAX_LENGTH:
        found.append(f"has {len(subject)} characters, at most {MAX_LENGTH} fit")
    if not SUBJECT.match(subject):
        found.append("does not read 'area: imperative'")
    if not body.strip():
        found.append("has no body that says why")
    return found


def main() -> None:
    """Print every commit message with a problem; exit with 1 if there is one."""
    added = git("log", "--diff-filter=A", "--format=%H", "--", ".ci/check_commits.py").split()
    log = git("log", "--no-merges", f"--format=%h%n%s%n%b{SEPARATOR}", f"{added[-1]}..HEAD") if added else ""
    failed = False
    for entry in filter(None, (entry.strip() for entry in log.split(SEPARATOR))):
        commit, subject, *body = entry.split("\n")
        for problem in problems(subject, "\n".join(body)):
            failed = True
            print(f"{commit} {subject!r} {problem}.", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
