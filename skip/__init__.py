"""SkipManager: record, replay and repeat of annotated stages. See docs/skip.md."""

from skip.base import Action, BaseSkip, Call, Served
from skip.fingerprint import Fingerprint, field
from skip.manager import SkipManager
from skip.record import Content, Record
from skip.registry import register_skip

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
