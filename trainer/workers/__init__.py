"""Ranks: their processes, the calls on them, and how their results are combined."""
