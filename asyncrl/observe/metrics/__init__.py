"""Metrics of a run: their registry, the recorder and the sinks."""
