"""Events of the Rollouter: each sample records all its events from permit to queue under its own id."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.config.sections.rollout import OverSampleConfig
from asyncrl.config.sections.skip import SkipConfig
from asyncrl.config.sections.trainer import TrainerConfig
from asyncrl.core.failures import DataError, InfraError, UserCodeError
from asyncrl.core.ports import Accepted, ApplyReport, GenerateRequest, GenerationEvent, Lease, Publication, TurnFinished
from asyncrl.core.staleness import Pacing
from asyncrl.core.trajectory import SampleRequest, Trajectory
from asyncrl.core.types import FinishReason, Prompt, Sample, SampleId, Span, Turn
from asyncrl.observe.kept_samples import to_dumped
from asyncrl.profiling import Profiler, ProfilerSettings, profile
from asyncrl.profiling.files import event_files
from asyncrl.queue.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.storage.array_bytes import decode, encode
from asyncrl.storage.sample_bytes import PackedBlob, pack, to_blob, unpack
from asyncrl.storage.trajectory_files import find
from rollouter.group import GroupGeneration
from rollouter.loading import RolloutTask
from rollouter.requests import parse_request_id
from rollouter.rollouter import Rollouter
from rollouter.serving import client
from rollouter.serving.client import Delta, EventBatch
from rollouter.serving.replica import event_forwarding
from rollouter.serving.replica.event_forwarding import FORWARD_EVERY_S, EventForwarder
from rollouter.trajectory_dump import TrajectoryDump
from rollouter.weight_updates import RolloutStart
from skip import SkipManager
from tests.fakes import agent_loop
from tests.fakes import gateway_agent as gateway
from tests.fakes.dispatcher import DispatcherRig, ScriptedConverser, group_request, leased_samples, sample_name
from tests.fakes.engine import FakeFleet, finished_turns
from tests.fakes.parts import (
    FakeFeed,
    FakeScorer,
    ListPrompts,
    ListSink,
    ManualClock,
    MemoryPayloads,
    MemoryTurns,
    make_prompt,
    until,
)

Event = dict[str, Any]
SLACK_S = 0.005
"""Tolerance of comparisons: times are rounded and come from two clocks."""
FIVE_TOKENS = [make_prompt(*range(1, 6)) for _ in range(20)]
ONE_TOKEN = Turn(np.array([5], dtype=np.int32), np.zeros(1, dtype=np.float32), (Span(0, 0),), FinishReason.STOP)
REQUEST = GenerateRequest("sample_0_1/4.2", np.array([1], dtype=np.int32), {"max_tokens": 3})


@pytest.fixture
def events_dir(tmp_path: Path) -> Path:
    profile.configure("rollouter", ProfilerSettings("full", tmp_path / "events"))
    return tmp_path


def written(tmp_path: Path) -> list[Event]:
    """Return all events, each with the name and folder of its file."""
    profile.flush()
    return [
        {**json.loads(line), "file_part": path.stem, "dir": path.parent.name}
        for path in event_files(tmp_path)
        for line in path.read_text().splitlines()
    ]


def of(events: Sequence[Event], name: str, **fields: Any) -> list[Event]:
    return [one for one in events if one["event"] == name and all(one.get(key) == fields[key] for key in fields)]


def the(events: Sequence[Event], name: str, **fields: Any) -> Event:
    (one,) = of(events, name, **fields)
    return one


def end(event: Event) -> float:
    return float(event["timestamp"] + event["duration_s"])


def assert_within(inner: Event, outer: Event) -> None:
    assert outer["timestamp"] - SLACK_S <= inner["timestamp"] and end(inner) <= end(outer) + SLACK_S, (inner, outer)


def mark(owner: str) -> None:
    """Record an event that names its owner, which tests compare with the owner that the context adds."""
    profile.note("loop.stall", part=owner)


class Replicas:
    """An `EngineFleet` of two replicas that answer in random order and report requests as a real replica does."""

    def __init__(self, text_of: Any, ids_of: Any) -> None:
        self._text_of, self._ids_of = text_of, ids_of
        self._random = random.Random(7)
        self.version = 0

    def generate(self, requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[GenerationEvent, None]:
        return client.generate(self._call, requests, session=session, max_attempts=3)

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        self.version = publication.version
        return [ApplyReport(f"r{k}", publication.version, 0.0, 0.1, 0.1, 0, True) for k in range(2)]

    async def _call(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[Accepted | EventBatch | list[Delta], None]:
        replica = f"r{self._random.randrange(2)}"
        yield Accepted(replica)
        for number, request in self._random.sample(list(enumerate(requests)), len(requests)):
            for _ in range(self._random.randrange(6)):
                await anyio.lowlevel.checkpoint()
            ids = self._ids_of(self._text_of(request))
            log_probs = np.full(len(ids), -0.5, dtype=np.float32)
            turn = Turn(np.asarray(ids, dtype=np.int32), log_probs, (Span(0, self.version),), FinishReason.STOP)
            yield [Delta(number, turn, True)]
        about = [{**parse_request_id(one.request_id)._asdict(), "request": one.request_id} for one in requests]
        yield EventBatch(replica, [{"timestamp": 1e9, "event": "request", "duration_s": 0.0, **one} for one in about])


def result(sample: Sample) -> list[Any]:
    """Return the values of a sample that training uses."""
    return [
        [
            value.tolist() if isinstance(value, np.ndarray) else value
            for value in map(row.__getattribute__, row.__slots__)
        ]
        for row in sample.rows
    ]


class ConversationRun:
    """A Rollouter with conversations of three turns: a call of `add`, an answer, a user reply, a last answer."""

    def __init__(self, *, n: int = 3, num_samples: int = 6, validate: bool = False) -> None:
        interactions = [{"class_name": agent_loop.PLAYER, "name": "player", "config": {"replies": ["1"]}}]
        self.rig = agent_loop.AgentRig(interactions=interactions)
        eos = self.rig.tokenizer.eos_token_id
        lines = ['[add {"x": 2}]', "3", "7"]
        config = self.rig.config
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"n": n})})
        self.fleet = Replicas(
            lambda request: lines[parse_request_id(request.request_id).turn or 0],
            lambda text: [*self.rig.ids(text), eos],
        )
        first = self.rig.prompt()
        prompts = [
            Prompt(first.prompt_ids, first.messages, ground_truth=f"sample_0_{index}")
            for index in range(1, num_samples + 1)
        ]
        self.num_samples = num_samples
        self.trained: dict[str, Any] = {}
        self.queue = LocalSampleQueue(QueueOptions(num_samples, Pacing(num_samples // 2, 0, num_samples)))
        self.feed = FakeFeed()
        self.random = random.Random(3)

        async def gate(prompt: Prompt) -> None:
            for _ in range(self.random.randrange(6)):
                await anyio.lowlevel.checkpoint()
            mark(prompt.ground_truth)

        self.rollouter = Rollouter(
            config,
            RolloutTask(
                ListPrompts(prompts),
                ListPrompts(prompts[:2]) if validate else None,
                FakeScorer(gate=gate, whole_group=False),
                decode=str,
                agent=self.rig.agent,
            ),
            queue=self.queue,
            payloads=MemoryPayloads(),
            turns=MemoryTurns(),
            feed=self.feed,
            fleet=self.fleet,
            sink=ListSink(),
            start=RolloutStart(validate),
        )

    async def go(self) -> None:
        """Train the samples of two versions."""
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(self.rollouter.run)
                for version in (1, 2):
                    lease: Lease = await self.queue.lease(
                        self.num_samples // 2, trainer_version=version - 1, timeout_s=10
                    )
                    ids = [entry.meta.sample_id for entry in lease.samples]
                    self.trained |= {str(entry.payload.sample_id): result(entry.payload) for entry in lease.samples}
                    await self.queue.commit(lease.lease_id, ids)
                    await self.feed.publish(version, step=version)
                await self.queue.close()


@pytest.fixture
def marking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every tool call record the trajectory to which it belongs."""
    agent_loop.Adder.made, agent_loop.Adder.released = [], []
    create, execute = agent_loop.Adder.create, agent_loop.Adder.execute

    def created(self: Any, context: Any, **kwargs: Any) -> list[Any]:
        state = create(self, context, **kwargs)
        owners[id(state)] = f"{context.sample_id}/{context.trajectory}"
        return state

    async def executed(self: Any, state: list[int], arguments: Any, **kwargs: Any) -> Any:
        await anyio.sleep(0.001)
        mark(owners[id(state)])
        return await execute(self, state, arguments, **kwargs)

    owners: dict[int, str] = {}
    monkeypatch.setattr(agent_loop.Adder, "create", created)
    monkeypatch.setattr(agent_loop.Adder, "execute", executed)


