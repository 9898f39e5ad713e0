"""Python's operators on tensors and plain numbers, without what else they do in Python."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

_MAX_INT = 2**53
_MAX_SIZES = 64
_POWERS = (operator.pow, operator.ipow)


def checked_arithmetic(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` for tensors and numbers, and for joining shapes; texts and lists could be multiplied at will."""

    def compute(*args: Any) -> Any:
        if any(isinstance(each, Tensor) for each in args):
            if all(isinstance(each, Tensor | int | float) for each in args):
                return function(*args)
        elif all(isinstance(each, int | float) for each in args):
            _check_power(function, args)
            return _small(function(*args))
        elif function in (operator.add, operator.iadd, operator.eq, operator.ne) and all(
            isinstance(each, tuple) and len(each) <= _MAX_SIZES for each in args
        ):
            return function(*args)
        kinds = " and ".join(type(each).__name__ for each in args)
        raise TypeError(f"{function.__name__} of {kinds} is not offered: use tensors and numbers")

    return compute


def _check_power(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if function in _POWERS and all(isinstance(each, int) for each in args):
        base, exponent = args
        if abs(base).bit_length() * abs(exponent) > _MAX_INT.bit_length():
            raise OverflowError(f"{base} ** {exponent} is beyond {_MAX_INT}")


def _small(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > _MAX_INT:
        raise OverflowError(f"a number is beyond {_MAX_INT}")
    return value
