"""The benchmark of conversations with tools and of over-sampling: `python -m benchmarks.agents`."""
