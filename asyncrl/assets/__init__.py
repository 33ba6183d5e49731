"""Files shipped inside the package, named `asyncrl://NAME/...` in configs."""

from __future__ import annotations

from pathlib import Path

SCHEME = "asyncrl://"
ROOT = Path(__file__).parent


def resolve(path: str) -> str:
    """Return the file-system path of an `asyncrl://` name; other paths unchanged, with `~` expanded.

    Raises:
        FileNotFoundError: asyncrl ships no file of that name.
    """
    if not path.startswith(SCHEME):
        return str(Path(path).expanduser()) if path.startswith("~") else path
    target = (ROOT / path.removeprefix(SCHEME)).resolve()
    if not target.is_relative_to(ROOT) or not target.exists():
        shipped = ", ".join(sorted(SCHEME + entry.name for entry in ROOT.iterdir() if entry.is_dir()))
        raise FileNotFoundError(f"{path}: not shipped with asyncrl; shipped: {shipped}")
    return str(target)
