"""Runs with a calculator tool, as a user launches them: exact tokens, complete events, and a policy that learns."""

from __future__ import annotations

import gzip
import html
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.assets import resolve
from asyncrl.profiling.files import event_files
from tests.e2e.launches import LaunchedRun, balanced, start

DRAFTS = "rollout.engine_kwargs={speculative_config: {method: ngram, num_speculative_tokens: 4}}"
SHORT = ("data.max_val_samples=16", "logging.console=plain", "rollout.multi_turn.tokenization_sanity_check_mode=strict")


def finished(run: LaunchedRun, *, timeout_s: float = 240.0) -> dict[str, Any]:
    assert run.wait(timeout_s) == 0, run.output()
    summary = run.summary()
    assert summary["status"] == "completed" and summary["error"] is None
    assert balanced(summary["samples"])
    assert run.survivors() == []
    return summary


def dumped(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(directory.glob("*.jsonl")) for line in file.read_text().splitlines()]


def tokens(row: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of the response, and a mask of the sampled ones."""
    runs = row["response_mask"]
    mask = np.concatenate([np.full(length, bool(value)) for value, length in runs])
    return np.array(row["response_ids"]), mask


@pytest.mark.timeout(300)
def test_conversations_are_trained_with_exact_tokens_and_survive_a_killed_rollouter(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from rollouter.agent.chat import ChatTokenizer

    dump = tmp_path / "dump"
    run = start(
        tmp_path,
        *(*SHORT, "trainer.total_training_steps=6", f"rollout.dump_dir={dump}", "profiler.level=full"),
        recipe="calculator",
    )
    run.wait_for("step 2/6")
    run.kill("rollouter")
    summary = finished(run)
    assert summary["samples"]["trained"] == 6 * 16

    trajectories = dumped(dump)
    assert {one["sample_id"] for one in trajectories} >= {f"sample_0_{index}" for index in range(1, 97)}
    tokenizer = AutoTokenizer.from_pretrained(resolve("asyncrl://calculator"))
    chat = ChatTokenizer(tokenizer)
    called = 0
    for one in trajectories:
        if one["finish_reason"] == "length":
            continue  # its last message is cut
        (row,) = one["rows"]
        ids, mask = tokens(row)
        # The row equals the template's rendering of the messages, and the mask covers exactly the tokens of the turns.
        assert [*row["prompt_ids"], *ids] == chat.retokenized(one["messages"])[: len(row["prompt_ids"]) + len(ids)]
        assert mask.sum() == sum(turn["num_tokens"] for turn in one["turns"])
        tool_texts = [message["content"] for message in one["messages"] if message["role"] == "tool"]
        unsampled = tokenizer.decode(ids[~mask].tolist()) if (~mask).any() else ""
        assert all(text in unsampled for text in tool_texts)
        assert len(row["rollout_log_probs"]) == len(ids)
        assert all(value <= 0 for value in np.array(row["rollout_log_probs"])[mask])
        assert not np.array(row["rollout_log_probs"])[~mask].any()
        first, count = one["turns"][-1]["first_token"], one["turns"][-1]["num_tokens"]
        answer = tokenizer.decode(ids[first : first + count].tolist(), skip_special_tokens=True)
        assert one["reward"] == float(answer.rpartition("#")[2].strip() == one["ground_truth"])
        called += len(one["turns"]) > 1
    assert 0.1 < called / len(trajectories) < 0.9
    last = run.steps()[-1]
    counts = Counter({name: last[name] for name in last if name.startswith("rollouter/tool_calls/")})
    assert last["rollouter/tool_calls"] == sum(counts.values()) > 0
    assert counts.most_common(1)[0][0] == "rollouter/tool_calls/ok"
    assert last["rollouter/turns"] > last["rollouter/tool_calls"]
    assert 1 < last["reward/extra/num_turns"] < 3

    shown = subprocess.run(
        [sys.executable, "-m", "asyncrl", "show", str(run.run_dir), "sample_0_7", "--no-color"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "assistant" in shown.stdout and "ground truth" in shown.stdout
    check_events(run)
    check_report(run)


def check_events(run: LaunchedRun) -> None:
    """Check which parts recorded events, and that the events agree, in a run whose Rollouter was killed."""
    files = {path: path.read_text().splitlines() for path in event_files(run.run_dir)}
    parts = {path.stem.split("-")[0] for path in files}
    assert parts == {"driver", "queue", "replica", "rank", "rollouter", "trainer"}
    events = [json.loads(line) for lines in files.values() for line in lines]
    named: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        named.setdefault(event["event"], []).append(event)
    # Events of replicas that Ray had accepted for the killed Rollouter are lost, and its successor counts them.
    reporting = {
        path.stem.split("-")[0] for path, lines in files.items() if any('"profiler.dropped"' in line for line in lines)
    }
    assert reporting <= {"rollouter"}
    assert run.steps()[-1]["profiler/dropped"] <= sum(event["events"] for event in named.get("profiler.dropped", ()))
    trained = Counter((event["sample"], event["step"]) for event in named["sample.trained"])
    steps = {line["step"]: line["samples"] for line in map(json.loads, (run.run_dir / "trained.jsonl").open())}
    assert trained == Counter((sample, step) for step, samples in steps.items() for sample in samples)
    assert [event["step"] for event in named["step"]] == list(range(1, 7))
    assert {event["part"] for event in named["part.restarted"]} == {"rollouter"}
    for request in named["request"]:
        phases = sum(request.get(f"{phase}_s", 0.0) for phase in ("gate", "queued", "prefill", "decode", "paused"))
        assert 0 < phases <= request["duration_s"] + 1e-3
    # Events that the killed Rollouter had received and not written are lost; the others belong to real conversations.
    called = {(event["sample"], event["trajectory"], event["turn"]) for event in named["tool.execute"]}
    asked = {(event["sample"], event["trajectory"], event["turn"]) for event in named["request"]}
    assert len(called & asked) > 0.5 * len(called) > 0
    assert {trajectory for _, trajectory, _ in called} == set(range(8)) and {turn for *_, turn in called} <= {0, 1, 2}


def check_report(run: LaunchedRun) -> None:
    """Check the report and the trace of the run."""
    command = [sys.executable, "-m", "asyncrl"]
    subprocess.run([*command, "report", str(run.run_dir)], check=True, timeout=120, stdout=subprocess.DEVNULL)
    directory = run.run_dir / "report"
    found = json.loads((directory / "report.json").read_text())
    assert found["run"]["steps"] == 6 and found["run"]["samples_trained"] == 96 and found["run"]["torn_lines"] == 0
    unrecorded = found["run"]["samples_unrecorded"]  # delivered before the kill, but their events were not written
    assert unrecorded <= 16 and found["turns"]["trajectories"] >= (96 - unrecorded) * 8
    assert any("No event shows how" in note for note in found["notes"]) == bool(unrecorded)
    page = html.unescape((directory / "index.html").read_text())
    for figure in found["figures"]:
        assert (directory / figure["png"]).stat().st_size > 5000 and figure["title"] in page, figure
    trace = run.run_dir / "trace.json.gz"
    subprocess.run(
        [*command, "timeline", str(run.run_dir), "--trace", str(trace)],
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
    )
    with gzip.open(trace) as file:
        bars = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    assert len(bars) > 1000 and all(bar["dur"] >= 0 for bar in bars)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_model_learns_to_call_the_calculator(tmp_path: Path) -> None:
    run = start(tmp_path, "logging.console=plain", recipe="calculator")
    finished(run, timeout_s=560)
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    validations = [line for line in lines if line["kind"] == "validation"]
    first, last = validations[0], validations[-1]
    assert first["validation/tool_call_share"] < 0.5 and last["validation/tool_call_share"] > 0.9
    assert last["validation/reward/mean"] - first["validation/reward/mean"] > 0.25


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_synchronous_run_may_over_sample_and_its_engine_may_draft_tokens(tmp_path: Path) -> None:
    """Tokens that the engine accepts from drafts (speculative decoding) have the log-probs of the policy.

    tests/rollouter/test_over_sampling.py has the other ways to treat unfinished samples.
    """
    run = start(
        tmp_path, *SHORT, "data.val_files=[]", "trainer.save_last=false",
        "trainer.total_training_steps=5", "rollout.over_sample.samples=0.25",
        "rollout.over_sample.unfinished=drop", "rollout.over_sample.trajectories=1",
        "rollout.max_concurrent_samples=6", DRAFTS, mode="sync", recipe="calculator",
    )  # fmt: skip
    summary = finished(run)
    assert max(step["rollout/mismatch_kl_age_0"] for step in run.steps()) < 1e-9
    samples = summary["samples"]
    assert samples["trained"] == 5 * 16
    assert samples["fed"] == samples["trained"] + sum(samples["dropped"].values())
    assert samples["dropped"]["surplus"] > 0
