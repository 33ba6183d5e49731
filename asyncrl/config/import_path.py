"""The one way from a name in the configuration to code: tables of built-in objects, `module:name`, `path/file.py:name`.

Whatever users may extend has a table of its built-in parts by name. `load_registered` finds a name in the table or
imports it; `load_function` also makes errors of the user's function name its file and line.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.core.failures import AsyncRLError, ConfigError, UserCodeError

_FILE_MODULE = "asyncrl_user_"
"""Prefix of the module names of the user's files."""


SHIPPED = "py_modules_files"
"""Ray's directory on each node for code that a driver sends (`own_code`)."""
_REFERENCE = re.compile(r"([^:\n]+):[A-Za-z_][\w.]*")


def own_code(names: Iterable[str]) -> list[Path]:
    """Return the files and packages of the user's code that `names` refer to and that lie outside the environment:
    `path/file.py:name`, and `module:name`, `module.name` or `module` in the working directory.

    Raises:
        ConfigError: two of them have the same name, by which processes on other nodes import them.
    """
    found: dict[Path, None] = {}
    for name in names:
        reference = _REFERENCE.fullmatch(name)
        place = reference[1] if reference else name
        path = Path(place).expanduser().resolve()
        if reference and place.endswith(".py"):
            candidates = [path]
        elif all(part.isidentifier() for part in place.split(".")):
            top = Path.cwd() / place.partition(".")[0]
            file = top.with_suffix(".py")
            candidates = [top, file] if (top / "__init__.py").is_file() else [file, top]  # Python's order
        else:
            continue
        found |= dict.fromkeys([one for one in candidates if one.is_dir() or (one.suffix and one.is_file())][:1])
    first: dict[str, Path] = {}
    for path in found:
        if (other := first.setdefault(path.stem, path)) != path:
            raise ConfigError(
                f"{other} and {path}: the configuration names both, and processes on other nodes can import "
                f"only one module {path.stem}; rename one of the two"
            )
    return list(found)


def is_own(value: Any) -> bool:
    """Whether a value names a part of the user's own (`sections.base.ImportPath`)."""
    return isinstance(value, str) and ":" in value


def load_registered(name: str, key: str, built_in: Mapping[str, Any], kind: str) -> Any:
    """Load an object by the name in the configuration: a built-in, `module:name`, `module.name` or `path/file.py:name`.

    Args:
        built_in: Objects or their import paths by short name.
        kind: `Class` or `function`, for the error.

    Raises:
        ConfigError: there is no such object.
        UserCodeError: the module raised when it was imported.
    """
    target = built_in.get(name, name)
    if not isinstance(target, str):
        return target
    if ":" not in target:
        module, dot, attribute = target.rpartition(".")
        if not dot:
            raise ConfigError(
                f"{key}: {name!r} is not built in{nearest(name, list(built_in))}; name your own as "
                f"module:{kind} or path/file.py:{kind}"
            )
        target = f"{module}:{attribute}"
    return load_object(target, key)


def load_function(name: str, key: str, built_in: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Load a function like `load_registered`. A user's function raises a UserCodeError that names its file and line.

    Raises:
        ConfigError: there is no such function.
        UserCodeError: the module raised when it was imported.
    """
    function = load_registered(name, key, built_in, "function")
    if name in built_in:
        return function
    if not callable(function):
        raise ConfigError(f"{key}: {name} is a {type(function).__name__}, not a function")

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except AsyncRLError:
            raise
        except Exception as error:
            place = raised_at(error, source_of(function)) or name
            raise UserCodeError.wrap(f"{key}: {place}: {type(error).__name__}: {error}", error) from error

    return guarded


def source_of(function: Callable[..., Any]) -> str:
    """Return the file of a function or class; empty if it has none."""
    try:
        return inspect.getsourcefile(inspect.unwrap(function)) or ""
    except TypeError:
        return ""


def defined_at(function: Callable[..., Any]) -> str:
    """Return `file:line` of the definition, or the function's `repr`."""
    try:
        return f"{source_of(function)}:{inspect.getsourcelines(inspect.unwrap(function))[1]}"
    except (OSError, TypeError):
        return repr(function)


def placed(message: str, function: Callable[..., Any] | None) -> str:
    """Return a message about a function of the user's with `file:line` of its definition, unless it names the file.

    None: there is no function, because it could not be loaded.
    """
    if function is None or source_of(function) in message:
        return message
    return f"{defined_at(function)}: {message}"


def raised_at(error: BaseException, file: str) -> str:
    """Return `file:line` of the last frame of `error` in `file`; empty if it has none there."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{file}:{frames[-1].lineno}" if frames else ""


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature, or None: some compiled functions have none."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def call_problem(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Describe why the function cannot be called with these arguments; empty if it can."""
    signature = signature_of(function)
    if signature is None:
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function))
        unknown = [one for one in kwargs if one not in signature.parameters]
        near = difflib.get_close_matches(unknown[0], signature.parameters, n=1) if unknown else []
        return f"{name}{signature}: {error}" + (f"; did you mean {near[0]!r}?" if near else "")
    return ""


def load_object(reference: str, key: str) -> Any:
    """Import the object that `reference` names.

    Args:
        reference: `module:name` or `path/file.py:name`; the name may have dots.
        key: The configuration key that holds it, for the error.

    Raises:
        ConfigError: there is no such object.
        UserCodeError: the module raised an error when it was imported.
    """
    location, colon, path = reference.rpartition(":")
    if not (colon and location and path):
        raise ConfigError(f"{key}: {reference!r} is not of the form module:name or path/file.py:name")
    target: Any = _import_file(location, key) if location.endswith(".py") else import_module(location, key)
    for part in path.split("."):
        if not hasattr(target, part):
            names = [name for name in vars(target) if not name.startswith("_")] if hasattr(target, "__dict__") else []
            raise ConfigError(f"{key}: {location} has no {part!r}{nearest(part, names)}")
        target = getattr(target, part)
    return target


def nearest(name: str, names: list[str]) -> str:
    """Return the end of a sentence about a name that does not exist: the nearest name, or up to 8 existing names."""
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there is {', '.join(sorted(names)[:8])}" if names else ""


def import_module(name: str, key: str) -> ModuleType:
    """Import the module that a configuration names under `key`, also from the working directory.

    Raises:
        ConfigError: there is no such module, or the module raised this error.
        UserCodeError: the module raised another error when it was imported.
    """
    # A console script does not look into the directory it is started in; `python` does.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise UserCodeError.wrap(f"{key}: importing {name} failed: {error}", error) from error
        siblings = [path.stem for path in Path.cwd().glob("*.py")]
        raise ConfigError(
            f"{key}: there is no module {error.name!r}{nearest(error.name, siblings)}; looked in {here} and the "
            "installed packages"
        ) from error
    except ConfigError:
        raise
    except Exception as error:
        raise UserCodeError.wrap(f"{key}: importing {name} failed: {error}", error) from error


def _import_file(location: str, key: str) -> ModuleType:
    path = Path(location).expanduser().resolve()
    name = f"{_FILE_MODULE}{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded  # a file that two keys name is one module, with one state
    if not path.is_file():
        if (spec := importlib.util.find_spec(path.stem)) is not None and SHIPPED in (spec.origin or ""):
            return importlib.import_module(path.stem)  # the driver has sent it to this node
        siblings = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"{key}: there is no file {path}{nearest(path.name, siblings)}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        place = raised_at(error, str(path)) or path
        raise UserCodeError.wrap(f"{key}: importing {place} failed: {error}", error) from error
    return module
