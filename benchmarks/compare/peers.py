"""The compared systems: how each one is started, and where it leaves what it has measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.compare.measure import ROOT, PeerFailedError
from benchmarks.compare.results import OURS, Progress, read_metrics, read_progress
from benchmarks.compare.workloads import Job

ENVIRONMENTS = ROOT / ".bench"


@dataclass(frozen=True)
class Peer:
    """A system that can do a job in processes of its own."""

    name: str
    command: Callable[[Job], list[str]]
    """Returns the command line. Raises `PeerFailedError` if the system is not installed."""
    read: Callable[[Job], Progress]
    """Reads what the finished run has reported."""

    def environment(self, job: Job) -> dict[str, str]:
        """Return the environment variables of the peers; asyncrl sets its own."""
        if self.name == OURS:
            return {}
        return {
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads(self.name, job.cores)),
        }


def threads(peer: str, cores: int) -> int:
    """Return the threads of a process: all cores where generation and training alternate, else half of them."""
    return cores if peer in ("trl-hf", "trl-vllm") else max(1, cores // 2)


def _python(environment: str) -> str:
    """Return the interpreter of an environment that `make bench-setup` has created. Raises `PeerFailedError`."""
    directory = ENVIRONMENTS / environment
    python, errors = directory / "bin/python", directory / "install.err"
    if not python.exists():
        raise PeerFailedError(f"{python} is missing, so the peer cannot run; run `make bench-setup`")
    if not (directory / ".set-up-for").exists():
        why = errors.read_text(encoding="utf-8")[-2000:] if errors.exists() else "`make bench-setup` did not finish"
        raise PeerFailedError(f"it could not be installed:\n{why}")
    return str(python)


def _launch(job: Job) -> list[str]:
    """Run `asyncrl launch fully_async` with the quickstart's configuration and the job's work."""
    cpu_threads = threads(OURS, job.cores)
    return [
        *(sys.executable, "-m", "asyncrl", "launch", "fully_async", f"run_dir={job.directory}/run"),
        *(f"model.path={job.model}", f"data.train_files=[{job.prompts}]", "data.val_files=[]", "data.shuffle=false"),
        *(f"data.max_prompt_length={job.prompt_tokens}", "reward.function=benchmarks.compare.reward:digits"),
        *(f"rollout.n={job.group}", f"rollout.response_length={job.max_tokens}", f"rollout.cpu_threads={cpu_threads}"),
        *(f"trainer.ppo_mini_batch_size={job.samples}", f"trainer.total_training_steps={job.steps}"),
        *(f"trainer.ppo_max_token_len={job.micro_batch * (job.prompt_tokens + job.max_tokens)}",),
        *(f"trainer.optim.lr={job.learning_rate}", "trainer.optim.warmup_steps=0"),
        *(f"trainer.cpu_threads={cpu_threads}", f"trainer.max_cpu_threads={job.cores}"),
        *("trainer.save_last=false", "trainer.val_before_train=false"),
        *("logging.sinks=[jsonl]", "logging.console=plain"),
    ]


def _trl(job: Job) -> list[str]:
    return [_python("trl"), "-m", "benchmarks.compare.trl_peer", str(job.file)]


def _verl(job: Job) -> list[str]:
    """Run verl's trainer. It has platforms for NVIDIA, AMD and Ascend only, so on CPU this shows its own error.

    Its queue reserves eight CPUs of Ray and waits forever for those that Ray does not have, so Ray gets more than there
    are cores.
    """
    model = "actor_rollout_ref"
    return [
        *(_python("verl"), "-m", "verl.trainer.main_ppo", f"{model}.model.path={job.model}"),
        *(f"data.train_files={job.prompts}", f"data.val_files={job.prompts}", f"data.train_batch_size={job.samples}"),
        *(f"data.max_prompt_length={job.prompt_tokens}", f"data.max_response_length={job.max_tokens}"),
        "data.shuffle=false",
        *(f"+{model}.model.override_config.attn_implementation=sdpa", f"{model}.actor.optim.lr={job.learning_rate}"),
        *(f"{model}.actor.ppo_mini_batch_size={job.samples}", f"{model}.rollout.name=vllm"),
        *(f"{model}.actor.ppo_micro_batch_size_per_gpu={job.micro_batch}", f"{model}.rollout.n={job.group}"),
        *(f"{model}.rollout.log_prob_micro_batch_size_per_gpu={job.micro_batch}", f"{model}.rollout.dtype=float32"),
        *(f"{model}.rollout.tensor_model_parallel_size=1", "reward.custom_reward_function.name=digits"),
        *(f"reward.custom_reward_function.path={ROOT}/benchmarks/compare/reward.py", "trainer.device=cpu"),
        *("trainer.n_gpus_per_node=1", f"trainer.total_training_steps={job.steps}", "trainer.val_before_train=false"),
        *("algorithm.adv_estimator=grpo", "trainer.logger=[console]", f"trainer.default_local_dir={job.directory}"),
        *("ray_kwargs.ray_init.num_cpus=16", f"hydra.run.dir={job.directory}"),
    ]  # fmt: skip


def _result(job: Job) -> Progress:
    return read_progress(Path(job.directory) / "result.json")


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(OURS, _launch, lambda job: read_metrics(Path(job.directory) / "run")),
        Peer("trl-hf", _trl, _result),
        Peer("trl-vllm", _trl, _result),
        Peer("trl-async", _trl, _result),
        Peer("verl", _verl, _result),
    )
}