async def test_conversations_record_all_their_events(events_dir: Path, marking: None) -> None:
    run = ConversationRun()
    await run.go()
    events = written(events_dir)
    for index in range(1, run.num_samples + 1):
        own = [one for one in events if one.get("sample") == f"sample_0_{index}"]
        check_conversations(own, n=3)
    # The owner in each mark equals the owner that the context adds.
    marks = of(events, "loop.stall")
    assert sum("/" in one["part"] for one in marks) == run.num_samples * 3, "one mark from each tool"
    for one in marks:
        sample, _, trajectory = one["part"].partition("/")
        assert one["sample"] == sample
        assert not trajectory or trajectory == str(one["trajectory"])
        assert not trajectory or one["turn"] == 0, "the call belongs to the first turn"
    check_requests(events)
    assert {one["step"] for one in events if "step" in one} == {1, 2, 3}


def check_conversations(own: list[Event], n: int) -> None:
    """Check all events of one sample."""
    counts = Counter(one["event"] for one in own)
    assert n < counts.pop("loop.stall") <= 2 * n, "one from each tool, and one from each call of the reward"
    calls = {"turn.parse": 3, "turn.tokenize": 2, "tool.execute": 1, "user.step": 2, "reward.score": 1, "trajectory": 1}
    turns = {"generate.call": 3, "request": 3, "turnlog.write": 3}
    once = ["sample.admitted", "sample.generate", "sample.reward", "sample.payload", "sample.offer", "sample.ready"]
    assert counts == {**{name: n * each for name, each in {**calls, **turns}.items()}, **dict.fromkeys(once, 1)}
    admitted, generate, reward = the(own, "sample.admitted"), the(own, "sample.generate"), the(own, "sample.reward")
    payload, offer, ready = the(own, "sample.payload"), the(own, "sample.offer"), the(own, "sample.ready")
    chain = [admitted, generate, reward, payload, offer, ready]
    for before, after in pairwise(chain):
        assert end(before) <= after["timestamp"] + SLACK_S, (before, after)
    assert admitted["permit_wait_s"] >= 0 and payload["bytes"] > 0
    assert generate["trajectories"] == n and generate["tokens"] == sum(
        one["sampled_tokens"] for one in of(own, "trajectory")
    )
    assert ready["tokens"] == sum(one["tokens"] for one in of(own, "trajectory")) and ready["versions"] == 0
    assert ready["reward"] == pytest.approx(np.mean([one["reward"] for one in of(own, "reward.score")]))
    for number in range(n):
        one = the(own, "trajectory", trajectory=number)
        assert (one["turns"], one["calls"], one["finish_reason"]) == (3, 1, "stop")
        assert 0 < one["sampled_tokens"] < one["tokens"] and "error" not in one
        assert one["generate_s"] + one["tool_s"] + one["user_s"] <= one["duration_s"] + SLACK_S
        assert_within(one, generate)
        for name in ("generate.call", "turn.parse", "turnlog.write"):
            assert sorted(each["turn"] for each in of(own, name, trajectory=number)) == [0, 1, 2]
        for name in ("generate.call", "turn.parse", "turn.tokenize", "tool.execute", "user.step", "turnlog.write"):
            for each in of(own, name, trajectory=number):
                assert_within(each, one)
        tool = the(own, "tool.execute", trajectory=number)
        assert (tool["turn"], tool["tool"], tool["status"]) == (0, "add", "ok") and tool["wait_s"] >= 0
        assert one["tool_s"] >= tool["duration_s"] - SLACK_S
        assert [each["turn"] for each in of(own, "user.step", trajectory=number, interaction="player")] == [1, 2]
        score = the(own, "reward.score", trajectory=number)
        assert score["trajectories"] == 1 and end(one) <= score["timestamp"] + SLACK_S
        assert end(score) <= end(reward) + SLACK_S


