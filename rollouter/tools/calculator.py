"""A calculator tool: arithmetic in Python's notation, exact for integers."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollouter.tools.base import BaseTool, ToolError

LONGEST = 200
"""Maximum length of an expression, in characters."""
MAX_BITS = 1024
"""Maximum size of all integers, including intermediate results: about 300 digits. It bounds the work and the answer."""
_SIGNS = re.compile(r"[\s0-9.eE+\-*/%()]*")


class Calculator(BaseTool[None]):
    """`{"expression": "3 * (4 + 5)"}` gives `27`."""

    def __init__(self, name: str = "calculator", argument: str = "expression") -> None:
        """Set the names of the tool and of its argument. Shorter names save tokens in small models."""
        self._name = name
        self._argument = argument

    def function_schema(self) -> Mapping[str, Any]:
        about = {"type": "string", "description": "An arithmetic expression: + - * / // % ** ( )"}
        return {
            "type": "function",
            "function": {
                "name": self._name,
                "description": "Calculate an arithmetic expression.",
                "parameters": {
                    "type": "object",
                    "properties": {self._argument: about},
                    "required": [self._argument],
                },
            },
        }

    async def execute(self, state: None, arguments: Mapping[str, Any]) -> str:  # type: ignore[override]  # no kwargs of a row
        return calculate(arguments[self._argument])


def calculate(expression: str) -> str:
    """Return the value of `expression`: integers in full, other numbers with up to 12 significant digits.

    Raises:
        ToolError: the expression is invalid, or has no value, or its value is too large.
    """
    if len(expression) > LONGEST:
        raise ToolError(f"the expression is longer than {LONGEST} characters")
    if _SIGNS.fullmatch(expression) is None:
        raise ToolError("use only numbers and + - * / // % ** ( )")
    try:
        value = _value(ast.parse(" ".join(expression.split()), mode="eval").body)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the number is too large") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("not an arithmetic expression") from None
    if isinstance(value, int):
        return str(value)
    return f"{value + 0.0:.12g}"  # adding 0.0 turns -0.0 into 0.0


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(sign)](_value(left), _value(right)))
    raise ValueError


def _bounded(value: int | float) -> int | float:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise OverflowError
    elif not math.isfinite(value):
        raise OverflowError
    return value


def _divide(left: int | float, right: int | float) -> int | float:
    if isinstance(left, int) and isinstance(right, int) and right and left % right == 0:
        return left // right
    return left / right


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if abs(base) > 1 and base.bit_length() * exponent > 2 * MAX_BITS:
            raise OverflowError
        return base**exponent
    result: int | float | complex = base**exponent
    if isinstance(result, complex):
        raise ToolError("a root of a negative number")
    return result


_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
