"""The prompts of a run: rows of the data set, chat templates and media."""
