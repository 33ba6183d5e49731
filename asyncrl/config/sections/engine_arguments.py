"""`rollout.engine_kwargs`: arguments of vLLM's `AsyncEngineArgs`, and why some are refused. And `rollout.quantization`.

An argument passes through to vLLM unless vLLM does not have it, another key sets it, or samples and weights would no
longer be exact with it: the recorded log-probs must be those of the distribution from which the tokens were drawn, and
the engine must compute with the model and the weights of the Trainer.

Speculative decoding passes: drafts are accepted such that tokens have the policy's distribution, and log-probs are the
policy's own, also with drafts of an older version.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.config.environment import visible_gpus
from asyncrl.config.problems import ConfigProblem, ConfigRule, RuleFunction, warning

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

_ARGUMENTS = "rollout.engine_kwargs"
_SET_ELSEWHERE: Mapping[str, str] = {
    "model": "set model.path",
    "tokenizer": "set model.tokenizer_path",
    "trust_remote_code": "set model.trust_remote_code",
    "dtype": "set rollout.dtype",
    "enforce_eager": "set rollout.enforce_eager",
    "gpu_memory_utilization": "set rollout.gpu_memory_utilization",
    "max_model_len": "set rollout.max_model_len",
    "max_num_seqs": "set rollout.max_num_seqs",
    "tensor_parallel_size": "set rollout.tensor_parallel_size",
    **dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size"),
        "set rollout.tensor_parallel_size or rollout.num_replicas: GPUs are assigned only for these",
    ),
    "load_format": "leave it out: weights are read from safetensors, never from a pickle",
    "logprobs_mode": "leave it out: log-probs must be those the loss expects",
    "weight_transfer_config": "set weight_sync.backend",
    **dict.fromkeys(("quantization", "quantization_config"), "set rollout.quantization"),
    "enable_sleep_mode": "set placement",
    **dict.fromkeys(
        (
            "enable_lora",
            "max_loras",
            "max_cpu_loras",
            "max_lora_rank",
            "lora_dtype",
            "lora_target_modules",
            "fully_sharded_loras",
        ),
        "set weight_sync.lora=adapter and model.lora_rank",
    ),
    "worker_cls": "leave it out: weight updates need the engine's own worker class",
    "worker_extension_cls": "leave it out: weight updates need asyncrl's extension",
}
"""Engine arguments that other keys set or that are fixed, each with the fix that the error message gives."""
_OTHER_MODEL = "the engine would compute another model than the Trainer, which reads model.path alone"
_OTHER_TOKENS = (
    "tokens would come from a changed distribution, and recorded log-probs and the loss are of the model's own"
)
_INEXACT: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("hf_overrides", "model_class_overrides"), (_OTHER_MODEL, "change config.json in model.path")),
    **dict.fromkeys(
        ("logits_processors", "watermark_config"),
        (_OTHER_TOKENS, "leave it out; rollout.sampling has what the loss can take into account"),
    ),
}
"""Engine arguments with which samples would not be those of the policy, each with the reason and the fix."""


def check_engine_arguments(config: Config) -> Iterator[ConfigProblem]:
    """Refuse engine arguments that other keys set, and those with which samples or weights would not be exact."""
    for name, value in config.rollout.engine_kwargs.items():
        if fix := _SET_ELSEWHERE.get(name):
            yield ConfigProblem(f"{_ARGUMENTS}.{name}", value, "asyncrl sets it, and the two values could differ", fix)
        elif (found := _inexact(config, name, value)) is not None:
            yield ConfigProblem(f"{_ARGUMENTS}.{name}", value, *found)


def _inexact(config: Config, name: str, value: Any) -> tuple[str, str] | None:
    """Return why an engine with this argument would not be exact, and the fix; None if it is."""
    rollout, sync = config.rollout, config.weight_sync
    match name:
        case "kv_cache_dtype" if value not in ("auto", rollout.dtype) and sync.max_mismatch_kl is not None:
            consequence = (
                "keys and values are rounded, so log-probs differ from the Trainer's, and the run may stop at "
                f"weight_sync.max_mismatch_kl = {sync.max_mismatch_kl:g}"
            )
            return consequence, "leave it out, or set weight_sync.max_mismatch_kl=null and algorithm.rollout_correction"
        case "speculative_config" if isinstance(value, dict) and value.get("rejection_sample_method") == "synthetic":
            consequence = "it accepts drafts at a given rate, so the tokens are no samples of the policy"
            return (
                consequence,
                "leave rejection_sample_method out: drafts are then accepted as the policy would draw them",
            )
        case _:
            return _INEXACT.get(name) if value else None


def check_argument_names(config: Config) -> Iterator[ConfigProblem]:
    """Refuse arguments that vLLM does not have."""
    for name, value in config.rollout.engine_kwargs.items():
        if (known := argument_names()) and name not in known:
            close = get_close_matches(name, known, 1)
            fix = "leave it out (`vllm serve --help` lists its arguments)"
            if close:
                fix = f"did you mean {close[0]}? {_SET_ELSEWHERE.get(close[0], '')}".rstrip()
            yield ConfigProblem(f"{_ARGUMENTS}.{name}", value, "vLLM has no such argument, so no engine starts", fix)


@cache
def argument_names() -> frozenset[str]:
    """Return the names of the arguments, as vLLM's source declares them; empty if vLLM is not installed. An import of
    vLLM would take seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return frozenset()
    source = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py").read_text(encoding="utf-8")
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    declared = (one for node in classes if node.name in ("EngineArgs", "AsyncEngineArgs") for one in node.body)
    fields = (one.target for one in declared if isinstance(one, ast.AnnAssign))
    return frozenset(one.id for one in fields if isinstance(one, ast.Name) and not one.id.startswith("_"))


