"""Report of the injected and survived faults, for the terminal and as Markdown and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from chaos.judge import Verdict
from chaos.schedule import ACTIONS, GRADERS, PROCESS_ACTIONS, SERVERS

TARGETS = ("flow", *SERVERS, *GRADERS)
COLUMNS = ("", *TARGETS, "all", "survived")


def summary_rows(verdicts: Sequence[Verdict]) -> list[tuple[str, ...]]:
    """Return one row per kind of fault with the number of faults by target, their total and the survived ones.

    The last row has the totals. A fault is survived if its run is.
    """
    injected = _count(verdicts)
    survived = _count([verdict for verdict in verdicts if not verdict.problems])
    rows = []
    for action in (*PROCESS_ACTIONS, *ACTIONS):
        counts = [injected[action, target] for target in TARGETS]
        num_survived = sum(survived[action, target] for target in TARGETS)
        name = "kill -9" if action == "kill" else action
        rows.append((name, *(str(number or "") for number in counts), str(sum(counts)), str(num_survived)))
    counts = [sum(n for (_, other), n in injected.items() if other == target) for target in TARGETS]
    rows.append(("all", *map(str, (*counts, injected.total(), survived.total()))))
    return rows


def summary(verdicts: Sequence[Verdict]) -> Table:
    """Return the rows as a table for a terminal."""
    table = Table()
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    rows = summary_rows(verdicts)
    for row in rows:
        table.add_row(*row, end_section=row is rows[-2])
    return table


def headline(verdicts: Sequence[Verdict]) -> str:
    """Summarize the numbers of faults, runs, starts and survivors in two sentences."""
    num_faults = sum(len(verdict.run.injected) for verdict in verdicts)
    num_survivors = sum(not verdict.problems for verdict in verdicts)
    num_starts = sum(verdict.run.num_starts for verdict in verdicts)
    num_exits = sum(len(verdict.run.exits) for verdict in verdicts)
    minutes = sum(verdict.run.seconds for verdict in verdicts) / 60
    return (
        f"{num_faults} faults in {len(verdicts)} runs, {minutes:.0f} minutes: {num_survivors} runs ended like the "
        f"reference run. Their commands were started {num_starts} times, {num_exits} times after an exit with an error."
    )


def line(verdict: Verdict) -> str:
    """Summarize one run in one line."""
    run = verdict.run
    faults = "; ".join(f"{injected.fault} {injected.hit}".strip() for injected in run.injected) or "no faults"
    end = "FAILED" if verdict.problems else "survived"
    schedule = run.schedule
    return f"run {schedule.number} ({schedule.kind}, {schedule.storage}, {run.seconds:.0f} s): {end} {faults}"


def write_report(folder: Path, seed: int, verdicts: Sequence[Verdict]) -> Path:
    """Write report.md and report.json; return the path of report.md."""
    runs = [asdict(verdict) for verdict in verdicts]
    (folder / "report.json").write_text(json.dumps({"seed": seed, "runs": runs}, indent=1))
    page = [f"# Chaos with seed {seed}", "", headline(verdicts), "", *_markdown(COLUMNS, summary_rows(verdicts))]
    for verdict in verdicts:
        page += ["", f"## {line(verdict).partition(':')[0]}", ""]
        page += [f"- {injected.at_s:.1f} s: {injected.fault} {injected.hit}" for injected in verdict.run.injected]
        page += [f"- exited and restarted: {message}" for message in verdict.run.exits]
        page += [f"- **problem**: {problem}" for problem in verdict.problems]
    path = folder / "report.md"
    path.write_text("\n".join(page) + "\n")
    return path


def _count(verdicts: Sequence[Verdict]) -> Counter[tuple[str, str]]:
    """Count the injected faults by action and target."""
    faults = (injected.fault for verdict in verdicts for injected in verdict.run.injected)
    return Counter((fault.action, fault.target) for fault in faults)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]
