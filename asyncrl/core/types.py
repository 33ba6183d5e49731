"""The values that travel through the system. Pure: numpy and the standard library only.

Arrays are 1-D numpy, never padded: `P` prompt tokens, `L` response tokens. They are treated as immutable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
LogProbs = NDArray[np.float32]
Mask = NDArray[np.bool_]

_SAMPLE_ID = re.compile(r"sample_(0|[1-9]\d*)_([1-9]\d*)")


class SampleId(NamedTuple):
    """`sample_{epoch}_{index}`: `epoch` from 0; `index` is the feed order on the Rollouter, from 1.

    `index` is never reset by an epoch or a resume; it is not a trainer step, not a version and not a completion order.
    """

    epoch: int
    index: int  # type: ignore[assignment]  # hides tuple.index

    def __str__(self) -> str:
        return f"sample_{self.epoch}_{self.index}"

    @classmethod
    def parse(cls, text: str) -> SampleId:
        """Parse the output of `str`.

        Raises:
            ValueError: `text` is not `sample_{epoch}_{index}` with epoch >= 0 and index >= 1.
        """
        match = _SAMPLE_ID.fullmatch(text)
        if match is None:
            raise ValueError(f"not a sample id: {text!r}; expected sample_{{epoch}}_{{index}}, e.g. sample_0_42")
        return cls(int(match[1]), int(match[2]))


class Span(NamedTuple):
    """Tokens from `first_token` on, up to the next span, were sampled under weights `version`."""

    first_token: int
    version: int


class FinishReason(StrEnum):
    """Why a turn, or a whole trajectory, ended."""

    STOP = "stop"
    LENGTH = "length"  # of the response, or of the model's context
    ABORTED = "aborted"  # a turn: cut short by a weight sync or a shutdown; the client resumes it with its tokens
    TOOL_CALL = "tool_call"  # a turn: it calls tools. A trajectory: a tool has ended it
    MAX_TURNS = "max_turns"  # a trajectory: it may take no more turns
    TIMEOUT = "timeout"  # a trajectory: it ran out of time and keeps its completed turns


class DropReason(StrEnum):
    STALE = "stale"
    FAILED = "failed"
    FILTERED = "filtered"
    OVERLONG = "overlong"
    SURPLUS = "surplus"  # surplus of over-sampling, aborted because enough others finished first
    SHUTDOWN = "shutdown"


class Media(NamedTuple):
    """An image or a video of a prompt, as stored."""

    kind: Literal["image", "video"]
    data: bytes
    """Content of a file, see `asyncrl.storage.media.FORMATS`; each page of a video file is a frame."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One row of the data set, templated and tokenized once."""

    prompt_ids: TokenIds
    """int32 `[P]`, with all placeholders of `media`: one for each feature that the model computes from them."""
    messages: tuple[Mapping[str, Any], ...] = ()
    data_source: str = "default"
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the row. `extra_info["sampling_params"]`, a mapping, may set where responses end:
    `max_tokens`, `stop`, `stop_token_ids`, `ignore_eos`."""
    media: tuple[Media, ...] = ()
    """Images and videos in the order of their placeholders."""


class Demonstration(NamedTuple):
    """A conversation to imitate, as tokens."""

    token_ids: TokenIds
    """int32 `[L]`; the first token is not trained, and the last one is."""
    mask: Mask
    """bool `[L]`: the tokens that are trained, which are the assistant's."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The outcome of one generate call for one trajectory."""

    response_ids: TokenIds
    """int32 `[L]`, as sampled, end-of-sequence token included."""
    rollout_log_probs: LogProbs
    """float32 `[L]`, nats, of the behaviour policy."""
    spans: tuple[Span, ...]
    """Ascending, the first starts at 0; empty only if L = 0."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Tokens of a scored trajectory as the policy saw them, for training. A trajectory has one row, unless the chat
    template rewrote its history (`asyncrl.core.trajectory`)."""

    prompt_ids: TokenIds
    response_ids: TokenIds
    """int32 `[L]`: all turns of the policy, and the messages of tools and users between them."""
    response_mask: Mask
    """bool `[L]`: True = sampled by the policy."""
    rollout_log_probs: LogProbs
    """float32 `[L]`, nats; 0 where `response_mask` is False."""
    spans: tuple[Span, ...]
    finish_reason: FinishReason
    reward: float
    """Reward of the whole trajectory, `turn_rewards` included; the same in all its rows. See docs/rewards.md."""
    reward_extra: Mapping[str, float] = field(default_factory=dict)
    """Further values from the reward function. If the reward has several sources, also the score of each source before
    its weight, by the source's name, such as `rule` and `model`."""
    trajectory: int = 0
    """Number of its trajectory within the sample, from 0. Rows of one trajectory are adjacent and in order."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """Parts of `reward` that belong to turns in this row: position of the turn's last token in the response, and
    value."""

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.spans)

    @property
    def newest_version(self) -> int:
        return max(span.version for span in self.spans)


class Provenance(StrEnum):
    """The origin of a sample's responses."""

    GENERATED = "generated"
    REPLAYED = "replayed"  # from the record of this sample, see docs/skip.md
    SUBSTITUTED = "substituted"  # from the record of another sample: `action: repeat`


