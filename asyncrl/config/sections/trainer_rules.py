"""Checks of `trainer`, `ref`, `teacher`, `critic` and `reward_model`, and how long a run is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Literal

from asyncrl.config.environment import (
    check_code,
    check_model_path,
    cpu_build,
    is_installed,
    model_config,
    no_gpu,
    package_folder,
    tensor_shapes,
    visible_gpus,
)
from asyncrl.config.import_path import is_own
from asyncrl.config.problems import (
    ConfigProblem,
    ConfigRule,
    NoEffectRule,
    RuleFunction,
    configured,
    no_effect,
    only_with,
    warning,
)
from asyncrl.config.sections.base import NodePool
from asyncrl.config.sections.data import NUM_EXPERTS, num_prompts
from asyncrl.config.sections.trainer import RoleConfig

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

BUILTIN_STRATEGIES = ("local", "ddp", "fsdp", "fsdp2")
STRATEGY_ENTRY_POINTS = "asyncrl.engines"
STRATEGIES_WITH_MESHES = ("fsdp2", "torchtitan", "nemo_automodel")
"""Strategies that have `trainer.fsdp_size` and `trainer.tensor_parallel_size`."""
_EXTRAS = {"torchtitan": "torchtitan", "megatron_layers": "megatron.core"}
"""Libraries of engine backends with attention of their own; the extra of pyproject.toml is the first part of the
name."""
_ENGINE_LIBRARIES = _EXTRAS | {"nemo_automodel": "nemo_automodel", "veomni": "veomni"}
"""Libraries of all engine backends that asyncrl adapts. Those without an extra do not fit its other requirements."""
_UNBALANCED = ("torchtitan", "megatron_layers", "veomni")
"""Backends without the load-balancing loss of experts."""
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_CLASSIFIER_HEADS = {"score", "classifier"}
"""Hugging Face's names of the head of a sequence classifier."""
_LAST_LAYER = re.compile(r"(score|classifier)(\.out_proj)?\.weight$")
_DEFAULT_LABELS = 2
"""Hugging Face's default number of labels, which config.json omits."""
_GPU_ATTENTIONS = {
    "flash_attention_2": "FlashAttention runs on GPUs only",
    "flex_attention": "torch's flex_attention has no backward pass on CPU",
}


def model_roles(config: Config) -> dict[str, RoleConfig]:
    """Return the settings of the run's models besides the policy, by their section."""
    used = {
        "ref": (config.needs_reference, config.ref),
        "teacher": (config.needs_teacher, config.teacher),
        "critic": (config.needs_critic, config.critic),
        "reward_model.worker": (config.reward_model.placement == "worker", config.reward_model.worker),
    }
    return {name: role for name, (is_used, role) in used.items() if is_used}


def epoch_samples(config: Config, num_prompts: int) -> int:
    """Return the number of samples in `trainer.total_epochs` passes over `num_prompts` prompts.

    With `partial_final_batch: drop` samples that do not fill a lease are left out.
    """
    samples = num_prompts * config.trainer.total_epochs
    return samples - samples % config.samples_per_lease if config.trainer.partial_final_batch == "drop" else samples


def epoch_steps(config: Config, num_prompts: int) -> int:
    """Return the number of optimizer steps over `epoch_samples`; the last step of each pass may have fewer samples."""
    mini_batches = math.ceil(epoch_samples(config, num_prompts) / config.trainer.ppo_mini_batch_size)
    return mini_batches * config.trainer.ppo_epochs


def check_length(config: Config, num_prompts: int) -> Iterator[ConfigProblem]:
    """Yield the problems of a run whose length depends on its prompts (`trainer.total_training_steps=null`)."""
    if steps := epoch_steps(config, num_prompts):
        yield from _warm_ups(config, steps)
    elif num_prompts == 0:
        if config.data.train_files:  # otherwise a rule of `data` reports it
            yield ConfigProblem(
                "data.train_files", config.data.train_files, "there is no prompt to train on", "add data"
            )
    else:
        yield ConfigProblem(
            "trainer.partial_final_batch",
            config.trainer.partial_final_batch,
            f"{num_prompts} prompts in each of {config.trainer.total_epochs} epochs do not fill a lease, which is "
            f"{config.samples_per_lease} samples (trainer.ppo_mini_batch_size x async_training.require_batches), so "
            "there would be no step",
            "set it to train, add data or epochs, or lower trainer.ppo_mini_batch_size",
        )


