"""Restricts the file system to listed paths with the kernel's Landlock.

https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import os
import stat
import struct

from . import kernel

_RIGHTS_BY_ABI = ((5, 16), (3, 15), (2, 14), (1, 13))
"""Pairs of an ABI and the number of file rights from that ABI on: 14 with `refer`, 15 with `truncate`, 16 with
`ioctl_dev`."""
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_TCP_BIND, _TCP_CONNECT = 1, 2
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_VERSION_FLAG, _PATH_BENEATH = 1, 1

WRITABLE_DEVICES = ("/dev/null", "/dev/zero")
READABLE_DEVICES = ("/dev/urandom", "/dev/random")

TRUNCATE_ABI = 3
"""Older ABIs cannot prevent truncation."""
SIGNALS_ABI = 6


def restrict(work_dir: str, read_paths: list[str], *, network: bool) -> int:
    """Allow reading and writing below `work_dir` and reading below `read_paths`; nothing may be executed.

    This applies to the process and its children, irrevocably. Return the kernel's ABI: from 3 on, other files cannot be
    truncated either; from 6 on, processes outside receive no signals.

    Raises:
        OSError: the kernel has no Landlock.
    """
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    abi = kernel.syscall("landlock_create_ruleset", None, 0, _VERSION_FLAG)
    rights = (1 << next(count for since, count in _RIGHTS_BY_ABI if abi >= since)) - 1
    attributes = struct.pack(
        "@QQQ",
        rights,
        0 if network else _TCP_BIND | _TCP_CONNECT,
        _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS,
    )
    known = 24 if abi >= SIGNALS_ABI else 16 if abi >= 4 else 8
    ruleset = kernel.syscall("landlock_create_ruleset", attributes[:known], known, 0)
    try:
        _allow(ruleset, work_dir, rights & ~1)  # bit 0: execute
        for path in read_paths:
            _allow(ruleset, path, _READ_FILE | _READ_DIR)
        for path in READABLE_DEVICES:
            _allow(ruleset, path, _READ_FILE)
        for path in WRITABLE_DEVICES:
            _allow(ruleset, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & rights)
        kernel.syscall("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)
    return abi


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a path that does not exist or is unreachable needs no rule
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _READ_FILE | _WRITE_FILE | _TRUNCATE
        rule = struct.pack("=Qi", rights, descriptor)
        kernel.syscall("landlock_add_rule", ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
