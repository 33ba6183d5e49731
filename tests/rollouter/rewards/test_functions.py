"""Reward functions: loading, calls, checks of results, and deadlines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.sections.data import ReasoningGymConfig
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.core.failures import ConfigError, UserCodeError
from asyncrl.core.ports import Score
from asyncrl.core.types import Prompt
from rollouter.prompts.dataset import GymRows, parse_row
from rollouter.rewards import functions
from rollouter.rewards.functions import RewardFunction, load_reward_function, load_reward_functions
from rollouter.rewards.scorer import FunctionScorer
from tests.fakes.conversations import answer, decode
from tests.fakes.hostile import texts, values
from tests.fakes.parts import make_prompt


def scorer(function: RewardFunction, *, timeout_s: float = 60.0, max_concurrency: int = 8) -> FunctionScorer:
    return FunctionScorer(function, decode, timeout_s=timeout_s, capacity=anyio.CapacityLimiter(max_concurrency))


def own(call: Any, *, batch: bool = False, **kwargs: Any) -> RewardFunction:
    return RewardFunction("my:reward", call, kwargs, batch=batch)


async def rewards(function: RewardFunction, prompt: Prompt, *texts: str) -> list[float]:
    return [score.reward for score in await scorer(function).score(prompt, [answer(text) for text in texts])]


def loaded(**reward: Any) -> RewardFunction:
    return load_reward_function(RewardConfig(**reward))


# ------------------------------------------------------------------------------------------------ built-ins


async def test_exact_match() -> None:
    plain = loaded()
    prompt = make_prompt(1, ground_truth=42)
    assert await rewards(plain, prompt, " 42\n", "42.", "41") == [1.0, 0.0, 0.0]
    assert await rewards(plain, prompt, "6*7=#42", "#### 42 ", "#42 or #43") == [1.0, 1.0, 0.0]
    pattern = loaded(kwargs={"pattern": r"=(\d+)"})
    assert await rewards(pattern, prompt, "1=1 so =42", "=42 or =43", "42") == [1.0, 0.0, 0.0]
    with pytest.raises(UserCodeError, match=r"no reward_model\.ground_truth"):
        await rewards(plain, make_prompt(1), "42")


async def test_math_verify_scores_in_the_main_thread_of_a_process() -> None:
    """One of the answers would keep sympy busy for years."""
    function = loaded(function="math_verify", kwargs={"timeout_s": 1})
    prompt = make_prompt(1, ground_truth="\\frac{1}{2}")
    texts = ("So it is $0.5$.", "It is $\\frac{2}{3}$", "no idea", "$9^{9^{9^{9}}}$")
    assert await rewards(function, prompt, *texts) == [1.0, 0.0, 0.0, 0.0]


async def test_reasoning_gym_scores_through_the_task() -> None:
    rows = GymRows(ReasoningGymConfig(task="chain_sum", train_size=2, val_size=1), split="train", seed=0)
    row = parse_row(rows.row(0), "here")
    prompt = make_prompt(1, ground_truth=row.ground_truth, extra_info=row.extra_info)
    function = loaded(function="reasoning_gym")
    right = str(row.ground_truth)
    scored = await rewards(function, prompt, right, f"well <answer>{right}</answer>", "<answer>none</answer>")
    assert scored[:2] == [1.0, 1.0]
    assert scored[2] < 1.0
    with pytest.raises(UserCodeError, match=r"no extra_info\.entry"):
        await rewards(function, make_prompt(1), "1")


# ------------------------------------------------------------------------------------------------ loading


MODULE = """
import asyncio

