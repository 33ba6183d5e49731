"""Events of the Trainer: each is recorded once, at its step, and nested by time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest

from asyncrl.core.failures import DivergenceError
from asyncrl.core.types import Sample, SampleId, Span
from asyncrl.core.waits import WaitBoard
from asyncrl.observe.metrics.registry import describe
from asyncrl.profiling import ProfilerSettings, profile
from asyncrl.profiling.catalog import EVENTS, FIELDS, SECTIONS
from asyncrl.storage.checkpoint_manifest import Progress
from tests.fakes.inline_group import InlineGroup
from tests.fakes.losses import Likelihood
from tests.fakes.token_batch import make_batch
from tests.fakes.trainer_model import VOCAB
from tests.fakes.trainer_parts import CopyingPublisher, feed, make_sample
from tests.fakes.trainer_rig import RULES, TrainerRig
from tests.trainer.conftest import Recorded
from trainer.engines.base import EngineSpec
from trainer.ranks_turn import RanksTurn
from trainer.workers.rank import Rank
from trainer.workers.tracing import RankProfiling, set_up_profiling

BATCH = make_batch([3, 5, 1, 4, 2], [4, 2, 6, 1, 5], vocab=VOCAB)
CLOCKS_S = 2e-3
"""Tolerance for events that were timed by the wall clock."""


def inside(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> bool:
    begins = inner["timestamp"] >= outer["timestamp"] - CLOCKS_S
    return begins and inner["timestamp"] + inner["duration_s"] <= outer["timestamp"] + outer["duration_s"] + CLOCKS_S


def check_fields(events: list[dict[str, Any]]) -> None:
    """Check that the events have only fields that docs/events.md lists."""
    common = {"timestamp", "event", "duration_s", "error", "part", "file_step", *FIELDS}
    for event in events:
        assert event.keys() <= common | EVENTS[event["event"]].extras.keys(), event


# ------------------------------------------------------------------------------------------------ the loop


async def test_a_run_records_all_events_of_its_steps(recorded: Recorded) -> None:
    """The run has two leases of two steps each, one version per lease, a critic, and a checkpoint at the end."""
    rig = TrainerRig(total_steps=4, samples_per_lease=4, samples_per_version=4, with_critic=True)
    records = await rig.run(8)
    events = recorded.all()
    check_fields(events)
    assert {event["part"] for event in events} == {"trainer"}
    assert all(event["file_step"] == event["step"] for event in events)
    assert Counter((event["event"], event["step"]) for event in events) == {
        **{(name, step): 1 for name in ("step", "trainer.update", "trainer.commit") for step in (1, 2, 3, 4)},
        **{(name, step): 1 for name in ("trainer.wait_samples", "trainer.fetch") for step in (1, 3)},
        **{(name, step): 1 for name in ("trainer.experience", "trainer.critic") for step in (1, 3)},
        **{("trainer.publish", step): 1 for step in (2, 4)},
        **{("sample.leased", step): 4 for step in (1, 3)},
        **{("sample.trained", step): 2 for step in (1, 2, 3, 4)},
        ("trainer.checkpoint", 4): 1,
    }
    steps = {event["step"]: event for event in recorded.all("step")}
    assert {step: (event["version"], event["samples"]) for step, event in steps.items()} == {
        1: (0, 2), 2: (0, 2), 3: (1, 2), 4: (1, 2),
    }  # fmt: skip
    for record in records:
        event = steps[record.step]
        assert event["reward"] == record.metrics["reward/mean"]
        assert event["tokens"] == record.metrics["tokens/trained"]
        assert event["lineage"] == 0
    assert [event["version"] for event in recorded.all("trainer.publish")] == [1, 2]
    for event in events:
        if event["event"] != "trainer.checkpoint":
            assert inside(event, steps[event["step"]]), event
    for step in range(1, 5):
        assert inside(recorded.one("trainer.commit", step=step), recorded.one("trainer.update", step=step))
    for step in (1, 3):
        assert inside(recorded.one("trainer.fetch", step=step), recorded.one("trainer.wait_samples", step=step))
    # Each step begins when the previous one ends.
    ends = [event["timestamp"] + event["duration_s"] for event in steps.values()]
    assert all(end <= steps[step]["timestamp"] + CLOCKS_S for step, end in enumerate(ends[:-1], start=2))


async def test_every_sample_has_one_event(recorded: Recorded) -> None:
    rig = TrainerRig(Progress(step=2, version=2, published_step=2, trained_samples=4), total_steps=3)

    def make(sample_id: SampleId) -> Sample:
        return make_sample(sample_id, (1.0, 0.0, 0.5), spans=[Span(0, 0), Span(2, sample_id.index % 2)], length=6)

    sample_ids = await feed(rig.queue, 2, make)
    await rig.run()
    leased, trained = recorded.all("sample.leased"), recorded.all("sample.trained")
    assert [event["sample"] for event in leased] == [str(sample_id) for sample_id in sample_ids]
    assert [(event["staleness"], event["version"], event["step"]) for event in leased] == [(2, 2, 3)] * 2
    for sample_id, event in zip(sample_ids, trained, strict=True):
        assert event["sample"] == str(sample_id)
        recorded_fields = event["staleness"], event["versions"], event["reward"], event["tokens"]
        assert recorded_fields == (2, sample_id.index % 2, 0.5, 18)
    assert {event["duration_s"] for event in leased + trained} == {0.0}


async def test_samples_of_later_passes_are_trained_once(recorded: Recorded) -> None:
    rig = TrainerRig(total_steps=4, ppo_epochs=2)
    await rig.run(4)
    assert Counter(event["sample"] for event in recorded.all("sample.trained")) == {
        f"sample_0_{index}": 1 for index in range(1, 5)
    }
    assert [event["samples"] for event in recorded.all("step")] == [2, 0, 2, 0]
    assert [event["samples"] for event in recorded.all("trainer.commit")] == [2, 0, 2, 0]


async def test_drops_are_events_with_their_reason(recorded: Recorded) -> None:
    rig = TrainerRig(total_steps=1, rules=replace(RULES, group_filter="equal_rewards"), total_samples=4)
    rewards = {1: (1.0, 1.0)}

    def reject(batch: Any) -> None:
        batch["loss_mask"][batch["groups"] == 0] = False

    rig.experience.change = reject
    await rig.run(3, lambda sample_id: make_sample(sample_id, rewards.get(sample_id.index, (0.0, 1.0))))
    dropped = recorded.all("sample.dropped")
    check_fields(dropped)
    assert [(event["sample"], event["reason"], event["tokens"]) for event in dropped] == [
        ("sample_0_1", "filtered", 8), ("sample_0_2", "filtered", 8),
    ]  # fmt: skip
    assert [event["sample"] for event in recorded.all("sample.leased")] == ["sample_0_1", "sample_0_2", "sample_0_3"]
    assert [event["sample"] for event in recorded.all("sample.trained")] == ["sample_0_3"]


async def test_the_wait_for_samples_is_inside_its_step(recorded: Recorded) -> None:
    rig = TrainerRig(total_steps=1, call_s=1000.0)
    waiting = anyio.Event()
    lease = rig.queue.lease

    async def late(*args: Any, **kwargs: Any) -> Any:
        waiting.set()
        return await lease(*args, **kwargs)

    rig.queue.lease = late  # type: ignore[method-assign]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.run)
        await waiting.wait()
        await feed(rig.queue, 2)
    step, waited = recorded.one("step"), recorded.one("trainer.wait_samples")
    assert inside(waited, step)
    assert waited["samples"] == 2
    assert waited["timestamp"] - step["timestamp"] < 1.0


async def test_a_failed_step_is_raised_and_not_recorded_as_a_step(recorded: Recorded) -> None:
    rig = TrainerRig()

    def diverge(step: int) -> None:
        raise DivergenceError("loss NaN")

    rig.actor.on_step = diverge
    with pytest.raises(DivergenceError):
        await rig.run(2)
    assert recorded.one("trainer.update")["error"] == "DivergenceError"
    assert recorded.all("step", "sample.trained", "trainer.publish") == []


async def test_a_run_without_events_works_and_writes_no_files(tmp_path: Path) -> None:
    profile.configure("trainer", ProfilerSettings("off", tmp_path / "events"))
    rig = TrainerRig()
    records = await rig.run(8)
    assert len(records) == 4
    assert profile.status() == {"events": 0, "dropped": 0, "own_dropped": 0, "unsent": 0}
    assert not (tmp_path / "events").exists()
    profile.configure("", ProfilerSettings())


async def test_a_record_has_the_times_of_commit_and_publication() -> None:
    rig = TrainerRig(total_steps=2, samples_per_lease=4, samples_per_version=4)
    put = rig.trained.append

    async def slow(*args: Any) -> None:
        rig.clock.now_s += 2.0
        await put(*args)

    rig.trained.append = slow  # type: ignore[method-assign]
    first, second = await rig.run(4)
    assert first.metrics["timing/commit_s"] == second.metrics["timing/commit_s"] == 2.0
    assert first.metrics["timing/update_s"] == 2.0
    assert first.metrics["timing/publish_s"] == 0.0
    assert "timing/gather_s" not in first.metrics
    assert (second.metrics["timing/gather_s"], second.metrics["timing/put_s"]) == (0.25, 0.5)
    for name in second.metrics:
        describe(name)


# ------------------------------------------------------------------------------------------------ ranks


async def run_some_calls(spec: EngineSpec, **options: Any) -> None:
    group = await InlineGroup.start(spec, publisher=CopyingPublisher(), **options)
    await group.plan(10)
    await group.set_loss_fn(Likelihood())
    profile.set_position(step=1, version=0)
    await group.infer_batch(BATCH)
    await group.train_batch(BATCH)
    await group.publish(1, 1, validate=False)
    profile.set_position(step=2, version=1)
    await group.forward_backward(BATCH)
    await group.optim_step()
    await group.close()


async def test_calls_to_a_rank_are_recorded_as_events(recorded: Recorded, spec: EngineSpec) -> None:
    await run_some_calls(spec)
    events = recorded.all()
    check_fields(events)
    assert {event["part"] for event in events} == {"trainer"}, "an inline rank records in the Trainer's process"
    assert all((event["role"], event["rank"]) == ("actor", 0) for event in events)
    calls = [(event.get("step"), event["method"]) for event in recorded.all("rank.call")]
    assert calls == [
        (None, "plan"), (None, "set_loss_fn"), (1, "infer_batch"), (1, "train_batch"),
        (2, "forward_backward"), (2, "optim_step"),
    ]  # fmt: skip
    parts: dict[str, list[str]] = {}
    inner: list[dict[str, Any]] = []
    for event in recorded.written():  # a call ends after the events inside it
        if event["event"] in ("rank.forward", "rank.backward", "rank.optimizer"):
            inner.append(event)
        elif event["event"] == "rank.call":
            parts[event["method"]] = [part["event"] for part in inner]
            assert all(part["duration_s"] > 0 and inside(part, event) for part in inner)
            assert sum(part["duration_s"] for part in inner) <= event["duration_s"] + CLOCKS_S
            inner = []
    assert parts == {
        "plan": [],
        "set_loss_fn": [],
        "infer_batch": ["rank.forward"],
        "train_batch": ["rank.forward", "rank.backward", "rank.optimizer"],
        "forward_backward": ["rank.forward", "rank.backward"],
        "optim_step": ["rank.optimizer"],
    }
    gathered, puts = recorded.one("sync.gather"), recorded.all("sync.put")
    assert gathered["version"] == 1
    assert len(puts) > 1
    for put in puts:
        assert (put["version"], put["step"]) == (1, 1)
        assert put["bytes"] > 0
        assert inside(put, gathered)


async def test_every_documented_event_of_trainer_and_ranks_is_recorded(
    recorded: Recorded, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = TrainerRig(total_steps=1, with_critic=True)
    await rig.run(2)
    await run_some_calls(spec)
    turn = RanksTurn(AsyncMock(), WaitBoard(), offload_s=1.0)
    await turn.begin()
    await turn.end()
    monkeypatch.setattr("trainer.workers.rank.gpu_memory", lambda: (30, 80))
    await Rank().health()
    expected = {info.name for title in ("Trainer", "Ranks") for info in SECTIONS[title]}
    assert {event["event"] for event in recorded.all()} == expected


async def test_the_gpu_is_synchronized_only_if_configured(
    spec: EngineSpec, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[None] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda *args: waits.append(None))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    set_up_profiling(RankProfiling(), may_have_gpu=True)
    await run_some_calls(spec, profiling=RankProfiling(synchronize=True))  # on CPU
    assert waits == []
    before = len(recorded.all("rank.call", "rank.optimizer", "sync.gather"))
    set_up_profiling(RankProfiling(synchronize=True), may_have_gpu=True)
    await run_some_calls(spec)
    # It is synchronized at both ends of each span and three times for each trained micro-batch.
    assert len(waits) >= 2 * before + 6

    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.synchronize", fail)
    await run_some_calls(spec)
