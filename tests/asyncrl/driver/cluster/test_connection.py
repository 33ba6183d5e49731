"""The environment of a run's processes, and what a cluster lacks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asyncrl.config.compose import check_config, value_sources
from asyncrl.config.resources.placement import NodeResources, gangs
from asyncrl.config.resources.plan import MachineResources
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from asyncrl.driver.cluster import state
from asyncrl.driver.cluster.connection import connected, run_environment

SMALL, LARGE = MachineResources(cpus=2, gpus=0), MachineResources(cpus=64, gpus=0)


def test_openmp_sleeps_where_processes_share_cpus() -> None:
    assert run_environment(Config(), SMALL)["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_WAIT_POLICY" not in run_environment(Config(), LARGE), "spinning threads have CPUs of their own there"
    cluster = Config.model_validate({"ray": {"address": "10.0.0.1:6379"}})
    assert "OMP_WAIT_POLICY" not in run_environment(cluster, SMALL), "this machine is not where they compute"


@pytest.mark.parametrize(
    "loading", ["import torch", "from vllm.platforms.cpu import CpuPlatform; CpuPlatform.import_kernels()"]
)
def test_the_libraries_of_ranks_and_engines_follow_the_policy(loading: str) -> None:
    """Both load the same OpenMP runtime, which reads the variable when it is loaded and prints what it uses. vLLM picks
    its kernels by the CPU; those for another one end the process."""
    script = f"{loading}\nprint(open('/proc/self/maps').read())"
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_DISPLAY_ENV": "true"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in done.stderr
    runtimes = {line.split("/")[-1] for line in done.stdout.splitlines() if "libgomp" in line or "libiomp" in line}
    assert runtimes == {"libgomp.so.1"}


def test_serve_waits_as_long_for_a_proxy_as_its_callers_do() -> None:
    """Serve's controller kills a proxy that is not ready by then, with which `serve.start` fails."""
    script = (
        "from ray.serve._private.constants import HTTP_PROXY_TIMEOUT, PROXY_READY_CHECK_TIMEOUT_S\n"
        "print(PROXY_READY_CHECK_TIMEOUT_S >= HTTP_PROXY_TIMEOUT)"
    )
    environment = {**os.environ, **run_environment(Config(), SMALL)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "True", done.stderr


async def test_gpu_broadcasts_need_a_gpu_in_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [NodeResources("one", "one", cpus=64.0, gpus=0.0)]
    monkeypatch.setattr(state, "cluster_nodes", lambda: nodes)
    config = Config.model_validate({"weight_sync": {"backend": "nccl"}})
    with pytest.raises(ConfigError, match=r"weight_sync\.backend=nccl: .* no node of the cluster has one"):
        await state.check_room(config)


POOLS = (
    "ray.address=auto", "trainer.strategy=ddp", "trainer.nnodes=1", "trainer.n_gpus_per_node=8",
    "rollout.nnodes=2", "rollout.n_gpus_per_node=8",
)  # fmt: skip


@pytest.mark.parametrize("present", [0, 4])
async def test_gpus_that_have_yet_to_join_are_demanded(present: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [NodeResources("head", "head", cpus=64.0, gpus=present)]
    monkeypatch.setattr(state, "cluster_nodes", lambda: nodes)
    adds_nodes = (*POOLS, "ray.autoscaling=true")
    config = check_config("quickstart", adds_nodes).require()
    assert (config.trainer.device, config.rollout.device) == ("cuda", "cuda")
    wanted = await state.check_room(config)
    assert wanted.startswith("the cluster has to add nodes: ") and "needs 24 GPUs" in wanted
    assert "needs 16 GPUs" in await state.check_room(config, trains=False)
    nccl = check_config("quickstart", (*adds_nodes, "weight_sync.backend=nccl")).require()
    assert await state.check_room(nccl) == wanted
    fixed = check_config("quickstart", (*POOLS, "trainer.device=cuda", "rollout.device=cuda")).require()
    with pytest.raises(ConfigError, match="needs 24 GPUs"):
        await state.check_room(fixed)
    sources = value_sources("quickstart", adds_nodes, config)
    assert sources["rollout.device"] == "ray.autoscaling with rollout.n_gpus_per_node"


def test_a_given_device_decides_where_a_part_runs() -> None:
    given = ("trainer.device=cpu", "rollout.device=auto")
    config = check_config("quickstart", (*POOLS, "ray.autoscaling=true", *given)).require()
    assert (config.trainer.device, config.rollout.device) == ("cpu", "auto")
    assert not any(gang.gpus for gang in gangs(config, gpus=False))
    assert {gang.name: gang.total("GPUs") for gang in gangs(config, gpus=True)} == {
        "policy rank": 0, "engine replica": 16,
    }  # fmt: skip
    config = check_config("quickstart", (*POOLS, "rollout.device=cpu")).require()
    assert (config.trainer.device, config.rollout.device) == ("auto", "cpu"), "on CPU the pool counts processes"
    assert {gang.name: gang.total("GPUs") for gang in gangs(config, gpus=True)} == {
        "policy rank": 8, "engine replica": 0,
    }  # fmt: skip


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "no-such-host.invalid:6379"])
def test_an_address_at_which_nothing_listens_is_refused_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("Ray would try for 40 s"))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ConfigError, match=r"there is no Ray cluster that answers, so nothing runs: .*Errno"):
        connected(address).__enter__()
