"""The Trainer of a run, which combines ranks, experience, loop and checkpoints. `trainer.actor` makes it a Ray
actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import anyio
from anyio import to_thread

from asyncrl.config.environment import model_config
from asyncrl.config.resources.plan import validation_due
from asyncrl.config.schema import Config
from asyncrl.core.failures import first_failure
from asyncrl.core.ports import GpuTurns, PayloadStore, WeightPublisher
from asyncrl.core.records import RecordSink
from asyncrl.core.waits import WaitBoard
from asyncrl.profiling import profile
from asyncrl.queue.sample_queue import SampleQueue
from asyncrl.storage.checkpoint_claim import read_run_id
from asyncrl.storage.checkpoint_manifest import LineageHistory, Progress, Resume, run_identity
from asyncrl.storage.remote_checkpoints import remote_checkpoints
from asyncrl.storage.run_dir import RunDir
from asyncrl.storage.trained_steps import TrainedStepsFile
from trainer.algorithms.objective import PolicyLoss, ValueLoss
from trainer.batches import BatchSource, RowRules
from trainer.checkpoints import CheckpointDirectory, HfExportSettings, RoleCheckpoints, check_shared
from trainer.experience import ExperienceBuilder
from trainer.lending import LendingPolicy
from trainer.loop import TrainLoop
from trainer.ranks_turn import RanksTurn
from trainer.schedule import LoopSettings
from trainer.thread_search import ThreadSearch
from trainer.tokenizer_checks import check_tokenizers
from trainer.workers.group import TrainerGroups
from trainer.workers.placement import Role
from trainer.workers.worker import RoleGroup

MIN_CONSECUTIVE_UNUSABLE = 8
"""The run stops after this many unusable samples in a row, or after a whole lease if that is more."""


class Trainer:
    """The training side of a run. Created by `start`; `run` is called once."""

    def __init__(
        self,
        config: Config,
        groups: TrainerGroups,
        files: CheckpointDirectory,
        trained_steps: TrainedStepsFile,
        waits: WaitBoard,
        turn: RanksTurn,
        *,
        lineage: int,
        validated_step: int | None = None,
    ) -> None:
        self._config = config
        self._groups = groups
        self._files = files
        self._trained_steps = trained_steps
        self._lineage = lineage
        self._validated_step = validated_step
        self._trained: dict[Role, RoleGroup] = {
            role: group for role, group in groups.roles.items() if role in ("actor", "critic")
        }
        self._waits = waits
        self._turn = turn
        turn.roles = tuple(groups.roles.values())
        self._loop: TrainLoop | None = None
        self._stopped = False
        self._served = anyio.Event()
        self.progress = Progress()
        self.attention = ""
        """How the policy computes attention (`BaseEngine.attention`)."""

    @classmethod
    async def start(
        cls,
        config: Config,
        run_dir: RunDir,
        resume: Resume | None,
        *,
        history: LineageHistory,
        validated_step: int | None,
        publisher: WeightPublisher,
        waits: WaitBoard,
        turns: GpuTurns | None = None,
    ) -> Self:
        """Load the models and the checkpoint, if there is one, and publish its version.

        Replicas start with that version or, in a lineage above 0, go back to it. Without a checkpoint, lineage 0
        publishes nothing, because replicas load the initial model themselves; later lineages publish the initial model.
        So does a run with `rollout.attach`, because the replicas may have the weights of another run; and a run whose
        versions are adapters, because engines cannot give an adapter to requests that began without one.

        A resumed version keeps its number, although its weights include the steps since its first publication, so
        pacing continues from exactly the same count. Replicas that kept running distinguish the two publications
        by their lineage. If the validation of the version was interrupted or never began, it is requested again.

        Args:
            history: the checkpoints that training went back to in this run. Checkpoints that do not belong to it
                are set aside. Its newest lineage is that of the publisher.
            validated_step: the newest step with a recorded validation, except steps that a rewind has undone; None if
                there is none.
            turns: the turns on GPUs that the ranks share with the engines; None: they have their own.

        Raises:
            FencedError: another launch continues the run from `trainer.checkpoint_dir`.
            ConfigError: a model or the checkpoint cannot be used, or a model's tokenizer differs from the policy's.
            InfraError, DeadlineError: the ranks did not start. DiskFullError: the run directory is full.
        """
        keep = config.trainer.max_checkpoints_to_keep
        run_id = None if run_dir.checkpoint_dir is None else read_run_id(run_dir.path)
        remote = await to_thread.run_sync(remote_checkpoints, run_dir, config.timeouts.call_s)
        files = CheckpointDirectory(
            run_dir.checkpoints,
            identity=run_identity(config),
            keep=keep,
            history=history,
            run_id=run_id,
            remote=remote,
        )
        trained_steps = TrainedStepsFile(run_dir.path, history.lineage)
        lends = None if config.trainer.lend_after_s is None else LendingPolicy(config.trainer.lend_after_s)
        turn = RanksTurn(turns, waits, offload_s=config.timeouts.train_s, lending=lends if config.lends_gpus else None)
        await turn.begin()
        with waits.waiting("model"):
            await to_thread.run_sync(check_tokenizers, config)
            groups = await TrainerGroups.start(config, publisher=publisher, run_dir=run_dir.path)
        trainer = cls(
            config, groups, files, trained_steps, waits, turn, lineage=history.lineage, validated_step=validated_step
        )
        try:
            trainer.attention = await trainer._trained["actor"].attention()
            await trainer._set_losses()
            if config.has_checkpoints:
                await check_shared(files, trainer._trained)
            if resume is not None:
                await trainer._resume(resume)
            await trainer._publish_start(new_run=resume is None and history.lineage == 0)
            await turn.end()
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

        The ranks live as long as this process, because they own the published weights, which replicas may still be
        fetching. After a failure they are killed.

        Args:
            until_served: return only after a call of `served` or `stop`, and fail if a rank fails before that.

        Raises:
            AsyncRLError: the first failure of any part. InfraError: a rank died or did not answer health checks for
                `timeouts.probe_s`, even if the loop was not waiting for it.
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
        """Offer the newest version again to a restarted weight store. A running step continues.

        Raises:
            InfraError, DeadlineError: the store did not accept it.
        """
        await self._trained["actor"].republish()
        await self._turn.restore()

    @property
    def ranks(self) -> list[Mapping[str, Any]]:
        """See `TrainerGroups.ranks`."""
        return self._groups.ranks

    def confirm_served(self) -> None:
        """Record that every replica serves the last published version, so that the ranks are no longer needed."""
        self._served.set()

    def stop(self) -> None:
        """Request `run` to end after the current step, with a checkpoint if `trainer.save_last` is set."""
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
        # A copy, because the loop updates it, while the manifest describes the checkpoint.
        self.progress = replace(resume.manifest.progress)
        if resume.checkpoint is not None:
            with self._waits.waiting("checkpoint"):
                for role, group in self._trained.items():
                    await group.load_checkpoint(resume.checkpoint / role)

    async def _publish_start(self, *, new_run: bool) -> None:
        """Publish the version that training starts from. If the run is not new, first rename abandoned checkpoints, and
        log the step from which training continues."""
        progress = self.progress
        profile.set_position(version=progress.version)  # events before the first step
        if not new_run:
            await to_thread.run_sync(self._files.set_abandoned_aside)
            await self._trained_steps.append_rewind(progress.step)
        publishes_initial = self._config.rollout.attach is not None or self._config.syncs_adapters
        if self._lineage > 0 or progress.version > 0 or publishes_initial:
            validate = self._is_validation_due()
            await self._trained["actor"].publish(progress.version, progress.step, validate=validate)
            if validate:
                self._validated_step = progress.step

    def _is_validation_due(self) -> bool:
        """Return whether the weights that training starts from still have to be validated."""
        config, validated = self._config, self._validated_step
        if not config.has_validation:
            return False
        if validated is None and config.trainer.val_before_train:
            return True
        return validation_due(config.trainer.test_freq, validated_step=validated or 0, step=self.progress.step)

    async def _plan(self, total_steps: int) -> None:
        """Set the total number of steps of each trained model, which its learning rate schedule needs."""
        config = self._config
        warmup = config.critic.warmup_steps if config.needs_critic else 0
        await self._trained["actor"].plan(max(1, total_steps - warmup))
        if "critic" in self._trained:
            await self._trained["critic"].plan(total_steps // config.trainer.ppo_epochs * config.critic.ppo_epochs)

    def _make_loop(self, queue: SampleQueue, payloads: PayloadStore, total_steps: int) -> TrainLoop:
        config, roles = self._config, self._groups.roles
        filtering = config.algorithm.filter_groups
        batch_source = BatchSource(
            queue,
            payloads,
            row_rules(config, self._lineage),
            max_consecutive_filtered=filtering.max_consecutive if filtering.enable else None,
            max_consecutive_unusable=max(MIN_CONSECUTIVE_UNUSABLE, config.samples_per_lease),
            call_s=config.timeouts.call_s,
        )
        experience = ExperienceBuilder(
            config,
            actor=roles["actor"],
            ref=roles.get("ref"),
            teacher=roles.get("teacher"),
            critic=roles.get("critic"),
            reward_model=roles.get("reward_model"),
        )
        checkpoints = RoleCheckpoints(
            self._files,
            self._trained,
            queue,
            step=self.progress.step,
            save_freq=config.trainer.save_freq,
            export=HfExportSettings.from_config(config),
            call_limit_s=config.timeouts.train_s,
            waits=self._waits,
        )
        most = config.trainer.max_cpu_threads
        return TrainLoop(
            LoopSettings.from_config(config, total_steps=total_steps, lineage=self._lineage),
            queue=queue,
            batch_source=batch_source,
            actor=roles["actor"],
            critic=roles.get("critic"),
            experience=experience,
            checkpoints=checkpoints,
            trained_steps=self._trained_steps,
            progress=self.progress,
            validated_step=self._validated_step or 0,
            waits=self._waits,
            turn=self._turn,
            end_traces=self._groups.end_traces,
            threads=ThreadSearch(config.trainer.cpu_threads, most) if most is not None else None,
        )


def row_rules(config: Config, lineage: int) -> RowRules:
    """Return the rules for rows. The vocabulary is known only if the model's directory is on this machine; the ranks
    check token ids in any case."""
    drift, described = config.async_training, model_config(config.model.path)
    text: Any = described.get("text_config") or {}
    return RowRules(
        mask_beyond=drift.max_staleness if drift.stale_action == "mask" else None,
        group_filter=config.algorithm.filter_groups.drop if config.algorithm.filter_groups.enable else None,
        vocab_size=described.get("vocab_size") or text.get("vocab_size"),
        rewound=lineage > 0,
    )
