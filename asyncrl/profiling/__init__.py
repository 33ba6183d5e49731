"""Events of a run: what took how long, for which sample, request, turn, replica and step.

    from asyncrl.profiling import profile

    with profile.span("tool.execute", sample="sample_0_42", turn=1, tool="search"):
        ...

Each process has one `profile`; what it costs and keeps is said in `profiler`, which events there are in `events`.
"""

from asyncrl.profiling.profiler import OFF, Profiler, Setup, profile
from asyncrl.profiling.spans import Span

__all__ = ["OFF", "Profiler", "Setup", "Span", "profile"]
