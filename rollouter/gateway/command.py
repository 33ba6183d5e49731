"""An agent that is a program of its own, started once per trajectory.

It gets the task as JSON on its standard input, and in its environment what OpenAI clients look for. It lives in a
process group of its own, which is ended as a whole: when the program has ended, when it is out of time, when nobody
wants the trajectory any more.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from asyncrl.failures import ConfigError, UserCodeError
from rollouter.gateway.task import AgentTask

KEY = "rollout.agent.command"
TERM_S = 2.0
"""From SIGTERM to SIGKILL."""
DRAIN_S = 1.0
"""For its last words, once it has ended."""
KEPT_BYTES = 16 << 10
"""Of what it writes to each of its outputs: the end."""


class CommandProgram:
    """Runs `rollout.agent.command`."""

    def __init__(self, command: Sequence[str]) -> None:
        """
        Raises:
            ConfigError: there is no such program.
        """
        self._command = tuple(command)
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"{KEY}: there is no program {command[0]!r} that can be started, on the PATH or from {os.getcwd()}"
            )

    async def run(self, task: AgentTask) -> None:
        """Start it and wait for its end. Cancelled, it is ended, with whatever it has started.

        Raises:
            UserCodeError: it could not be started, or ended with another exit code than 0.
        """
        try:
            process = await anyio.open_process(self._command, env=environment(task), start_new_session=True)
        except OSError as error:
            raise UserCodeError.wrap(f"{KEY}: {self._command[0]} cannot be started: {error}", error) from error
        output, errors = bytearray(), bytearray()
        assert process.stdin and process.stdout and process.stderr
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_send, process.stdin, json.dumps(task.as_json(), default=str).encode())
                group.start_soon(_keep_end, process.stdout, output)
                group.start_soon(_keep_end, process.stderr, errors)
                code = await process.wait()
                _signal(process, signal.SIGKILL)  # whom it has left behind
                group.cancel_scope.deadline = anyio.current_time() + DRAIN_S
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
        if code != 0:
            raise UserCodeError(f"{KEY}: {' '.join(self._command)} {_ending(code)}", _last_words(output, errors))


def environment(task: AgentTask) -> dict[str, str]:
    """Ours, and what OpenAI clients look for."""
    return {
        **os.environ,
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "OPENAI_MODEL": task.model,
        "ASYNCRL_MODEL": task.model,
    }


async def _send(stream: ByteSendStream, data: bytes) -> None:
    # Who does not read it does not want it.
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await stream.send(data)
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await stream.aclose()


async def _keep_end(stream: ByteReceiveStream, kept: bytearray) -> None:
    with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
        while True:
            kept += await stream.receive()
            del kept[:-KEPT_BYTES]


async def _end(process: Process) -> None:
    """Nothing of its group is left. Takes `TERM_S` at most, and what the kernel needs to kill."""
    if process.returncode is None:
        _signal(process, signal.SIGTERM)
        with anyio.move_on_after(TERM_S):
            await process.wait()
    _signal(process, signal.SIGKILL)
    with anyio.move_on_after(TERM_S):
        await process.wait()
        await process.aclose()


def _signal(process: Process, number: signal.Signals) -> None:
    # As long as anybody is left in the group, its number is nobody else's.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _last_words(output: bytearray, errors: bytearray) -> str:
    parts = [("standard output", output), ("standard error", errors)]
    return "\n".join(f"its {name}:\n{data.decode(errors='replace').rstrip()}" for name, data in parts if data)
