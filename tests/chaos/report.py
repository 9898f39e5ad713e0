"""What was injected and survived: for the terminal, and as Markdown and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from chaos.judge import Judged
from chaos.schedule import ACTIONS, SERVERS

TARGETS = ("flow", *SERVERS)
COLUMNS = ("", *TARGETS, "all", "survived")


def summary_rows(judged: Sequence[Judged]) -> list[tuple[str, ...]]:
    """One row per kind of fault: how many befell each target, all of them, and how many of these were survived.

    The last row adds them up. A fault is survived if its run is.
    """
    injected, survived = _count(judged), _count([each for each in judged if not each.problems])
    rows = []
    for action in ("kill", *ACTIONS):
        counts = [injected[action, target] for target in TARGETS]
        num_survived = sum(survived[action, target] for target in TARGETS)
        name = "kill -9" if action == "kill" else action
        rows.append((name, *(str(number or "") for number in counts), str(sum(counts)), str(num_survived)))
    counts = [sum(n for (_, other), n in injected.items() if other == target) for target in TARGETS]
    rows.append(("all", *map(str, (*counts, injected.total(), survived.total()))))
    return rows


def summary(judged: Sequence[Judged]) -> Table:
    """The rows as a table for a terminal."""
    table = Table()
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    rows = summary_rows(judged)
    for row in rows:
        table.add_row(*row, end_section=row is rows[-2])
    return table


def headline(judged: Sequence[Judged]) -> str:
    """How many faults, in how many runs, and what they cost."""
    num_faults = sum(len(each.played.injected) for each in judged)
    num_well = sum(not each.problems for each in judged)
    num_starts = sum(each.played.num_starts for each in judged)
    num_gave_up = sum(len(each.played.gave_up) for each in judged)
    minutes = sum(each.played.seconds for each in judged) / 60
    return (
        f"{num_faults} faults in {len(judged)} runs, {minutes:.0f} minutes: {num_well} runs ended as the undisturbed "
        f"one. The command was started {num_starts} times, {num_gave_up} of them after it had ended with a sentence."
    )


def line(judged: Judged) -> str:
    """One run as one line."""
    played = judged.played
    what = "; ".join(f"{each.fault} {each.hit}".strip() for each in played.injected) or "nothing"
    end = "FAILED" if judged.problems else "survived"
    schedule = played.schedule
    return f"run {schedule.number} ({schedule.kind}, {schedule.storage}, {played.seconds:.0f} s): {end} {what}"


def write_report(folder: Path, seed: int, judged: Sequence[Judged]) -> Path:
    """Write report.md and report.json; returns the first."""
    runs = [asdict(each) for each in judged]
    (folder / "report.json").write_text(json.dumps({"seed": seed, "runs": runs}, indent=1))
    page = [f"# Chaos with seed {seed}", "", headline(judged), "", *_markdown(COLUMNS, summary_rows(judged))]
    for each in judged:
        page += ["", f"## {line(each).partition(':')[0]}", ""]
        page += [f"- {injected.at_s:.1f} s: {injected.fault} {injected.hit}" for injected in each.played.injected]
        page += [f"- ended and started again: {sentence}" for sentence in each.played.gave_up]
        page += [f"- **wrong**: {problem}" for problem in each.problems]
    path = folder / "report.md"
    path.write_text("\n".join(page) + "\n")
    return path


def _count(judged: Sequence[Judged]) -> Counter[tuple[str, str]]:
    """How often each kind of fault befell each target."""
    return Counter((each.fault.action, each.fault.target) for run in judged for each in run.played.injected)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(each)} |" for each in (columns, ["---"] * len(columns), *rows)]
