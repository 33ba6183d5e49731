"""Runs vLLM engines behind Ray Serve."""
