"""Generation as a stage: the trajectories of a sample as a record, and the roles `async_rollout` and `rollout`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from asyncrl.core.failures import BugError
from asyncrl.core.text import encodable_values
from asyncrl.core.trajectory import Generated, SampleRequest, TokenRow, Trajectory, TurnInfo
from asyncrl.core.types import FinishReason, Media, Prompt, SampleId
from asyncrl.storage.media import digest
from asyncrl.storage.sample_bytes import spans_from_json
from skip.fingerprint import Fingerprint, field, model_identity, tokenizer_identity
from skip.record import Content
from skip.record_role import Call, RecordSkip, Served
from skip.role import register_skip

CODE = "2"
"""Version of the code that generates; it is incremented when results would differ from earlier records."""


class _Generation(RecordSkip):
    """The base of the two roles."""

    @functools.cached_property
    def _model(self) -> dict[str, str]:
        config = self.run.model
        return {"model": model_identity(config), "tokenizer": tokenizer_identity(config), "code": CODE}

    @property
    def _tokenizer(self) -> str:
        return self.run.model.tokenizer_path or self.run.model.path

    def _fingerprint(self, request: SampleRequest) -> dict[str, str]:
        return {
            "prompt_ids": field(request.prompt.prompt_ids),
            **{f"sampling.{name}": field(value) for name, value in sorted(request.sampling.items())},
            "n": field(request.n),
            "baseline": field(request.baseline) if request.baseline is not None else "null",
            "extra": field(request.extra),
            **{f"agent.{name}": field(value) for name, value in sorted(request.agent.items())},
            **({"media": field([digest(media) for media in request.prompt.media])} if request.prompt.media else {}),
            "dtype": field(self.run.rollout.dtype),
            **self._model,
        }

    def _replayed(self, one: Generated, served: Served, request: SampleRequest) -> Generated:
        """Return the recorded sample as the answer to the request. Raises `ValueError` if it does not fit."""
        has_baseline = request.baseline is not None
        found, required = len(one.trajectories), request.n + has_baseline
        if one.has_baseline != has_baseline or not required <= found <= required + request.extra:
            raise ValueError(f"it has {found} trajectories, and {required} are requested")
        longest = request.sampling.get("max_tokens")
        if longest is not None and any(turn.num_tokens > longest for each in one.trajectories for turn in each.turns):
            raise ValueError(f"it has responses of more than max_tokens={longest}")
        # For the same prompt, the columns of the request count (ground truth, messages).
        same_media = one.prompt.media == request.prompt.media
        if same_media and np.array_equal(one.prompt.prompt_ids, request.prompt.prompt_ids):
            one = replace(one, prompt=request.prompt)
        elif not one.knows_columns:
            raise ValueError("its prompt's columns are not recorded, so it can be replayed for the same prompt only")
        return replace(one, replayed_from=served.record.step, substituted=served.substituted)


@register_skip("async_rollout")
class AsyncRolloutSkip(_Generation):
    """The role of a function of `request: SampleRequest` that returns `Generated`. The step is the feed index."""

    support_online_step = True

    def extract_step(self, call: Call) -> int:
        return step_of_sample(call["request"].sample_id, self.active.key)

    def fingerprint(self, call: Call) -> Fingerprint:
        return self._fingerprint(call["request"])

    def to_content(self, call: Call, result: Generated) -> Content:
        return to_content([result], tokenizer=self._tokenizer)

    def to_result(self, call: Call, served: Served) -> Generated:
        (one,) = from_content(served.record.content)
        return self._replayed(one, served, call["request"])

    def versions(self, result: Generated) -> tuple[int, int] | None:
        return versions([result])


@register_skip("rollout")
class RolloutSkip(_Generation):
    """The role of a function of `batch: Sequence[SampleRequest]` that returns `Generated` for each. The step is the one
    of `SkipManager.set_step`."""

    def fingerprint(self, call: Call) -> Fingerprint:
        batch: Sequence[SampleRequest] = call["batch"]
        each = [self._fingerprint(request) for request in batch]
        own = sorted({name for one in each for name in one if name not in self._model})
        values_of = {name: [one.get(name) for one in each] for name in own}
        same = {name: values[0] if len(set(values)) == 1 else field(values) for name, values in values_of.items()}
        return {**self._model, "samples": str(len(batch)), **{name: str(value) for name, value in same.items()}}

    def to_content(self, call: Call, result: Sequence[Generated]) -> Content:
        return to_content(result, tokenizer=self._tokenizer)

    def to_result(self, call: Call, served: Served) -> list[Generated]:
        batch: Sequence[SampleRequest] = call["batch"]
        found = from_content(served.record.content)
        if len(found) != len(batch):
            raise ValueError(f"it has {len(found)} samples, and {len(batch)} are requested")
        return [self._replayed(one, served, request) for one, request in zip(found, batch, strict=True)]

    def versions(self, result: Sequence[Generated]) -> tuple[int, int] | None:
        return versions(result)


def step_of_sample(sample_id: SampleId | str, key: str) -> int:
    """Return the feed index, as the step of the role that `key` configures.

    Raises:
        BugError: `sample_id` is malformed; the message shows the expected form.
    """
    try:
        return (sample_id if isinstance(sample_id, SampleId) else SampleId.parse(sample_id)).index
    except (ValueError, TypeError) as error:
        raise BugError(f"{key} takes its step from the sample's id: {error}") from error


def versions(results: Sequence[Generated]) -> tuple[int, int] | None:
    """Return the oldest and newest version over all tokens; None: there are none."""
    found = {version for one in results for trajectory in one.trajectories for version in trajectory.versions}
    return (min(found), max(found)) if found else None


# ------------------------------------------------------------------------------------------------ as a record

_ROW_ARRAYS = {"response_ids": np.int32, "response_mask": np.bool_, "rollout_log_probs": np.float32}
_COLUMNS = ("messages", "data_source", "ground_truth", "extra_info")
_TURNS = TypeAdapter(tuple[TurnInfo, ...])
"""Turns and their tool calls as JSON types, and back."""


def to_content(results: Sequence[Generated], *, tokenizer: str = "") -> Content:
    """Return the concatenated tokens and log-probs of all rows, with prompts and lengths as JSON.

    `tokenizer`: path of the tokenizer, for users who look at the record.
    """
    rows = [(one, row) for one in results for trajectory in one.trajectories for row in trajectory.rows]
    stored = {digest(media): media for one in results for media in one.prompt.media}
    return Content(
        {
            "prompt_ids": _joined([one.prompt.prompt_ids for one in results], np.int32),
            "row_prompt_ids": _joined([row.prompt_ids for one, row in rows if _has_own_prompt(one, row)], np.int32),
            **{name: _joined([getattr(row, name) for _, row in rows], dtype) for name, dtype in _ROW_ARRAYS.items()},
            **{f"media.{name}": np.frombuffer(media.data, np.uint8) for name, media in stored.items()},
        },
        {"tokenizer": tokenizer, "samples": [_sample_data(one) for one in results]},
    )


def from_content(content: Content) -> list[Generated]:
    """Return the samples; arrays are views.

    Raises:
        ValueError, KeyError, TypeError: the content is not that of a generation.
    """
    readers = {name: _ArrayReader(array) for name, array in content.arrays.items() if not name.startswith("media.")}
    results = []
    for sample in content.data["samples"]:
        prompt_ids, columns = readers["prompt_ids"].take(sample["prompt_tokens"]), sample["columns"]
        media = tuple(Media(kind, content.arrays[f"media.{name}"].tobytes()) for kind, name in sample.get("media", ()))
        prompt = Prompt(prompt_ids, media=media)
        if columns is not None:
            prompt = replace(prompt, **{**columns, "messages": tuple(columns["messages"])})
        trajectories = tuple(_trajectory(each, prompt_ids, readers) for each in sample["trajectories"])
        seconds, has_baseline = sample["generate_s"], sample["has_baseline"]
        results.append(Generated(prompt, trajectories, seconds, has_baseline, knows_columns=columns is not None))
    for reader in readers.values():
        reader.end()
    return results


def _sample_data(one: Generated) -> dict[str, Any]:
    media = [[media.kind, digest(media)] for media in one.prompt.media]
    return {
        "prompt_tokens": len(one.prompt.prompt_ids),
        "columns": _columns(one.prompt),
        **({"media": media} if media else {}),
        "has_baseline": one.has_baseline,
        "generate_s": float(one.generate_s),
        "trajectories": [_trajectory_data(one, trajectory) for trajectory in one.trajectories],
    }


def _has_own_prompt(one: Generated, row: TokenRow) -> bool:
    """Return whether the row's prompt differs from the sample's, because history was rewritten or an environment
    sent the first message."""
    return not np.array_equal(row.prompt_ids, one.prompt.prompt_ids)


def _trajectory_data(one: Generated, trajectory: Trajectory) -> dict[str, Any]:
    return {
        "rows": [
            {
                "prompt_tokens": len(row.prompt_ids) if _has_own_prompt(one, row) else None,
                "response_tokens": len(row.response_ids),
                "spans": [list(span) for span in row.spans],
            }
            for row in trajectory.rows
        ],
        # A tool's metrics may be any mapping.
        "turns": _TURNS.dump_python(trajectory.turns, mode="json", fallback=dict, warnings=False),
        "finish_reason": str(trajectory.finish_reason),
        "messages": [dict(message) for message in trajectory.messages],
        "scores": dict(trajectory.scores),
        "metrics": dict(trajectory.metrics),
    }


def _trajectory(
    data: Mapping[str, Any], prompt_ids: NDArray[np.int32], readers: Mapping[str, _ArrayReader]
) -> Trajectory:
    rows = []
    for row in data["rows"]:
        own, num_tokens = row["prompt_tokens"], row["response_tokens"]
        arrays = {name: readers[name].take(num_tokens) for name in _ROW_ARRAYS}
        spans = spans_from_json(row["spans"])
        rows.append(TokenRow(prompt_ids if own is None else readers["row_prompt_ids"].take(own), **arrays, spans=spans))
    turns = _TURNS.validate_python(data["turns"])
    if not turns:
        raise ValueError("a trajectory has no turn")
    for turn in turns:
        if not 0 <= turn.first_token <= turn.first_token + turn.num_tokens <= len(rows[turn.row].response_ids):
            raise ValueError("a turn lies outside of its row")
    reason, messages = FinishReason(data["finish_reason"]), tuple(encodable_values(data["messages"]))
    return Trajectory(tuple(rows), turns, reason, messages, data["scores"], data["metrics"])


def _columns(prompt: Prompt) -> dict[str, Any] | None:
    """Return the prompt's columns; None: JSON cannot represent them. They are needed only to replay the record for
    another prompt."""
    messages = [dict(message) for message in prompt.messages]
    values = (messages, prompt.data_source, prompt.ground_truth, dict(prompt.extra_info))
    columns = dict(zip(_COLUMNS, values, strict=True))
    try:
        same = json.loads(json.dumps(columns, allow_nan=False)) == columns
    except (TypeError, ValueError, RecursionError):
        return None
    return columns if same is True else None


class _ArrayReader:
    """Splits an array into consecutive views."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self._at = 0

    def take(self, length: int) -> NDArray[Any]:
        start, self._at = self._at, self._at + length
        if length < 0 or self._at > len(self._array):
            raise ValueError(f"{length} tokens from position {start} on do not fit an array of {len(self._array)}")
        return self._array[start : self._at]

    def end(self) -> None:
        if self._at != len(self._array):
            raise ValueError(f"an array has {len(self._array) - self._at} tokens too many")


def _joined(arrays: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays, dtype=dtype, casting="same_kind") if arrays else np.empty(0, dtype)