def _fixed_length(config: Config) -> Iterator[ConfigProblem]:
    steps, lease = config.trainer.total_training_steps, config.steps_per_lease
    if not steps:
        return
    if steps % lease:
        factors = "require_batches x trigger_parameter_sync_step" if config.mode == "sync" else "require_batches"
        passes = config.trainer.ppo_epochs
        in_passes = f", in each of {passes} passes (trainer.ppo_epochs)" if passes > 1 else ""
        yield ConfigProblem(
            "trainer.total_training_steps",
            steps,
            f"the Trainer leases {config.async_training.require_batches} mini-batches at a time ({factors}), one step "
            f"each{in_passes}, so the run cannot end at step {steps}",
            f"set it to {max(lease, steps - steps % lease)} or {steps - steps % lease + lease}, "
            f"or change async_training.require_batches",
        )
    yield from _warm_ups(config, steps)


def _warm_ups(config: Config, steps: int) -> Iterator[ConfigProblem]:
    """Check that warm-ups end before the last of the run's `steps`."""
    critic, rate = config.critic, "so the learning rate would never reach its peak"
    alone = critic.warmup_steps if config.needs_critic else 0
    key = "critic.warmup_steps"
    if alone >= steps:
        consequence = f"the run has {steps} steps, and in each of them only the critic would learn"
        yield ConfigProblem(key, alone, consequence, f"set it below {steps}")
    elif alone * 2 > steps:
        consequence = f"only the critic learns in {alone} of the run's {steps} steps, and the policy in {steps - alone}"
        yield warning(key, alone, consequence, f"set it to {steps // 2} or less, or make the run longer")
    warmup = config.trainer.optim.warmup_steps
    if warmup >= steps - alone > 0:
        after = f", {alone} of them for the critic alone (critic.warmup_steps)" if alone else ""
        consequence = f"the run has {steps} steps{after}, {rate}"
        yield warning("trainer.optim.warmup_steps", warmup, consequence, f"set it below {steps - alone}")
    critic_steps = steps // config.trainer.ppo_epochs * critic.ppo_epochs
    if config.needs_critic and critic.optim.warmup_steps >= critic_steps:
        key, consequence = "critic.optim.warmup_steps", f"the critic takes {critic_steps} steps, {rate}"
        yield warning(key, critic.optim.warmup_steps, consequence, f"set it below {critic_steps}")


def _micro_batches(config: Config) -> Iterator[ConfigProblem]:
    limits = {"trainer": config.trainer.ppo_max_token_len}
    limits |= {name: role.ppo_max_token_len for name, role in model_roles(config).items() if role.ppo_max_token_len}
    longest = config.longest_trajectory
    for section, limit in limits.items():
        if limit < longest:
            yield ConfigProblem(
                f"{section}.ppo_max_token_len",
                limit,
                f"one full-length trajectory of {longest} tokens would not fit a micro-batch",
                f"set it to at least {longest}, or lower data.max_prompt_length or rollout.response_length",
            )


def _dtypes(config: Config) -> Iterator[ConfigProblem]:
    dtypes = {"trainer": (config.trainer.dtype, config.trainer.device)}
    for name, role in model_roles(config).items():
        if role.dtype is not None:
            dtypes[name] = (role.dtype, role.device or config.trainer.device)
    for section, (dtype, device) in dtypes.items():
        if dtype == "float16":
            consequence = "gradients underflow to 0 without loss scaling, which the Trainer does not do"
            yield ConfigProblem(f"{section}.dtype", dtype, consequence, "use bfloat16 (GPUs) or float32")
        if device == "cpu" and dtype == "bfloat16":
            consequence = "it is several times slower than float32 on CPUs without AVX-512"
            yield warning(f"{section}.dtype", dtype, consequence, "use float32")


