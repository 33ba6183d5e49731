"""`asyncrl show` prints samples from dumps and from payloads, and reports the state of a sample that has neither."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import yaml
from rich.console import Console

from asyncrl.cli.main import BAD_CONFIG
from asyncrl.core.ports import Score
from asyncrl.core.staleness import Pacing
from asyncrl.core.trajectory import TokenRow, Trajectory, TurnInfo
from asyncrl.core.types import DropReason, FinishReason, Prompt, Replay, SampleId, Span, Turn, sample_meta
from asyncrl.observe.kept_samples import ConfiguredRun
from asyncrl.observe.terminal import conversation
from asyncrl.queue.journal import Journal
from asyncrl.queue.payloads import FilePayloads
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.storage.recent_samples import CHOICES
from asyncrl.storage.trajectory_files import DumpedTrajectory, VersionedText, file_name
from rollouter.trajectory_dump import SampleKeeper, TrajectoryDump
from tests.fakes.command_line import CommandLine
from tests.fakes.dumped import SCORES, calculation, decode, group, ids, prompt, sample
from tests.fakes.queues import admit, end, meta, payload, train

QUICKSTART = "asyncrl://quickstart"
PAYLOAD = "1-3.safetensors"
"""The payload of the first sample of `undumped_run`."""


@pytest.fixture
def run_dir(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run that dumps into `dump` of the working directory."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    configure(run_dir)
    return run_dir


def configure(run_dir: Path, dump_dir: str | None = "dump", model: str = QUICKSTART, **more: Any) -> None:
    config = {"rollout": {"dump_dir": dump_dir}, "model": {"path": model}, **more}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))


def write(
    run_dir: Path,
    index: int = 42,
    trajectories: Sequence[Trajectory] | None = None,
    scores: Sequence[Score] = SCORES,
    *,
    at: float = 0.5,
    prompt: Prompt = prompt(),  # noqa: B008  prompts are immutable
    replay: Replay | None = None,
) -> Path:
    """Dump a sample as the Rollouter does, and return the file."""
    trajectories = group() if trajectories is None else trajectories
    dump = TrajectoryDump(Path("dump").absolute(), run_dir, decode, lambda: at)
    anyio.run(dump.write, sample(index, trajectories, replay=replay), prompt, trajectories, scores)
    return Path("dump", file_name(index)).absolute()


# ------------------------------------------------------------------------------------------------ output

CONVERSATION = """\
sample_0_42 · trajectory 0 of 2 · arithmetic

system · prompt of 11 tokens
Use the calculator.

user
6*7?

assistant · turn 0 · 14 tokens · v3→v4 · 0.5 s · 28 tok/s · reward +0.25
calculate⟨v4⟩(6*7)
→ calculator({"expression": "6*7"})  ok · 12 ms · waited 0.5 s · reward +0.25 · calls 1

tool · calculator · 10 tokens
42

assistant · turn 1 · 9 tokens · v4 · 0.2 s · 36 tok/s
It is 42.

reward       1.25   rule 1
of turns     +0.25  +0
scores       calc_reward 1
metrics      calculator/calls 1
finish       stop · 23 tokens in 2 turns · v3–v4
ground truth 42
sample       generated in 1.5 s, scored in 50 ms
dumped       1970-01-01 00:00:00
"""
TABLE = """\
 trajectory  turns  tool calls  tokens  versions  reward  finish
          0      2           1      23  v3–v4       1.25  stop
          1      1           0       9  v4             0  length

"""
GUESS = """\
sample_0_42 · trajectory 1 of 2 · arithmetic

system · prompt of 11 tokens
Use the calculator.

user
6*7?

assistant · turn 0 · 9 tokens · v4 · length
It is 41.

