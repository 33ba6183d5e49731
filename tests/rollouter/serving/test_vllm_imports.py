"""What a replica and its engine core import first, in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import gc, runpy, sys
from multiprocessing.spawn import get_preparation_data

name = "rollouter.serving.replica.vllm_imports"
first = runpy.run_module(name, run_name="__mp_main__", alter_sys=True)  # as in the engine core
assert gc.isenabled() and gc.get_freeze_count()
assert {"vllm.v1.engine.core", "vllm.v1.engine.async_llm"} <= set(sys.modules)
assert "torch._inductor.lowering" not in sys.modules, "vLLM has imported the compiler of torch"
assert "init_main_from_name" not in get_preparation_data("process")
with first["first_module_of_processes"]():
    assert get_preparation_data("process")["init_main_from_name"] == name
assert "init_main_from_name" not in get_preparation_data("process")
"""


def test_vllm_is_imported_without_the_compiler_and_first_in_an_engine_core() -> None:
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
