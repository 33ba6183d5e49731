"""Processes for code that nobody has read: started inside walls, talked to, and ended, from the event loop.

    start ─▶ walls stand? ─▶ run ─▶ (run …) ─▶ close: the process group is killed, the directory removed

What builds the walls, inside the process, is in `rollouter.tools.confined`:

| | how |
|---|---|
| network | no socket can be opened (seccomp), and there is no interface (network namespace) |
| files | a root directory in memory with Python's own files, read-only; Landlock; capabilities dropped |
| processes | none can be started, seen or signalled (seccomp, process namespace) |
| environment | none of the parent's; an empty working directory, removed afterwards |
| resources | processor and wall time, address space, size of files and of all of them, open files, threads, output |

All mechanisms that the machine has are used together, and each wall must stand on at least one: `walls.confine` has the
table. As root the code runs as a user of its own where the files of Python are open to all. Without a root of its own
(in most containers) the working directory is in the file system, and only the size of each file in it is bounded. A
process takes 30 to 40 ms to start on one core, 1 ms of it on the event loop.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio import to_thread

from asyncrl.failures import BugError, ConfigError, InfraError
from rollouter.tools.confined.settings import Settings
from rollouter.tools.confined_process import START_S, ConfinedProcess, Limits

MECHANISMS = ("namespaces", "root", "user", "landlock", "seccomp")
"""How walls are built; see `rollouter.tools.confined.walls`."""

_BOOT = "import sys; sys.path.append({here!r}); from confined.cell import main; sys.path.remove({here!r}); main()"


@dataclass(frozen=True, slots=True)
class Walls:
    """What stands around a process."""

    stands: Mapping[str, tuple[str, ...]]
    """The mechanisms that each wall stands on."""
    missing: Mapping[str, str]
    """The mechanisms that were tried and failed, and why."""

    @classmethod
    def parse(cls, report: str) -> Walls:
        """Read what `confined.cell.describe` writes."""
        stands, missing = {}, {}
        for line in report.splitlines():
            sign, name, *rest = line.split(" ")
            if sign == "+":
                stands[name] = tuple(rest)
            else:
                missing[name] = " ".join(rest)
        return cls(stands, missing)


class Sandbox:
    """Starts confined processes, all alike."""

    def __init__(
        self,
        limits: Limits,
        *,
        network: bool = False,
        shared_files: bool = False,
        import_paths: Sequence[str] = (),
        read_paths: Sequence[str] = (),
        keep: bool = False,
        mechanisms: Collection[str] = MECHANISMS,
    ) -> None:
        """Find out what walls this machine has. Blocks for some 0.1 s.

        Args:
            network: The code may use it.
            shared_files: The code may read and write what the user of the run may, if there is no way to prevent it.
            import_paths: Directories of packages, behind the standard library's.
            read_paths: Files and directories that the code may read.
            keep: A process runs one code after the other, with the variables of those before.
            mechanisms: Those to use, of `MECHANISMS`.

        Raises:
            ConfigError: a wall cannot be built here; says what is missing.
        """
        self.limits = limits
        self._network = network
        self._import_paths = [os.path.abspath(path) for path in import_paths]
        self._read_paths = [os.path.abspath(path) for path in read_paths]
        self._keep = keep
        self._required = [
            wall for wall, waived in (("network", network), ("files", shared_files), ("processes", False)) if not waived
        ]
        # The process is no virtual environment's: it has the standard library, and `import_paths`.
        self._python = os.path.realpath(sys.executable)
        self._threads = anyio.CapacityLimiter(math.inf)
        # A start takes a core, and the event loop for a moment: many at once come up no sooner, and hold it up.
        self._starts = anyio.CapacityLimiter(os.cpu_count() or 1)
        self._mechanisms, self.walls = self._find(mechanisms)

    def _find(self, mechanisms: Collection[str]) -> tuple[list[str], Walls]:
        """The mechanisms that work, without those that fail here: a half-made namespace is worse than none."""
        if sys.platform != "linux":
            raise ConfigError(f"code of a model can only be confined on Linux, and this is {sys.platform}")
        usable, missing = list(mechanisms), dict[str, str]()
        while True:
            walls = self._probe(usable)
            missing.update(walls.missing)
            if not walls.missing:
                break
            usable = [name for name in usable if name not in walls.missing]
        if unwalled := self._unwalled(walls):
            reasons = "".join(f"\n    {name}: {reason}" for name, reason in missing.items())
            raise ConfigError(
                f"code of a model cannot be kept from the {' and '.join(unwalled)} of this machine: "
                f"{_lacking(unwalled)}{reasons}"
            )
        return usable, Walls(walls.stands, missing)

    def _unwalled(self, walls: Walls) -> list[str]:
        return [wall for wall in self._required if not walls.stands.get(wall)]

    def _probe(self, mechanisms: list[str]) -> Walls:
        with tempfile.TemporaryDirectory(prefix="asyncrl-code-") as directory:
            done = subprocess.run(
                self._command(directory, mechanisms),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=directory,
                env=_environment(directory),
                start_new_session=True,
                timeout=START_S,
                check=False,
            )
        report, ended, _ = done.stdout.decode(errors="replace").partition("\n\n")
        if not ended:
            raise BugError(f"the process for code of a model ended with {done.returncode} before it began", report)
        return Walls.parse(report)

    def _command(self, directory: str, mechanisms: list[str]) -> list[str]:
        limits = self.limits
        settings = Settings(
            work_dir=directory,
            read_paths=self._read_paths,
            import_paths=self._import_paths,
            mechanisms=mechanisms,
            network=self._network,
            cpu_s=int(limits.cpu_s),
            memory_bytes=int(limits.memory_mib) << 20,
            file_bytes=int(limits.file_mib) << 20,
            disk_bytes=int(limits.disk_mib) << 20,
            open_files=int(limits.open_files),
            threads=int(limits.threads),
            output_bytes=int(limits.output_bytes),
            keep=self._keep,
        )
        boot = _BOOT.format(here=str(Path(__file__).parent))
        return [self._python, "-I", "-S", "-X", "utf8", "-c", boot, settings.encode()]

    async def start(self) -> ConfinedProcess:
        """A process that waits for code; whoever starts it closes it.

        Raises:
            InfraError: it did not come up, or not with the walls that the first one had.
        """
        async with self._starts:
            with anyio.CancelScope(shield=True):  # a start that is cancelled half-way would leave a process behind
                directory = await to_thread.run_sync(_make_directory, limiter=self._threads)
                try:
                    process = await anyio.open_process(
                        self._command(directory, self._mechanisms),
                        stderr=subprocess.STDOUT,
                        cwd=directory,
                        env=_environment(directory),
                        start_new_session=True,
                    )
                except OSError as error:
                    os.rmdir(directory)
                    raise InfraError(f"a process for code could not be started: {error}") from error
            confined = ConfinedProcess(process, directory, self.limits, self._threads)
            try:
                walls = Walls.parse(await confined.greeting())
                if missing := self._unwalled(walls):
                    told = f"{', '.join(missing)}: {dict(walls.missing)}"
                    raise InfraError(f"a process for code came up without its walls: {told}")
            except BaseException:
                await confined.close()
                raise
        return confined


def _lacking(walls: list[str]) -> str:
    """What to do about it, as a sentence."""
    waivers = {"network": "{network: allowed}", "files": "{files: shared}"}
    advice = "it takes Linux with seccomp, and Landlock (6.2 or newer) or namespaces"
    told = [f"config: {waivers[wall]} accepts that" for wall in walls if wall in waivers]
    return "; ".join([advice, *told])


def _environment(directory: str) -> dict[str, str]:
    """Nothing of the parent's but where the interpreter's own libraries are; keys and passwords live there."""
    environment = {"LANG": "C.UTF-8", "HOME": directory, "TMPDIR": directory, "OPENBLAS_NUM_THREADS": "1"}
    if libraries := os.environ.get("LD_LIBRARY_PATH"):
        environment["LD_LIBRARY_PATH"] = libraries
    return environment


def _make_directory() -> str:
    return tempfile.mkdtemp(prefix="asyncrl-code-")