reward       0   rule 0
finish       length · 9 tokens in 1 turn · v4
ground truth 42
sample       generated in 1.5 s, scored in 50 ms
dumped       1970-01-01 00:00:00
"""


def plain(text: str) -> str:
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


@pytest.mark.parametrize("name", [(42,), ("quickstart", "sample_0_42"), ("runs/quickstart/20260102-030405", "42")])
def test_a_conversation_without_colour(run_dir: Path, cli: CommandLine, name: tuple[Any]) -> None:
    write(run_dir)
    out, err = cli("show", *name)
    assert (plain(out), err) == (TABLE + CONVERSATION, "")


def test_one_trajectory(run_dir: Path, cli: CommandLine) -> None:
    write(run_dir)
    assert plain(cli("show", 42, "--trajectory", 0).out) == CONVERSATION
    assert plain(cli("show", 42, "-t", 1).out) == GUESS
    err = cli("show", 42, "-t", 2, code=BAD_CONFIG).err
    assert "--trajectory=2: sample_0_42 has no such trajectory; it has 0, 1" in err


def test_one_trajectory_needs_no_table(run_dir: Path, cli: CommandLine) -> None:
    write(run_dir, trajectories=[calculation()], scores=SCORES[:1])
    assert plain(cli("show", 42).out) == CONVERSATION.replace("0 of 2", "0 of 1")


def drawn(*lines: Any) -> str:
    console = Console(force_terminal=True, color_system="standard", width=200, highlight=False, soft_wrap=True)
    with console.capture() as capture:
        for line in lines:
            console.print(line)
    return capture.get()


def test_neighbouring_versions_have_different_colours() -> None:
    one = DumpedTrajectory(
        SampleId(0, 1), 0, 1, "", 0.0, calculation(), SCORES[0],
        ((VersionedText(3, "calculate"), VersionedText(4, "(6*7)")), (VersionedText(4, "It is 42."),)),
    )  # fmt: skip
    text = drawn(*conversation.conversation(one))
    assert "\x1b[32mcalculate\x1b[0m" in text
    assert "\x1b[92m(6*7)\x1b[0m" in text
    assert "\x1b[92mIt is 42.\x1b[0m" in text
    assert re.search(r"\x1b\[(37|38;5;\d+)m42\x1b", text), "the tool's result is dim"
    assert "\x1b[32mok\x1b[0m" in text
    failed = replace(calculation().turns[0].calls[0], status="timeout")
    turns = (replace(calculation().turns[0], calls=(failed,)), calculation().turns[1])
    text = drawn(*conversation.conversation(replace(one, trajectory=replace(calculation(), turns=turns))))
    assert "\x1b[31mtimeout\x1b[0m" in text


def test_the_no_color_option_prints_plain_text_on_a_terminal_too(
    run_dir: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    write(run_dir)
    assert "\x1b[" in cli("show", 42).out
    assert plain(cli("show", 42, "--no-color").out) == TABLE + CONVERSATION


def test_json_output_equals_the_dumped_lines(run_dir: Path, cli: CommandLine) -> None:
    path = write(run_dir)
    dumped = [json.loads(line) for line in path.read_bytes().splitlines()]
    printed = cli("show", 42, "--json")
    assert printed.json == dumped
    assert len(printed.out.splitlines()) == 4, "one line per trajectory"
    assert cli("show", 42, "--json", "-t", 1).json == dumped[1]


def test_the_tokens_option_prints_one_line_per_token(run_dir: Path, cli: CommandLine) -> None:
    row = TokenRow(
        np.array([40, 41], np.int32), np.array([5, 6, 7], np.int32), np.array([True, False, True]),
        np.array([-0.5, 0.0, -1.25], np.float32), (Span(0, 3), Span(2, 4)),
    )  # fmt: skip
    turns = (TurnInfo(0, 0, 1, FinishReason.STOP), TurnInfo(0, 2, 1, FinishReason.STOP))
    write(run_dir, trajectories=[Trajectory((row,), turns, FinishReason.STOP)], scores=SCORES[1:])
    from transformers import AutoTokenizer

    from asyncrl.assets import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve(QUICKSTART))
    text = {token: json.dumps(tokenizer.decode([token]), ensure_ascii=False) for token in (40, 41, 5, 6, 7)}
    assert plain(cli("show", 42, "--tokens").out).splitlines()[1:8] == [
        "row 0 · 2 tokens of prompt, 3 of response, 2 of them sampled",
        "  place       id   mask  version   log-prob  text",
        f"      0       40 prompt                      {text[40]}",
        f"      1       41 prompt                      {text[41]}",
        f"      0        5      1       v3   -0.50000  {text[5]}",
        f"      1        6      0                      {text[6]}",
        f"      2        7      1       v4   -1.25000  {text[7]}",
    ]


def test_tokens_need_the_tokenizer_of_the_run(run_dir: Path, cli: CommandLine) -> None:
    write(run_dir)
    configure(run_dir, model="nowhere/model")
    out, err = cli("show", 42, "--tokens", code=BAD_CONFIG)
    assert out == "" and "model.path: no tokenizer can be loaded from 'nowhere/model' on this machine" in err
    cli("show", 42)  # a conversation needs no tokenizer


def first_row() -> TokenRow:
    """Return the row of `calculation` with its first turn only."""
    response = {"response_mask": np.ones(14, np.bool_), "rollout_log_probs": np.zeros(14, np.float32)}
    return replace(calculation().rows[0], response_ids=ids("calculate(6*7)"), **response)


def test_a_rewritten_history_starts_a_new_row(run_dir: Path, cli: CommandLine) -> None:
    one = calculation()
    second = TokenRow(
        ids("user: 6*7? [42] "), ids("It is 42."), np.ones(9, np.bool_), np.zeros(9, np.float32), (Span(0, 4),)
    )
    turns = (one.turns[0], replace(one.turns[1], row=1, first_token=0))
    write(run_dir, trajectories=[replace(one, rows=(first_row(), second), turns=turns)], scores=SCORES[:1])
    out = cli("show", 42).out
    assert "── the chat template rewrote the history: row 1 begins, with 16 tokens ──" in out
    assert "tool · calculator\n" in out, "the tool's result is in the new prompt"


def test_a_call_that_ended_the_conversation_shows_its_result(run_dir: Path, cli: CommandLine) -> None:
    one = calculation()
    ended = replace(
        one, rows=(first_row(),), turns=one.turns[:1], messages=one.messages[:3], finish_reason=FinishReason.TOOL_CALL
    )
    write(run_dir, trajectories=[ended], scores=[Score(1.0)])
    out = cli("show", 42).out
    assert "calls 1\n42\n\nreward       1\n" in plain(out)
    assert "finish       tool_call · 14 tokens in 1 turn" in out


def test_examples_in_the_prompt_are_not_turns(run_dir: Path, cli: CommandLine) -> None:
    few = ({"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, *prompt().messages)
    write(run_dir, trajectories=group()[1:], scores=SCORES[1:], prompt=replace(prompt(), messages=few))
    out = plain(cli("show", 42).out)
    assert "user · prompt of 11 tokens\n1+1?\n\nassistant\n2\n\nsystem\n" in out
    assert "assistant · turn 0 · 9 tokens" in out


def test_turns_without_a_message_are_shown_in_order(run_dir: Path, cli: CommandLine) -> None:
    """An agent may rewrite its history."""
    rewritten = (*prompt().messages, {"role": "user", "content": "Shorter, please."}, calculation().messages[-1])
    write(run_dir, trajectories=[replace(calculation(), messages=rewritten)], scores=SCORES[:1])
    out = plain(cli("show", 42).out)
    assert out.index("Shorter") < out.index("turn 0") < out.index("calculate⟨v4⟩(6*7)") < out.index("turn 1")


def test_messages_may_contain_more_than_text(run_dir: Path, cli: CommandLine) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 500}}
    messages = ({"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]},)
    write(run_dir, prompt=replace(prompt(), messages=messages, ground_truth={"is": ["a", 1]}))
    out = cli("show", 42, "-t", 1).out
    assert 'What is this?\n[{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA' in out
    assert "A" * 100 not in out
    assert 'ground truth {"is": ["a", 1]}' in out


def test_control_characters_in_sampled_text_do_not_reach_the_terminal(run_dir: Path, cli: CommandLine) -> None:
    evil = "\x1b]0;title\x07\x9b2J[bold]no markup[/bold]\r\udc80"
    turn = Turn(ids(evil), np.zeros(len(evil), np.float32), (Span(0, 1),), FinishReason.STOP)
    row = TokenRow(ids("x"), turn.response_ids, np.ones(len(evil), np.bool_), turn.rollout_log_probs, turn.spans)
    made = Trajectory((row,), (TurnInfo(0, 0, len(evil), FinishReason.STOP),), FinishReason.STOP)
    named = {"role": "\x1b[2Jrole", "name": "\x1b[2J", "content": evil}
    write(run_dir, trajectories=[made], scores=SCORES[:1], prompt=Prompt(ids("x"), (named,), evil, evil))
    out = cli("show", 42).out
    assert not set(out) & {"\x1b", "\x07", "\x9b", "\r", "\udc80"}
    assert "␛]0;title␇�2J[bold]no markup[/bold]␍�" in out


def test_a_replayed_sample_names_its_record(run_dir: Path, cli: CommandLine) -> None:
    write(run_dir, replay=Replay(7, True, ((Span(0, 1),), (Span(0, 4),))))
    out = cli("show", 42).out
    assert "14 tokens · v3→v4 · recorded v1 · " in out
    assert "replayed     from the record of step 7, recorded for another prompt" in out


def test_the_training_step_of_a_sample_is_shown(run_dir: Path, cli: CommandLine) -> None:
    write(run_dir)
    lines = [
        {"lineage": 0, "step": 7, "version": 4, "samples": ["sample_0_42", "sample_0_43"]},
        {"lineage": 0, "step": 9, "version": 5, "samples": ["sample_0_44"]},
    ]
    trained = run_dir / "trained.jsonl"
    trained.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "then         trained in step 7, which began from v4: staleness 1" in cli("show", 42).out
    again = [{"lineage": 1, "rewound_to_step": 6}, {"lineage": 1, "step": 8, "version": 6, "samples": ["sample_0_42"]}]
    trained.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *again]))
    assert "then         trained in step 8, which began from v6: staleness 3" in cli("show", 42).out
    trained.write_text("damaged\n")
    assert "then " not in cli("show", 42).out


# ------------------------------------------------------------------------------------------------ files


def test_the_dump_is_found_from_another_working_directory(
    run_dir: Path, cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative dump_dir is relative to the directory in which the run was started, above the run directory."""
    write(run_dir)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert plain(cli("show", run_dir, 42).out) == TABLE + CONVERSATION
    configure(run_dir, str(tmp_path / "dump"))
    cli("show", run_dir, 42)


