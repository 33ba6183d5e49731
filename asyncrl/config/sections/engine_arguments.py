"""`rollout.engine_kwargs`: arguments of vLLM's `AsyncEngineArgs`, and why some are refused.

An argument passes through to vLLM unless vLLM does not have it, another key sets it, or samples and weights would no
longer be exact with it: the recorded log-probs must be those of the distribution from which the tokens were drawn, and
the engine must compute with the model and the weights of the Trainer.

Speculative decoding passes: drafts are accepted such that tokens have the policy's distribution, and log-probs are the
policy's own, also with drafts of an older version.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

from asyncrl.config.environment import package_folder, visible_gpus
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.sections.base import on_gpus

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
    "pipeline_parallel_size": "set rollout.pipeline_parallel_size",
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
_MORE_PROCESSES = ("prefill_context_parallel_size", "nnodes", "node_rank", "data_parallel_")
"""Engine arguments, or what their names begin with, that divide an engine among more processes."""
_OTHER_MODEL = "the engine would compute another model than the Trainer, which reads model.path alone"
_OTHER_TOKENS = (
    "tokens would come from a changed distribution, and recorded log-probs and the loss are of the model's own"
)
_INEXACT: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("hf_overrides", "hf_config_path", "model_class_overrides"), (_OTHER_MODEL, "change config.json in model.path")
    ),
    "enable_return_routed_experts": (
        "the Trainer routes tokens by its own weights, and nothing reads the experts that come with each answer",
        "leave it out",
    ),
    "enable_eplb": ("checksums would count an expert once for each rank that has it", "leave it out"),
    **dict.fromkeys(
        ("logits_processors", "watermark_config"),
        (_OTHER_TOKENS, "leave it out; rollout.sampling has what the loss can take into account"),
    ),
}
"""Engine arguments with which samples would not be those of the policy, or that nothing uses, each with the reason and
the fix."""


def check_engine_arguments(config: Config) -> Iterator[ConfigProblem]:
    """Refuse engine arguments that other keys set, and those with which samples or weights would not be exact."""
    for name, value in config.rollout.engine_kwargs.items():
        if fix := _SET_ELSEWHERE.get(name):
            yield ConfigProblem(f"{_ARGUMENTS}.{name}", value, "asyncrl sets it, and the two values could differ", fix)
        elif name.startswith(_MORE_PROCESSES):
            consequence = "asyncrl assigns GPUs by the parallel sizes of rollout and rollout.num_replicas alone"
            yield ConfigProblem(f"{_ARGUMENTS}.{name}", value, consequence, "set one of these")
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
        case "config_format" if value not in ("auto", "hf"):
            return _OTHER_MODEL, "leave it out: both sides read config.json in model.path"
        case "runner" if value not in ("auto", "generate"):
            return "the engine would generate nothing", "leave it out"
        case "convert" if value not in ("auto", "none"):
            return "the engine would generate nothing", "leave it out"
        case "speculative_config" if isinstance(value, dict) and value.get("rejection_sample_method") == "synthetic":
            consequence = "it accepts drafts at a given rate, so the tokens are no samples of the policy"
            return (
                consequence,
                "leave rejection_sample_method out: drafts are then accepted as the policy would draw them",
            )
        case _:
            return _INEXACT.get(name) if value else None


def check_argument_names(config: Config) -> Iterator[ConfigProblem]:
    """Refuse arguments that vLLM does not have, and values of another type than vLLM declares."""
    for name, value in config.rollout.engine_kwargs.items():
        key, known = f"{_ARGUMENTS}.{name}", argument_types()
        if known and name not in known:
            close = get_close_matches(name, known, 1)
            fix = "leave it out (`vllm serve --help` lists its arguments)"
            if close:
                fix = f"did you mean {close[0]}? {_SET_ELSEWHERE.get(close[0], '')}".rstrip()
            yield ConfigProblem(key, value, "vLLM has no such argument, so no engine starts", fix)
        elif known and not _has_type(value, known[name]):
            consequence = f"vLLM wants {known[name]} here, so no engine starts"
            yield ConfigProblem(key, value, consequence, "give such a value, or leave it out")
        elif name == "speculative_config" and isinstance(value, Mapping):
            yield from _speculation(key, value)


def _speculation(key: str, settings: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    known = _declared_types("config/speculative.py", "SpeculativeConfig")
    for written, value in settings.items():
        name = written.replace("-", "_")
        if known and name not in known:
            close = get_close_matches(name, known, 1)
            fix = f"did you mean {close[0]}?" if close else f"leave it out; there are {', '.join(sorted(known))}"
            yield ConfigProblem(f"{key}.{written}", value, "vLLM has no such key here, so no engine starts", fix)
        elif known and not _has_type(value, known[name]):
            consequence = f"vLLM wants {known[name]} here, so no engine starts"
            yield ConfigProblem(f"{key}.{written}", value, consequence, "give such a value, or leave it out")


_PLAIN_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
    "dict": (dict,),
    "list": (list, tuple),
    "set": (list, tuple),
}
"""Values in YAML of the types that vLLM declares."""


def _has_type(value: Any, declared: str) -> bool:
    """Whether a value may have a declared type; what is inside of lists and mappings, and types that are not plain, are
    left to vLLM."""
    kinds = _kinds(ast.parse(declared, mode="eval").body)
    if not set(kinds) <= _PLAIN_TYPES.keys():
        return True
    return isinstance(value, tuple(one for kind in kinds for one in _PLAIN_TYPES[kind]))


def _kinds(declared: ast.expr) -> list[str]:
    """Return the names of a type's members, without those of the types inside of them."""
    if isinstance(declared, ast.BinOp):
        return [*_kinds(declared.left), *_kinds(declared.right)]
    return [ast.unparse(declared.value if isinstance(declared, ast.Subscript) else declared)]


