"""GSM8K's calculator annotations, `<<48/2=24>>`, and its last line, `#### 72`, read without `eval`.

The format is that of Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems"
(arXiv:2110.14168). Texts come from models and from the net, so reading is bounded and never raises:
whatever is longer than `MAX_CHARS`, raised to more than `MAX_POWER`, not linear in its unknowns, beyond the
`MAX_STEPS`-th annotation, or not arithmetic at all is counted as unparsable.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from objectives.batch import Batch
from objectives.errors import ObjectiveError

MAX_CHARS = 160
MAX_STEPS = 100
MAX_POWER = 9

# Postfix: numbers, one-letter unknowns, and the operators "+", "-", "*", "/", "neg".
Program = tuple[Fraction | str, ...]

_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_ANNOTATION = re.compile(r"<<([^<>]*)>>")
_ANSWER = re.compile(r"####\s*([-\u2212$0-9.,]*[0-9])")
_PLAIN_NUMBER = re.compile(r"[-\u2212$\s]*[0-9,]*(?:\.([0-9]*))?\s*(%?)\s*")
_ARITHMETIC = re.compile(r"[0-9a-z+\-*/(). ]+")
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"[$€£]", ""),
        (r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", ""),  # 1,000
        (r"[\u2212\u2013\u2014]", "-"),
        (r"[\u00d7\u00b7]", "*"),
        (r"\u00f7", "/"),
        (r"\^", "**"),
        (r"(?<=[0-9.)%]) *x *(?=[0-9.(])", "*"),  # 5 x 4: between two numbers, x is no unknown
        (r"([0-9]+\.?[0-9]*|\.[0-9]+) *%", r"(\1/100)"),
        (r"(?<=[0-9.)]) *(?=[a-z(])", "*"),  # 2x, 3(4+5)
        (r"(?<![0-9.])0+(?=[0-9])", ""),  # 007
    )
)


@dataclass(frozen=True, slots=True)
class Annotation:
    """``<<left=right>>``, and how far apart its sides may be.

    Attributes:
        left: what was calculated.
        right: the result written for it.
        tolerance: half a unit of the last decimal written on the right, as rounding allows; 0 where the
            right is an expression itself (``3/4``).
    """

    left: Program
    right: Program
    tolerance: Fraction


@dataclass(frozen=True, slots=True)
class Solution:
    """The annotations of one text in order, how many more could not be read, the answer after ``####``."""

    steps: tuple[Annotation, ...]
    num_unparsable: int
    answer: Fraction | None


def read_solutions(batch: Batch) -> list[Solution]:
    """Read the text of every datum of a batch."""
    if len(batch.texts_D) != batch.num_datums:
        raise ObjectiveError(
            f"A batch of {batch.num_datums} datums came with {len(batch.texts_D)} texts where a term reads "
            "one for each: decode the trained tokens of every datum into `texts_D`."
        )
    return [read_solution(text) for text in batch.texts_D]


def read_solution(text: str) -> Solution:
    r"""Read one worked solution.

    >>> solution = read_solution("He paid 20*5.5=$<<20*5.5=110>>110, not <<?=1>>.\n#### 1,110")
    >>> len(solution.steps), solution.num_unparsable, solution.answer
    (1, 1, Fraction(1110, 1))
    >>> solution.steps[0].left
    (Fraction(20, 1), Fraction(11, 2), '*')
    """
    found = _ANNOTATION.findall(text)
    steps = tuple(step for step in map(_read_annotation, found[:MAX_STEPS]) if step)
    answers = _ANSWER.findall(text)
    answer = _read_side(answers[-1]) if answers else None
    return Solution(steps, len(found) - len(steps), value_of(answer) if answer else None)


def value_of(program: Program) -> Fraction | None:
    """The exact value of a program; ``None`` where it has an unknown or divides by zero."""
    try:
        return fold(program, number=Fraction, unknown=Fraction)
    except (ValueError, ZeroDivisionError):
        return None


def fold(
    program: Program,
    number: Callable[[Fraction], Any],
    unknown: Callable[[str], Any],
    divide: Callable[[Any, Any], Any] = operator.truediv,
) -> Any:
    """Run a program over any algebra, given its numbers, its unknowns and its division.

    >>> fold((Fraction(5), Fraction(1, 2), "*"), number=float, unknown=float)
    2.5
    """
    binary = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": divide}
    stack: list[Any] = []
    for item in program:
        if isinstance(item, Fraction):
            stack.append(number(item))
        elif item == "neg":
            stack.append(-stack.pop())
        elif item in binary:
            right = stack.pop()
            stack.append(binary[item](stack.pop(), right))
        else:
            stack.append(unknown(item))
    return stack.pop()


def _read_annotation(text: str) -> Annotation | None:
    written = text.split("=")
    if len(written) != 2:
        return None
    left, right = _read_side(written[0]), _read_side(written[1])
    return Annotation(left, right, _tolerance(written[1])) if left and right else None


def _tolerance(written: str) -> Fraction:
    plain = _PLAIN_NUMBER.fullmatch(written)
    if plain is None:
        return Fraction(0)
    decimals, percent = plain.groups(default="")
    return Fraction(1, 2 * 10 ** (len(decimals) + 2 * len(percent)))


def _read_side(written: str) -> Program | None:
    if len(written) > MAX_CHARS:
        return None
    source = written.lower()
    for pattern, replacement in _REWRITES:
        source = pattern.sub(replacement, source)
    source = source.strip()
    if not _ARITHMETIC.fullmatch(source):
        return None
    try:
        return _postfix(ast.parse(source, mode="eval").body, source)
    except (SyntaxError, _NotArithmeticError):
        return None


def _postfix(node: ast.expr, source: str) -> Program:
    match node:
        case ast.Constant(value=int() | float()):
            # The digits as written: 0.1 is a tenth, not the nearest double.
            return (Fraction(source[node.col_offset : node.end_col_offset]),)
        case ast.Name(id=name) if len(name) == 1:
            return (name,)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as op, operand=operand):
            inner = _postfix(operand, source)
            return inner if isinstance(op, ast.UAdd) else _negated(inner)
        case ast.BinOp(left=ast.Constant() as base, op=ast.Pow(), right=ast.Constant(value=int(power))):
            if 1 <= power <= MAX_POWER:
                factor = _postfix(base, source)
                return factor + (power - 1) * (*factor, "*")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            operator_, operands = _OPERATORS[type(op)], (_postfix(left, source), _postfix(right, source))
            if _is_linear(operator_, *operands):
                return (*operands[0], *operands[1], operator_)
    raise _NotArithmeticError


def _negated(program: Program) -> Program:
    """A negative number stays one number, so that it is found again where it is used."""
    match program:
        case (Fraction() as number,):
            return (-number,)
    return (*program, "neg")


def _is_linear(operator_: str, left: Program, right: Program) -> bool:
    """Products of unknowns may keep a solver busy for minutes, whatever its timeout."""
    if operator_ == "*":
        return not (_has_unknown(left) and _has_unknown(right))
    return operator_ != "/" or not _has_unknown(right)


def _has_unknown(program: Program) -> bool:
    return any(isinstance(item, str) and item.isalpha() and len(item) == 1 for item in program)


class _NotArithmeticError(ValueError):
    """Python can parse it, but it is not arithmetic."""
