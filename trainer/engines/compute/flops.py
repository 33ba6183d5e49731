"""Model FLOPs utilization (MFU) of training on a GPU. Pure.

FLOPs of a sequence of `T` tokens in a model with `P` parameters in matrix products, of which `P_t` are trained
(https://arxiv.org/abs/2001.08361 §2.1; https://arxiv.org/abs/2204.02311 appendix B):

    forward    2 P T + 2 W T²          backward    2 P T + 2 P_t T + 4 W T²

If all parameters are trained, the sum without attention is the well-known 6 P T. `W` is layers × heads × head size. The
attention term is that of a causal model, half of what appendix B counts. Recomputation (gradient checkpointing) does
not count. A sliding window, or a head that sees only the scored positions, needs a little less than the formulas say;
the state of linear attention or a convolution needs a little more. For a model that the formulas do not fit, the
utilization is unknown.

Peaks are those of dense bfloat16 products with float32 sums, without sparsity, from NVIDIA's data sheets (B200: HGX
B200 and GB200 NVL72; H200, H100 and GH200; H20 and H800 as sold in China; A100, A800, A40, A30, A10, L40S, L40, L4) and
architecture white papers (RTX: Blackwell, Ada and GA102). If a sheet gives only a figure with sparsity, half of that
figure is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Self

_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"GB200", 2500.0),
    (r"B200", 2250.0),
    (r"H200 NVL", 835.5),
    (r"G?H200", 989.4),
    (r"H[18]00 PCIe", 756.0),
    (r"H100 NVL", 835.5),
    (r"H100|H800", 989.4),
    (r"H20", 148.0),
    (r"A100|A800", 312.0),
    (r"A40", 149.7),
    (r"A30", 165.0),
    (r"A10", 125.0),
    (r"L40S", 362.0),
    (r"L40", 181.0),
    (r"L4", 121.0),
    (r"RTX 5090", 209.5),
    (r"RTX 4090", 165.2),
    (r"RTX 3090", 71.0),
)
"""Peak TFLOPs per second by a pattern in the device name; the first match counts."""

_SQUARE = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Values of `layer_types` for layers whose attention cost grows with the square of the sequence length."""
_LINEAR = frozenset({"linear_attention", "conv"})


def peak_flops(device_name: str) -> float | None:
    """Return the peak FLOPs per second of a GPU by its `torch.cuda.get_device_name`; None if it is unknown."""
    if re.search(r"Laptop|MIG|\b(?:D|Ti|SUPER)\b", device_name):  # another chip, or a part of one, with a similar name
        return None
    for pattern, tflops in _PEAK_TFLOPS:
        if re.search(rf"\b(?:{pattern})\b", device_name):
            return tflops * 1e12
    return None


class ModelShape(NamedTuple):
    """The numbers that determine the cost of a token."""

    parameters: float
    """Parameters that a token is multiplied with: without embedding tables, and with only the experts that process
    it."""
    trained: float
    """The trained ones among these."""
    attention_width: int
    """Layers × heads × head size."""

    @classmethod
    def of(cls, config: Any, sizes: Iterable[tuple[str, int, bool]]) -> Self | None:
        """Return the shape of a model; None if the configuration lacks a number or the formulas don't fit the model.

        Args:
            config: the Hugging Face configuration of the model's text part.
            sizes: the name of each parameter in matrix products, its number of elements, and whether it is trained.
        """
        with suppress(Exception):  # configurations raise various errors, not only AttributeError
            return cls._of(config, sizes)
        return None

    @classmethod
    def of_model(cls, model: Any) -> Self | None:
        """Return the shape of an unsharded Hugging Face model, including adapters; None as in `of`."""
        with suppress(Exception):
            head = model.get_output_embeddings()
            tables = {id(module.weight) for module in model.modules() if hasattr(module, "num_embeddings")}
            looked_up = tables - {id(head.weight)} if head is not None else tables
            sizes = (
                (name, parameter.numel(), parameter.requires_grad)
                for name, parameter in model.named_parameters()
                if id(parameter) not in looked_up
            )
            return cls._of(model.config.get_text_config(), sizes)
        return None

    @classmethod
    def _of(cls, config: Any, sizes: Iterable[tuple[str, int, bool]]) -> Self | None:
        heads = config.num_attention_heads
        head_size, layers = _head_size(config, heads), _attention_layers(config)
        if layers is None:
            return None
        num_experts, routed = _experts(config)
        parameters, trained, experts_seen = 0.0, 0.0, False
        for name, size, trains in sizes:
            counts = float(size)
            if ".experts." in name:
                if routed is None:
                    return None
                counts, experts_seen = size * routed, True
            parameters += counts
            trained += counts * trains
        if num_experts > 1 and not experts_seen:  # experts under another name would all count for each token
            return None
        return cls(parameters, trained, layers * heads * head_size)

    def flops(self, lengths: Iterable[int], *, backward: bool) -> float:
        """Return the FLOPs of a forward pass, and with `backward` also of a backward pass, over sequences of these
        lengths in tokens."""
        tokens = squares = 0
        for length in lengths:
            tokens += length
            squares += length * length
        forward = 2 * self.parameters * tokens + 2 * self.attention_width * squares
        if not backward:
            return forward
        return forward + 2 * (self.parameters + self.trained) * tokens + 4 * self.attention_width * squares


class Utilization:
    """Counts the FLOPs since the last `reset`, on a device whose peak is known."""

    def __init__(self, shape: ModelShape, peak: float, *, sharing: int = 1) -> None:
        """
        Args:
            peak: FLOPs per second.
            sharing: ranks that compute each sequence together.
        """
        self._shape, self._peak, self._sharing = shape, peak, sharing
        self._work = 0.0

    def reset(self) -> None:
        self._work = 0.0

    def add(self, lengths: Iterable[int], *, backward: bool) -> None:
        self._work += self._shape.flops(lengths, backward=backward) / self._sharing

    def of(self, seconds: float) -> float:
        """Return the share of the peak that was used if the work took this many seconds."""
        return self._work / (seconds * self._peak) if seconds > 0 else 0.0


def _head_size(config: Any, heads: int) -> int:
    if getattr(config, "kv_lora_rank", None):  # latent attention: the mean of the sizes for scores and values
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) // 2
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _attention_layers(config: Any) -> int | None:
    """Return the number of layers whose attention cost grows quadratically; None if some layers are of an unknown
    kind."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return None if getattr(config, "layers_block_type", None) else int(config.num_hidden_layers)
    if not _SQUARE.union(_LINEAR).issuperset(kinds):
        return None
    return sum(kind in _SQUARE for kind in kinds)


def _experts(config: Any) -> tuple[int, float | None]:
    """Return the number of experts, and the share of them that a token passes through (None: unknown)."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((number for name in names if (number := getattr(config, name, None))), 0)
    chosen = getattr(config, "num_experts_per_tok", None)
    return num_experts, chosen / num_experts if num_experts and chosen else None
