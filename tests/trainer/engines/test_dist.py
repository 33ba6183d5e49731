"""A process group in which a rank dies, hangs or never joins."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.core.failures import InfraError
from tests.fakes.selfcheck import torchrun
from tests.fakes.trainer_model import SHAPE, write_model
from trainer.engines import dist

HANG_S = 1
"""Deadline of a collective operation when both ranks are running. Before that, a rank may take seconds to start."""
PROGRAM = f"""
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch
torch.set_num_threads(1)
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig, OptimConfig
from asyncrl.core.failures import AsyncRLError
from trainer.algorithms.objective import PolicyLoss
from trainer.engines.base import EngineSpec
from trainer.selfcheck.setting import make_batch
from trainer.engines.registry import new_engine
backend, path, end, directory = sys.argv[1:4] + [Path(sys.argv[4])]
config = EngineConfig(strategy=backend, device="cpu", num_workers=2)
spec = EngineSpec("language_model", ModelConfig(path=path), config, OptimConfig(), collective_s=60)
engine, batch, loss = new_engine(spec), make_batch(4, 1), PolicyLoss(AlgorithmConfig(), 20)
engine.optim_step(engine.forward_backward(batch, loss)["loss"])
torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds={HANG_S}))
calls = {{"forward_backward": lambda: engine.forward_backward(batch, loss)}}
if end == "dies":
    engine.save(directory)
    engine.wait_for_files()
    more = {{"save": lambda: engine.save(directory), "load": lambda: engine.load(directory)}}
    calls = {{"finish_save": engine.finish_save}} | more | calls
if engine.layout.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL) if end == "dies" else time.sleep(60)
for name, call in calls.items():
    began = time.monotonic()
    try:
        call()
    except AsyncRLError as error:
        print(type(error).__name__, time.monotonic() - began, str(error).splitlines()[0], flush=True)
os._exit(0)
"""
JOINS_AGAIN = """
import time
import torch
from trainer.engines import dist
for _ in range(3):
    assert dist.join(torch.device("cpu"), timeout_s=20)
    rank = dist.rank()
    assert float(dist.all_sum(torch.tensor(1.0 + rank))) == 3.0
    dist.leave()
    if rank == 1:
        time.sleep(0.2)  # rank 0 joins first, and finds the addresses of the last group
"""
TIMEOUTS = """
import sys
import torch
from torch.distributed.distributed_c10d import _world
from dataclasses import replace
from tests.fakes.trainer_model import make_spec
from trainer.engines.registry import new_engine
for settings in (dict(tensor_parallel_size=2, fsdp_size=1), dict(fsdp_size=2), dict(ulysses_sequence_parallel_size=2)):
    engine = new_engine(replace(make_spec(sys.argv[1], strategy="fsdp2", num_workers=4, **settings), collective_s=41))
    groups = list(_world.pg_names)
    assert len(groups) > 1
    timeouts = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    assert set(timeouts) == {41}, (settings, timeouts)
    engine.close()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("backend", "end", "expected"), [("fsdp2", "dies", "InfraError"), ("ddp", "hangs", "DeadlineError")]
)
def test_a_dead_or_hung_rank_raises_a_typed_error_within_the_deadline(
    backend: str, end: str, expected: str, tmp_path: Path
) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, backend, str(write_model(tmp_path)), end, str(tmp_path)],
            env=os.environ | address | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=100)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    calls = ("finish_save", "save", "load", "forward_backward") if end == "dies" else ("forward_backward",)
    for call, line in zip(calls, output.splitlines(), strict=True):
        kind, seconds, message = line.split(maxsplit=2)
        assert kind == expected
        assert float(seconds) < HANG_S + 10
        assert message.startswith(f"{call}: a collective operation of rank 0 of 2 failed: another rank died")


def test_a_process_group_can_be_joined_again_after_leaving(tmp_path: Path) -> None:
    """Under torchrun, the store still has the addresses of the ranks in the previous group."""
    program = tmp_path / "joins_again.py"
    program.write_text(JOINS_AGAIN)
    run = torchrun(str(program))
    assert run.returncode == 0, run.stderr[-4000:]


def test_the_groups_of_a_mesh_have_the_deadline(tmp_path: Path) -> None:
    program = tmp_path / "timeouts.py"
    program.write_text(TIMEOUTS)
    LlamaForCausalLM(LlamaConfig(**SHAPE | {"num_key_value_heads": 2})).save_pretrained(tmp_path / "model")
    run = torchrun(str(program), str(tmp_path / "model"), ranks=4)
    assert run.returncode == 0, run.stderr[-4000:]


def test_the_gpu_is_also_chosen_if_other_code_created_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not dist.join(torch.device("cuda", 1), timeout_s=1.0)
    assert chosen == [torch.device("cuda", 1)]


def test_joining_times_out_without_the_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": "0"}
    for key, value in address.items():
        monkeypatch.setenv(key, value)
    began = time.monotonic()
    with pytest.raises(InfraError, match=r"no process group of 2 ranks within 1 s; .*timeouts\.collective_s"):
        dist.join(torch.device("cpu"), timeout_s=1.0)
    assert time.monotonic() - began < 30


def test_other_runtime_errors_are_not_converted() -> None:
    with pytest.raises(RuntimeError, match="shapes"), dist.guarded("a step"):
        raise RuntimeError("shapes cannot be multiplied")
