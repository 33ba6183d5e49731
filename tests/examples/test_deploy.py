"""The examples of deployments: the Slurm script with stand-ins for Slurm's commands, and the Kubernetes manifest."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config.compose import check_config
from asyncrl.config.resources.placement import NodeResources, gangs, place
from asyncrl.config.schema import Config

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "deploy"
SCRIPT = EXAMPLES / "slurm.sh"
MACHINE = {"trainer.strategy", "model.path", "run_dir", "trainer.checkpoint_dir"}
"""Keys whose problems depend on the machine of the test."""

STAND_IN = r"""#!/bin/bash
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0")" in
  scontrol) printf 'node%s\n' $(seq "$NODES") ;;
  srun)
    while [[ $1 == --* ]]; do shift; done
    exec "$@" ;;
  python)
    [[ $2 == *ray.nodes* ]] || exec "$PYTHON" "$@"
    [[ $3 == 10.0.0.1:6379 && $4 == "$NODES" ]] ;;
  hostname) echo '10.0.0.1 10.1.0.1' ;;
  ray) if [[ $1 == start ]]; then exec sleep 30; fi ;;
  asyncrl)
    echo "token mode ${RAY_AUTH_MODE} ${#RAY_AUTH_TOKEN}" >> "$CALLS"
    # The script starts Ray on the nodes in the background.
    until [[ $(grep -c '^ray start' "$CALLS") == "$NODES" ]]; do sleep 0.1; done
    [[ -n ${ENDS_WITH-} ]] && exit "$ENDS_WITH"
    trap 'sleep 1; echo saved >> "$CALLS"; exit 130' TERM
    while :; do sleep 0.1; done ;;
