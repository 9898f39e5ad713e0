"""Constraints on the values that an answer states: SMT-LIB text or Z3 expressions, checked by Z3.

Constraints come from data files, and values come from models, so the work per datum is bounded. Constraints are
formulas without quantifiers over Bool, Int, Real and String constants; the operators are logic, comparison, `ite`,
`+`, `-`, `*`, `/`, `div`, `mod`, `rem`, `abs`, and conversions between Int and Real. Larger or other formulas are
errors, because Z3 ignores its limits while it expands products and macros. A check ends after `MAX_SOLVER_STEPS`,
which do not depend on the machine, or after `TIMEOUT_MS`. Only ``execution: process`` with a ``timeout_s`` ends a
call that ignores both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import z3

from objectives.errors import ObjectiveError

MAX_CHARS = 20_000
MAX_DEPTH = 100
# Maximum size of the formulas of a datum with shared parts copied and products expanded.
MAX_SIZE = 20_000
# Maximum size in bits of a stated number.
MAX_BITS = 1_000
MAX_SOLVER_STEPS = 200_000
TIMEOUT_MS = 10_000

Expression: TypeAlias = Any  # z3's annotations do not describe the types of its operators.
Value = bool | int | float | Fraction | Decimal | str
Values = Mapping[str, Value] | Iterable[tuple[str, Value]]
"""Values by name. A name may occur several times in a list of pairs; different values of a name contradict."""

_TOKEN = re.compile(r'"(?:[^"]|"")*"|\|[^|]*\||;[^\n]*|[()]|[^\s()";|]+|.', re.DOTALL)
_COMMANDS = ("assert", "declare-const", "declare-fun", "define-const", "define-fun", "set-logic", "set-info")
_SORTS = frozenset({"Bool", "Int", "Real", "String"})
_PRODUCTS = frozenset({z3.Z3_OP_MUL, z3.Z3_OP_DIV, z3.Z3_OP_IDIV, z3.Z3_OP_MOD, z3.Z3_OP_REM})
_OPERATORS = _PRODUCTS | {
    *(z3.Z3_OP_TRUE, z3.Z3_OP_FALSE, z3.Z3_OP_EQ, z3.Z3_OP_DISTINCT, z3.Z3_OP_ITE, z3.Z3_OP_AND, z3.Z3_OP_OR),
    *(z3.Z3_OP_IFF, z3.Z3_OP_XOR, z3.Z3_OP_NOT, z3.Z3_OP_IMPLIES, z3.Z3_OP_ANUM, z3.Z3_OP_LE, z3.Z3_OP_GE),
    *(z3.Z3_OP_LT, z3.Z3_OP_GT, z3.Z3_OP_ADD, z3.Z3_OP_SUB, z3.Z3_OP_UMINUS, z3.Z3_OP_TO_REAL, z3.Z3_OP_TO_INT),
    *(z3.Z3_OP_IS_INT, z3.Z3_OP_ABS),
}


class Checked(NamedTuple):
    """Numbers of constraints by the result of the check.

    Attributes:
        violated: constraints that the stated values make false, plus the smallest number of other constraints that must
            be dropped so that the rest can hold for some values of the names that the answer does not state.
        held: constraints that the stated values make true.
        unstated: constraints that can hold, but depend on a name that the answer does not state.
        undecided: constraints that depend on such a name, if Z3 reaches a limit.
    """

    violated: int
    held: int
    unstated: int
    undecided: int


class Constraint(NamedTuple):
    """Formula of one constraint and its names."""

    formula: Expression
    names: dict[str, Expression]


def parse_constraints(text: str, context: z3.Context) -> list[Constraint]:
    """Parse the assertions of an SMT-LIB text.

    Raises:
        ObjectiveError: the text is not SMT-LIB, or not within the limits of this module.

    >>> [constraint.formula for constraint in parse_constraints("(declare-const x Int)(assert (> x 1))", z3.Context())]
    [x > 1]
    """
    _check_text(text)
    try:
        assertions: Any = z3.parse_smt2_string(_TOKEN.sub(_escape, text), ctx=context)
    except z3.Z3Exception as error:
        reason = error.args[0] if error.args else ""
        reason = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ObjectiveError(f"they are not SMT-LIB ({' '.join(reason.split())}); correct the text") from error
    return make_constraints(list(assertions), context)


def make_constraints(formulas: object, context: z3.Context) -> list[Constraint]:
    """Find the names of formulas, and check that the formulas are within the limits of this module.

    Raises:
        ObjectiveError: they are not Boolean Z3 expressions of the context, too large, or have unsupported operators.
    """
    if not isinstance(formulas, Sequence) or not all(isinstance(formula, z3.BoolRef) for formula in formulas):
        raise ObjectiveError(f"they are {str(formulas)[:80]!r}; return a list of Boolean Z3 expressions")
    if any(formula.ctx != context for formula in formulas):
        raise ObjectiveError("a constraint belongs to another Z3 context; pass the context to z3.Int and the like")
    seen: dict[int, tuple[int, dict[str, Expression]]] = {}
    constraints = []
    total = 0
    for formula in formulas:
        size, names = _measure(formula, seen)
        total += size
        if total > MAX_SIZE:
            raise ObjectiveError(
                f"their size is over {MAX_SIZE} once products are expanded; split products, or state fewer constraints"
            )
        constraints.append(Constraint(formula, names))
    return constraints


def check_values(constraints: Sequence[Constraint], values: Values, context: z3.Context) -> Checked:
    """Count the constraints that the stated values violate, satisfy and leave open; see `Checked`.

    A constraint is violated if it depends on a name with two different values, on a value of the wrong type (2.5 for an
    Int), or on a number of more than `MAX_BITS`. It is also violated if all its names are stated and its truth depends
    on a division by zero.

    >>> context = z3.Context()
    >>> rules = parse_constraints("(declare-const x Int)(declare-const y Int)(assert (> x y))(assert (< x 9))", context)
    >>> check_values(rules, {"x": 3}, context)
    Checked(violated=0, held=1, unstated=1, undecided=0)
    """
    stated = group_values(values)
    num_violated = num_held = 0
    open_formulas = []
    for formula, names in constraints:
        known = {name: names[name] for name in names.keys() & stated.keys()}
        replacements = [(known[name], _constant_of(known[name], stated[name])) for name in known]
        if any(constant is None for _, constant in replacements):
            num_violated += 1
            continue
        reduced = z3.simplify(z3.substitute(formula, *replacements))
        if z3.is_true(reduced):
            num_held += 1
        elif z3.is_false(reduced) or known.keys() == names.keys():  # Z3 leaves a division by zero as it is.
            num_violated += 1
        else:
            open_formulas.append(reduced)
    conflicts = _min_conflicts(open_formulas, context)
    if conflicts is None:
        return Checked(num_violated, num_held, 0, len(open_formulas))
    return Checked(num_violated + conflicts, num_held, len(open_formulas) - conflicts, 0)


def group_values(values: object) -> dict[str, set[Fraction | str]]:
    """Return the different values of each name, with exact numbers.

    Raises:
        ObjectiveError: the values are not a mapping or pairs of a name and a value.

    >>> group_values([("x", 0.5), ("x", Fraction(1, 2)), ("day", "Monday")])
    {'x': {Fraction(1, 2)}, 'day': {'Monday'}}
    """
    groups: dict[str, set[Fraction | str]] = {}
    try:
        pairs: Any = values.items() if isinstance(values, Mapping) else values
        for name, value in pairs:
            if not isinstance(name, str) or not isinstance(value, Value):
                raise TypeError(f"{name!r}: {value!r}")
            groups.setdefault(name, set()).add(_exact(value))
    except (TypeError, ValueError) as error:
        raise ObjectiveError(
            f"the extractor returned {str(values)[:80]!r} ({error}); return a Solution, or values by name as a dict or "
            "a list of pairs"
        ) from error
    return groups


def _exact(value: Value) -> Fraction | str:
    """Return a number as a fraction, 0.1 as 1/10, and other values as text, because True == 1.

    Numbers that are not finite, and numbers so large that `_constant_of` would refuse them, become text, too.
    """
    match value:
        case bool():
            return str(value).lower()
        case str():
            return value
        case int() | Fraction():
            return Fraction(value)
    number = Decimal(str(value))
    return Fraction(number) if number.is_finite() and abs(number.adjusted()) < MAX_BITS else str(value)


def _constant_of(name: Expression, values: set[Fraction | str]) -> Expression | None:
    """Return the stated value as a constant of the name's sort; None if ambiguous, too large or of another type."""
    if len(values) > 1:
        return None
    (value,) = values
    context = name.ctx
    match name.sort().name(), value:
        case "Bool", "true" | "false":
            return z3.BoolVal(value == "true", context)
        case "String", str():
            return z3.StringVal(value, context)
        case "Int" | "Real", Fraction():
            if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
                return None
            if name.is_int():
                return z3.IntVal(int(value), context) if value.denominator == 1 else None
            return z3.RealVal(str(value), context)
    return None


