"""Logic: the calculator annotations of a solution, `<<a*b=c>>`, have to hold together."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import z3
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.per_datum import per_datum
from objectives.term import regularizer
from objectives.terms.annotations import Annotation, Solution, fold
from objectives.terms.extractors import ExtractorName, read_solutions

# A net: linear arithmetic in three unknowns takes 50 to 300 steps. Not in seconds, so that no text is scored
# otherwise on a slow machine.
MAX_SOLVER_STEPS = 20_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many annotations of one text are violated, hold, were left open by Z3, could not be read.

    Attributes:
        core_sizes: of each violated annotation whose conflict Z3 explained, in order: how many annotations, itself
            among them, cannot be true together.
    """

    violated: int
    held: int
    undecided: int
    unparsable: int
    core_sizes: tuple[int, ...] = ()

    @property
    def checked(self) -> int:
        return self.violated + self.held + self.undecided


@per_datum()
def check_annotations(batch: Batch, *, extractor: ExtractorName = "gsm8k") -> list[Verdict]:
    """Check the annotations of each datum with Z3."""
    # A context of its own for each call: Z3's shared one does not stand several threads.
    solver = z3.Solver(ctx=z3.Context())
    solver.set(rlimit=MAX_SOLVER_STEPS)
    return [_check(solver, solution) for solution in read_solutions(batch, extractor)]


def _check(solver: z3.Solver, solution: Solution) -> Verdict:
    """Whether each annotation can be true beside those before it that were not violated."""
    held: list[Annotation] = []
    cores: list[int | None] = []
    solver.push()
    for step in solution.steps:
        solver.push()
        solver.add(*_holds(step, solver.ctx))
        answer = solver.check()
        if answer == z3.unknown:
            break
        if answer == z3.unsat:
            solver.pop()
            cores.append(_core_size([*held, step], solver.ctx))
        else:
            held.append(step)
    solver.pop(solver.num_scopes())
    undecided = len(solution.steps) - len(cores) - len(held)
    sizes = tuple(size for size in cores if size is not None)
    return Verdict(len(cores), len(held), undecided, solution.num_unparsable, sizes)


def _core_size(steps: list[Annotation], context: z3.Context) -> int | None:
    """How many of these annotations, which contradict each other, are enough to do so; None if Z3 gives up."""
    solver = z3.Solver(ctx=context)
    solver.set(rlimit=MAX_SOLVER_STEPS)
    solver.set("core.minimize", True)
    for index, step in enumerate(steps):
        solver.assert_and_track(z3.And(*_holds(step, context)), f"step{index}")
    return len(solver.unsat_core()) if solver.check() == z3.unsat else None


def _holds(step: Annotation, context: z3.Context) -> list[Any]:
    divisors = []

    def number(value: Fraction) -> Any:
        return z3.RealVal(str(value), context)

    def unknown(name: str) -> Any:
        return z3.Real(name, context)

    def divide(dividend: Any, divisor: Any) -> Any:
        divisors.append(divisor)
        return dividend / divisor

    difference = fold(step.left, number, unknown, divide) - fold(step.right, number, unknown, divide)
    tolerance = number(step.tolerance)
    # In Z3 a quotient by zero may be any number, which would make 5/0=7 true.
    defined = [divisor != 0 for divisor in divisors]
    return [*defined, difference <= tolerance, -difference <= tolerance]


@regularizer("logic", kind="scored", prepare=check_annotations)
def logic(outputs: Outputs, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Share of violated annotations, ``violated / checked``, per datum ``(D,)``; 0 where there are none.

    An annotation holds when its sides differ by at most half a unit of the last decimal written on the
    right: ``<<10/3=3.3>>`` does, ``<<10/3=3.4>>`` does not. Unknowns (``<<2*x=10>>``) are real numbers, the
    same ones throughout a text, and an annotation is violated when no value of them makes it true together
    with those before it. One that Z3 leaves open within `MAX_SOLVER_STEPS`, and all after it, are undecided.

    Source: de Moura & Bjørner 2008, "Z3: An Efficient SMT Solver".

    Args:
        extractor: what reads the annotations off a text (`objectives.terms.extractors`).

    Metrics, counted over the batch:
        checked, violated, undecided, unparsable; core_mean, core_max: the size of the unsatisfiable cores, which are
        the annotations that contradict each other: 1 is a wrong calculation, more is a contradiction between steps.
    """
    verdicts: list[Verdict] = batch.features
    scores_D = [verdict.violated / max(1, verdict.checked) for verdict in verdicts]
    sizes = [size for verdict in verdicts for size in verdict.core_sizes]
    return outputs.logprobs_DT.new_tensor(scores_D), {
        "checked": sum(verdict.checked for verdict in verdicts),
        "violated": sum(verdict.violated for verdict in verdicts),
        "undecided": sum(verdict.undecided for verdict in verdicts),
        "unparsable": sum(verdict.unparsable for verdict in verdicts),
        "core_mean": sum(sizes) / max(1, len(sizes)),
        "core_max": max(sizes, default=0),
    }
