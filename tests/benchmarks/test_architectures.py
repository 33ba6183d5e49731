"""The table of architectures in docs/models.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import architectures
from benchmarks.running import failure_cause

OUTPUT = """[0:04] starting engines
failed after 0:16: step 0, version 0
Traceback (most recent call last):
  File "engine.py", line 1, in start
    raise RuntimeError(
RuntimeError: no kernel for heads of
size 7
samples  0 fed, 0 trained, 0 dropped
"""


def row(result: str, kl: float | None = None) -> dict[str, object]:
    return {
        "model": "Llama",
        "tensor parallel": 1,
        "updates": 4,
        "KL of texts": kl,
        "KL of samples": kl,
        "result": result,
    }


@pytest.mark.parametrize(
    ("texts", "samples", "result"),
    [(1e-12, 9e-6, "right"), (4e-5, 1e-12, "wrong weights"), (1e-12, 4e-4, "wrong weights")],
)
def test_engines_that_compute_other_log_probs_have_wrong_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: float, samples: float, result: str
) -> None:
    """4e-5 is what the first update of experts gave that the engine did not take over; two experts whose scores are
    nearly equal may differ by 9e-6."""

    def launch(*arguments: str) -> None:
        (run_dir,) = (Path(text.removeprefix("run_dir=")) for text in arguments if text.startswith("run_dir="))
        run_dir.mkdir()
        lines = [{"kind": "apply", "weight_sync/mismatch_kl": texts}, {"kind": "step", "rollout/mismatch_kl": samples}]
        text = "".join(json.dumps(line) + "\n" for line in lines * architectures.STEPS)
        (run_dir / "metrics.jsonl").write_text(text, encoding="utf-8")

    monkeypatch.setattr(architectures, "run_asyncrl", launch)
    monkeypatch.setattr(architectures, "save_model", lambda directory, _: directory)
    row = architectures.check("Qwen3Moe", 1, tmp_path)
    assert (row["updates"], row["result"]) == (architectures.STEPS, result)
    shutil.rmtree(tmp_path / "run")
    assert architectures.check("Qwen3Moe", 1, tmp_path, limits=(1e-3, 1e-3))["result"] == "right"


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (OUTPUT, "RuntimeError: no kernel for heads of size 7"),
        ("failed after 0:16: step 0\nconfiguration: x=1: too\nsmall\nsamples  0 fed", "configuration: x=1: too small"),
        ("it never started", "it never started"),
    ],
)
def test_the_cause_of_a_failed_launch_is_one_line(output: str, cause: str) -> None:
    assert failure_cause(output) == cause


def test_only_the_table_of_the_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    page.write_text(f"before\n{architectures._BEGIN}\nold\n{architectures._END}\nafter\n")
    architectures.write_docs(page, [row("right", 1.2e-12), row("a | b")])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| Llama | 1 | 1e-12 | 1e-12 | right |\n| Llama | 1 | – | – | a \\| b |" in text
    page.write_text("no table")
    with pytest.raises(ValueError, match=r"models\.md: no lines"):
        architectures.write_docs(page, [])


def test_the_page_has_a_row_for_every_architecture_alone_and_with_tensor_parallel() -> None:
    table = Path("docs/models.md").read_text(encoding="utf-8").partition(architectures._BEGIN)[2]
    rows = [line.split(" | ")[:2] for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows == [[f"| {name}", size] for name in architectures.ARCHITECTURES for size in "12"]
