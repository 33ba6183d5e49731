"""Where the output of this process is, for messages about what only it has said."""

from __future__ import annotations

import os


def own_log(descriptor: int = 2) -> str:
    """The file behind standard error; where that cannot be told, where Ray puts them.

    Ray gives each of its worker processes two files, `.out` and `.err`, which the processes that it starts share.
    """
    try:
        file = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # no Linux
        file = ""
    name, suffix = os.path.splitext(file)
    if not os.path.isfile(file):
        return "the directory logs/ of the Ray session"
    return f"{name}.out and {suffix}" if suffix == ".err" else file
