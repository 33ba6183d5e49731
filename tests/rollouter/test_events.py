"""Events of the Rollouter: every sample's way is told from its permit to the queue, and nobody's is mixed up."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.blobs import decode, encode
from asyncrl.cli.kept_samples import describe
from asyncrl.config.schema import Config, OverSampleConfig, SkipConfig
from asyncrl.failures import InfraError, UserCodeError
from asyncrl.payloads import PackedBlob, pack, to_blob, unpack
from asyncrl.ports import ApplyReport, GenerateRequest, Lease, Publication
from asyncrl.profiling import Profiler, Setup, profile
from asyncrl.profiling.files import event_files
from asyncrl.sample_queue import LocalSampleQueue, QueueOptions
from asyncrl.staleness import Pacing
from asyncrl.trajectory import Trajectory
from asyncrl.trajectory_files import find
from asyncrl.types import FinishReason, Prompt, Sample, SampleId, Span, Turn
from rollouter import client
from rollouter.dump import TrajectoryDump
from rollouter.group import Group, Unheard, generate_group
from rollouter.request_ids import parse
from rollouter.rollouter import Rollouter, RolloutStart, Task
from rollouter.serving import shipping as shipping_module
from rollouter.serving.pieces import Piece, Taken, Told
from rollouter.serving.shipping import SHIP_EVERY_S, Shipping
from skip import SkipManager
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import (
    FakeFeed,
    FakeScorer,
    ListPrompts,
    ListSink,
    ManualClock,
    MemoryPayloads,
    MemoryTurns,
    make_prompt,
)
from tests.rollouter import test_pump
from tests.rollouter.agent import test_loop
from tests.rollouter.gateway import rig as gateway
from tests.rollouter.test_over_sampling import Chatter

Event = dict[str, Any]
SLACK_S = 0.005
"""Times are rounded, and of two clocks."""


@pytest.fixture
def events_dir(tmp_path: Path) -> Path:
    profile.configure("rollouter", Setup("full", tmp_path / "events"))
    return tmp_path


def written(tmp_path: Path) -> list[Event]:
    """All events; `part` and `dir` say where."""
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


def mark(who: str) -> None:
    """An event that says itself whose it is; what the context adds is checked against it."""
    profile.note("loop.stall", part=who)


class Replicas:
    """`EngineFleet` on two replicas, behind the client: they answer in random order, and tell of requests as a replica
    does."""

    def __init__(self, text_of: Any, ids_of: Any) -> None:
        self._text_of, self._ids_of = text_of, ids_of
        self._random = random.Random(7)
        self.version = 0

    async def generate(self, requests: Sequence[GenerateRequest], *, session: str, **told: Any) -> list[Turn]:
        return await client.generate(self._call, requests, session=session, max_attempts=3, **told)

    async def apply(self, publication: Publication) -> list[ApplyReport]:
        self.version = publication.version
        return [ApplyReport(f"r{k}", publication.version, 0.0, 0.1, 0.1, 0, True) for k in range(2)]

    async def _call(
        self, requests: Sequence[GenerateRequest], *, session: str
    ) -> AsyncGenerator[Taken | Told | list[Piece], None]:
        replica = f"r{self._random.randrange(2)}"
        yield Taken(replica)
        for number, request in self._random.sample(list(enumerate(requests)), len(requests)):
            for _ in range(self._random.randrange(6)):
                await anyio.lowlevel.checkpoint()
            ids = self._ids_of(self._text_of(request))
            log_probs = np.full(len(ids), -0.5, dtype=np.float32)
            turn = Turn(np.asarray(ids, dtype=np.int32), log_probs, (Span(0, self.version),), FinishReason.STOP)
            yield [Piece(number, turn, True)]
        about = [{**parse(one.request_id)._asdict(), "request": one.request_id} for one in requests]
        yield Told(replica, [{"timestamp": 1e9, "event": "request", "duration_s": 0.0, **one} for one in about])


def result(sample: Sample) -> list[Any]:
    """What a sample is trained on."""
    return [
        [
            value.tolist() if isinstance(value, np.ndarray) else value
            for value in map(row.__getattribute__, row.__slots__)
        ]
        for row in sample.rows
    ]


class Run:
    """A whole Rollouter that holds conversations: a call of `add`, an answer, the player's word, a last answer."""

    def __init__(self, *, n: int = 3, num_samples: int = 6, validate: bool = False) -> None:
        interactions = [{"class_name": test_loop.PLAYER, "name": "player", "config": {"replies": ["1"]}}]
        self.rig = test_loop.Rig(interactions=interactions)
        eos = self.rig.tokenizer.eos_token_id
        lines = ['[add {"x": 2}]', "3", "7"]
        config = self.rig.config
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"n": n})})
        self.fleet = Replicas(
            lambda request: lines[parse(request.request_id).turn or 0], lambda text: [*self.rig.ids(text), eos]
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
            Task(
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
        """Two versions' samples, trained in the middle."""
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
    """Tools and players tell whose conversation they are in."""
    test_loop.Adder.made, test_loop.Adder.released = [], []
    create, execute = test_loop.Adder.create, test_loop.Adder.execute

    def created(self: Any, context: Any, **kwargs: Any) -> list[Any]:
        state = create(self, context, **kwargs)
        owners[id(state)] = f"{context.sample_id}/{context.trajectory}"
        return state

    async def executed(self: Any, state: list[int], arguments: Any, **kwargs: Any) -> Any:
        await anyio.sleep(0.001)
        mark(owners[id(state)])
        return await execute(self, state, arguments, **kwargs)

    owners: dict[int, str] = {}
    monkeypatch.setattr(test_loop.Adder, "create", created)
    monkeypatch.setattr(test_loop.Adder, "execute", executed)


async def test_conversations_with_tools_and_users_are_told_whole(events_dir: Path, marking: None) -> None:
    run = Run()
    await run.go()
    events = written(events_dir)
    for index in range(1, run.num_samples + 1):
        own = [one for one in events if one.get("sample") == f"sample_0_{index}"]
        check_conversations(own, n=3)
    # What says itself whose it is agrees with what the context says.
    marks = of(events, "loop.stall")
    assert len(marks) == run.num_samples * 3 * 2, "a tool and a reward each"
    for one in marks:
        sample, _, trajectory = one["part"].partition("/")
        assert one["sample"] == sample
        assert trajectory in ("", str(one["trajectory"]))
        assert not trajectory or one["turn"] == 0, "the call is the first turn's"
    check_requests(events)
    assert {one["step"] for one in events if "step" in one} == {1, 2, 3}


def check_conversations(own: list[Event], n: int) -> None:
    """All that is told of one sample."""
    counts = Counter(one["event"] for one in own)
    calls = {"turn.parse": 3, "turn.tokenize": 2, "tool.execute": 1, "user.step": 2, "reward.score": 1, "trajectory": 1}
    turns = {"generate.call": 3, "request": 3, "turnlog.write": 3, "loop.stall": 2}
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
    """What replicas told is in their own files, and belongs to a call that somebody here has made."""
    calls = {one["request"]: one for one in of(events, "generate.call")}
    requests = of(events, "request")
    assert {one["file_part"] for one in requests} == {"replica-r0", "replica-r1"}
    assert {one["request"] for one in requests} == calls.keys()
    for one in requests:
        call = calls[one["request"]]
        assert f"replica-{call['replica']}" == one["file_part"] and call["requests"] == 1
        assert all(one[field] == call[field] for field in ("sample", "trajectory", "turn"))
    assert all(one["file_part"] == "rollouter" for one in events if one["event"] != "request")


async def test_versions_and_validation(events_dir: Path, marking: None) -> None:
    run = Run(validate=True, n=2)
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
    # What is generated under the first version that was applied is of the second step.
    trained = [one for one in of(events, "trajectory") if one["sample"].startswith("sample_")]
    assert {(one["version"], one["step"], one["dir"]) for one in trained} == {
        (0, 1, "step_000001"), (1, 2, "step_000002"),
    }  # fmt: skip


async def test_single_turns_begin_with_the_dispatch_and_end_when_they_are_whole(events_dir: Path) -> None:
    prompts = [make_prompt(index, 7, 9) for index in range(1, 9)]
    rig = test_pump.Rig(permits=4, n=3, prompts=prompts, fleet=FakeFleet())
    async with rig.running():
        await rig.lease(4)
    events = written(events_dir)
    for index in range(1, 5):
        own = [one for one in events if one.get("sample") == test_pump.name(index)]
        generate = the(own, "sample.generate")
        assert generate["trajectories"] == 3 and generate["tokens"] == 9
        for number in range(3):
            one = the(own, "trajectory", trajectory=number)
            assert (one["turns"], one["calls"], one["tokens"], one["sampled_tokens"]) == (1, 0, 3, 3)
            assert one["finish_reason"] == "stop" and one["generate_s"] == pytest.approx(one["duration_s"], abs=1e-5)
            assert_within(one, generate)
            assert the(own, "turnlog.write", trajectory=number)["tokens"] == 3
        score = the(own, "reward.score")
        assert score["trajectories"] == 3 and score["reward"] == 3.0 and "trajectory" not in score
    permits = of(events, "rollout.permit")
    assert sum(one["granted"] for one in permits) == 4


async def test_the_baseline_is_told_apart(events_dir: Path) -> None:
    group = Group("sample_0_1", SampleId(0, 1), make_prompt(1, 2), {"max_tokens": 4}, 2, baseline={"max_tokens": 4})
    await generate_group(FakeFleet(), group, Unheard())
    assert sorted(one["trajectory"] for one in of(written(events_dir), "trajectory")) == [-1, 0, 1]


async def test_what_was_complete_before_is_not_told_again(events_dir: Path) -> None:
    group = Group("sample_0_1", SampleId(0, 1), make_prompt(1, 2), {"max_tokens": 4}, 2)
    kept: dict[str, Turn] = {}

    class Keep(Unheard):
        async def turn(self, key: str, turn: Turn) -> None:
            kept[key] = turn

    await generate_group(FakeFleet(), group, Keep())
    await generate_group(FakeFleet(), group, Unheard(), completed={"0": kept["0"]})
    assert sorted(one["trajectory"] for one in of(written(events_dir), "trajectory")) == [0, 1, 1]


# ------------------------------------------------------------------------------------------------ what comes to nothing


async def test_surplus_samples_are_cut_and_dropped(events_dir: Path) -> None:
    fleet = FakeFleet(hold=True, chunk_tokens=2)
    prompts = [make_prompt(*range(1, 6)) for _ in range(20)]
    rig = test_pump.Rig(permits=2, n=1, prompts=prompts, fleet=fleet, over_sample=OverSampleConfig(samples=0.5))
    async with rig.running():
        await fleet.until_in_flight(*(test_pump.name(index) for index in (1, 2, 3)))
        fleet.release(test_pump.name(1), test_pump.name(3))
        await rig.lease(2)
        with anyio.fail_after(10):
            while (await rig.queue.status()).books.dropped["surplus"] < 1:
                await anyio.lowlevel.checkpoint()
    events = written(events_dir)
    own = [one for one in events if one.get("sample") == test_pump.name(2)]
    cut, dropped = the(own, "sample.cut"), the(own, "sample.dropped")
    assert (cut["tokens"], cut["kept"]) == (0, 0)
    assert (dropped["reason"], dropped["tokens"]) == ("surplus", 0)
    assert the(own, "trajectory")["finish_reason"] == "aborted"
    assert the(own, "sample.generate")["error"] == "CancelledError"
    assert not of(own, "sample.ready") and not of(own, "sample.reward")
    assert len(of(events, "sample.ready")) == 2 and len(of(events, "sample.dropped")) == 1


async def test_what_was_cut_and_goes_on_later_says_so(events_dir: Path) -> None:
    """The second sample has made 2 of its 5 tokens when it is cut; it goes on from them under the next version."""
    chunks = anyio.Semaphore(1)

    async def pace(session: str) -> None:
        if session == test_pump.name(2):
            await chunks.acquire()

    fleet = FakeFleet(pace=pace, chunk_tokens=2)
    prompts = [make_prompt(*range(1, 6)) for _ in range(20)]
    over_sample = OverSampleConfig(samples=1.0, unfinished="keep_partial")
    rig = test_pump.Rig(permits=1, total=2, n=1, prompts=prompts, fleet=fleet, over_sample=over_sample)
    async with rig.running():
        await rig.lease(1)
        with anyio.fail_after(10):
            while test_pump.name(2) not in fleet.cancelled:
                await anyio.lowlevel.checkpoint()
        for _ in range(3):
            chunks.release()
        fleet.version = 1
        await rig.queue.set_applied_version(1)
        await rig.lease(1, trainer_version=1)
    own = [one for one in written(events_dir) if one.get("sample") == test_pump.name(2)]
    cut, surplus, ready = the(own, "sample.cut"), the(own, "sample.surplus"), the(own, "sample.ready")
    assert (cut["tokens"], cut["kept"]) == (2, 1)
    assert cut["timestamp"] <= surplus["timestamp"] + SLACK_S and end(surplus) <= ready["timestamp"] + SLACK_S
    assert (ready["tokens"], ready["versions"]) == (5, 1)
    first, second = sorted(of(own, "trajectory"), key=lambda one: one["timestamp"])
    assert (first["finish_reason"], first["tokens"]) == ("aborted", 2)
    assert (second["finish_reason"], second["tokens"]) == ("stop", 5)
    assert len(of(own, "sample.slot")) >= 1
    # What the first leg has sampled is told by the first leg alone.
    legs = sorted(of(own, "sample.generate"), key=lambda one: one["timestamp"])
    assert [(one["tokens"], one.get("error")) for one in legs] == [(2, "CancelledError"), (3, None)]
    assert [one["tokens"] for one in of(own, "turnlog.write")] == [5]


async def test_seconds_in_generation_are_those_of_all_legs(events_dir: Path) -> None:
    """3 s until it is cut, 10 s until there is room again, and 4 s from there."""
    chunks = anyio.Semaphore(1)

    async def pace(session: str) -> None:
        if session == test_pump.name(2):
            await chunks.acquire()
        elif session != test_pump.name(1):
            await anyio.sleep_forever()

    fleet = FakeFleet(hold=True, pace=pace, chunk_tokens=2)
    prompts = [make_prompt(*range(1, 6)) for _ in range(20)]
    over_sample = OverSampleConfig(samples=1.0, unfinished="keep_partial")
    rig = test_pump.Rig(permits=1, total=2, n=1, prompts=prompts, fleet=fleet, over_sample=over_sample)
    async with rig.running():
        await fleet.until_in_flight(test_pump.name(1), test_pump.name(2))
        rig.clock.now_s += 3
        fleet.release_all()
        await rig.lease(1)
        with anyio.fail_after(10):
            while SampleId(0, 2) not in rig.stages._kept:
                await anyio.lowlevel.checkpoint()
        rig.clock.now_s += 10
        await rig.queue.set_applied_version(1)
        await fleet.until_in_flight(test_pump.name(2))
        rig.clock.now_s += 4
        for _ in range(3):
            chunks.release()
        (sample,) = test_pump.samples(await rig.lease(1, trainer_version=1))
    assert (sample.sample_id.index, sample.generate_s) == (2, 7)
    assert rig.stages.counts.max_generate_s == 7 and rig.stages.counts.generate_s == 3 + 7
    assert rig.stages.counts.surplus_tokens == 0


def responses(request: GenerateRequest) -> list[int]:
    """The first trajectory is the longest one; of the others the later is the longer."""
    number = parse(request.request_id).trajectory
    assert number is not None
    return [5] * (number + 1 if number else 9)


class OneTurn(Chatter):
    def __init__(self) -> None:
        super().__init__(1)


@pytest.mark.parametrize("agent", [None, OneTurn()])
async def test_over_sampled_trajectories_are_the_same_in_events_payload_and_dump(
    events_dir: Path, agent: OneTurn | None
) -> None:
    """2 of 4 count, and the first is too slow: what events call 1 and 2 are rows 0 and 1."""
    slow = anyio.Event()

    async def pace(session: str) -> None:
        if session.endswith("/0"):
            await slow.wait()

    fleet = FakeFleet(answer=responses, chunk_tokens=1, pace=pace)
    dump = TrajectoryDump(events_dir / "dump", events_dir, str)
    rig = test_pump.Rig(
        permits=1, total=1, n=2, fleet=fleet, agent=agent, dump=dump, over_sample=OverSampleConfig(trajectories=2)
    )
    async with rig.running():
        (sample,) = test_pump.samples(await rig.lease(1))
    told = of(written(events_dir), "trajectory")
    whole = {one["trajectory"]: one["tokens"] for one in told if one["finish_reason"] not in ("aborted", "surplus")}
    assert whole == {1: 2, 2: 3} and {one["trajectory"] for one in told} == {0, 1, 2, 3}
    assert [row.trajectory for row in sample.rows] == [0, 1] and sample.asked == (1, 2)
    arrays, texts = to_blob(pack([sample]))
    packed = PackedBlob(decode(np.frombuffer(b"".join(encode(arrays, texts)), np.uint8)))
    assert unpack(pack([sample]), 0).asked == packed.unpack(0).asked == (1, 2)
    for kept in (find(events_dir / "dump", 1, events_dir).trajectories, describe(packed.unpack(0), events_dir, str)):
        assert [one.number for one in kept] == [0, 1]
        assert {one.asked: one.trajectory.num_sampled for one in kept} == whole


class Deaf(OneTurn):
    """Ends its conversation though it is cut."""

    async def converse(self, *args: Any) -> Trajectory:
        with anyio.CancelScope(shield=True):
            return await super().converse(*args)


@pytest.mark.parametrize("agent", [None, Deaf()])
@pytest.mark.parametrize("kept", [False, True])
async def test_what_ends_when_enough_have_ended_is_surplus(events_dir: Path, agent: Any, kept: bool) -> None:
    """All end at once, before anybody could be cut."""
    group = Group("sample_0_1", SampleId(0, 1), make_prompt(1, 2), {"max_tokens": 4}, 2, extra=2, keep_surplus=kept)
    made = await generate_group(FakeFleet(), group, Unheard(), agent=agent)
    told = {one["trajectory"]: (one["finish_reason"], one["tokens"]) for one in of(written(events_dir), "trajectory")}
    counted = {number for number, (reason, _) in told.items() if reason == "stop"}
    assert counted == {one.number for one in made} and len(counted) == (4 if kept else 2)
    assert all(told[number] == ("surplus", 2) for number in set(range(4)) - counted)


async def test_what_ends_while_the_baseline_is_waited_for_is_surplus(events_dir: Path) -> None:
    """It is neither told of nor scored."""
    fleet = FakeFleet(answer=lambda request: [5] * (9 if "baseline" in request.request_id else 1), chunk_tokens=1)
    sampling = {"max_tokens": 16}
    group = Group("s", SampleId(0, 1), make_prompt(1), sampling, 2, baseline=sampling, extra=1)
    ended: list[str] = []

    class Heard(Unheard):
        def ended(self, key: str, trajectory: Trajectory) -> None:
            ended.append(key)

    made = await generate_group(fleet, group, Heard())
    assert [one.number for one in made] == [0, 1, -1] and ended == ["0", "1", "baseline"]
    told = {one["trajectory"]: one["finish_reason"] for one in of(written(events_dir), "trajectory")}
    assert told == {0: "stop", 1: "stop", 2: "surplus", -1: "stop"}


async def test_a_whole_trajectory_that_is_cut_while_it_is_logged_is_surplus(events_dir: Path) -> None:
    class Slow(Unheard):
        async def turn(self, key: str, turn: Turn) -> None:
            await anyio.lowlevel.checkpoint()

    group = Group("s", SampleId(0, 1), make_prompt(1, 2), {"max_tokens": 4}, 1, extra=1)
    (one,) = await generate_group(FakeFleet(), group, Slow())
    told = {
        each["trajectory"]: (each["finish_reason"], each["tokens"]) for each in of(written(events_dir), "trajectory")
    }
    assert one.number == 0 and told == {0: ("stop", 2), 1: ("surplus", 2)}


async def test_a_sample_that_fails_says_why_it_is_dropped(events_dir: Path) -> None:
    async def fail(prompt: Prompt) -> None:
        if prompt.prompt_ids[0] == 2:
            raise UserCodeError("no")

    config = Config.model_validate({"reward": {"on_error": "drop"}})
    prompts = [make_prompt(1, 1), make_prompt(2, 2), make_prompt(3, 3)]
    rig = test_pump.Rig(
        permits=3, n=2, prompts=prompts, fleet=FakeFleet(), scorer=FakeScorer(gate=fail), reward=config.reward
    )
    async with rig.running():
        await rig.lease(2)
        with anyio.fail_after(10):
            while not (await rig.queue.status()).books.num_dropped:
                await anyio.lowlevel.checkpoint()
    events = written(events_dir)
    dropped = the(events, "sample.dropped", sample=test_pump.name(2))
    assert (dropped["reason"], dropped["tokens"]) == ("failed", 4)
    assert the(events, "reward.score", sample=test_pump.name(2))["error"] == "UserCodeError"
    assert not of(events, "sample.ready", sample=test_pump.name(2))


async def test_failed_calls_to_replicas_are_events_of_their_own(events_dir: Path) -> None:
    request = GenerateRequest("sample_0_1/4.2", np.array([1], dtype=np.int32), {"max_tokens": 3})
    turn = Turn(np.array([5], dtype=np.int32), np.zeros(1, dtype=np.float32), (Span(0, 0),), FinishReason.STOP)
    plays: list[list[Any]] = [[Taken("a"), InfraError("gone")], [Taken("b"), [Piece(0, turn, True)]]]

    async def call(requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Any, None]:
        for news in plays.pop(0):
            if isinstance(news, Exception):
                raise news
            yield news

    async def sleep(seconds: float) -> None:
        pass

    await client.generate(call, [request], session="s", max_attempts=3, sleep=sleep)
    first, second = of(written(events_dir), "generate.call")
    assert (first["replica"], first["error"], first["request"]) == ("a", "InfraError", "sample_0_1/4.2-1")
    assert (second["replica"], second["request"]) == ("b", "sample_0_1/4.2-2") and "error" not in second
    assert end(first) <= second["timestamp"] + SLACK_S and first["requests"] == second["requests"] == 1


async def test_calls_that_reach_no_tool_and_tools_that_fail(events_dir: Path) -> None:
    rig = test_loop.Rig(max_parallel_calls=2, tokenization_sanity_check_mode="off")
    await rig.converse('[add {"x": 13}][subtract {"x": 1}][add {"x": 1}]', "3")
    await rig.converse("[add", '[add {"y": 1}]', "3")
    told = [(one["turn"], one["tool"], one["status"]) for one in of(written(events_dir), "tool.execute")]
    assert sorted(told) == sorted([
        (0, "add", "raised"), (0, "add", "too_many"), (0, "subtract", "unknown_tool"), (0, "", "bad_json"),
        (1, "add", "bad_arguments"),
    ])  # fmt: skip


async def test_a_tool_that_ends_its_sample_says_what_became_of_it(events_dir: Path) -> None:
    async def hang(x: int) -> None:
        await anyio.sleep_forever()

    rig = test_loop.Rig(tools=[{"on_error": "drop", "timeout_s": 0.02}])
    test_loop.Adder.gate = staticmethod(hang)  # type: ignore[assignment]
    try:
        with pytest.raises(UserCodeError):
            await rig.converse('[add {"x": 1}]', "3")
    finally:
        test_loop.Adder.gate = None
    one = the(written(events_dir), "tool.execute")
    assert (one["status"], one["error"]) == ("timeout", "ToolFailedError") and one["duration_s"] >= 0.02


# ------------------------------------------------------------------------------------------------ the rest


async def test_records_that_are_read_and_written(events_dir: Path) -> None:
    section = {"enable": True, "steps": "all", "dump_dir": str(events_dir / "records")}
    skip = SkipConfig.model_validate({"async_rollout": section})
    for found in (0, 1):
        profile.configure("rollouter", Setup("full", events_dir / f"run-{found}" / "events"))
        rig = test_pump.Rig(skip=skip, fleet=FakeFleet(), total=2, n=2)
        with SkipManager.session(rig.config):
            async with rig.running():
                await rig.lease(2)
        events = written(events_dir / f"run-{found}")
        for index in (1, 2):
            own = [one for one in events if one.get("sample") == test_pump.name(index)]
            read = the(own, "skip.read")
            assert (read["role"], read["found"]) == ("async_rollout", found)
            assert len(of(own, "skip.write", role="async_rollout")) == 1 - found
            assert len(of(own, "trajectory")) == 2 * (1 - found), "no engine has made what is replayed"
            assert the(own, "sample.generate").get("replayed", 0) == found
            assert the(own, "sample.generate")["tokens"] == the(own, "sample.ready")["tokens"]


async def test_programs_of_the_users_have_their_turns(events_dir: Path) -> None:
    """Requests come from elsewhere, without a context of their own."""
    rig = gateway.Rig()

    class Heard(Unheard):
        async def turn(self, key: str, turn: Turn) -> None:
            mark(key.split(".")[0])

    async def program(task: Any) -> float:
        messages: list[Any] = [gateway.QUESTION]
        for _ in range(2):
            answer = await rig.client(task).chat.completions.create(model=gateway.MODEL, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "1"}]
        return 1.0

    def answer(request: GenerateRequest) -> list[int]:
        return [*rig.book.tokens("12"), rig.tokenizer.eos_token_id]

    group = Group("sample_0_1", SampleId(0, 1), rig.prompt(), {"max_tokens": 50}, 3)
    with profile.context(sample="sample_0_1"):
        await generate_group(FakeFleet(answer=answer), group, Heard(), agent=rig.made(program))
    events = written(events_dir)
    for number in range(3):
        one = the(events, "trajectory", trajectory=number)
        assert one["turns"] == 2
        assert_within(the(events, "agent.run", trajectory=number), one)
        marks = of(events, "loop.stall", trajectory=number, part=str(number), sample="sample_0_1")
        assert sorted(each["turn"] for each in marks) == [0, 1]


class Answering:
    """A call to a replica whose answer is given word by word."""

    def __init__(self, shipping: Shipping, *words: str) -> None:
        self._call = shipping.along(self._say(words))

    async def _say(self, words: Sequence[str]) -> AsyncGenerator[str, None]:
        for word in words:
            yield word

    async def next(self) -> str | list[str]:
        """A word, or the names of events."""
        news = await anext(self._call, "the end")
        if isinstance(news, str):
            return news
        assert news.replica == "r"
        return [one["event"] for one in news.events]

    async def leave(self) -> None:
        await self._call.aclose()


async def test_what_a_replica_has_to_tell_goes_with_its_last_answer_or_once_a_second() -> None:
    clock = ManualClock()
    shipping = Shipping("r", clock)
    unrecorded = Answering(shipping, "a")
    assert [await unrecorded.next(), await unrecorded.next()] == ["a", "the end"], "nothing is recorded"
    profile.configure("replica-r", Setup("full"))
    long, short = Answering(shipping, *"abcd"), Answering(shipping, *"xy")
    assert [await long.next(), await short.next()] == ["a", "x"]
    profile.note("sync.load")
    assert [await short.next(), await short.next()] == ["y", "the end"], "another call is open"
    clock.now_s += SHIP_EVERY_S
    assert await long.next() == ["sync.load"]
    profile.note("sync.verify")
    assert [await long.next(), await long.next()] == ["b", "c"], "a second has not passed"
    assert [await long.next(), await long.next(), await long.next()] == ["d", ["sync.verify"], "the end"]
    clock.now_s += SHIP_EVERY_S
    again = Answering(shipping, "a")
    assert [await again.next(), await again.next()] == ["a", "the end"], "there is nothing new"


async def test_events_on_their_way_to_a_caller_who_turns_away_go_with_the_next_answer() -> None:
    clock = ManualClock()
    shipping = Shipping("r", clock)
    profile.configure("replica-r", Setup("full"))
    first, second = Answering(shipping, *"ab"), Answering(shipping, *"xyz")
    assert [await first.next(), await second.next()] == ["a", "x"]
    profile.note("sync.load")
    clock.now_s += SHIP_EVERY_S
    assert await first.next() == ["sync.load"]
    await first.leave()
    profile.note("sync.verify")
    assert await second.next() == ["sync.load", "sync.verify"], "at once"
    assert [await second.next(), await second.next(), await second.next()] == ["y", "z", "the end"], "once"
    # At the end of the last call, too; and what is given up with nobody left goes with the answer to a weight sync.
    profile.note("sync.fetch")
    last = Answering(shipping, "a")
    assert [await last.next(), await last.next()] == ["a", ["sync.fetch"]]
    await last.leave()
    assert [one["event"] for one in shipping.all()] == ["sync.fetch"] and not shipping.all()


async def test_events_that_nobody_fetches_are_missed_at_home(events_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray comes back for the next item before the caller has fetched the one before."""
    clock, away = ManualClock(), Profiler()
    away.configure("replica-r", Setup("full"))
    monkeypatch.setattr(shipping_module, "profile", away)
    shipping = Shipping("r", clock)

    async def message() -> Told:
        async def say() -> AsyncGenerator[str, None]:
            while True:
                yield ""

        away.note("sync.load")
        away.note("sync.verify")
        clock.now_s += SHIP_EVERY_S
        async with aclosing(shipping.along(say())) as answer:
            told = [await anext(answer) for _ in range(3)][1]
        assert isinstance(told, Told)
        return told

    first, _, *others = [await message() for _ in range(4)]
    turn = Turn(np.array([5], dtype=np.int32), np.zeros(1, dtype=np.float32), (Span(0, 0),), FinishReason.STOP)

    async def call(requests: Sequence[GenerateRequest], *, session: str) -> AsyncGenerator[Any, None]:
        for news in (Taken("r"), first, *others, [Piece(0, turn, True)]):
            yield news

    request = GenerateRequest("sample_0_1/4.2", np.array([1], dtype=np.int32), {"max_tokens": 3})
    await client.generate(call, [request], session="s", max_attempts=1)
    events = written(events_dir)
    assert len(of(events, "sync.load")) == len(of(events, "sync.verify")) == 3
    assert the(events, "profiler.dropped")["events"] == profile.status()["dropped"] == 2
    away.close()


async def test_of_events_that_nobody_takes_no_more_are_kept_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipping_module, "MAX_UNSENT", 3)
    shipping = Shipping("r", ManualClock())
    profile.configure("replica-r", Setup("full"))
    for _ in range(5):
        profile.note("sync.load")
    caller = Answering(shipping, "a")
    assert [await caller.next(), await caller.next()] == ["a", ["sync.load"] * 5]
    await caller.leave()
    *kept, lost = shipping.all()
    assert [one["event"] for one in kept] == ["sync.load"] * 3
    assert (lost["event"], lost["events"]) == ("profiler.dropped", 2)


async def test_levels_change_nothing_but_what_is_told(tmp_path: Path, marking: None) -> None:
    results = {}
    levels: tuple[Any, ...] = ("off", "summary", "full")
    for level in levels:
        profile.configure("rollouter", Setup(level, tmp_path / level / "events"))
        run = Run(n=2, num_samples=4)
        await run.go()
        results[level] = (run.trained, (await run.queue.status()).books)
        profile.close()
    assert not (tmp_path / "off" / "events").exists()
    trained, books = results["off"]
    assert sorted(trained) == [f"sample_0_{index}" for index in range(1, 5)] and books.trained == 4
    assert results["summary"] == results["full"] == results["off"]
    names, all_names = ({one["event"] for one in written(tmp_path / level)} for level in ("summary", "full"))
    fine = {"generate.call", "turn.parse", "sample.offer", "rollout.permit"}
    assert {"trajectory", "sample.ready", "tool.execute", "request", "sync.apply"} <= names
    assert not names & fine and names | fine <= all_names
