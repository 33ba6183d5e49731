"""Runs inside the process of a code tool: it builds walls around itself and then executes code.

The process starts bare (`python -I -S`) and must start fast, so these modules import each other relatively, nothing
else of the project, and little of the standard library. Linux only.

    cell        the entry point: confine, then execute code like cells of a notebook
    walls       settings of the process, the order in which the walls go up, and which stand
    namespaces  processes, mounts and network of its own; a root directory of its own
    landlock    restricts which files may be opened
    seccomp     restricts which system calls may be made
    kernel      system calls that the standard library lacks
"""
