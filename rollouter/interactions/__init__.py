"""Simulated users and environments. Write your own with `Environment`; see docs/agents.md."""

from rollouter.interactions.base import Environment, EpisodeContext, Message, Reply

__all__ = ["Environment", "EpisodeContext", "Message", "Reply"]
