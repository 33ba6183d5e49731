"""Fuzzed runs by seed. `python -m tests.fuzz.run 1234` replays one and prints its events."""

from __future__ import annotations

import gc
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.fuzz import fleet, launch, loop, records
from tests.fuzz.check import check
from tests.fuzz.parts import prompts
from tests.fuzz.setup import draw
from tests.fuzz.world import FuzzWorld

MAX_VIRTUAL_S = 900.0


class FuzzError(AssertionError):
    """The run of a seed failed or broke a promise. The message has the command that replays it."""


def play(seed: int, trace: Callable[[str], None] | None = None) -> FuzzWorld:
    """Run a seed and check the run.

    Raises:
        FuzzError: The run failed or broke a promise.
    """
    setup = draw(seed)
    world = FuzzWorld(setup, trace)

    async def main() -> None:
        await launch.play(world)

    try:
        with rare_collections(), fleet.patched(), records.stored(world, prompts(world)):
            loop.run(main, seed, max_virtual_s=MAX_VIRTUAL_S)
        check(world)
    except Exception as error:  # noqa: BLE001  the message names the seed
        text = "".join(traceback.format_exception(error))
        raise FuzzError(f"{setup}\n{text}\nto replay it: python -m tests.fuzz.run {seed}") from None
    return world


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the garbage collector run rarely, because it looks at all objects of the libraries again and again."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 100, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def main() -> None:
    logging.disable(logging.CRITICAL)
    for seed in map(int, sys.argv[1:]):
        print(draw(seed))  # noqa: T201
        world = play(seed, trace=print)
        print(f"seed {seed}: all promises kept; {world.launches} launches, {world.struck} faults")  # noqa: T201


if __name__ == "__main__":
    main()
