"""A tool that runs the model's Python code in a sandbox (`rollouter.tools.sandbox.pool`)."""

from __future__ import annotations

import logging
import signal
import site
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import anyio

from rollouter.tools.base import BaseTool, ToolContext, ToolResponse
from rollouter.tools.sandbox.confined.namespaces import MAX_FILES
from rollouter.tools.sandbox.pool import CodeLimits, CodeOutcome, CodeSandbox, ConfinedProcess
from rollouter.user_code import parse_settings

log = logging.getLogger(__name__)


class PythonSettings(CodeLimits):
    """The settings of `PythonTool`."""

    session: bool = False
    """Use one process per trajectory, whose variables survive between calls, instead of one process per call. The code
    can then raise its limit of processor time, but not the limit of wall time."""
    network: Literal["denied", "allowed"] = "denied"
    """`allowed` lets the code use the network."""
    files: Literal["private", "shared"] = "private"
    """`shared` accepts that the code reads and writes the files of the run's user if this machine cannot prevent it."""
    packages: bool = False
    """Let the code import installed packages in addition to the standard library."""
    read_paths: tuple[str, ...] = ()
    """Files and directories that the code may read."""


@dataclass(slots=True)
class PythonState:
    process: ConfinedProcess | None = None
    """The process of a session, which continues between calls."""
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    """Calls of a session run one after the other, because they share variables."""


class PythonTool(BaseTool[PythonState]):
    """Runs code like a notebook: the answer contains its output and the value of its last expression.

    Exceptions and exceeded limits are also answers, not failures of the tool. The deadline of a call, `timeout_s` of
    the tool's configuration, should exceed `wall_s`.
    """

    name: ClassVar[str] = "python"
    schema: ClassVar[Mapping[str, Any]] = {
        "type": "function",
        "function": {
            "name": "python",
            "description": (
                "Run Python code and get back what it prints, and the value of its last expression. There is no "
                "network, and no other process can be started. Time and memory are limited."
            ),
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The code to run."}},
                "required": ["code"],
            },
        },
    }

    def __init__(self, **settings: Any) -> None:
        """Check which isolation this machine supports. Blocks for about 0.1 s.

        Args:
            settings: The keys of `PythonSettings`.

        Raises:
            ConfigError: this machine lacks a required isolation, or a value is invalid.
        """
        chosen = parse_settings(PythonSettings, settings)
        self._session = chosen.session
        self._sandbox = CodeSandbox(
            chosen,
            network=chosen.network == "allowed",
            shared_files=chosen.files == "shared",
            import_paths=site.getsitepackages() if chosen.packages else (),
            read_paths=chosen.read_paths,
            keep=chosen.session,
        )
        walls = ", ".join(f"{wall} by {' and '.join(by)}" for wall, by in self._sandbox.walls.mechanisms.items() if by)
        log.info("code of the model is confined: %s", walls)

    def create(self, context: ToolContext, **kwargs: Any) -> PythonState:
        return PythonState()

    async def execute(self, state: PythonState, arguments: Mapping[str, Any], **kwargs: Any) -> ToolResponse:
        """Run `arguments["code"]`.

        Raises:
            InfraError: no process could be started.
        """
        state = state if self._session else PythonState()
        async with state.lock:
            if state.process is None:
                state.process = await self._sandbox.start()
            process, finished = state.process, False
            try:
                outcome = await process.run(arguments["code"])
                finished = process.alive and self._session
            finally:
                if not finished:  # the next call gets a new process
                    state.process = None
                    await process.close()
            return self._response(outcome)

    async def release(self, state: PythonState, **kwargs: Any) -> None:
        if state.process is not None:
            await state.process.close()
            state.process = None

    def _response(self, outcome: CodeOutcome) -> ToolResponse:
        note = self._note(outcome)
        text = outcome.output.rstrip("\n")
        text = f"{text}\n{note}".lstrip("\n") if note else text or "(no output)"
        return ToolResponse(
            text,
            metrics={
                "error": float(outcome.ending == "error"),
                "stopped": float(outcome.ending not in ("ok", "error")),
            },
        )

    def _note(self, outcome: CodeOutcome) -> str:
        """Explain how the code was stopped; empty if it ran to its end."""
        limits = self._sandbox.limits
        if outcome.ending in ("ok", "error"):
            return ""
        note = {
            "timeout": f"Stopped: the code took longer than {limits.wall_s:g} s.",
            "cpu": f"Stopped: the code used more than {limits.cpu_s} s of processor time.",
            "output": f"Stopped: the code wrote more than {limits.output_bytes} bytes of output.",
            "disk": f"Stopped: the code kept more than {limits.disk_mib} MiB or {MAX_FILES} files.",
            "died": f"The process of the code ended {_exit(outcome.exit_code)}.",
        }[outcome.ending]
        return f"{note} The variables of earlier calls are gone." if self._session else note


def _exit(code: int | None) -> str:
    if code is None or code >= 0:
        return f"with exit code {code}"
    try:
        return f"by signal {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
