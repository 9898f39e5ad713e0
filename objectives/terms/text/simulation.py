"""Score of a text by an external program or a Python function, with a time limit."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.config.import_path import ImportedFunction
from objectives.config.import_policy import check_command, find_command, is_restricted
from objectives.errors import ObjectiveError
from objectives.term import regularizer
from objectives.terms.text.extractors import get_texts

ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
Command = Annotated[tuple[str, ...], Field(min_length=1)]
CommandName = Annotated[str, Field(pattern=r"^[\w.-]+$")]


def _check_scorer(scorer: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Replace the name of a command by the command; check that the config may name the function or command."""
    if isinstance(scorer, tuple):
        check_command(scorer)
        return scorer
    if ":" not in scorer:
        return find_command(scorer)
    if is_restricted():
        ImportedFunction(scorer).load()  # checks the module and the function
    return scorer


Scorer = Annotated[Command | ImportPath | CommandName, AfterValidator(_check_scorer)]

# Run a Python scorer in one process per text, like a command, so that a hang or crash stays isolated. It has the import
# path of this process as arguments, because a PYTHONPATH would also reach the programs that a scorer starts.
_CALL = """
import functools, importlib, sys
sys.path[:0] = sys.argv[2:]
module, name = sys.argv[1].split(":")
function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
print(float(function(sys.stdin.read())))
"""


def run_simulations(
    batch: Batch,
    *,
    scorer: Scorer,
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0,
    workers: Annotated[int, Field(ge=1, le=64)] = 4,
) -> list[float | None]:
    """Score each datum's text; None if the scorer timed out."""
    command = (sys.executable, "-c", _CALL, scorer, *sys.path) if isinstance(scorer, str) else scorer
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(partial(_score, command, timeout_s), get_texts(batch)))


@regularizer("simulation", kind="scored", prepare=run_simulations)
def simulation(outputs: Outputs, batch: Batch, *, timeout_score: float = 1.0) -> tuple[Tensor, dict[str, float]]:
    """Score of an external scorer, per datum ``(D,)``, in any unit; higher is worse.

    The scorer runs in one process per text, which receives the text on standard input and prints the score as the last
    word of its standard output. After ``timeout_s`` seconds the process and its children are killed, and the text
    scores ``timeout_score``. A scorer that exits with an error fails the term. Keep the default ``execution``, because
    the term starts its own processes.

    Source: none; the estimator of scored terms handles any black box (`objectives.estimators.minimum_risk`).

    Args:
        scorer: a command as a list of words, the name of a command in ``TINKER_FLOWS_COMMANDS``, or
            ``"package.module:function"`` of a function from a text to a number. A run of a deployment may name only the
            commands and functions that its worker allows (``docs/security.md``).
        timeout_s: seconds per text.
        workers: number of concurrent processes.
        timeout_score: score of a text whose scorer timed out.

    Metrics:
        score_mean, score_max: over the datums; timed_out: number of timeouts.
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
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # The process leads its group, which contains its children.
    return _parse_score(output, errors, process.wait())


def _parse_score(output: str, errors: str, returncode: int) -> float:
    if returncode != 0:
        raise ObjectiveError(
            f"the scorer exited with code {returncode} and printed {_tail(errors or output)!r}; run it manually on a "
            "text of the data"
        )
    try:
        score = float(output.split()[-1])
    except (IndexError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise ObjectiveError(
            f"the last word of the scorer's output {_tail(output)!r} is not a finite number; run it manually on a text "
            "of the data"
        )
    return score


def _tail(text: str) -> str:
    return " ".join(text.split())[-200:]
