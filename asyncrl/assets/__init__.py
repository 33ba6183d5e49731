"""Files shipped inside the package, named `asyncrl://NAME/...` in configs."""

from __future__ import annotations

from pathlib import Path

SCHEME = "asyncrl://"
ROOT = Path(__file__).parent


def resolve(path: str) -> str:
    """The file-system path of an `asyncrl://` name; any other path as it is, `~` expanded.

    Raises:
        FileNotFoundError: nothing of that name is shipped.
    """
    if not path.startswith(SCHEME):
        return str(Path(path).expanduser()) if path.startswith("~") else path
    target = (ROOT / path.removeprefix(SCHEME)).resolve()
    if not target.is_relative_to(ROOT) or not target.exists():
        shipped = ", ".join(sorted(SCHEME + entry.name for entry in ROOT.iterdir() if entry.is_dir()))
        raise FileNotFoundError(f"{path}: not shipped with asyncrl; shipped: {shipped}")
    return str(target)
