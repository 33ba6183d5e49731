"""What conversations with tools, and over-sampling, cost and save; `python -m benchmarks.agents`."""
