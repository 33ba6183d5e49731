"""`python -m asyncrl`."""

from __future__ import annotations

from asyncrl.cli.main import entry

if __name__ == "__main__":
    entry()
