"""Scores trajectories with reward functions, tools, environments, judges and reward models."""
