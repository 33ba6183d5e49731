"""Checks of a configuration against this machine: files, models, code, packages, GPUs, ports, environment variables.

The checks take milliseconds. They do not import what they look for, and run before Ray, torch or vLLM is imported.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path

from asyncrl import assets
from asyncrl.config.model_files import local_path, model_config, tensor_shapes
from asyncrl.config.problems import ConfigProblem, warning
from asyncrl.config.schema import Config
from asyncrl.config.sections.rollout import ToolConfig
from asyncrl.config.sections.skip import enabled_roles
from asyncrl.config.sections.trainer import check_length, model_roles

_JSON_LINES = (".jsonl", ".ndjson")
_DATA_SUFFIXES = (".parquet", *_JSON_LINES)
_FILES_OF_A_RUN = ("config.yaml", "metrics.jsonl", "summary.json", "checkpoints")

BUILTIN_REWARDS = ("exact_match", "math_verify", "reasoning_gym")
BUILTIN_TOOLS = ("calculator", "python", "search", "gsm8k")
BUILTIN_INTERACTIONS = ("scripted", "model", "retry", "reasoning_gym", "verifiers")
BUILTIN_SINKS = ("jsonl", "tensorboard", "wandb", "mlflow", "trackio", "prometheus")
BUILTIN_STRATEGIES = ("local", "ddp", "fsdp", "fsdp2")
STRATEGY_ENTRY_POINTS = "asyncrl.engines"

_ENGINE_LIBRARIES = {"torchtitan": "torchtitan", "megatron": "megatron.core"}
"""Libraries of the engine backends that asyncrl adapts."""
_SINK_PACKAGES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "wandb": (("wandb",), "asyncrl[wandb]"),
    "mlflow": (("mlflow",), "asyncrl[mlflow]"),
    "trackio": (("trackio",), "asyncrl[trackio]"),
    "prometheus": (("ray", "prometheus_client"), "ray[default]"),
}
"""The modules that each metric sink imports, and the package to install."""
_OTLP_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")

_ALL_LINEAR = "all-linear"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_CLASSIFIER_HEADS = {"score", "classifier"}
"""Hugging Face's names of the head of a sequence classifier."""
_LAST_LAYER = re.compile(r"(score|classifier)(\.out_proj)?\.weight$")
_NOT_ADAPTED = ("lm_head", "embed_out", "embed_tokens", "wte", "wpe")
"""Names of matrices that get no adapter: embeddings and output heads."""
_DEFAULT_LABELS = 2
"""Hugging Face's default number of labels, which config.json omits."""


def check_environment(config: Config, *, serve_only: bool = False) -> list[ConfigProblem]:
    """Return the problems of a configuration on this machine; `serve_only`: for engines without training."""
    found = [*_policy(config), *_chat_template(config), *_api_key("serve", config.serve.api_key_env)]
    if serve_only:
        return [*found, *_port(config)]
    found += [*_data_files(config), *_length(config), *_rewards(config), *check_conversations(config), *_skip(config)]
    found += [*_other_models(config), *_target_modules(config), *check_devices(config), *_resume(config)]
    if config.ray.address is not None:  # the cluster may have files and packages that this machine lacks
        found = [replace(problem, severity="warning") for problem in found]
    return [*found, *_strategies(config), *_sequence_parallel(config), *_packages(config), *_run_dir(config)]


def num_prompts(config: Config) -> int | None:
    """Return the number of rows of the training set before filtering, or None if counting them needs a library."""
    if config.data.reasoning_gym is not None:
        return config.data.reasoning_gym.train_size
    total = 0
    for name in config.data.train_files:
        local = local_path(name)
        if local is None or local.suffix.lower() not in _JSON_LINES or not local.is_file():
            return None
        with local.open("rb") as stream:
            total += sum(1 for line in stream if line.strip())
    return min(total, config.data.max_train_samples or total)


def _length(config: Config) -> Iterator[ConfigProblem]:
    prompts = None if config.trainer.total_training_steps is not None else num_prompts(config)
    if prompts is not None:
        yield from check_length(config, prompts)


