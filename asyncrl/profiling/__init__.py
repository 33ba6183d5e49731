"""Record events of a run, what each step, sample, request, turn and replica spent its time on, and measure processes.

    from asyncrl.profiling import profile

    with profile.span("tool.execute", sample="sample_0_42", turn=1, tool="search"):
        ...

Each process has one `profile`. `profiler` describes the way of an event, and `catalog` lists all events.
"""

from asyncrl.profiling.profiler import PROFILING_OFF, Profiler, ProfilerSettings, ProfilerSpan, profile

__all__ = ["PROFILING_OFF", "Profiler", "ProfilerSettings", "ProfilerSpan", "profile"]
