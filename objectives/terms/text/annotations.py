"""Parser of GSM8K's calculator annotations, `<<48/2=24>>`, and final answers, `#### 72`, without `eval`.

The format is that of Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems" (arXiv:2110.14168).
A step is one parsed annotation. Texts come from models and from the web, so parsing has bounded cost and never raises.
An annotation is counted as unparsable if one of its sides is longer than `MAX_CHARS`, it comes after the first
`MAX_STEPS` annotations, it does not have exactly one ``=``, it is not arithmetic, it is not linear in the unknowns x, y
and z, or it has a power other than a number to an exponent from 1 to 9.
"""

from __future__ import annotations

import operator
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, Self, TypeVar

MAX_CHARS = 160
MAX_STEPS = 50

# An expression in postfix order: numbers, the unknowns x, y and z, and the operators "+", "-", "*", "/", "neg".
Program = tuple[Fraction | str, ...]

_UNKNOWNS = frozenset("xyz")
_DIGITS = frozenset(string.digits)
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_ANNOTATION = re.compile(r"<<([^<>]*)>>")
_ANSWER = re.compile(r"####\s*([^\n#]*)")
# A number, fraction or percentage that does not start a range or further arithmetic.
_STATED = re.compile(
    r"([-+\u2212\u2013\u2014$€£\s]*(?>[0-9.,]*[0-9])(?:\s*/\s*(?>[0-9.,]*[0-9])|\s*%)?+)"
    r"(?!\s*[-+*/^\u2212\u2013\u2014]+\s*[$€£]*\s*[0-9])"
)
_PLAIN_NUMBER = re.compile(r"[-+\u2212\u2013\u2014$€£\s]*[0-9,]*(?:\.([0-9]*))?\s*(%?)[$€£\s]*")
_NUMBER = r"[0-9]+\.?[0-9]*|\.[0-9]+"
_TOKEN = re.compile(rf"(?:{_NUMBER})(?:\s*%)?|\S")


def _expand_power(power: re.Match[str]) -> str:
    return f"({'*'.join([power[1]] * int(power[2]))})"


_REWRITES = (
    (re.compile(r"[$€£]"), ""),
    (re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))"), ""),  # 1,000
    (re.compile(r"[\u2212\u2013\u2014]"), "-"),
    (re.compile(r"[\u00d7\u00b7]"), "*"),
    (re.compile(r"\u00f7"), "/"),
    (re.compile(r"(?<=[0-9.)%])\s*x\s*(?=[0-9.(])"), "*"),  # 5 x 4: between two numbers, x is a multiplication sign
    (re.compile(rf"({_NUMBER})\s*(?:\*\*|\^)\s*([1-9])(?![0-9.])"), _expand_power),
    (re.compile(r"(?<=[0-9.)%])\s*(?=[a-z(])"), "*"),  # 2x, 3(4+5)
)


@dataclass(frozen=True, slots=True)
class Annotation:
    """Annotation ``<<left=right>>`` and the allowed difference of its sides.

    Attributes:
        left: the calculation.
        right: its stated result.
        tolerance: rounding tolerance, half a unit of the last digit if the right side is a number, with or without a
            sign, currency or percent sign; 0 if it is another expression (``3/4``).
    """

    left: Program
    right: Program
    tolerance: Fraction


@dataclass(frozen=True, slots=True)
class Solution:
    """Parsed annotations of one text in order, number of unparsable ones, and the answer after the last ``####``.

    The answer is None if the text states none, or an answer that cannot be parsed.
    """

    steps: tuple[Annotation, ...]
    num_unparsable: int
    answer: Fraction | None


def read_solution(text: str) -> Solution:
    r"""Parse one worked solution.

    >>> solution = read_solution("He paid 20*5.5=$<<20*5.5=110>>110, not <<?=1>>.\n#### 1,110")
    >>> len(solution.steps), solution.num_unparsable, solution.answer
    (1, 1, Fraction(1110, 1))
    >>> solution.steps[0].left
    (Fraction(20, 1), Fraction(11, 2), '*')
    """
    annotations = _ANNOTATION.findall(text)
    steps = tuple(step for step in map(_read_annotation, annotations[:MAX_STEPS]) if step)
    answers = _ANSWER.findall(text)
    stated = _STATED.match(answers[-1]) if answers else None
    answer = _read_side(stated[1]) if stated else None
    return Solution(steps, len(annotations) - len(steps), evaluate_program(answer) if answer else None)


def step_spans(text: str) -> list[tuple[int, int]]:
    """Return start and end of each annotation in `Solution.steps` of a text, from ``<<`` to ``>>``.

    >>> step_spans("so <<1+1=2>> and <<?>> and <<2*2=4>>")
    [(3, 12), (27, 36)]
    """
    matches = [*_ANNOTATION.finditer(text)][:MAX_STEPS]
    return [match.span() for match in matches if _read_annotation(match[1])]


