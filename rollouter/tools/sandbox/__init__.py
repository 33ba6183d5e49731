"""Processes that run code of the model behind walls."""