def check_requests(events: list[Event]) -> None:
    """Check that events of replicas are in their own files and belong to a recorded call."""
    calls = {one["request"]: one for one in of(events, "generate.call")}
    requests = of(events, "request")
    assert {one["file_part"] for one in requests} == {"replica-r0", "replica-r1"}
    assert {one["request"] for one in requests} == calls.keys()
    for one in requests:
        call = calls[one["request"]]
        assert f"replica-{call['replica']}" == one["file_part"] and call["requests"] == 1
        assert all(one[field] == call[field] for field in ("sample", "trajectory", "turn"))
    assert all(one["file_part"] == "rollouter" for one in events if one["event"] != "request")


async def test_versions_and_validations_record_their_events(events_dir: Path, marking: None) -> None:
    run = ConversationRun(validate=True, n=2)
    await run.go()
    events = written(events_dir)
    assert [(one["version"], one["replicas"]) for one in of(events, "sync.apply")] == [(1, 2), (2, 2)]
    validation = the(events, "validation")
    assert (validation["version"], validation["prompts"], validation["step"]) == (0, 2, 1)
    answers = [one for one in of(events, "trajectory") if one["sample"].startswith("val_")]
    assert {one["sample"] for one in answers} == {"val_0_0", "val_0_1"}
    for one in answers:
        assert_within(one, validation)
    assert not [one for one in events if one["event"].startswith("sample.") and one["sample"].startswith("val_")]
    # Samples of version 1 belong to step 2.
    trained = [one for one in of(events, "trajectory") if one["sample"].startswith("sample_")]
    assert {(one["version"], one["step"], one["dir"]) for one in trained} == {
        (0, 1, "step_000001"), (1, 2, "step_000002"),
    }  # fmt: skip


