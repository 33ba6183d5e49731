"""Checks of FSDP2 as it runs on several GPUs, where each micro-batch gathers layers and sums their gradients.

`torchrun -m tests.trainer.engines.frugal_ranks [CHECK ...]` runs the named checks of `trainer.selfcheck`, or all.
"""

from __future__ import annotations

import sys
from unittest.mock import patch

from trainer.engines.sharded import Fsdp2Engine
from trainer.selfcheck.__main__ import main
from trainer.selfcheck.setting import CHECKS

if __name__ == "__main__":
    if names := sys.argv[1:]:
        CHECKS[:] = [check for check in CHECKS if check.name in names]
    with patch.object(Fsdp2Engine, "_frugal", True):
        sys.exit(main(["--backend", "fsdp2", "--device", "cpu"]))
