"""The Trainer's parts, put together: ranks, experience, loop, checkpoints. `trainer.actor` puts it behind Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import anyio
from anyio import to_thread

from asyncrl.config.model_checks import model_config
from asyncrl.config.plan import validation_due
from asyncrl.config.schema import Config
from asyncrl.failures import first_failure
from asyncrl.lineage import Line
from asyncrl.manifest import Progress
from asyncrl.ports import PayloadStore, SampleQueue, WeightPublisher
from asyncrl.profiling import profile
from asyncrl.records import RecordSink
from asyncrl.resume import Resume, run_identity
from asyncrl.run_dir import RunDir
from asyncrl.waits import WaitBoard
from trainer.algorithms.objective import PolicyLoss, ValueLoss
from trainer.checkpoint import Checkpointer, RoleCheckpoints, load_roles
from trainer.experience import ExperienceBuilder
from trainer.groups import TrainerGroups
from trainer.intake import Intake
from trainer.loop import TrainLoop
from trainer.loop_settings import LoopSettings
from trainer.placement import Role
from trainer.record import TrainedFile
from trainer.roles import RoleGroup
from trainer.rows import RowRules
from trainer.tokenizers import check_tokenizers

MIN_CONSECUTIVE_UNUSABLE = 8
"""Samples in a row that cannot be trained on before the run stops, where a lease has fewer."""


class Trainer:
    """One run's training side. `start` makes one; `run` once."""

    def __init__(
        self,
        config: Config,
        groups: TrainerGroups,
        files: Checkpointer,
        record: TrainedFile,
        waits: WaitBoard,
        *,
        lineage: int,
        validated_step: int | None = None,
    ) -> None:
        """See `start`."""
        self._config = config
        self._groups = groups
        self._files = files
        self._record = record
        self._lineage = lineage
        self._validated_step = validated_step
        self._trained: dict[Role, RoleGroup] = {
            role: group for role, group in groups.roles.items() if role in ("actor", "critic")
        }
        self._waits = waits
        self._loop: TrainLoop | None = None
        self._stopped = False
        self._served = anyio.Event()
        self.progress = Progress()

    @classmethod
    async def start(
        cls,
        config: Config,
        run_dir: RunDir,
        resume: Resume | None,
        *,
        line: Line,
        validated_step: int | None,
        publisher: WeightPublisher,
        waits: WaitBoard,
    ) -> Self:
        """Load the models, and the checkpoint if there is one; publish its version for the replicas to come up with, or
        to go back to in a lineage above 0. The initial model too then, which in the first one they have by themselves.

        A resumed version keeps its number, though steps since its publication are in it too, and pacing goes on exactly
        where it was. Where replicas live on, the lineage tells it from the one they had. Its validation is asked for
        if it is owed: it may have been under way when training went back.

        Args:
            line: where training went back to a checkpoint in this run. Checkpoints that are not on it are set aside.
                The publisher's lineage is its newest.
            validated_step: the newest step whose validation is recorded, of those that training has not gone back
                behind; None: none is.

        Raises:
            ConfigError: a model or the checkpoint cannot be used, or a model reads other tokens than the policy's.
            InfraError, DeadlineError: the ranks did not come up. DiskFullError: the run directory takes no more.
        """
        keep = config.trainer.max_checkpoints_to_keep
        files = Checkpointer(run_dir.path, identity=run_identity(config), keep=keep, line=line)
        record = TrainedFile(run_dir.path, line.lineage)
        with waits.waiting("model"):
            await to_thread.run_sync(check_tokenizers, config)
            groups = await TrainerGroups.start(config, publisher=publisher, run_dir=run_dir.path)
        trainer = cls(config, groups, files, record, waits, lineage=line.lineage, validated_step=validated_step)
        try:
            await trainer._set_losses()
            if resume is not None:
                await trainer._resume(resume)
            await trainer._begin(anew=resume is None and line.lineage == 0)
        except BaseException:
            await groups.close()
            raise
        return trainer

    async def run(
        self,
        queue: SampleQueue,
        payloads: PayloadStore,
        total_steps: int,
        sink: RecordSink,
        *,
        until_served: bool = False,
    ) -> None:
        """Train until `total_steps` (of the whole run), the end of the stream or `stop`; then close the queue.

        The ranks stay as long as this process: what they have published is theirs, and replicas may still be fetching
        it. After a failure they are gone.

        Args:
            until_served: Return, unless stopped, only after `served`, and fail until then if a rank does.

        Raises:
            AsyncRLError: the first failure of any part. InfraError: a rank died, or did not say for `timeouts.probe_s`
                that it lives, whatever the loop waited on then.
        """
        try:
            await self._plan(total_steps)
            self._loop = self._make_loop(queue, payloads, total_steps)
            if self._stopped:
                self._loop.stop()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._groups.watch, self._config.timeouts.probe_s)
                await self._loop.run(sink)
                if until_served and not self._stopped:
                    with self._waits.waiting("served"):
                        await self._served.wait()
                tasks.cancel_scope.cancel()
        except BaseException as failure:
            await self._groups.close()
            if isinstance(failure, BaseExceptionGroup):
                raise first_failure(failure) from None
            raise

    async def republish(self) -> None:
        """Offer the newest version again, to a store that has lost its memory. A step that is under way goes on.

        Raises:
            InfraError, DeadlineError: the store did not take it.
        """
        await self._trained["actor"].republish()

    @property
    def ranks(self) -> list[Mapping[str, Any]]:
        """See `TrainerGroups.ranks`."""
        return self._groups.ranks

    def served(self) -> None:
        """Every replica serves what was published last: nobody needs the ranks any more."""
        self._served.set()

    def stop(self) -> None:
        """End `run` soon: after the current step, with a checkpoint if `trainer.save_last`."""
        self._stopped = True
        self._served.set()
        if self._loop is not None:
            self._loop.stop()

    async def _set_losses(self) -> None:
        config = self._config
        await self._trained["actor"].set_loss_fn(PolicyLoss(config.algorithm, config.rollout.response_length))
        if "critic" in self._trained:
            await self._trained["critic"].set_loss_fn(ValueLoss(config.critic.cliprange_value))

    async def _resume(self, resume: Resume) -> None:
        # A copy: the loop counts on in it, and the manifest says what the checkpoint holds.
        self.progress = replace(resume.manifest.progress)
        if resume.checkpoint is not None:
            with self._waits.waiting("checkpoint"):
                await load_roles(resume.checkpoint, self._trained)

    async def _begin(self, *, anew: bool) -> None:
        """`anew`: at the beginning of the run, so that there is nothing to go back to."""
        progress = self.progress
        profile.at(version=progress.version)  # of no step yet
        if not anew:
            await to_thread.run_sync(self._files.set_others_aside)
            await self._record.rewound(progress.step)
        if self._lineage > 0 or progress.version > 0:
            owed = self._owes_validation()
            await self._trained["actor"].publish(progress.version, progress.step, validate=owed)
            if owed:
                self._validated_step = progress.step

    def _owes_validation(self) -> bool:
        """Of what it goes on from."""
        config, validated = self._config, self._validated_step
        if not config.has_validation:
            return False
        if validated is None and config.trainer.val_before_train:
            return True
        return validation_due(config.trainer.test_freq, validated_step=validated or 0, step=self.progress.step)

    async def _plan(self, total_steps: int) -> None:
        """Tell each trained model how many steps it will take in all."""
        config = self._config
        warmup = config.critic.warmup_steps if config.needs_critic else 0
        await self._trained["actor"].plan(max(1, total_steps - warmup))
        if "critic" in self._trained:
            await self._trained["critic"].plan(total_steps // config.trainer.ppo_epochs * config.critic.ppo_epochs)

    def _make_loop(self, queue: SampleQueue, payloads: PayloadStore, total_steps: int) -> TrainLoop:
        config, roles = self._config, self._groups.roles
        filtering = config.algorithm.filter_groups
        intake = Intake(
            queue,
            payloads,
            row_rules(config, self._lineage),
            max_consecutive_filtered=filtering.max_consecutive if filtering.enable else None,
            max_consecutive_unusable=max(MIN_CONSECUTIVE_UNUSABLE, config.samples_per_lease),
            call_s=config.timeouts.call_s,
            waits=self._waits,
        )
        experience = ExperienceBuilder(
            config,
            actor=roles["actor"],
            ref=roles.get("ref"),
            critic=roles.get("critic"),
            reward_model=roles.get("reward_model"),
        )
        return TrainLoop(
            LoopSettings.of(config, total_steps=total_steps, lineage=self._lineage),
            queue=queue,
            intake=intake,
            actor=roles["actor"],
            critic=roles.get("critic"),
            experience=experience,
            checkpoints=RoleCheckpoints(self._files, self._trained, queue.confirm),
            trained=self._record,
            progress=self.progress,
            validated_step=self._validated_step or 0,
            waits=self._waits,
            end_traces=self._groups.end_traces,
        )


def row_rules(config: Config, lineage: int) -> RowRules:
    """The vocabulary is known where the model's directory is on this machine; the ranks know it anyhow."""
    drift, described = config.async_training, model_config(config.model.path)
    text: Any = described.get("text_config") or {}
    return RowRules(
        mask_beyond=drift.max_staleness if drift.stale_action == "mask" else None,
        filter_groups=config.algorithm.filter_groups.enable,
        vocab_size=described.get("vocab_size") or text.get("vocab_size"),
        rewound=lineage > 0,
    )