def test_a_damaged_line_of_a_dump_is_reported_in_a_note(run_dir: Path, cli: CommandLine) -> None:
    path = write(run_dir)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:-200])
    out, err = cli("show", 42)
    assert plain(out) == CONVERSATION
    assert "line 2 of" in err and "was cut off" in err and "1 of the sample's 2 trajectories could be read" in err
    path.write_bytes(lines[0][:-200])
    out, err = cli("show", 42, code=BAD_CONFIG)
    assert out == "" and "there are no trajectories of sample 42 to show" in err and "was cut off" in err


def test_the_valid_sample_id_is_named_if_the_epoch_is_wrong(run_dir: Path, cli: CommandLine) -> None:
    write(run_dir)
    err = cli("show", "sample_3_42", code=BAD_CONFIG).err
    assert "the run has no sample_3_42: the sample with this feed index is sample_0_42" in err


def test_an_unreadable_dump_is_an_error(run_dir: Path, cli: CommandLine) -> None:
    path = write(run_dir)
    path.unlink()
    path.mkdir()
    assert "cannot be read: Is a directory" in cli("show", 42, code=BAD_CONFIG).err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("nothing", "42"), "there is no run 'nothing'"),
        (("sample_42",), "SAMPLE=sample_42: not a sample id"),
        (("0",), "SAMPLE=0: not a sample id"),
        (("a", "b", "c"), "expected [RUN] SAMPLE, got 3 arguments"),
        ((), "has no samples in kept/ to choose the newest of"),
        (("lowest",), "has no samples in kept/ to choose the lowest of"),
        (("nothing",), "'nothing' is neither a sample"),
        (("42", "--json", "--tokens"), "--json includes all tokens"),
        (("42", "-t", "-1"), "-1"),
    ],
)
@pytest.mark.usefixtures("run_dir")
def test_bad_arguments_are_errors(cli: CommandLine, arguments: tuple[str, ...], error: str) -> None:
    out, err = cli("show", *arguments, code=BAD_CONFIG)
    assert out == "" and error in err