async def test_the_event_of_a_single_turn_lasts_from_dispatch_to_completion(events_dir: Path) -> None:
    prompts = [make_prompt(index, 7, 9) for index in range(1, 9)]
    rig = DispatcherRig(permits=4, n=3, prompts=prompts, fleet=FakeFleet())
    async with rig.running():
        await rig.lease(4)
    events = written(events_dir)
    for index in range(1, 5):
        own = [one for one in events if one.get("sample") == sample_name(index)]
        generate = the(own, "sample.generate")
        assert generate["trajectories"] == 3 and generate["tokens"] == 9
        for number in range(3):
            one = the(own, "trajectory", trajectory=number)
            assert (one["turns"], one["calls"], one["tokens"], one["sampled_tokens"]) == (1, 0, 3, 3)
            assert one["finish_reason"] == "stop" and one["generate_s"] == pytest.approx(one["duration_s"], abs=1e-5)
            assert_within(one, generate)
        assert the(own, "turnlog.write")["tokens"] == 9, "turns that end together are written together"
        score = the(own, "reward.score")
        assert score["trajectories"] == 3 and score["reward"] == 3.0 and "trajectory" not in score
    permits = of(events, "rollout.permit")
    assert sum(one["granted"] for one in permits) == 4


def finishes(events_dir: Path) -> dict[int, tuple[str, int]]:
    """Return finish reason and number of tokens by trajectory."""
    events = of(written(events_dir), "trajectory")
    return {one["trajectory"]: (one["finish_reason"], one["tokens"]) for one in events}


async def test_the_baseline_has_a_separate_trajectory_event(events_dir: Path) -> None:
    await GroupGeneration(group_request(2, baseline={"max_tokens": 4}), fleet=FakeFleet()).run()
    assert finishes(events_dir) == {-1: ("stop", 2), 0: ("stop", 2), 1: ("stop", 2)}


async def test_logged_turns_record_no_second_event(events_dir: Path) -> None:
    turns: dict[str, Turn] = {}
    await GroupGeneration(group_request(2), fleet=FakeFleet(), turns=turns).run()
    await GroupGeneration(group_request(2), fleet=FakeFleet(), turns={"0": turns["0"]}).run()
    assert sorted(one["trajectory"] for one in of(written(events_dir), "trajectory")) == [0, 1, 1]


# ------------------------------------------------------------------------------------------------ surplus and drops


async def test_surplus_samples_are_cut_and_dropped(events_dir: Path) -> None:
    fleet = FakeFleet(hold=True, chunk_tokens=2)
    rig = DispatcherRig(permits=2, n=1, prompts=FIVE_TOKENS, fleet=fleet, over_sample=OverSampleConfig(samples=0.5))
    async with rig.running():
        await fleet.until_in_flight(*(sample_name(index) for index in (1, 2, 3)))
        fleet.release(sample_name(1), sample_name(3))
        await rig.lease(2)
        await rig.until_dropped(1)
    events = written(events_dir)
    own = [one for one in events if one.get("sample") == sample_name(2)]
    cut, dropped = the(own, "sample.cut"), the(own, "sample.dropped")
    assert (cut["tokens"], cut["kept"]) == (0, 0)
    assert (dropped["reason"], dropped["tokens"]) == ("surplus", 0)
    assert the(own, "trajectory")["finish_reason"] == "aborted"
    assert the(own, "sample.generate")["error"] == "CancelledError"
    assert not of(own, "sample.ready") and not of(own, "sample.reward")
    assert len(of(events, "sample.ready")) == 2 and len(of(events, "sample.dropped")) == 1


