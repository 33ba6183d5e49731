"""All events that a run may record, with their levels and meanings.

An event has `timestamp` (when it started, in Unix seconds), `event` (its name) and `duration_s` (0 for an instant). If
they apply, it also has `step`, `version`, `replica`, `request`, `sample`, `trajectory`, `turn`, and the extra fields
listed here.

`make docs` generates docs/events.md from this file.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

from asyncrl.core.failures import BugError

EventLevel = Literal["off", "summary", "full"]
LEVELS: tuple[EventLevel, ...] = ("off", "summary", "full")
FIELDS = ("step", "version", "replica", "request", "sample", "trajectory", "turn")
"""Fields that any event may have besides its own extras. `step` is the optimizer step that the recording process
considered current, and `version` the weights version that it used. During validation, `sample` is the name of a prompt
(`val_…`). `trajectory` -1 is the greedy baseline of ReMax."""


class EventInfo(NamedTuple):
    name: str
    level: EventLevel
    """The event is recorded at this level and above."""
    meaning: str
    extras: Mapping[str, str] = {}
    """Meaning and unit of each extra field, by its name."""


SECTIONS: dict[str, tuple[EventInfo, ...]] = {
    "Rollouter: samples and trajectories": (
        EventInfo(
            "rollout.permit", "full", "waiting for permits to admit samples", {"granted": "number of permits granted"}
        ),
        EventInfo(
            "sample.admitted",
            "summary",
            "a sample received its permit",
            {"permit_wait_s": "duration of the wait for the call that granted the permit"},
        ),
        EventInfo("sample.slot", "full", "a sample waiting for a generation slot (rollout.max_concurrent_samples)"),
        EventInfo(
            "sample.generate",
            "summary",
            "generating a sample, from its dispatch to the last token of its group",
            {
                "trajectories": "number of trajectories",
                "tokens": "tokens sampled since the dispatch",
                "replayed": "1 if the sample was read from a record instead of generated",
            },
        ),
        EventInfo("sample.surplus", "full", "an aborted surplus sample waiting for a slot for over-sampled samples"),
        EventInfo(
            "sample.reward",
            "summary",
            "scoring a sample, from the last token of its group until every trajectory has a reward",
        ),
        EventInfo(
            "sample.payload", "full", "writing the payload of a finished sample", {"bytes": "size of the payload"}
        ),
        EventInfo("sample.offer", "full", "offering a finished sample to the queue"),
        EventInfo(
            "sample.ready",
            "summary",
            "a scored sample entered the queue",
            {
                "reward": "mean reward",
                "tokens": "response tokens",
                "versions": "newest minus oldest version that sampled it",
            },
        ),
        EventInfo(
            "sample.dropped",
            "summary",
            "the Rollouter or the Trainer dropped a sample",
            {"reason": "the drop reason, as in `queue/dropped/<reason>`", "tokens": "tokens sampled for it, if known"},
        ),
        EventInfo(
            "sample.cut",
            "summary",
            "the generation of an over-sampled sample was aborted",
            {
                "tokens": "tokens sampled since its last dispatch",
                "kept": "1 if its generation continues from these tokens later",
            },
        ),
        EventInfo(
            "trajectory",
            "summary",
            "one conversation, from its first request to its end",
            {
                "turns": "turns of the policy",
                "calls": "tool calls",
                "tokens": "response tokens, including tool results",
                "sampled_tokens": "response tokens that the policy sampled",
                "finish_reason": "why it ended; `surplus`: enough others of its group had ended before",
                "generate_s": "time in engines",
                "tool_s": "time in tools, including waits",
                "user_s": "time in simulated users and environments",
            },
        ),
        EventInfo(
            "reward.score",
            "summary",
            "one call of the reward",
            {"trajectories": "number of trajectories scored", "reward": "mean reward"},
        ),
        EventInfo("dump.write", "full", "writing trajectories to rollout.dump_dir"),
        EventInfo("turnlog.write", "full", "writing a finished turn to the turn log", {"tokens": "tokens of the turn"}),
    ),
    "Rollouter: turns": (
        EventInfo(
            "generate.call",
            "full",
            "one call to a replica, as measured by its caller",
            {"requests": "number of requests in the call"},
        ),
        EventInfo("turn.parse", "full", "parsing the tool calls of a turn", {"tokens": "tokens of the turn"}),
        EventInfo("turn.tokenize", "full", "tokenizing the messages between two turns", {"tokens": "number of tokens"}),
        EventInfo(
            "tool.execute",
            "summary",
            "one tool call",
            {
                "tool": "name of the tool",
                "status": "as in docs/agents.md",
                "wait_s": "wait for a slot or the rate limit before the call",
            },
        ),
        EventInfo(
            "user.step",
            "summary",
            "a simulated user or an environment producing its answer",
            {"interaction": "name of the interaction"},
        ),
        EventInfo(
            "agent.run", "summary", "running a user-defined agent program for one trajectory (docs/agents-openai.md)"
        ),
    ),
    "Rollouter: versions": (
        EventInfo(
            "sync.apply",
            "summary",
            "applying a version, until every replica serves it",
            {"replicas": "number of replicas that applied it"},
        ),
        EventInfo(
            "validation", "summary", "answering the validation set with one version", {"prompts": "number of prompts"}
        ),
    ),
    "Replicas": (
        EventInfo(
            "request",
            "summary",
            "one request in an engine; its phases are parts of `duration_s`",
            {
                "prompt_tokens": "prompt tokens, including earlier turns",
                "response_tokens": "tokens sampled by this request",
                "finish_reason": "why it ended; `aborted` if a weight sync or the caller cut it",
                "gate_s": "time held back while a version was loading",
                "queued_s": "time from its arrival at the engine until it was scheduled",
                "prefill_s": "time from scheduling to the first token",
                "decode_s": "time from the first token to the last, without pauses",
                "paused_s": "time paused for weight syncs",
                "in_flight": "number of requests in the engine when it arrived",
            },
        ),
        EventInfo("sync.fetch", "summary", "fetching the weights of a version, while generation continues"),
        EventInfo("sync.drain", "summary", "waiting for the engine to stop after the pause request"),
        EventInfo(
            "sync.pause",
            "summary",
            "pausing the engine, which generates nothing meanwhile; includes `sync.load`",
            {"in_flight": "number of requests that continue afterwards"},
        ),
        EventInfo("sync.load", "summary", "loading the weights during the pause"),
        EventInfo("sync.verify", "summary", "comparing checksums of the weights, while generation continues"),
    ),
    "Trainer": (
        EventInfo(
            "step",
            "summary",
            "one optimizer step, including the waits before it",
            {
                "wait_samples_s": "wait for its lease; 0 for later steps of a lease",
                "samples": "number of samples that it committed",
                "tokens": "trained tokens",
                "reward": "mean reward",
                "lineage": "how often the run had gone back to a checkpoint",
            },
        ),
        EventInfo(
            "trainer.wait_samples",
            "summary",
            "waiting for a lease and its payloads",
            {"samples": "number of leased samples"},
        ),
        EventInfo(
            "trainer.fetch", "full", "reading the payloads of a lease", {"samples": "number of samples in the lease"}
        ),
        EventInfo("trainer.experience", "summary", "computing the log-probs, values, scores and advantages of a lease"),
        EventInfo("trainer.critic", "summary", "all critic steps on a lease"),
        EventInfo(
            "trainer.update", "summary", "forward and backward passes of the policy, its optimizer step, and the commit"
        ),
        EventInfo(
            "trainer.commit",
            "full",
            "committing the samples of a step to the queue and to the Trainer's log",
            {"samples": "number of committed samples"},
        ),
        EventInfo("trainer.publish", "summary", "publishing a version, until replicas can fetch it"),
        EventInfo("trainer.checkpoint", "summary", "the part of a checkpoint during which training is paused"),
        EventInfo("sample.leased", "summary", "the Trainer leased a sample", {"staleness": "staleness in versions"}),
        EventInfo(
            "sample.trained",
            "summary",
            "the sample's gradient became part of `step`",
            {
                "staleness": "staleness in versions",
                "versions": "newest minus oldest version that sampled it",
                "reward": "mean reward",
                "tokens": "trained tokens of the sample",
            },
        ),
    ),
    "Ranks": (
        EventInfo(
            "rank.call",
            "summary",
            "one call to a rank",
            {"role": "the role: actor, ref, …", "method": "name of the called method", "rank": "number of the rank"},
        ),
        EventInfo(
            "rank.forward",
            "full",
            "the forward passes of a call, as one event",
            {"role": "the role: actor, ref, …", "rank": "number of the rank"},
        ),
        EventInfo(
            "rank.backward",
            "full",
            "the backward passes of a call, as one event",
            {"role": "the role: actor, ref, …", "rank": "number of the rank"},
        ),
        EventInfo(
            "rank.optimizer",
            "full",
            "the optimizer step",
            {"role": "the role: actor, ref, …", "rank": "number of the rank"},
        ),
        EventInfo(
            "sync.gather",
            "summary",
            "collecting the weights on rank 0, in which all ranks take part",
            {"role": "the role: actor, ref, …", "rank": "number of the rank"},
        ),
        EventInfo(
            "sync.put",
            "summary",
            "transferring the weights to the weight store",
            {"bytes": "size of the weights", "role": "the role: actor, ref, …", "rank": "number of the rank"},
        ),
    ),
    "Queue, records and the rest": (
        EventInfo(
            "queue.commit",
            "full",
            "writing transitions to the journal",
            {"transitions": "number of transitions written together"},
        ),
        EventInfo(
            "skip.read",
            "full",
            "finding and reading a record",
            {"role": "role of the record", "found": "1 if there was a record"},
        ),
        EventInfo("skip.write", "full", "writing a record", {"role": "role of the record"}),
        EventInfo(
            "part.restarted",
            "summary",
            "a part of the run was replaced",
            {"part": "name of the part", "cause": "the failure"},
        ),
        EventInfo("loop.stall", "summary", "an event loop was blocked", {"part": "name of the process"}),
        EventInfo(
            "profiler.dropped",
            "summary",
            "events were lost: they did not fit into a buffer or onto the disk, or did not arrive",
            {"events": "number of lost events"},
        ),
    ),
}

EVENTS: dict[str, EventInfo] = {info.name: info for section in SECTIONS.values() for info in section}


def enabled(level: EventLevel) -> frozenset[str]:
    """Return the names of the events that are recorded at `level`."""
    rank = LEVELS.index(level)
    return frozenset(name for name, info in EVENTS.items() if LEVELS.index(info.level) <= rank)


@cache
def describe(name: str) -> EventInfo:
    """Return the registered event of this name.

    Raises:
        BugError: `name` is not registered.
    """
    if name in EVENTS:
        return EVENTS[name]
    near = difflib.get_close_matches(name, EVENTS, n=1)
    hint = f"; the nearest registered name is {near[0]!r}" if near else ""
    raise BugError(
        f"event {name!r} is not registered{hint}. Events without documentation cannot be recorded: add it to "
        "asyncrl/profiling/catalog.py with its level and meaning."
    )


_HEAD = """\
# Events