def evaluate_program(program: Program) -> Fraction | None:
    """Compute the exact value of a program; None if it has an unknown or divides by zero."""
    try:
        return fold(program, number=Fraction, unknown=Fraction)  # Fraction("x") is a ValueError
    except (ValueError, ZeroDivisionError):
        return None


class Number(Protocol):
    """Number or symbolic expression."""

    def __add__(self, other: Self, /) -> Self: ...

    def __sub__(self, other: Self, /) -> Self: ...

    def __mul__(self, other: Self, /) -> Self: ...

    def __truediv__(self, other: Self, /) -> Self: ...

    def __neg__(self) -> Self: ...


NumberT = TypeVar("NumberT", bound=Number)


def fold(
    program: Program,
    number: Callable[[Fraction], NumberT],
    unknown: Callable[[str], NumberT],
    divide: Callable[[NumberT, NumberT], NumberT] = operator.truediv,
) -> NumberT:
    """Evaluate a program with another type of number, such as Z3 expressions.

    Args:
        number: converts a number.
        unknown: converts the name of an unknown.
        divide: divides two converted values.

    >>> fold((Fraction(5), Fraction(1, 2), "*"), number=float, unknown=float)
    2.5
    """
    binary: dict[str, Callable[[NumberT, NumberT], NumberT]] = {
        "+": operator.add,
        "-": operator.sub,
        "*": operator.mul,
        "/": divide,
    }
    stack: list[NumberT] = []
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
    sides = text.split("=")
    if len(sides) != 2:
        return None
    left, right = _read_side(sides[0]), _read_side(sides[1])
    return Annotation(left, right, _tolerance(sides[1])) if left and right else None


def _tolerance(side: str) -> Fraction:
    match = _PLAIN_NUMBER.fullmatch(side)
    if match is None:
        return Fraction(0)
    decimals, percent = match.groups(default="")
    return Fraction(1, 2 * 10 ** (len(decimals) + 2 * len(percent)))


def _read_side(side: str) -> Program | None:
    if len(side) > MAX_CHARS:
        return None
    source = side.lower()
    for pattern, replacement in _REWRITES:
        source = pattern.sub(replacement, source)
    tokens = _TOKEN.findall(source)[::-1]
    try:
        program = _expression(tokens, min_precedence=1)
    except _NotArithmeticError:
        return None
    return None if tokens else program


def _expression(tokens: list[str], min_precedence: int) -> Program:
    """Parse and remove tokens until the next one is not an operator with precedence of at least ``min_precedence``.

    In valid arithmetic, a weaker operator, a ``)`` or the end follows. This is precedence climbing. The list of tokens
    is reversed, so the next token is its last item.

    The recursion depth is at most two frames per character. `ast.parse` is not used, because CPython 3.11 raises a
    SystemError when two threads call it at once, and terms are prepared in threads.
    """
    program = _operand(tokens)
    while tokens and _PRECEDENCE.get(tokens[-1], 0) >= min_precedence:
        operator_ = tokens.pop()
        right = _expression(tokens, _PRECEDENCE[operator_] + 1)
        # Nonlinear terms can keep Z3 busy for minutes, because Z3 ignores its time limit while it expands products.
        if operator_ in "*/" and _has_unknown(right) and (operator_ == "/" or _has_unknown(program)):
            raise _NotArithmeticError
        program = (*program, *right, operator_)
    return program


def _operand(tokens: list[str]) -> Program:
    """Parse the next number, unknown or parenthesized expression, with its signs."""
    token = tokens.pop() if tokens else ""
    if token == "(":
        program = _expression(tokens, min_precedence=1)
        if not tokens or tokens.pop() != ")":
            raise _NotArithmeticError
        return program
    if token == "+":
        return _operand(tokens)
    if token == "-":
        return _negated(_operand(tokens))
    if token in _UNKNOWNS:
        return (token,)
    if len(token) > 1 or token in _DIGITS:
        number = token.rstrip("%")  # 20% is one number, so that it equals an earlier result of 20%
        return (Fraction(number) / (1 if number == token else 100),)
    raise _NotArithmeticError


def _negated(program: Program) -> Program:
    """Negate a program; a negative number stays one number: `topology` connects annotations by equal numbers."""
    match program:
        case (Fraction() as number,):
            return (-number,)
    return (*program, "neg")


def _has_unknown(program: Program) -> bool:
    return any(item in _UNKNOWNS for item in program)


class _NotArithmeticError(ValueError):
    """The text is not arithmetic."""
