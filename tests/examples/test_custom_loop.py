"""The loop in examples/custom_loop takes the same steps as DPO by autograd, in one process and under torchrun."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.assets import resolve
from asyncrl.config.sections.data import ModelConfig
from asyncrl.config.sections.trainer import EngineConfig, OptimConfig
from trainer.engines.base import EngineSpec
from trainer.workers.worker import TrainingWorker

SCRIPT = Path(__file__).parents[2] / "examples" / "custom_loop" / "train.py"
STEPS, PAIRS, LR, BETA = 3, 8, 2e-4, 0.1


@pytest.fixture(scope="module")
def loop() -> Any:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.fixture(scope="module")
def expected(loop: Any) -> list[dict[str, float]]:
    """Return the reference steps: autograd through DPO's loss in float64, one pair at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    path = resolve("asyncrl://quickstart")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)

    def log_prob(prompt: str, response: str) -> torch.Tensor:
        text = f"<bos><user>{prompt}<eos><assistant>{response}<eos>"
        ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        start = len(ids) - len(response) - 1  # each token is one character
        table = model(ids[None]).logits[0].log_softmax(-1)
        return table[start - 1 : -1].gather(1, ids[start:, None]).sum()

    pairs = loop.make_pairs(PAIRS, seed=0)
    with torch.no_grad():
        reference = [log_prob(p.prompt, p.chosen) - log_prob(p.prompt, p.rejected) for p in pairs]
    history = []
    for _ in range(STEPS):
        policy = [log_prob(p.prompt, p.chosen) - log_prob(p.prompt, p.rejected) for p in pairs]
        losses = [-torch.sigmoid(BETA * (now - then)).log() for now, then in zip(policy, reference, strict=True)]
        loss = torch.stack(losses).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append({"loss": loss.item(), "grad_norm": norm.item()})
    return history


def same(history: list[dict[str, Any]], expected: list[dict[str, float]]) -> None:
    assert len(history) == STEPS
    for key in ("loss", "grad_norm"):
        assert [one[key] for one in history] == pytest.approx([one[key] for one in expected], rel=1e-4)


def test_the_loop_takes_the_same_steps_as_dpo_by_autograd(loop: Any, expected: list[dict[str, float]]) -> None:
    spec = EngineSpec(
        model_type="language_model",
        model=ModelConfig(path="asyncrl://quickstart"),
        # The budget gives several micro-batches, which separate the responses of a pair.
        engine=EngineConfig(strategy="local", device="cpu", ppo_max_token_len=150),
        optim=OptimConfig(lr=LR, weight_decay=0.0),
    )
    worker = TrainingWorker(spec)
    history = loop.train(worker, loop.make_pairs(PAIRS, seed=0), steps=STEPS, beta=BETA)
    worker.close()
    same(history, expected)
    assert history[-1]["accuracy"] == 1.0


def test_the_error_for_a_wrong_strategy_is_one_line(loop: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        loop.main(["--strategy", "fdsp2"])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "trainer.strategy: 'fdsp2' is not built in; did you mean 'fsdp2'" in line


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_under_torchrun_two_ranks_take_the_same_steps(tmp_path: Path, expected: list[dict[str, float]]) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT),
        "--steps", str(STEPS), "--pairs", str(PAIRS), "--lr", str(LR), "--beta", str(BETA), "--out", str(tmp_path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    same(json.loads((tmp_path / "figures.json").read_text(encoding="utf-8")), expected)
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    assert (tmp_path / "checkpoint" / "engine.json").is_file()
