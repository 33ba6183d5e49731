"""`rollout.quantization`: engines that round their weights, and what a run with them needs.

Samples of such engines come from another distribution than the one that is trained, so the Trainer recomputes their
log-probs, and truncated importance weights correct for the difference (FlashRL,
https://fengyao.notion.site/flash-rl).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.config.environment import visible_gpus
from asyncrl.config.problems import ConfigProblem, ConfigRule, RuleFunction, warning
from asyncrl.config.sections.base import on_gpus

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

Quantization = Literal["fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8", "mxfp4"]
"""vLLM's names of the formats to which it can round the weights of linear layers and experts as it loads them."""
_CPU_FORMATS = ("fp8_per_channel",)
_CORRECTION, _LIMIT = "algorithm.rollout_correction", "weight_sync.max_mismatch_kl"
QUANTIZED_DEFAULTS: Mapping[str, Any] = {
    f"{_CORRECTION}.bypass_mode": False,
    f"{_CORRECTION}.rollout_is": "token",
    _LIMIT: 0.1,
}
"""Defaults of these keys in a run with quantized engines."""
NOT_GIVEN = "<default>"
"""Value of these keys during the composition of a configuration, until a file or override gives another one."""
HALF_PRECISION = {_LIMIT: 1e-3}
"""Default in a run without quantization whose engines or Trainer compute with 16 bits."""


def defaults_of_run(tree: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for the keys of `QUANTIZED_DEFAULTS` that a configuration does not give, by dotted key.

    With `bypass_mode: true` or `rollout_is: none`, the correction is off on purpose. The policy gradient
    (`policy_loss: reinforce`) has its importance weights in bypass mode.

    Args:
        tree: all values of the configuration, with references resolved.
        defaults: the defaults of a run without quantization in float32, by dotted key.
    """
    rollout, algorithm = tree.get("rollout"), tree.get("algorithm")
    quantized = isinstance(rollout, dict) and rollout.get("quantization") is not None
    correction = algorithm.get("rollout_correction") if isinstance(algorithm, dict) else None
    plain = set(QUANTIZED_DEFAULTS) if not quantized else set()
    match correction:
        case {"bypass_mode": True} | {"rollout_is": "none"}:
            plain |= {f"{_CORRECTION}.bypass_mode", f"{_CORRECTION}.rollout_is"}
    if isinstance(algorithm, dict) and algorithm.get("policy_loss") == "reinforce":
        plain.add(f"{_CORRECTION}.bypass_mode")
    training = tree.get("trainer")
    dtypes = {section.get("dtype") for section in (rollout, training) if isinstance(section, dict)}
    defaults = defaults if dtypes == {"float32"} else {**defaults, **HALF_PRECISION}
    found = {}
    for key, value in QUANTIZED_DEFAULTS.items():
        *sections, name = key.split(".")
        place: Any = tree
        for section in sections:
            place = place.get(section, {}) if isinstance(place, dict) else None
        if isinstance(place, dict) and place.get(name, NOT_GIVEN) == NOT_GIVEN:
            found[key] = defaults[key] if key in plain else value
    return found


ENGINE_RULES: tuple[RuleFunction, ...] = (
    ConfigRule("rollout.quantization",
               lambda c: c.rollout.quantization is not None and c.rollout.dtype == "float32",
               "vLLM quantizes only models whose activations have 16 bits, so no engine would start",
               "set rollout.dtype=bfloat16"),
)  # fmt: skip
"""Rules for engines of any kind."""


def _uncorrected(config: Config) -> Iterator[ConfigProblem]:
    """Warn about quantized engines whose samples are trained as if they were the Trainer's own."""
    quantization = config.rollout.quantization
    if quantization is None or config.validates_only:
        return
    if config.algorithm.rollout_correction.rollout_is == "none":
        yield warning(
            f"{_CORRECTION}.rollout_is",
            "none",
            f"with rollout.quantization={quantization} samples come from rounded weights, and nothing corrects for the "
            "difference: the gradient is biased",
            f"set {_CORRECTION}.bypass_mode=false and rollout_is=token, or leave both out",
        )
    limit = config.weight_sync.max_mismatch_kl
    if limit is not None and limit < 0.01 and config.weight_sync.verify != "off":
        yield warning(
            _LIMIT,
            limit,
            f"with rollout.quantization={quantization} log-probs of engines and Trainer differ by more than usual, so "
            "the run may stop at its first version",
            f"set it to {QUANTIZED_DEFAULTS[_LIMIT]:g}, or leave it out",
        )


RULES: tuple[RuleFunction, ...] = (
    _uncorrected,
    ConfigRule("rollout.quantization",
               lambda c: c.rollout.quantization is not None and c.weight_sync.backend == "nccl"
               and c.weight_sync.verify != "off",
               "checksums of quantized engines are those of what they fetch, and with weight_sync.backend=nccl they "
               "fetch nothing, so the first weight sync would fail",
               "set weight_sync.backend=object_store, or weight_sync.verify=off and watch rollout/mismatch_kl"),
)  # fmt: skip


def check_kernels(config: Config) -> Iterator[ConfigProblem]:
    """Refuse a format for which vLLM has no kernel on this machine."""
    wanted, elsewhere = config.rollout.quantization, config.ray.address is not None
    gpus = on_gpus(config.rollout.device, elsewhere or visible_gpus() > 0)
    if wanted is not None and wanted not in _CPU_FORMATS and not gpus:
        yield ConfigProblem(
            "rollout.quantization",
            wanted,
            "engines have no GPU (rollout.device), and vLLM computes it on GPUs only",
            f"set it to {_CPU_FORMATS[0]}, or leave it out",
        )
