"""Environments of the package `verifiers`, turn by turn, with a stand-in for the package and with the package itself.

The stand-in (verifiers_stand_in.py) has those public interfaces of the package that are used. The requirements of the
project do not contain the package; where it is installed, every test also runs against it.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.core.failures import ConfigError
from rollouter.drop_policy import ToolFailedError
from rollouter.interactions.base import EpisodeContext, Reply
from rollouter.interactions.verifiers_env import SUPPORTED, rows
from tests.fakes import verifiers_stand_in
from tests.fakes.environments import context, interaction, load

GUESS = '''
import asyncio

import verifiers as vf

EVENTS = []
ROWS = [{"question": "Guess my number.", "answer": "7", "info": {"low": 1}}]


class Guess(vf.MultiTurnEnv):
    """Says higher or lower; `parts` and `tool` say it in other forms."""

    def __init__(self, form="text", **options):
        super().__init__(**options)
        self.form = form

    async def setup_state(self, state):
        EVENTS.append(("setup", state["answer"], state["info"], state["task"], state["example_id"]))
        state["guesses"] = []
        return state

    @vf.stop
    async def given_up(self, state):
        return "give up" in state["trajectory"][-1]["completion"][-1]["content"] if state["trajectory"] else False

    @vf.cleanup
    async def clean(self, state):
        EVENTS.append("cleanup")

    async def env_response(self, messages, state, **kwargs):
        text = messages[-1]["content"]
        if text == "crash":
            raise vf.Error("the game crashed")
        if text == "report":
            state["error"] = vf.Error("out of cards")
            state["final_env_response"] = []
            return []
        if text == "slow":
            await asyncio.sleep(1000)
        guess, number = int(text), int(state["answer"])
        state["guesses"].append(guess)
        if guess == number:
            state["final_env_response"] = [{"role": "user", "content": "Yes!"}]
            return state["final_env_response"]
        said = "higher" if guess < number else "lower"
        if self.form == "parts":
            parts = [{"type": "text", "text": said}]
            return [{"role": "user", "content": parts}, {"role": "user", "content": "Go on."}]
        if self.form == "tool":
            return [{"role": "tool", "content": said, "tool_call_id": "1"}]
        return [{"role": "user", "content": said}]


def won(completion, answer):
    return float(completion[-1]["content"] == "Yes!")


def num_guesses(state):
    return float(len(state["guesses"]))


class Rewriting(Guess):
    async def get_prompt_messages(self, state):
        return state["prompt"]


def load_environment(kind="guess", dataset=None, **options):
    if kind == "raises":
        raise OSError("no board")
    from datasets import Dataset

    data = Dataset.from_list(ROWS) if vf.__file__ and "stand_in" not in vf.__file__ else ROWS
    common = {"dataset": data, "rubric": vf.Rubric(funcs=[won, num_guesses], weights=[1.0, -0.1])}
    if kind == "single":
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[length]))
    if kind == "tools":
        return Guess(oai_tools=[{"type": "function", "function": {"name": "look", "parameters": {}}}], **common)
    if kind == "completion":
        return Guess(message_type="completion", **common)
    if kind == "group":
        return vf.EnvGroup([Guess(**common)]) if data is not ROWS else vf.EnvGroup(dataset=data)
    return {"guess": Guess, "rewriting": Rewriting}[kind](**common, **options)


def length(completion):
    return float(len(completion[-1]["content"]))
'''
PROMPT = {"role": "user", "content": "Guess my number."}
KEY = r"interactions\[0\]\.config\.env_id"


@pytest.fixture(params=["stand_in", "real"])
def game(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of an installed environment, `guess_game`."""
    if request.param == "real":
        pytest.importorskip("verifiers")
    else:
        for name, module in verifiers_stand_in.modules().items():
            monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "guess_game.py").write_text(GUESS)
    monkeypatch.syspath_prepend(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield importlib.import_module("guess_game")
    sys.modules.pop("guess_game")
    assert {number: signal.getsignal(number) for number in handlers} == handlers, "only the run handles signals"


def guessing(**env_args: Any) -> Any:
    config = {"env_id": "guess_game", "env_args": env_args}
    return load(interaction("verifiers", config=config, timeout_s=0.5, on_error="drop"))


def row() -> EpisodeContext:
    return context(messages=(PROMPT,), ground_truth=7, data_source="game", extra_info={"index": 3, "info": {"low": 1}})


@asynccontextmanager
async def started(**env_args: Any) -> AsyncIterator[Any]:
    async with guessing(**env_args).session(row()) as session:
        assert await session.reset() == ()
        yield session


def conversation(*texts: str) -> list[dict[str, Any]]:
    """Return the prompt and these texts of the assistant and the user in turn."""
    roles = ("assistant", "user")
    return [PROMPT, *({"role": roles[number % 2], "content": text} for number, text in enumerate(texts))]


async def test_a_conversation_turn_by_turn(game: Any) -> None:
    async with started() as session:
        assert await session.step("5", conversation("5")) == Reply("higher")
        assert await session.step("8", conversation("5", "higher", "8")) == Reply("lower")
        reply = await session.step("7", conversation("5", "higher", "8", "lower", "7"))
        assert reply.done
        assert (reply.metrics["won"], reply.metrics["num_guesses"]) == (1.0, 3.0)
        assert await session.score() == pytest.approx(1 - 0.1 * 3)
    assert game.EVENTS == [("setup", "7", {"low": 1}, "game", 3), "cleanup"]


async def test_limits_and_stop_conditions_of_the_environment_end_the_trajectory(game: Any) -> None:
    async with started(max_turns=2) as session:
        assert not (await session.step("5", conversation("5"))).done
        assert (await session.step("6", conversation("5", "higher", "6"))).done
        assert await session.score() == pytest.approx(-0.1)
    async with started() as session:
        assert (await session.step("I give up", conversation("I give up"))).done
        assert await session.score() == 0.0
    assert game.EVENTS.count("cleanup") == 2


async def test_a_single_turn_environment_ends_after_one_answer(game: Any) -> None:
    async with started(kind="single") as session:
        reply = await session.step("seven", conversation("seven"))
        assert (reply.done, reply.metrics["length"]) == (True, 5.0)
        assert await session.score() == 5.0


async def test_a_trajectory_that_the_loop_ends_is_scored_and_cleaned_up(game: Any) -> None:
    """If limits of the agent loop end a trajectory, the environment scores it and cleans up once."""
    async with started() as session:
        await session.step("5", conversation("5"))
        assert await session.score() == pytest.approx(-0.1)
        assert await session.score() == pytest.approx(-0.1)
    async with started() as session:
        assert await session.score() is None
    async with guessing().session(row()) as session:
        pass
    assert game.EVENTS.count("cleanup") == 2


async def test_a_reply_of_several_parts_is_one_message(game: Any) -> None:
    async with started(form="parts") as session:
        assert await session.step("5", conversation("5")) == Reply("higher\n\nGo on.")


@pytest.mark.parametrize(
    ("answer", "form", "message"),
    [
        ("crash", "text", r"raised Error: the game crashed"),
        ("report", "text", r"raised Error: out of cards"),
        ("seven", "text", r"raised ValueError: invalid literal"),
        ("5", "tool", r"raised ValueError: the environment answers .*'tool'.*only text of the role user"),
        ("slow", "text", r"did not return within 0\.5 s"),
    ],
)
async def test_errors_of_the_environment_fail_the_interaction(game: Any, answer: str, form: str, message: str) -> None:
    async with started(form=form) as session:
        with pytest.raises(ToolFailedError, match=rf"VerifiersEnvironment\.step {message}") as raised:
            await session.step(answer, conversation(answer))
        assert raised.value.on_error == "drop"
    assert game.EVENTS[-1] == "cleanup"


async def test_cancellation_cleans_up(game: Any) -> None:
    async with anyio.create_task_group() as group, started() as session:
        group.cancel_scope.cancel()
        await session.step("5", conversation("5"))
    assert game.EVENTS[-1] == "cleanup"


def test_the_data_set_becomes_rows(game: Any) -> None:
    (made,) = json.loads(json.dumps(list(rows("guess_game", {}))))
    assert made == {
        "prompt": [PROMPT],
        "data_source": made["data_source"],
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 0, "info": {"low": 1}},
    }
    assert made["data_source"]


