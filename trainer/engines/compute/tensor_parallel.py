"""Tensor parallelism: ranks share the matrices and attention heads of each layer, as transformers' plans say.

A column-wise layer has some of its outputs on each rank, a row-wise layer sums over the ranks; between the two, a rank
computes its attention heads, or its part of the MLP. A rank has some of a layer's experts, and computes them for the
tokens that the router sends there; the ranks' results are summed. Weights are DTensors. Hidden states are the same on
all ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from asyncrl.config.environment import model_config
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from trainer.engines.compute.experts import router_classes
from trainer.engines.models import empty_model

KEY = "tensor_parallel_size"
STYLES = {"colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_rep", "embedding_rowwise"}
EXPERT_WEIGHTS, EXPERTS, ROUTER = "grouped_gemm", "moe_tp_experts", "ep_router"
PARTIAL = "replicated_with_grad_allreduce"
"""Norms of a rank's attention heads. transformers would sum their gradients in every backward pass, and those of a
step's first micro-batches again with those of its later ones; the engine sums them once, before the step."""


def share_layers(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Share the layers of a model without weights over the ranks of `mesh`, in place. Return the names of the modules
    whose gradients are summands of which the ranks have one each.

    Raises:
        ConfigError: the model has no plan, or one that is not supported here; its heads or experts cannot be divided.
    """
    assert isinstance(model, PreTrainedModel)
    size, name, text = mesh.size(), type(model).__name__, model.config.get_text_config()
    plan, experts, problem = _plan(model)
    if problem:
        raise ConfigError(f"trainer.{KEY}={size}: {problem}; set trainer.{KEY}=1")
    if any(parameter.is_meta is False for parameter in model.parameters()):
        raise ConfigError(
            f"trainer.{KEY}={size}: {name} has weights before it is shared (adapters, quantized or own code); set "
            f"trainer.{KEY}=1"
        )
    check_divides(text, size, with_experts=bool(experts))
    try:
        apply_tensor_parallelism(model, mesh, {key: style for key, style in plan.items() if style != PARTIAL})
    except ValueError as error:  # a dimension cannot be divided, for example that of the vocabulary
        raise ConfigError.wrap(f"trainer.{KEY}={size}: {name} cannot be shared; set trainer.{KEY}=1", error) from error
    patterns = [re.compile(re.escape(key).replace(r"\*", r"\d+")) for key, style in plan.items() if style == PARTIAL]
    return [name for name, _ in model.named_modules() if any(pattern.fullmatch(name) for pattern in patterns)]


def check_divides(config: PretrainedConfig, size: int, *, with_experts: bool) -> None:
    """Check that each of `size` ranks gets as many heads, and experts, as the others.

    Raises:
        ConfigError: `size` does not divide their number.
    """
    keys = ("num_attention_heads", "num_key_value_heads", *(["num_experts"] if with_experts else []))
    numbers = {key: getattr(config, key) for key in keys}
    for key, number in numbers.items():
        if number % size:
            what = "experts" if key == "num_experts" else "heads"
            raise ConfigError(
                f"trainer.{KEY}={size}: does not divide the model's {number} {what} ({key}); set it to 1, or to "
                f"another divisor of {math.gcd(*numbers.values())}"
            )


def check_model(config: Config) -> Iterator[ConfigProblem]:
    """Refuse `trainer.tensor_parallel_size` for a model whose layers cannot be shared. The model is built without
    weights. Models that are not on this machine, or cannot be built like that, are left to the ranks."""
    size, path = config.trainer.tensor_parallel_size, config.model.path
    if size == 1 or config.trainer.strategy == "torchtitan" or not model_config(path):  # it has its own plans
        return
    model = empty_model(path, attn_implementation="eager", trust_remote_code=config.model.trust_remote_code)
    if model is not None and (problem := _plan(model)[2]):
        yield ConfigProblem(f"trainer.{KEY}", size, problem, "set it to 1")


def _plan(model: PreTrainedModel) -> tuple[dict[str, str], dict[str, str], str]:
    """Return the style of each shared module, those of experts, and why the layers cannot be shared (empty if they
    can)."""
    experts = _experts_plan(model)
    plan = {key: style for key, style in model.tp_plan.items() if not _is_below(key, experts)} | experts
    unknown = set(plan.values()) - STYLES - {PARTIAL} - set(experts.values())
    problem = ""
    if unknown or not model.config.get_text_config().base_model_tp_plan:  # the model's own may have only the output
        found = f"its plan has {', '.join(sorted(unknown))}" if unknown else "transformers has no plan for it"
        problem = f"the layers of {type(model).__name__} cannot be shared ({found})"
    return plan, experts, problem


def _experts_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the styles that give each rank some of the experts; empty for a model without experts, and for one whose
    configuration does not have their number as `num_experts`, by which transformers divides them.

    transformers' plan for tensor parallelism gives each rank a part of every expert, as DTensors whose parts are not
    contiguous, which cannot be loaded shard by shard.
    """
    weights = {key: style for key, style in model.ep_plan.items() if style == EXPERT_WEIGHTS}
    routers = {
        re.sub(r"\.\d+(?=\.|$)", ".*", name): ROUTER
        for name, module in model.named_modules()
        if isinstance(module, router_classes(model))
    }
    if not weights or not routers or not hasattr(model.config.get_text_config(), "num_experts"):
        return {}
    return weights | dict.fromkeys({key.rpartition(".")[0] for key in weights}, EXPERTS) | routers


def _is_below(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)
