"""Faults of every kind at random times on a real run, and its promises checked: `python -m benchmarks.chaos --help`."""
