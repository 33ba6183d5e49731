"""Confines the process, and reports which mechanisms provide each wall.

| wall | provided by any of |
|---|---|
| network | a network namespace with a separate root directory; a seccomp filter |
| processes | a process namespace; a seccomp filter |
| files | a separate root directory; Landlock and a separate user; Landlock from ABI 3 and a seccomp filter |
"""

from __future__ import annotations

import marshal
import os
import resource
import sys

from . import kernel, landlock, namespaces, seccomp

TYPE_CHECKING = False  # importing `typing` would delay the start
if TYPE_CHECKING:
    from collections.abc import Callable


class ConfinementSettings:
    """The command line of a confined process, with the limits of `rollouter.tools.sandbox.pool.CodeLimits`.

    It is not a dataclass, and not encoded as JSON, because the import of these modules would take longer than
    everything else before the code runs.
    """

    work_dir: str
    read_paths: list[str]
    """Readable files and directories in addition to Python's."""
    import_paths: list[str]
    """Directories of packages, which are also readable."""
    mechanisms: list[str]
    """The items of `MECHANISMS` to try."""
    network: bool
    """Whether the network is allowed."""
    keep: bool
    """Whether the process runs several pieces of code, which share their variables."""
    cpu_s: int
    memory_mib: int
    address_mib: int
    """Address space: the memory that the buffers of pipes and sockets leave."""
    file_mib: int
    disk_mib: int
    open_files: int
    threads: int
    output_bytes: int

    def __init__(self, **values: object) -> None:
        vars(self).update(values)

    def encode(self) -> str:
        return marshal.dumps(vars(self)).hex()

    @classmethod
    def decode(cls, text: str) -> ConfinementSettings:
        return cls(**marshal.loads(bytes.fromhex(text)))


MECHANISMS = ("namespaces", "root", "user", "landlock", "seccomp")
WALLS = ("network", "processes", "files")

_SYSTEM_PATHS = (
    *("/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64", "/usr/local/lib"),
    *("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo"),
)
_NETWORK_PATHS = (
    *("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/services"),
    *("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/usr/share/ca-certificates"),
)
_FIRST_OWN_USER = 0x6000_0000
"""The lowest of the user ids for code. No real user has such an id, so these users own no files."""
_NOBODY = 65534
_OUR_PROCESSES = 8
"""An upper bound for the helper processes around the code."""
_PROCESSES_PER_NAMESPACE = (5, 14)
"""First Linux version that counts processes per user namespace."""
_SIGKILL = 9
_MAX_SIGNALS = 64
"""Queued signals, which the kernel keeps outside the address space. Beyond it, signals other than real-time ones still
arrive."""


class ConfinementReport:
    """The mechanisms that provide each wall, and the reasons why other mechanisms failed."""

    def __init__(self, mechanisms: dict[str, list[str]] | None = None, missing: dict[str, str] | None = None) -> None:
        self.mechanisms = mechanisms or {wall: [] for wall in WALLS}
        self.missing = missing or {}

    def __repr__(self) -> str:
        """Return the report as a Python literal in one line, which the process writes before it runs code."""
        return repr((self.mechanisms, self.missing))

    def attempt(self, mechanism: str, build: Callable[..., int | None], *args: object, **options: object) -> int:
        """Set up a mechanism. Return the result of `build` (1 for None), or 0 if this machine does not support it."""
        try:
            return build(*args, **options) or 1
        except OSError as error:
            self.missing[mechanism] = str(error)
            return 0

    def add(self, mechanism: str, *walls: str) -> None:
        for wall in walls:
            self.mechanisms[wall].append(mechanism)


