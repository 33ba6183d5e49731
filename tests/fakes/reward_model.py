"""Reward models that are small enough for tests."""

from __future__ import annotations

import json
from pathlib import Path

from asyncrl.assets import resolve

QUICKSTART = resolve("asyncrl://quickstart")
CONTEXT = 48
"""Maximum number of tokens in a conversation."""


def make_classifier(path: Path, *, num_labels: int = 1, pad_token_id: int | None = None, template: bool = True) -> str:
    """Write a small Llama classifier with random weights and the quickstart's tokenizer."""
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


def make_pair_classifier(path: Path) -> str:
    """Write a small BERT classifier with random weights, whose tokenizer marks the two parts of a pair."""
    import torch
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART)
    tokenizer.chat_template = None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A:0 $B:1", special_tokens=[])
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=CONTEXT, num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    settings = path / "tokenizer_config.json"
    inputs = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | inputs))
    return str(path)
