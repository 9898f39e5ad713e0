"""GSM8K's calculator annotations, `<<48/2=24>>`, and its last line, `#### 72`, read without `eval`.

The format is that of Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems" (arXiv:2110.14168).
Texts come from models and from the net, so reading is bounded and never raises. Counted as unparsable is what is
longer than `MAX_CHARS`, stands beyond the `MAX_STEPS`-th annotation, is no arithmetic, is not linear in the unknowns
x, y and z, or has a power other than of a number by one digit.
"""

from __future__ import annotations

import operator
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MAX_CHARS = 160
MAX_STEPS = 50

# Postfix: numbers, the unknowns x, y and z, and the operators "+", "-", "*", "/", "neg".
Program = tuple[Fraction | str, ...]

_UNKNOWNS = frozenset("xyz")
_DIGITS = frozenset(string.digits)
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2}
_ANNOTATION = re.compile(r"<<([^<>]*)>>")
_ANSWER = re.compile(r"####\s*([-\u2212$0-9.,]*[0-9])")
_PLAIN_NUMBER = re.compile(r"[-\u2212$\s]*[0-9,]*(?:\.([0-9]*))?\s*(%?)\s*")
_NUMBER = r"[0-9]+\.?[0-9]*|\.[0-9]+"
_TOKEN = re.compile(rf"{_NUMBER}|\S")


def _multiplied_out(power: re.Match[str]) -> str:
    return f"({'*'.join([power[1]] * int(power[2]))})"


_REWRITES = (
    (re.compile(r"[$€£]"), ""),
    (re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))"), ""),  # 1,000
    (re.compile(r"[\u2212\u2013\u2014]"), "-"),
    (re.compile(r"[\u00d7\u00b7]"), "*"),
    (re.compile(r"\u00f7"), "/"),
    (re.compile(r"(?<=[0-9.)%])\s*x\s*(?=[0-9.(])"), "*"),  # 5 x 4: between two numbers, x is no unknown
    (re.compile(rf"({_NUMBER})\s*%"), r"(\1/100)"),
    (re.compile(rf"({_NUMBER})\s*(?:\*\*|\^)\s*([1-9])(?![0-9.])"), _multiplied_out),
    (re.compile(r"(?<=[0-9.)])\s*(?=[a-z(])"), "*"),  # 2x, 3(4+5)
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
        return fold(program, number=Fraction, unknown=Fraction)  # Fraction("x") is a ValueError
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
    tokens = _TOKEN.findall(source)[::-1]
    try:
        program = _expression(tokens, binding=1)
    except _NotArithmeticError:
        return None
    return None if tokens else program


def _expression(tokens: list[str], binding: int) -> Program:
    """The program of the next tokens whose operators bind at least so tightly.

    Precedence climbing, at most two frames for each character. `ast.parse` would do the same, but CPython 3.11
    raises a SystemError when two threads are in it, and terms are prepared in threads.
    """
    program = _operand(tokens)
    while tokens and _BINDING.get(tokens[-1], 0) >= binding:
        operator_ = tokens.pop()
        right = _expression(tokens, _BINDING[operator_] + 1)
        # Products of unknowns can keep a solver busy for minutes, and it looks at no limit while it multiplies out.
        if operator_ in "*/" and _has_unknown(right) and (operator_ == "/" or _has_unknown(program)):
            raise _NotArithmeticError
        program = (*program, *right, operator_)
    return program


def _operand(tokens: list[str]) -> Program:
    token = tokens.pop() if tokens else ""
    if token == "(":
        program = _expression(tokens, binding=1)
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
        return (Fraction(token),)
    raise _NotArithmeticError


def _negated(program: Program) -> Program:
    """A negative number stays one number, so that it is found again where it is used."""
    match program:
        case (Fraction() as number,):
            return (-number,)
    return (*program, "neg")


def _has_unknown(program: Program) -> bool:
    return any(item in _UNKNOWNS for item in program)


class _NotArithmeticError(ValueError):
    """A text that is no arithmetic."""
