"""Run for hours with rare faults, and measure what grows: `python -m benchmarks.soak --help`."""
