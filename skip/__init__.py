"""SkipManager: record, replay and repeat annotated stages. See docs/skip.md."""

from skip.fingerprint import Fingerprint, field
from skip.manager import SkipManager
from skip.record import Content, Record
from skip.record_role import Call, RecordSkip, Served
from skip.role import BaseSkip, SkipAction, register_skip

__all__ = [
    "BaseSkip",
    "Call",
    "Content",
    "Fingerprint",
    "Record",
    "RecordSkip",
    "Served",
    "SkipAction",
    "SkipManager",
    "field",
    "register_skip",
]
