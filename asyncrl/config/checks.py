"""Rules that look around: are the files there, is the variable set, is the run directory free.

Everything here is a matter of milliseconds and loads nothing heavy, so it runs before Ray, torch or vLLM is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from asyncrl import assets
from asyncrl.config.problems import Problem, warning
from asyncrl.config.schema import Config
from asyncrl.config.trainer_rules import epoch_steps, fits, roles, too_few_prompts

_JSON_LINES = (".jsonl", ".ndjson")
_DATA_SUFFIXES = (".parquet", *_JSON_LINES)
BUILTIN_STRATEGIES = ("local", "ddp", "fsdp", "fsdp2")
STRATEGY_ENTRY_POINTS = "asyncrl.engines"
BUILTIN_REWARDS = ("exact_match", "math_verify", "reasoning_gym")

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_USED_BY_A_RUN = ("config.yaml", "metrics.jsonl", "summary.json", "checkpoints")


def problems(config: Config, *, serve_only: bool = False) -> list[Problem]:
    """What the files and the environment say against `config`; `serve_only`: engines without training."""
    found = [*_model(config), *_chat_template(config), *_api_key(config)]
    if serve_only:
        return [*found, *_port(config)]
    found += [*_data_files(config), *_length(config), *_reward(config), *_roles(config), *_gpus(config)]
    found += _resume(config)
    if config.ray.address is not None:  # the parts may run where these files are, though they are not here
        found = [replace(problem, severity="warning") for problem in found]
    return [*found, *_strategies(config), *_run_dir(config)]


def _local(path: str) -> Path | None:
    """Where `path` is on this machine; None: an `asyncrl://` name that is not shipped."""
    try:
        return Path(assets.resolve(path))
    except FileNotFoundError:
        return None


def _like(path: Path) -> str:
    """A hint at a neighbour with a similar name."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no directory {folder} either"
    close = get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=1)
    return f"did you mean {folder / close[0]}?" if close else f"nothing in {folder.absolute()} has a similar name"


def _shipped() -> str:
    entries = sorted(f"{assets.SCHEME}{entry.relative_to(assets.ROOT)}" for entry in assets.ROOT.glob("*"))
    return "shipped are " + ", ".join(entry for entry in entries if not entry.endswith((".py", "__pycache__")))


def _missing(key: str, path: str, what: str) -> Problem:
    local = _local(path)
    return Problem(key, path, f"{what} is not there", _shipped() if local is None else _like(local))


def _model(config: Config) -> Iterator[Problem]:
    yield from _model_directory("model.path", config.model.path, ("config.json",))
    if config.model.tokenizer_path is not None:
        yield from _model_directory("model.tokenizer_path", config.model.tokenizer_path, ())
    limit = model_config(config).get("max_position_embeddings")
    if isinstance(limit, int) and config.max_model_len > limit:
        yield Problem(
            "rollout.max_model_len",
            config.max_model_len,
            f"the model at {config.model.path} has positions for {limit} tokens; the engine would refuse to start",
            f"lower data.max_prompt_length + rollout.response_length (or rollout.max_model_len) to {limit} or less",
        )


def _model_directory(key: str, path: str, needed: tuple[str, ...]) -> Iterator[Problem]:
    local = _local(path)
    if local is not None and local.is_dir():
        for name in needed:
            if not (local / name).is_file():
                yield Problem(
                    key,
                    path,
                    f"it has no {name}, so it is no model in Hugging Face format",
                    "point it at the directory that save_pretrained wrote",
                )
        if needed and not any(local.glob("*.safetensors")):
            yield Problem(
                key,
                path,
                "it has no *.safetensors weights; pickled weights are never read",
                "convert it: save_pretrained(DIR, safe_serialization=True)",
            )
    elif local is None or not _HUB_NAME.fullmatch(path):
        yield _missing(key, path, "the directory")
    elif os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on") and not _in_hub_cache(path):
        yield Problem(
            key,
            path,
            "it is no directory here, not in the hub's cache, and HF_HUB_OFFLINE forbids a download",
            f"{_like(local)}; or unset HF_HUB_OFFLINE",
        )


