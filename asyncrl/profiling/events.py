"""Every event that a run may record, with the level from which on it is recorded and its meaning. Pure.

An event has `timestamp` (Unix seconds, its start), `event` (its name) and `duration_s` (0 for a moment), where they
apply `step`, `version`, `replica`, `request`, `sample`, `trajectory`, `turn`, and the extras that are listed here.

`make docs` generates docs/events.md from this file.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

from asyncrl.failures import BugError

Level = Literal["off", "summary", "full"]
LEVELS: tuple[Level, ...] = ("off", "summary", "full")
FIELDS = ("step", "version", "replica", "request", "sample", "trajectory", "turn")
"""What any event may carry besides its own extras. `step` is the optimizer step that its process knew to be under way;
`version` the weights that it was working with; `sample` in validation a prompt's name (`val_…`); `trajectory` -1 is
ReMax's baseline."""


class EventInfo(NamedTuple):
    name: str
    level: Level
    """Recorded from this level on."""
    meaning: str
    extras: Mapping[str, str] = {}
    """Name → meaning and unit."""


SECTIONS: dict[str, tuple[EventInfo, ...]] = {
    "Rollouter: samples and trajectories": (
        EventInfo("rollout.permit", "full", "waiting for permits to admit samples", {"granted": "samples"}),
        EventInfo(
            "sample.admitted", "summary", "a sample was permitted", {"permit_wait_s": "wait of that ask for permits"}
        ),
        EventInfo("sample.slot", "full", "waiting for a place in generation (rollout.max_concurrent_samples)"),
        EventInfo(
            "sample.generate",
            "summary",
            "from dispatch to the last token of the group",
            {"trajectories": "of it", "tokens": "sampled since then", "replayed": "1: out of a record, by no engine"},
        ),
        EventInfo("sample.surplus", "full", "cut, waiting for room for over-sampled samples"),
        EventInfo("sample.reward", "summary", "from the last token of the group until all of it is scored"),
        EventInfo("sample.payload", "full", "writing the finished sample", {"bytes": "of it"}),
        EventInfo("sample.offer", "full", "telling the queue of it"),
        EventInfo(
            "sample.ready",
            "summary",
            "scored and in the queue",
            {"reward": "mean", "tokens": "of its responses", "versions": "newest minus oldest that sampled it"},
        ),
        EventInfo(
            "sample.dropped",
            "summary",
            "dropped, by either side",
            {"reason": "as in the ledger", "tokens": "sampled for it, as far as known"},
        ),
        EventInfo(
            "sample.cut",
            "summary",
            "over-sampled generation was aborted",
            {"tokens": "sampled since the dispatch before", "kept": "1: it goes on from them later"},
        ),
        EventInfo(
            "trajectory",
            "summary",
            "one conversation, from its first request to its end",
            {
                "turns": "of the policy",
                "calls": "of tools",
                "tokens": "of its response, tools' too",
                "sampled_tokens": "of them, by the policy",
                "finish_reason": "why it ended; `surplus`: enough others had ended before, so that it does not count",
                "generate_s": "in engines",
                "tool_s": "in tools, waits included",
                "user_s": "in users and environments",
            },
        ),
        EventInfo(
            "reward.score", "summary", "one call of the reward", {"trajectories": "scored by it", "reward": "mean"}
        ),
        EventInfo("dump.write", "full", "writing trajectories to rollout.dump_dir"),
        EventInfo("turnlog.write", "full", "writing a finished turn to the turn log", {"tokens": "of it"}),
    ),
    "Rollouter: turns": (
        EventInfo("generate.call", "full", "one call to a replica, as its caller sees it", {"requests": "in it"}),
        EventInfo("turn.parse", "full", "finding tool calls in a turn", {"tokens": "of it"}),
        EventInfo("turn.tokenize", "full", "what was said between turns, as tokens", {"tokens": "of it"}),
        EventInfo(
            "tool.execute",
            "summary",
            "one tool call",
            {"tool": "its name", "status": "as in docs/agents.md", "wait_s": "for a place or its rate, before"},
        ),
        EventInfo("user.step", "summary", "a user or environment answers", {"interaction": "its name"}),
        EventInfo("agent.run", "summary", "a program of the user's own, for one trajectory (docs/agents-openai.md)"),
    ),
    "Rollouter: versions": (
        EventInfo("sync.apply", "summary", "until every replica serves a version", {"replicas": "that took it"}),
        EventInfo("validation", "summary", "the validation set, answered by one version", {"prompts": "in it"}),
    ),
    "Replicas": (
        EventInfo(
            "request",
            "summary",
            "one request in an engine; its phases are parts of `duration_s`",
            {
                "prompt_tokens": "of it, earlier turns too",
                "response_tokens": "sampled by this request",
                "finish_reason": "`aborted`: cut by a weight sync or by its caller",
                "gate_s": "held back while a version was being loaded",
                "queued_s": "in the engine, before its scheduler took it",
                "prefill_s": "from there to the first token",
                "decode_s": "from the first token to the last, pauses left out",
                "paused_s": "in which the engine stood still for a weight sync",
                "in_flight": "requests in the engine when it came",
            },
        ),
        EventInfo("sync.fetch", "summary", "bringing a version's bytes to the engine; generation goes on"),
        EventInfo("sync.drain", "summary", "from the wish to pause until the engine stands still"),
        EventInfo(
            "sync.pause", "summary", "no token is made, load included", {"in_flight": "requests that go on behind it"}
        ),
        EventInfo("sync.load", "summary", "loading inside the pause"),
        EventInfo("sync.verify", "summary", "comparing checksums; generation goes on"),
    ),
    "Trainer": (
        EventInfo(
            "step",
            "summary",
            "one optimizer step, with the waits before it",
            {
                "wait_samples_s": "waiting for its lease; 0 for later steps of a lease",
                "samples": "committed by it",
                "tokens": "trained",
                "reward": "mean",
                "lineage": "how often training had gone back",
            },
        ),
        EventInfo("trainer.wait_samples", "summary", "waiting for a lease and its payloads", {"samples": "leased"}),
        EventInfo("trainer.fetch", "full", "reading the payloads of a lease", {"samples": "in it"}),
        EventInfo("trainer.experience", "summary", "log-probs, values, scores, advantages of a lease"),
        EventInfo("trainer.critic", "summary", "all steps of the critic on a lease"),
        EventInfo("trainer.update", "summary", "forward, backward and optimizer of the policy, and the commit"),
        EventInfo("trainer.commit", "full", "telling queue and record of a step's samples", {"samples": "of it"}),
        EventInfo("trainer.publish", "summary", "publishing a version, until it can be fetched"),
        EventInfo("trainer.checkpoint", "summary", "the part of a checkpoint for which training stands still"),
        EventInfo("sample.leased", "summary", "the Trainer has a sample", {"staleness": "versions"}),
        EventInfo(
            "sample.trained",
            "summary",
            "its gradient is in `step`",
            {
                "staleness": "versions",
                "versions": "newest minus oldest that sampled it",
                "reward": "mean",
                "tokens": "of it",
            },
        ),
    ),
    "Ranks": (
        EventInfo(
            "rank.call",
            "summary",
            "one call to a rank",
            {"role": "actor, ref, …", "method": "called", "rank": "number"},
        ),
        EventInfo(
            "rank.forward", "full", "forward passes of a call, added up", {"role": "actor, ref, …", "rank": "number"}
        ),
        EventInfo(
            "rank.backward", "full", "backward passes of a call, added up", {"role": "actor, ref, …", "rank": "number"}
        ),
        EventInfo("rank.optimizer", "full", "the optimizer's step", {"role": "actor, ref, …", "rank": "number"}),
        EventInfo(
            "sync.gather",
            "summary",
            "collecting the weights on rank 0; all ranks take part",
            {"role": "actor, ref, …", "rank": "number"},
        ),
        EventInfo(
            "sync.put",
            "summary",
            "handing them to the weight store",
            {"bytes": "of them", "role": "actor, ref, …", "rank": "number"},
        ),
    ),
    "Queue, records and the rest": (
        EventInfo("queue.commit", "full", "transitions on their way to disk", {"transitions": "written together"}),
        EventInfo(
            "skip.read", "full", "looking for a record, and reading it", {"role": "of it", "found": "1: there was one"}
        ),
        EventInfo("skip.write", "full", "writing a record", {"role": "of it"}),
        EventInfo("part.restarted", "summary", "a part was replaced", {"part": "which", "cause": "why"}),
        EventInfo("loop.stall", "summary", "an event loop stood still", {"part": "whose"}),
        EventInfo(
            "profiler.dropped",
            "summary",
            "events that did not fit into the buffer, or onto the disk",
            {"events": "lost"},
        ),
    ),
}

