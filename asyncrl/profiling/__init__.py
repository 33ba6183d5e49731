"""Record events, which show what each step, sample, request, turn and replica spent its time on; measure processes.

    from asyncrl.profiling import profile

    with profile.span("tool.execute", sample="sample_0_42", turn=1, tool="search"):
        ...

Each process has one `profile`. `profiler` describes how an event reaches its file, and `catalog` lists all events.
"""

from asyncrl.profiling.profiler import PROFILING_OFF, Profiler, ProfilerSettings, ProfilerSpan, profile

__all__ = ["PROFILING_OFF", "Profiler", "ProfilerSettings", "ProfilerSpan", "profile"]