def _roles(config: Config) -> Iterator[Problem]:
    """Models besides the policy, and what the policy's own says about how it can be spread."""
    if config.needs_critic and config.critic.path is not None:
        yield from _model_directory("critic.path", config.critic.path, ("config.json",))
    if config.reward_model.placement != "off" and config.reward_model.path is not None:
        yield from _model_directory("reward_model.path", config.reward_model.path, ("config.json",))
    size, heads = config.trainer.ulysses_sequence_parallel_size, model_config(config).get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        divisors = [number for number in range(1, heads + 1) if heads % number == 0]
        yield Problem(
            "trainer.ulysses_sequence_parallel_size",
            size,
            f"the model at {config.model.path} has {heads} attention heads, which {size} ranks cannot share out",
            f"set it to one of {', '.join(map(str, divisors))}",
        )
    if config.trainer.use_liger and importlib.util.find_spec("liger_kernel") is None:
        yield Problem(
            "trainer.use_liger",
            True,
            "the package liger-kernel is not installed here",
            "pip install liger-kernel, or leave this key out",
        )


def _strategies(config: Config) -> Iterator[Problem]:
    """Entry points are read, not loaded: what one needs is told when it is."""
    given = {"trainer.strategy": config.trainer.strategy}
    given |= {f"{name}.strategy": role.strategy for name, role in roles(config).items() if role.strategy is not None}
    known = sorted({*BUILTIN_STRATEGIES, *(point.name for point in entry_points(group=STRATEGY_ENTRY_POINTS))})
    for key, strategy in given.items():
        if strategy not in known:
            (nearest,) = get_close_matches(strategy, known, n=1, cutoff=0.0)
            yield Problem(
                key,
                strategy,
                f"there is no such engine; known are {', '.join(known)}",
                f"did you mean {nearest}? Or install the package that registers it as an entry point of "
                f"{STRATEGY_ENTRY_POINTS}",
            )


def _in_hub_cache(name: str) -> bool:
    home = os.environ.get("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", str(Path(home) / "hub")))
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