esac
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a job of three nodes."""
    bin_dir = tmp_path / "venv" / "bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "activate").write_text(f"export PATH={bin_dir}:$PATH\n", encoding="utf-8")
    for name in ("scontrol", "srun", "hostname", "python", "ray", "asyncrl"):
        (bin_dir / name).write_text(STAND_IN, encoding="utf-8")
        (bin_dir / name).chmod(0o755)
    return {
        **os.environ,
        "PYTHON": sys.executable,
        "CALLS": str(tmp_path / "calls"),
        "NODES": "3",
        "ASYNCRL_VENV": str(tmp_path / "venv"),
        "ASYNCRL_SHARED": "/shared",
        "SLURM_JOB_NAME": "grpo",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_CPUS_ON_NODE": "96",
        "SLURM_TMPDIR": "/local",
    }


def calls(slurm: dict[str, str]) -> list[str]:
    file = Path(slurm["CALLS"])
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def launch_of(lines: list[str]) -> list[str]:
    (launch,) = [line for line in lines if line.startswith("asyncrl launch")]
    return launch.split()[3:]


def test_the_slurm_script_starts_a_cluster_and_returns_the_exit_code_of_the_run(slurm: dict[str, str]) -> None:
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0
    done = subprocess.run(
        ["bash", SCRIPT, "my.yaml", "rollout.n=16"], env={**slurm, "ENDS_WITH": "3"}, timeout=60, check=False
    )
    lines = calls(slurm)
    assert done.returncode == 3, lines
    starts = [line for line in lines if line.startswith("ray start")]
    assert [("--head" in line, line.split("--labels=")[1].split()[0]) for line in starts].count(
        (True, "pool=train")
    ) == 1
    assert sum("--labels=pool=rollout" in line and "--address=10.0.0.1:6379" in line for line in starts) == 2
    joined = next(place for place, line in enumerate(lines) if "ray.nodes" in line)
    assert joined < next(place for place, line in enumerate(lines) if line.startswith("asyncrl launch"))
    assert "token mode token 64" in lines
    given = launch_of(lines)
    assert given[:2] == ["my.yaml", "rollout.n=16"]
    assert {"run_dir=/local/asyncrl-grpo-17", "trainer.checkpoint_dir=/shared/grpo", "rollout.nnodes=2"} <= set(given)


def test_a_run_under_slurm_may_take_most_of_the_time_that_the_signal_leaves(slurm: dict[str, str]) -> None:
    """With the default of `timeouts.stop_s`, a run whose step or checkpoint takes longer would lose its last steps."""
    (left,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", SCRIPT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    environment = {**slurm, "ENDS_WITH": "0"}
    assert subprocess.run(["bash", SCRIPT, "my.yaml"], env=environment, timeout=60, check=False).returncode == 0
    (given,) = [text for text in launch_of(calls(slurm)) if text.startswith("timeouts.stop_s=")]
    assert 0.8 * int(left) <= float(given.partition("=")[2]) < int(left)


def test_the_slurm_script_leaves_what_its_arguments_set(slurm: dict[str, str]) -> None:
    own = ["rollout.nnodes=1", "trainer.nnodes=null", "trainer.n_gpus_per_node=null", "resume=none"]
    environment = {**slurm, "ENDS_WITH": "0"}
    assert subprocess.run(["bash", SCRIPT, "my.yaml", *own], env=environment, timeout=60, check=False).returncode == 0
    given = launch_of(calls(slurm))
    keys = {text.partition("=")[0] for text in own}
    assert [text for text in given if text.partition("=")[0] in keys] == own
    assert {"rollout.n_gpus_per_node=8", "trainer.checkpoint_dir=/shared/grpo"} <= set(given)


def test_the_slurm_script_lets_the_run_write_its_checkpoint_before_the_job_ends(slurm: dict[str, str]) -> None:
    job = subprocess.Popen(["bash", SCRIPT, "my.yaml"], env=slurm, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while not any(line.startswith("asyncrl launch") for line in calls(slurm)):
            assert time.monotonic() < until and job.poll() is None
            time.sleep(0.1)
        time.sleep(0.5)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 130
        assert "saved" in calls(slurm)
    finally:
        os.killpg(job.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("README.md", r"sbatch --nodes=(\d+) examples/deploy/slurm\.sh (.+?) +# 8 nodes, 64 GPUs"),
        ("docs/deploy.md", r"sbatch --nodes=(\d+) examples/deploy/slurm\.sh (.+)"),
    ],
)
def test_a_job_of_eight_nodes_uses_64_gpus_in_bfloat16(slurm: dict[str, str], page: str, command: str) -> None:
    ((nodes, given),) = re.findall(command, (ROOT / page).read_text(encoding="utf-8"))
    environment = {**slurm, "NODES": nodes, "ENDS_WITH": "0"}
    assert subprocess.run(["bash", SCRIPT, *given.split()], env=environment, timeout=60, check=False).returncode == 0
    (launch,) = [line for line in calls(slurm) if line.startswith("asyncrl launch fully_async my.yaml ")]
    found = re.findall(r"[\w.]+=(?:\{.*?\}|\S+)", launch)
    config = check_config(None, [*found, "resume=none"]).config
    check_64_gpus(config, num_trainers=1)


def test_the_configuration_of_eight_nodes_uses_64_gpus_in_bfloat16(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^Eight nodes .+?\n\n(.+?)\n\n", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my.yaml").write_text(textwrap.dedent(block), encoding="utf-8")
    config = check_config(tmp_path / "my.yaml", ["model.path=asyncrl://quickstart"]).config
    check_64_gpus(config, num_trainers=2)


def check_64_gpus(config: Config | None, num_trainers: int) -> None:
    """Check that a run uses all GPUs of eight nodes, in bfloat16 and with CUDA graphs."""
    assert config is not None
    labels = [*["train"] * num_trainers, *["rollout"] * (8 - num_trainers)]
    cluster = [NodeResources(f"n{at}", f"n{at}", 96, 8, {"pool": pool}, at == 0) for at, pool in enumerate(labels)]
    placement = place(gangs(config, gpus=True), cluster)
    assert not placement.lacks and not placement.unplaced
    assert sum(gang.total("GPUs") for gang in gangs(config, gpus=True)) == 64
    assert (config.rollout.dtype, config.rollout.enforce_eager, config.trainer.dtype) == ("bfloat16", False, "bfloat16")


def test_the_slurm_script_wants_shared_storage(slurm: dict[str, str]) -> None:
    del slurm["ASYNCRL_SHARED"]
    done = subprocess.run(["bash", SCRIPT], env=slurm, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and "ASYNCRL_SHARED" in done.stderr and not calls(slurm)


def manifest() -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text(encoding="utf-8"))


def test_the_launch_of_the_manifest_is_valid_and_its_pools_have_pods() -> None:
    spec = manifest()["spec"]
    words = shlex.split(spec["entrypoint"])
    assert words[:3] == ["asyncrl", "launch", "fully_async"]
    overrides = [word for word in words[4:] if not word.startswith("run_dir=")]
    checked = check_config("quickstart", (*overrides, "trainer.strategy=fsdp2"))
    assert {problem.key for problem in checked.problems if problem.severity == "error"} <= MACHINE
    config = checked.config
    assert config is not None
    groups = {group["labels"]["pool"]: group for group in spec["rayClusterSpec"]["workerGroupSpecs"]}
    for pool in (config.trainer, config.rollout):
        group = groups[pool.node_labels["pool"]]
        (container,) = group["template"]["spec"]["containers"]
        assert group["maxReplicas"] == pool.nnodes
        assert container["resources"]["limits"]["nvidia.com/gpu"] == pool.n_gpus_per_node


@pytest.mark.parametrize("group", ["headGroupSpec", "workerGroupSpecs"])
def test_every_pod_of_the_manifest_has_the_volumes_that_it_mounts(group: str) -> None:
    found = manifest()["spec"]["rayClusterSpec"][group]
    for one in found if isinstance(found, list) else [found]:
        pod = one["template"]["spec"]
        for container in pod["containers"]:
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in pod["volumes"]}
        assert "labels" not in one["rayStartParams"], "KubeRay takes labels from the group"
