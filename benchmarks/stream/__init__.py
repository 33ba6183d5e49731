"""Load and latency of servers that stream: `python -m benchmarks.stream --help`."""
