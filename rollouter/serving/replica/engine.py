"""Ray's vLLM engine, reduced to the parts that rollouts need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import StatLoggerBase

from asyncrl.core.process_health import EngineLoad
from rollouter.serving.ray_internals import VLLMEngine
from rollouter.serving.replica.batched_outputs import batch_outputs
from rollouter.serving.replica.vllm_imports import first_module_of_processes


class EngineGauges(StatLoggerBase):
    """The engine's token count and load, which vLLM reports after every step."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.generated_tokens = 0
        self.load = EngineLoad()
        self._cleared = 0
        """Requests that a cache reset for a new version has preempted and that vLLM has not counted yet."""

    def clear(self, in_flight: int) -> None:
        """Record that a reset of the KV cache, not a lack of memory, preempts up to `in_flight` requests."""
        self._cleared = min(in_flight, self._cleared + self.load.running)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if iteration_stats is not None:
            self.generated_tokens += iteration_stats.num_generation_tokens
        preempted = iteration_stats.num_preempted_reqs if iteration_stats is not None else 0
        cleared = min(preempted, self._cleared)
        self._cleared -= cleared
        preempted -= cleared
        if scheduler_stats is not None:
            self.load = EngineLoad(
                running=scheduler_stats.num_running_reqs,
                waiting=scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                kv_cache_usage=scheduler_stats.kv_cache_usage,
                preemptions=self.load.preemptions + preempted,
            )
        elif preempted:
            self.load = replace(self.load, preemptions=self.load.preemptions + preempted)

    def load_with(self, in_flight: int) -> EngineLoad:
        """Return the load of an engine with `in_flight` requests. If the last request is aborted, vLLM does not report
        that the engine is idle."""
        return self.load if in_flight else EngineLoad(preemptions=self.load.preemptions)

    def log_engine_initialized(self) -> None:
        """Do nothing; vLLM requires this method."""


class OpenAIEngine(VLLMEngine):
    """`VLLMEngine` with `EngineGauges`. On CPU, a single worker runs in the engine core's process.

    vLLM runs a CPU worker in a separate process to set OpenMP variables there. Here the replica's environment has these
    variables, and the engine core inherits them. This saves one import of vLLM, about 9 s of a cold start on CPU.
    """

    gauges: EngineGauges

    @property
    def client(self) -> AsyncLLM:
        return self._engine_client

    def _start_async_llm_engine(self, engine_args: Any, config: Any, placement_group: Any) -> AsyncLLM:
        """Create the engine's client. `VLLMEngine.start` calls this."""
        config.parallel_config.placement_group = placement_group
        if config.device_config.device_type == "cpu" and config.parallel_config.world_size == 1:
            config.parallel_config.distributed_executor_backend = UniProcExecutor
        self.gauges = EngineGauges(config)
        with first_module_of_processes():
            return AsyncLLM(
                vllm_config=config,
                executor_class=Executor.get_class(config),
                log_requests=False,
                log_stats=True,
                stat_loggers=[lambda *_: self.gauges],
            )


class RolloutEngine(OpenAIEngine):
    """The engine without an OpenAI front end. The model's files must be readable on every node."""

    async def start(self) -> None:
        """Start the engine core.

        Raises:
            Exception: whatever vLLM raises for a model that it cannot load.
        """
        context = self.llm_config.get_or_create_callback().ctx
        args, _, config = self._prepare_engine_config(context)
        batch_outputs(config)
        self._engine_client = self._start_async_llm_engine(args, config, context.placement_group)
