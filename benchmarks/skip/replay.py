"""Measure samples from real engines behind Ray Serve against the same samples from their records."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import anyio
import numpy as np

from asyncrl.config.compose import load_config
from asyncrl.config.schema import Config
from asyncrl.core.ports import EngineFleet
from asyncrl.core.trajectory import Generated, SampleRequest, single_turn
from asyncrl.core.types import Prompt, SampleId, Turn
from benchmarks.models import SHAPES, make_llama
from benchmarks.report import Table
from benchmarks.running import local_ray, print_progress, ratio, serving
from benchmarks.skip.samples import ROLE, recording
from rollouter.group import GroupGeneration
from rollouter.loading import load_task
from rollouter.sample_runner import ask_for
from skip.manager import SkipManager

NAMESPACE = "bench-skip"


class EngineStage:
    """Generates samples with engines as the Rollouter does."""

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet
        self._numbers = itertools.count()
        self.calls = 0

    async def generate(self, request: SampleRequest) -> Generated:
        self.calls += 1
        started = time.perf_counter()
        name = f"{request.sample_id}-{next(self._numbers)}"
        made = await GroupGeneration(request, fleet=self._fleet, session=name).run()
        return Generated(request.prompt, tuple(made), time.perf_counter() - started)


class ReplayCase(NamedTuple):
    """The samples to generate and to replay."""

    name: str
    config: Config
    asked: Callable[[int], SampleRequest]
    """Returns the request for a feed index, which starts at 1."""
    concurrent: int
    """Samples in flight, for generation and replay."""
    generated: int
    """Samples generated in a round."""
    copies: int
    """Records of each generated sample."""
    passes: int
    """How often a round replays all records."""
    rounds: int
    lengths: tuple[int, ...] = ()
    """If not empty: increasing response lengths to generate, until the next one would take longer than `LIMIT_S`.
    Records then have the requested length, with repeated tokens, and the ratio is a lower bound."""


def measure_replay(directory: Path, rounds: int) -> Table:
    """Start Ray and return the rows of all cases."""
    with local_ray(NAMESPACE):
        cases = (_quickstart(directory, rounds), _long(directory))
        return [row for case in cases for row in anyio.run(_replay_rows, case)]


def _quickstart(directory: Path, rounds: int) -> ReplayCase:
    """Return the case of the samples that `asyncrl launch fully_async` generates without a config file."""
    dump = directory / "quickstart"
    overrides = [f"skip.{ROLE}.enable=true", f"skip.{ROLE}.steps=all", f"skip.{ROLE}.dump_dir={dump}"]
    config = load_config(None, overrides)
    prompts = load_task(config, directory / "data").prompts

    def asked(index: int) -> SampleRequest:
        return ask_for(config, SampleId((index - 1) // len(prompts), index), prompts)

    many = config.rollout.max_concurrent_samples
    return ReplayCase("quickstart", config, asked, many, generated=4 * many, copies=1, passes=4, rounds=rounds)


LONG_N, LONG_TOKENS, LONG_PROMPT = 16, 8192, 64
LIMIT_S = 180.0
"""Maximum time to generate one long sample."""


def _long(directory: Path) -> ReplayCase:
    """Return the case of a random model of the quickstart's size, whose responses always have the maximum length."""
    shape = replace(SHAPES["1M"], max_positions=LONG_PROMPT + LONG_TOKENS)
    path = make_llama(directory / "model", shape)
    config = recording(
        directory / "long",
        model={"path": str(path)},
        rollout={"n": LONG_N, "response_length": LONG_TOKENS, "max_model_len": shape.max_positions},
    )
    ids = np.random.default_rng(0).integers(5, shape.vocab_size, LONG_PROMPT, dtype=np.int32)
    sampling = {"temperature": 1.0, "max_tokens": LONG_TOKENS, "ignore_eos": True}

    def asked(index: int) -> SampleRequest:
        return SampleRequest(SampleId(0, index), Prompt(ids), sampling, LONG_N)

    lengths = (LONG_TOKENS // 4, LONG_TOKENS // 2, LONG_TOKENS)
    return ReplayCase("8k x 16", config, asked, 1, generated=1, copies=16, passes=4, rounds=1, lengths=lengths)


async def _replay_rows(case: ReplayCase) -> Table:
    print_progress(f"replay, {case.name}: starting the engine")
    async with serving(case.config, NAMESPACE) as fleet:
        with SkipManager.session(case.config):
            return await replay_case(case, EngineStage(fleet))


async def replay_case(case: ReplayCase, stage: EngineStage) -> Table:
    """Generate and replay samples in rounds; return a row for engines and one for records."""
    replayed = SkipManager.annotate(ROLE)(stage.generate)
    known: dict[SampleId | str, Generated] = {}

    @SkipManager.annotate(ROLE)
    async def record(request: SampleRequest) -> Generated:
        return known[request.sample_id]

    rates: dict[str, list[float]] = {"engines": [], "records": []}
    lengths: dict[str, list[int]] = {"engines": [], "records": []}
    size = case.generated * case.copies
    warm_up = replace(case.asked(1), sampling={**case.asked(1).sampling, "max_tokens": 32})
    await at_once(stage.generate, [warm_up] * min(case.concurrent, case.generated), case.concurrent)
    for number in range(case.rounds):
        batch = [case.asked(1 + number * size + place) for place in range(size)]
        made, seconds = await _generate(case, stage, batch[: case.generated])
        kept = [_lengthened(one) for one in made] if case.lengths else made
        known = {asked.sample_id: one for asked, one in zip(batch, itertools.cycle(kept), strict=False)}
        await at_once(record, batch, case.concurrent)
        stage.calls = 0
        started = time.perf_counter()
        for _ in range(case.passes):
            again = await at_once(replayed, batch, case.concurrent)
        rates["records"].append(case.passes * size / (time.perf_counter() - started))
        rates["engines"].append(case.generated / seconds)
        for name, some in (("engines", made), ("records", again)):
            lengths[name] += [each.num_sampled for one in some for each in one.trajectories]
        if stage.calls or not all(map(same, known.values(), again)):
            raise SystemExit(f"{case.name}: {stage.calls} samples were generated again, or the replayed ones differ")
    ratios = {"engines": 1.0, "records": ratio(rates["records"], rates["engines"])}
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


async def _generate(
    case: ReplayCase, stage: EngineStage, batch: Sequence[SampleRequest]
) -> tuple[list[Generated], float]:
    """Return the generated samples and the seconds they took."""
    for length in case.lengths or (None,):
        print_progress(
            f"replay, {case.name}: generating {len(batch) * batch[0].n} responses"
            + f" of {length} tokens" * bool(length)
        )
        cut = {} if length is None else {"max_tokens": length}
        asked = [replace(one, sampling={**one.sampling, **cut}) for one in batch]
        started = time.perf_counter()
        made = await at_once(stage.generate, asked, case.concurrent)
        # With attention, twice the tokens take up to four times as long.
        if 4 * (seconds := time.perf_counter() - started) > LIMIT_S:
            break
    return made, seconds


def _lengthened(one: Generated) -> Generated:
    turns = [
        Turn(
            np.resize(each.rows[0].response_ids, LONG_TOKENS),
            np.resize(each.rows[0].rollout_log_probs, LONG_TOKENS),
            each.rows[0].spans,
            each.finish_reason,
        )
        for each in one.trajectories
    ]
    return replace(one, trajectories=tuple(single_turn(one.prompt, turn) for turn in turns))


def same(one: Generated, other: Generated) -> bool:
    """Return whether all tokens and log-probs of two samples are equal."""
    mine, its = ([row for each in sample.trajectories for row in each.rows] for sample in (one, other))
    return len(mine) == len(its) and all(
        np.array_equal(row.response_ids, theirs.response_ids)
        and row.rollout_log_probs.tobytes() == theirs.rollout_log_probs.tobytes()
        for row, theirs in zip(mine, its, strict=True)
    )


async def at_once(
    stage: Callable[[SampleRequest], Awaitable[Generated]], batch: Sequence[SampleRequest], concurrent: int
) -> list[Generated]:
    """Run `stage` on the batch, `concurrent` at a time; results keep the order."""
    limit = asyncio.Semaphore(concurrent)

    async def one(request: SampleRequest) -> Generated:
        async with limit:
            return await stage(request)

    return await asyncio.gather(*map(one, batch))
