"""What a run directory has of one sample: its life in the journal, what it was trained in, and its payload while that
is there. Blocking; nothing is changed.

A payload has tokens, and no turns or messages: those are told from the mask.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from asyncrl.blobs import DamageError, decode
from asyncrl.failures import AsyncRLError, ConfigError
from asyncrl.journal_file import Damage, damage_named, open_to_read, read_meta, rebuild
from asyncrl.journal_reader import read_samples
from asyncrl.lives import SampleRecord
from asyncrl.payloads import FileRef, PackedBlob
from asyncrl.ports import Score
from asyncrl.run_dir import JOURNAL, SAMPLES
from asyncrl.segments import read_segment, segment_incarnation
from asyncrl.trajectory import TokenRow, Trajectory, TurnInfo
from asyncrl.trajectory_lines import PROMPT_ROLE, Decode, DumpedTrajectory, mask_runs, pieces
from asyncrl.types import FinishReason, Row, Sample, SampleId

QUICK_JOURNAL_BYTES = 8 << 20
"""A journal up to this is read within a second, as it may be for one line of an answer."""


class Life(NamedTuple):
    """What the journal says of a sample."""

    record: SampleRecord | None
    """None: it was never fed, or there is nothing to be read."""
    told: str
    """In words."""
    scored: bool = True
    """False: it has not come so far."""


def life_of(run_dir: Path, index: int) -> Life:
    """All of the journal is read."""
    if not (run_dir / JOURNAL).exists():
        return Life(None, "the run keeps no journal, so what became of it is not known")
    newest = 0
    try:
        for record in read_samples(run_dir):
            newest = record.sample_id.index
            if newest == index:
                return Life(record, _in_words(record), scored=record.ready_at > 0)
    except AsyncRLError as error:
        return Life(None, f"what became of it is not known: {error.message}")
    told = f"the last one fed is sample {newest}" if newest else "no sample was"
    return Life(None, f"it was never fed; {told}", scored=False)


def fate(run_dir: Path, sample_id: SampleId, oldest_version: int) -> str:
    """What became of a sample, in words; empty: it cannot be told quickly."""
    from trainer.record import read_trained

    steps: dict[int, int] = {}
    try:
        for line in read_trained(run_dir):
            if "rewound_to_step" in line:
                steps = {step: version for step, version in steps.items() if step <= line["rewound_to_step"]}
            elif str(sample_id) in line["samples"]:
                steps[line["step"]] = line["version"]
    except (ConfigError, KeyError, TypeError, OSError):
        steps = {}
    if steps:
        step, version = max(steps.items())
        return f"trained in step {step}, which began from v{version}: staleness {version - oldest_version}"
    files = [run_dir / name for name in (JOURNAL, f"{JOURNAL}-wal")]
    num_bytes = sum(file.stat().st_size for file in files if file.exists())
    return life_of(run_dir, sample_id.index).told if 0 < num_bytes <= QUICK_JOURNAL_BYTES else ""


def _in_words(record: SampleRecord) -> str:
    at = f"at {_clock(record.ended_at or record.leased_at or record.ready_at or record.fed_at)}"
    match record.state:
        case "running":
            return f"it was fed {at} and is generated, or was when the run ended"
        case "ready":
            return f"it became ready {at} and waits to be trained on"
        case "leased":
            return f"the Trainer has it since {_clock(record.leased_at)}"
        case "trained":
            return f"it was trained on {at}"
        case "dropped":
            return f"it was dropped ({record.reason}) {at}"
        case _:
            return "it waits to be fed again"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


# ------------------------------------------------------------------------------------------------ its payload


class Payload(NamedTuple):
    sample: Sample | None
    told: str
    """Why there is none."""


def payload_of(run_dir: Path, index: int) -> Payload:
    """The sample, if its payload is in the run directory still."""
    path = run_dir / JOURNAL
    if not path.exists():
        return Payload(None, "")
    try:
        with damage_named(path), closing(open_to_read(path)) as connection:
            connection.execute("BEGIN")
            state = rebuild(connection, read_meta(connection)).state
    except (Damage, AsyncRLError) as error:
        return Payload(None, f"{path} cannot be read: {error}")
    entry = state.entry(state.ledger.id_of(index))
    if entry is None or not isinstance(entry.payload, FileRef):
        return Payload(None, "")
    file = run_dir / SAMPLES / entry.payload.file
    try:
        if segment_incarnation(file.name) is None:
            raise DamageError("it has no payload's name")
        return Payload(PackedBlob(decode(read_segment(file))).unpack(entry.payload.position), "")
    except OSError as error:
        return Payload(None, f"its payload {file} cannot be read: {error.strerror or error}")
    except (DamageError, ValueError, RecursionError) as error:
        return Payload(None, f"its payload {file} is damaged: {error}")


def describe(sample: Sample, run_dir: Path, text_of: Decode) -> list[DumpedTrajectory]:
    """The trajectories of a payload, as if they had been dumped."""
    rows: dict[int, list[Row]] = {}
    for row in sample.rows:
        rows.setdefault(row.trajectory, []).append(row)
    return [
        _describe(sample, number, own, run_dir=run_dir, num_trajectories=len(rows), text_of=text_of)
        for number, own in rows.items()
    ]


def _describe(
    sample: Sample, number: int, rows: list[Row], *, run_dir: Path, num_trajectories: int, text_of: Decode
) -> DumpedTrajectory:
    last = rows[-1]
    asked = sample.asked[number] if number < len(sample.asked) else None
    token_rows = tuple(
        TokenRow(row.prompt_ids, row.response_ids, row.response_mask, row.rollout_log_probs, row.spans) for row in rows
    )
    rewards: list[float] = []
    turns: list[TurnInfo] = []
    texts = []
    messages: list[Mapping[str, str]] = [{"role": PROMPT_ROLE, "content": text_of(rows[0].prompt_ids)}]
    for place, row in enumerate(rows):
        first, of_token = 0, dict(row.turn_rewards)
        for sampled, num_tokens in mask_runs(row.response_mask):
            end = first + num_tokens
            if sampled:
                turns.append(TurnInfo(place, first, num_tokens, FinishReason.STOP))
                rewards.append(of_token.get(end - 1, 0.0))
                texts.append(pieces(token_rows[place], turns[-1], text_of))
                messages.append({"role": "assistant", "content": "".join(piece.text for piece in texts[-1])})
            else:
                messages.append({"role": "told", "content": text_of(row.response_ids[first:end])})
            first = end
    if not turns:
        turns.append(TurnInfo(0, 0, 0, last.finish_reason))
        texts.append(())
    return DumpedTrajectory(
        sample_id=sample.sample_id,
        number=number,
        num_trajectories=num_trajectories,
        run=str(run_dir),
        at=0.0,
        trajectory=Trajectory(token_rows, tuple(turns), last.finish_reason, tuple(messages), number=asked),
        score=Score(last.reward, last.reward_extra, tuple(rewards) if any(rewards) else ()),
        texts=tuple(texts),
        data_source=sample.data_source,
        generate_s=sample.generate_s,
        reward_s=sample.reward_s,
        baseline_reward=sample.baseline_reward,
        replayed_from=None if sample.replay is None else sample.replay.step,
        substituted=sample.replay is not None and sample.replay.substituted,
    )
