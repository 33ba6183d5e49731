"""Measure tokens per second through fleet, Serve handle and replica, against a bare `AsyncLLM` with the same requests.

The bare engine runs in a Ray actor with the same engine arguments and the same kind of requests (token ids in, final
output only, log-probs of sampled tokens). Both engines stay up, and their rounds alternate. Requests come in groups of
8, response lengths have a long tail, and `--concurrent` groups are in flight at once. Figures are medians over rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import ray

from asyncrl.config.schema import Config
from asyncrl.core.ports import GenerateRequest
from benchmarks.agents.fleets import finished_turns
from benchmarks.models import SHAPES, make_llama
from benchmarks.report import Table, arguments, report
from benchmarks.running import alternating, local_ray, serving
from rollouter.serving.fleet import ServeFleet
from rollouter.serving.options import ServingOptions, serving_options

NAMESPACE = "bench-rollout"
GROUP = 8
LONGEST = 400


class BareEngine:
    """An `AsyncLLM` and a loop over requests."""

    async def start(self, options: ServingOptions) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        args = AsyncEngineArgs(
            model=options.llm_config["model_loading_config"]["model_source"],
            **options.llm_config["engine_kwargs"],
        )
        config = args.create_engine_config()
        # A replica uses the same executor: it saves a process and is faster.
        config.parallel_config.distributed_executor_backend = UniProcExecutor
        self._llm = AsyncLLM(vllm_config=config, executor_class=UniProcExecutor, log_stats=False)

    async def run(self, groups: Sequence[Sequence[GenerateRequest]], concurrent: int) -> int:
        """Return the number of generated tokens."""
        return await _bounded([partial(self._group, group) for group in groups], concurrent)

    async def _group(self, group: Sequence[GenerateRequest]) -> int:
        return sum(await asyncio.gather(*(self._one(request) for request in group)))

    async def _one(self, request: GenerateRequest) -> int:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            **request.sampling,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        tokens = 0
        async for output in self._llm.generate(tokens_input(request.prompt_ids.tolist()), params, request.request_id):
            tokens = len(output.outputs[0].token_ids)
        return tokens


def main() -> None:
    parser = arguments(__doc__, "rollout")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each engine (default 5)")
    parser.add_argument("--groups", type=int, default=24, help="groups of 8 requests in a round (default 24)")
    parser.add_argument("--concurrent", type=int, default=8, help="groups in flight at once (default 8)")
    parser.add_argument("--model", choices=sorted(SHAPES), default="1M", help="size of the random model (default 1M)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = make_llama(Path(directory) / options.model, SHAPES[options.model])
        with local_ray(NAMESPACE):
            rows = anyio.run(_measure, path, options.rounds, options.groups, options.concurrent)
    report(
        f"rollout, {options.model}, {options.concurrent * GROUP} requests at once",
        rows,
        options.json,
        aim="aim: ratio of at least 0.9",
        ratio=rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"],
    )


async def _measure(path: Path, rounds: int, groups: int, concurrent: int) -> Table:
    config = Config.model_validate({"model": {"path": str(path)}, "rollout": {"max_model_len": 512}})
    options = serving_options(config, namespace=NAMESPACE, gpus=False)
    bare = ray.remote(BareEngine).options(num_cpus=1, runtime_env={"env_vars": options.env_vars}).remote()
    await bare.start.remote(options)
    async with serving(config, NAMESPACE) as fleet:
        return await _take_turns(fleet, bare, rounds, groups, concurrent)


async def _take_turns(fleet: ServeFleet, bare: Any, rounds: int, groups: int, concurrent: int) -> Table:
    async def ours(batch: list[list[GenerateRequest]]) -> int:
        async def one(group: list[GenerateRequest]) -> int:
            turns = await finished_turns(fleet.generate(group, session=group[0].request_id))
            return sum(len(turn.response_ids) for turn in turns)

        return await _bounded([partial(one, group) for group in batch], concurrent)

    async def theirs(batch: list[list[GenerateRequest]]) -> int:
        return await bare.run.remote(batch, concurrent)

    rates: dict[str, list[float]] = {"fleet and Serve": [], "bare AsyncLLM": []}
    ways = (("fleet and Serve", ours), ("bare AsyncLLM", theirs))
    for number, (counts, (name, run)) in enumerate(alternating(ways, rounds)):
        started = time.perf_counter()
        tokens = await run(_batch(number // len(ways), groups))
        if counts:
            rates[name].append(tokens / (time.perf_counter() - started))
    ray.kill(bare)
    return [
        {"path": name, "tokens_per_s": statistics.median(values), "least": min(values), "most": max(values)}
        for name, values in rates.items()
    ]


def _batch(number: int, groups: int) -> list[list[GenerateRequest]]:
    """Make the requests of a round, with geometric response lengths of at most `LONGEST`."""
    rng = np.random.default_rng(number)
    prompts = rng.integers(5, 60, (groups, 24), dtype=np.int32)
    lengths = np.minimum(rng.geometric(1 / 80, (groups, GROUP)), LONGEST)
    return [
        [
            GenerateRequest(
                f"{number}-{group}-{row}",
                prompts[group],
                {"temperature": 1.0, "max_tokens": int(lengths[group, row]), "ignore_eos": True},
            )
            for row in range(GROUP)
        ]
        for group in range(groups)
    ]


async def _bounded(jobs: Sequence[Callable[[], Awaitable[int]]], concurrent: int) -> int:
    """Run the jobs, `concurrent` at once, and return the sum of their results."""
    limit = asyncio.Semaphore(concurrent)

    async def run(job: Callable[[], Awaitable[int]]) -> int:
        async with limit:
            return await job()

    return sum(await asyncio.gather(*(run(job) for job in jobs)))


if __name__ == "__main__":
    main()
