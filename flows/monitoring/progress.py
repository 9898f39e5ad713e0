"""Progress of a run: step callback, progress bar, and the run's page in the Prefect UI."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from datetime import timedelta
from statistics import fmean
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self, TextIO

from tqdm import tqdm

from blocks.terminal import escape_terminal, print_notice
from flows.monitoring.artifacts import RunPage
from flows.monitoring.interrupts import StopRequest
from tasks.reports.summary import format_steps
from tasks.reports.tables import REWARD, TIED, format_figure, reward_parts
from tasks.training.tracking.metrics import MetricsLog

# Receives each step and its metrics; returns a reason to stop the run, or an empty string.
StepCallback = Callable[[int, Mapping[str, float]], str]

_CALLBACK: ContextVar[StepCallback | None] = ContextVar("step_callback", default=None)


@contextmanager
def step_callback(callback: StepCallback | None) -> Iterator[None]:
    """Call a function after each step of the runs in this block; it may return a reason to stop the run.

    None suspends the function of an enclosing block.
    """
    token = _CALLBACK.set(callback)
    try:
        yield
    finally:
        _CALLBACK.reset(token)


def call_step_callback(step: int, metrics: Mapping[str, float], stop: StopRequest) -> None:
    """Pass the metrics of a step to the step callback, and cancel the run if it returns a reason."""
    callback = _CALLBACK.get()
    if callback and (reason := callback(step, metrics)):
        stop.cancel(reason)


# Metrics of the methods in the order of their importance, with the labels of the terminal.
_FIGURES = {
    REWARD: "reward",
    "teacher_kl": "teacher_kl",
    "accuracy": "accuracy",
    "margin": "margin",
    "train_mean_nll": "nll",
    "loss/total": "loss",
}
_BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{remaining}, {rate_fmt}{postfix}]"
_NARROWEST_BAR, _LONGEST_NAME = 10, 16
# Lines of a run whose output is no terminal: after the first step, at each tenth of the steps, and after a step whose
# last line is a minute old.
_NUM_LINES, _LINE_EVERY_S = 10, 60.0


def method_figures(metrics: Mapping[str, float]) -> list[str]:
    """Figures of a step as text, the most important first, such as reward and its parts, accuracy, loss and cost.

    >>> method_figures({"loss/total": 6.9, "train_mean_nll": 5.01234, "cost/usd": 0.25})
    ['nll=5.012', 'loss=6.9', '$0.25']
    >>> method_figures({"env/all/reward/total": 0.5, "reward/short/value": 0.1, "env/all/num_letters": 3.0})
    ['reward=0.5', 'short=0.1', 'num_letters=3']
    >>> method_figures({"accuracy": 0.0, "margin": 0.0})  # the first batch of preferences: policy and reference agree
    ['accuracy=0 (ties)', 'margin=0']
    """
    keys = {key: label for key, label in _FIGURES.items() if key in metrics}
    if "teacher_kl" in keys and metrics.get(REWARD) == 0:
        del keys[REWARD]  # distillation without rewards
    if keys.keys() & {REWARD, "accuracy", "teacher_kl"}:
        keys.pop("train_mean_nll", None)  # the NLL of samples, or of both completions of pairs, says little
    figures = [_labelled(label, metrics[key]) for key, label in keys.items()]
    if "accuracy" in keys and abs(metrics.get("margin", 1.0)) < TIED:
        figures[list(keys).index("accuracy")] += " (ties)"
    if REWARD in keys:
        figures[1:1] = [_labelled(name, metrics[key]) for key, name in reward_parts(metrics).items()]
    return [*figures, *([f"${metrics['cost/usd']:.4g}"] if metrics.get("cost/usd") else [])]


def _labelled(label: str, figure: float) -> str:
    """Figure with its label.

    >>> _labelled("loss", 0.25), _labelled("loss", 1e-9)
    ('loss=0.25', 'loss≈0')
    """
    return f"{label}={format_figure(figure)}".replace("=≈", "≈")


class Pauses(NamedTuple):
    """Work of a run between its steps.

    Attributes:
        evaluations: kind of each evaluation, by the step before which it runs; the final weights are evaluated before
            step `num_steps`. Evaluations of one kind take about the same time.
        saves: steps before which a checkpoint is saved. The service saves it before it computes the step, so the
            step's duration includes the save.
    """

    evaluations: Mapping[int, Hashable]
    saves: Collection[int]


class TimeLeft:
    """Pace of the steps of a run, and the time that it still needs, from measured durations."""

    def __init__(self, first: int, num_steps: int, pauses: Pauses) -> None:
        self._step, self._num_steps, self._pauses = first, num_steps, pauses
        self._first_s: float | None = None
        self._plain_s, self._after_save_s = list[float](), list[float]()
        self._evaluation_s: dict[Hashable, float] = {}
        self._examples_s = 0.0

    def add(self, metrics: Mapping[str, float]) -> None:
        """Count the next step by its metrics."""
        evaluation, examples = metrics.get("time/evaluation", 0.0), metrics.get("time/examples", 0.0)
        seconds = metrics.get("time/step", 0.0) - evaluation
        if self._first_s is None:
            self._first_s = seconds
        else:
            (self._after_save_s if self._step in self._pauses.saves else self._plain_s).append(seconds)
        if self._step in self._pauses.evaluations:
            self._evaluation_s[self._pauses.evaluations[self._step]] = evaluation - examples
        if examples:
            self._examples_s = examples
        self._step += 1

    @property
    def pace(self) -> float:
        """Mean seconds of a step, without its evaluation.

        Steps after a checkpoint, and the first step, which takes longer, count only as long as there are no others.
        """
        return fmean(self._plain_s or self._after_save_s or [self._first_s or 0.0])

    @property
    def seconds(self) -> float:
        """Seconds until the end of the run; work that has not been measured yet counts as 0."""
        evaluations = [kind for step, kind in self._pauses.evaluations.items() if step >= self._step]
        longest = max(self._evaluation_s.values(), default=0.0)
        evaluations_s = sum(self._evaluation_s.get(kind, longest) for kind in evaluations)
        if evaluations:  # the last evaluation stores examples, like the first
            evaluations_s += self._examples_s
        save_s = max(0.0, fmean(self._after_save_s) - self.pace) if self._after_save_s else 0.0
        num_saves = sum(step >= self._step for step in self._pauses.saves)
        return self.pace * (self._num_steps - self._step) + evaluations_s + save_s * num_saves


class Progress:
    """Progress of a run in the terminal and on its page in the Prefect UI.

    A terminal shows a progress bar that fits its width; everything else that is printed appears above the bar. If the
    output is no terminal, a line is printed after the first step, at each tenth of the steps, and after a step if the
    last line is a minute old.
    """

    def __init__(
        self, run_name: str, first: int, num_steps: int, log: MetricsLog, pauses: Pauses | None = None
    ) -> None:
        """Start at a step.

        Args:
            pauses: evaluations and checkpoints of the run; None for neither.
        """
        self._page = RunPage(run_name, first, num_steps, log)
        self._run_name, self._num_steps, self._done = run_name, num_steps, first
        if first:
            tqdm.write(escape_terminal(f"Resumed {run_name} after {format_steps(first, num_steps)}."), file=sys.stderr)
        self._first, self._wrote_at = first, perf_counter()
        self._time_left = TimeLeft(first, num_steps, pauses or Pauses({}, frozenset()))
        self._output = ExitStack()
        self._bar: tqdm[NoReturn] | None = None
        if sys.stderr.isatty():
            name = run_name if len(run_name) <= _LONGEST_NAME else f"{run_name[:7]}…{run_name[-8:]}"
            self._bar = tqdm(
                desc=name,
                initial=first,
                total=num_steps,
                unit="step",
                dynamic_ncols=True,
                smoothing=0.1,
                bar_format=_BAR_FORMAT,
                file=sys.stderr,
            )

    def advance(self, metrics: Mapping[str, float]) -> None:
        """Count a finished step. The pace excludes evaluations and checkpoints, which the time left includes."""
        self._page.advance(metrics)
        self._done += 1
        self._time_left.add(metrics)
        figures = method_figures(metrics)  # a skipped step has none
        if self._bar is not None:
            # tqdm's own pace and time left would not tell steps and evaluations apart.
            time_left = tqdm.format_interval(self._time_left.seconds)
            bar_format = _BAR_FORMAT.replace("{remaining}", time_left)
            self._bar.bar_format = bar_format.replace("{rate_fmt}", f"{self._time_left.pace:.3g} s/step")
            self._bar.set_postfix_str(_fitting(figures, self._bar), refresh=False)
            self._bar.update()
        elif self._is_line_due():
            self._write_line(figures)

    def _is_line_due(self) -> bool:
        is_tenth = self._done * _NUM_LINES // self._num_steps > (self._done - 1) * _NUM_LINES // self._num_steps
        is_late = perf_counter() - self._wrote_at >= _LINE_EVERY_S
        return is_tenth or is_late or self._done == self._first + 1

    def _write_line(self, figures: Sequence[str]) -> None:
        self._wrote_at = perf_counter()
        time_left = timedelta(seconds=round(self._time_left.seconds))
        pace = f"{self._time_left.pace:.3g} s/step, {time_left} left"
        line = f"{self._run_name}: {format_steps(self._done, self._num_steps)}, {', '.join([*figures, pace])}"
        print_notice(line)

    def __enter__(self) -> Self:
        self._page.__enter__()
        if self._bar is not None:
            self._output.enter_context(redirect_stderr(_AboveBar(sys.stderr)))
            if sys.stdout.isatty():
                self._output.enter_context(redirect_stdout(_AboveBar(sys.stdout)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._output.close()
        if self._bar is not None:
            self._bar.close()
        self._page.__exit__(kind, error, trace)


class _AboveBar(io.TextIOBase):
    """Stream whose lines appear above the progress bars of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._line = stream, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            tqdm.write(line, file=self._stream)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        if self._line:
            self.write("\n")


def _fitting(figures: Sequence[str], bar: tqdm[NoReturn]) -> str:
    """Join as many figures as leave room for the bar in the width of the terminal."""
    state: dict[str, Any] = {
        **bar.format_dict,
        "postfix": None,
        "bar_format": str(bar.bar_format).replace("{bar}", ""),
        "ncols": None,
    }
    room = (bar.ncols or 80) - len(tqdm.format_meter(**state)) - _NARROWEST_BAR
    shown: list[str] = []
    for figure in figures:
        room -= len(figure) + 2
        if room < 0:
            break
        shown.append(figure)
    return ", ".join(shown)
