"""A reward model small enough for tests."""

from __future__ import annotations

from pathlib import Path

from asyncrl.assets import resolve

QUICKSTART = resolve("asyncrl://quickstart")
CONTEXT = 48
"""Longest conversation, in tokens."""


def make_classifier(path: Path, *, num_labels: int = 1, pad_token_id: int | None = None, template: bool = True) -> str:
    """A small Llama classifier with random weights and the quickstart's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    if not template:
        tokenizer.chat_template = None
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, num_labels=num_labels, pad_token_id=pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)