# ------------------------------------------------------------------------------------------------ files


def _missing(key: str, path: str, what: str, otherwise: str = "") -> ConfigProblem:
    """Return the problem of a file or directory that does not exist; `otherwise` is appended to the fix."""
    local = local_path(path)
    fix = _shipped_assets() if local is None else _similar_path(local)
    return ConfigProblem(key, path, f"{what} is not there", fix + otherwise)


def _similar_path(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"there is no directory {folder} either"
    close = get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=1)
    return f"did you mean {folder / close[0]}?" if close else f"nothing in {folder.absolute()} has a similar name"


def _shipped_assets() -> str:
    folders = sorted(folder.name for folder in assets.ROOT.iterdir() if folder.is_dir() and folder.name[0] != "_")
    return "the package contains " + ", ".join(assets.SCHEME + folder for folder in folders)


def _writable_parent(path: Path) -> tuple[Path, str]:
    """Return the nearest existing parent of `path`, and why nothing can be written there ("": it can)."""
    path = path.expanduser().absolute()
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not parent.is_dir():
        return parent, "is no directory"
    return parent, "" if os.access(parent, os.W_OK | os.X_OK) else "cannot be written"


def _chat_template(config: Config) -> Iterator[ConfigProblem]:
    template = config.model.chat_template
    if template is not None and not ((local := local_path(template)) and local.is_file()):
        yield _missing("model.chat_template", template, "the file")


def _data_files(config: Config) -> Iterator[ConfigProblem]:
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for name in files:
            local = local_path(name)
            if local is None or not local.is_file():
                yield _missing(key, name, "the file")
            elif local.suffix.lower() not in _DATA_SUFFIXES:
                consequence = "files with this suffix cannot be read"
                yield ConfigProblem(key, name, consequence, f"use {' or '.join(_DATA_SUFFIXES)}")


def _skip(config: Config) -> Iterator[ConfigProblem]:
    for module in config.skip.modules:
        if not _is_importable(module):
            fix = "give its dotted name, and put it on the Python path or into this directory"
            yield ConfigProblem("skip.modules", module, "there is no module of this name to import", fix)
    for key, role in enabled_roles(config).items():
        parent, obstacle = _writable_parent(Path(role.dump_dir))
        if role.dump_dir and obstacle:
            consequence = f"{parent} {obstacle}, so nothing could be recorded"
            yield ConfigProblem(f"{key}.dump_dir", role.dump_dir, consequence, "give a writable directory")


def _resume(config: Config) -> Iterator[ConfigProblem]:
    source = config.resume
    if source in ("none", "auto") or Path(source).expanduser().is_dir():
        return
    close = [] if "/" in source else get_close_matches(source, ("none", "auto"), n=1)
    fix = f"give none, auto, a run directory or one of its checkpoints; {_similar_path(Path(source))}"
    fix = f"did you mean {close[0]}?" if close else fix
    yield ConfigProblem("resume", source, "there is no such directory to resume from", fix)


def _run_dir(config: Config) -> Iterator[ConfigProblem]:
    if config.run_dir is None:
        return
    path = Path(config.run_dir).expanduser()
    parent, obstacle = _writable_parent(path)
    if obstacle:
        yield ConfigProblem("run_dir", config.run_dir, f"{parent} {obstacle}", "choose another directory")
    elif config.resume == "none" and any((path / name).exists() for name in _FILES_OF_A_RUN):
        yield ConfigProblem(
            "run_dir",
            config.run_dir,
            "it has the files of an earlier run, and this run would overwrite them",
            "choose another directory, or continue that run: resume=auto. Remove it only if `asyncrl status` says that "
            "no run uses it, and you need none of its files",
        )


def _api_key(section: str, variable: str | None) -> Iterator[ConfigProblem]:
    if variable is not None and not os.environ.get(variable):
        yield ConfigProblem(
            f"{section}.api_key_env",
            variable,
            "the environment has no such variable, or it is empty, so requests would have no key",
            f"export {variable}=... first, or set {section}.api_key_env=null (for an endpoint without keys)",
        )


