"""Files that a configuration names: where they are on this machine, and what to say of one that is not there."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from asyncrl import assets
from asyncrl.config.problems import Problem


def local(path: str) -> Path | None:
    """Where `path` is on this machine; None: an `asyncrl://` name that is not shipped."""
    try:
        return Path(assets.resolve(path))
    except FileNotFoundError:
        return None


def like(path: Path) -> str:
    """A hint at a neighbour with a similar name."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no directory {folder} either"
    close = get_close_matches(path.name, [entry.name for entry in folder.iterdir()], n=1)
    return f"did you mean {folder / close[0]}?" if close else f"nothing in {folder.absolute()} has a similar name"


def _shipped() -> str:
    entries = sorted(f"{assets.SCHEME}{entry.relative_to(assets.ROOT)}" for entry in assets.ROOT.glob("*"))
    return "shipped are " + ", ".join(entry for entry in entries if not entry.endswith((".py", "__pycache__")))


def missing(key: str, path: str, what: str, otherwise: str = "") -> Problem:
    """`what` is not at `path`; `otherwise` ends the fix."""
    found = local(path)
    return Problem(key, path, f"{what} is not there", (_shipped() if found is None else like(found)) + otherwise)
