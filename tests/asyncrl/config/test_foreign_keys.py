"""The table of keys of other systems is consistent with the schema and with the derivations of `asyncrl migrate`."""

from __future__ import annotations

from asyncrl.config.foreign_keys import VERL, foreign_keys
from asyncrl.config.from_verl.values import derivations
from asyncrl.config.keys import all_keys, choices


def _is_ours(key: str) -> bool:
    """Whether a key, a section (`section.*`) or an entry of a mapping exists."""
    known = all_keys()
    parent = known.get(key.rpartition(".")[0])
    section = known.get(key.removesuffix(".*"))
    return key in known or bool(section and section.section) or bool(parent and parent.open_ended)


def test_every_entry_names_keys_that_exist_or_says_why_there_is_none() -> None:
    for key in foreign_keys():
        assert [ours for ours in key.to if not _is_ours(ours)] == [], key.name
        assert key.to or key.note, key.name
        assert not key.by or (key.system == VERL and key.by in derivations()), key.name


def test_renamed_values_are_values_of_our_key() -> None:
    for key in foreign_keys():
        if key.values and not key.by:
            options = choices(all_keys()[key.to[0]].kind)
            assert not options or set(key.values.values()) <= set(options), key.name


def test_names_of_keys_are_unique_within_a_system() -> None:
    names = [(key.system, key.name) for key in foreign_keys()]
    assert len(names) == len(set(names))