def _min_conflicts(formulas: Sequence[Expression], context: z3.Context) -> int | None:
    """Return the smallest number of formulas to drop so that the others can all hold; None if Z3 reaches a limit."""
    if not formulas:
        return 0
    optimizer = z3.Optimize(ctx=context)
    optimizer.set("rlimit", MAX_SOLVER_STEPS)
    optimizer.set("timeout", TIMEOUT_MS)
    for formula in formulas:
        optimizer.add_soft(formula)
    if optimizer.check() != z3.sat:
        return None
    model = optimizer.model()
    return sum(not z3.is_true(model.evaluate(formula, model_completion=True)) for formula in formulas)


def _check_text(text: str) -> None:
    """Check the length, the nesting and the commands of an SMT-LIB text, before Z3 reads it."""
    if len(text) > MAX_CHARS:
        raise ObjectiveError(f"they have {len(text)} characters; use at most {MAX_CHARS}")
    tokens = [token for token in _TOKEN.findall(text) if not token.isspace() and not token.startswith(";")]
    depth = 0
    for index, token in enumerate(tokens):
        if token == "(":
            depth += 1
            command = tokens[index + 1 : index + 5]
            if depth == 1 and command[:1] and command[0] not in _COMMANDS:
                raise ObjectiveError(f"the command {command[0]!r} is not allowed; use {', '.join(_COMMANDS)}")
            # Macros can grow exponentially.
            if depth == 1 and command[:1] == ["define-fun"] and command[2:] != ["(", ")"]:
                raise ObjectiveError(f"the function {' '.join(command[1:2])!r} has parameters; define constants only")
            if depth > MAX_DEPTH:
                raise ObjectiveError(f"they are nested deeper than {MAX_DEPTH} parentheses; flatten them")
        elif token == ")":
            depth -= 1


