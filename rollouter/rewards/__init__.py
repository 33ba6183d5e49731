"""Scoring responses: the built-in functions, how a user's is found, and how either is called."""