async def test_a_cut_and_resumed_sample_records_both_attempts(events_dir: Path) -> None:
    """The second sample is cut after 3 s with 2 of its 5 tokens, waits 10 s for a slot, and takes 4 s for the rest."""
    chunks = anyio.Semaphore(0)

    async def pace(session: str) -> None:
        if session == sample_name(2):
            await chunks.acquire()
        elif session != sample_name(1):
            await anyio.sleep_forever()

    fleet = FakeFleet(hold=True, pace=pace, chunk_tokens=2)
    over_sample = OverSampleConfig(samples=1.0, unfinished="keep_partial")
    rig = DispatcherRig(permits=1, total=2, n=1, prompts=FIVE_TOKENS, fleet=fleet, over_sample=over_sample)
    async with rig.running():
        await fleet.until_in_flight(sample_name(1), sample_name(2))
        rig.clock.now_s += 3
        fleet.release_all()
        await rig.lease(1)
        await until(lambda: sample_name(2) in fleet.cancelled)
        await anyio.wait_all_tasks_blocked()
        rig.clock.now_s += 10
        fleet.version = 1
        await rig.queue.set_applied_version(1)
        await fleet.until_in_flight(sample_name(2))
        rig.clock.now_s += 4
        for _ in range(3):
            chunks.release()
        (sample,) = leased_samples(await rig.lease(1, trainer_version=1))
    own = [one for one in written(events_dir) if one.get("sample") == sample_name(2)]
    cut, surplus, ready = the(own, "sample.cut"), the(own, "sample.surplus"), the(own, "sample.ready")
    assert (cut["tokens"], cut["kept"]) == (2, 1)
    assert cut["timestamp"] <= surplus["timestamp"] + SLACK_S and end(surplus) <= ready["timestamp"] + SLACK_S
    assert (ready["tokens"], ready["versions"]) == (5, 1)
    first, second = sorted(of(own, "trajectory"), key=lambda one: one["timestamp"])
    assert (first["finish_reason"], first["tokens"]) == ("aborted", 2)
    assert (second["finish_reason"], second["tokens"]) == ("stop", 5)
    assert len(of(own, "sample.slot")) >= 1
    # The second attempt does not repeat the tokens of the first.
    attempts = sorted(of(own, "sample.generate"), key=lambda one: one["timestamp"])
    assert [(one["tokens"], one.get("error")) for one in attempts] == [(2, "CancelledError"), (3, None)]
    assert [one["tokens"] for one in of(own, "turnlog.write")] == [5]
    counts = rig.dispatcher.runner.counts
    assert (sample.sample_id.index, sample.generate_s, counts.max_generate_s) == (2, 3 + 4, 7)
    assert (counts.generate_s, counts.surplus_tokens) == (3 + 7, 0)


def responses(request: GenerateRequest) -> list[int]:
    """Give the first trajectory the longest response, and the others lengths that grow with their number."""
    number = parse_request_id(request.request_id).trajectory
    assert number is not None
    return [5] * (number + 1 if number else 9)


class OneTurn(ScriptedConverser):
    def __init__(self) -> None:
        super().__init__(1)


@pytest.mark.parametrize("agent", [None, OneTurn()])
async def test_over_sampled_trajectories_are_the_same_in_events_payload_and_dump(
    events_dir: Path, agent: OneTurn | None
) -> None:
    """2 of 4 trajectories count, and trajectory 0 is too slow, so trajectories 1 and 2 of the events are rows 0 and
    1."""
    slow = anyio.Event()

    async def pace(session: str) -> None:
        if session.endswith("/0"):
            await slow.wait()

    fleet = FakeFleet(answer=responses, chunk_tokens=1, pace=pace)
    dump = TrajectoryDump(events_dir / "dump", events_dir, str)
    rig = DispatcherRig(
        permits=1, total=1, n=2, fleet=fleet, agent=agent, dump=dump, over_sample=OverSampleConfig(trajectories=2)
    )
    async with rig.running():
        (sample,) = leased_samples(await rig.lease(1))
    recorded = of(written(events_dir), "trajectory")
    complete = {
        one["trajectory"]: one["tokens"] for one in recorded if one["finish_reason"] not in ("aborted", "surplus")
    }
    assert complete == {1: 2, 2: 3} and {one["trajectory"] for one in recorded} == {0, 1, 2, 3}
    assert [row.trajectory for row in sample.rows] == [0, 1] and sample.asked == (1, 2)
    arrays, texts = to_blob(pack([sample]))
    packed = PackedBlob(decode(np.frombuffer(b"".join(encode(arrays, texts)), np.uint8)))
    assert unpack(pack([sample]), 0).asked == packed.unpack(0).asked == (1, 2)
    for kept in (find(events_dir / "dump", 1, events_dir).trajectories, to_dumped(packed.unpack(0), events_dir, str)):
        assert [one.number for one in kept] == [0, 1]
        assert {one.asked: one.trajectory.num_sampled for one in kept} == complete


class Shielded(OneTurn):
    """An agent that completes its conversation even if the trajectory is cut."""

    async def converse(self, *args: Any) -> Trajectory:
        with anyio.CancelScope(shield=True):
            return await super().converse(*args)


@pytest.mark.parametrize("agent", [None, Shielded()])
@pytest.mark.parametrize("kept", [False, True])
async def test_trajectories_beyond_n_are_recorded_as_surplus(events_dir: Path, agent: Any, kept: bool) -> None:
    """All trajectories end at once, before any of them can be cut."""
    made = await GroupGeneration(group_request(2, extra=2), fleet=FakeFleet(), keep_surplus=kept, agent=agent).run()
    recorded = finishes(events_dir)
    counted = {number for number, (reason, _) in recorded.items() if reason == "stop"}
    assert counted == {one.number for one in made} and len(counted) == (4 if kept else 2)
    assert all(recorded[number] == ("surplus", 2) for number in set(range(4)) - counted)


