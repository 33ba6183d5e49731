"""Verifiers of reasoning-gym, which evaluate text, with text from models and rows that would run code or take hours."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from rollouter.rewards.expressions import BoundedFraction, evaluate, parse
from rollouter.rewards.functions import _score_answer, _score_entry
from tests.fakes.hostile import texts

CODE = "__import__('sys').__dict__.__setitem__('ran', 1) or 1"
HOSTILE = (
    *(CODE, f"[{CODE}]", f"({CODE})*1", repr(CODE), "9**9**9**9", "1e999999999", "1e-9_999_999", "((x+9)**99)**99"),
    *("x**(x-x+9**9**9)", "9**(x-x+10*10*10*10)", "[[1]]" * 50, "(" * 3000, "10" * 3000, "+" * 1999 + "1", "{" * 500),
)
TASKS = sorted(DATASETS.keys() - {"composite"})
"""All but that which only mixes others."""


@pytest.fixture
def ran() -> Any:
    """Return a function that tells whether `CODE` has run since its last call."""
    return lambda: vars(sys).pop("ran", None) is not None


def replaced(value: Any) -> Any:
    """Return a row's entry with `CODE` for each of its texts."""
    if isinstance(value, dict):
        return {key: one if key == "source_dataset" else replaced(one) for key, one in value.items()}
    if isinstance(value, list):
        return [replaced(one) for one in value]
    return CODE if isinstance(value, str) else value


def evaluates(task: str) -> bool:
    source = inspect.getsource(sys.modules[DATASETS[task][0].__module__])
    return re.search(r"\b(eval\(|sympy|Fraction)", source) is not None


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "tasks",
    [pytest.param(TASKS, id="all", marks=pytest.mark.slow), pytest.param([*filter(evaluates, TASKS)], id="evaluating")],
)
def test_no_task_runs_text_as_code_or_takes_long(ran: Any, tasks: Iterable[str]) -> None:
    """What tasks generate, and their score of the right answer, stay the same."""
    for task in tasks:
        entry = reasoning_gym.create_dataset(task, size=1, seed=1)[0]
        right = reasoning_gym.get_score_answer_fn(task)(entry["answer"], entry)
        assert _score_answer(task)(entry["answer"], entry) == right
        assert reasoning_gym.create_dataset(task, size=1, seed=1)[0] == entry
        for text in HOSTILE:
            _score_entry(text, entry)
            assert not ran(), (task, text)
        damaged = replaced(entry)
        for text in (CODE, entry["answer"]):
            try:
                _score_entry(text, damaged)
            except Exception as error:  # noqa: BLE001  the row is no entry of this task any more
                assert not isinstance(error, SystemError | MemoryError)
            assert not ran(), (task, text)


def test_what_tasks_evaluate_keeps_its_value() -> None:
    for text in ("[1, 2.5, -3]", "(1, 'a', [])", "{'a': [1]}", "(0x1f << 2) & ~3 | 1", "7 // 2 % 2 ** 3", "None"):
        assert evaluate(text) == eval(text)
    for text in (
        "(25 - 3) * 4 / 8",
        "x**2*exp(-x)/3 + C",
        "sin(2*x)**2 - 3*pi",
        "-x**99 + 2**x + 10**(2*x)",
        "sqrt(8)",
    ):
        assert parse(text) == __import__("sympy").parse_expr(text)
    assert parse("x", local_dict={"x": 5}) == 5
    assert BoundedFraction("3/4") == BoundedFraction(3, 4) == 0.75


@pytest.mark.parametrize("text", ["f(x)", "x.real", "x[0]", "lambda: 1", "'1'", "[x]", "sin(x, evaluate=1)", "eval(1)"])
def test_other_python_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"part of an expression|arithmetic with"):
        parse(text)


@given(texts())
def test_any_text_is_evaluated_or_refused(text: str) -> None:
    for function in (evaluate, parse):
        try:
            function(text)
        except (ValueError, ArithmeticError, TypeError):
            pass
        except SyntaxError as error:  # sympy's own tokenizer
            assert function is parse, error


@given(
    st.recursive(
        st.sampled_from(["x", "9", "2.5", "99"]),
        lambda part: st.tuples(part, st.sampled_from("+-*/"), part).map("".join),
        max_leaves=20,
    )
)
def test_sums_and_products_have_sympys_value(text: str) -> None:
    assert parse(text) == __import__("sympy").parse_expr(text)


def test_an_answer_that_the_verifier_cannot_convert_is_wrong_and_a_damaged_row_is_an_error() -> None:
    entry = reasoning_gym.create_dataset("prime_factorization", size=1, seed=1)[0]
    assert _score_entry("two times three", entry) == 0
    with pytest.raises(ValueError, match="invalid literal"):
        _score_entry("two times three", entry | {"answer": "none"})
