"""Check for many architectures that the engines compute with the weights that the Trainer has published.

    python -m benchmarks.architectures [--only NAME ...] [--tensor-parallel 1 2] [--adapters]
                                       [--json FILE] [--docs FILE]

Each row is a real launch of a tiny random model, on-policy, with a large learning rate: four steps and a weight update
after each. After every update, the engine's weights are compared with the published checksums, and its log-probs with
the Trainer's: of the version's two texts, and of all samples that the next step trains. A row passes if the largest KL
divergence of the texts is at most 1e-6 nats per token and that of the samples 1e-4, and so does a model that is refused
at the start. In float32, right weights give less than 1e-9 (samples up to 1e-5 where two experts are nearly tied), and
the first version of wrongly loaded experts 1e-5 to 1e-2.

With `--adapters`, versions are LoRA adapters on all linear layers (`weight_sync.lora=adapter`). With `--docs`, the
table in FILE is replaced by that of this run.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.models import save_tokenizer
from benchmarks.report import Table, arguments, positive, report
from benchmarks.running import failure_cause, print_progress, run_asyncrl

LIMIT, SAMPLES_LIMIT = 1e-6, 1e-4
LIMITS = (LIMIT, SAMPLES_LIMIT)
"""Largest KL divergences of the texts and of the samples, in nats per token."""
RIGHT, REFUSED = "right", "refused at the start"
STEPS = 4
SIZES: Mapping[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Larger than usual, so that a weight in a wrong place changes the log-probs.
    "initializer_range": 0.2,
}
_EXPERTS = {"num_experts_per_tok": 2}
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "Llama": {},
    "Mistral": {"head_dim": 32},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Gemma3Text": {"head_dim": 32, "sliding_window": 64},
    "Phi3": {},
    "Olmo2": {},
    # 48 is not a multiple of 32, so vLLM pads the experts.
    "Qwen3Moe": _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 48, "head_dim": 32},
    "Mixtral": _EXPERTS | {"num_local_experts": 4, "head_dim": 32},
    "DeepseekV3": _EXPERTS | {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 48,
        "first_k_dense_replace": 1, "num_key_value_heads": 2, "q_lora_rank": 32, "topk_method": "noaux_tc",
        # vLLM's kernels know no other sizes of these two.
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    },
    "GptOss": _EXPERTS | {"num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 64},
}  # fmt: skip
"""Names of transformers' classes without `Config`, with the values that differ from `SIZES`."""
_CLASSES = {"Gemma3Text": "Gemma3ForCausalLM"}
_KEYS = {"GptOss": ("trainer.attn_implementation=eager",)}
"""Configuration that an architecture needs."""
ADAPTERS = ("weight_sync.lora=adapter", "model.lora_rank=5", "model.lora_alpha=7")
_BEGIN, _END = "<!-- python -m benchmarks.architectures -->", "<!-- end of the table -->"


def save_model(directory: Path, name: str) -> Path:
    """Save a random model of the architecture in float32, with the quickstart's tokenizer."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **ARCHITECTURES[name]})
    getattr(transformers, _CLASSES.get(name, f"{name}ForCausalLM"))(config).save_pretrained(directory)
    save_tokenizer(directory, SIZES["vocab_size"])
    return directory


def check(
    name: str, tensor_parallel: int, directory: Path, *overrides: str, limits: tuple[float, float] = LIMITS
) -> dict[str, Any]:
    """Return the row of one launch. `overrides`: further keys of its configuration."""
    run_dir = directory / "run"
    row: dict[str, Any] = {"model": name, "tensor parallel": tensor_parallel}
    try:
        run_asyncrl(
            "launch", "fully_async", "mode_a_on_policy",
            f"run_dir={run_dir}", f"model.path={save_model(directory / 'model', name)}", "data.val_files=[]",
            f"trainer.total_training_steps={STEPS}", "trainer.optim.lr=1e-2", "trainer.optim.warmup_steps=0",
            "trainer.save_last=false", "weight_sync.verify=every", "weight_sync.max_mismatch_kl=null",
            f"rollout.tensor_parallel_size={tensor_parallel}", "logging.console=plain", "logging.sinks=[jsonl]",
            *_KEYS.get(name, ()), *overrides,
        )  # fmt: skip
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        probes = [line["weight_sync/mismatch_kl"] for line in lines if line["kind"] == "apply"]
        samples = [line["rollout/mismatch_kl"] for line in lines if line["kind"] == "step"]
        passed = len(probes) == len(samples) == STEPS and max(probes) <= limits[0] and max(samples) <= limits[1]
        return row | {
            "updates": len(probes),
            "KL of texts": max(probes),
            "KL of samples": max(samples),
            "result": RIGHT if passed else "wrong weights",
        }
    except Exception as error:  # noqa: BLE001  it is the row's result
        # The error of a configuration has the key in a line of its own, then the consequence, then the fix.
        refusal = re.search(r"exited with 2:.*?\n  \S.*?\n    (.*?)\n    fix: ", str(error), re.DOTALL)
        result = f"{REFUSED}: {refusal[1]}" if refusal is not None else failure_cause(str(error))
        return row | {"updates": 0, "KL of texts": None, "KL of samples": None, "result": result}


def markdown(rows: Table) -> Iterator[str]:
    """Yield the lines of the table for the documentation."""
    yield "| model | tensor parallel | KL of texts | KL of samples | result |"
    yield "|---|---|---|---|---|"
    for row in rows:
        kls = (f"{row[kind]:.0e}" if row[kind] is not None else "–" for kind in ("KL of texts", "KL of samples"))
        cells = [row["model"], str(row["tensor parallel"]), *kls, row["result"].replace("|", "\\|")]
        yield f"| {' | '.join(cells)} |"


def write_docs(path: Path, rows: Table) -> None:
    """Replace the table in a page. Raises `ValueError` if the page has none."""
    text = path.read_text(encoding="utf-8")
    if _BEGIN not in text or _END not in text:
        raise ValueError(f"{path}: no lines {_BEGIN!r} and {_END!r}, between which the table belongs")
    before, _, rest = text.partition(_BEGIN)
    table = "\n".join(markdown(rows))
    path.write_text(f"{before}{_BEGIN}\n\n{table}\n\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def main() -> int:
    args = _parser().parse_args()
    rows: Table = []
    for name in args.only or ARCHITECTURES:
        for size in args.tensor_parallel:
            with tempfile.TemporaryDirectory(prefix="asyncrl-architecture-") as directory:
                rows.append(check(name, size, Path(directory), *(ADAPTERS if args.adapters else ())))
            print_progress(f"{name}, tensor parallel {size}: {rows[-1]['result']}")
    report("architectures", rows, args.json, aim=f"KL divergence of texts at most {LIMIT:g} nats per token")
    if args.docs is not None:
        write_docs(args.docs, rows)
    return 0 if all(row["result"].startswith((RIGHT, REFUSED)) for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__, "architectures")
    parser.add_argument("--only", nargs="+", choices=list(ARCHITECTURES), metavar="NAME", help=", ".join(ARCHITECTURES))
    parser.add_argument("--tensor-parallel", nargs="+", type=positive, default=[1], metavar="N", help="default: 1")
    parser.add_argument("--adapters", action="store_true", help="publish LoRA adapters instead of full weights")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="page whose table is replaced, docs/models.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
