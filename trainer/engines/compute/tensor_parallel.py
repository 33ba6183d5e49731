"""Tensor parallelism: ranks share the matrices and attention heads of each layer, as transformers' plans say.

A column-wise layer has some of its outputs on each rank, a row-wise layer sums over the ranks; between the two, a rank
computes its attention heads, or its part of the MLP. Weights are DTensors. Hidden states are the same on all ranks.
"""

from __future__ import annotations

import re

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from asyncrl.core.failures import ConfigError

KEY = "tensor_parallel_size"
STYLES = {"colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_rep", "embedding_rowwise"}
PARTIAL = "replicated_with_grad_allreduce"
"""Norms of a rank's attention heads. transformers would sum their gradients in every backward pass, and those of a
step's first micro-batches again with those of its later ones; the engine sums them once, before the step."""


def share_layers(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """Share the layers of a model without weights over the ranks of `mesh`, in place. Return the names of the modules
    whose gradients are summands of which the ranks have one each.

    Raises:
        ConfigError: the model has no plan, or one that is not supported here, or its heads cannot be divided.
    """
    assert isinstance(model, PreTrainedModel)
    size, name = mesh.size(), type(model).__name__
    plan = dict(model.tp_plan)
    styles = set(plan.values())
    if not plan or styles - STYLES - {PARTIAL}:
        found = f"its plan has {', '.join(sorted(styles - STYLES))}" if plan else "transformers has no plan for it"
        raise ConfigError(f"trainer.{KEY}={size}: {name} cannot be shared ({found}); set trainer.{KEY}=1")
    if any(parameter.is_meta is False for parameter in model.parameters()):
        raise ConfigError(
            f"trainer.{KEY}={size}: {name} has weights before it is shared (adapters, quantized or own code); set "
            f"trainer.{KEY}=1"
        )
    text = model.config.get_text_config()
    heads = {"num_attention_heads": text.num_attention_heads, "num_key_value_heads": text.num_key_value_heads}
    for key, number in heads.items():
        if number % size:
            raise ConfigError(f"trainer.{KEY}={size}: does not divide the model's {number} heads ({key})")
    apply_tensor_parallelism(model, mesh, {key: style for key, style in plan.items() if style != PARTIAL})
    patterns = [re.compile(re.escape(key).replace(r"\*", r"\d+")) for key, style in plan.items() if style == PARTIAL]
    return [name for name, _ in model.named_modules() if any(pattern.fullmatch(name) for pattern in patterns)]
