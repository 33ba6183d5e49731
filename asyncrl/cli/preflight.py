"""The checks of a run's files and user code, before anything starts: in under five seconds, and with `--dry-run`."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from asyncrl.config.compose import CheckedConfig
from asyncrl.config.environment import model_config, num_parameters, writable_parent
from asyncrl.config.model_files import check_model_files
from asyncrl.config.problems import ConfigProblem, errors, warning
from asyncrl.config.resources.plan import MachineResources, checkpoint_bytes, make_plan, shortages, unused_gpus
from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm import own_functions
from asyncrl.config.sections.base import NodePool, on_gpus
from asyncrl.observe.formats import size as format_size

_ROWS_S = 4.0
"""Time after which the remaining rows of data files are left to the Rollouter."""
_STATE_SIZES = ("state_size", "ssm_state_size", "mamba_d_state")
"""Keys in config.json of models with Mamba layers."""
_TRANSFORMED = {"longcat_flash": "scaled", "plamo3": "increased"}
"""What vLLM does to the weights of norms as it loads them, by `model_type` in config.json."""


def preflight(outcome: CheckedConfig, machine: MachineResources | None = None) -> CheckedConfig:
    """Return the configuration with the problems of data, models, reward functions, disk and `machine`.

    Nothing is read if the configuration has other errors. What `machine` has does not matter on a cluster, which the
    driver asks for its nodes (`asyncrl.driver.cluster.state`).
    """
    if outcome.config is None or errors(outcome.problems):
        return outcome
    if outcome.config.mode == "sft":
        return _preflight_sft(outcome, outcome.config, machine)
    from asyncrl.weights.transport import check_transport
    from rollouter.prompts.check import check_data, check_own_data
    from rollouter.rewards.check import RewardCheck

    config = outcome.config
    rewards = RewardCheck(config)  # runs beside the other checks
    files = [*check_model_files(config), *_transformed_weights(config), *check_data(config, limit_s=_ROWS_S)]
    files += _shared_layers(config)
    if config.ray.address is not None:  # the cluster may have other files
        files = [replace(problem, severity="warning") for problem in files]
    code = list(check_own_data(config))
    if not config.validates_only:
        code += check_transport(config)
    if config.reward.manager is not None:
        from rollouter.rewards.scorer import check_own_manager

        code += check_own_manager(config)
    if own_functions(config) and not config.validates_only:  # importing torch takes seconds
        from trainer.algorithms.own_functions import check_own_functions

        code += check_own_functions(config)
    code += rewards.problems()
    if config.ray.runtime_env:  # it may bring what the code needs
        code = [replace(problem, severity="warning") for problem in code]
    room = [] if machine is None else check_machine(config, machine, trains=not config.validates_only)
    return outcome.with_problems([*files, *code, *room, *_disk(config)])


def check_machine(config: Config, machine: MachineResources, *, trains: bool = True) -> list[ConfigProblem]:
    """Return what this machine lacks for a run, or for engines alone, and whether GPUs would compute in float32, which
    is all that is checked of a cluster."""
    found = list(_float32_on_gpus(config, machine, trains=trains))
    if config.ray.address is not None:
        return found
    resources = make_plan(config, machine, num_parameters=num_parameters(config.model.path), num_prompts=None)
    return [*found, *shortages(resources, config, trains=trains), *_unsupported_model(config, machine)]


def _float32_on_gpus(config: Config, machine: MachineResources, *, trains: bool) -> Iterator[ConfigProblem]:
    """Warn about processes on GPUs with the default precision, which is for CPUs. The nodes of a cluster are not known
    yet, so with `device: auto` on a cluster `n_gpus_per_node` decides."""

    def has_gpus(pool: NodePool) -> bool:
        return machine.gpus > 0 if config.ray.address is None else pool.n_gpus_per_node is not None

    rollout, trainer, parts = config.rollout, config.trainer, {}
    is_slow = rollout.dtype == "float32" and rollout.enforce_eager and rollout.attach is None
    if is_slow and on_gpus(rollout.device, has_gpus(rollout)):
        parts["rollout"] = "engines without CUDA graphs"
    if trains and trainer.dtype == "float32" and on_gpus(trainer.device, has_gpus(trainer)):
        parts["trainer"] = "ranks"
    if parts:
        consequence = f"{' and '.join(parts.values())} would compute in float32 on GPUs, which is slow"
        fix = f"add {' '.join(f'{part}=gpu' for part in parts)} to the command, unless you intend this"
        yield warning(f"{next(iter(parts))}.dtype", "float32", consequence, fix)


def _unsupported_model(config: Config, machine: MachineResources) -> Iterator[ConfigProblem]:
    """Refuse models for which vLLM computes wrong log-probs without a GPU (docs/models.md)."""
    if not on_gpus(config.rollout.device, machine.gpus > 0) and "kv_lora_rank" in model_config(config.model.path):
        consequence = "it has latent attention (MLA), and vLLM computes wrong log-probs for such models on a CPU"
        fix = "use a machine with a GPU, or a model without latent attention (docs/models.md has the checked ones)"
        yield ConfigProblem("model.path", config.model.path, consequence, fix)


def _transformed_weights(config: Config) -> Iterator[ConfigProblem]:
    """Refuse models whose engines hold other values than those of the model's files, which no checksum can compare."""
    model = model_config(config.model.path)
    layers = model.get("layer_types")
    only_attention = isinstance(layers, list) and all(one in ("attention", "full_attention") for one in layers)
    has_mamba = any(key in model for key in _STATE_SIZES) and not only_attention  # some Granite 4 have attention only
    change = "Mamba layers, of which vLLM keeps -exp(A_log) in place of A_log" if has_mamba else ""
    if (kind := model.get("model_type")) in _TRANSFORMED:
        change = f"norms whose weights vLLM keeps {_TRANSFORMED[kind]} by a constant"
    if change and not (config.validates_only or config.syncs_adapters):
        consequence = f"it has {change}, so engines cannot be compared with what the Trainer publishes"
        fix = "use another model (docs/models.md has the checked ones)"
        yield ConfigProblem("model.path", config.model.path, consequence, fix)