# ------------------------------------------------------------------------------------------------ without a dump


@pytest.fixture
def undumped_run(run_dir: Path) -> Path:
    """A run without a dump and with five samples: the first is READY with its payload, the second was trained, the
    third was dropped as stale, the fourth failed before it was scored, and the fifth is running."""
    configure(run_dir, None)

    async def write_it() -> None:
        journal = Journal.open(run_dir / "journal.db", num_prompts=10, identity={})
        queue = LocalSampleQueue(QueueOptions(10, Pacing(5, 0.0)), journal=journal, state=journal.state)
        payloads = FilePayloads(run_dir, 1)
        found = (await queue.admit(5, timeout_s=1)).sample_ids
        for sample_id in found[1:3]:
            made = sample(sample_id.index)
            await queue.offer(sample_meta(made), await payloads.put(made))
        lease = await queue.lease(1, trainer_version=4, timeout_s=1)
        await queue.commit(lease.lease_id, found[1:2])
        await queue.drop(found[2], DropReason.STALE)
        await queue.drop(found[3], DropReason.FAILED)
        await queue.mark(1)
        await queue.cover(1, 1)
        made = sample(1)
        await queue.offer(sample_meta(made), await payloads.put(made))
        await end(journal)

    anyio.run(write_it)
    return run_dir


