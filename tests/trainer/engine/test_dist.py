"""A process group that breaks: a rank that dies, one that does not answer, one that never comes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from asyncrl.failures import InfraError
from tests.fakes.trainer_model import write_model
from trainer.engine import dist

COLLECTIVE_S = 4
PROGRAM = f"""
import os, signal, sys, time
import torch
torch.set_num_threads(1)
from asyncrl.config.schema import AlgorithmConfig, EngineConfig, ModelConfig, OptimConfig
from asyncrl.failures import AsyncRLError
from trainer.algorithms.objective import PolicyLoss
from trainer.engine.base import EngineSpec
from trainer.engine.contract.reference import make_batch
from trainer.engine.registry import EngineRegistry
backend, path, end = sys.argv[1:]
config = EngineConfig(strategy=backend, device="cpu", num_workers=2)
spec = EngineSpec("language_model", ModelConfig(path=path), config, OptimConfig(), collective_s={COLLECTIVE_S})
engine, batch, loss = EngineRegistry.new(spec), make_batch(4, 1), PolicyLoss(AlgorithmConfig(), 20)
engine.optim_step(engine.forward_backward(batch, loss)["loss"])
if engine.layout.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL) if end == "dies" else time.sleep(60)
began = time.monotonic()
try:
    engine.forward_backward(batch, loss)
except AsyncRLError as error:
    print(type(error).__name__, time.monotonic() - began, str(error).splitlines()[0], flush=True)
os._exit(0)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("backend", "end", "expected"), [("fsdp2", "dies", "InfraError"), ("ddp", "hangs", "DeadlineError")]
)
def test_what_the_other_rank_does_is_a_typed_error_in_time(
    backend: str, end: str, expected: str, tmp_path: Path
) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, backend, str(write_model(tmp_path)), end],
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
    kind, seconds, message = output.split(maxsplit=2)
    assert kind == expected
    assert float(seconds) < COLLECTIVE_S + 10
    assert message.startswith("forward_backward: a collective operation of rank 0 of 2 failed: another rank died")


def test_a_rank_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": "0"}
    for key, value in address.items():
        monkeypatch.setenv(key, value)
    began = time.monotonic()
    with pytest.raises(InfraError, match=r"no process group of 2 ranks within 1 s; .*timeouts\.collective_s"):
        dist.join(torch.device("cpu"), timeout_s=1.0)
    assert time.monotonic() - began < 30


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), dist.guarded("a step"):
        raise RuntimeError("shapes cannot be multiplied")
