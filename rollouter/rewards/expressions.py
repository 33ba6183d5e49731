"""Evaluates expressions in untrusted text.

Some verifiers of reasoning-gym give the model's answer, or parts of a row, to `eval` or to sympy's `parse_expr`, which
run it as Python code, or to `Fraction`, which computes 1e999999999 exactly. `confine` makes them use what is here.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import ModuleType, SimpleNamespace
from typing import Any, Self

MAX_CHARACTERS = 2000
"""Length of an expression."""
MAX_BITS = 20_000
"""Size of an integer."""
MAX_DEPTH = 200
"""Nesting of an expression."""
MAX_EXPONENT = 100
"""Largest number as an exponent in an expression with symbols."""
MAX_TERMS = 500
"""Terms of an expression with symbols when it is expanded."""
MAX_CALLS = 8
"""Functions of one expression; sympy tries to combine them."""
FUNCTIONS = frozenset(
    {
        "Abs",
        "acos",
        "asin",
        "atan",
        "cos",
        "cosh",
        "cot",
        "coth",
        "csc",
        "exp",
        "ln",
        "log",
        "sec",
        "sin",
        "sinh",
        "sqrt",
    }
    | {"tan", "tanh"}
)
"""sympy's functions that an expression may call."""
_LARGE_EXPONENT = re.compile(r"[eE][+-]?[\d_]{4}")
"""In a number such as 1e-9999, which sympy computes exactly."""
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}


def confine(module: ModuleType) -> None:
    """Let a module's code use `evaluate`, `parse` and `BoundedFraction` for `eval`, `parse_expr` and `Fraction`."""
    import sympy

    guarded: dict[str, Any] = {"eval": evaluate}
    for name, value in vars(module).items():
        if value is sympy:
            guarded[name] = SimpleNamespace(**(vars(sympy) | {"parse_expr": parse}))
        elif value is sympy.parse_expr:
            guarded[name] = parse
        elif value is Fraction:
            guarded[name] = BoundedFraction
    for name, value in guarded.items():
        setattr(module, name, value)


class BoundedFraction(Fraction):
    """A fraction whose text has no exponent of more than three digits. Raises ValueError for others."""

    def __new__(cls, numerator: Any = 0, denominator: Any = None) -> Self:
        if isinstance(numerator, str) and _LARGE_EXPONENT.search(numerator):
            raise ValueError("the exponent is too large")
        return super().__new__(cls, numerator, denominator)


def evaluate(text: str) -> Any:
    """Return the value of a Python expression of numbers, texts, lists, tuples, dictionaries and arithmetic.

    Raises:
        ValueError: it contains something else, or is too large.
        ArithmeticError, TypeError: it has no value.
    """
    return _value(_parsed(text))


def parse(text: str, **options: Any) -> Any:
    """Return sympy's expression for a text of numbers, one-letter symbols, arithmetic and common functions.

    Args:
        options: those of `sympy.parse_expr`.

    Raises:
        ValueError: it contains something else, or is too large.
    """
    import sympy

    tree = _parsed(text)
    if sum(isinstance(node, ast.Call) for node in ast.walk(tree)) > MAX_CALLS:
        raise ValueError(f"the expression has more than {MAX_CALLS} functions")
    _terms(tree)
    return sympy.parse_expr(text, **options)


def _parsed(text: str) -> ast.expr:
    if len(text) > MAX_CHARACTERS or not text.isascii() or _LARGE_EXPONENT.search(text):
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} ASCII characters, and numbers up to 1e999")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("not an expression") from error
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ValueError(f"an expression has at most {MAX_DEPTH} levels")
    return tree


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() | str() | None as value):
            return value
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
        case ast.Tuple(elts=elements):
            return tuple(_value(element) for element in elements)
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_number(_value(operand)))
        case ast.BinOp(left=left, op=action, right=right) if type(action) in _BINARY:
            return _number(_combined(type(action), _number(_value(left)), _number(_value(right))))
    raise ValueError(f"{type(node).__name__} is not part of an expression")


def _combined(action: type[ast.operator], left: Any, right: Any) -> Any:
    if action in (ast.Pow, ast.LShift) and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if action is ast.Pow else left.bit_length() + right
        if bits > MAX_BITS:
            raise ValueError(f"a number has more than {MAX_BITS} bits")
    return _BINARY[action](left, right)


def _number(value: Any) -> int | float:
    if not isinstance(value, int | float):
        raise ValueError(f"arithmetic with {type(value).__name__}")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError(f"a number has more than {MAX_BITS} bits")
    return value


def _terms(node: ast.expr) -> tuple[int, int]:
    """Return how many terms numerator and denominator of an expression have at most when they are expanded.

    Raises:
        ValueError: sympy cannot compute it in little time, or it contains something else.
    """
    if not any(isinstance(one, ast.Name) for one in ast.walk(node)):
        _number(_value(node))  # sympy would run a text as code
        return 1, 1
    match node:
        case ast.Name(id=name) if name == "pi" or len(name) == 1:
            above, below = 1, 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            above, below = _terms(operand)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            _terms(argument)
            above, below = 1, 1
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            (above, below), (above_right, below_right) = _terms(left), _terms(right)
            above, below = above * below_right + above_right * below, below * below_right
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            (above, below), (above_right, below_right) = _terms(left), _terms(right)
            above, below = above * above_right, below * below_right
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            (above, below), (above_right, below_right) = _terms(left), _terms(right)
            above, below = above * below_right, below * above_right
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            most = _largest(right)
            above, below = (math.comb(terms + most - 1, most) for terms in _terms(left))
        case _:
            raise ValueError(f"{type(node).__name__} is not part of an expression with symbols")
    if max(above, below) > MAX_TERMS:
        raise ValueError(f"the expression has more than {MAX_TERMS} terms")
    return above, below


def _largest(exponent: ast.expr) -> int:
    """Return a bound of an exponent, which holds if its symbols cancel each other out.

    Raises:
        ValueError: it is larger than `MAX_EXPONENT`, or may be.
    """
    nodes = [node for node in ast.walk(exponent) if isinstance(node, ast.expr)]
    if not any(isinstance(node, ast.Name) for node in nodes):
        most = math.ceil(abs(_number(_value(exponent))))
    else:
        _terms(exponent)
        numbers = [abs(_number(node.value)) for node in nodes if isinstance(node, ast.Constant)]
        has_power = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) for node in nodes)
        most = math.ceil(math.prod(max(1, one) for one in numbers)) if not has_power else MAX_EXPONENT + 1
    if most > MAX_EXPONENT:
        raise ValueError(f"an exponent is larger than {MAX_EXPONENT}")
    return most
