"""The Python files of the working directory that a configuration names, which travel to the nodes of a cluster.

They are copied into a package that Ray makes importable on every node (`runtime_env`). `asyncrl.config.import_path`
finds them there if the working directory of a process does not have them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.import_path import SHIPPED
from asyncrl.config.interpolation import texts
from asyncrl.config.schema import Config

_FILE = re.compile(r"(.+\.py):[\w.]+")
_MODULE = re.compile(r"([A-Za-z_][\w.]*)(:[\w.]+)?")
_LARGEST_PACKAGE = 1000
"""A directory with more Python files than this is not taken for a package that a configuration means."""


def code_files(config: Config, root: Path) -> tuple[Path, ...]:
    """Return the Python files below `root` that the configuration names as `path/file.py:name`, `module:name` or, in
    `skip.modules`, `module`; of a package, all files. The paths are relative to `root`."""
    found: set[Path] = set()
    for path, text in texts(config.model_dump(mode="json")):
        if (file := _FILE.fullmatch(text)) is not None:
            given = Path(file[1]).expanduser()
            found.update(_below(root, (root / given).resolve()))
        elif (module := _MODULE.fullmatch(text)) is not None and (module[2] or path[:2] == ("skip", "modules")):
            top = module[1].partition(".")[0]
            found.update(_below(root, root / f"{top}.py"), _below(root, root / top))
    return tuple(sorted(found))


def _below(root: Path, path: Path) -> Iterator[Path]:
    """Yield a file, or all Python files of a package, relative to `root`; nothing outside of it."""
    if not path.is_relative_to(root):
        return
    if path.is_file():
        yield path.relative_to(root)
    elif path.is_dir():
        files = [file for _, file in zip(range(_LARGEST_PACKAGE + 1), path.rglob("*.py"), strict=False)]
        yield from (file.relative_to(root) for file in files if len(files) <= _LARGEST_PACKAGE)


def stage(config: Config, root: Path, target: Path) -> Path | None:
    """Copy the files into a package below `target`, and return its directory; None if there are none."""
    files = code_files(config, root)
    if not files:
        return None
    package = target / SHIPPED
    for file in files:
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, package / file)
    if not (package / "__init__.py").exists():
        (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "shipped_from.txt").write_text(str(root), encoding="utf-8")
    return package