def check_expert_parallel(config: Config) -> Iterator[ConfigProblem]:
    """Refuse expert parallelism on CPUs, where vLLM's workers die with their first requests (0.32)."""
    rollout, name = config.rollout, "enable_expert_parallel"
    gpus = on_gpus(rollout.device, config.ray.address is not None or visible_gpus() > 0)
    if rollout.engine_kwargs.get(name) and rollout.tensor_parallel_size > 1 and not gpus:
        consequence = (
            "engines have no GPU (rollout.device), and vLLM's workers die with it on CPUs, at their first requests"
        )
        yield ConfigProblem(f"{_ARGUMENTS}.{name}", True, consequence, "leave it out")


def check_pipeline_parallel(config: Config) -> Iterator[ConfigProblem]:
    """Refuse pipeline stages on CPUs, where the first request of vLLM (0.32) ends with `assert
    self.intermediate_tensors is not None` in the second stage."""
    size = config.rollout.pipeline_parallel_size
    if size > 1 and not on_gpus(config.rollout.device, config.ray.address is not None or visible_gpus() > 0):
        consequence = "engines have no GPU (rollout.device), and vLLM's pipeline parallelism fails on CPUs"
        yield ConfigProblem("rollout.pipeline_parallel_size", size, consequence, "set it to 1")


def argument_types() -> Mapping[str, str]:
    """Return the arguments and their types, as vLLM's source declares them; empty if vLLM is not installed."""
    return _declared_types("engine/arg_utils.py", "EngineArgs", "AsyncEngineArgs")


@cache
def _declared_types(file: str, *classes: str) -> Mapping[str, str]:
    """Return the public fields of vLLM's classes and their types, from its source: importing vLLM takes seconds."""
    if (folder := package_folder("vllm")) is None:
        return {}
    found = (node for node in ast.parse((folder / file).read_text(encoding="utf-8")).body)
    declared = (one for node in found if isinstance(node, ast.ClassDef) and node.name in classes for one in node.body)
    fields = ((one.target, one.annotation) for one in declared if isinstance(one, ast.AnnAssign))
    return {
        name.id: ast.unparse(annotation)
        for name, annotation in fields
        if isinstance(name, ast.Name) and not name.id.startswith("_")
    }