def test_an_environment_can_be_loaded_outside_of_the_main_thread(game: Any) -> None:
    """Only the main thread can set signal handlers."""
    loaded: list[Any] = []
    thread = threading.Thread(target=lambda: loaded.append(guessing()))
    thread.start()
    thread.join()
    assert len(loaded) == 1


@pytest.mark.parametrize(
    ("env_args", "message"),
    [
        ({"kind": "tools"}, "has tools, which the model would not see"),
        ({"kind": "completion"}, "has message_type 'completion'"),
        ({"kind": "rewriting"}, "rewrites the conversation between turns"),
        ({"kind": "group"}, "is a EnvGroup; only subclasses of MultiTurnEnv"),
        ({"kind": "raises"}, "no board"),
    ],
)
def test_unsupported_environments_are_refused(game: Any, env_args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"{KEY}: .*{message}"):
        guessing(**env_args)


def test_an_environment_that_is_not_installed_is_reported(game: Any) -> None:
    with pytest.raises(ConfigError, match=f"{KEY}: Could not import 'no_such_game'"):
        load(interaction("verifiers", config={"env_id": "no_such_game"}))


# ------------------------------------------------------------------------------------------------ the package


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=rf"{KEY}: .*cannot be imported.*pip install 'verifiers=={SUPPORTED}'"):
        guessing()


@pytest.mark.parametrize("version", ["0.1.9", "0.1.14", "0.4.0", "0.1.100"])
def test_another_version_of_the_package_is_reported(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for name, module in verifiers_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(verifiers_stand_in, "__version__", version)
    with pytest.raises(ConfigError, match=rf"{KEY}: verifiers {version} is installed.*pip install"):
        guessing()