def good(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return {"score": float(solution_str == ground_truth) + bonus, "length": len(solution_str), "pred": solution_str}

async def later(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return len(solution_str)

def batch(data_sources, solution_strs, ground_truths, extra_infos=None):
    return [len(text) for text in solution_strs]

def narrow(solution_str):
    return 1.0

class JudgeScorer:
    @staticmethod
    def score(**fields):
        return 2.0

constant = 3
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "my_judge.py"
    path.write_text(MODULE)
    return path


async def test_functions_can_be_loaded_from_a_file(module: Path) -> None:
    prompt = make_prompt(1, ground_truth="ab")
    good = loaded(function=f"{module}:good", kwargs={"bonus": 0.5})
    scores = await scorer(good).score(prompt, [answer("ab"), answer("x")])
    assert scores == [Score(1.5, {"length": 2.0}, answer="ab"), Score(0.5, {"length": 1.0}, answer="x")], (
        "a text `pred`"
    )
    assert await rewards(loaded(function=f"{module}:later"), prompt, "abc") == [3.0]
    assert await rewards(loaded(function=f"{module}:JudgeScorer.score"), prompt, "abc") == [2.0]
    batch = loaded(function=f"{module}:batch", batch=True)
    assert await rewards(batch, prompt, "a", "abc") == [1.0, 3.0]


async def test_a_function_can_be_loaded_from_a_module_in_the_working_directory(
    module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(module.parent)
    monkeypatch.setattr("sys.path", sys.path.copy())
    function = loaded(function="my_judge:later")
    assert await rewards(function, make_prompt(1), "abc") == [3.0]


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [
        ("exact_mach", {}, r"function: .*did you mean 'exact_match'"),
        ("{file}:god", {}, r"function: .*did you mean 'good'"),
        ("{file}:constant", {}, r"function: .* is a int, not a function"),
        ("{file}:narrow", {}, r"function: .* cannot be called with data_source, solution_str"),
        ("{file}:batch", {}, r"function: .* cannot be called with data_source, solution_str"),
        ("{dir}/my_juge.py:good", {}, r"function: .*did you mean 'my_judge\.py'"),
        ("no_such_module_anywhere:good", {}, r"function: there is no module 'no_such_module_anywhere'"),
        ("json.no_such:good", {}, r"function: there is no module 'json\.no_such'"),
        ("{file}:good", {"bonsu": 1}, "function: .*did you mean 'bonus'"),
        ("exact_match", {"patern": "x"}, "function: .*did you mean 'pattern'"),
        ("exact_match", {"pattern": "x"}, r"kwargs\.pattern: 'x' has no group"),
        ("exact_match", {"pattern": "("}, r"kwargs\.pattern: '\(' is not a regular expression"),
        ("exact_match", {"solution_strs": "x"}, r"kwargs\.solution_strs: each call sets this argument"),
    ],
)
def test_load_errors_name_key_and_value(module: Path, function: str, kwargs: dict[str, Any], expected: str) -> None:
    entry = {"function": function.format(file=module, dir=module.parent), "kwargs": kwargs}
    with pytest.raises(ConfigError, match=rf"reward\.{expected}"):
        loaded(**entry)
    with pytest.raises(ConfigError, match=rf"reward\.functions\[0\]\.{expected}"):
        load_reward_functions(RewardConfig.model_validate({"functions": [{"name": "more", **entry}]}))


def test_a_module_that_raises_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import asyncrl_no_such_dependency\n")
    with pytest.raises(UserCodeError, match="asyncrl_no_such_dependency") as caught:
        loaded(function=f"{tmp_path / 'broken.py'}:f")
    assert "broken.py" in caught.value.cause


# ------------------------------------------------------------------------------------------------ calling


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (None, "None"),
        ("1.0", "'1.0'"),
        ([1.0], "[1.0]"),
        ({"reward": 1}, "without 'score': {'reward': 1}"),
        ({"score": None}, "None"),
        ({"score": 0.0, "pred": 10**5000}, "'pred' = <int whose repr raised ValueError>, which is no text"),
    ],
)
async def test_a_result_without_a_finite_number_is_an_error(value: Any, shown: str) -> None:
    prompt = make_prompt(1, data_source="math", extra_info={"index": 17})
    with pytest.raises(UserCodeError) as caught:
        await rewards(own(lambda **fields: value), prompt, "the answer")
    for part in ("my:reward", "'math', row 17", "the answer", shown):
        assert part in caught.value.message


@pytest.mark.parametrize(
    "value", [True, 1, 1.0, np.float32(1), np.bool_(True), np.array(1.0), Decimal(1), {"score": np.int64(1)}]
)
async def test_any_number_type_is_a_reward(value: Any) -> None:
    assert await rewards(own(lambda **fields: value), make_prompt(1), "x") == [1.0]


async def test_extras_that_are_not_numbers_are_dropped() -> None:
    result = {"score": 1, "acc": True, "text": "x", "nan": float("nan")}
    assert await scorer(own(lambda **fields: result)).score(make_prompt(1), [answer("x")]) == [Score(1.0, {"acc": 1.0})]


async def test_a_batch_function_must_return_one_score_per_response() -> None:
    with pytest.raises(UserCodeError, match="expected a list of 2 scores"):
        await rewards(own(lambda **fields: [1.0], batch=True), make_prompt(1), "a", "b")
    assert await rewards(own(lambda **fields: np.ones(2), batch=True), make_prompt(1), "a", "b") == [1.0, 1.0]


async def test_an_exception_keeps_its_traceback() -> None:
    def reward(**fields: Any) -> float:
        raise KeyError("missing")

    with pytest.raises(UserCodeError, match="raised KeyError: 'missing'") as caught:
        await rewards(own(reward), make_prompt(1), "x")
    assert "in reward" in caught.value.cause


async def test_the_function_cannot_change_the_prompt() -> None:
    prompt = make_prompt(1, extra_info={"index": 1})
    await rewards(own(lambda **fields: len(fields["extra_info"].pop("index") * "x")), prompt, "a", "b")
    assert prompt.extra_info == {"index": 1}


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()  # let the abandoned thread end with the test


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_function_has_a_deadline(gate: threading.Event, kind: str) -> None:
    """The event loop must run while a sync function blocks, or the deadline could not take effect."""

    async def later(**fields: Any) -> float:
        await anyio.sleep_forever()
        return 1.0

    function = own(later if kind == "async" else lambda **fields: gate.wait())
    with pytest.raises(UserCodeError, match=r"did not return within reward\.timeout_s = 0\.05 s"):
        await scorer(function, timeout_s=0.05).score(make_prompt(1), [answer("x")])


