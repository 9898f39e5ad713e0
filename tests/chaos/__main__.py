"""Inject random faults into runs and compare each run with a reference run without faults."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from chaos.checks import Outputs
from chaos.judge import Verdict, judge, run_reference
from chaos.report import headline, line, summary, write_report
from chaos.schedule import KINDS, draw_schedule
from chaos.servers import Testbed, processes_of, running_testbed

FAULTS_PER_RUN = 12


def main() -> int:
    """Run schedules until enough faults were injected; return 1 if a run did not survive."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=50, help="number of faults to inject (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of every random choice (default: %(default)s)")
    parser.add_argument("--run", type=int, help="repeat only the run with this number")
    parser.add_argument("--kind", choices=KINDS, help="run only this kind; default: all kinds in turn")
    parser.add_argument("--out", type=Path, default=Path("build/chaos"), help="folder of the report")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # write the report, as on Ctrl-C
    options.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"Faults are drawn with seed {options.seed}; repeat them with --seed {options.seed}.")
    verdicts: list[Verdict] = []
    with suppress(KeyboardInterrupt), running_testbed(folder) as testbed:
        for verdict in _show_progress(console, options.faults, _verdicts(testbed, options), options.seed):
            verdicts.append(verdict)
    path = write_report(options.out, options.seed, verdicts)
    console.print(headline(verdicts))
    console.print(summary(verdicts))
    console.print(f"report  {path}")
    if leaked := processes_of(str(folder)):
        console.print(f"These processes are still running: {leaked}.")
    if leaked or any(verdict.problems for verdict in verdicts):
        console.print(f"The files of the runs and servers are in {folder}.")
        return 1
    shutil.rmtree(folder)
    return 0


def _verdicts(testbed: Testbed, options: argparse.Namespace) -> Iterator[Verdict]:
    references: dict[str, Outputs] = {}
    for number in count() if options.run is None else [options.run]:
        schedule = draw_schedule(options.seed, number, FAULTS_PER_RUN)
        if options.kind in (None, schedule.kind):
            references[schedule.kind] = references.get(schedule.kind) or run_reference(testbed, schedule.kind)
            yield judge(testbed, schedule, references[schedule.kind])


def _show_progress(console: Console, num_faults: int, verdicts: Iterator[Verdict], seed: int) -> Iterator[Verdict]:
    """Print each verdict and advance a progress bar; stop after `num_faults` faults."""
    columns = (TextColumn("faults"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("faults", total=num_faults)
        for verdict in verdicts:
            progress.advance(bar, len(verdict.run.injected))
            console.print(line(verdict))
            for problem in verdict.problems:
                console.print(f"  {problem}")
            if verdict.problems:
                schedule = verdict.run.schedule
                console.print(f"  repeat: PYTHONPATH=tests python -m chaos --seed {seed} --run {schedule.number}")
                console.print(*(f"  {fault!r}\n" for fault in schedule.faults), sep="")
            yield verdict
            if progress.finished:
                return


if __name__ == "__main__":
    sys.exit(main())
