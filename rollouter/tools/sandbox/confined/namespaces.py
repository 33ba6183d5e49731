"""Namespaces for processes, mounts, network and users, and a minimal root directory."""

from __future__ import annotations

import ctypes
import os
import struct

from . import kernel
from .landlock import READABLE_DEVICES, WRITABLE_DEVICES

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2
_SIGKILL = 9

WORK_DIR = "/work"
"""Working directory in the new root."""
MAX_FILES = 4096
"""Maximum number of files and directories in the working directory."""


def enter(*, network: bool) -> bool:
    """Leave the namespaces of the parent, but keep its network namespace if `network`.

    The new process namespace begins with the next child. Return whether the user namespace is also new.

    Raises:
        OSError: the kernel or a container denies it.
    """
    flags = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | (0 if network else _CLONE_NEWNET)
    uid, gid = os.geteuid(), os.getegid()
    # As root, keep the machine's user ids, so that the process can change to a user that owns nothing.
    if uid == 0 and kernel.LIBC.unshare(flags) == 0:
        return False
    kernel.checked(kernel.LIBC.unshare(flags | _CLONE_NEWUSER), "unshare")
    _write("/proc/self/setgroups", "deny")  # before gid_map, or the kernel refuses gid_map
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")
    return True


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def own_root(mount_point: str, read_paths: list[str], disk_bytes: int) -> None:
    """Change to a root directory in memory, mounted privately on `mount_point`.

    It contains `read_paths`, read-only, some devices, and an empty `WORK_DIR`, which becomes the current directory.
    `disk_bytes` bounds the size of written files.

    Raises:
        OSError: a mount is refused. Nothing outside this namespace has changed.
    """
    _mount(b"none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount(b"tmpfs", mount_point, b"tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk_bytes},nr_inodes={MAX_FILES},mode=755")
    for path in (*read_paths, *READABLE_DEVICES, *WRITABLE_DEVICES):
        _bind(path, mount_point)
    os.mkdir(mount_point + WORK_DIR, 0o700)
    if not os.path.exists(mount_point + "/tmp"):  # unless it is among `read_paths`
        os.symlink(WORK_DIR, mount_point + "/tmp")
    os.chdir(mount_point)
    kernel.syscall("pivot_root", b".", b".")  # the old root ends up on top of the new one
    kernel.checked(kernel.LIBC.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir(WORK_DIR)


def _mount(source: bytes, target: str, kind: bytes | None, flags: int, options: str = "") -> None:
    result = kernel.LIBC.mount(source, os.fsencode(target), kind, ctypes.c_ulong(flags), options.encode() or None)
    kernel.checked(result, f"mount {target}")


def _bind(path: str, mount_point: str) -> None:
    """Mount `path` in the new root, read-only; devices stay writable."""
    target = mount_point + path
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(os.fsencode(path), target, None, _MS_BIND | _MS_REC)
    # struct mount_attr: set, clear, propagation, user namespace.
    attributes = struct.pack("@QQQQ", _ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    kernel.syscall("mount_setattr", _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, len(attributes))


def descend() -> None:
    """Continue as the second process of the new namespace. The first and the outer process wait and pass on its exit
    code.

    outside ──▶ first: when it ends, the kernel kills all ──▶ second: runs the code
    """
    if (first := os.fork()) != 0:
        _end_as(_wait_for(first))
    kernel.prctl(kernel.PR_SET_PDEATHSIG, _SIGKILL)
    if (second := os.fork()) != 0:
        os._exit(_wait_for(second) & 0xFF)


def _wait_for(pid: int) -> int:
    """Wait for the process, and return its exit code, or 128 plus the signal that ended it."""
    ended = 0
    while ended != pid:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _end_as(code: int) -> None:
    if code > 128:
        os.kill(os.getpid(), code - 128)
    os._exit(code)
