"""Runs inside the process of a code tool: the process isolates itself behind walls and then executes code.

A *wall* separates the code from the network, from other processes or from files. The process starts bare
(`python -I -S`) and must start fast, so these modules import each other relatively, nothing else of the project, and
little of the standard library. Linux only.

    cell        the entry point: confine, then execute code like cells of a notebook
    walls       settings of the process, the order of the mechanisms, and the walls that they provide
    namespaces  separate processes, mounts and network; a separate root directory
    landlock    restricts which files may be opened
    seccomp     restricts which system calls may be made
    kernel      system calls that the standard library lacks
"""