def _port(config: Config) -> Iterator[ConfigProblem]:
    host, port = config.serve.host, config.serve.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, port))
        except OSError as error:
            consequence = f"cannot listen on {host}:{port}: {error.strerror or error}"
            fix = "choose another serve.port or serve.host, or stop the program that uses it"
            yield ConfigProblem("serve.port", port, consequence, fix)


# ------------------------------------------------------------------------------------------------ user code


def _rewards(config: Config) -> Iterator[ConfigProblem]:
    reward = config.reward
    names = [("reward.function", reward.function)]
    names += [("reward.functions.function", function.function) for function in reward.functions]
    for key, name in names:
        if name != "none":
            yield from _user_code(key, name, BUILTIN_REWARDS, "reward")
    if reward.judge.model is not None:
        yield from _api_key("reward.judge", reward.judge.api_key_env)


def check_conversations(config: Config) -> Iterator[ConfigProblem]:
    """Yield the problems of the code of tools, interactions and agents."""
    turns, agent = config.rollout.multi_turn, config.rollout.agent
    if turns.enable:
        for number, tool in enumerate(turns.tools):
            yield from _tool(f"rollout.multi_turn.tools.{number}", tool)
        for number, interaction in enumerate(turns.interactions):
            key = f"rollout.multi_turn.interactions.{number}.class_name"
            yield from _user_code(key, interaction.class_name, BUILTIN_INTERACTIONS, "interaction")
    if agent.program is not None:
        yield from _user_code("rollout.agent.program", agent.program, (), "function")
    yield from _program("rollout.agent.command", agent.command)


def _tool(key: str, tool: ToolConfig) -> Iterator[ConfigProblem]:
    if tool.function is not None:
        yield from _user_code(f"{key}.function", tool.function, (), "function")
    if tool.class_name is not None:
        module = tool.class_name.rpartition(".")[0]
        if ":" in tool.class_name or not module or not _is_importable(module):
            yield from _user_code(f"{key}.class_name", tool.class_name, BUILTIN_TOOLS, "tool")
    if tool.mcp is not None:
        yield from _program(f"{key}.mcp.command", tool.mcp.command)


def _program(key: str, command: Sequence[str]) -> Iterator[ConfigProblem]:
    if command and shutil.which(command[0]) is None:
        fix = "check the name, or give a path"
        fix = "give a list, the program first and then its arguments" if " " in command[0] else fix
        yield ConfigProblem(key, command[0], "there is no such program on the PATH", fix)


