"""The files of a run directory and their formats."""
