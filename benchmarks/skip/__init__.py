"""What records cost, and what they save: `python -m benchmarks.skip`."""
