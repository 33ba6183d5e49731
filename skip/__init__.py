"""SkipManager: record, replay and repeat annotated stages. See docs/skip.md."""

from skip.fingerprint import Fingerprint, field
from skip.manager import SkipManager
from skip.record import Content, Record
from skip.role import Action, BaseSkip, Call, Served, register_skip

__all__ = [
    "Action",
    "BaseSkip",
    "Call",
    "Content",
    "Fingerprint",
    "Record",
    "Served",
    "SkipManager",
    "field",
    "register_skip",
]
