"""What every engine has to do: `checks.checks_of` lists the checks of a backend, `trainer.engines.selfcheck` runs them.

All ranks of a process group call the same check, each takes its share of a batch that all of them make, and all raise
or none does, as far as that can be. A check raises AssertionError where the engine breaks its contract.
"""
