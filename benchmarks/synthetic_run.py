"""Write the event files of a plausible run of any size, with planted faults if requested.

Samples are admitted as the Trainer consumes them. Their trajectories generate turns on replicas of different speeds and
call tools; finished samples are scored, leased in the order in which they became ready, and trained. Every step is
published.
"""

from __future__ import annotations

import heapq
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from asyncrl.profiling.catalog import EventLevel, enabled
from asyncrl.profiling.files import EVENTS_DIRECTORY, step_dir

START = 1_790_000_000.0
VALIDATION_S = 2.0


@dataclass(frozen=True)
class PlantedFaults:
    replica_factor: float = 1.0
    """Factor by which the last replica is slower than the others."""
    tool_hang_s: float = 0.0
    tool_hangs: int = 0
    """Calls of the first tool that hang."""
    reward_hang_s: float = 0.0
    reward_hangs: int = 0
    reward_always_s: float = 0.0
    """Added to every call of the reward."""
    tool_always_s: float = 0.0
    """Added to every call of the first tool."""


@dataclass(frozen=True)
class RunPlan:
    steps: int = 12
    replicas: int = 3
    samples: int = 8
    """Per step."""
    n: int = 4
    turns: int = 3
    """The largest number of turns; with 1 there are no tools."""
    tools: tuple[str, ...] = ("search", "python")
    ahead: int = 1
    """Versions by which generation runs ahead."""
    slots: int = 0
    """Generation slots: the next sample starts as soon as one is free, independently of the Trainer. 0: samples start
    as the Trainer consumes them."""
    token_s: float = 0.02
    tokens: int = 80
    """Median number of tokens in a turn."""
    aborted: float = 0.1
    """Share of requests that a weight sync aborts."""
    dropped: float = 0.03
    """Share of samples that are dropped as stale."""
    validation_every: int = 4
    level: EventLevel = "summary"
    seed: int = 0
    back_from: int = 0
    """Training rewinds by two steps, in a new lineage, after this step; 0: never."""
    validation_alone: bool = False
    """Validation pauses generation."""
    until_s: float = math.inf
    """Seconds after which the run is killed: events that have not ended by then are missing."""
    replayed: float = 0.0
    """Share of samples that are replayed from a record; half of them are dropped as stale."""
    replica_replaced_after: int = 0
    """The last replica is replaced after this step by one whose first load is slow; 0: never."""
    first_update_s: float = 0.0
    """Additional duration of the first update of each lineage."""
    faults: PlantedFaults = field(default_factory=PlantedFaults)


@dataclass
class _Sample:
    index: int
    ready: float
    generated: float
    version: int
    tokens: int
    reward: float
    replayed: bool = False

    @property
    def name(self) -> str:
        return f"sample_0_{self.index}"


LARGE = RunPlan(steps=1_000_000, replicas=8, samples=32, n=16, turns=6, level="full")
"""The plan of a run with many events; `num_events` ends it."""


def write_run(directory: Path, plan: RunPlan | None = None, *, num_events: int | None = None) -> int:
    """Write a run directory and return its number of events; the run ends with the step that reaches `num_events`."""
    plan = plan or (RunPlan() if num_events is None else LARGE)
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "experiment_name": "synthetic",
        "profiler": {"level": plan.level},
        "rollout": {"response_length": 1024, "n": plan.n, "num_replicas": plan.replicas},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return _Run(directory, plan).write(num_events)