def _shared_layers(config: Config) -> Iterator[ConfigProblem]:
    if config.trainer.tensor_parallel_size > 1 and not config.validates_only:  # importing torch takes seconds
        from trainer.engines.compute.tensor_parallel import check_model

        yield from check_model(config)


def _preflight_sft(outcome: CheckedConfig, config: Config, machine: MachineResources | None) -> CheckedConfig:
    from rollouter.prompts.demonstrations import check_demonstrations

    files = [*check_model_files(config), *check_demonstrations(config, limit_s=_ROWS_S), *_shared_layers(config)]
    if config.ray.address is not None:  # the cluster may have other files
        files = [replace(problem, severity="warning") for problem in files]
    room = [] if machine is None or config.ray.address is not None else unused_gpus(config, machine, "trainer.device")
    return outcome.with_problems([*files, *room, *_disk(config)])


def _disk(config: Config) -> Iterator[ConfigProblem]:
    """Compare the free space of the disk with the checkpoints that the run will keep there."""
    trainer, parameters = config.trainer, num_parameters(config.model.path)
    place = trainer.checkpoint_dir or config.run_dir or "runs"
    writes_none = config.validates_only or (trainer.save_freq < 0 and not trainer.save_last)
    if parameters is None or "://" in place or writes_none:
        return
    count = 1 if trainer.save_freq < 0 else trainer.max_checkpoints_to_keep + 1  # a new one is complete first
    if trainer.save_freq > 0 and trainer.total_training_steps is not None:
        count = min(count, math.ceil(trainer.total_training_steps / trainer.save_freq))
    size, (folder, _) = checkpoint_bytes(config, parameters), writable_parent(Path(place))
    free = shutil.disk_usage(folder).free
    if free >= count * size:
        return
    needed = f"{count} checkpoint{'s' if count > 1 else ''} of {format_size(size)}"
    consequence = f"{folder} has {format_size(free)} free, and the run needs space for {needed}"
    fix = "free some space, or give a larger disk (trainer.checkpoint_dir)"
    if free < size:
        yield ConfigProblem("trainer.checkpoint_dir", trainer.checkpoint_dir, consequence, fix)
    else:
        fix += ", or lower trainer.max_checkpoints_to_keep"
        yield warning("trainer.max_checkpoints_to_keep", trainer.max_checkpoints_to_keep, consequence, fix)
