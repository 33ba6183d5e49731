"""TRL as a peer: `python -m benchmarks.compare.trl_peer JOB.json`, in the environment `.bench/trl`.

    trl-hf      GRPOTrainer with transformers' generation
    trl-vllm    GRPOTrainer with vLLM in the same process (colocated)
    trl-async   the experimental AsyncGRPOTrainer with a vLLM server

What TRL needs on CPU, and nothing more, is in `benchmarks.compare.trl_on_cpu`. Precision, optimizer and loss are
asyncrl's: float32, AdamW, clipped policy loss with a mean over all tokens of a step, no KL term.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.compare.reward import share_of_digits
from benchmarks.compare.trl_on_cpu import (
    FileTransfer,
    use_plain_attention,
    use_plain_float32,
    use_plain_linear_layers,
    vllm_server,
)

GENERATED = "ASYNCRL_COMPARE_GENERATED"
"""Environment variable with the file that the reward function writes; TRL's async trainer scores in another process."""

RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {"content": {"close_pattern": "<eos>", "content": "text"}},
}
"""How the async trainer reads a response of the quickstart's chat template, which TRL does not know."""


def digits_reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Score completions, and note when how many tokens were generated."""
    with open(os.environ[GENERATED], "a", encoding="utf-8") as file:
        file.write(f"[{time.monotonic()}, {sum(map(len, completion_ids))}]\n")
    return [share_of_digits(messages[-1]["content"]) for messages in completions]


class StepTimes(TrainerCallback):
    """Notes the end, the mean reward and the trained tokens of each step."""

    def __init__(self, responses: int) -> None:
        self.steps: list[list[float]] = []
        self._responses = responses
        self._end_s = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end_s = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if "reward" in logs:
            tokens = logs.get("batch/trained_tokens_per_step")  # the async trainer's
            if tokens is None:
                tokens = logs["completions/mean_length"] * self._responses
            self.steps.append([self._end_s, logs["reward"], round(tokens)])


def arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Return the options that both trainers have."""
    return {
        "output_dir": f"{job['directory']}/trl",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "model_init_kwargs": {"dtype": "float32"},
        "num_generations": job["group"],
        "max_completion_length": job["max_tokens"],
        "per_device_train_batch_size": job["micro_batch"],
        "gradient_accumulation_steps": job["group"] * job["samples"] // job["micro_batch"],
        "max_steps": job["steps"],
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    directory = Path(job["directory"])
    os.environ[GENERATED] = str(directory / "generated.jsonl")
    rows = [json.loads(line) for line in Path(job["prompts"]).read_text(encoding="utf-8").splitlines()]
    times = StepTimes(job["group"] * job["samples"])
    common: dict[str, Any] = {
        "model": job["model"],
        "reward_funcs": digits_reward,
        "train_dataset": Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        "callbacks": [times],
    }
    length = job["prompt_tokens"] + job["max_tokens"]
    with vllm_server(job["model"], length, directory) if job["peer"] == "trl-async" else nullcontext("") as url:
        if job["peer"] == "trl-async":
            from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

            use_plain_attention()
            tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
            tokenizer.response_template = RESPONSES
            # A budget of 0 makes a micro-batch a number of responses, so that a step has as many as the others' steps.
            options = AsyncGRPOConfig(**arguments(job), vllm_server_base_url=url, token_budget=0)
            trainer = AsyncGRPOTrainer(
                args=options, weight_transfer=FileTransfer(url), processing_class=tokenizer, **common
            )
        else:
            vllm: dict[str, Any] = {}
            if job["peer"] == "trl-vllm":
                use_plain_linear_layers()
                use_plain_float32()
                vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": length}
            options = GRPOConfig(**arguments(job), shuffle_dataset=False, **vllm)
            trainer = GRPOTrainer(args=options, **common)
        trainer.train()
    generated = [json.loads(line) for line in (directory / "generated.jsonl").read_text(encoding="utf-8").splitlines()]
    (directory / "result.json").write_text(json.dumps({"steps": times.steps, "generated": generated}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
