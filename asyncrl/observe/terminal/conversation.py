"""Render a trajectory with rich: its messages, the versions that sampled them, durations and rewards. Pure.

Tokens of the policy are coloured, with alternating shades for versions; all other text is dim. No text is wrapped or
cut, so that a conversation can be copied; control characters in it are made visible.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from asyncrl.core.trajectory import ToolCall
from asyncrl.core.types import FinishReason, Span, versions_per_token
from asyncrl.observe.formats import timestamp
from asyncrl.observe.terminal.screen import DIM
from asyncrl.storage.trajectory_files import DumpedTrajectory, VersionedText

SHADES = ("green", "bright_green")
"""Colours of a trajectory's versions, alternating."""
_BAD = "red"
_ROLES = {"assistant": "bold green", "system": "bold magenta", "user": "bold blue", "tool": "bold yellow"}
_MAX_PART = 80
"""Largest number of characters shown for a part of a message that is not text."""
_LABEL = 13
_CONTROLS = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    0x7F: "␡",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
    # Characters that change the direction of the text after them.
    **dict.fromkeys((0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"),
}
DecodeToken = Callable[[int], str]


def overview(trajectories: Sequence[DumpedTrajectory]) -> Table:
    """Return a table with a row for each trajectory of a sample."""
    table = Table(box=None, header_style=DIM)
    for column in ("trajectory", "turns", "tool calls", "tokens", "versions", "reward", "finish"):
        table.add_column(column, justify="left" if column in ("versions", "finish") else "right")
    for one in trajectories:
        trajectory = one.trajectory
        table.add_row(
            str(one.number),
            str(len(trajectory.turns)),
            str(trajectory.num_calls),
            f"{trajectory.num_sampled:,}",
            _versions(sorted(trajectory.versions), "–"),
            _amount(one.score.reward),
            str(trajectory.finish_reason),
        )
    return table


def title(one: DumpedTrajectory) -> Text:
    name = f"{one.sample_id} · trajectory {one.number} of {one.num_trajectories}"
    return Text().append(name, style="bold").append(f" · {visible(one.data_source)}", style=DIM)


def conversation(one: DumpedTrajectory) -> Iterator[Text]:
    """Yield all messages, turn by turn."""
    messages, turns = one.trajectory.messages, one.trajectory.turns
    places = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    # The policy's answers come last; assistant messages of the prompt, such as examples, are before them.
    turn_at = dict(zip(reversed(places), range(len(turns) - 1, -1, -1), strict=False))
    next_turn = 0
    messages_since = 0
    """Messages since the last turn."""
    for place, message in enumerate(messages):
        if place in turn_at:
            for number in range(next_turn, turn_at[place] + 1):
                answered = place + 1 < len(messages) and place + 1 not in turn_at
                yield from _turn(one, number, message if number == turn_at[place] else {}, answered=answered)
            next_turn, messages_since = turn_at[place] + 1, 0
        else:
            yield from _message(message, _num_tokens_before(one, next_turn) if messages_since == 0 else "")
            messages_since += 1
    for number in range(next_turn, len(turns)):
        yield from _turn(one, number, {}, answered=False)


def closing(one: DumpedTrajectory, fate: str) -> Iterator[Text]:
    """Yield reward, finish reason and origin of a trajectory. `fate`: the state of its sample; empty if unknown."""
    trajectory, score = one.trajectory, one.score
    reward = _labelled("reward").append(_amount(score.reward), style="bold")
    for name, value in score.extra.items():
        reward.append(f"   {visible(name)} ", style=DIM).append(_amount(value))
    yield reward
    if any(score.turn_rewards):
        yield _labelled("of turns").append("  ".join(map(_signed, score.turn_rewards)))
    for label, values in (("scores", trajectory.scores), ("metrics", trajectory.metrics)):
        if values:
            figures = (f"{visible(name)} {_amount(value)}" for name, value in values.items())
            yield _labelled(label).append("   ".join(figures))
    if one.baseline_reward is not None:
        yield _labelled("baseline").append(_amount(one.baseline_reward))
    turns = len(trajectory.turns)
    yield _labelled("finish").append(
        f"{trajectory.finish_reason} · {trajectory.num_sampled:,} tokens in {turns} turn{'s' * (turns > 1)} · "
        f"{_versions(sorted(trajectory.versions), '–')}"
    )
    if one.ground_truth is not None:
        yield _labelled("ground truth").append(visible(_content(one.ground_truth)))
    yield _labelled("sample").append(f"generated in {_seconds(one.generate_s)}, scored in {_seconds(one.reward_s)}")
    if one.replayed_from is not None:
        other = ", recorded for another prompt" if one.substituted else ""
        yield _labelled("replayed").append(f"from the record of step {one.replayed_from}{other}")
    if fate:
        yield _labelled("then").append(fate)
    if one.at:
        yield _labelled("dumped").append(timestamp(one.at))


def tokens(one: DumpedTrajectory, decode: DecodeToken) -> Iterator[Text]:
    """Yield every row, token by token: its place, id, mask, version, log-prob and text."""
    shades = _shades(one)
    for number, row in enumerate(one.trajectory.rows):
        sampled = int(row.response_mask.sum())
        yield Text(
            f"row {number} · {len(row.prompt_ids):,} tokens of prompt, {len(row.response_ids):,} of response, "
            f"{sampled:,} of them sampled",
            style="bold",
        )
        yield Text(f"{'place':>7} {'id':>8} {'mask':>6} {'version':>8} {'log-prob':>10}  text", style=DIM)
        for place, token in enumerate(row.prompt_ids.tolist()):
            yield Text(f"{place:>7} {token:>8} {'prompt':>6} {'':>8} {'':>10}  {_quoted(decode(token))}", style=DIM)
        versions = versions_per_token(row.spans, len(row.response_ids))
        columns = (row.response_ids, row.response_mask, versions, row.rollout_log_probs)
        for place, (token, mask, version, log_prob) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            head = f"{place:>7} {token:>8} {int(mask):>6} "
            origin = f"{f'v{version}':>8} {log_prob:>10.5f}" if mask else f"{'':>8} {'':>10}"
            yield Text(f"{head}{origin}  {_quoted(decode(token))}", style=shades[version] if mask else DIM)


def visible(text: str) -> str:
    """Replace control characters and lone surrogates: models and tools must not control the terminal."""
    return text.translate(_CONTROLS)


# ------------------------------------------------------------------------------------------------ messages


def _message(message: Mapping[str, Any], about: str) -> Iterator[Text]:
    role = str(message.get("role", "?"))
    yield _header(role, [visible(str(message["name"])) if message.get("name") else "", about])
    text = _content(message.get("content"))
    if message.get("tool_calls"):
        text = f"{text}\n{_json(message['tool_calls'])}".lstrip("\n")
    yield Text(visible(text), style=DIM)


def _num_tokens_before(one: DumpedTrajectory, next_turn: int) -> str:
    """Return the number of tokens in the prompt or, later, between the previous turn and this one, as text."""
    turns, rows = one.trajectory.turns, one.trajectory.rows
    if next_turn == 0:
        turn = turns[0]
        return f"prompt of {len(rows[turn.row].prompt_ids) + turn.first_token:,} tokens"
    if next_turn == len(turns) or turns[next_turn].row != turns[next_turn - 1].row:
        return ""
    before = turns[next_turn - 1]
    return f"{turns[next_turn].first_token - before.first_token - before.num_tokens:,} tokens"


def _turn(one: DumpedTrajectory, number: int, message: Mapping[str, Any], *, answered: bool) -> Iterator[Text]:
    """Yield one turn. `answered`: the results of its tool calls are in the next messages."""
    trajectory = one.trajectory
    turn = trajectory.turns[number]
    row = trajectory.rows[turn.row]
    if number and turn.row != trajectory.turns[number - 1].row:
        rewrite = f"the chat template rewrote the history: row {turn.row} begins, with {len(row.prompt_ids):,} tokens"
        yield Text(f"── {rewrite} ──", style=DIM)
    versions = _versions_of(row.spans, turn.first_token, turn.num_tokens)
    about = [f"turn {number}", f"{turn.num_tokens:,} tokens", _versions(versions, "→")]
    if one.recorded_spans and one.recorded_spans[turn.row]:
        recorded = _versions_of(one.recorded_spans[turn.row], turn.first_token, turn.num_tokens)
        about.append(f"recorded {_versions(recorded, '→')}")
    if turn.generate_s > 0:
        about += [_seconds(turn.generate_s), f"{turn.num_tokens / turn.generate_s:,.0f} tok/s"]
    if turn.finish_reason not in (FinishReason.STOP, FinishReason.TOOL_CALL):
        about.append(str(turn.finish_reason))
    if turn.user_s > 0:
        about.append(f"answered in {_seconds(turn.user_s)}")
    reward = one.score.turn_rewards[number] if number < len(one.score.turn_rewards) else turn.reward
    if reward:
        about.append(f"reward {_signed(reward)}")
    yield _header("assistant", about)
    yield _sampled(one, number, message)
    for call in turn.calls:
        yield from _call(call, answered=answered)


def _sampled(one: DumpedTrajectory, number: int, message: Mapping[str, Any]) -> Text:
    shades = _shades(one)
    pieces = one.texts[number] if one.texts else ()
    if not pieces:
        content = _content(message.get("content"))
        version = next(iter(_turn_versions(one, number)), None)
        pieces = (VersionedText(version, content),) if version is not None else ()
    text = Text()
    for place, piece in enumerate(pieces):
        if place:
            text.append(f"⟨v{piece.version}⟩", style=DIM)
        text.append(visible(piece.text), style=shades.get(piece.version, SHADES[0]))
    return text


def _call(call: ToolCall, *, answered: bool) -> Iterator[Text]:
    text = Text().append("→ ", style=DIM).append(visible(call.name), style="bold yellow")
    text.append(f"({visible(call.arguments)})  ").append(call.status, style="green" if call.status == "ok" else _BAD)
    about = [_seconds(call.duration_s)]
    if call.wait_s > 0:
        about.append(f"waited {_seconds(call.wait_s)}")
    if call.reward:
        about.append(f"reward {_signed(call.reward)}")
    about += [f"{visible(name)} {_amount(value)}" for name, value in call.metrics.items()]
    yield text.append(f" · {' · '.join(about)}", style=DIM)
    if not answered:
        yield Text(visible(call.result), style=DIM)


def _header(role: str, about: Sequence[str]) -> Text:
    text = Text("\n").append(visible(role), style=_ROLES.get(role, "bold"))
    details = " · ".join(filter(None, about))
    return text.append(f" · {details}", style=DIM) if details else text


def _content(content: Any) -> str:
    """Return a message's content as text, with a description of other media."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return _json(content)


def _part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    text = _json(part)
    return f"[{text if len(text) <= _MAX_PART else f'{text[:_MAX_PART]}…'}]"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _quoted(text: str) -> str:
    return visible(json.dumps(text, ensure_ascii=False))


# ------------------------------------------------------------------------------------------------ figures


def _shades(one: DumpedTrajectory) -> dict[int, str]:
    return {version: SHADES[place % 2] for place, version in enumerate(sorted(one.trajectory.versions))}


def _turn_versions(one: DumpedTrajectory, number: int) -> list[int]:
    turn = one.trajectory.turns[number]
    return _versions_of(one.trajectory.rows[turn.row].spans, turn.first_token, turn.num_tokens)


def _versions_of(spans: Sequence[Span], first: int, num_tokens: int) -> list[int]:
    """Return the versions of these tokens in order, without repetitions."""
    versions: list[int] = []
    for version in versions_per_token(spans, first + num_tokens)[first:].tolist():
        if not versions or versions[-1] != version:
            versions.append(version)
    return versions


def _versions(versions: Sequence[int], between: str) -> str:
    """Format versions as `v3→v4`; if `between` is `–`, only the first and the last one."""
    ends = [versions[0], versions[-1]] if between == "–" and len(versions) > 2 else versions
    return between.join(f"v{version}" for version in ends)


def _labelled(label: str) -> Text:
    return Text().append(f"{label:<{_LABEL}}", style=DIM)


def _amount(value: float) -> str:
    return f"{value:.4g}"


def _signed(value: float) -> str:
    return f"{value:+.4g}"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.1 else f"{seconds:.1f} s"
