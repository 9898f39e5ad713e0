"""A run between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from tinker_cookbook.eval.evaluators import Evaluator

from flows.budget import Ledger
from flows.checkpoints import Checkpoints
from flows.guards import Guard
from flows.plan import Plan
from flows.run import Run
from flows.step import Ahead, Forward
from objectives.batch import Batch
from objectives.linearize import Linearized
from objectives.objective import Objective
from objectives.one_pass import OnePass
from tasks.checkpoint import PendingCheckpoint
from tasks.reference import Reference
from tasks.source import Source
from tasks.update import PendingUpdate


@dataclass(frozen=True, slots=True)
class SentBatch:
    """A batch, or one minibatch, whose gradient is asked for; what was linearized for it, of two passes."""

    ahead: Ahead
    update: PendingUpdate
    linearized: Linearized | None


@dataclass(frozen=True, slots=True)
class Sent:
    """A step whose updates are under way, none where it is passed over, and the save behind them where one is due."""

    batches: Sequence[SentBatch]
    saving: PendingCheckpoint | None


@dataclass(slots=True)
class Loop:
    """A run between two steps.

    Attributes:
        run, plan, source, objective, reference, evaluators, checkpoints, one_pass, guard, ledger: what stays the same.
        following: the minibatches of the next step, on their way; None behind the last one.
        forward: the first one's forward pass, where it is asked for.
        sent: its updates, where they are sent already.
        trained: the batch of the last update.
        unseen: the saves, each with the state of all else, of weights that nothing has looked at.
        ended: why the budget ends the run before the next step; empty where it does not.
        began: when the step before was done, by the clock of `perf_counter`.
    """

    run: Run
    plan: Plan
    source: Source
    objective: Objective
    reference: Reference | None
    evaluators: Sequence[Evaluator]
    checkpoints: Checkpoints
    one_pass: OnePass
    guard: Guard
    ledger: Ledger
    following: Sequence[Ahead] | None = None
    forward: Forward | None = None
    sent: Sent | None = None
    trained: Batch | None = None
    unseen: list[tuple[PendingCheckpoint, dict[str, Any]]] = field(default_factory=list)
    ended: str = ""
    began: float = field(default_factory=perf_counter)
