"""Replay against generation, files against `torch.save`, and what recording and a disabled annotation cost.

    replay     the same samples from real engines behind Ray Serve and from their records, as many at once:
               the quickstart (its model, prompts, sampling and n), and one of 16 responses of 8,192 tokens
    files      records written and read, from `Generated` to `Generated`, against torch.save and
               torch.load(weights_only=True) to one file that is renamed, of ready tensors and of the same samples: by
               the caller itself, and from an event loop through `skip.lane`, as the role does it
    loop       how late a 1 ms timer is on the event loop, alone and with 64 samples that are recorded without a pause
    disabled   nanoseconds that `SkipManager.annotate` adds to a call while nothing is enabled

What is compared takes turns within one run. Rates are medians over rounds, ratios are medians of the ratios of
neighbouring rounds, lateness is a percentile over all rounds. Nothing is synced to disk by either side, and what is
read was written just before: it comes out of the page cache.

On ext4 a new file may take 1 ms where it takes 20 µs elsewhere: a free inode is searched among those of files that were
deleted near it within the last minutes. So nothing is deleted here until the end, every round has a directory that ext4
may put anywhere (`chattr +T`), and what an empty file takes is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import anyio
import numpy as np

import asyncrl
from asyncrl.config.compose import load_config
from asyncrl.config.schema import Config
from asyncrl.ports import EngineFleet
from asyncrl.types import FinishReason, Prompt, SampleId, Span, Turn
from benchmarks.models import SHAPES, make_llama
from benchmarks.report import arguments, machine, report
from rollouter.group import generate_group
from rollouter.rollouter import load_task
from rollouter.sampling import sampling_params
from skip.files import RecordFiles, record_name
from skip.generation import Asked, Generated, from_content, to_content
from skip.lane import lane
from skip.manager import SkipManager
from skip.record import Content, Origin, Record

NAMESPACE = "bench-skip"
ROLE = "async_rollout"
TICK_S = 0.001
IN_FLIGHT = 64
FILE_ROUNDS = 8
"""For each round that is asked for: they are short."""
CALLS = 20_000
"""Of a disabled annotation, in a round."""
AIMS = {
    "replay": "replay at least 50 times as fast as generation",
    "files": "at least as fast as torch.save and torch.load: 1 or more",
    "loop": "less than 5 ms added to the 99th percentile",
    "disabled": "less than 1,000 ns added",
}
Table = list[dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=_positive, default=5, help="of everything but the long generation (default 5)")
    parser.add_argument("--no-engine", action="store_true", help="files, loop and annotation only: start no engines")
    parser.add_argument(
        "--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    try:
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.open("a").close()
    except OSError as error:
        parser.error(f"argument --json: {options.json} cannot be written: {error.strerror}")
    if not (options.dir.is_dir() and os.access(options.dir, os.W_OK)):
        parser.error(f"argument --dir: {options.dir} is no directory that can be written to")
    tables: dict[str, Table] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-skip-", dir=options.dir) as scratch:
        directory = Path(scratch)
        if shutil.which("chattr"):
            subprocess.run(["chattr", "+T", scratch], check=False, capture_output=True)
        facts: dict[str, Any] = {
            "directory": str(options.dir),
            "file_system": file_system(directory),
            "empty_file_us": empty_file_us(directory),
        }
        if not options.no_engine:
            tables["replay"] = measure_replay(directory, options.rounds)
        tables["files"] = measure_files(directory, SIZES, FILE_ROUNDS * options.rounds)
        tables["loop"] = measure_loop(directory, SIZES, options.rounds)
    tables["disabled"] = measure_disabled(10 * options.rounds, CALLS)
    for name, rows in tables.items():
        report(f"skip, {name}", rows, aim=f"aim: {AIMS[name]}", **(facts if name in ("files", "loop") else {}))
    if options.json is not None:
        result = {"name": "skip", "rounds": options.rounds, **facts, "aims": AIMS, **tables, "machine": machine()}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------------ what is recorded


@dataclass(frozen=True, slots=True)
class Size:
    """A kind of sample, and how much of it is measured."""

    name: str
    n: int
    tokens: tuple[int, int]
    """Fewest and most of a response."""
    records: int
    """In a round of files."""
    loop_s: float
    """Of a round on the event loop."""


SIZES = (
    Size("quickstart", n=8, tokens=(4, 16), records=60, loop_s=3.0),
    Size("8k x 16", n=16, tokens=(8192, 8192), records=12, loop_s=3.0),
)


def make_generated(size: Size, seed: int) -> Generated:
    """A sample such as engines make."""
    rng = np.random.default_rng(seed)
    text = "+".join(str(number) for number in rng.integers(1, 20, 4)) + "="
    messages: tuple[Mapping[str, Any], ...] = ({"role": "user", "content": text},)
    ids = rng.integers(5, 60, len(text) + 3, dtype=np.int32)
    prompt = Prompt(ids, messages, "asyncrl/chain_sum", "26", {"index": seed, "split": "train"})
    turns = [
        Turn(
            rng.integers(5, 60, length, dtype=np.int32),
            -rng.random(length, dtype=np.float32),
            (Span(0, 0),),
            FinishReason.STOP,
        )
        for length in rng.integers(size.tokens[0], size.tokens[1], size.n, endpoint=True)
    ]
    return Generated(prompt, tuple(turns), 1.0)


def array_bytes(sample: Generated) -> int:
    """Of its arrays, whatever they are kept in."""
    turns = sum(turn.response_ids.nbytes + turn.rollout_log_probs.nbytes for turn in sample.turns)
    return sample.prompt.prompt_ids.nbytes + turns


def recording(directory: Path, **sections: Any) -> Config:
    """All steps of the role, below `directory`."""
    role = {"enable": True, "steps": "all", "dump_dir": str(directory)}
    return Config.model_validate({**sections, "skip": {ROLE: role}})


# ------------------------------------------------------------------------------------------------ replay


class Stage:
    """Generation by engines, as the Rollouter asks for it."""

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet
        self._numbers = itertools.count()
        self.calls = 0

    async def generate(self, asked: Asked) -> Generated:
        self.calls += 1
        started = time.perf_counter()
        name = f"{asked.sample_id}-{next(self._numbers)}"
        turns = await generate_group(self._fleet, name, asked.prompt, asked.sampling, n=asked.n)
        return Generated(asked.prompt, tuple(turns), time.perf_counter() - started)


class Case(NamedTuple):
    """What is generated and replayed."""

    name: str
    config: Config
    asked: Callable[[int], Asked]
    """The sample of a feed index, from 1 on."""
    concurrent: int
    """Samples at once, of both sides."""
    generated: int
    """Samples in a round."""
    copies: int
    """Records of each of them."""
    passes: int
    """How often a round replays them all."""
    rounds: int
    lengths: tuple[int, ...] = ()
    """What to generate instead: responses of so many tokens, ever longer, until the next would take `LIMIT_S`. Records
    are of the length asked for, their tokens repeated; the ratio is a lower bound then."""


def measure_replay(directory: Path, rounds: int) -> Table:
    """A row for each case; Ray is started for them, and stopped."""
    import ray

    ray.init(address="local", namespace=NAMESPACE, num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        cases = (_quickstart(directory, rounds), _long(directory))
        return [row for case in cases for row in anyio.run(_replay_rows, case)]
    finally:
        ray.shutdown()


def _quickstart(directory: Path, rounds: int) -> Case:
    """What `asyncrl launch fully_async` generates without a config file."""
    dump = directory / "quickstart"
    overrides = [f"skip.{ROLE}.enable=true", f"skip.{ROLE}.steps=all", f"skip.{ROLE}.dump_dir={dump}"]
    config = load_config(None, overrides)
    prompts = load_task(config, directory / "data").prompts
    rollout = config.rollout

    def asked(index: int) -> Asked:
        sample_id = SampleId((index - 1) // len(prompts), index)
        prompt = prompts.at(sample_id)
        sampling = sampling_params(
            rollout.sampling,
            prompt,
            response_length=rollout.response_length,
            max_model_len=config.max_model_len,
            training=True,
        )
        return Asked(sample_id, prompt, sampling, rollout.n)

    many = rollout.max_concurrent_samples
    return Case("quickstart", config, asked, many, generated=4 * many, copies=1, passes=4, rounds=rounds)


LONG_N, LONG_TOKENS, LONG_PROMPT = 16, 8192, 64
LIMIT_S = 180.0
"""Longest that generating one long sample may take."""


def _long(directory: Path) -> Case:
    """A random model of the quickstart's size with room for the long responses, which do not end by themselves."""
    shape = replace(SHAPES["1M"], max_positions=LONG_PROMPT + LONG_TOKENS)
    path = make_llama(directory / "model", shape)
    config = recording(
        directory / "long",
        model={"path": str(path)},
        rollout={"n": LONG_N, "response_length": LONG_TOKENS, "max_model_len": shape.max_positions},
    )
    ids = np.random.default_rng(0).integers(5, shape.vocab_size, LONG_PROMPT, dtype=np.int32)
    sampling = {"temperature": 1.0, "max_tokens": LONG_TOKENS, "ignore_eos": True}

    def asked(index: int) -> Asked:
        return Asked(SampleId(0, index), Prompt(ids), sampling, LONG_N)

    lengths = (LONG_TOKENS // 4, LONG_TOKENS // 2, LONG_TOKENS)
    return Case("8k x 16", config, asked, 1, generated=1, copies=16, passes=4, rounds=1, lengths=lengths)


async def _replay_rows(case: Case) -> Table:
    from rollouter.serving.app import start_app, stop_app
    from rollouter.serving.fleet import ServeFleet

    _say(f"replay, {case.name}: starting the engine")
    await start_app(case.config, namespace=NAMESPACE)
    try:
        stage = Stage(ServeFleet(case.config, namespace=NAMESPACE))
        with SkipManager.session(case.config):
            return await replay_case(case, stage)
    finally:
        await stop_app(NAMESPACE)


async def replay_case(case: Case, stage: Stage) -> Table:
    """Rounds of generating new samples and replaying these: a row for engines, and one for records."""
    replayed = SkipManager.annotate(ROLE)(stage.generate)
    known: dict[int, Generated] = {}

    @SkipManager.annotate(ROLE)
    async def record(asked: Asked) -> Generated:
        return known[asked.sample_id.index]

    rates: dict[str, list[float]] = {"engines": [], "records": []}
    lengths: dict[str, list[int]] = {"engines": [], "records": []}
    size = case.generated * case.copies
    warm_up = replace(case.asked(1), sampling={**case.asked(1).sampling, "max_tokens": 32})
    await at_once(stage.generate, [warm_up] * min(case.concurrent, case.generated), case.concurrent)
    for number in range(case.rounds):
        batch = [case.asked(1 + number * size + place) for place in range(size)]
        made, seconds = await _generate(case, stage, batch[: case.generated])
        kept = [_lengthened(one) for one in made] if case.lengths else made
        known = {asked.sample_id.index: one for asked, one in zip(batch, itertools.cycle(kept), strict=False)}
        await at_once(record, batch, case.concurrent)
        stage.calls = 0
        started = time.perf_counter()
        for _ in range(case.passes):
            again = await at_once(replayed, batch, case.concurrent)
        rates["records"].append(case.passes * size / (time.perf_counter() - started))
        rates["engines"].append(case.generated / seconds)
        for name, some in (("engines", made), ("records", again)):
            lengths[name] += [len(turn.response_ids) for one in some for turn in one.turns]
        if stage.calls or not all(map(same, known.values(), again)):
            raise SystemExit(f"{case.name}: {stage.calls} samples were generated again, or other ones were replayed")
    ratios = {"engines": 1.0, "records": _ratio(rates["records"], rates["engines"])}
    samples = {"engines": case.rounds * case.generated, "records": case.rounds * case.passes * size}
    return [
        {
            "sample": case.name,
            "from": name,
            "at once": case.concurrent,
            "n": case.asked(1).n,
            "tokens": statistics.fmean(lengths[name]),
            "samples": samples[name],
            "per s": statistics.median(rates[name]),
            "ratio": ratios[name],
        }
        for name in rates
    ]


async def _generate(case: Case, stage: Stage, batch: Sequence[Asked]) -> tuple[list[Generated], float]:
    """Samples, and the seconds they took."""
    for length in case.lengths or (None,):
        _say(
            f"replay, {case.name}: generating {len(batch) * batch[0].n} responses"
            + f" of {length} tokens" * bool(length)
        )
        cut = {} if length is None else {"max_tokens": length}
        asked = [replace(one, sampling={**one.sampling, **cut}) for one in batch]
        started = time.perf_counter()
        made = await at_once(stage.generate, asked, case.concurrent)
        # Attention makes twice the tokens up to four times the work.
        if 4 * (seconds := time.perf_counter() - started) > LIMIT_S:
            break
    return made, seconds


def _lengthened(one: Generated) -> Generated:
    return replace(
        one,
        turns=tuple(
            replace(
                turn,
                response_ids=np.resize(turn.response_ids, LONG_TOKENS),
                rollout_log_probs=np.resize(turn.rollout_log_probs, LONG_TOKENS),
            )
            for turn in one.turns
        ),
    )


def same(one: Generated, other: Generated) -> bool:
    """Every token and log-prob of the two."""
    return len(one.turns) == len(other.turns) and all(
        np.array_equal(turn.response_ids, its.response_ids)
        and turn.rollout_log_probs.tobytes() == its.rollout_log_probs.tobytes()
        for turn, its in zip(one.turns, other.turns, strict=True)
    )


async def at_once(
    stage: Callable[[Asked], Awaitable[Generated]], batch: Sequence[Asked], concurrent: int
) -> list[Generated]:
    """Put all through `stage`, so many at a time; in order."""
    limit = asyncio.Semaphore(concurrent)

    async def one(asked: Asked) -> Generated:
        async with limit:
            return await stage(asked)

    return await asyncio.gather(*map(one, batch))


# ------------------------------------------------------------------------------------------------ files


class Way(Protocol):
    """How samples are kept in a directory."""

    def write(self, step: int) -> None: ...

    def read(self, step: int) -> None: ...


class Records:
    """What the role does, checksums included."""

    def __init__(self, directory: Path, samples: Sequence[Generated]) -> None:
        self._files = RecordFiles(directory)
        self._samples = samples

    def write(self, step: int) -> None:
        origin = Origin(time.time(), socket.gethostname(), 0, 0, asyncrl.__version__)
        record = Record(ROLE, step, FINGERPRINT, origin, to_content([self._samples[step]]))
        self._files.write(record_name(step), record)

    def read(self, step: int) -> None:
        from_content(self._files.read(record_name(step)).content)


class TorchArrays:
    """The same arrays as ready tensors, with the same metadata; what is read stays tensors."""

    def __init__(self, directory: Path, samples: Sequence[Generated]) -> None:
        import torch

        self._torch = torch
        self._directory = directory
        self._values = [self.value(to_content([sample])) for sample in samples]
        directory.mkdir(parents=True)

    def value(self, content: Content) -> dict[str, Any]:
        tensors = {name: self._torch.from_numpy(array) for name, array in content.arrays.items()}
        return {"tensors": tensors, "data": dict(content.data), "fingerprint": FINGERPRINT}

    def write(self, step: int) -> None:
        self.save(step, self._values[step])

    def read(self, step: int) -> None:
        self.load(step)

    def save(self, step: int, value: Mapping[str, Any]) -> None:
        temporary = self._directory / f".{step}.new"
        self._torch.save(value, temporary)
        os.rename(temporary, self._directory / f"{step}.pt")

    def load(self, step: int) -> Mapping[str, Any]:
        value: Mapping[str, Any] = self._torch.load(self._directory / f"{step}.pt", weights_only=True)
        return value


class TorchSamples(TorchArrays):
    """The same files, made of samples and back, as `Records` are."""

    def __init__(self, directory: Path, samples: Sequence[Generated]) -> None:
        super().__init__(directory, samples)
        self._samples = samples

    def write(self, step: int) -> None:
        self.save(step, self.value(to_content([self._samples[step]])))

    def read(self, step: int) -> None:
        value = self.load(step)
        from_content(Content({name: tensor.numpy() for name, tensor in value["tensors"].items()}, value["data"]))


FINGERPRINT = {name: "sha256:" + 32 * "0" for name in ("prompt_ids", "sampling", "model", "tokenizer")} | {"n": "8"}
WAYS: dict[str, Callable[[Path, Sequence[Generated]], Way]] = {
    "skip": Records,
    "torch arrays": TorchArrays,
    "torch samples": TorchSamples,
}
OPS = ("write", "read")


def measure_files(directory: Path, sizes: Sequence[Size], rounds: int) -> Table:
    """A row for each way to write and to read each size, by the caller and through the lane."""
    rows: Table = []
    for size in sizes:
        samples = [make_generated(size, seed) for seed in range(size.records)]
        megabytes = statistics.fmean(map(array_bytes, samples)) / 1e6
        for by, timed in DOERS.items():
            _say(f"files, {size.name}, by the {by}")
            times: dict[tuple[str, str], list[float]] = {key: [] for key in itertools.product(OPS, WAYS)}
            for number in range(-1, rounds):  # the first round warms all up
                for way in sorted(WAYS, reverse=bool(number % 2)):
                    place = directory / f"{size.name}-{by}-{number}-{way}"
                    made = WAYS[way](place, samples)
                    for op, one in zip(OPS, (made.write, made.read), strict=True):
                        seconds = timed(op, one, size.records)
                        if number >= 0:
                            times[op, way].append(seconds / size.records)
                    _empty(place)
            for (op, way), taken in times.items():
                rate = 1 / statistics.median(taken)
                row = {"sample": size.name, "by": by, "what": op, "way": way, "per s": rate, "MB/s": rate * megabytes}
                rows.append({**row, "skip faster": _ratio(taken, times[op, "skip"])})
    return rows


def _by_caller(op: str, one: Callable[[int], None], count: int) -> float:
    """Seconds for all steps from 0 on."""
    started = time.perf_counter()
    for step in range(count):
        one(step)
    return time.perf_counter() - started


def _by_lane(op: str, one: Callable[[int], None], count: int) -> float:
    """The same, with all of them waiting in line."""

    async def run() -> float:
        await lane(op).run(lambda: None)
        started = time.perf_counter()
        await asyncio.gather(*(lane(op).run(partial(one, step)) for step in range(count)))
        return time.perf_counter() - started

    return asyncio.run(run())


DOERS = {"caller": _by_caller, "lane": _by_lane}


# ------------------------------------------------------------------------------------------------ event loop


def measure_loop(directory: Path, sizes: Sequence[Size], rounds: int) -> Table:
    """Two rows, alone and recording, for each size."""
    return [row for size in sizes for row in anyio.run(partial(_loop_rows, directory / "loop", size, rounds))]


async def _loop_rows(directory: Path, size: Size, rounds: int) -> Table:
    _say(f"loop, {size.name}")
    samples = [make_generated(size, seed) for seed in range(min(size.records, IN_FLIGHT))]
    late: dict[str, list[float]] = {"nothing": [], "recording": []}
    rates: list[float] = []
    for number in range(rounds):
        late["nothing"] += await _lateness(size.loop_s)
        place = directory / f"{size.name}-{number}"
        with SkipManager.session(recording(place)):
            times, rate = await _while_recording(samples, size.loop_s)
        _empty(place)
        late["recording"] += times
        rates.append(rate)
    p99 = {name: 1e3 * float(np.percentile(times, 99)) for name, times in late.items()}
    return [
        {
            "sample": size.name,
            "beside": name,
            "records/s": statistics.median(rates) if name == "recording" else 0.0,
            "p50 ms": 1e3 * float(np.percentile(times, 50)),
            "p99 ms": p99[name],
            "max ms": 1e3 * max(times),
            "p99 added ms": p99[name] - p99["nothing"],
        }
        for name, times in late.items()
    ]


async def _while_recording(samples: Sequence[Generated], seconds: float) -> tuple[list[float], float]:
    """Lateness, and records per second, with `IN_FLIGHT` samples in flight, each followed by another at once."""
    steps = itertools.count()
    ended = False

    @SkipManager.annotate(ROLE)
    async def generate(asked: Asked) -> Generated:
        return samples[asked.sample_id.index % len(samples)]

    async def keep_on() -> None:
        while not ended:
            index = next(steps)
            prompt = samples[index % len(samples)].prompt
            await generate(Asked(SampleId(0, index), prompt, {"temperature": 1.0}, len(samples[0].turns)))

    # The first one finds out which model it is: the files of the model are read once.
    await generate(Asked(SampleId(0, next(steps)), samples[0].prompt, {}, 1))
    async with anyio.create_task_group() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.start_soon(keep_on)
        before, started = SkipManager.status()[ROLE]["recorded"], time.perf_counter()
        late = await _lateness(seconds)
        rate = (SkipManager.status()[ROLE]["recorded"] - before) / (time.perf_counter() - started)
        ended = True
    counts = SkipManager.status()[ROLE]
    if set(counts) != {"recorded"}:
        raise SystemExit(f"something was not recorded: {counts}")
    return late, rate


async def _lateness(seconds: float) -> list[float]:
    """Seconds by which a timer of `TICK_S` was late, again and again."""
    late: list[float] = []
    until = time.perf_counter() + seconds
    while (now := time.perf_counter()) < until:
        await asyncio.sleep(TICK_S)
        late.append(time.perf_counter() - now - TICK_S)
    return late


# ------------------------------------------------------------------------------------------------ disabled


def measure_disabled(rounds: int, calls: int) -> Table:
    """A row for a plain function and one for an async one."""

    def plain(asked: int) -> int:
        return asked

    async def awaited(asked: int) -> int:
        return asked

    async def await_all(function: Callable[[int], Awaitable[int]]) -> float:
        started = time.perf_counter_ns()
        for _ in range(calls):
            await function(1)
        return (time.perf_counter_ns() - started) / calls

    def call_all(function: Callable[[int], int]) -> float:
        started = time.perf_counter_ns()
        for _ in range(calls):
            function(1)
        return (time.perf_counter_ns() - started) / calls

    def row(name: str, measure: Callable[[Any], float], function: Callable[[int], Any]) -> dict[str, Any]:
        annotated = SkipManager.annotate(ROLE)(function)
        bare, wrapped = zip(*((measure(function), measure(annotated)) for _ in range(rounds)), strict=True)
        return {
            "function": name,
            "bare ns": statistics.median(bare),
            "annotated ns": statistics.median(wrapped),
            "added ns": statistics.median(b - a for a, b in zip(bare, wrapped, strict=True)),
        }

    SkipManager.reset()
    return [
        row("def", call_all, plain),
        row("async def", lambda function: asyncio.run(await_all(function)), awaited),
    ]


# ------------------------------------------------------------------------------------------------ inside


def file_system(path: Path) -> str:
    """The kind that `path` is on."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return "of unknown kind"
    on = [(len(mount[1]), mount[2]) for mount in mounts if path.resolve().is_relative_to(mount[1])]
    return max(on)[1] if on else "of unknown kind"


def empty_file_us(directory: Path) -> float:
    """Median microseconds to make an empty file in a new directory."""
    place = directory / "empty"
    place.mkdir()
    times = []
    for number in range(200):
        started = time.perf_counter()
        os.close(os.open(place / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def _empty(directory: Path) -> None:
    """Let go of the data of all files below, and of no file."""
    for folder, _, names in os.walk(directory):
        for name in names:
            os.truncate(os.path.join(folder, name), 0)


def _ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios of what was measured in the same round."""
    return statistics.median(one / other for one, other in zip(values, others, strict=True))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def _say(what: str) -> None:
    sys.stderr.write(f"{what}\n")


if __name__ == "__main__":
    main()
