"""Random models of given shapes, saved as model directories: speed and memory don't depend on the weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.assets import resolve


@dataclass(frozen=True)
class TransformerShape:
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocab_size: int
    max_positions: int = 2048


SHAPES = {
    "1M": TransformerShape(hidden_size=128, layers=4, heads=4, kv_heads=4, intermediate_size=512, vocab_size=64),
    "135M": TransformerShape(hidden_size=576, layers=30, heads=9, kv_heads=3, intermediate_size=1536, vocab_size=49152),
}
"""`1M` is about the size of the quickstart's model; `135M` has the shape of SmolLM2-135M."""
QWEN_SHAPES = {
    "0.5B": TransformerShape(
        896, layers=24, heads=14, kv_heads=2, intermediate_size=4864, vocab_size=151936, max_positions=32768
    ),
    "1.5B": TransformerShape(
        1536, layers=28, heads=12, kv_heads=2, intermediate_size=8960, vocab_size=151936, max_positions=32768
    ),
}
"""The shapes of Qwen2.5."""
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")


def make_llama(directory: Path, shape: TransformerShape) -> Path:
    """Save a random Llama with tied embeddings, and a tokenizer with one character per id, which starts at `!`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        **dimensions(shape),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    words = [*SPECIAL, *(chr(33 + index) for index in range(shape.vocab_size - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(directory)
    return directory


def make_qwen(directory: Path, shape: TransformerShape) -> Path:
    """Save a random Qwen 2 with tied embeddings, in bfloat16, with the quickstart's tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**dimensions(shape))
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    save_tokenizer(directory, shape.vocab_size)
    return directory


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Save the quickstart's tokenizer and chat template, with a word for every id that a random model may sample."""
    source = Path(resolve("asyncrl://quickstart"))
    for file in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / file, directory)
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    words = content["model"]["vocab"]
    words |= {f"<unused {number}>": number for number in range(len(words), vocab_size)}
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


def dimensions(shape: TransformerShape) -> dict[str, Any]:
    """Return the config values of transformers, with tied embeddings."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": True,
    }