# ------------------------------------------------------------------------------------------------ quantization

Quantization = Literal[
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "mxfp8",
    "mxfp4",
    "nvfp4_per_token",
    "int8_per_channel_weight_only",
]
"""vLLM's names of the formats to which it rounds weights as it loads them."""
_CPU_QUANTIZATIONS = ("fp8_per_channel",)
_CORRECTION, _LIMIT = "algorithm.rollout_correction", "weight_sync.max_mismatch_kl"
CORRECTED = {
    _LIMIT: 0.1,
    f"{_CORRECTION}.bypass_mode": False,
    f"{_CORRECTION}.rollout_is": "token",
}
"""Values of a run with quantized engines, unless they are given: the Trainer recomputes the log-probs of samples, and
truncated importance weights correct for the rounded weights (FlashRL, https://fengyao.notion.site/flash-rl)."""


def correct_quantized(tree: dict[str, Any], user_values: Mapping[str, Any]) -> None:
    """Set `CORRECTED` in the values of a configuration with quantized engines, except what is given. An algorithm that
    has a correction of its own keeps it."""
    rollout, sync, algorithm = (tree.get(name) for name in ("rollout", "weight_sync", "algorithm"))
    if not isinstance(rollout, dict) or rollout.get("quantization") is None:
        return
    if isinstance(sync, dict) and _LIMIT not in user_values:
        sync["max_mismatch_kl"] = CORRECTED[_LIMIT]
    given = any(key in user_values for key in CORRECTED if key != _LIMIT)
    match algorithm:
        case {"rollout_correction": {"bypass_mode": True, "rollout_is": "none"} as correction} if not given:
            correction |= {key.rpartition(".")[2]: value for key, value in CORRECTED.items() if key != _LIMIT}


QUANTIZATION_RULES: tuple[RuleFunction, ...] = (
    ConfigRule("rollout.quantization",
               lambda c: c.rollout.quantization is not None and c.rollout.dtype == "float32",
               "vLLM quantizes only models whose activations have 16 bits, so no engine would start",
               "set rollout.dtype=bfloat16"),
    ConfigRule("rollout.quantization",
               lambda c: c.rollout.quantization is not None and c.weight_sync.backend == "nccl"
               and c.weight_sync.verify != "off",
               "checksums of quantized engines are those of what they fetch, and with weight_sync.backend=nccl they "
               "fetch nothing, so the first weight sync would fail",
               "set weight_sync.backend=object_store, or weight_sync.verify=off and watch rollout/mismatch_kl"),
)  # fmt: skip


def check_correction(config: Config) -> Iterator[ConfigProblem]:
    """Warn about quantized engines whose samples are trained as if they were the Trainer's own."""
    if config.rollout.quantization is not None and config.algorithm.rollout_correction.rollout_is == "none":
        yield warning(
            f"{_CORRECTION}.rollout_is",
            "none",
            f"with rollout.quantization={config.rollout.quantization} samples come from rounded weights, and nothing "
            "corrects for the difference: the gradient is biased",
            f"set {_CORRECTION}.bypass_mode=false and rollout_is=token, or leave both out",
        )


def check_kernels(config: Config) -> Iterator[ConfigProblem]:
    """Refuse a quantization for which vLLM has no kernel on this machine."""
    wanted = config.rollout.quantization
    elsewhere = config.ray.address is not None or config.rollout.attach is not None
    if wanted is not None and wanted not in _CPU_QUANTIZATIONS and not elsewhere and not visible_gpus():
        yield ConfigProblem(
            "rollout.quantization",
            wanted,
            "this machine shows no GPU, and vLLM computes it on GPUs only",
            f"set it to {_CPU_QUANTIZATIONS[0]}, or leave it out",
        )
