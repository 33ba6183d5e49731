"""Where an event is drawn and in which colour. Pure."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class State(NamedTuple):
    """What a bar shows by its colour."""

    name: str
    colour: str
    meaning: str


STATES: tuple[State, ...] = (
    State("gate", "#a8a29e", "held back while a version was being loaded"),
    State("queued", "#f2c94c", "in the engine, not scheduled yet"),
    State("prefill", "#3f78b5", "from there to the first token"),
    State("decode", "#58a65c", "sampling tokens"),
    State("paused", "#d64550", "the engine stands still for a weight sync"),
    State("tool", "#f08a24", "a tool call"),
    State("user", "#9b6fb8", "a user, an environment or a program answers"),
    State("reward", "#ef8fa8", "scoring"),
    State("wait", "#d6d9dd", "waiting"),
    State("experience", "#5fb3b3", "log-probs, values, scores, advantages"),
    State("update", "#1f5c7a", "forward, backward, optimizer"),
    State("weights", "#96705b", "publishing, fetching and loading weights"),
    State("sample", "#a9c9e8", "a sample or a trajectory as a whole"),
    State("files", "#8a8f6a", "reading and writing files"),
    State("trouble", "#8b0000", "something stood still, was replaced or lost"),
    State("other", "#9aa0a6", "anything else"),
)
STATE: dict[str, int] = {state.name: place for place, state in enumerate(STATES)}
PHASES = ("gate", "queued", "prefill", "decode", "paused")
"""Of a request, in order; event `request` has them as `<name>_s`."""

REQUEST = "request"
SAMPLES, TRAJECTORIES = "samples", "trajectories"
"""Blocks of their own: there may be hundreds at a time."""

_OF_PART: dict[str, tuple[str, str]] = {
    "step": ("steps", "other"),
    "trainer.wait_samples": ("wait", "wait"),
    "trainer.fetch": ("fetch", "files"),
    "trainer.experience": ("experience", "experience"),
    "trainer.critic": ("critic", "update"),
    "trainer.update": ("update", "update"),
    "trainer.commit": ("commit", "files"),
    "trainer.publish": ("publish", "weights"),
    "trainer.checkpoint": ("checkpoint", "files"),
    "sample.leased": ("samples", "sample"),
    "sample.trained": ("samples", "update"),
    "rank.call": ("calls", "experience"),
    "rank.forward": ("passes", "experience"),
    "rank.backward": ("passes", "update"),
    "rank.optimizer": ("passes", "update"),
    "sync.gather": ("weights", "weights"),
    "sync.put": ("weights", "weights"),
    "sync.fetch": ("weights", "weights"),
    "sync.drain": ("weights", "wait"),
    "sync.pause": ("weights", "paused"),
    "sync.load": ("weights", "weights"),
    "sync.verify": ("weights", "weights"),
    "sync.apply": ("weights", "weights"),
    REQUEST: ("requests", "other"),
    "tool.execute": ("tools", "tool"),
    "reward.score": ("rewards", "reward"),
    "user.step": ("users", "user"),
    "agent.run": ("programs", "user"),
    "validation": ("validation", "sample"),
    "generate.call": ("calls", "decode"),
    "rollout.permit": ("permits", "wait"),
    "turn.parse": ("tokens", "other"),
    "turn.tokenize": ("tokens", "other"),
    "sample.payload": ("files", "files"),
    "sample.offer": ("files", "files"),
    "dump.write": ("files", "files"),
    "turnlog.write": ("files", "files"),
    "queue.commit": ("commits", "files"),
    "skip.read": ("skip", "files"),
    "skip.write": ("skip", "files"),
    "part.restarted": ("trouble", "trouble"),
    "loop.stall": ("trouble", "trouble"),
    "profiler.dropped": ("trouble", "trouble"),
}
_OF_SAMPLES: dict[str, tuple[str, str]] = {
    "sample.admitted": ("came", "sample"),
    "sample.slot": ("waits", "wait"),
    "sample.generate": ("generated", "sample"),
    "sample.surplus": ("waits", "wait"),
    "sample.reward": ("scored", "reward"),
    "sample.ready": ("ready", "decode"),
    "sample.dropped": ("lost", "trouble"),
    "sample.cut": ("lost", "trouble"),
}
_GROUPS = tuple(dict.fromkeys(group for group, _ in (*_OF_PART.values(), *_OF_SAMPLES.values())))
_BLOCKS = ("trainer", "rank-", "rollouter", "replica-", SAMPLES, TRAJECTORIES, "queue", "driver")


class Place(NamedTuple):
    block: str
    """Lanes that belong together: a part, or something that a part has many of."""
    group: str
    """Lanes of one kind in it."""
    state: int
    """Into `STATES`."""


@cache
def place(part: str, event: str) -> Place:
    """Of an event that `part` recorded; one that is not known here is drawn by its name."""
    if event == "trajectory":
        return Place(TRAJECTORIES, "conversations", STATE["sample"])
    if event in _OF_SAMPLES:
        group, state = _OF_SAMPLES[event]
        return Place(SAMPLES, group, STATE[state])
    group, state = _OF_PART.get(event, (event, "other"))
    return Place(part, group, STATE[state])


def block_order(block: str) -> tuple[int, str, int, str]:
    """Sorts blocks from top to bottom: training, generation, what is between; numbers in names as numbers."""
    kind = next((place for place, name in enumerate(_BLOCKS) if block.startswith(name)), len(_BLOCKS))
    head = block.rstrip("0123456789")
    return kind, head, int(block[len(head) :] or 0), block


def group_order(group: str) -> tuple[int, str]:
    """Sorts the groups of a block."""
    return (_GROUPS.index(group) if group in _GROUPS else len(_GROUPS)), group
