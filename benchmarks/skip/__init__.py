"""The benchmark of records and replay: `python -m benchmarks.skip`."""
