"""A custom environment: the model guesses a number, and the environment answers `higher` or `lower`.

    python examples/interactions/guess.py

plays one game with a player that halves the range, with the limits and checks of a run. README.md has the configuration
of a run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

import anyio

from asyncrl.config.sections.rollout import InteractionConfig
from asyncrl.core.failures import DataError
from rollouter.interactions import Environment, EpisodeContext, Message, Reply
from rollouter.interactions.loading import load_interactions


class Guess(Environment):
    """A game in which the model guesses the row's ground truth. The score is higher for earlier correct guesses."""

    def __init__(self, max_guesses: int = 8) -> None:
        self._max_guesses = max_guesses
        self._guesses = 0
        self._found = False
        self._number = 0

    async def reset(self, context: EpisodeContext, hint: str = "") -> Sequence[Message]:
        """Send the row's `extra_info.interaction_kwargs.hint`, if any, after the prompt."""
        if not isinstance(context.ground_truth, int):
            raise DataError(f"ground_truth: {context.ground_truth!r} is no number to guess")
        self._number = context.ground_truth
        return [{"role": "user", "content": hint}] if hint else []

    async def step(self, text: str, messages: Sequence[Message]) -> Reply:
        self._guesses += 1
        numbers = re.findall(r"-?\d+", text)
        if numbers and int(numbers[-1]) == self._number:
            self._found = True
            return Reply(done=True, metrics={"guesses": self._guesses})
        if self._guesses == self._max_guesses:
            return Reply(done=True, metrics={"guesses": self._guesses})
        if not numbers:
            return Reply("Say a number.", reward=-0.1)  # applies to this turn only
        return Reply("higher" if int(numbers[-1]) < self._number else "lower")

    async def score(self) -> float:
        return 1 - (self._guesses - 1) / self._max_guesses if self._found else 0.0


async def play(number: int) -> None:
    # Import the class by its module name, as a run does; this file itself is `__main__` here.
    config = InteractionConfig(name="guess", class_name="guess:Guess", config={"max_guesses": 8}, timeout_s=5.0)
    prompt = {"role": "user", "content": "Guess my number, from 1 to 100."}
    context = EpisodeContext("sample_0_1", 0, (prompt,), ground_truth=number)
    messages: list[Message] = [prompt]
    low, high = 1, 100
    async with load_interactions([config]).session(context) as session:
        messages += await session.reset()
        while True:
            guess = (low + high) // 2
            messages.append({"role": "assistant", "content": f"Is it {guess}?"})
            reply = await session.step(str(messages[-1]["content"]), messages)
            if reply.done:
                break
            messages.append({"role": "user", "content": reply.text})
            low, high = (guess + 1, high) if reply.text == "higher" else (low, guess - 1)
        score = await session.score()
    for message in messages:
        sys.stdout.write(f"{message['role']:>9}  {message['content']}\n")
    sys.stdout.write(f"    score  {score}, after {reply.metrics['guesses']:g} guesses\n")


if __name__ == "__main__":
    anyio.run(play, 80)
