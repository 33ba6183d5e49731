"""The composition root: one run from the first actor to the last record."""
