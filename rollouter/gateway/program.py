"""Loads the user's agent, a function or a command, runs it once per trajectory, and checks its result."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import anyio
from anyio import to_thread
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from asyncrl.config.import_path import call_problem, load_object
from asyncrl.config.sections.rollout import AgentConfig
from asyncrl.core.failures import AsyncRLError, BugError, ConfigError, UserCodeError
from rollouter.gateway.protocol import PostedReward, checked_reward
from rollouter.gateway.task import AgentTask
from rollouter.user_code import describe, is_async

KEY = "rollout.agent.program"


class AgentProgram(Protocol):
    """Runs the user's agent."""

    async def run(self, task: AgentTask) -> Any:
        """Run one trajectory. Return its reward (see `read_result`) or None.

        Raises:
            UserCodeError: the agent failed.
        """


def load_program(settings: AgentConfig) -> AgentProgram:
    """Load the configured function or command.

    Raises:
        ConfigError: the program does not exist, or the function's signature does not accept one task.
        UserCodeError: the function's module raised when it was imported.
    """
    if settings.command:
        return CommandProgram(settings.command)
    if settings.program is None:
        raise BugError("an agent without a program")
    function = load_object(settings.program, KEY)
    if not callable(function):
        raise ConfigError(f"{KEY}: {settings.program} is {type(function).__name__}; expected a function")
    if problem := call_problem(function, None):
        raise ConfigError(f"{KEY}: {settings.program} is called with one AgentTask, and does not fit: {problem}")
    return FunctionProgram(settings.program, function, settings.max_concurrency)


class FunctionProgram:
    """Runs a function, in a thread unless it is `async`."""

    def __init__(self, name: str, function: Callable[[AgentTask], Any], max_concurrency: int) -> None:
        self._name = name
        self._function = function
        self._is_async = is_async(function)
        self._threads = anyio.CapacityLimiter(max_concurrency)

    async def run(self, task: AgentTask) -> Any:
        """See `AgentProgram`. A cancelled thread cannot be ended: it is abandoned, and the task's key no longer works.

        Raises:
            UserCodeError: the function raised. Every `AsyncRLError` passes through; a `DataError` drops the sample.
        """
        try:
            if self._is_async:
                return await self._function(task)
            result = await to_thread.run_sync(self._function, task, abandon_on_cancel=True, limiter=self._threads)
            return await result if inspect.isawaitable(result) else result
        except AsyncRLError:
            raise
        except Exception as error:
            raise UserCodeError.wrap(f"{KEY}: {self._name} raised {describe(error)}", error) from error


def read_result(result: Any) -> PostedReward:
    """Read a program's result: None, a number, or a mapping of `reward` and `metrics`.

    Raises:
        UserCodeError: the result is something else.
    """
    reward: Any = result
    metrics: Mapping[str, Any] = {}
    try:
        if isinstance(result, Mapping):
            if unknown := result.keys() - {"reward", "metrics"}:
                raise ValueError(f"the key {min(map(str, unknown))!r} is unknown; the keys are reward and metrics")
            reward, metrics = result.get("reward"), result.get("metrics") or {}
        return checked_reward(reward, metrics, False)
    except (ValueError, AttributeError) as error:
        raise UserCodeError(
            f"{KEY}: the agent's result is not a reward: {error}. It may return None, a finite number, or a mapping "
            "with reward and metrics"
        ) from error


COMMAND_KEY = "rollout.agent.command"
TERM_S = 2.0
"""Time between SIGTERM and SIGKILL."""
DRAIN_S = 1.0
"""How long to read remaining output once the process has ended."""
TAIL_BYTES = 16 << 10
"""The number of last bytes of each output that are kept for error messages."""


class CommandProgram:
    """Runs `rollout.agent.command`, once per trajectory.

    The process receives the task as JSON on its standard input, and its environment has the variables that OpenAI
    clients read. It runs in a new process group, which is killed as a whole when the program ends, exceeds its time
    limit or is cancelled.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Check that the program exists.

        Raises:
            ConfigError: there is no such program.
        """
        self._command = tuple(command)
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"{COMMAND_KEY}: "
                f"there is no program {command[0]!r} that can be started, on the PATH or from {os.getcwd()}"
            )

    async def run(self, task: AgentTask) -> None:
        """Run the command to its end; a cancellation ends its process group.

        Raises:
            UserCodeError: the command could not be started, or its exit code is not 0.
        """
        try:
            process = await anyio.open_process(self._command, env=environment(task), start_new_session=True)
        except OSError as error:
            raise UserCodeError.wrap(f"{COMMAND_KEY}: {self._command[0]} cannot be started: {error}", error) from error
        output, errors = bytearray(), bytearray()
        assert process.stdin and process.stdout and process.stderr
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_send, process.stdin, json.dumps(task.as_json(), default=str).encode())
                group.start_soon(_read_tail, process.stdout, output)
                group.start_soon(_read_tail, process.stderr, errors)
                code = await process.wait()
                _signal(process, signal.SIGKILL)  # kill processes that the command has left behind
                group.cancel_scope.deadline = anyio.current_time() + DRAIN_S
        finally:
            with anyio.CancelScope(shield=True):
                await _end(process)
        if code != 0:
            raise UserCodeError(
                f"{COMMAND_KEY}: {' '.join(self._command)} {_ending(code)}", _output_tails(output, errors)
            )


def environment(task: AgentTask) -> dict[str, str]:
    """Return this process's environment with the variables that OpenAI clients read."""
    return {
        **os.environ,
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "OPENAI_MODEL": task.model,
        "ASYNCRL_MODEL": task.model,
    }


async def _send(stream: ByteSendStream, data: bytes) -> None:
    # A program may ignore its input.
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await stream.send(data)
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        await stream.aclose()


async def _read_tail(stream: ByteReceiveStream, tail: bytearray) -> None:
    with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
        while True:
            tail += await stream.receive()
            del tail[:-TAIL_BYTES]


async def _end(process: Process) -> None:
    """End the whole process group: SIGTERM, and SIGKILL after `TERM_S`."""
    if process.returncode is None:
        _signal(process, signal.SIGTERM)
        with anyio.move_on_after(TERM_S):
            await process.wait()
    _signal(process, signal.SIGKILL)
    with anyio.move_on_after(TERM_S):
        await process.wait()
        await process.aclose()


def _signal(process: Process, number: signal.Signals) -> None:
    # While the group has a process, the kernel does not reuse the group's id.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _output_tails(output: bytearray, errors: bytearray) -> str:
    parts = [("standard output", output), ("standard error", errors)]
    return "\n".join(f"its {name}:\n{data.decode(errors='replace').rstrip()}" for name, data in parts if data)
