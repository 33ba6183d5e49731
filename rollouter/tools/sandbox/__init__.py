"""Runs code of the model in isolated processes."""
