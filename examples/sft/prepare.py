"""Write demonstrations of the quickstart's task: sums with their steps.

python examples/sft/prepare.py          # runs/sft-data/train.jsonl and val.jsonl
python examples/sft/prepare.py --out DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import click

from asyncrl.assets import resolve


def solution(question: str) -> str:
    """Return the steps and the answer of a sum: `17+5+8=` gives `17+5=22;22+8=30;#30`."""
    first, *terms = map(int, question.removesuffix("=").split("+"))
    running, steps = first, ""
    for term in terms:
        steps += f"{running}+{term}={running + term};"
        running += term
    return f"{steps}#{running}"


def prepare(out: Path) -> None:
    """Write each prompt of the quickstart's data, which are sums, with its solution as the assistant's turn."""
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        lines = []
        for line in Path(resolve(f"asyncrl://quickstart/{split}.jsonl")).read_text(encoding="utf-8").splitlines():
            (message,) = json.loads(line)["prompt"]
            answer = {"role": "assistant", "content": solution(message["content"])}
            lines.append(json.dumps({"messages": [message, answer]}))
        (out / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/sft-data"), help="directory of the two files")
    arguments = parser.parse_args()
    prepare(arguments.out)
    click.echo(f"wrote {arguments.out / 'train.jsonl'} and {arguments.out / 'val.jsonl'}")


if __name__ == "__main__":
    main()