async def test_a_function_that_hangs_frees_its_capacity(gate: threading.Event) -> None:
    def reward(**fields: Any) -> float:
        return 1.0 if fields["solution_str"] == "fast" else float(gate.wait())

    one_at_a_time = scorer(own(reward), timeout_s=0.5, max_concurrency=1)
    with pytest.raises(UserCodeError, match="did not return"):
        await one_at_a_time.score(make_prompt(1), [answer("slow")])
    assert await one_at_a_time.score(make_prompt(1), [answer("fast")]) == [Score(1.0)]


async def test_a_timeout_error_of_the_function_is_not_reported_as_its_deadline() -> None:
    def reward(**fields: Any) -> float:
        raise TimeoutError("judge unreachable")

    with pytest.raises(UserCodeError, match="raised TimeoutError: judge unreachable"):
        await rewards(own(reward), make_prompt(1), "x")


# ------------------------------------------------------------------------------------------------ hostile values


@settings(max_examples=30)
@given(result=values(), extra=st.dictionaries(texts(), values(), max_size=3), error=texts())
async def test_results_of_any_shape_are_scores_or_name_the_function(result: Any, extra: Any, error: str) -> None:
    def fail(**_: Any) -> float:
        raise ValueError(error)

    results = [result, {"score": result, **extra}, {"score": 1.0, "turn_scores": result}, 10**5000]
    results += [{"score": 1.0, "pred": result}, {"score": 1.0, 10**5000: 1}]
    functions = [own(fail)]
    for value in results:
        functions += [own(lambda one=value, **_: one), own(lambda one=value, **_: [one], batch=True)]
    for function in functions:
        try:
            (score,) = await scorer(function).score(make_prompt(1), [answer("22")])
        except UserCodeError as failure:
            assert failure.message.startswith("reward function my:reward on a response to")
            assert str(failure).encode()
        else:
            "".join(score.extra).encode()


# ------------------------------------------------------------------------------------------------ cheap functions


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls in threads that reward functions have made."""
    calls: list[Any] = []
    run_sync = functions.to_thread.run_sync

    async def counted(call: Any, *args: Any, **options: Any) -> Any:
        calls.append(call)
        return await run_sync(call, *args, **options)

    monkeypatch.setattr(functions.to_thread, "run_sync", counted)
    return calls


def length(**fields: Any) -> float:
    return float(len(fields["solution_str"]))


async def test_a_cheap_function_scores_a_group_in_one_thread(threads: list[Any]) -> None:
    function = own(length)
    group, expected = ("a", "bb", "ccc", ""), [1.0, 2.0, 3.0, 0.0]
    assert await rewards(function, make_prompt(1), *group) == expected
    assert len(threads) == 4, "its cost is not known before its first calls"
    assert await rewards(function, make_prompt(1), *group) == expected
    assert len(threads) == 5


async def test_a_slow_function_keeps_a_thread_for_each_response(threads: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(functions, "CHEAP_S", 0.0)
    function = own(length)
    for _ in range(2):
        await rewards(function, make_prompt(1), "a", "bb", "ccc")
    assert len(threads) == 6


async def test_calls_that_take_long_after_all_are_made_at_the_same_time(
    threads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = own(length)
    function.cost.add(0.0, 1)
    monkeypatch.setattr(functions, "TOGETHER_S", -1.0)  # it is over after the first call
    assert await rewards(function, make_prompt(1), "a", "bb", "ccc") == [1.0, 2.0, 3.0]
    assert len(threads) == 3


@pytest.mark.parametrize("failure", ["raises", "hangs"])
async def test_the_response_that_fails_is_named(failure: str, gate: threading.Event) -> None:
    def reward(**fields: Any) -> float:
        if fields["solution_str"] == "third":
            return float(gate.wait()) if failure == "hangs" else 1 / 0
        return 1.0

    function = own(reward)
    function.cost.add(0.0, 1)
    with pytest.raises(UserCodeError, match=r"'third'\) (raised ZeroDivisionError|did not return within)"):
        await scorer(function, timeout_s=0.5).score(make_prompt(1), [answer(text) for text in ("a", "b", "third", "d")])


def test_the_cost_of_a_function_is_an_average_of_recent_calls() -> None:
    cost = functions.CallCost()
    assert not cost.is_cheap
    cost.add(0.004, 8)
    assert cost.is_cheap
    cost.add(1.0, 1)
    assert not cost.is_cheap, "one slow call is enough"
    for _ in range(60):
        cost.add(0.0001, 1)
    assert cost.is_cheap
