"""examples/interactions runs as its README shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.core.failures import DataError
from rollouter.interactions.base import Reply
from tests.fakes.environments import assistant, context, interaction, load

EXAMPLE = Path(__file__).parents[3] / "examples" / "interactions"


def test_the_example_prints_the_dialogue_of_its_readme() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "guess.py")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    shown = "".join(f"    {line}\n" for line in done.stdout.splitlines())
    assert shown in (EXAMPLE / "README.md").read_text()


async def test_the_example_can_be_loaded_as_an_environment_of_a_run() -> None:
    loaded = load(interaction(f"{EXAMPLE / 'guess.py'}:Guess", config={"max_guesses": 2}))
    row = {"interaction_kwargs": {"name": None, "hint": "It is even."}}
    async with loaded.session(context(ground_truth=80, extra_info=row)) as session:
        assert await session.reset() == ({"role": "user", "content": "It is even."},)
        assert await session.step(*assistant("well")) == Reply("Say a number.", reward=-0.1)
        assert await session.step(*assistant("90?")) == Reply(done=True, metrics={"guesses": 2.0})
        assert await session.score() == 0.0
    async with loaded.session(context(ground_truth="80")) as session:
        with pytest.raises(DataError, match="is no number to guess"):
            await session.reset()
