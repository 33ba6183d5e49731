"""Calls the user's reward functions once, on a dummy response to the first row, before anything else starts.

The call runs in a process of its own, which is ended at a deadline: user code may print, hang or end its process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import anyio
import numpy as np

from asyncrl.config.environment import local_path
from asyncrl.config.import_path import placed
from asyncrl.config.problems import ConfigProblem, Severity, warning
from asyncrl.config.schema import Config
from asyncrl.config.sections.data import is_remote
from asyncrl.config.sections.reward import RewardConfig, RewardFunctionConfig
from asyncrl.core.failures import AsyncRLError, DataError, conceal, users_frame
from asyncrl.core.trajectory import single_turn
from asyncrl.core.types import FinishReason, Prompt, Span, Turn
from rollouter.prompts.check import rows_of
from rollouter.prompts.dataset import OwnRows, PromptRow, RowKeys, parse_row
from rollouter.rewards.functions import BUILT_IN, NO_FUNCTION, listed, load_reward_function, row_of, score_of

LIMIT_S = 3.0
"""Time after which the process of the check is ended, once it has started."""
START_S = 30.0
"""Time in which a process can start on a busy machine."""
DUMMY = "The answer is 0."
_MISTAKES = (NameError, ImportError, AttributeError, TypeError, SyntaxError)
"""Errors that the next call would raise as well, whatever the response."""


class RewardCheck:
    """The check, which runs beside others from its construction on."""

    def __init__(self, config: Config) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._own = _own_functions(config)
        if not self._own or (config.data.dataset is None and _first_row(config) is None):
            return
        with tempfile.TemporaryFile() as given:
            given.write(config.model_dump_json().encode())
            given.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollouter.rewards.check"],  # -P: files here shadow no module of Python
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield the problems; a check that takes too long is given up with a warning."""
        if self._process is None:
            return
        key, name = next((f"{section}.function", entry.function) for section, entry in self._own.items())
        try:
            out, err = self._process.communicate(timeout=START_S + LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, err = self._process.communicate()
        if self._process.returncode in (-signal.SIGALRM, -signal.SIGKILL):
            consequence = f"importing it and calling it once takes longer than {LIMIT_S:g} s, so it was not checked"
            yield warning(
                key, name, consequence, "nothing, if it has to load a model; reward.timeout_s limits each call"
            )
            return
        try:
            found = json.loads(out.decode().splitlines()[-1])
        except (ValueError, IndexError):
            last = (err.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            consequence = f"its process ended with code {self._process.returncode} ({last}), as that of a run would"
            yield ConfigProblem(key, name, consequence, "correct the function")
            return
        yield from (ConfigProblem(**problem) for problem in found)


def _own_functions(config: Config) -> dict[str, RewardConfig | RewardFunctionConfig]:
    """Return the sections of the reward functions that are the user's."""
    sections: dict[str, RewardConfig | RewardFunctionConfig] = {"reward": config.reward}
    sections |= {f"reward.functions[{number}]": entry for number, entry in enumerate(config.reward.functions)}
    return {key: one for key, one in sections.items() if one.function not in BUILT_IN and one.function != NO_FUNCTION}


def _first_row(config: Config) -> tuple[PromptRow, str] | None:
    """Return the first row of `data.dataset` or of the training files; of the validation rows, if there are no others
    as in an evaluation. None: it is not on this machine, or cannot be read."""
    if config.data.dataset is not None:
        return _first_own_row(config)
    for name in config.data.train_files or config.data.val_files:
        path = None if is_remote(name) else local_path(name)
        if path is not None and path.is_file():
            try:
                for raw, where in rows_of(name, path):
                    return parse_row(raw, where, keys=RowKeys.of(config.data), directory=path.parent), where
            except DataError:
                return None  # the check of rows reports it
    return None


def _first_own_row(config: Config) -> tuple[PromptRow, str] | None:
    try:
        rows = OwnRows.load(config.data, "val" if config.validates_only else "train")
        if rows is None or not len(rows):
            return None
        return parse_row(rows.row(0), rows.where(0), keys=RowKeys.of(config.data)), rows.where(0)
    except AsyncRLError:
        return None  # the check of the data set reports it


def check_rewards(config: Config, *, limit_s: float = 0.0) -> Iterator[ConfigProblem]:
    """Call each function of the user's and yield a problem for each that fails.

    SIGALRM ends this process `limit_s` after the first row is read (0: never).
    """
    first = _first_row(config)
    if first is None:
        return
    if limit_s:
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # SIGALRM ends the process, also inside of C code
    row, where = first
    ids = np.zeros(4, np.int32)
    prompt = Prompt(ids, row.messages, row.data_source, row.ground_truth, row.extra_info)
    turn = Turn(ids, np.zeros(4, np.float32), (Span(0, 0),), FinishReason.STOP)
    trajectory = single_turn(prompt, turn)
    for section, entry in _own_functions(config).items():
        key, function = f"{section}.function", None
        try:
            function = load_reward_function(entry, section)
            count = config.rollout.n if function.batch else 1
            result = anyio.run(function.invoke, [dict(row_of(prompt, trajectory, DUMMY)) for _ in range(count)])
            for score in listed(result, lambda: "it", length=count) if function.batch else [result]:
                score_of(score, lambda: "it", num_turns=1)
        except Exception as error:  # noqa: BLE001  user code may raise anything
            yield _problem(config, key, entry.function, error, where, None if function is None else function.call)


def _problem(
    config: Config, key: str, name: str, error: Exception, where: str, function: Callable[..., Any] | None
) -> ConfigProblem:
    original = error.__cause__ if isinstance(error, AsyncRLError) and isinstance(error.__cause__, Exception) else error
    if isinstance(original, AsyncRLError):
        message = placed(original.message.removeprefix(f"{key}: ").removeprefix(f"{name} "), function)
        return ConfigProblem(key, name, message, f"correct the function; it was called for {where}")
    fix = f"correct the function; it was called for {where} with the response {DUMMY!r}"
    if isinstance(original, ModuleNotFoundError):
        fix = f"install the package of {original.name}, or correct the import"
    place = users_frame("".join(traceback.format_exception(original)))
    consequence = conceal(f"it raises {type(original).__name__}: {original}{f' ({place})' if place else ''}")
    tolerated = isinstance(original, OSError) or config.reward.on_error == "drop"
    severity: Severity = "warning" if tolerated and not isinstance(original, _MISTAKES) else "error"
    return ConfigProblem(key, name, consequence, fix, severity)


def main() -> None:
    """Read a configuration from stdin and print the problems as JSON; what user code prints goes to stderr."""
    answer = os.dup(1)
    os.dup2(2, 1)
    config = Config.model_validate_json(sys.stdin.buffer.read())
    found = [asdict(problem) for problem in check_rewards(config, limit_s=LIMIT_S)]
    os.write(answer, b"\n" + json.dumps(found, default=str).encode())
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads of user code


if __name__ == "__main__":
    main()