Generated from `asyncrl/profiling/catalog.py` by `make docs`.

If `profiler.level` is `summary` or `full`, every process of a run records events. The run directory contains them in
`events/step_<step>/<part>.jsonl`, with one JSON object per line; parts are `rollouter`, `trainer`, `queue`, `driver`,
`replica-<id>` and `rank-<role>-<number>`. `asyncrl report RUN` and `asyncrl timeline RUN` read these files.

Every line has `timestamp` (when the event started, in Unix seconds), `event` and `duration_s` (0 for an instant). If
they apply, it also has `step` (the optimizer step that the process considered current), `version` (of the weights that
the process used), `replica`, `request`, `sample`, `trajectory`, `turn`, and the extra fields listed below. Durations
are wall clock; `tokens` are counts.
"""


def markdown() -> str:
    """Return the page `docs/events.md`."""
    lines = [_HEAD]
    for title, infos in SECTIONS.items():
        lines += [f"## {title}", "", "| event | level | meaning | extras |", "|---|---|---|---|"]
        for info in infos:
            extras = "; ".join(f"`{name}`: {meaning}" for name, meaning in info.extras.items())
            lines.append(f"| `{info.name}` | {info.level} | {info.meaning} | {extras} |")
        lines.append("")
    return "\n".join(lines)
