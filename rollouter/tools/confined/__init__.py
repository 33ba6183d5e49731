"""What runs in the process of a code tool: it builds the walls around itself, and then runs the code it is given.

The process starts bare (`python -I -S`) and in a hurry, so these modules import each other relatively, nothing else of
the project, and little of the standard library. Linux only.

    cell        the entry: confine, then run what comes, like a cell of a notebook
    walls       the order in which the walls go up, and which stand
    namespaces  processes, mounts and network of its own; a root directory of its own
    landlock    what of the file system may be opened
    seccomp     which system calls may be made
    kernel      calls that the standard library does not have
    settings    what the process is told on its command line
"""
