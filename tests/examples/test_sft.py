"""The demonstrations and the configuration of the supervised example."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from asyncrl.assets import resolve
from asyncrl.cli.preflight import preflight
from asyncrl.config.compose import check_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_demonstrations_are_right_and_the_configuration_uses_them(tmp_path: Path) -> None:
    runpy.run_path(str(EXAMPLES / "sft" / "prepare.py"))["prepare"](tmp_path)
    task = runpy.run_path(str(EXAMPLES / "quickstart" / "make_model.py"))
    for split in ("train", "val"):
        rows = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        shipped = Path(resolve(f"asyncrl://quickstart/{split}.jsonl")).read_text()
        prompts = [json.loads(line) for line in shipped.splitlines()]
        assert len(rows) == len(prompts)
        for row, prompt in zip(rows, prompts, strict=True):
            question, answer = row["messages"]
            assert [question] == prompt["prompt"]
            terms = [int(term) for term in question["content"].removesuffix("=").split("+")]
            assert answer == {"role": "assistant", "content": task["solution"](terms)}
    files = [f"data.train_files=[{tmp_path}/train.jsonl]", f"data.val_files=[{tmp_path}/val.jsonl]"]
    found = preflight(check_config(EXAMPLES / "sft" / "config.yaml", files, mode="sft"))
    assert found.problems == ()
