"""Restricts system calls with a BPF program that the kernel runs on each system call.

It denies sockets, access to other processes (starting, signalling, tracing, inspecting), a change of the process group,
memory outside the address space, and whatever would let the process outlive its parent or continue after a stop.
Threads work, and so do pairs of connected stream sockets, which asyncio needs: of Unix sockets without the network, of
internet sockets with it.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from . import kernel

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x4000_0000
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_CLOSE_RANGE_UNSHARE, _CLOSE_RANGE_CLOEXEC = 2, 4
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ = 8, 10, 15, 1024, 1026, 1031
_F_OFD_SETLK, _F_OFD_SETLKW = 37, 38
_FIOSETOWN, _SIOCSPGRP, _TIOCSTI, _TIOCNOTTY, _TIOCSPTLCK = 0x8901, 0x8902, 0x5412, 0x5422, 0x4004_5431
_SIGCONT = 18
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOCK_STREAM, _SOCK_NONBLOCK, _SOCK_CLOEXEC = 1, 0x800, 0x80000
_SOL_SOCKET = 1
_SO_SNDBUF, _SO_RCVBUF, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 7, 8, 32, 33

# Opcodes of classic BPF.
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_FILTER_MODE = 2

REFUSED = (
    # other processes
    *("fork", "vfork", "execve", "execveat", "setsid", "setpgid", "tkill", "setpriority", "ioprio_set"),
    *("pidfd_open", "pidfd_send_signal", "pidfd_getfd", "ptrace", "kcmp", "process_vm_readv", "process_vm_writev"),
    *("process_madvise", "process_mrelease", "move_pages", "migrate_pages"),
    # io_uring makes calls that no filter sees
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
    # memory that no limit of the process counts, and that may outlive it
    *("memfd_create", "memfd_secret"),
    # System V IPC and message queues: the same, and what other processes of the user keep there, which Landlock ignores
    *("shmget", "shmat", "shmdt", "shmctl", "semget", "semop", "semtimedop", "semctl"),
    *("msgget", "msgsnd", "msgrcv", "msgctl"),
    *("mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive", "mq_notify", "mq_getsetattr"),
    # queues, rules, filters and requests that the kernel keeps for a descriptor or thread
    *("inotify_init", "inotify_init1", "io_setup", "seccomp"),
    *("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"),
    # lists of access rights, 64 KiB each, even in a root directory whose size is bounded
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
    # a pipe or socket with one byte of a huge page keeps the whole page after it is unmapped
    *("vmsplice", "splice", "tee", "sendfile"),
    # the signal of a timer may be SIGCONT, which continues a stopped process
    "timer_create",
    # namespaces and mounts, and calls with a long history of security holes in the kernel
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "mount_setattr", "open_tree", "move_mount"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "name_to_handle_at", "open_by_handle_at", "fanotify_init", "quotactl"),
    *("bpf", "perf_event_open", "add_key", "request_key", "keyctl", "userfaultfd"),
)
SIGNALS = {"kill": 1, "tgkill": 2, "rt_sigqueueinfo": 1, "rt_tgsigqueueinfo": 2}
"""Calls that send a signal, and the position of the signal among their arguments."""
SOCKETS = ("bind", "connect", "listen", "accept", "accept4", "setsockopt", "sendmsg", "sendmmsg")
"""Calls that only the network needs. They also enlarge the buffers of a pair of sockets, and put descriptors in flight,
where no limit counts them."""
ONLY_ITSELF = (
    *SIGNALS,
    *("prlimit64", "sched_setaffinity", "sched_setparam", "sched_setscheduler", "sched_setattr"),
)
"""Calls whose first argument is a process, which must be the process itself or 0."""
ATTRIBUTES = (
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("utime", "utimes", "futimesat", "utimensat", "file_setattr"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
)
"""Calls that change file attributes, which Landlock does not restrict."""


def install(pid: int, *, network: bool, attributes: bool) -> None:
    """Install the filter for this process, irrevocably.

    Args:
        pid: The process's own pid in its namespace.
        network: Allow internet sockets, but not Unix sockets, which connect to other services of this machine.
        attributes: Allow changes of file attributes, as far as file system and user allow them.

    Raises:
        OSError: the kernel does not support filters, or the table of system calls lacks this architecture.
    """
    instructions = program(pid, network=network, attributes=attributes)
    code = ctypes.create_string_buffer(b"".join(instructions))
    # struct sock_fprog: a length, and a pointer at the next multiple of its size.
    handle = ctypes.create_string_buffer(struct.pack("@HP", len(instructions), ctypes.addressof(code)))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_SECCOMP, _FILTER_MODE, ctypes.byref(handle))


def program(pid: int, *, network: bool, attributes: bool) -> list[bytes]:
    """Return the instructions of the filter, 8 bytes each."""
    kernel.number("socket")  # raises where the architecture is unknown
    refuse = _ERRNO | errno.EPERM
    lines = [
        _op(_LOAD, _ARCH_AT),
        _op(_JUMP_EQUAL, _AUDIT_ARCH[kernel.ARCHITECTURE], 1, 0),
        _op(_RETURN, _KILL_PROCESS),  # a 32-bit call, whose numbers have other meanings
        _op(_LOAD, _NUMBER_AT),
    ]
    if kernel.ARCHITECTURE == "x86_64":
        lines += [_op(_JUMP_AT_LEAST, _X32_BIT, 0, 1), _op(_RETURN, _KILL_PROCESS)]
    for name in (*REFUSED, *(() if attributes else ATTRIBUTES), *(() if network else SOCKETS)):
        lines += _if_called(name, [_op(_RETURN, refuse)])
    # glibc falls back to `clone`, whose flags a filter can see.
    lines += _if_called("clone3", [_op(_RETURN, _ERRNO | errno.ENOSYS)])
    # Threads must share their descriptors: each table of descriptors would have a limit of its own.
    is_thread = [_argument(0), _op(_JUMP_BITS, _CLONE_THREAD, 0, 2), _op(_JUMP_BITS, _CLONE_FILES, 0, 1)]
    lines += _if_called("clone", [*is_thread, _op(_RETURN, _ALLOW), _op(_RETURN, refuse)])
    unshare = (_CLOSE_RANGE_UNSHARE, _CLOSE_RANGE_UNSHARE | _CLOSE_RANGE_CLOEXEC)
    lines += _if_called("close_range", _refuse_values(2, unshare))
    for name in ONLY_ITSELF:
        body = _allow_values(0, (0, pid))
        if name in SIGNALS:  # SIGCONT would discard the stop between calls, or end it
            body = [_argument(SIGNALS[name]), _op(_JUMP_EQUAL, _SIGCONT, 0, 1), _op(_RETURN, refuse), *body]
        lines += _if_called(name, body)
    # The process must end with its parent, which reads its descriptors to find deleted files. More
    # filters would hold memory that no limit counts.
    options = (kernel.PR_SET_PDEATHSIG, kernel.PR_SET_DUMPABLE, kernel.PR_SET_SECCOMP)
    lines += _if_called("prctl", _refuse_values(0, options))
    families = (_AF_INET, _AF_INET6, _AF_NETLINK) if network else ()
    lines += _if_called("socket", _allow_values(0, families))
    # With `sendmsg`, a pair of Unix sockets would hold deleted files and sockets that no limit counts. Without it, a
    # stream socket reaches only the other of its pair; a datagram socket would send to any path that it can see.
    streams = tuple(_SOCK_STREAM | flags | more for flags in (0, _SOCK_NONBLOCK) for more in (0, _SOCK_CLOEXEC))
    is_unix = [_argument(0), _op(_JUMP_EQUAL, _AF_UNIX, 1, 0), _op(_RETURN, refuse)]
    lines += _if_called("socketpair", [*is_unix, *_allow_values(1, () if network else streams)])
    sizes = (_SO_SNDBUF, _SO_RCVBUF, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE)
    is_socket_level = [_argument(1), _op(_JUMP_EQUAL, _SOL_SOCKET, 1, 0), _op(_RETURN, _ALLOW)]
    lines += _if_called("setsockopt", [*is_socket_level, *_refuse_values(2, sizes)])
    # Signals to other processes, or SIGCONT to this one; blocked openers of a file; larger pipes; and locks with which,
    # together with `flock`, two threads can wait for each other, and hold a deleted file without a descriptor.
    commands = (_F_SETOWN, _F_SETOWN_EX, _F_SETSIG, _F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ, _F_OFD_SETLK, _F_OFD_SETLKW)
    lines += _if_called("fcntl", _refuse_values(1, commands))
    # A terminal sends SIGCONT to its processes when they give it up or its other end is closed.
    requests = (_FIOSETOWN, _SIOCSPGRP, _TIOCSTI, _TIOCNOTTY, _TIOCSPTLCK)
    lines += _if_called("ioctl", _refuse_values(1, requests))
    return [*lines, _op(_RETURN, _ALLOW)]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encode one `struct sock_filter`. Jumps count instructions from the next one."""
    return struct.pack("@HBBI", code, if_true, if_false, value)


def _argument(position: int) -> bytes:
    return _op(_LOAD, _ARGUMENTS_AT + 8 * position)  # the low half: both architectures are little-endian


def _if_called(name: str, body: list[bytes]) -> list[bytes]:
    """Return instructions that run `body` only for the call `name`; `body` must end in a return instruction."""
    number = kernel.number(name)
    return [] if number is None else [_op(_JUMP_EQUAL, number, 0, len(body)), *body]


def _allow_values(position: int, values: tuple[int, ...]) -> list[bytes]:
    return _by_value(position, values, _ALLOW, _ERRNO | errno.EPERM)


def _refuse_values(position: int, values: tuple[int, ...]) -> list[bytes]:
    return _by_value(position, values, _ERRNO | errno.EPERM, _ALLOW)


def _by_value(position: int, values: tuple[int, ...], then: int, otherwise: int) -> list[bytes]:
    tests = [op for value in values for op in (_op(_JUMP_EQUAL, value, 0, 1), _op(_RETURN, then))]
    return [_argument(position), *tests, _op(_RETURN, otherwise)]