def _user_code(key: str, name: str, built_in: Sequence[str], what: str) -> Iterator[ConfigProblem]:
    """Check that `module:name`, `path/file.py:name` or a built-in exists, without importing it."""
    place, _, attribute = name.rpartition(":")
    if not place:
        if name not in built_in:
            close = get_close_matches(name, built_in, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            known = f"Built in: {', '.join(built_in)}; your own" if built_in else "write it as"
            consequence = f"no built-in {what} has this name" if built_in else f"it names no {what}"
            yield ConfigProblem(key, name, consequence, f"{hint}{known}: module:name or path/file.py:name")
    elif place.endswith(".py"):
        yield from _code_in_file(key, name, Path(place).expanduser(), attribute)
    elif not _is_importable(place):
        fix = "check the name, install it into this environment, or give path/file.py:name"
        yield ConfigProblem(key, name, f"there is no module {place} to import", fix)


def _code_in_file(key: str, name: str, file: Path, attribute: str) -> Iterator[ConfigProblem]:
    if not file.is_file():
        yield ConfigProblem(key, name, f"the file {file} is not there", _similar_path(file))
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except (SyntaxError, ValueError) as error:
        yield ConfigProblem(key, name, f"{file} is not Python that compiles: {error}", "correct the file")
        return
    defined = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {a.asname or a.name for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
    if attribute not in defined | assigned | imported and "*" not in imported:
        close = get_close_matches(attribute, defined, n=1)
        fix = f"did you mean {close[0]}?" if close else f"it defines {', '.join(sorted(defined)) or 'nothing'}"
        yield ConfigProblem(key, name, f"{file} has no {attribute!r}", fix)


def _is_importable(module: str) -> bool:
    """Whether the top package of `module` exists; parents are not imported, so submodules stay unchecked."""
    top, here = module.partition(".")[0], Path.cwd()
    return top.isidentifier() and (
        importlib.util.find_spec(top) is not None or (here / top).is_dir() or (here / f"{top}.py").is_file()
    )


# ------------------------------------------------------------------------------------------------ models


def _policy(config: Config) -> Iterator[ConfigProblem]:
    path, tokenizer = config.model.path, config.model.tokenizer_path
    yield from _model_directory("model.path", path)
    if tokenizer is not None:
        otherwise = "; null means the tokenizer at model.path"
        yield from _model_directory("model.tokenizer_path", tokenizer, otherwise, is_model=False)
    limit = model_config(path).get("max_position_embeddings")
    if isinstance(limit, int) and config.max_model_len > limit:
        consequence = f"the model at {path} has positions for {limit} tokens; the engine would refuse to start"
        lengths = "data.max_prompt_length + rollout.response_length (or rollout.max_model_len)"
        yield ConfigProblem("rollout.max_model_len", config.max_model_len, consequence, f"lower {lengths} to {limit}")


def _other_models(config: Config) -> Iterator[ConfigProblem]:
    if config.needs_critic and config.critic.path is not None:
        otherwise = "; critic.path=null starts from model.path, with a new value head"
        yield from _model_directory("critic.path", config.critic.path, otherwise)
    if config.reward_model.placement != "off" and config.reward_model.path is not None:
        otherwise = "; reward_model.placement=off needs none"
        found = list(_model_directory("reward_model.path", config.reward_model.path, otherwise))
        yield from found or _reward_model(config, config.reward_model.path)


def _model_directory(key: str, path: str, otherwise: str = "", *, is_model: bool = True) -> Iterator[ConfigProblem]:
    """Check that `path` is a directory (of a model: with its files) or a hub name; the fix ends with `otherwise`."""
    local = local_path(path)
    if local is not None and local.is_dir():
        if is_model and not (local / "config.json").is_file():
            consequence = "it has no config.json, so it is no model in Hugging Face format"
            yield ConfigProblem(key, path, consequence, "give the directory that save_pretrained wrote")
        if is_model and not any(local.glob("*.safetensors")):
            consequence = "it has no *.safetensors weights; pickled weights are never read"
            yield ConfigProblem(key, path, consequence, "convert it: save_pretrained(DIR, safe_serialization=True)")
    elif local is None or not _HUB_NAME.fullmatch(path):
        yield _missing(key, path, "the directory", otherwise)
    elif os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on") and not _in_hub_cache(path):
        consequence = "it is neither a directory here nor in the hub's cache, and HF_HUB_OFFLINE forbids a download"
        yield ConfigProblem(key, path, consequence, f"{_similar_path(local)}; or unset HF_HUB_OFFLINE{otherwise}")


def _in_hub_cache(name: str) -> bool:
    home = os.environ.get("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", str(Path(home) / "hub")))
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


def _target_modules(config: Config) -> Iterator[ConfigProblem]:
    """Check that each name in `model.target_modules` is a matrix in the model's files.

    Files may lack a prefix that the modules have (`transformer.h.0` is saved as `h.0`), so a target also matches a
    saved name that it ends with.
    """
    targets = config.model.target_modules
    if config.model.lora_rank == 0 or targets == _ALL_LINEAR:
        return
    modules = [
        name.removesuffix(".weight")
        for name, shape in tensor_shapes(config.model.path).items()
        if name.endswith(".weight") and len(shape) == 2 and name.split(".")[-2] not in _NOT_ADAPTED
    ]
    known = sorted({module.rpartition(".")[2] for module in modules})
    for target in (targets,) if isinstance(targets, str) else targets:
        if modules and not any(f".{one}".endswith(f".{target}") or target.endswith(f".{one}") for one in modules):
            close = get_close_matches(target, known, n=1)
            hint = f"instead of {target}, did you mean {close[0]}? " if close else ""
            yield ConfigProblem(
                "model.target_modules",
                targets,
                f"the model at {config.model.path} has no linear layer called {target}, so it would get no adapter",
                f"{hint}There are {', '.join(known)}; or {_ALL_LINEAR}",
            )


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


# ------------------------------------------------------------------------------------------------ engines, packages


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent package is missing, or is no package
        return False


def _packages(config: Config) -> Iterator[ConfigProblem]:
    """Check that metric sinks exist, and that built-in sinks and the OTLP export have the packages they need."""
    for name in config.logging.sinks:
        yield from _user_code("logging.sinks", name, BUILTIN_SINKS, "sink")
    needed: list[tuple[str, str, tuple[str, ...], str]] = [
        ("logging.sinks", name, *_SINK_PACKAGES[name]) for name in config.logging.sinks if name in _SINK_PACKAGES
    ]
    if config.profiler.otlp_endpoint is not None:
        needed.append(("profiler.otlp_endpoint", config.profiler.otlp_endpoint, _OTLP_MODULES, "asyncrl[otlp]"))
    for key, value, modules, package in needed:
        if missing := next((module for module in modules if not _is_installed(module)), None):
            consequence = f"it needs the package {missing}, which is not installed here"
            yield ConfigProblem(key, value, consequence, f"pip install '{package}'")


def _strategies(config: Config) -> Iterator[ConfigProblem]:
    """Check the names of engines, even for models that this run does not have."""
    strategies = {
        "trainer.strategy": config.trainer.strategy,
        "ref.strategy": config.ref.strategy,
        "critic.strategy": config.critic.strategy,
        "reward_model.worker.strategy": config.reward_model.worker.strategy,
    }
    known = sorted({*BUILTIN_STRATEGIES, *(point.name for point in entry_points(group=STRATEGY_ENTRY_POINTS))})
    for key, strategy in strategies.items():
        if strategy is not None and strategy not in known:
            near = get_close_matches(strategy.lower(), known, n=2) or get_close_matches(strategy, known, 1, cutoff=0.0)
            yield ConfigProblem(
                key,
                strategy,
                f"there is no such engine; known are {', '.join(known)}",
                f"did you mean {' or '.join(near)}? Or install the package that registers it as "
                f"an entry point of {STRATEGY_ENTRY_POINTS}",
            )


def _engine_libraries(config: Config) -> Iterator[ConfigProblem]:
    """Check that the packages of engine backends are installed, without importing them."""
    strategies = {"trainer.strategy": config.trainer.strategy}
    strategies |= {f"{name}.strategy": role.strategy for name, role in model_roles(config).items() if role.strategy}
    modules = {point.name: point.module.partition(".")[0] for point in entry_points(group=STRATEGY_ENTRY_POINTS)}
    for key, strategy in strategies.items():
        module = _ENGINE_LIBRARIES.get(strategy, modules.get(strategy))
        if module is not None and not _is_installed(module):
            extra = f"pip install 'asyncrl[{strategy}]'"
            fix = extra if strategy in _ENGINE_LIBRARIES else f"install the package of {module}"
            consequence = f"it needs {module}, which is not installed here"
            yield ConfigProblem(key, strategy, consequence, f"{fix}, or use fsdp2 or fsdp")
    if config.trainer.use_liger and not _is_installed("liger_kernel"):
        consequence, fix = "the package liger-kernel is not installed here", "pip install 'asyncrl[liger]'"
        yield ConfigProblem("trainer.use_liger", True, consequence, f"{fix}, or leave this key out")


def _sequence_parallel(config: Config) -> Iterator[ConfigProblem]:
    """Check that the size of a sequence-parallel group divides the ranks and the attention heads.

    One problem reports both, so that its fix satisfies both.
    """
    size, ranks = config.trainer.ulysses_sequence_parallel_size, config.trainer.num_workers
    heads = model_config(config.model.path).get("num_attention_heads")
    heads = heads if isinstance(heads, int) and heads > 0 else None
    consequences = []
    if ranks % size:
        consequences.append(f"trainer.num_workers = {ranks} ranks cannot be divided into groups of {size}")
    if heads is not None and heads % size:
        consequences.append(
            f"the model at {config.model.path} has {heads} attention heads, which {size} ranks cannot share"
        )
    if not consequences:
        return
    divisors = [number for number in range(1, (heads or ranks) + 1) if (heads or ranks) % number == 0]
    fix = f"set it to {' or '.join(str(number) for number in divisors if ranks % number == 0)}"
    with_more_ranks = [str(number) for number in divisors if ranks % number]
    if heads is None or heads % size == 0:
        fix += f", or trainer.num_workers to a multiple of {size}"
    elif with_more_ranks:
        fix += f", or to {' or '.join(with_more_ranks)} with trainer.num_workers a multiple of that"
    yield ConfigProblem("trainer.ulysses_sequence_parallel_size", size, "; and ".join(consequences), fix)


# ------------------------------------------------------------------------------------------------ GPUs


def visible_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use."""
    driver = Path("/proc/driver/nvidia/gpus")
    present = len(list(driver.iterdir())) if driver.is_dir() else _nvml_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([device for device in visible.split(",") if device.strip() not in ("", "-1")]))


def _nvml_gpus() -> int:
    """Count GPUs by NVIDIA's management library, as Ray does: some drivers show no files, e.g. in WSL."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if library.nvmlInit_v2() != 0:
        return 0
    failed = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    library.nvmlShutdown()
    return 0 if failed else count.value


def check_devices(config: Config) -> Iterator[ConfigProblem]:
    """Yield the problems of engine libraries, GPUs and the profiler on this machine."""
    yield from _engine_libraries(config)
    gpus = visible_gpus()
    yield from _nsight(config, gpus)
    if config.ray.address is None:
        yield from _too_few_gpus(config, gpus)
    if gpus or config.trainer.device != "auto":
        return
    # With trainer.device=cpu, the rules report these keys.
    no_gpu = "this machine shows no GPU, which trainer.device=auto would use"
    for key in ("activation_offload", "param_offload", "optimizer_offload"):
        if getattr(config.trainer, key):
            yield warning(f"trainer.{key}", True, f"{no_gpu}: on CPU it has no effect", "leave this key out")
    if config.trainer.use_liger:
        consequence = f"{no_gpu}: Liger kernels run on GPUs only"
        yield ConfigProblem("trainer.use_liger", True, consequence, "leave this key out")


def _too_few_gpus(config: Config, gpus: int) -> Iterator[ConfigProblem]:
    ranks, roles = config.trainer.num_workers, model_roles(config).items()
    devices = {"trainer": config.trainer.device}
    devices |= {name: role.device for name, role in roles if role.placement == "own" and role.device}
    for section, device in devices.items():
        if device == "cuda" and not gpus:
            consequence = "this machine shows no GPU (to this process: see CUDA_VISIBLE_DEVICES)"
            fix = f"set {section}.device=auto or cpu, or point ray.address at a cluster that has GPUs"
            yield ConfigProblem(f"{section}.device", device, consequence, fix)
    if gpus and config.trainer.device != "cpu" and ranks > gpus:
        consequence = f"each rank needs a GPU, and this machine shows {gpus}"
        fix = f"set it to {gpus} or fewer, or trainer.device=cpu, or point ray.address at a cluster"
        yield ConfigProblem("trainer.num_workers", ranks, consequence, fix)


def _nsight(config: Config, gpus: int) -> Iterator[ConfigProblem]:
    if config.profiler.tool != "nsys" or not config.profiler.steps or config.trainer.device == "cpu":
        return
    if not gpus:
        consequence = "this machine has no visible NVIDIA GPU, and Nsight Systems profiles training processes on GPUs"
        yield ConfigProblem("profiler.tool", "nsys", consequence, "set profiler.tool=torch, or use a machine with GPUs")
    if shutil.which("nsys") is None:
        consequence = "the command nsys is not on PATH here, and the training processes are started under it"
        fix = "install NVIDIA Nsight Systems (https://developer.nvidia.com/nsight-systems), or set profiler.tool=torch"
        yield ConfigProblem("profiler.tool", "nsys", consequence, fix)