def confine(settings: ConfinementSettings) -> ConfinementReport:
    """Set up all mechanisms that this machine supports. The call returns in the confined process."""
    report = ConfinementReport()
    mechanisms = settings.mechanisms
    kernel.prctl(kernel.PR_SET_PDEATHSIG, _SIGKILL)
    outer_pid = os.getpid()
    read_paths = readable(settings)
    work_dir, own_root, own_user, counts_alone = settings.work_dir, False, False, False
    network = () if settings.network else ("network",)
    if "namespaces" in mechanisms:
        try:
            counts_alone = namespaces.enter(network=settings.network) and _kernel() >= _PROCESSES_PER_NAMESPACE
            report.add("namespaces", "processes")
            disk_bytes = settings.disk_mib << 20
            if "root" in mechanisms and report.attempt(
                "root", namespaces.own_root, settings.work_dir, read_paths, disk_bytes
            ):
                work_dir, own_root = namespaces.WORK_DIR, True
                # Unix socket files reach processes outside of a network namespace, but not from within this root.
                report.add("root", "files", *network)
            namespaces.descend()
        except OSError as error:
            report.missing["namespaces"] = str(error)
    if os.geteuid() == 0 and "user" in mechanisms:
        paths = [*settings.import_paths, *settings.read_paths]
        own_user = bool(report.attempt("user", _become_nobody, outer_pid, paths))
        counts_alone = counts_alone or own_user
    kernel.prctl(kernel.PR_SET_PDEATHSIG, _SIGKILL)  # a fork and a change of user reset it
    _set_limits(settings, counts_alone=counts_alone)
    kernel.drop_capabilities()
    abi = 0
    if "landlock" in mechanisms:
        abi = report.attempt("landlock", landlock.restrict, work_dir, read_paths, network=settings.network)
    filtered = "seccomp" in mechanisms and report.attempt(
        "seccomp", seccomp.install, os.getpid(), network=settings.network, attributes=own_root
    )
    if filtered:
        report.add("seccomp", "processes", *network)
    if abi and (own_user or (abi >= landlock.TRUNCATE_ABI and filtered)):
        report.add("landlock", "files")
    os.environ["HOME"] = os.environ["TMPDIR"] = work_dir
    return report


def readable(settings: ConfinementSettings) -> list[str]:
    """Return the directories and files that the code may read. None of them is inside another."""
    candidates = [*sys.path, f"{sys.base_prefix}/lib", *_SYSTEM_PATHS, *settings.import_paths, *settings.read_paths]
    if settings.network:
        candidates += _NETWORK_PATHS
    paths: list[str] = []
    for path in sorted(os.path.normpath(path) for path in candidates if os.path.isabs(path) and os.path.exists(path)):
        if not any(path == outer or path.startswith(f"{outer}/") for outer in paths):
            paths.append(path)
    return paths


def _become_nobody(outer_pid: int, paths: list[str]) -> None:
    """Change from root to a user that owns only the current directory.

    Raises:
        OSError: the change is not permitted, or the user could not read Python's files or `paths`. Nothing has changed.
    """
    error = OSError("no separate user")
    for user in (_FIRST_OWN_USER + outer_pid, _NOBODY):
        try:
            os.setgroups([])
            os.chown(".", user, user)
            os.setresgid(user, user, 0)
            os.setresuid(user, user, 0)  # the saved id 0 allows a return to root
            for path in (".", os.__file__, *paths):
                os.close(os.open(path, os.O_RDONLY))
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            return
        except OSError as refused:
            error = refused
            os.setresuid(0, 0, 0)
            os.setresgid(0, 0, 0)
            os.chown(".", 0, 0)
    raise error


def _set_limits(settings: ConfinementSettings, *, counts_alone: bool) -> None:
    limits = {
        resource.RLIMIT_AS: settings.address_mib << 20,
        resource.RLIMIT_FSIZE: settings.file_mib << 20,
        resource.RLIMIT_NOFILE: settings.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: _MAX_SIGNALS,
    }
    if counts_alone:  # otherwise the limit would count all processes of the user
        limits[resource.RLIMIT_NPROC] = settings.threads + _OUR_PROCESSES
    for kind, value in limits.items():
        _limit(kind, value, value)
    if not settings.keep:
        # The soft limit ends the process by SIGXCPU, which may be caught; the hard limit ends it by SIGKILL.
        _limit(resource.RLIMIT_CPU, settings.cpu_s, settings.cpu_s + 1)


def _limit(kind: int, soft: int, hard: int) -> None:
    highest = resource.getrlimit(kind)[1]
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    resource.setrlimit(kind, (soft, hard))


def _kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(filter(str.isdigit, minor)))
