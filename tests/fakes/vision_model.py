"""A vision-language model that is small enough for tests, made without downloads, and its processor."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

FEATURES = 4
"""Number of placeholders of an image, without the tokens around them."""
SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>")
SPLIT = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and of the special tokens of Idefics3."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|end|>",
        eos_token="<|im_end|>",
        pad_token="<|end|>",
        additional_special_tokens=[*SPECIAL, *SPLIT, "<end_of_utterance>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_vision_model(directory: Path, *, seed: int = 0) -> Path:
    """Write an Idefics3 of 150,000 parameters with two vision layers and two language layers.

    Its processor needs no torchvision, unlike those of most models that both transformers and vLLM support.
    """
    tokenizer = make_tokenizer()
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.3,
        **special,
    )
    sight = Idefics3VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        initializer_range=0.3,
    )
    settings = Idefics3Config(
        text_config=text.to_dict(),
        vision_config=sight.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Idefics3ForConditionalGeneration(settings)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    size = {"longest_edge": 32}
    image_processor = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    Idefics3Processor(image_processor, tokenizer, image_seq_len=FEATURES, chat_template=TEMPLATE).save_pretrained(
        directory
    )
    return directory


def picture(seed: int, size: tuple[int, int] = (40, 24)) -> Image.Image:
    """Return an image of noise, which differs for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(noise)


def png(seed: int) -> bytes:
    written = io.BytesIO()
    picture(seed).save(written, "PNG")
    return written.getvalue()