class _Run:
    def __init__(self, directory: Path, plan: RunPlan) -> None:
        self._plan = plan
        self._directory = directory / EVENTS_DIRECTORY
        self._random = random.Random(plan.seed)
        self._names = enabled(plan.level)
        self._lines: dict[tuple[int, str], list[str]] = defaultdict(list)
        self._written = 0
        self._step = 1
        self._version = 0
        self._index = 0
        expected = min(plan.steps, 1000) * plan.samples
        self._reward_hangs = _spread(expected, plan.faults.reward_hangs, self._random)
        self._tool_hangs = _spread(expected, plan.faults.tool_hangs, self._random)
        self._speeds = [plan.token_s * self._random.uniform(0.95, 1.05) for _ in range(plan.replicas)]
        self._speeds[-1] *= plan.faults.replica_factor
        self._replicas = [f"r{number}" for number in range(plan.replicas)]
        self._new_replica = ""
        self._updated: set[int] = set()

    def write(self, num_events: int | None) -> int:
        plan = self._plan
        free = START
        pending: list[_Sample] = []
        if plan.slots:
            pending = self._by_slots()
        else:
            for _ in range(plan.samples * (1 + plan.ahead)):
                pending.append(self._sample(START + self._random.uniform(0, 0.2)))
        lineage, went_back = 0, False
        while self._step <= plan.steps:
            pending.sort(key=lambda each: each.ready)
            leased, pending = pending[: plan.samples], pending[plan.samples :]
            free = self._train(leased, free, lineage)
            admits = free
            if plan.validation_every and self._step % plan.validation_every == 0:
                self._validate(free)
                admits += VALIDATION_S if plan.validation_alone else 0.0
            if self._step == plan.replica_replaced_after:
                self._replicas[-1] = self._new_replica = "new"
                self._put("driver", free - 5, "part.restarted", 5, part="replica", cause="killed")
            self._version += 1
            self._sync(free)
            for _ in leased if not plan.slots else ():
                sample = self._sample(admits + self._random.uniform(0, 0.05))
                while self._random.random() < (0.5 if sample.replayed else plan.dropped):
                    tokens = float(sample.tokens)
                    self._put(
                        "rollouter",
                        sample.ready,
                        "sample.dropped",
                        0,
                        sample=sample.name,
                        reason="stale",
                        tokens=tokens,
                    )
                    sample = self._sample(admits + self._random.uniform(0, 0.05))
                pending.append(sample)
            if self._step == plan.back_from and not went_back:
                went_back, lineage = True, 1
                self._put("driver", free, "part.restarted", 5, part="trainer", cause="killed")
                self._step -= 2
                self._version -= 2
                free += 5
            self._step += 1
            self._flush()
            if num_events is not None and self._written >= num_events:
                break
        return self._written

    # ------------------------------------------------------------------------------------------------ the Rollouter

    def _by_slots(self) -> list[_Sample]:
        """Generate all samples of the run with a fixed number of slots."""
        free = [START] * self._plan.slots
        made = []
        for _ in range(self._plan.steps * self._plan.samples):
            sample = self._sample(heapq.heappop(free), permit_s=0.0)
            heapq.heappush(free, sample.generated)
            made.append(sample)
        return made

    def _sample(self, admitted: float, *, permit_s: float = 0.2) -> _Sample:
        """Generate a sample; `permit_s` is the minimum wait for its permit."""
        plan, rng = self._plan, self._random
        self._index += 1
        index = self._index
        name = f"sample_0_{index}"
        wait = permit_s + rng.uniform(0, 0.1)
        self._put("rollouter", admitted - wait, "rollout.permit", wait, granted=1)
        self._put("rollouter", admitted, "sample.admitted", 0, sample=name, permit_wait_s=wait)
        slot = rng.uniform(0, 0.02)
        self._put("rollouter", admitted, "sample.slot", slot, sample=name)
        begun = admitted + slot
        if plan.replayed and rng.random() < plan.replayed:
            # The tokens were sampled by an earlier run.
            fields = {"sample": name, "trajectories": plan.n, "tokens": 10 * plan.tokens}
            self._put("rollouter", begun, "sample.generate", 0, replayed=1, **fields)
            self._put("rollouter", begun, "sample.ready", 0, sample=name, reward=0.0, tokens=fields["tokens"])
            return _Sample(index, begun, begun, self._version, 10 * plan.tokens, 0.0, replayed=True)
        ends, tokens = [], 0
        for number in range(plan.n):
            hangs = index in self._tool_hangs and number == 0
            end, made = self._trajectory(name, number, begun, hangs)
            ends.append(end)
            tokens += made
        generated = max(ends)
        self._put(
            "rollouter", begun, "sample.generate", generated - begun, sample=name, trajectories=plan.n, tokens=tokens
        )
        reward = 0.0
        scoring = 0.0
        for number in range(plan.n):
            took = 0.05 * rng.lognormvariate(0, 0.3) + plan.faults.reward_always_s * rng.uniform(0.8, 1.2)
            if number == 0 and index in self._reward_hangs:
                took += plan.faults.reward_hang_s
            score = float(rng.random() < 0.4)
            reward += score / plan.n
            scoring = max(scoring, took)
            self._put(
                "rollouter", generated, "reward.score", took,
                sample=name, trajectory=number, trajectories=1, reward=score,
            )  # fmt: skip
        self._put("rollouter", generated, "sample.reward", scoring, sample=name)
        ready = generated + scoring
        for event, took in (("sample.payload", 0.004), ("sample.offer", 0.003)):
            self._put("rollouter", ready, event, took, sample=name, bytes=50_000 if event == "sample.payload" else None)
            ready += took
        self._put("rollouter", ready, "queue.commit", 0.002, part="queue", transitions=2)
        self._put("rollouter", ready, "sample.ready", 0, sample=name, reward=reward, tokens=tokens, versions=0)
        return _Sample(index, ready, generated, self._version, tokens, reward)

    def _trajectory(self, sample: str, number: int, begun: float, hangs: bool) -> tuple[float, int]:
        plan, rng = self._plan, self._random
        replica = rng.randrange(plan.replicas)
        turns = 1 + min(plan.turns - 1, int(rng.expovariate(1.0) + rng.random())) if plan.turns > 1 else 1
        turns = max(turns, 2 if hangs and plan.turns > 1 else 1)
        now, tokens, sampled, generate_s, tool_s, context = begun, 0, 0, 0.0, 0.0, 60
        for turn in range(turns):
            length = max(4, int(rng.lognormvariate(0, 0.45) * plan.tokens))
            done = 0
            for attempt, part in self._attempts(length):
                aborted = attempt == 1 and part < length
                took = self._request(sample, number, turn, attempt, replica, now, context + done, part, aborted=aborted)
                now += took
                done += part
                generate_s += took
            tokens += length
            sampled += length
            context += length
            for event, took in (("turn.parse", 0.001), ("turnlog.write", 0.002)):
                self._put("rollouter", now, event, took, sample=sample, trajectory=number, turn=turn, tokens=length)
            if turn + 1 < turns and plan.tools:
                tool = plan.tools[0] if hangs and turn == 0 else rng.choice(plan.tools)
                took = 0.3 * rng.lognormvariate(0, 0.3) + (plan.faults.tool_hang_s if hangs and turn == 0 else 0.0)
                took += plan.faults.tool_always_s if tool == plan.tools[0] else 0.0
                self._put(
                    "rollouter", now, "tool.execute", took,
                    sample=sample, trajectory=number, turn=turn, tool=tool, status="ok", wait_s=0.0,
                )  # fmt: skip
                now += took
                tool_s += took
                tokens += 20
                context += 20
                self._put(
                    "rollouter", now, "turn.tokenize", 0.001, sample=sample, trajectory=number, turn=turn, tokens=20
                )
        self._put(
            "rollouter", begun, "trajectory", now - begun,
            sample=sample, trajectory=number, turns=turns, calls=turns - 1 if plan.tools else 0, tokens=tokens,
            sampled_tokens=sampled, finish_reason="stop", generate_s=generate_s, tool_s=tool_s, user_s=0.0,
        )  # fmt: skip
        return now, tokens

    def _attempts(self, length: int) -> Iterator[tuple[int, int]]:
        """Yield the number and the tokens of each request; a second request resumes one that a weight sync aborts."""
        if self._random.random() < self._plan.aborted and length > 8:
            part = self._random.randrange(2, length - 2)
            yield 1, part
            yield 2, length - part
        else:
            yield 1, length

    def _request(
        self, sample: str, number: int, turn: int, attempt: int, replica: int, now: float, context: int, length: int,
        *, aborted: bool,
    ) -> float:  # fmt: skip
        rng = self._random
        queued, prefill = rng.uniform(0, 0.01), 0.0002 * context
        decode = self._speeds[replica] * length * rng.lognormvariate(0, 0.05)
        paused = rng.uniform(0.02, 0.06) if rng.random() < 0.05 else 0.0
        took = queued + prefill + decode + paused
        place = f"{sample}/{number}" if turn == 0 else f"{sample}/{number}.{turn}"
        self._put(
            f"replica-{self._replicas[replica]}", now, "request", took,
            replica=self._replicas[replica], request=f"{place}-{attempt}", sample=sample, trajectory=number, turn=turn,
            prompt_tokens=context, response_tokens=length, finish_reason="aborted" if aborted else "stop", gate_s=0.0,
            queued_s=queued, prefill_s=prefill, decode_s=decode, paused_s=paused, in_flight=8,
        )  # fmt: skip
        self._put(
            "rollouter", now, "generate.call", took,
            sample=sample, trajectory=number, turn=turn, replica=self._replicas[replica], requests=1,
        )  # fmt: skip
        return took

    def _validate(self, now: float) -> None:
        for number in range(4):
            name = f"val_{self._version}_{number}"
            took = self._request(name, 0, 0, 1, number % self._plan.replicas, now, 60, 40, aborted=False)
            tokens = {"turns": 1, "calls": 0, "tokens": 40, "sampled_tokens": 40, "finish_reason": "stop"}
            self._put("rollouter", now, "trajectory", took, sample=name, trajectory=0, generate_s=took, **tokens)
        self._put("rollouter", now, "validation", VALIDATION_S, prompts=4)

    # ------------------------------------------------------------------------------------------------ the Trainer

    def _train(self, leased: list[_Sample], free: float, lineage: int) -> float:
        rng = self._random
        got = max(free, leased[-1].ready)
        self._put("trainer", free, "trainer.wait_samples", got - free, samples=len(leased))
        self._put("trainer", got - 0.01, "trainer.fetch", 0.01, samples=len(leased))
        staleness = [max(0, self._version - each.version) for each in leased]
        for each, age in zip(leased, staleness, strict=True):
            self._put("trainer", got, "sample.leased", 0, sample=each.name, staleness=age)
        work = 0.4 * len(leased) / 8
        experience, update = work * rng.uniform(0.9, 1.1), 3 * work * rng.uniform(0.9, 1.1)
        if lineage not in self._updated:
            self._updated.add(lineage)
            update += self._plan.first_update_s
        self._put("trainer", got, "trainer.experience", experience)
        self._put("trainer", got + experience, "trainer.update", update)
        for rank in range(2):
            call: Mapping[str, Any] = {"role": "actor", "rank": rank}
            self._put(f"rank-actor-{rank}", got + experience, "rank.call", update, method="update", **call)
            used = (40 + (self._step + rank) % 3) * 10**9
            memory = {"used_bytes": used, "total_bytes": 80 * 10**9}
            self._put(f"rank-actor-{rank}", got + experience, "gpu.memory", 0, **memory, **call)
            self._put(f"rank-actor-{rank}", got + experience, "rank.forward", update * 0.3, **call)
            self._put(f"rank-actor-{rank}", got + experience, "rank.backward", update * 0.6, **call)
            self._put(f"rank-actor-{rank}", got + experience + update * 0.9, "rank.optimizer", update * 0.1, **call)
        end = got + experience + update
        for each, age in zip(leased, staleness, strict=True):
            self._put(
                "trainer", end, "sample.trained", 0,
                sample=each.name, staleness=age, versions=min(1, age), reward=each.reward, tokens=each.tokens,
            )  # fmt: skip
        self._put("trainer", end, "trainer.commit", 0.005, samples=len(leased))
        publish = 0.1 * rng.uniform(0.9, 1.1)
        self._put("trainer", end, "trainer.publish", publish)
        self._put("rank-actor-0", end, "sync.gather", publish * 0.5)
        self._put("rank-actor-0", end + publish * 0.5, "sync.put", publish * 0.4, bytes=5_000_000)
        end += publish
        self._put(
            "trainer", free, "step", end - free,
            wait_samples_s=got - free, samples=len(leased), tokens=sum(each.tokens for each in leased),
            reward=sum(each.reward for each in leased) / len(leased), lineage=lineage,
        )  # fmt: skip
        return end

    def _sync(self, now: float) -> None:
        rng = self._random
        longest = 0.0
        for replica in range(self._plan.replicas):
            at = now
            name = self._replicas[replica]
            part = f"replica-{name}"
            for event, took in (("sync.fetch", 0.08), ("sync.drain", 0.01), ("sync.pause", 0.05)):
                took *= rng.uniform(0.8, 1.2)
                if event == "sync.pause" and name == self._new_replica:
                    self._new_replica = ""
                    took += 20.0
                self._put(part, at, event, took, replica=name)
                if event == "sync.pause":
                    self._put(part, at, "sync.load", took * 0.8, replica=name)
                at += took
            self._put(part, at, "sync.verify", 0.02, replica=name)
            longest = max(longest, at - now)
        self._put("rollouter", now, "sync.apply", longest, replicas=self._plan.replicas)

    # ------------------------------------------------------------------------------------------------ files

    def _put(self, file: str, at: float, event: str, took: float, **fields: Any) -> None:
        if event not in self._names or at + took > START + self._plan.until_s:
            return
        line: dict[str, Any] = {"timestamp": round(at, 6), "event": event, "duration_s": round(took, 6)}
        line |= {"step": self._step, "version": self._version}
        for name, value in fields.items():
            if value is not None:
                line[name] = round(value, 6) if isinstance(value, float) else value
        self._lines[self._step, file].append(json.dumps(line, separators=(",", ":")))

    def _flush(self) -> None:
        for (step, part), lines in self._lines.items():
            parent = step_dir(self._directory, step)
            parent.mkdir(parents=True, exist_ok=True)
            with (parent / f"{part}.jsonl").open("a") as file:
                file.write("\n".join(lines) + "\n")
            self._written += len(lines)
        self._lines.clear()


def _spread(count: int, chosen: int, rng: random.Random) -> set[int]:
    """Draw feed indices, except from the first quarter, in which the run has not reached its usual pace."""
    return set(rng.sample(range(max(1, count // 4), max(2, count - 1)), chosen)) if chosen else set()