@dataclass(frozen=True, slots=True)
class Replay:
    """The record from which a sample was replayed."""

    step: int
    substituted: bool
    """The record is from another step, or was made for another request."""
    spans: tuple[tuple[Span, ...], ...]
    """Each row's recorded spans, with the versions that sampled it. With `replay_versions: current`, the rows' own
    spans have other versions."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One prompt with its `n` scored trajectories (a GRPO group): the unit of queue, ledger and skip."""

    sample_id: SampleId
    rows: tuple[Row, ...]
    """All rows of the first trajectory, then all of the second, and so on."""
    data_source: str = "default"
    generate_s: float = 0.0
    """Seconds from dispatch to the last token of the group."""
    reward_s: float = 0.0
    """Seconds that scoring the group took, including the wait for a slot."""
    baseline_reward: float | None = None
    """Reward of one more response to the prompt, drawn greedily and not trained on (ReMax); None with other
    estimators."""
    replay: Replay | None = None
    """None: it was generated."""
    media: tuple[Media, ...] = ()
    """Images and videos of the prompt, which every row shares."""
    asked: tuple[int, ...] = ()
    """If surplus trajectories were requested: the number of each kept trajectory in generation and in profiling events.
    Empty: these are the numbers in the rows."""

    @property
    def provenance(self) -> Provenance:
        if self.replay is None:
            return Provenance.GENERATED
        return Provenance.SUBSTITUTED if self.replay.substituted else Provenance.REPLAYED


class SampleMeta(NamedTuple):
    """Metadata of a READY sample, for the queue actor. The payload itself never passes through the actor."""

    sample_id: SampleId
    oldest_version: int
    newest_version: int
    num_trajectories: int
    response_tokens: int
    payload_bytes: int
    provenance: Provenance = Provenance.GENERATED


def sample_meta(sample: Sample) -> SampleMeta:
    """Summarize `sample` for the queue."""
    rows = sample.rows
    return SampleMeta(
        sample_id=sample.sample_id,
        oldest_version=min(row.oldest_version for row in rows),
        newest_version=max(row.newest_version for row in rows),
        num_trajectories=len({row.trajectory for row in rows}),
        response_tokens=sum(len(row.response_ids) for row in rows),
        payload_bytes=sum(
            row.prompt_ids.nbytes + row.response_ids.nbytes + row.response_mask.nbytes + row.rollout_log_probs.nbytes
            for row in rows
        )
        + sum(len(media.data) for media in sample.media),
        provenance=sample.provenance,
    )


def merge_spans(head: Sequence[Span], head_tokens: int, tail: Sequence[Span]) -> tuple[Span, ...]:
    """Join the spans of a cut response with those of its continuation.

    `tail` counts from the continuation's own first token; `head_tokens` is the length of the head. Neighbouring spans
    of one version become one.
    """
    merged: list[Span] = list(head)
    for span in tail:
        if not merged or merged[-1].version != span.version:
            merged.append(Span(span.first_token + head_tokens, span.version))
    return tuple(merged)


def join_turns(head: Turn | None, tail: Turn) -> Turn:
    """Return one turn from the aborted `head` and its continuation `tail`, with tokens, log-probs and spans merged."""
    if head is None:
        return tail
    return Turn(
        response_ids=np.concatenate([head.response_ids, tail.response_ids]),
        rollout_log_probs=np.concatenate([head.rollout_log_probs, tail.rollout_log_probs]),
        spans=merge_spans(head.spans, len(head.response_ids), tail.spans),
        finish_reason=tail.finish_reason,
    )


def rest_of_turn(turn: Turn, num_tokens: int) -> Turn:
    """Return the turn without its first `num_tokens` tokens: what `join_turns` appends to these."""
    ends = [*(span.first_token for span in turn.spans), len(turn.response_ids)][1:]
    return Turn(
        response_ids=turn.response_ids[num_tokens:],
        rollout_log_probs=turn.rollout_log_probs[num_tokens:],
        spans=tuple(
            Span(max(0, span.first_token - num_tokens), span.version)
            for span, end in zip(turn.spans, ends, strict=True)
            if end > num_tokens
        ),
        finish_reason=turn.finish_reason,
    )


def versions_per_token(spans: Sequence[Span], num_tokens: int) -> NDArray[np.int64]:
    """Expand spans to int64 `[L]`: the version that sampled each token."""
    versions = np.empty(num_tokens, dtype=np.int64)
    for span, end in zip(spans, [*(s.first_token for s in spans[1:]), num_tokens], strict=False):
        versions[span.first_token : end] = span.version
    return versions
