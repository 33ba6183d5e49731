"""Which prompt crashes engines. Pure.

A crash ends an engine with everything it computes, and one of those prompts may be why, or none. So:

    crash ─▶ a strike for each that was in flight there ─▶ below the limit: all are tried again, freely
                                                        └▶ at the limit, alone with that: guilty
                                                        └▶ several at the limit: suspects, who wait for the lane

A crash is judged once nobody has that replica for a place any more: all who were there are judged together, however
late one of them hears of it.

The lane has one place. A suspect in it runs beside everything that is no suspect; if an engine crashes under it, it is
guilty, and if it completes it was innocent. A verdict explains the earlier crashes at which the guilty one was present.
Who is suspected for those alone is no suspect any more, but one at the next crash. That is if nobody else at the last
crash had been at one before: else it may have been that one, and everybody keeps what they have.

So a prompt that crashes its engine every time does so `max_crashes + 1` times if it is the only one of its kind, and no
other is dropped for it. With more of them, and engines that crash on their own, an innocent can be: one that was alone
in the lane, or alone with so many strikes, when an engine crashed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal

from asyncrl.failures import PoisonError

KEPT = 16
"""Of the crashes that are judged, so many of the last are remembered: somebody may still report them."""
Standing = Literal["free", "waiting", "in the lane", "guilty"]


class Crash:
    """One crash, as those report it who were in flight there. It is judged once all have."""

    def __init__(self, replica: str, at_s: float) -> None:
        self.replica = replica
        self.at_s = at_s
        """Wall clock, seconds."""
        self.told: dict[str, str] = {}
        """Who was in flight there, and what each was told."""
        self.gone: dict[str, int] = {}
        """Of these, who has left since, with the strikes it had before."""
        self.judged = False
        self.explained = False
        """A verdict says what has caused it."""


class Quarantine:
    """Strikes, suspects and verdicts, by a name of each sample's own."""

    def __init__(self, max_crashes: int) -> None:
        """
        Args:
            max_crashes: Strikes that make a suspect; at least 1.
        """
        self._max_crashes = max_crashes
        self._crashes: dict[str, Crash] = {}
        """By replica: those that are not judged yet, and the last that are."""
        self._places: dict[str, str] = {}
        """Who is in flight, and on which replica."""
        self._there: defaultdict[str, set[str]] = defaultdict(set)
        """The same by replica; none is empty."""
        self._strikes: dict[str, list[Crash]] = {}
        self._suspects: dict[str, None] = {}
        """In the order in which they came to be."""
        self._away: set[str] = set()
        """Who is cancelled and not tried again yet."""
        self._in_lane: str | None = None
        self._evidence: dict[str, tuple[Crash, ...]] = {}
        """Of the guilty who have not left yet."""
        self._num_crashes = 0
        self._num_guilty = 0
        self._num_explained = 0

    def placed(self, name: str, replica: str) -> None:
        """`name` is in flight on this replica from now on; empty: on none."""
        if before := self._places.pop(name, ""):
            self._there[before].discard(name)
            if not self._there[before]:
                del self._there[before]
        if replica:
            self._away.discard(name)
            self._places[name] = replica
            self._there[replica].add(name)

    def crashed(self, name: str, told: str, replica: str, at_s: float) -> Crash:
        """The engine of `replica` died, which had `name`. A replica, by its name, dies once."""
        crash = self._crashes.get(replica)
        if crash is None:
            crash = self._crashes[replica] = Crash(replica, at_s)
            self._num_crashes += 1
            self._forget()
        crash.told[name] = told
        if crash.judged:  # too late for that: it was not alone there, but it was there
            self._strikes.setdefault(name, []).append(crash)
            self._suspect([name])
        self.placed(name, "")
        return crash

    def all_told(self, crash: Crash) -> bool:
        """Nobody who is still known to be there might yet report it."""
        return crash.replica not in self._there

    def judge(self, crash: Crash) -> None:
        """Wait for nobody else who may have been there. Judging a second time changes nothing."""
        if crash.judged:
            return
        crash.judged = True
        present = [name for name in crash.told if name not in crash.gone]
        for name in present:
            self._strikes.setdefault(name, []).append(crash)
        struck = [name for name in present if len(self._strikes[name]) >= self._max_crashes]
        others = [name for name, strikes in crash.gone.items() if strikes + 1 >= self._max_crashes]
        if self._in_lane is not None and self._in_lane in present:
            self._convict(self._in_lane, crash)
        elif len(struck) == 1 and not others:
            self._convict(struck[0], crash)
        self._suspect(present)

    @property
    def in_lane(self) -> str | None:
        """The suspect that may be tried now."""
        return self._in_lane

    def standing(self, name: str) -> Standing:
        """Whether it may be tried again: `free` and `in the lane` may."""
        if name in self._evidence:
            return "guilty"
        if name == self._in_lane:
            return "in the lane"
        return "waiting" if name in self._suspects else "free"

    def poison(self, name: str) -> PoisonError:
        """The evidence against one that is guilty."""
        crashes = self._evidence[name]
        lines = [
            f"{datetime.fromtimestamp(crash.at_s, UTC):%Y-%m-%d %H:%M:%S} UTC, with {len(crash.told) - 1} others in "
            f"flight: {crash.told[name]}"
            for crash in crashes
        ]
        return PoisonError(
            f"{len(crashes)} engines crashed while they had {name}, the last time with no other suspect there:\n    "
            + "\n    ".join(lines)
        )

    def left(self, name: str) -> None:
        """It is complete, dropped or cancelled. If it is complete it was innocent: its strikes are gone."""
        strikes = self._strikes.pop(name, [])
        self._evidence.pop(name, None)
        self._suspects.pop(name, None)
        self._away.discard(name)
        for crash in self._crashes.values():
            if not crash.judged and name in crash.told:
                # It will not be tried again, but it was there: nobody else was alone.
                crash.gone[name] = len(strikes)
        self.placed(name, "")
        self._call_next()

    def suspended(self, name: str) -> None:
        """It was cancelled, and will be tried again: until then it keeps its strikes and stands in no lane, also when a
        crash at which it was is judged only now."""
        self._suspects.pop(name, None)
        self._away.add(name)
        self.placed(name, "")
        self._call_next()

    def figures(self) -> Mapping[str, int | str]:
        """Crashes seen, and how many of them a verdict explains; how many samples were found guilty, have strikes and
        wait for the lane now, and who is in it."""
        return {
            "crashes": self._num_crashes,
            "explained": self._num_explained,
            "guilty": self._num_guilty,
            "struck": len(self._strikes),
            "waiting": len(self._suspects) - (self._in_lane is not None),
            "in_lane": self._in_lane or "",
        }

    def _convict(self, name: str, last: Crash) -> None:
        crashes = self._strikes.pop(name)
        self._evidence[name] = tuple(crashes)
        self._num_guilty += 1
        for crash in crashes:
            self._num_explained += not crash.explained
            crash.explained = True
        self._suspects.pop(name, None)
        beside = [len(self._strikes[other]) - 1 for other in last.told if other in self._strikes]
        if any(beside) or any(last.gone.values()):
            return
        for other, strikes in self._strikes.items():
            explained = [crash for crash in strikes if crash in crashes and crash is not last]
            # One more crash, and it is a suspect again.
            spare = len(strikes) - (self._max_crashes - 1)
            taken_back = explained[: max(0, spare)]
            self._strikes[other] = [crash for crash in strikes if crash not in taken_back]
            if len(self._strikes[other]) < self._max_crashes:
                self._suspects.pop(other, None)

    def _forget(self) -> None:
        judged = [replica for replica, crash in self._crashes.items() if crash.judged]
        for replica in judged[:-KEPT]:
            del self._crashes[replica]

    def _suspect(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._away and len(self._strikes.get(name, ())) >= self._max_crashes:
                self._suspects.setdefault(name)
        self._call_next()

    def _call_next(self) -> None:
        """The lane is for the suspect that has waited longest."""
        if self._in_lane not in self._suspects:
            self._in_lane = next(iter(self._suspects), None)