def test_the_payload_of_a_sample_without_a_dump_is_shown(undumped_run: Path, cli: CommandLine) -> None:
    out, err = cli("show", 1)
    assert "note: the sample is not in a dump; its turns and messages are derived" in err
    headers = [line for line in plain(out).splitlines() if " · " in line]
    assert headers == [
        "sample_0_1 · trajectory 0 of 2 · arithmetic",
        "prompt · prompt of 11 tokens",
        "assistant · turn 0 · 14 tokens · v3→v4 · reward +0.25",
        "input · 10 tokens",
        "assistant · turn 1 · 9 tokens · v4",
        "finish       stop · 23 tokens in 2 turns · v3–v4",
    ]
    assert "then         it became READY at " in out
    assert "reward       1.25   rule 1" in out
    dumped = cli("show", 1, "--json").json
    assert [one["trajectory"] for one in dumped] == [0, 1]
    assert dumped[0]["rows"][0]["response_mask"] == [[1, 14], [0, 10], [1, 9]]


def test_a_step_that_the_journal_has_undone_is_not_shown(undumped_run: Path, cli: CommandLine) -> None:
    """A launch that ends between the two writes has a rewind in its journal, and not in `trained.jsonl`."""
    line = {"lineage": 0, "step": 7, "version": 4, "samples": ["sample_0_1"]}
    (undumped_run / "trained.jsonl").write_text(json.dumps(line) + "\n")
    assert "then         it became READY at " in cli("show", 1).out


def test_a_payload_without_a_tokenizer_is_shown_as_ids(undumped_run: Path, cli: CommandLine) -> None:
    configure(undumped_run, None, model="nowhere/model")
    out, err = cli("show", 1, "-t", 1)
    assert "no tokenizer can be loaded from 'nowhere/model'" in err
    assert f"\n{' '.join(map(str, ids('It is 41.').tolist()))}\n" in out


