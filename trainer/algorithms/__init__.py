"""Advantages and losses: plain functions of arrays and tensors, no state."""
