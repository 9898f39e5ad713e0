"""Simulation: a program or a function says how bad each text is, within a time limit."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated

from pydantic import Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.errors import ObjectiveError
from objectives.term import regularizer
from objectives.terms.extractors import texts_of

ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
Command = Annotated[tuple[str, ...], Field(min_length=1)]

# A process for each text, as for a command: what hangs or dies takes nothing with it, and can be killed.
_CALL = """
import functools, importlib, sys
module, name = sys.argv[1].split(":")
function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
print(float(function(sys.stdin.read())))
"""


def run_simulations(
    batch: Batch,
    *,
    scorer: Command | ImportPath,
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0,
    workers: Annotated[int, Field(ge=1, le=64)] = 4,
) -> list[float | None]:
    """The score of each datum's text; None where the time was up."""
    command = (sys.executable, "-c", _CALL, scorer) if isinstance(scorer, str) else scorer
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(partial(_score, command, timeout_s), texts_of(batch)))


@regularizer("simulation", kind="scored", prepare=run_simulations)
def simulation(outputs: Outputs, batch: Batch, *, timeout_score: float = 1.0) -> tuple[Tensor, dict[str, float]]:
    """What a scorer says of each text, per datum ``(D,)``, any unit; higher is worse.

    Each text is a process of its own, given the text on standard input; the last word of its standard
    output is the score. After ``timeout_s`` it and what it started are killed, and the text has ``timeout_score``. One
    that ends with an error fails the term. It needs no ``execution`` but the default, since it has its own processes.

    Source: none; any black box, by the estimator of scored terms (`objectives.estimators.minimum_risk`).

    Args:
        scorer: a command as a list of its words, or ``"package.module:function"``, a function from a text to a number.
        timeout_s: seconds for one text.
        workers: how many run at once.
        timeout_score: in the unit of the scores.

    Metrics:
        score_mean, score_max: over the datums; timed_out: how many were killed.
    """
    scores: list[float | None] = batch.features
    scores_D = [timeout_score if score is None else score for score in scores]
    return outputs.logprobs_DT.new_tensor(scores_D), {
        "score_mean": sum(scores_D) / len(scores_D),
        "score_max": max(scores_D),
        "timed_out": scores.count(None),
    }


def _score(command: tuple[str, ...], timeout_s: float, text: str) -> float | None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace", start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(text, timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.returncode is None:  # with the group, what it started
                os.killpg(process.pid, signal.SIGKILL)
    return _read(output, errors, process.wait())


def _read(output: str, errors: str, returncode: int) -> float:
    try:
        score = float(output.split()[-1])
    except (IndexError, ValueError):
        score = math.nan
    if returncode != 0 or not math.isfinite(score):
        said = " ".join((errors or output).split())[-200:]
        raise ObjectiveError(
            f"its scorer ended with the exit code {returncode} and said {said!r} where a finite number as the last "
            "word of its output is expected: run it by hand on a text of the data"
        )
    return score