async def test_trajectories_that_end_during_the_baseline_are_surplus(events_dir: Path) -> None:
    """Surplus trajectories are neither reported nor scored."""
    fleet = FakeFleet(answer=lambda request: [5] * (9 if "baseline" in request.request_id else 1), chunk_tokens=1)
    group = group_request(2, baseline={"max_tokens": 16}, extra=1)
    generation = GroupGeneration(group, fleet=fleet)
    async with generation.running() as events:
        ended = [one.number async for together in events for one in together]
    made = generation.trajectories
    assert [one.number for one in made] == [0, 1, -1] == ended
    assert [one.num_sampled for one in made] == [1, 1, 9]
    reasons = {number: reason for number, (reason, _) in finishes(events_dir).items()}
    assert reasons == {0: "stop", 1: "stop", 2: "surplus", -1: "stop"}


async def test_a_complete_trajectory_that_is_cut_while_it_is_logged_is_surplus(events_dir: Path) -> None:
    async def record_slowly(turns: Mapping[str, Turn]) -> None:
        await anyio.lowlevel.checkpoint()

    (one,) = await GroupGeneration(group_request(1, extra=1), fleet=FakeFleet(), record_turns=record_slowly).run()
    assert one.number == 0 and finishes(events_dir) == {0: ("stop", 2), 1: ("surplus", 2)}


async def test_a_dropped_sample_records_its_reason(events_dir: Path) -> None:
    async def fail(prompt: Prompt) -> None:
        if prompt.prompt_ids[0] == 2:
            raise UserCodeError("no")

    config = Config.model_validate({"reward": {"on_error": "drop"}})
    prompts = [make_prompt(1, 1), make_prompt(2, 2), make_prompt(3, 3)]
    rig = DispatcherRig(
        permits=3, n=2, prompts=prompts, fleet=FakeFleet(), scorer=FakeScorer(gate=fail), reward=config.reward
    )
    async with rig.running():
        await rig.lease(2)
        await rig.until_dropped(1)
    events = written(events_dir)
    dropped = the(events, "sample.dropped", sample=sample_name(2))
    assert (dropped["reason"], dropped["tokens"]) == ("failed", 4)
    assert the(events, "reward.score", sample=sample_name(2))["error"] == "UserCodeError"
    assert not of(events, "sample.ready", sample=sample_name(2))


async def test_a_dropped_sample_of_a_batch_records_its_tokens(events_dir: Path, tmp_path: Path) -> None:
    """One sample fails after its generation. The other one fails during generation, after one trajectory has ended."""

    async def fail(prompt: Prompt) -> None:
        if prompt.prompt_ids[0] == 1:
            raise UserCodeError("no")

    class Refusing(FakeFleet):
        async def generate(self, requests: Any, *, session: str) -> AsyncGenerator[GenerationEvent, None]:
            async for event in super().generate(requests, session=session):
                yield event
                if session == sample_name(2) and isinstance(event, TurnFinished):
                    raise DataError("refused")

    role = {"enable": True, "steps": "all", "dump_dir": str(tmp_path / "skip")}
    rig = DispatcherRig(
        permits=3,
        n=2,
        prompts=[make_prompt(number, number) for number in range(1, 6)],
        fleet=Refusing(),
        scorer=FakeScorer(gate=fail),
        reward=RewardConfig(on_error="drop"),
        skip=SkipConfig.model_validate({"rollout": role}),
        mode="sync",
        trainer=TrainerConfig(ppo_mini_batch_size=3),
    )
    with SkipManager.session(rig.config):
        async with rig.running():
            await rig.lease(3)
    dropped = {one["sample"]: one["tokens"] for one in of(written(events_dir), "sample.dropped")}
    assert dropped == {sample_name(1): 4, sample_name(2): 2}


async def test_every_call_to_a_replica_records_an_event(events_dir: Path) -> None:
    plays: list[list[Any]] = [[Accepted("a"), InfraError("gone")], [Accepted("b"), [Delta(0, ONE_TOKEN, True)]]]

    async def call(requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Any, None]:
        for event in plays.pop(0):
            if isinstance(event, Exception):
                raise event
            yield event

    async def sleep(seconds: float) -> None:
        pass

    await finished_turns(client.generate(call, [REQUEST], session="s", max_attempts=3, sleep=sleep))
    first, second = of(written(events_dir), "generate.call")
    assert (first["replica"], first["error"], first["request"]) == ("a", "InfraError", "sample_0_1/4.2-1")
    assert (second["replica"], second["request"]) == ("b", "sample_0_1/4.2-2") and "error" not in second
    assert end(first) <= second["timestamp"] + SLACK_S and first["requests"] == second["requests"] == 1