def test_code_that_a_run_directory_names_is_not_run(undumped_run: Path, cli: CommandLine, tmp_path: Path) -> None:
    """The tokenizer of the run is a class of its own, and its config.yaml says that its code may be trusted."""
    ran, model = tmp_path / "ran", undumped_run / "model"
    model.mkdir()
    (model / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["hostile.Tokenizer", null]}}')
    (model / "hostile.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Tokenizer: pass\n")
    (undumped_run / "config.yaml").write_text(
        yaml.safe_dump({"model": {"path": str(model), "trust_remote_code": True}, "rollout": {}})
    )
    out, err = cli("show", 1, "-t", 1)
    assert "no tokenizer can be loaded" in err
    assert f"\n{' '.join(map(str, ids('It is 41.').tolist()))}\n" in out
    assert not ran.exists()


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (2, "sample 2 to show in 20260102-030405: it was trained on at "),
        (3, "it was dropped (stale) at "),
        (4, "it was dropped (failed) at "),
        (5, "its generation began at "),
        (6, "its generation never began; the newest sample is 5"),
    ],
)
@pytest.mark.usefixtures("undumped_run")
def test_show_reports_why_a_sample_has_no_trajectories(cli: CommandLine, index: int, reason: str) -> None:
    out, err = cli("show", index, code=BAD_CONFIG)
    assert out == "" and reason in err
    assert (
        ("the sample's payload is not (or no longer) in the run" in err)
        == ("Launch with rollout.dump_dir=DIR" in err)
        == (index in (2, 3))
    )
    assert ("None of its trajectories was scored" in err) == (index in (4, 5))


def test_show_reports_samples_that_the_journal_has_forgotten(
    run_dir: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(run_dir, None)
    for name in ("SNAPSHOT_EVERY_BYTES", "BYTES_PER_ENTRY"):
        monkeypatch.setattr(f"asyncrl.queue.journal.{name}", 0)

    async def write_it() -> None:
        journal = Journal.open(run_dir / "journal.db", num_prompts=10, identity={})
        queue = LocalSampleQueue(QueueOptions(10, Pacing(5, 0.0)), journal=journal, state=journal.state)
        trained, dropped, _ = await admit(queue, 3)
        await queue.offer(meta(trained), payload(trained))
        await train(queue, 1)
        await queue.drop(dropped, DropReason.FAILED)
        await queue.mark(1)
        await queue.cover(1, 1)
        await queue.set_applied_version(1)
        await end(journal)

    anyio.run(write_it)
    line = {"lineage": 0, "step": 7, "version": 0, "samples": ["sample_0_1"]}
    (run_dir / "trained.jsonl").write_text(json.dumps(line) + "\n")
    assert "sample 1 to show in 20260102-030405: it was trained on in step 7" in cli("show", 1, code=BAD_CONFIG).err
    assert "it was dropped before the oldest checkpoint that was kept" in cli("show", 2, code=BAD_CONFIG).err
    assert "its generation began at an unknown time and is not finished" in cli("show", 3, code=BAD_CONFIG).err
    assert "its generation never began; the newest sample is 3" in cli("show", 4, code=BAD_CONFIG).err


def test_the_record_of_a_sample_is_suggested(undumped_run: Path, cli: CommandLine, tmp_path: Path) -> None:
    role = {"enable": True, "dump_dir": str(tmp_path / "skip")}
    configure(undumped_run, None, project_name="p", experiment_name="e", skip={"async_rollout": role})
    record = tmp_path / "skip" / "p" / "e" / "async_rollout" / "2"
    assert "Launch with rollout.dump_dir=DIR" in cli("show", 2, code=BAD_CONFIG).err
    record.mkdir(parents=True)
    assert f"asyncrl skip show {record}" in cli("show", 2, code=BAD_CONFIG).err


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda run_dir: (run_dir / "samples" / PAYLOAD).unlink(), f"{PAYLOAD} cannot be read: No such file"),
        (lambda run_dir: (run_dir / "samples" / PAYLOAD).write_bytes(b"x" * 999), f"{PAYLOAD} is damaged: "),
        (lambda run_dir: (run_dir / "journal.db").write_bytes(b"no database, but long enough" * 99), "is damaged"),
        (lambda run_dir: (run_dir / "journal.db").unlink(), "the run has no journal"),
    ],
)
def test_damage_is_reported(undumped_run: Path, cli: CommandLine, damage: Callable[[Path], Any], error: str) -> None:
    damage(undumped_run)
    out, err = cli("show", 1, code=BAD_CONFIG)
    assert out == "" and error in err