EVENTS: dict[str, EventInfo] = {info.name: info for section in SECTIONS.values() for info in section}


def enabled(level: Level) -> frozenset[str]:
    """Names that are recorded at `level`."""
    rank = LEVELS.index(level)
    return frozenset(name for name, info in EVENTS.items() if LEVELS.index(info.level) <= rank)


@cache
def describe(name: str) -> EventInfo:
    """
    Raises:
        BugError: it is not registered.
    """
    if name in EVENTS:
        return EVENTS[name]
    near = difflib.get_close_matches(name, EVENTS, n=1)
    hint = f"; the nearest registered name is {near[0]!r}" if near else ""
    raise BugError(
        f"event {name!r} is not registered{hint}. Nobody could look up what it means: add it to "
        "asyncrl/profiling/events.py with its level and meaning."
    )


_HEAD = """\
# Events

Generated from `asyncrl/profiling/events.py` by `make docs`.

With `profiler.level` at `summary` or `full`, every process of a run records events, and the run directory holds them in
`events/step_<step>/<part>.jsonl`, one JSON object a line: `rollouter`, `trainer`, `queue`, `driver`, `replica-<id>`,
`rank-<role>-<number>`. `asyncrl report RUN` and `asyncrl timeline RUN` are made of them.

Every line has `timestamp` (Unix seconds, the start), `event` and `duration_s` (0: a moment), where they apply `step`
(the optimizer step that the process knew to be under way), `version` (of the weights it worked with), `replica`,
`request`, `sample`, `trajectory`, `turn`, and the extras below. Seconds are wall clock, tokens are counts.
"""


def markdown() -> str:
    """The page `docs/events.md`."""
    lines = [_HEAD]
    for title, infos in SECTIONS.items():
        lines += [f"## {title}", "", "| event | level | meaning | extras |", "|---|---|---|---|"]
        for info in infos:
            extras = "; ".join(f"`{name}`: {meaning}" for name, meaning in info.extras.items())
            lines.append(f"| `{info.name}` | {info.level} | {info.meaning} | {extras} |")
        lines.append("")
    return "\n".join(lines)
