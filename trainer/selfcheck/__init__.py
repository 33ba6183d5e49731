"""The contract of all engines: `checks_of` lists the checks of a backend, `python -m trainer.selfcheck` runs them.

All ranks of a process group call the same check and create the same batch, of which each takes its share. As far as
possible, either all ranks raise or none does. A check raises AssertionError where the engine breaks its contract.
"""