def test_an_unreadable_configuration_is_reported_in_a_note(undumped_run: Path, cli: CommandLine) -> None:
    (undumped_run / "config.yaml").write_text("{")
    assert "names no model.path, so tokens cannot be decoded" in cli("show", 1).err


# ------------------------------------------------------------------------------------------------ kept samples


def keep(run_dir: Path, index: int, rewards: Sequence[float] = (1.25, 0.0), *, at: float = 0.5) -> None:
    """Keep a sample as the Rollouter does."""
    keeper = SampleKeeper(run_dir, 200, lambda: at)
    scores = [replace(score, reward=reward) for score, reward in zip(SCORES, rewards, strict=True)]

    async def write() -> None:
        async with keeper.running():
            await keeper.write(sample(index), prompt(), group(), scores)

    anyio.run(write)


@pytest.fixture
def characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode tokens as the characters that they are in these tests."""
    monkeypatch.setattr(ConfiguredRun, "decode", lambda self: (decode, []))


@pytest.mark.usefixtures("characters")
def test_a_kept_sample_is_shown_like_a_dumped_one(run_dir: Path, cli: CommandLine) -> None:
    configure(run_dir, None)
    keep(run_dir, 42)
    kept = cli("show", 42)
    assert kept.err == "" and kept == cli("show")
    configure(run_dir)
    write(run_dir)
    assert kept.out == cli("show", 42).out


@pytest.mark.usefixtures("characters")
def test_samples_are_chosen_by_reward(run_dir: Path, cli: CommandLine) -> None:
    configure(run_dir, None)
    for index, rewards in enumerate([(3.0, 2.0), (0.5, -1.0), (1.0, 9.0), (2.0, 2.0)], start=1):
        keep(run_dir, index, rewards, at=float(index))
    heads = {choice: cli("show", choice).out.split("\n\n")[1].splitlines()[0] for choice in CHOICES}
    assert heads == {
        "newest": "sample_0_4 · trajectory 0 of 2 · arithmetic",
        "lowest": "sample_0_2 · trajectory 1 of 2 · arithmetic",
        "highest": "sample_0_3 · trajectory 1 of 2 · arithmetic",
        "oddest": "sample_0_3 · trajectory 0 of 2 · arithmetic",
    }
    assert "trajectory 0 of 2" in cli("show", "lowest", "-t", 0).out
    assert [one["reward"] for one in cli("show", "quickstart", "lowest", "--json").json] == [0.5, -1.0]


@pytest.mark.usefixtures("characters")
def test_without_a_run_the_newest_one_with_samples_is_shown(run_dir: Path, cli: CommandLine) -> None:
    configure(run_dir, None)
    keep(run_dir, 7)
    newer = run_dir.with_name("20270102-030405")
    newer.mkdir()
    os.utime(run_dir / "config.yaml", (1, 1))
    (newer / "config.yaml").write_text("")
    assert "sample_0_7" in cli("show").out and "sample_0_7" in cli("show", 7).out
    assert cli("show", "quickstart", code=BAD_CONFIG).err.startswith("error: 20270102-030405 has no samples")
    assert "sample_0_7" in cli("show", run_dir).out
    keep(newer, 8)
    assert "sample_0_8" in cli("show").out


@pytest.mark.usefixtures("characters")
def test_a_damaged_kept_sample_is_noted(run_dir: Path, cli: CommandLine) -> None:
    configure(run_dir, None)
    keep(run_dir, 7)
    path = run_dir / "kept" / "sample_0_7.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "kept/sample_0_7 cannot be read" in cli("show", 7, code=BAD_CONFIG).err
