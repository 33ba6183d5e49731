"""The terminal output of a run and of its commands."""
