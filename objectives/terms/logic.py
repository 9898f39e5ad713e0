"""Logic: the calculator annotations of a solution, `<<a*b=c>>`, have to hold together."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import z3
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.term import regularizer
from objectives.terms.annotations import Annotation, Solution, fold, read_solutions

# A net: linear arithmetic in three unknowns takes 50 to 300 steps. Not in seconds, so that no text is scored
# otherwise on a slow machine.
MAX_SOLVER_STEPS = 20_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many annotations of one text are violated, hold, were left open by Z3, could not be read."""

    violated: int
    held: int
    undecided: int
    unparsable: int

    @property
    def checked(self) -> int:
        return self.violated + self.held + self.undecided


def check_annotations(batch: Batch) -> list[Verdict]:
    """Check the annotations of each datum with Z3."""
    # A context of its own for each call: Z3's shared one does not stand several threads.
    solver = z3.Solver(ctx=z3.Context())
    solver.set(rlimit=MAX_SOLVER_STEPS)
    return [_check(solver, solution) for solution in read_solutions(batch)]


def _check(solver: z3.Solver, solution: Solution) -> Verdict:
    """Whether each annotation can be true beside those before it that were not violated."""
    violated = held = 0
    solver.push()
    for step in solution.steps:
        solver.push()
        solver.add(*_holds(step, solver.ctx))
        answer = solver.check()
        if answer == z3.unknown:
            break
        if answer == z3.unsat:
            solver.pop()
        violated += answer == z3.unsat
        held += answer == z3.sat
    solver.pop(solver.num_scopes())
    return Verdict(violated, held, len(solution.steps) - violated - held, solution.num_unparsable)


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

    Metrics, counted over the batch:
        checked, violated, undecided, unparsable.
    """
    verdicts: list[Verdict] = batch.features
    scores_D = [verdict.violated / max(1, verdict.checked) for verdict in verdicts]
    return outputs.logprobs_DT.new_tensor(scores_D), {
        "checked": sum(verdict.checked for verdict in verdicts),
        "violated": sum(verdict.violated for verdict in verdicts),
        "undecided": sum(verdict.undecided for verdict in verdicts),
        "unparsable": sum(verdict.unparsable for verdict in verdicts),
    }
