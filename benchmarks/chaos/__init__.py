"""Inject faults of every kind into a real run, and check its promises: `python -m benchmarks.chaos --help`."""
