"""Logical consistency of a solution: its calculator annotations, or the constraints of its datum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, TypeAlias

import z3
from pydantic import AfterValidator, Field
from torch import Tensor

from objectives.batch import Batch, Outputs
from objectives.config.import_path import ImportedFunction
from objectives.errors import ObjectiveError
from objectives.labels import get_text_label
from objectives.term import Flag, per_datum, regularizer
from objectives.terms.text.annotations import Annotation, Solution, fold, read_solution, step_spans
from objectives.terms.text.constraints import (
    Constraint,
    check_values,
    group_values,
    make_constraints,
    parse_constraints,
)
from objectives.terms.text.extractors import ExtractorName, extract

# Safety limit; linear arithmetic in three unknowns takes 50 to 300 steps. A limit in seconds would make scores depend
# on the speed of the machine.
MAX_SOLVER_STEPS = 20_000


Expression: TypeAlias = Any  # z3's annotations do not describe the types of its operators.


@dataclass(frozen=True, slots=True)
class CheckCounts:
    """Numbers of checks of one text by result; the checks are its annotations, its values or its datum's constraints.

    Attributes:
        violated: checks that cannot be true.
        held: checks that can be true; constraints that are true.
        undecided: checks without a result within Z3's limits.
        unparsable: annotations that could not be parsed.
        core_sizes: sizes of the unsatisfiable cores of the violated annotations, in order; a core includes the violated
            annotation. Conflicts that Z3 could not explain are missing.
        unstated: constraints that can hold, but depend on a value that the answer does not state.
    """

    violated: int
    held: int
    undecided: int
    unparsable: int
    core_sizes: tuple[int, ...] = ()
    unstated: int = 0

    @property
    def checked(self) -> int:
        return self.violated + self.held + self.undecided

    @property
    def has_no_result(self) -> bool:
        return self.violated + self.held == 0

    def score(self, price: float) -> float:
        """Share of violated checks, in [0, 1].

        A check without a result counts as ``price`` violated checks; a text without checks scores ``price``.
        """
        total = self.checked + self.unstated
        return (self.violated + price * (self.undecided + self.unstated)) / total if total else price


def _check_source(name: str | ImportedFunction) -> str | ImportedFunction:
    return ImportedFunction(name) if isinstance(name, str) and ":" in name else name


ConstraintSource = Annotated[str | ImportedFunction, AfterValidator(_check_source)]


@per_datum(version=3)
def check_annotations(
    batch: Batch, *, extractor: ExtractorName = "gsm8k", constraints: ConstraintSource | None = None
) -> list[CheckCounts]:
    """Check the annotations of each datum with Z3, or the values that it states."""
    # Z3's default context is not thread-safe, so each call uses its own.
    context = z3.Context()
    solver = z3.Solver(ctx=context)
    solver.set(rlimit=MAX_SOLVER_STEPS)
    answers_D = extract(batch, extractor)
    if constraints is None:
        return [
            _check(solver, answer) if isinstance(answer, Solution) else _check_contradictions(answer)
            for answer in answers_D
        ]
    if any(isinstance(answer, Solution) for answer in answers_D):
        raise ObjectiveError(
            f"the extractor {str(extractor)!r} returns annotations, but constraints need values by name; set "
            "extractor to 'assignments' or to the import path of a function that returns them"
        )
    constraints_D = _read_constraints(batch, constraints, context)
    return [_check_constraints(rules, answer, context) for rules, answer in zip(constraints_D, answers_D, strict=True)]


def _read_constraints(batch: Batch, source: str | ImportedFunction, context: z3.Context) -> list[list[Constraint]]:
    """Read the constraints of each datum, once for each text or set of text labels."""
    function = _check_source(source)
    if isinstance(function, str):
        keys_D = [(("", text),) for text in get_text_label(batch, function)]
    else:
        names = sorted(batch.text_labels_D)
        keys_D = [tuple((name, batch.text_labels_D[name][d]) for name in names) for d in range(batch.num_datums)]
    constraints: dict[tuple[tuple[str, str], ...], list[Constraint]] = {}
    for key, text in zip(keys_D, batch.texts_D, strict=True):
        if key in constraints:
            continue
        try:
            if isinstance(function, str):
                constraints[key] = parse_constraints(key[0][1], context)
            else:
                constraints[key] = make_constraints(function(dict(key), context), context)
        except ObjectiveError as error:
            source = repr(_short(key[0][1])) if isinstance(function, str) else f"that {function} returns"
            raise ObjectiveError(
                f"the constraints {source} of the datum {_short(text)!r} are wrong: {error}"
            ) from error
    return [constraints[key] for key in keys_D]


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_constraints(rules: Sequence[Constraint], values: Any, context: z3.Context) -> CheckCounts:
    checked = check_values(rules, values, context)
    return CheckCounts(checked.violated, checked.held, checked.undecided, 0, unstated=checked.unstated)


def _check_contradictions(values: object) -> CheckCounts:
    """Check that the stated values do not contradict each other: one check per name."""
    conflicts = [len(different) > 1 for different in group_values(values).values()]
    return CheckCounts(sum(conflicts), len(conflicts) - sum(conflicts), 0, 0)


def _check(solver: z3.Solver, solution: Solution) -> CheckCounts:
    """Check whether each annotation is consistent with the earlier ones that were not violated."""
    results = _check_steps(solver, solution.steps)
    held: list[Annotation] = []
    cores: list[int | None] = []
    for step, holds in zip(solution.steps, results, strict=False):  # later ones are undecided
        if holds:
            held.append(step)
        else:
            cores.append(_core_size([*held, step], solver.ctx))
    sizes = tuple(size for size in cores if size is not None)
    return CheckCounts(len(cores), len(held), len(solution.steps) - len(results), solution.num_unparsable, sizes)


def _check_steps(solver: z3.Solver, steps: Sequence[Annotation]) -> list[bool]:
    """Return for each annotation whether it can be true; the list ends at the first undecided one."""
    results: list[bool] = []
    solver.push()
    for step in steps:
        solver.push()
        solver.add(*_assertions(step, solver.ctx))
        result = solver.check()
        if result == z3.unknown:
            break
        if result == z3.unsat:
            solver.pop()
        results.append(result == z3.sat)
    solver.pop(solver.num_scopes())
    return results


def flag_violations(
    text: str, /, *, extractor: ExtractorName = "gsm8k", constraints: ConstraintSource | None = None
) -> list[Flag]:
    """Flag the annotations that cannot be true together with the earlier ones.

    Only annotations in GSM8K's form have a known position in the text; other extractors give no flags.

    >>> [text[flag.start : flag.end] for text in ["<<1+1=3>> <<2*2=4>>"] for flag in flag_violations(text)]
    ['<<1+1=3>>']
    """
    if extractor != "gsm8k" or constraints is not None:
        return []
    context = z3.Context()
    solver = z3.Solver(ctx=context)
    solver.set(rlimit=MAX_SOLVER_STEPS)
    results = _check_steps(solver, read_solution(text).steps)
    return [
        Flag(start, end, "is false, or contradicts the earlier steps")
        for (start, end), holds in zip(step_spans(text), results, strict=False)
        if not holds
    ]


def _core_size(steps: list[Annotation], context: z3.Context) -> int | None:
    """Size of a minimal contradictory subset of the annotations; None if Z3 reaches its limit."""
    solver = z3.Solver(ctx=context)
    solver.set(rlimit=MAX_SOLVER_STEPS)
    solver.set("core.minimize", True)
    for index, step in enumerate(steps):
        solver.assert_and_track(z3.And(*_assertions(step, context)), f"step{index}")
    return len(solver.unsat_core()) if solver.check() == z3.unsat else None


def _assertions(step: Annotation, context: z3.Context) -> list[Expression]:
    """Return the formulas of an annotation: its sides are equal up to the tolerance, and no divisor is 0."""
    divisors: list[Expression] = []

    def number(value: Fraction) -> Expression:
        return z3.RealVal(str(value), context)

    def unknown(name: str) -> Expression:
        return z3.Real(name, context)

    def divide(dividend: Expression, divisor: Expression) -> Expression:
        divisors.append(divisor)
        return dividend / divisor

    difference = fold(step.left, number, unknown, divide) - fold(step.right, number, unknown, divide)
    tolerance = number(step.tolerance)
    # Z3 allows any value for a division by zero, which would make 5/0=7 satisfiable.
    defined = [divisor != 0 for divisor in divisors]
    return [*defined, difference <= tolerance, -difference <= tolerance]


@regularizer("logic", kind="scored", prepare=check_annotations, flag=flag_violations)
def logic(
    outputs: Outputs, batch: Batch, *, unchecked: Annotated[float, Field(ge=0, le=1)] = 0.0
) -> tuple[Tensor, dict[str, float]]:
    """Share of violated checks per datum, ``(violated + unchecked * open) / checks``, ``(D,)``, in [0, 1].

    The checks of a text depend on what ``extractor`` reads from it:

    - Annotations (a `Solution`). An annotation holds if its sides differ by at most half a unit of the last decimal on
      the right: ``<<10/3=3.3>>`` holds, ``<<10/3=3.4>>`` does not. Unknowns (``<<2*x=10>>``) are real numbers, shared
      by all annotations of a text. An annotation is violated if no values of the unknowns satisfy it together with the
      earlier annotations. If Z3 reaches `MAX_SOLVER_STEPS`, the current annotation and all later ones are undecided.
    - Values by name (a dict or pairs), with ``constraints``. Each constraint of the datum is a check: violated if the
      stated values make it false, open if it depends on a name without a stated value. If the open constraints cannot
      all hold, the fewest that must be dropped so that the others can hold count as violated
      (`objectives.terms.text.constraints`).
    - Values by name without ``constraints``. Each name is a check, violated if it has two values: ``x=3, x=4``.

    Open checks are those that are undecided or depend on a value that the answer does not state. A text without checks
    scores ``unchecked``.

    Source: de Moura & Bjørner 2008, "Z3: An Efficient SMT Solver".

    Args:
        extractor: name or import path of a function from a text to its annotations or values
            (`objectives.terms.text.extractors`).
        constraints: name of the text label with the SMT-LIB assertions of each datum (`objectives.labels.with_labels`),
            or import path of a function ``(labels, context)`` from the text labels of a datum, by name, to a list of Z3
            expressions in this context.
        unchecked: how much an open check, or a text without checks, counts relative to a violated check. With the
            default 0, an answer that states nothing scores as well as a correct one.

    Metrics, counted over the batch:
        checked, violated, undecided, unparsable, unstated; unchecked: texts of which no check has a result; core_mean,
        core_max: size of the unsatisfiable cores of annotations: 1 is a wrong calculation, more is a contradiction
        between steps.
    """
    counts: list[CheckCounts] = batch.features
    scores_D = [text.score(unchecked) for text in counts]
    sizes = [size for text in counts for size in text.core_sizes]
    return outputs.logprobs_DT.new_tensor(scores_D), {
        "checked": sum(text.checked for text in counts),
        "violated": sum(text.violated for text in counts),
        "undecided": sum(text.undecided for text in counts),
        "unparsable": sum(text.unparsable for text in counts),
        "unstated": sum(text.unstated for text in counts),
        "unchecked": sum(text.has_no_result for text in counts),
        "core_mean": sum(sizes) / max(1, len(sizes)),
        "core_max": max(sizes, default=0),
    }
