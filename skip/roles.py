"""The roles that come with the package: importing this registers them."""

from skip import generation, stages

__all__ = ["generation", "stages"]
