"""Answers a validation set with the weights in the model's files, without a queue, a weight store and a Trainer.

    answers.jsonl ─▶ prompts without answers ─▶ Validator.answer ─▶ answers.jsonl, one line as soon as a prompt is done

An evaluation that was killed continues with the prompts that have no line. A line counts if its prompt has not changed
and has as many answers as `rollout.val.n`; prompts that failed are tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from asyncrl.config.schema import Config
from asyncrl.core.failures import AsyncRLError, BugError, InfraError, first_failure
from asyncrl.core.ports import EngineFleet, WeightsVersion
from asyncrl.storage.answer_files import append_answers, prompt_digest, read_answers
from asyncrl.storage.run_dir import disk_error
from rollouter.group_workers.pool import WorkerPool
from rollouter.loading import RolloutTask
from rollouter.sample_runner import GenerationParts
from rollouter.validation.validator import Outcome, ScoredPrompt, SupersededError, Validator

MODEL_FILES = WeightsVersion(0, 0)
"""The version of the weights in the model's files."""


class Evaluation:
    """One evaluation. Call `run` once."""

    def __init__(
        self,
        config: Config,
        task: RolloutTask,
        file: Path,
        *,
        fleet: EngineFleet,
        workers: WorkerPool | None = None,
    ) -> None:
        """`file`: the lines of an earlier process are kept, and new ones are appended."""
        if task.val_prompts is None:
            raise BugError("Evaluation without a validation set")
        self._n = config.rollout.val.n
        self._prompts = task.val_prompts
        self._file = file
        self._parts = GenerationParts(
            config=config, prompts=task.prompts, fleet=fleet, scorer=task.scorer, workers=workers, agent=task.agent
        )
        self._validator = Validator(self._parts, task.val_prompts, task.decode)
        self._scope = anyio.CancelScope()
        self._writing = anyio.Lock()
        self._known = self._answered = self._failed = 0

    async def run(self) -> None:
        """Answer the prompts that have no answers yet, or return early after `stop`.

        Raises:
            UserCodeError, DataError, InfraError: as for training samples; all answers so far are written.
        """
        try:
            with self._scope:
                missing = await to_thread.run_sync(self._missing)
                async with self._parts.running():
                    await self._validator.answer(MODEL_FILES, missing, self._write)
        except Exception as failures:  # noqa: BLE001  all are raised again, typed
            error = first_failure(failures)
            if isinstance(error, SupersededError):
                raise InfraError(f"the engines serve weights of a run instead of the model's files: {error}") from None
            if isinstance(error, OSError):
                raise disk_error(self._file, error) from error
            if isinstance(error, AsyncRLError):
                raise error from None
            raise BugError.wrap(f"the evaluation failed with {type(error).__name__}: {error}", error) from None

    def stop(self) -> None:
        """End now, without the answers that are in flight."""
        self._scope.cancel()

    def status(self) -> Mapping[str, Any]:
        """Return the numbers of prompts, and the tokens that were generated here."""
        return {
            "prompts": len(self._prompts),
            "known": self._known,
            "answered": self._answered,
            "failed": self._failed,
            "generated_tokens": self._validator.generated_tokens,
        }

    def _missing(self) -> list[int]:
        lines = read_answers(self._file)
        missing = []
        for number in range(len(self._prompts)):
            line = lines.get(number)
            if line is None or len(line.answers) != self._n or line.digest != prompt_digest(self._prompts[number]):
                missing.append(number)
        self._known = len(self._prompts) - len(missing)
        return missing

    async def _write(self, number: int, outcome: Outcome) -> None:
        def write() -> None:
            append_answers(self._file, self._validator.describe(number, outcome))

        async with self._writing:  # one at a time; a thread cannot be cancelled
            await to_thread.run_sync(write)
        if isinstance(outcome, ScoredPrompt):
            self._answered += 1
        else:
            self._failed += 1