def _local_engines(config: Config) -> Iterator[ConfigProblem]:
    trainer = config.trainer
    for name, role in model_roles(config).items():
        ranks = trainer.num_workers if role.placement == "actor" else role.num_workers or trainer.num_workers
        strategy = role.strategy or trainer.strategy
        if strategy == "local" and ranks > 1 and (role.strategy == "local" or role.placement == "own"):
            yield ConfigProblem(
                f"{name}.strategy" if role.strategy else f"{name}.num_workers",
                role.strategy or ranks,
                f"strategy local is one process, and this model would be in {ranks}",
                f"set {name}.strategy to fsdp2, fsdp or ddp, or {name}.placement=own and {name}.num_workers=1",
            )


def _idle_ranks(config: Config) -> Iterator[ConfigProblem]:
    trainer = config.trainer
    data_ranks = max(1, trainer.num_workers // trainer.ranks_per_row)
    rows = trainer.ppo_mini_batch_size * config.rollout.n
    if rows < data_ranks:
        yield warning(
            "trainer.num_workers",
            trainer.num_workers,
            f"a mini-batch has {rows} responses (trainer.ppo_mini_batch_size x rollout.n), so {data_ranks - rows} of "
            f"{data_ranks} ranks would compute rows without effect",
            f"set it to {rows * trainer.ranks_per_row} or fewer, or enlarge the mini-batch",
        )


def _pool(config: Config) -> Iterator[ConfigProblem]:
    trainer = config.trainer
    yield from check_pool(config, "trainer")
    if trainer.num_processes not in (None, trainer.num_workers):
        yield ConfigProblem(
            "trainer.num_workers",
            trainer.num_workers,
            f"trainer.nnodes x trainer.n_gpus_per_node is {trainer.num_processes}, so it is unclear how many ranks "
            "there are",
            f"leave it out, or set it to {trainer.num_processes}",
        )


def check_pool(config: Config, section: Literal["trainer", "rollout"]) -> Iterator[ConfigProblem]:
    """Yield the problems of a section's nodes."""
    pool: NodePool = getattr(config, section)
    if (pool.nnodes is None) != (pool.n_gpus_per_node is None):
        given, missing = ("nnodes", "n_gpus_per_node") if pool.nnodes else ("n_gpus_per_node", "nnodes")
        consequence = f"{section}.{missing} is null, and only the two together say where processes are placed"
        yield ConfigProblem(f"{section}.{given}", getattr(pool, given), consequence, f"set {section}.{missing}, too")
    if config.ray.address is None and ((pool.nnodes or 1) > 1 or pool.node_labels):
        key = "node_labels" if pool.node_labels else "nnodes"
        yield ConfigProblem(
            f"{section}.{key}",
            getattr(pool, key),
            "ray.address is null, so the run has a private cluster, which is this machine alone",
            "set ray.address to a cluster with several nodes (docs/deploy.md), or leave this key out",
        )


def _length(config: Config) -> Iterator[ConfigProblem]:
    prompts = None if config.trainer.total_training_steps is not None else num_prompts(config)
    if prompts is not None:
        yield from check_length(config, prompts)


def _other_models(config: Config) -> Iterator[ConfigProblem]:
    if config.needs_critic and config.critic.path is not None:
        otherwise = "; critic.path=null starts from model.path, with a new value head"
        yield from check_model_path("critic.path", config.critic.path, otherwise)
    if config.teacher.path is not None:
        yield from check_model_path("teacher.path", config.teacher.path, "; teacher.path=null means no teacher")
    if config.reward_model.placement != "off" and config.reward_model.path is not None:
        otherwise = "; reward_model.placement=off needs none"
        found = list(check_model_path("reward_model.path", config.reward_model.path, otherwise))
        yield from found or _reward_model(config, config.reward_model.path)


def _reward_model(config: Config, path: str) -> Iterator[ConfigProblem]:
    """Check that the model gives one score, by its config.json or, if the Trainer loads it, by its head's shape."""
    key, placement = "reward_model.path", config.reward_model.placement
    settings, shapes = model_config(path), tensor_shapes(path)
    heads = {name: shape for name, shape in shapes.items() if set(name.split(".")[:-1]) & _CLASSIFIER_HEADS}
    kinds = [str(kind) for kind in settings.get("architectures") or ()]
    fix = "give a sequence-classification model with one label, saved by save_pretrained"
    if kinds and all(kind.endswith(_LANGUAGE_MODELS) for kind in kinds) and not heads:
        consequence = f"it is a language model ({', '.join(kinds)}) and has no head that scores: scores would be random"
        yield ConfigProblem(key, path, consequence, fix)
        return
    rows = [shape[0] for name, shape in heads.items() if _LAST_LAYER.search(name) and shape]
    labels = settings.get("id2label", settings.get("num_labels"))
    labels = len(labels) if isinstance(labels, dict) else labels
    if placement == "worker" and rows:
        labels = rows[0]
    elif placement == "serve" and settings and labels is None:
        labels = _DEFAULT_LABELS
    if isinstance(labels, int) and labels != 1:
        yield ConfigProblem(key, path, f"the model has {labels} labels: a reward is one number", fix)


def _strategies(config: Config) -> Iterator[ConfigProblem]:
    """Check the names of engines, even for models that this run does not have."""
    strategies = {
        "trainer.strategy": config.trainer.strategy,
        "ref.strategy": config.ref.strategy,
        "teacher.strategy": config.teacher.strategy,
        "critic.strategy": config.critic.strategy,
        "reward_model.worker.strategy": config.reward_model.worker.strategy,
    }
    packaged = (point.name for point in entry_points(group=STRATEGY_ENTRY_POINTS))
    known = sorted({*BUILTIN_STRATEGIES, *_ENGINE_LIBRARIES, *packaged})
    for key, strategy in strategies.items():
        if strategy is not None and not is_own(strategy):
            yield from check_code(key, strategy, known, "engine")


def _engine_libraries(config: Config) -> Iterator[ConfigProblem]:
    """Check that engines of the user's are there, and packages of the others are installed, without importing them."""
    strategies = {"trainer.strategy": config.trainer.strategy}
    strategies |= {f"{name}.strategy": role.strategy for name, role in model_roles(config).items() if role.strategy}
    modules = {point.name: point.module.partition(".")[0] for point in entry_points(group=STRATEGY_ENTRY_POINTS)}
    for key, strategy in strategies.items():
        if is_own(strategy):
            yield from check_code(key, strategy, (), "engine")
        module = _ENGINE_LIBRARIES.get(strategy, modules.get(strategy))
        if module is not None and not is_installed(module):
            if strategy in _EXTRAS:
                fix = f"pip install 'asyncrl[{module.partition('.')[0]}]'"
            elif strategy in _ENGINE_LIBRARIES:
                fix = "install it in an environment of its own (docs/training.md)"
            else:
                fix = f"install the package of {module}"
            consequence = f"it needs {module}, which is not installed here"
            yield ConfigProblem(key, strategy, consequence, f"{fix}, or use fsdp2 or fsdp")
    if config.trainer.use_liger and not is_installed("liger_kernel"):
        consequence, fix = "the package liger-kernel is not installed here", "pip install 'asyncrl[liger]'"
        yield ConfigProblem("trainer.use_liger", True, consequence, f"{fix}, or leave this key out")


def _attention(config: Config) -> Iterator[ConfigProblem]:
    """Check that this machine has what an attention other than sdpa and eager needs."""
    key, wanted, fix = "trainer.attn_implementation", config.trainer.attn_implementation, "set it to sdpa"
    if wanted in _GPU_ATTENTIONS and config.ray.address is None and not visible_gpus():
        if config.trainer.device == "auto":  # with trainer.device=cpu, a rule reports the key
            yield ConfigProblem(key, wanted, f"{no_gpu(cpu_build())}, and {_GPU_ATTENTIONS[wanted]}", fix)
    elif wanted == "flash_attention_2" and not is_installed("flash_attn"):
        fix = f"pip install flash-attn, or {fix}"
        yield ConfigProblem(key, wanted, "the package flash-attn is not installed here", fix)
    elif wanted == "sdpa" and config.trainer.strategy in BUILTIN_STRATEGIES and _lacks_sdpa(config):
        kind = model_config(config.model.path)["model_type"]
        consequence = f"transformers has no sdpa for models of type {kind}, such as the one at {config.model.path}"
        yield ConfigProblem(key, wanted, consequence, "set it to eager")


def _lacks_sdpa(config: Config) -> bool:
    """Whether transformers' code of the model says that it has no sdpa; False if that code is not used or not there."""
    settings = model_config(config.model.path)
    if config.model.trust_remote_code and "auto_map" in settings:
        return False
    kind = str(settings.get("model_type")).replace("-", "_")
    if (folder := package_folder("transformers")) is None:
        return False
    file = folder / "models" / kind / f"modeling_{kind}.py"
    return file.is_file() and "_supports_sdpa = True" not in file.read_text(encoding="utf-8")


def shared_parts(path: str) -> dict[str, int]:
    """Return how many attention heads, key-value heads and experts a model has, by its config.json; those that it does
    not give are left out."""
    settings = model_config(path)
    described = {**settings, **(settings.get("text_config") or {})}
    keys: Mapping[str, Sequence[str]] = {
        "attention heads": ["num_attention_heads"],
        "key-value heads": ["num_key_value_heads"],
        "experts": NUM_EXPERTS,
    }
    found = ((name, described.get(key)) for name, several in keys.items() for key in several)
    return {name: number for name, number in found if isinstance(number, int) and number > 0}


def _groups(config: Config) -> Iterator[ConfigProblem]:
    """Check that the sizes of groups of ranks divide the ranks, and what the ranks of a group share of the model."""
    parts = shared_parts(config.model.path)
    heads = {name: number for name, number in parts.items() if name == "attention heads"}
    yield from _group_size(config, "trainer.ulysses_sequence_parallel_size", heads)
    if config.trainer.strategy in STRATEGIES_WITH_MESHES:
        yield from _group_size(config, "trainer.tensor_parallel_size", parts)


def _group_size(config: Config, key: str, parts: Mapping[str, int]) -> Iterator[ConfigProblem]:
    """Yield at most one problem, so that its fix suits both the ranks and the model's parts."""
    size, ranks = configured(config, key), config.trainer.num_workers
    undivided = [f"{number} {name}" for name, number in parts.items() if number % size]
    consequences = []
    if ranks % size:
        consequences.append(f"trainer.num_workers = {ranks} ranks cannot be divided into groups of {size}")
    if undivided:
        consequences.append(
            f"the model at {config.model.path} has {' and '.join(undivided)}, which {size} ranks cannot share"
        )
    if not consequences:
        return
    largest = math.gcd(*parts.values()) or ranks
    divisors = [number for number in range(1, largest + 1) if largest % number == 0]
    fix = f"set it to {' or '.join(str(number) for number in divisors if ranks % number == 0)}"
    with_more_ranks = [str(number) for number in divisors if ranks % number]
    if not undivided:
        fix += f", or trainer.num_workers to a multiple of {size}"
    elif with_more_ranks:
        fix += f", or to {' or '.join(with_more_ranks)} with trainer.num_workers a multiple of that"
    yield ConfigProblem(key, size, "; and ".join(consequences), fix)


def _experts(config: Config) -> Iterator[ConfigProblem]:
    """Check that the model has experts to balance."""
    coef, settings = config.trainer.router_aux_loss_coef, model_config(config.model.path)
    described = {**settings, **(settings.get("text_config") or {})}
    if coef and settings and not any(described.get(key) for key in NUM_EXPERTS):
        keys = ", ".join(NUM_EXPERTS)
        consequence = f"the model at {config.model.path} has no experts: its config.json sets none of {keys}"
        yield ConfigProblem("trainer.router_aux_loss_coef", coef, consequence, "leave this key out")


def _meshes(config: Config) -> Iterator[ConfigProblem]:
    """Check the sizes of the groups among which the ranks are divided."""
    trainer = config.trainer
    ranks, tensor, size = trainer.num_workers, trainer.tensor_parallel_size, trainer.fsdp_size
    for key, value, default in (("tensor_parallel_size", tensor, 1), ("fsdp_size", size, None)):
        if value != default and trainer.strategy not in STRATEGIES_WITH_MESHES:
            able = ", ".join(STRATEGIES_WITH_MESHES)
            consequence = f"trainer.strategy is {trainer.strategy}, and only {able} have it"
            yield ConfigProblem(f"trainer.{key}", value, consequence, "leave this key out, or use fsdp2")
    if size is not None and ranks % tensor == 0 and ranks // tensor % size:
        divisors = [str(number) for number in range(1, ranks // tensor + 1) if ranks // tensor % number == 0]
        consequence = f"{ranks // tensor} ranks cannot be divided into groups of {size}"
        if tensor > 1:
            consequence += f": {ranks} (trainer.num_workers) / {tensor} (trainer.tensor_parallel_size) are left"
        yield ConfigProblem("trainer.fsdp_size", size, consequence, f"set it to {' or '.join(divisors)}")


def _gpus(config: Config) -> Iterator[ConfigProblem]:
    gpus = visible_gpus()
    if config.ray.address is None:
        yield from _too_few_gpus(config, gpus)
    if gpus or config.trainer.device != "auto":
        return
    # With trainer.device=cpu, the rules report these keys.
    consequence = f"{no_gpu(cpu_build())}, and trainer.device is auto: on CPU"
    for key in ("activation_offload", "param_offload", "optimizer_offload"):
        if getattr(config.trainer, key):
            yield warning(f"trainer.{key}", True, f"{consequence} it has no effect", "leave this key out")
    if config.trainer.use_liger:
        yield ConfigProblem("trainer.use_liger", True, f"{consequence} Liger kernels do not run", "leave this key out")


def _too_few_gpus(config: Config, gpus: int) -> Iterator[ConfigProblem]:
    ranks, roles = config.trainer.num_workers, model_roles(config).items()
    devices = {"trainer": config.trainer.device}
    devices |= {name: role.device for name, role in roles if role.placement == "own" and role.device}
    for section, device in devices.items():
        if device == "cuda" and not gpus:
            fix = f"set {section}.device=auto or cpu, or point ray.address at a cluster that has GPUs"
            yield ConfigProblem(f"{section}.device", device, no_gpu(cpu_build()), fix)
    if gpus and config.trainer.device != "cpu" and ranks > gpus:
        consequence = f"each rank needs a GPU, and this machine shows {gpus}"
        fix = f"set it to {gpus} or fewer, or trainer.device=cpu, or point ray.address at a cluster"
        key = "trainer.n_gpus_per_node" if config.trainer.num_processes else "trainer.num_workers"
        yield ConfigProblem(key, configured(config, key), consequence, fix)


RULES: tuple[RuleFunction, ...] = (
    _micro_batches,
    _fixed_length,
    ConfigRule("trainer.test_freq", lambda c: c.trainer.test_freq > 0 and not c.has_validation,
               "there is no validation set, so nothing is validated", "set data.val_files", "warning"),
    ConfigRule("trainer.ppo_epochs", lambda c: c.trainer.ppo_epochs > 1 and c.algorithm.policy_loss == "reinforce",
               "algorithm.policy_loss=reinforce clips nothing, so nothing limits the later passes over a lease",
               "set it to 1, or use algorithm.policy_loss=ppo", "warning"),
    _dtypes,
    ConfigRule("trainer.hf_export", lambda c: c.trainer.hf_export == "last" and not c.trainer.save_last,
               "the run writes no checkpoint at its end (trainer.save_last=false), so it exports the model only if the "
               "number of its steps is a multiple of trainer.save_freq", "set trainer.save_last=true", "warning"),
    ConfigRule("trainer.num_workers", lambda c: c.trainer.strategy == "local" and c.trainer.num_workers > 1,
               "trainer.strategy=local is one process; several would train independent models",
               "set trainer.strategy to fsdp2, fsdp or ddp, or trainer.num_workers=1"),
    _local_engines,
    _meshes,
    _idle_ranks,
    _pool,
    ConfigRule("trainer.ulysses_sequence_parallel_size",
               lambda c: c.trainer.ulysses_sequence_parallel_size > 1 and not c.trainer.use_remove_padding,
               "sequences are split across ranks in packed form, and trainer.use_remove_padding is false",
               "set trainer.use_remove_padding=true, or trainer.ulysses_sequence_parallel_size=1"),
    ConfigRule("trainer.tensor_parallel_size",
               lambda c: c.trainer.tensor_parallel_size > 1 and c.trainer.ulysses_sequence_parallel_size > 1,
               "ranks cannot share layers and sequences at once",
               "set it or trainer.ulysses_sequence_parallel_size to 1"),
    ConfigRule("trainer.tensor_parallel_size",
               lambda c: c.trainer.tensor_parallel_size > 1 and c.model.lora_rank > 0,
               "layers with adapters (model.lora_rank={c.model.lora_rank}) cannot be shared",
               "set it to 1, or model.lora_rank=0"),
    ConfigRule("trainer.max_cpu_threads",
               lambda c: c.trainer.max_cpu_threads is not None and c.trainer.max_cpu_threads < c.trainer.cpu_threads,
               "each process begins with trainer.cpu_threads={c.trainer.cpu_threads}", "set it to more, or to null"),
    ConfigRule("trainer.max_cpu_threads",
               lambda c: c.trainer.max_cpu_threads is not None and c.async_training.deterministic,
               "a run keeps what is faster, so the last bits depend on timing (async_training.deterministic)",
               "set it to null and give trainer.cpu_threads"),
    ConfigRule("trainer.router_aux_loss_coef",
               lambda c: c.trainer.router_aux_loss_coef and c.trainer.strategy in _UNBALANCED,
               "trainer.strategy={c.trainer.strategy} does not have this loss", "set it to 0, or use fsdp2"),
    ConfigRule("trainer.attn_implementation",
               lambda c: c.trainer.ulysses_sequence_parallel_size > 1 and c.trainer.attn_implementation != "sdpa",
               "sequences are split across ranks in packed form, and only sdpa packs them",
               "set it to sdpa, or trainer.ulysses_sequence_parallel_size=1"),
    ConfigRule("trainer.attn_implementation",
               lambda c: c.trainer.attn_implementation in _GPU_ATTENTIONS and c.trainer.device == "cpu",
               "trainer.device is cpu, and this attention (with its backward pass) runs on GPUs only",
               "set it to sdpa, or trainer.device=cuda"),
    ConfigRule("trainer.attn_implementation",
               lambda c: c.trainer.attn_implementation == "flash_attention_2" and c.trainer.dtype == "float32",
               "FlashAttention computes in half precision only, and trainer.dtype is float32",
               "set it to sdpa, or trainer.dtype=bfloat16"),
    ConfigRule("ref.placement", lambda c: c.model.lora_rank and c.needs_reference and c.ref.placement == "own",
               "with LoRA the policy without its adapters is the reference already; this loads it a second time",
               "set ref.placement=actor", "warning"),
    ConfigRule("teacher.path", lambda c: c.algorithm.adv_estimator == "on_policy_distill" and not c.needs_teacher,
               "algorithm.adv_estimator=on_policy_distill learns from a teacher alone, and there is none",
               "give a model with the policy's tokenizer, such as the hf directory of a checkpoint"),
    ConfigRule("reward_model.path", lambda c: c.reward_model.placement != "off" and not c.reward_model.path,
               "reward_model.placement={c.reward_model.placement} needs a model that scores",
               "give a sequence-classification model with one label, or set reward_model.placement=off"),
    ConfigRule("reward_model.weight", lambda c: c.reward_model.placement != "off" and c.reward_model.weight == 0,
               "the reward model is called, and its score changes nothing",
               "set it to another number, or reward_model.placement=off", "warning"),
)  # fmt: skip


ENVIRONMENT: tuple[RuleFunction, ...] = (_length, _other_models, _experts, _engine_libraries, _attention, _gpus)
DRIVER_ENVIRONMENT: tuple[RuleFunction, ...] = (_strategies, _groups)


def _only_apart(role: str) -> NoEffectRule:
    return no_effect(
        f"{role}.num_workers {role}.device {role}.cpu_threads",
        lambda config: configured(config, f"{role}.placement") == "actor",
        f"{role}.placement is actor, so the keys of trainer apply to this model too",
        f"set {role}.placement=own",
    )


NO_EFFECT = (
    no_effect("trainer.hf_export_dtype", lambda c: c.trainer.hf_export == "never",
              "trainer.hf_export is never", "set trainer.hf_export=last"),
    no_effect("trainer.total_epochs", lambda c: c.trainer.total_training_steps is not None,
              "trainer.total_training_steps = {c.trainer.total_training_steps} decides the length",
              "set trainer.total_training_steps=null"),
    no_effect("trainer.max_cpu_threads", lambda c: c.mode != "fully_async" or c.trainer.device == "cuda",
              "only ranks on CPU that train while engines generate try more threads",
              "use `asyncrl launch fully_async` with trainer.device=cpu"),
    no_effect("trainer.lend_after_s", lambda c: c.mode == "sync", "nothing is generated in `asyncrl launch sync` while "
              "the Trainer computes", "set placement=colocated, with which both sides use all GPUs"),
    no_effect("trainer.partial_final_batch", lambda c: c.trainer.total_training_steps is not None,
              "trainer.total_training_steps = {c.trainer.total_training_steps} is a number of whole leases",
              "set trainer.total_training_steps=null and trainer.total_epochs"),
    no_effect("trainer.activation_offload trainer.param_offload trainer.optimizer_offload trainer.use_liger",
              lambda c: c.trainer.device == "cpu", "trainer.device is cpu, and this key is for GPUs",
              "set trainer.device=cuda"),
    only_with("trainer.optim.min_lr_ratio", "trainer.optim.decay", "linear", "cosine"),
    no_effect("trainer.attn_implementation", lambda c: c.trainer.strategy in _EXTRAS,
              "trainer.strategy={c.trainer.strategy} has an attention of its own", "leave this key out"),
    no_effect("ref.*", lambda c: not c.needs_reference, "the run has no reference model",
              "set algorithm.use_kl_loss=true or algorithm.use_kl_in_reward=true"),
    no_effect("ref.*", lambda c: c.model.lora_rank > 0 and c.ref.placement == "actor",
              "with LoRA the reference is the policy without its adapters", "set ref.placement=own"),
    _only_apart("ref"),
    no_effect("teacher.*", lambda c: not c.needs_teacher, "there is no teacher", "set teacher.path"),
    _only_apart("teacher"),
    no_effect("critic.*", lambda c: not c.needs_critic, "only algorithm.adv_estimator=gae has a critic",
              "set algorithm.adv_estimator=gae"),
    only_with("critic.optim.min_lr_ratio", "critic.optim.decay", "linear", "cosine"),
    _only_apart("critic"),
    only_with("reward_model.*", "reward_model.placement", "serve", "worker"),
    only_with("reward_model.worker.*", "reward_model.placement", "worker"),
    only_with("reward_model.num_replicas reward_model.max_batch_size", "reward_model.placement", "serve"),
    _only_apart("reward_model.worker"),
)  # fmt: skip
"""Only the first rule that matches a key is reported, so more informative rules come first."""
