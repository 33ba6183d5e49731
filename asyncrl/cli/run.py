"""One run, from the first actor to the last record.

    driver ──┬─ trainer.run()   ──▶ StepRecord ...                     ends after the last step and closes the queue
             ├─ rollouter.run() ──▶ ApplyRecord, ValidationRecord ...  ends when the queue is closed and the last
             │                                                         version is applied and validated
             ├─ watch: status of every part once a second ──▶ live view, watchdog
             └─ signals: the first Ctrl-C asks both sides to stop, and the two streams end by themselves

All four are in one task group, `launch`'s: the first failure cancels the rest and reaches it.
"""

from __future__ import annotations

import math
import time
from typing import Any

import anyio

from asyncrl.cli.interrupts import Interrupts
from asyncrl.cli.nothing_left import nothing_left
from asyncrl.cli.remote import ask, stream
from asyncrl.cli.watchdog import Watchdog
from asyncrl.config.plan import total_samples, training_steps
from asyncrl.config.schema import Config
from asyncrl.failures import InfraError
from asyncrl.manifest import Resume
from asyncrl.queue_actor import QueueClient, start_queue
from asyncrl.run_dir import RunDir
from asyncrl.sample_queue import QueueOptions
from asyncrl.staleness import Pacing
from asyncrl.telemetry.live import View
from asyncrl.telemetry.recorder import Recorder
from asyncrl.weights.object_store import start_store
from rollouter.actor import start_rollouter
from rollouter.serving.app import start_app
from trainer.actor import start_trainer

TICK_S = 1.0


def samples_of_run(config: Config, total_steps: int, resume: Resume | None) -> int:
    """Samples that the run trains on in all, earlier parts included: pacing admits no more.

    A stop in the middle of a lease may have left out passes over samples that are trained already. The steps which
    these would have been take other samples, so a resumed run may need more than `total_samples` says.
    """
    if resume is None:
        return total_samples(config, total_steps)
    progress = resume.manifest.progress
    mini_batches = math.ceil(max(0, total_steps - progress.step) / config.trainer.ppo_epochs)
    return progress.trained_samples + mini_batches * config.trainer.ppo_mini_batch_size


class Run:
    """The parts of one run. `main` is the whole of it."""

    def __init__(self, config: Config, run_dir: RunDir, resume: Resume | None, recorder: Recorder, view: View) -> None:
        self._config = config
        self._run_dir = run_dir
        self._resume = resume
        self._recorder = recorder
        self._view = view
        self._ended = anyio.Event()
        self._watchdog = Watchdog(config.timeouts.watchdog_s)

    async def main(self, namespace: str, interrupts: Interrupts) -> None:
        """Start the parts in this Ray namespace and follow them to their end.

        Raises:
            AsyncRLError (alone or in an exception group): the first failure of any part.
        """
        self._view.phase("starting engines, trainer and data (about 40 s on a CPU)")
        total_steps = await self._start(namespace)
        self._view.phase("")
        interrupts.orderly = self._stop
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch)
            async with anyio.create_task_group() as streams:
                streams.start_soon(self._follow, "rollouter", self._rollouter, self._queue_actor, self._store)
                streams.start_soon(self._follow, "trainer", self._trainer, self._queue_actor, total_steps)
            # From here on only a bounded end is left, which a signal cannot make more orderly.
            interrupts.orderly = None
            self._ended.set()
            group.cancel_scope.cancel()
        # The books at the end: whatever is still live is dropped, and the last figures are taken.
        await self._queue.close()
        await self._tick()

    # ------------------------------------------------------------------------------------------------ start

    async def _start(self, namespace: str) -> int:
        """Bring everything up, what takes long side by side. Returns the steps of the whole run."""
        config, start_s = self._config, self._config.timeouts.start_s
        self._store = start_store(namespace)
        self._rollouter = start_rollouter(config)
        self._trainer = start_trainer(config)
        prepared: dict[str, int] = {}

        async def prepare() -> None:
            answer = self._rollouter.prepare.remote(str(self._run_dir.path))
            prepared.update(await ask("rollouter", answer, start_s, doing="reading the data"))

        async def load() -> None:
            answer = self._trainer.start.remote(self._run_dir, self._resume, self._store)
            await ask("trainer", answer, start_s, doing="loading the model")

        async with anyio.create_task_group() as group:
            group.start_soon(prepare)
            group.start_soon(load)
            await start_app(config, namespace=namespace)
        total_steps = training_steps(config, prepared["num_prompts"])
        self._recorder.plan(total_steps)
        if (done := nothing_left(self._resume, total_steps)) is not None:
            self._view.message("warning", done)
        if filtered := prepared["num_filtered"] + prepared["num_val_filtered"]:
            self._view.message("warning", f"{filtered} prompts over data.max_prompt_length were left out")
        self._start_queue(prepared["num_prompts"], total_steps)
        return total_steps

    def _start_queue(self, num_prompts: int, total_steps: int) -> None:
        mode = self._config.async_training
        pacing = Pacing(
            samples_per_version=self._config.samples_per_version,
            staleness_threshold=mode.staleness_threshold,
            total_samples=samples_of_run(self._config, total_steps, self._resume),
        )
        options = QueueOptions(num_prompts, pacing, mode.max_staleness, mode.stale_action)
        self._queue_actor = start_queue(options, self._resume.manifest.queue if self._resume else None)
        self._queue = QueueClient(self._queue_actor, self._config.timeouts.call_s)

    # ------------------------------------------------------------------------------------------------ while it runs

    async def _follow(self, part: str, actor: Any, *handles: Any) -> None:
        async for record in stream(part, actor.run.options(num_returns="streaming").remote(*handles)):
            await self._recorder.put(record)

    async def _watch(self) -> None:
        while True:
            await self._tick()
            await anyio.sleep(TICK_S)

    async def _tick(self) -> None:
        """Show what every part is doing, and judge whether the run moves."""
        call_s = self._config.timeouts.call_s
        queue = await self._queue.status()
        rollouter = await ask("rollouter", self._rollouter.status.remote(), call_s, doing="telling its status")
        trainer = await ask("trainer", self._trainer.status.remote(), call_s, doing="telling its status")
        self._recorder.tick(queue, rollouter, trainer)
        tokens = (rollouter.get("generated_tokens"), rollouter.get("val_generated_tokens"))
        progress = (queue.books, queue.version, trainer.get("step"), tokens)
        waits = {part: status.get("waits", ()) for part, status in (("trainer", trainer), ("rollouter", rollouter))}
        self._watchdog.observe(time.monotonic(), repr(progress), waits)

    # ------------------------------------------------------------------------------------------------ stop

    async def _stop(self) -> None:
        """Ask both sides to end in order; their streams end by themselves, within the limit or not at all."""
        limit_s = self._config.timeouts.stop_s
        ending = (
            "with a checkpoint" if self._config.trainer.save_last else "without a checkpoint (trainer.save_last=false)"
        )
        self._view.phase(f"stopping after this step, {ending}; Ctrl-C again stops at once")
        with anyio.move_on_after(limit_s):
            await ask("trainer", self._trainer.stop.remote(), limit_s, doing="stopping")
            await ask("rollouter", self._rollouter.stop.remote(), limit_s, doing="stopping")
            await self._ended.wait()
            return
        raise InfraError(
            f"the run did not stop within timeouts.stop_s={limit_s:g}: what the trainer did since its last checkpoint "
            "is lost; raise timeouts.stop_s if a step takes that long"
        )
