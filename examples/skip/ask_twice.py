"""Call the judge of `my_stage.py` in a session that records its verdicts, then in one that replays them."""

from __future__ import annotations

import tempfile
import time

import anyio
from my_stage import score

from asyncrl.config.compose import load_config
from skip import SkipManager

RESPONSES = {"18": ("1+17=18", "#18", "#7", "#8"), "30": ("1+29=30", "#30", "#7", "#8")}
"""The responses to each question, by its answer."""


async def main(dump_dir: str) -> None:
    role = {"enable": "true", "steps": "all", "dump_dir": dump_dir}
    config = load_config(overrides=["skip.modules=[my_stage]", *(f"skip.roles.judge.{k}={v}" for k, v in role.items())])
    for _ in range(2):
        with SkipManager.session(config):
            started = time.monotonic()
            verdicts = [
                await score("sums", response, answer, {"index": row})
                for row, (answer, responses) in enumerate(RESPONSES.items())
                for response in responses
            ]
            took_s = time.monotonic() - started
            print(f"{len(verdicts)} verdicts in {took_s:.1f} s: {SkipManager.status()['judge']}")  # noqa: T201


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        anyio.run(main, directory)
