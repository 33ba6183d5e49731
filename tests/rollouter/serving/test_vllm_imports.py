"""What a replica and its engine core import first, in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

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


PARENT = """
import sys, time, types
from multiprocessing import get_context

if __name__ == "__main__":
    names = ("vllm", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.async_llm", "vllm.v1.engine.core")
    sys.modules |= {name: types.ModuleType(name) for name in names}  # only the engine core imports vLLM
    from rollouter.serving.replica.vllm_imports import first_module_of_processes

    with first_module_of_processes():
        sleep = "import time; print('runs', flush=True); time.sleep(300)"
        core = get_context("spawn").Process(target=exec, args=(sleep,))
        core.start()
    print(core.pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("loading", [True, False], ids=["while it loads", "while it runs"])
def test_an_engine_core_ends_with_its_replica(loading: bool) -> None:
    """On a GPU it does not import the module of vLLM's workers, which are actors of Ray there."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    core = psutil.Process(int(parent.stdout.readline()))
    if not loading:
        assert parent.stdout.readline() == "runs\n"
    parent.kill()
    parent.wait()
    try:
        psutil.wait_procs([core], timeout=30)
        assert not core.is_running()
    finally:
        parent.stdout.close()
        with suppress(psutil.NoSuchProcess):
            core.kill()