def model_config(config: Config) -> Mapping[str, Any]:
    """The model's config.json; empty if it is not on this machine or not readable as such."""
    local = _local(config.model.path)
    if local is None or not (local / "config.json").is_file():
        return {}
    try:
        loaded = json.loads((local / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def num_parameters(config: Config) -> int | None:
    """Parameters of the model, from the headers of its safetensors; None if it is not on this machine."""
    local = _local(config.model.path)
    files = sorted(local.glob("*.safetensors")) if local is not None and local.is_dir() else []
    total = 0
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for dimension in tensor["shape"]:
                    size *= dimension
                total += size
    return total or None


def num_prompts(config: Config) -> int | None:
    """Rows of the training set before filtering; None where counting them would mean to load a library."""
    if config.data.reasoning_gym is not None:
        return config.data.reasoning_gym.train_size
    total = 0
    for name in config.data.train_files:
        local = _local(name)
        if local is None or local.suffix.lower() not in _JSON_LINES or not local.is_file():
            return None
        with local.open("rb") as stream:
            total += sum(1 for line in stream if line.strip())
    return min(total, config.data.max_train_samples or total)


def visible_gpus() -> int:
    """NVIDIA GPUs that this process may use."""
    driver = Path("/proc/driver/nvidia/gpus")
    present = len(list(driver.iterdir())) if driver.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = [device for device in visible.split(",") if device.strip() and device.strip() != "-1"]
    return min(present, len(chosen))


def _length(config: Config) -> Iterator[Problem]:
    """The rules about a run's length, where the data decides it."""
    prompts = None if config.trainer.total_training_steps is not None else num_prompts(config)
    if prompts is not None:
        steps = epoch_steps(config, prompts)
        yield from fits(config, steps) if steps else [too_few_prompts(config, prompts)]


def _gpus(config: Config) -> Iterator[Problem]:
    """What `trainer.device: auto` makes of keys for GPUs; `idle` has the same for `cpu`."""
    trainer = config.trainer
    if trainer.device != "auto" or visible_gpus():
        return
    found = "this machine shows no GPU, which trainer.device=auto would take"
    for key in ("activation_offload", "param_offload", "optimizer_offload"):
        if getattr(trainer, key):
            yield warning(f"trainer.{key}", True, f"{found}: on CPU it has no effect", "leave this key out")
    if trainer.use_liger:
        yield Problem(
            "trainer.use_liger",
            True,
            f"{found}: Liger kernels run on GPUs only",
            "leave this key out, or set trainer.device=cuda if there is a GPU after all",
        )


def _chat_template(config: Config) -> Iterator[Problem]:
    template = config.model.chat_template
    if template is not None and not ((local := _local(template)) and local.is_file()):
        yield _missing("model.chat_template", template, "the file")


def _data_files(config: Config) -> Iterator[Problem]:
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for name in files:
            local = _local(name)
            if local is None or not local.is_file():
                yield _missing(key, name, "the file")
            elif local.suffix.lower() not in _DATA_SUFFIXES:
                yield Problem(key, name, "it cannot be read by its suffix", f"use {' or '.join(_DATA_SUFFIXES)}")


def _reward(config: Config) -> Iterator[Problem]:
    name = config.reward.function
    place, _, function = name.rpartition(":")
    if not place:
        if name not in BUILTIN_REWARDS:
            close = get_close_matches(name, BUILTIN_REWARDS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            yield Problem(
                "reward.function", name, "no built-in reward has this name",
                f"{hint}Built in: {', '.join(BUILTIN_REWARDS)}; your own: module:function or path/file.py:function",
            )  # fmt: skip
    elif place.endswith(".py"):
        yield from _reward_file(name, Path(place).expanduser(), function)
    elif not _importable(place):
        yield Problem(
            "reward.function", name, f"there is no module {place} to import",
            "check the name, install it into this environment, or give path/file.py:function",
        )  # fmt: skip


def _reward_file(name: str, file: Path, function: str) -> Iterator[Problem]:
    if not file.is_file():
        yield Problem("reward.function", name, f"the file {file} is not there", _like(file))
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except (SyntaxError, ValueError) as error:
        yield Problem("reward.function", name, f"{file} is not Python that compiles: {error}", "mend the file")
        return
    defined = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {a.asname or a.name for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) for a in n.names}
    if function not in defined | bound | imported and "*" not in imported:
        close = get_close_matches(function, defined, n=1)
        names = ", ".join(sorted(defined)) or "nothing"
        fix = f"did you mean {close[0]}?" if close else f"it defines {names}"
        yield Problem("reward.function", name, f"{file} has no function {function!r}", fix)


def _importable(module: str) -> bool:
    """Whether the top package of `module` is found; parents are not imported, so what lies below stays unchecked."""
    top = module.partition(".")[0]
    if not top.isidentifier():
        return False
    return (
        importlib.util.find_spec(top) is not None or (Path.cwd() / top).is_dir() or (Path.cwd() / f"{top}.py").is_file()
    )


def _api_key(config: Config) -> Iterator[Problem]:
    variable = config.serve.api_key_env
    if variable is not None and not os.environ.get(variable):
        yield Problem(
            "serve.api_key_env",
            variable,
            "the environment has no such variable, or it is empty, so clients would need no key",
            f"export {variable}=... first, or set serve.api_key_env=null (on loopback only)",
        )


def _port(config: Config) -> Iterator[Problem]:
    family = socket.AF_INET6 if ":" in config.serve.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.serve.host, config.serve.port))
        except OSError as error:
            yield Problem(
                "serve.port",
                config.serve.port,
                f"{config.serve.host}:{config.serve.port} cannot be listened on: {error.strerror or error}",
                "choose another serve.port or serve.host, or stop what listens there",
            )


def _resume(config: Config) -> Iterator[Problem]:
    source = config.resume
    if source in ("none", "auto") or Path(source).expanduser().is_dir():
        return
    close = get_close_matches(source, ("none", "auto"), n=1)
    fix = (
        f"did you mean {close[0]}?"
        if close
        else f"give none, auto, a run directory or one of its checkpoints; {_like(Path(source))}"
    )
    yield Problem("resume", source, "there is no such directory to resume from", fix)


def _run_dir(config: Config) -> Iterator[Problem]:
    if config.run_dir is None:
        return
    path = Path(config.run_dir).expanduser()
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield Problem(
            "run_dir", config.run_dir, f"{existing} is not a directory that can be written to", "choose another"
        )
    elif config.resume == "none" and any((path / name).exists() for name in _USED_BY_A_RUN):
        yield Problem(
            "run_dir",
            config.run_dir,
            "a run has been here already, and this one would overwrite its records",
            "choose another directory, remove this one, or go on with it: resume=auto",
        )