async def test_failed_tool_calls_record_their_status(events_dir: Path) -> None:
    rig = agent_loop.AgentRig(max_parallel_calls=2, tokenization_sanity_check_mode="off")
    await rig.converse('[add {"x": 13}][subtract {"x": 1}][add {"x": 1}]', "3")
    await rig.converse("[add", '[add {"y": 1}]', "3")
    calls = [(one["turn"], one["tool"], one["status"]) for one in of(written(events_dir), "tool.execute")]
    assert sorted(calls) == sorted([
        (0, "add", "raised"), (0, "add", "too_many"), (0, "subtract", "unknown_tool"), (0, "", "bad_json"),
        (1, "add", "bad_arguments"),
    ])  # fmt: skip


async def test_a_tool_that_drops_its_sample_records_its_status(events_dir: Path) -> None:
    async def hang(x: int) -> None:
        await anyio.sleep_forever()

    rig = agent_loop.AgentRig(tools=[{"on_error": "drop", "timeout_s": 0.02}])
    agent_loop.Adder.gate = staticmethod(hang)  # type: ignore[assignment]
    try:
        with pytest.raises(UserCodeError):
            await rig.converse('[add {"x": 1}]', "3")
    finally:
        agent_loop.Adder.gate = None
    one = the(written(events_dir), "tool.execute")
    assert (one["status"], one["error"]) == ("timeout", "ToolFailedError") and one["duration_s"] >= 0.02


# ------------------------------------------------------------------------------------------------ other events


async def test_reads_and_writes_of_records_are_recorded_as_events(events_dir: Path) -> None:
    section = {"enable": True, "steps": "all", "dump_dir": str(events_dir / "records")}
    skip = SkipConfig.model_validate({"async_rollout": section})
    for found in (0, 1):
        profile.configure("rollouter", ProfilerSettings("full", events_dir / f"run-{found}" / "events"))
        rig = DispatcherRig(skip=skip, fleet=FakeFleet(), total=2, n=2)
        with SkipManager.session(rig.config):
            async with rig.running():
                await rig.lease(2)
        events = written(events_dir / f"run-{found}")
        for index in (1, 2):
            own = [one for one in events if one.get("sample") == sample_name(index)]
            read = the(own, "skip.read")
            assert (read["role"], read["found"]) == ("async_rollout", found)
            assert len(of(own, "skip.write", role="async_rollout")) == 1 - found
            assert len(of(own, "trajectory")) == 2 * (1 - found), "replayed samples have no trajectory events"
            assert the(own, "sample.generate").get("replayed", 0) == found
            assert the(own, "sample.generate")["tokens"] == the(own, "sample.ready")["tokens"]


async def test_users_programs_record_their_turns(events_dir: Path) -> None:
    rig = gateway.GatewayRig()

    async def record(turns: Mapping[str, Turn]) -> None:
        for key in turns:
            mark(key.split(".")[0])

    group = SampleRequest(SampleId(0, 1), rig.prompt(), {"max_tokens": 50}, 3)
    with profile.context(sample="sample_0_1"):
        await GroupGeneration(group, fleet=rig.fleet("12"), record_turns=record, agent=rig.made(rig.talk)).run()
    events = written(events_dir)
    for number in range(3):
        one = the(events, "trajectory", trajectory=number)
        assert one["turns"] == 2
        assert_within(the(events, "agent.run", trajectory=number), one)
        marks = of(events, "loop.stall", trajectory=number, part=str(number), sample="sample_0_1")
        assert sorted(each["turn"] for each in marks) == [0, 1]


class Answering:
    """A call to a replica that answers with these words, through an event forwarder."""

    def __init__(self, forwarder: EventForwarder, *words: str) -> None:
        async def answer() -> AsyncGenerator[str, None]:
            for word in words:
                yield word

        self._call = forwarder.attach(answer())
        self.leave = self._call.aclose

    async def take(self, count: int) -> list[str | list[str]]:
        """Return the next items: words, the names of events, or `the end`."""
        items = [await anext(self._call, "the end") for _ in range(count)]
        return [one if isinstance(one, str) else [event["event"] for event in one.events] for one in items]


