"""What every engine has to do, as plain functions: `checks_of` lists them, `trainer.engine.selfcheck` runs them.

All ranks of a process group call the same check, each takes its share of a batch that all of them make, and all raise
or none does, as far as that can be. A check raises AssertionError where the engine breaks its contract.
"""

from __future__ import annotations

from trainer.engine.contract import computing, keeping, refusing
from trainer.engine.contract.setting import CHECKS, Check
from trainer.engine.registry import EngineRegistry

MODULES = (computing, keeping, refusing)
"""Importing them fills `CHECKS`."""


def checks_of(backend: str, device: str, num_ranks: int) -> list[Check]:
    """Those that apply to a backend: of the model types it runs.

    Raises:
        ConfigError: there is no such backend, or its package is missing.
    """
    able = EngineRegistry.model_types(backend, device)
    return [one for one in CHECKS if one.model_type in able and one.num_ranks in (None, num_ranks)]
