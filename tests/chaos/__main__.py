"""`make chaos N=50 SEED=0`: so many faults, several per run, each run held to one that nobody disturbed."""

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

from chaos.checks import Left
from chaos.judge import Judged, judge, undisturbed
from chaos.report import headline, line, summary, write_report
from chaos.schedule import KINDS, draw
from chaos.servers import Stage, processes_of, running_stage

FAULTS_PER_RUN = 8


def main() -> int:
    """Play until so many faults were injected; returns 1 if one was not survived."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=50, help="how many faults to inject")
    parser.add_argument("--seed", type=int, default=0, help="of the schedules")
    parser.add_argument("--run", type=int, help="play the schedule of this one run again, and no other")
    parser.add_argument("--kind", choices=KINDS, help="play runs of this kind alone; unset, of each in turn")
    parser.add_argument("--out", type=Path, default=Path("build/chaos"), help="folder of the report")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it sums up what was played
    options.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    console = Console(highlight=False, soft_wrap=True)
    judged: list[Judged] = []
    with suppress(KeyboardInterrupt), running_stage(folder) as stage:
        for each in _shown(console, options.faults, _runs(stage, options), options.seed):
            judged.append(each)
    path = write_report(options.out, options.seed, judged)
    console.print(headline(judged))
    console.print(summary(judged))
    console.print(f"report  {path}")
    if left := processes_of(str(folder)):
        console.print(f"The processes {left} are left.")
    if left or any(each.problems for each in judged):
        console.print(f"What the runs and servers wrote is in {folder}.")
        return 1
    shutil.rmtree(folder)
    return 0


def _runs(stage: Stage, options: argparse.Namespace) -> Iterator[Judged]:
    whole: dict[str, Left] = {}
    for number in count() if options.run is None else [options.run]:
        schedule = draw(options.seed, number, FAULTS_PER_RUN)
        if options.kind in (None, schedule.kind):
            whole[schedule.kind] = whole.get(schedule.kind) or undisturbed(stage, schedule.kind)
            yield judge(stage, schedule, whole[schedule.kind])


def _shown(console: Console, num_faults: int, runs: Iterator[Judged], seed: int) -> Iterator[Judged]:
    """Each run as it ends, on a line and on a bar, until there were faults enough."""
    columns = (TextColumn("faults"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("faults", total=num_faults)
        for judged in runs:
            progress.advance(bar, len(judged.played.injected))
            console.print(line(judged))
            for problem in judged.problems:
                console.print(f"  {problem}")
            if judged.problems:
                number = judged.played.schedule.number
                console.print(f"  again: PYTHONPATH=tests python -m chaos --seed {seed} --run {number}")
                console.print(*(f"  {fault!r}\n" for fault in judged.played.schedule.faults), sep="")
            yield judged
            if progress.finished:
                return


if __name__ == "__main__":
    sys.exit(main())
