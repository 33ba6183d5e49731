"""The Rollouter on ports: the pump and the version loop under one task group.

    run ──┬─ pump      admit ─▶ generate ─▶ score ─▶ offer      until the queue admits nothing any more
          └─ versions  wait ─▶ apply ─▶ validate                until the pump has ended, then what is newest

Ray enters in `rollouter.actor` only; here everything is a Protocol, so that tests run the whole of it against fakes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from asyncrl.config.schema import Config
from asyncrl.failures import AsyncRLError, BugError, FencedError, first_failure
from asyncrl.ports import (
    Edition,
    EngineFleet,
    PayloadStore,
    PromptSource,
    RewardScorer,
    SampleQueue,
    TurnLog,
    WeightFeed,
)
from asyncrl.records import RecordSink
from asyncrl.waits import WaitBoard
from rollouter.agent.loading import load_agent
from rollouter.agent.loop import Agent
from rollouter.drops import DropRule
from rollouter.dump import TrajectoryDump
from rollouter.gateway.external import ExternalAgent
from rollouter.probation import SETTLE_S, Probation
from rollouter.prompts import load_prompts
from rollouter.pump import Pump
from rollouter.rewards.combination import function_scorer
from rollouter.rewards.loading import load_reward_functions
from rollouter.stages import Serving, Stages
from rollouter.surplus import Surplus
from rollouter.template import Decode, decoder, load_tokenizer
from rollouter.validation import ValidationPrompts, Validator
from rollouter.versions import VersionLoop


class Task(NamedTuple):
    """What is asked and how it is scored: everything the Rollouter reads from disk."""

    prompts: PromptSource
    val_prompts: ValidationPrompts | None
    scorer: RewardScorer
    """The reward function; see `rewards.combination` for the whole reward."""
    decode: Decode
    agent: Agent | ExternalAgent | None = None
    """Holds conversations of several turns; None: every trajectory is one."""
    num_filtered: int = 0
    num_val_filtered: int = 0


class RolloutStart(NamedTuple):
    """What of the validations is done before this Rollouter begins: it may be one in a row of incarnations."""

    validate_first: bool
    """What the replicas serve at the start is to be validated, whatever its publication says of that."""
    validated: Edition | None = None
    """The newest edition whose validation is recorded: neither it nor an older one is validated again."""
    validated_step: int = 0
    """The newest step whose validation is recorded, of those that are in the surviving model; 0: none. What
    `trainer.test_freq` asks for beyond it is owed."""
    has_engines: bool = True
    """False: every sample is replayed, and there is nobody to generate one."""


def load_task(config: Config, cache_dir: Path) -> Task:
    """Load reward function, tokenizer and data, in the order in which their mistakes are cheap. Blocking.

    Raises:
        ConfigError, DataError, UserCodeError: what is wrong with them.
    """
    functions = load_reward_functions(config.reward)
    tokenizer = load_tokenizer(config.model)
    agent = load_agent(config, tokenizer)
    loaded = load_prompts(config, tokenizer, cache_dir, tools=agent.schemas if agent else ())
    decode = decoder(tokenizer)
    scorer = function_scorer(config, functions, decode)
    return Task(loaded.train, loaded.val, scorer, decode, agent, loaded.num_filtered, loaded.num_val_filtered)


class Rollouter:
    """One run's generation side, or one incarnation of it. `run` once."""

    def __init__(
        self,
        config: Config,
        task: Task,
        *,
        queue: SampleQueue,
        payloads: PayloadStore,
        turns: TurnLog,
        feed: WeightFeed,
        fleet: EngineFleet,
        sink: RecordSink,
        start: RolloutStart,
        dump: TrajectoryDump | None = None,
        settle_s: float = SETTLE_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.waits = WaitBoard(clock)
        self._scope = anyio.CancelScope()
        self._config = config
        self._agent = task.agent
        if task.agent is not None:
            task.agent.watch(self.waits.waiting)
        drops = DropRule(
            on_error=config.reward.on_error, max_errors=config.reward.max_errors, num_prompts=len(task.prompts)
        )
        probation = Probation(config.recovery.max_crashes, waits=self.waits, settle_s=settle_s, wall_clock=wall_clock)
        surplus = Surplus(queue, call_s=config.timeouts.call_s)
        self._stages = stages = Stages(
            config,
            prompts=task.prompts,
            turns=turns,
            fleet=fleet,
            scorer=task.scorer,
            probation=probation,
            surplus=surplus,
            waits=self.waits,
            serving=lambda: Serving(self._versions.edition.version, self._versions.step),
            agent=task.agent,
            dump=dump,
            clock=clock,
        )
        self._pump = Pump(
            config,
            queue=queue,
            payloads=payloads,
            turns=turns,
            stages=stages,
            drops=drops,
            probation=probation,
            surplus=surplus,
            waits=self.waits,
            clock=clock,
        )
        self._validator = None
        if task.val_prompts is not None:
            self._validator = Validator(
                config,
                prompts=task.val_prompts,
                fleet=fleet,
                scorer=task.scorer,
                agent=task.agent,
                decode=task.decode,
                drops=drops,
                probation=probation,
                waits=self.waits,
                clock=clock,
            )
        self._versions = VersionLoop(
            feed=feed,
            fleet=fleet,
            queue=queue,
            sink=sink,
            validator=self._validator,
            validate_first=start.validate_first,
            validated=start.validated,
            validated_step=start.validated_step,
            test_freq=config.trainer.test_freq,
            poll_s=config.timeouts.call_s,
            apply_s=config.timeouts.apply_call_s,
            start_s=config.timeouts.start_s,
            waits=self.waits,
            clock=clock,
            wall_clock=wall_clock,
        )

    async def run(self) -> None:
        """Generate until the queue has ended and its last version is applied, or until `stop()`.

        Raises:
            FencedError: another incarnation is at work; nothing is said of what else has failed.
            AsyncRLError: the first failure of any part, typed. Something untyped is a `BugError` with its traceback.
        """
        try:
            with self._scope:
                async with AsyncExitStack() as stack:
                    if self._agent is not None:
                        await stack.enter_async_context(self._agent)
                    group = await stack.enter_async_context(anyio.create_task_group())
                    await group.start(self._versions.run, name="versions")
                    await self._pump.run()
                    self._versions.finish()
        except ExceptionGroup as failures:
            fenced = failures.subgroup(FencedError)
            error = first_failure(fenced or failures)
            if isinstance(error, AsyncRLError):
                raise error from None
            raise BugError.wrap(f"the Rollouter failed with {type(error).__name__}: {error}", error) from None

    def _agent_status(self) -> Mapping[str, float]:
        """Cumulative counts, by the names of their metrics (`rollouter/…`)."""
        told: dict[str, float] = dict(self._agent.status()) if self._agent is not None else {}
        over = self._config.rollout.over_sample
        if over.samples or over.trajectories:
            told["surplus_tokens"] = self._stages.counts.surplus_tokens
        return told

    def stop(self) -> None:
        """End now: cancel what is in flight and apply nothing more. `run` returns."""
        self._scope.cancel()

    def status(self) -> Mapping[str, Any]:
        """Plain values, at once, whatever state the engines are in: the pump's, the version served, open waits."""
        return {
            **self._pump.status(),
            "agent": self._agent_status(),
            "val_generated_tokens": self._validator.generated_tokens if self._validator else 0,
            "version": self._versions.edition.version,
            "lineage": self._versions.edition.lineage,
            "waits": self.waits.snapshot(),
            "waited_s": {"permit": self.waits.total_s("permit")},
        }
