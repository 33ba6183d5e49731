"""Where sessions live."""

from __future__ import annotations

from rollouter.serving.homes import Homes, household


def test_a_session_stays_where_it_was() -> None:
    homes = Homes()
    assert homes.find("sample_0_1", {"a", "b"}) is None
    homes.settle("sample_0_1", "b")
    assert homes.find("sample_0_1", {"a", "b"}) == "b"
    assert homes.find("sample_0_2", {"a", "b"}) is None


def test_conversations_of_a_sample_live_together() -> None:
    homes = Homes()
    homes.settle("sample_0_1/0", "a")
    assert homes.find("sample_0_1/7", {"a"}) == "a"
    assert household("val_3_7_try_2") != household("val_3_7"), "another try may go elsewhere"


def test_who_loses_a_home_finds_another() -> None:
    homes = Homes()
    homes.settle("s", "a")
    assert homes.find("s", {"b"}) is None
    homes.settle("s", "b")
    assert homes.find("s", {"a", "b"}) == "b"


def test_the_oldest_are_forgotten_and_those_in_use_are_not() -> None:
    homes = Homes(max_homes=2)
    homes.settle("one", "a")
    homes.settle("two", "a")
    assert homes.find("one", {"a"}) == "a"
    homes.settle("three", "a")
    assert homes.find("one", {"a"}) == "a" and homes.find("two", {"a"}) is None


def test_nobody_lives_nowhere() -> None:
    homes = Homes()
    homes.settle("", "a")
    assert homes.find("", {"a"}) is None
