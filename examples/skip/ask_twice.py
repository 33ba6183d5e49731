"""Call the judge of `my_stage.py` (or `own_files.py`) in a session that records its verdicts, then in one that replays
them."""

from __future__ import annotations

import importlib
import inspect
import sys
import tempfile
import time

import anyio

from asyncrl.config.compose import load_config
from skip import SkipManager

RESPONSES = {"18": ("1+17=18", "#18", "#7", "#8"), "30": ("1+29=30", "#30", "#7", "#8")}
"""The responses to each question, by its answer."""
ROLES = {"my_stage": "judge", "own_files": "grade"}


async def main(module: str, dump_dir: str) -> None:
    score, role = importlib.import_module(module).score, ROLES[module]
    settings = {"enable": "true", "steps": "all", "dump_dir": dump_dir}
    overrides = [f"skip.roles.{role}.{key}={value}" for key, value in settings.items()]
    config = load_config(overrides=[f"skip.modules=[{module}]", *overrides])
    for _ in range(2):
        with SkipManager.session(config):
            started, verdicts = time.monotonic(), 0
            for row, (answer, responses) in enumerate(RESPONSES.items()):
                for response in responses:
                    verdict = score("sums", response, answer, {"index": row})
                    if inspect.isawaitable(verdict):
                        await verdict
                    verdicts += 1
            took_s = time.monotonic() - started
            print(f"{verdicts} verdicts in {took_s:.1f} s: {SkipManager.status()[role]}")  # noqa: T201


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else "my_stage", directory)
