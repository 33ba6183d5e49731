"""Import the object that a configuration names as `module:name` or `path/file.py:name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.core.failures import ConfigError, UserCodeError

SHIPPED = "asyncrl_user_code"
"""Package of the user's files that Ray has brought to this node (`asyncrl.config.code_files`)."""


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
    if (shipped := _shipped_directory()) is not None and str(shipped) not in sys.path:
        sys.path.append(str(shipped))
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


def _shipped_directory() -> Path | None:
    """Return the directory with the files that the driver has sent to this node; None if there are none."""
    spec = importlib.util.find_spec(SHIPPED)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _shipped_file(path: Path) -> Path | None:
    """Return the copy of a file of the driver's working directory; None if it was not sent to this node."""
    if (directory := _shipped_directory()) is None:
        return None
    root = Path((directory / "shipped_from.txt").read_text(encoding="utf-8"))
    if path.is_absolute() and not path.is_relative_to(root):
        return None
    return directory / (path.relative_to(root) if path.is_absolute() else path)


def _import_file(location: str, key: str) -> ModuleType:
    path = Path(location).expanduser().resolve()
    if not path.is_file() and (shipped := _shipped_file(Path(location).expanduser())) is not None:
        path = shipped
    if not path.is_file():
        siblings = [entry.name for entry in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"{key}: there is no file {path}{nearest(path.name, siblings)}")
    name = f"asyncrl_user_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded  # a file that two keys name is one module, with one state
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserCodeError.wrap(f"{key}: importing {path} failed: {error}", error) from error
    return module