def _escape(token: re.Match[str]) -> str:
    """Return a token, in a text with escapes for characters beyond ASCII, because Z3 reads each byte as a character."""
    if not token[0].startswith('"'):
        return token[0]
    return re.sub(r"[^\x00-\x7f]", lambda character: f"\\u{{{ord(character[0]):x}}}", token[0])


def _measure(root: Expression, seen: dict[int, tuple[int, dict[str, Expression]]]) -> tuple[int, dict[str, Expression]]:
    """Return the size of a formula, with shared parts copied and products expanded, and its names.

    Args:
        seen: results by the ID of an expression; the results of this formula are added.

    Raises:
        ObjectiveError: an operator or a sort is not supported.
    """
    stack = [root]
    while stack:
        expression = stack[-1]
        if expression.get_id() in seen:
            stack.pop()
            continue
        _check_operator(expression)
        children = expression.children()
        if missing := [child for child in children if child.get_id() not in seen]:
            stack += missing
            continue
        sizes = [seen[child.get_id()][0] for child in children]
        names = {name: constant for child in children for name, constant in seen[child.get_id()][1].items()}
        kind = expression.decl().kind()
        if kind == z3.Z3_OP_UNINTERPRETED:
            names = {expression.decl().name(): expression}
        # A product of sums expands to a sum of products; `distinct` compares all pairs.
        if kind in _PRODUCTS:
            size = math.prod(1 + size for size in sizes)
        else:
            size = 1 + sum(sizes) * (len(sizes) if kind == z3.Z3_OP_DISTINCT else 1)
        seen[expression.get_id()] = min(size, MAX_SIZE + 1), names
        stack.pop()
    return seen[root.get_id()]


def _check_operator(expression: Expression) -> None:
    if z3.is_app(expression) and expression.sort().name() in _SORTS:
        kind = expression.decl().kind()
        is_name = kind == z3.Z3_OP_UNINTERPRETED and expression.num_args() == 0
        if kind in _OPERATORS or is_name or z3.is_string_value(expression):
            return
    raise ObjectiveError(
        f"they use {str(expression)[:60]!r}, which is not supported; use Bool, Int, Real and String constants, logic, "
        "comparisons, ite, + - * / div mod rem abs, and conversions between Int and Real"
    )