async def test_a_replica_sends_events_with_its_last_answer_or_once_a_second() -> None:
    clock = ManualClock()
    forwarder = EventForwarder("r", clock)
    assert await Answering(forwarder, "a").take(2) == ["a", "the end"], "profiling is off"
    profile.configure("replica-r", ProfilerSettings("full"))
    long, short = Answering(forwarder, *"abcd"), Answering(forwarder, *"xy")
    assert await long.take(1) + await short.take(1) == ["a", "x"]
    profile.note("sync.load")
    assert await short.take(2) == ["y", "the end"], "another call is open"
    clock.now_s += FORWARD_EVERY_S
    assert await long.take(1) == [["sync.load"]]
    profile.note("sync.verify")
    assert await long.take(2) == ["b", "c"], "a second has not passed"
    assert await long.take(3) == ["d", ["sync.verify"], "the end"]
    clock.now_s += FORWARD_EVERY_S
    assert await Answering(forwarder, "a").take(2) == ["a", "the end"], "there are no new events"


async def test_events_of_an_abandoned_answer_are_sent_with_the_next() -> None:
    clock = ManualClock()
    forwarder = EventForwarder("r", clock)
    profile.configure("replica-r", ProfilerSettings("full"))
    first, second = Answering(forwarder, *"ab"), Answering(forwarder, *"xyz")
    assert await first.take(1) + await second.take(1) == ["a", "x"]
    profile.note("sync.load")
    clock.now_s += FORWARD_EVERY_S
    assert await first.take(1) == [["sync.load"]]
    await first.leave()
    profile.note("sync.verify")
    assert await second.take(4) == [["sync.load", "sync.verify"], "y", "z", "the end"], (
        "the events are sent at once and only once"
    )
    # Events of the last call are sent with the answer to a weight sync.
    profile.note("sync.fetch")
    last = Answering(forwarder, "a")
    assert await last.take(2) == ["a", ["sync.fetch"]]
    await last.leave()
    assert [one["event"] for one in forwarder.take_all()] == ["sync.fetch"] and not forwarder.take_all()


async def test_events_never_fetched_count_as_dropped(events_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray produces the next item of a stream before the caller has fetched the previous one."""
    clock, away = ManualClock(), Profiler()
    away.configure("replica-r", ProfilerSettings("full"))
    monkeypatch.setattr(event_forwarding, "profile", away)
    forwarder = EventForwarder("r", clock)

    async def message() -> EventBatch:
        async def words() -> AsyncGenerator[str, None]:
            while True:
                yield ""

        away.note("sync.load")
        away.note("sync.verify")
        clock.now_s += FORWARD_EVERY_S
        async with aclosing(forwarder.attach(words())) as answer:
            batch = [await anext(answer) for _ in range(3)][1]
        assert isinstance(batch, EventBatch)
        return batch

    first, _, *others = [await message() for _ in range(4)]

    async def call(requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Any, None]:
        for event in (Accepted("r"), first, *others, [Delta(0, ONE_TOKEN, True)]):
            yield event

    await finished_turns(client.generate(call, [REQUEST], session="s", max_attempts=1))
    events = written(events_dir)
    assert len(of(events, "sync.load")) == len(of(events, "sync.verify")) == 3
    assert the(events, "profiler.dropped")["events"] == profile.status()["dropped"] == 2
    away.close()


async def test_a_bounded_number_of_unsent_events_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_forwarding, "MAX_UNSENT", 3)
    forwarder = EventForwarder("r", ManualClock())
    profile.configure("replica-r", ProfilerSettings("full"))
    for _ in range(5):
        profile.note("sync.load")
    caller = Answering(forwarder, "a")
    assert await caller.take(2) == ["a", ["sync.load"] * 5]
    await caller.leave()
    *kept, lost = forwarder.take_all()
    assert [one["event"] for one in kept] == ["sync.load"] * 3
    assert (lost["event"], lost["events"]) == ("profiler.dropped", 2)


async def test_profiler_levels_change_no_result(tmp_path: Path, marking: None) -> None:
    results = {}
    levels: tuple[Any, ...] = ("off", "summary", "full")
    for level in levels:
        profile.configure("rollouter", ProfilerSettings(level, tmp_path / level / "events"))
        run = ConversationRun(n=2, num_samples=4)
        await run.go()
        results[level] = (run.trained, (await run.queue.status()).counts)
        profile.close()
    assert not (tmp_path / "off" / "events").exists()
    trained, counts = results["off"]
    assert sorted(trained) == [f"sample_0_{index}" for index in range(1, 5)] and counts.trained == 4
    assert results["summary"] == results["full"] == results["off"]
    names, all_names = ({one["event"] for one in written(tmp_path / level)} for level in ("summary", "full"))
    fine = {"generate.call", "turn.parse", "sample.offer", "rollout.permit"}
    assert {"trajectory", "sample.ready", "tool.execute", "request", "sync.apply"} <= names
    assert not names & fine and names | fine <= all_names
