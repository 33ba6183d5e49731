"""The train loop on a real queue and fake parts: the order of events, every kind of end, and counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.core.failures import BugError, DataError, DiskFullError, DivergenceError, InfraError
from asyncrl.core.types import SampleId
from asyncrl.observe.metrics.registry import describe
from asyncrl.storage.checkpoint_manifest import Progress
from skip import SkipManager
from tests.fakes.trainer_parts import feed, make_sample
from tests.fakes.trainer_rig import TrainerRig
from trainer.checkpoints import HfExportSettings
from trainer.schedule import LoopSettings


async def test_a_run_trains_publishes_and_saves_from_the_first_lease_to_the_last_checkpoint() -> None:
    rig = TrainerRig()
    records = await rig.run(8)
    assert [(record.step, record.version) for record in records] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert rig.actor.steps == [[1, 2], [3, 4], [5, 6], [7, 8]]
    # the version, its step, the step of its weights, and whether it is to be validated
    assert rig.actor.published == [(1, 1, 1, False), (2, 2, 2, False), (3, 3, 3, False), (4, 4, 4, True)]
    assert rig.trained.steps == [(1, 0, [1, 2]), (2, 1, [3, 4]), (3, 2, [5, 6]), (4, 3, [7, 8])]
    assert {record.lineage for record in records} == {0}
    [(progress, snapshot)] = rig.checkpoints.saved
    assert progress == Progress(step=4, version=4, published_step=4, leases=4, trained_samples=8, trained_tokens=64)
    assert (snapshot.counts.trained, snapshot.outstanding) == (8, ())
    assert (await rig.queue.admit(1, timeout_s=0.1)).closed


async def test_records_carry_registered_metrics_and_what_was_trained() -> None:
    rig = TrainerRig(total_steps=1)

    def make(sample_id: SampleId) -> Any:
        return make_sample(sample_id, (1.0, 1.0, 1.0, 1.0) if sample_id.index == 1 else (0.0, 0.0, 0.0, 2.0))

    def take_time(step: int) -> None:
        rig.clock.now_s += 3.0

    rig.actor.on_step = take_time
    [record] = await rig.run(2, make)
    for name in record.metrics:
        describe(name)
    assert record.rewards == (1.0, 0.5)
    assert record.staleness == (0, 0)
    expected = {
        "reward/mean": 0.75,
        "reward/std": np.std([1, 1, 1, 1, 0, 0, 0, 2]),
        "response_tokens/mean": 4.0,
        "response_tokens/max": 4.0,
        "advantages/zero_share": 0.5,
        "tokens/trained": 32.0,
        "timing/update_s": 3.0,
        "timing/step_s": 3.0,
        "time/monotonic_s": 3.0,
        "actor/loss": 0.5,
    }
    assert {name: record.metrics[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("verify", "num_probes"), [("every", 4), ("first", 4), ("off", 0)])
async def test_versions_have_probes_until_the_end_unless_nothing_is_verified(verify: str, num_probes: int) -> None:
    """An engine may be too full to compare with the first one, or start later."""
    config = Config.model_validate({"weight_sync": {"verify": verify}})
    rig = TrainerRig(has_probes=LoopSettings.from_config(config, total_steps=8).has_probes)
    await rig.run(8)
    assert rig.actor.num_probes == num_probes


@pytest.mark.parametrize("mismatch_kl", [2e-3, math.nan])
async def test_a_step_on_tokens_of_another_distribution_stops_the_run_and_is_not_committed(mismatch_kl: float) -> None:
    rig = TrainerRig(max_mismatch_kl=1e-3)
    rig.actor.metrics = {"rollout/token_share_age_0": 1.0, "rollout/mismatch_kl_age_0": mismatch_kl}
    with pytest.raises(BugError, match=r"rollout/mismatch_kl .* in step 1, and weight_sync.max_mismatch_kl"):
        await rig.run(8)
    assert rig.trained.steps == []
    assert rig.queue.state.counts().trained == 0


async def test_a_mismatch_counts_only_while_the_trainer_has_the_published_weights() -> None:
    """Two steps per version: the second one computes with weights that no engine has."""
    rig = TrainerRig(max_mismatch_kl=1e-3, samples_per_version=4)

    def drift(step: int) -> None:
        share, mismatch_kl = 1.0, 1e-6 if step % 2 else 0.5
        rig.actor.metrics = {"rollout/token_share_age_0": share, "rollout/mismatch_kl_age_0": mismatch_kl}

    rig.actor.on_step = drift
    assert len(await rig.run(8)) == 4


async def test_experience_belongs_to_the_first_step_of_its_batch(tmp_path: Path) -> None:
    """Roles of `skip` that take their step from the loop depend on this."""
    section = {"enable": True, "dump_dir": str(tmp_path), "steps": "all"}
    rig = TrainerRig(total_steps=5, samples_per_lease=4, samples_per_version=4)
    steps: list[int] = []
    with SkipManager.session(Config.model_validate({"skip": {"ref_log_prob": section}})):
        rig.experience.change = lambda batch: steps.append(SkipManager.step)
        await feed(rig.queue, 10)
        records = await rig.run()
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert steps == [1, 3, 5]


async def test_a_lease_may_have_several_mini_batches_and_a_version_several_leases() -> None:
    rig = TrainerRig(total_steps=10, samples_per_lease=4, samples_per_version=8)
    records = await rig.run(20)
    assert [record.version for record in records] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    # there are five leases of two steps
    assert rig.loop.progress.leases == 5
    assert [step for _, step, _, _ in rig.actor.published] == [4, 8, 10]


@pytest.mark.parametrize(
    ("test_freq", "expected"), [(-1, [10]), (1, [2, 4, 6, 8, 10]), (3, [4, 6, 10]), (4, [4, 8, 10]), (10, [10])]
)
async def test_the_first_version_at_or_after_each_multiple_is_validated(test_freq: int, expected: list[int]) -> None:
    rig = TrainerRig(total_steps=10, samples_per_version=4, test_freq=test_freq)
    await rig.run(20)
    assert [step for _, step, _, validate in rig.actor.published if validate] == expected


async def test_nothing_is_validated_without_a_validation_set() -> None:
    rig = TrainerRig(has_validation=False, test_freq=1)
    await rig.run(8)
    assert not any(validate for *_, validate in rig.actor.published)


async def test_checkpoints_are_written_between_leases_every_save_freq_steps() -> None:
    rig = TrainerRig(total_steps=9, samples_per_lease=4, samples_per_version=4, save_freq=3)
    await rig.run(18)
    assert [progress.step for progress, _ in rig.checkpoints.saved] == [4, 6, 9]
    assert all(snapshot.counts.leased == 0 for _, snapshot in rig.checkpoints.saved)


@pytest.mark.parametrize("samples", [18, 12], ids=["all steps", "the stream ends early"])
async def test_the_checkpoint_after_the_last_step_has_the_export(samples: int) -> None:
    """Also if the stream ends right after a checkpoint that was not known to be the last."""
    last = HfExportSettings("last")
    sizes = {"total_steps": 9, "samples_per_lease": 4, "samples_per_version": 4, "total_samples": samples}
    rig = TrainerRig(save_freq=3, export=last, **sizes)
    await rig.run(samples)
    assert rig.checkpoints.exported == [samples // 2]
    assert rig.checkpoints.begun[-1] == rig.checkpoints.saved[-1][0].step == samples // 2
    assert rig.checkpoints.begun[:2] == [4, 6]


@pytest.mark.parametrize(("frequency", "exported"), [("every", [4, 6, 9]), ("never", [])])
async def test_exports_of_every_checkpoint_or_none(frequency: Any, exported: list[int]) -> None:
    export = HfExportSettings(frequency)
    rig = TrainerRig(total_steps=9, samples_per_lease=4, samples_per_version=4, save_freq=3, export=export)
    await rig.run(18)
    assert (rig.checkpoints.begun, rig.checkpoints.exported) == ([4, 6, 9], exported)


def test_a_run_without_a_step_exports_nothing() -> None:
    checkpoints = TrainerRig(export=HfExportSettings("last")).checkpoints
    assert [checkpoints.is_due_at_end(step) for step in (0, 1)] == [False, True]


async def test_save_last_false_writes_no_last_checkpoint() -> None:
    rig = TrainerRig(save_last=False)
    await rig.run(8)
    assert rig.checkpoints.saved == []


# ------------------------------------------------------------------------------------------------ the end of the stream


async def test_the_last_partial_batch_is_trained() -> None:
    rig = TrainerRig(total_steps=100, samples_per_lease=4, samples_per_version=4, total_samples=7)
    records = await rig.run(7)
    assert [len(record.rewards) for record in records] == [2, 2, 2, 1]
    assert rig.actor.published == [(1, 2, 2, False), (2, 4, 4, True)]
    assert (await rig.counts()).trained == 7


@pytest.mark.parametrize(("num_fed", "trained"), [(3, 0), (4, 4), (7, 4), (8, 8)])
async def test_a_partial_last_batch_is_given_back_with_drop(num_fed: int, trained: int) -> None:
    lease: dict[str, Any] = {"samples_per_lease": 4, "samples_per_version": 4, "drop_partial": True}
    rig = TrainerRig(total_steps=100, has_validation=False, total_samples=num_fed, **lease)
    records = await rig.run(num_fed)
    assert [len(record.rewards) for record in records] == [2] * (trained // 2)
    counts = await rig.counts()
    assert (counts.trained, counts.leased, counts.dropped["shutdown"]) == (trained, 0, num_fed - trained)
    assert rig.loop.progress.version == trained // 4


@pytest.mark.parametrize("num_samples", range(1, 13))
async def test_a_partial_last_batch_is_trained_in_every_pass(num_samples: int) -> None:
    """The run has the steps that `training_steps` counts. Pacing admits no more samples, but the stream stays open."""
    rig = TrainerRig(
        total_samples=num_samples, total_steps=2 * math.ceil(num_samples / 2), ppo_epochs=2, samples_per_lease=4,
        samples_per_version=8,
    )  # fmt: skip
    records = await rig.run(num_samples)
    assert [record.step for record in records] == list(range(1, rig.settings.total_steps + 1))
    assert [index for _, _, indices in rig.trained.steps for index in indices] == list(range(1, num_samples + 1))
    counts = await rig.counts()
    assert (counts.trained, counts.num_dropped, counts.leased) == (num_samples, 0, 0)
    assert rig.loop.progress.version == math.ceil(num_samples / 8)
    assert rig.actor.published[-1][1] == rig.settings.total_steps


async def test_a_stream_that_ends_right_after_a_publication_still_has_its_last_version_validated() -> None:
    rig = TrainerRig(total_steps=100, total_samples=4)
    await rig.run(4)
    assert rig.actor.published == [(1, 1, 1, False), (2, 2, 2, False), (3, 2, 2, True)]


@pytest.mark.parametrize(("validated_step", "published"), [(4, []), (2, [(5, 4, 0, True)]), (0, [(5, 4, 0, True)])])
async def test_a_finished_run_publishes_again_if_its_validation_is_missing(
    validated_step: int, published: list[Any]
) -> None:
    """Training went back to the last checkpoint of the run, or was resumed from it."""
    at_end = Progress(step=4, version=4, published_step=4, leases=4, trained_samples=8)
    rig = TrainerRig(at_end, validated_step=validated_step)
    assert await rig.run() == []
    assert rig.actor.published == published
    assert rig.checkpoints.saved == []
    assert (await rig.queue.admit(1, timeout_s=0.1)).closed


@pytest.mark.parametrize(("validated_step", "expected"), [(2, [6, 10]), (6, [10])])
async def test_a_resumed_loop_counts_from_the_validated_step(validated_step: int, expected: list[int]) -> None:
    """A validation was due at step 3. The next publication was that of step 4, and the checkpoint is of step 5."""
    progress = Progress(step=5, version=2, published_step=4, leases=5, trained_samples=10)
    rig = TrainerRig(progress, validated_step=validated_step, total_steps=10, samples_per_version=4, test_freq=3)
    await rig.run(10)
    assert [step for _, step, _, validate in rig.actor.published if validate] == expected


# ------------------------------------------------------------------------------------------------ stop


@pytest.mark.parametrize("stop", [True, False], ids=["stopped", "closed queue"])
async def test_a_run_without_a_step_publishes_and_saves_nothing(stop: bool) -> None:
    rig = TrainerRig()
    if stop:
        rig.loop.stop()
    else:
        await rig.queue.close()
    assert await rig.run(8 if stop else 0) == []
    assert (rig.actor.published, rig.checkpoints.saved) == ([], [])


async def test_stop_finishes_the_step_releases_the_rest_and_saves() -> None:
    rig = TrainerRig(total_steps=8, samples_per_lease=6, samples_per_version=6)
    rig.actor.on_step = lambda step: rig.loop.stop() if step == 2 else None
    records = await rig.run(16)
    assert [record.step for record in records] == [1, 2]
    assert rig.actor.published == []
    [(progress, snapshot)] = rig.checkpoints.saved
    assert (progress.step, progress.trained_samples) == (2, 4)
    assert snapshot.counts.leased == 0
    assert [sample_id.index for sample_id in snapshot.outstanding] == list(range(5, 17))
    counts = await rig.counts()
    assert (counts.trained, counts.dropped["shutdown"]) == (4, 12)


async def test_stop_ends_a_wait_for_samples_at_once_and_leaves_nothing_leased() -> None:
    rig = TrainerRig(call_s=1000.0)
    await feed(rig.queue, 3)
    async with anyio.create_task_group() as group:
        group.start_soon(rig.run)
        while (await rig.queue.status()).waiting.get("samples") != 1:
            await anyio.lowlevel.checkpoint()
        [wait] = rig.loop.waits.snapshot()
        assert wait.edge == "samples"
        rig.loop.stop()
    assert [record.step for record in rig.records] == [1]
    [(_, snapshot)] = rig.checkpoints.saved
    assert [sample_id.index for sample_id in snapshot.outstanding] == [3]


# ------------------------------------------------------------------------------------------------ failure


def diverge(step: int) -> None:
    if step == 2:
        raise DivergenceError("nan")


async def test_a_failed_step_releases_its_lease_and_is_raised() -> None:
    rig = TrainerRig(total_steps=8, samples_per_lease=6, samples_per_version=6)
    rig.actor.on_step = diverge
    with pytest.raises(DivergenceError):
        await rig.run(6)
    counts = await rig.counts()
    assert (counts.trained, counts.leased, counts.ready) == (2, 0, 4)
    assert rig.checkpoints.saved == []


@pytest.mark.parametrize("part", ["publication", "trained steps", "beginning of a checkpoint"])
async def test_a_failure_after_the_commit_is_raised(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: Any, **kwargs: Any) -> None:
        raise DiskFullError("the disk is full")

    rig = TrainerRig(save_freq=1, call_limit_s=1000.0)
    owner, method = {
        "publication": (rig.actor, "publish"),
        "trained steps": (rig.trained, "append"),
        "beginning of a checkpoint": (rig.checkpoints, "begin"),
    }[part]
    monkeypatch.setattr(owner, method, fail)
    with pytest.raises(DiskFullError, match="the disk is full"):
        await rig.run(2)
    assert (await rig.counts()).trained == 2


async def test_a_dead_queue_does_not_hide_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(lease_id: int) -> None:
        raise InfraError("the queue is gone")

    rig = TrainerRig()
    rig.actor.on_step = lambda step: diverge(2)
    monkeypatch.setattr(rig.queue, "release", gone)
    with pytest.raises(DivergenceError):
        await rig.run(2)


async def test_a_cancelled_run_commits_its_step_and_releases_the_rest() -> None:
    rig = TrainerRig(samples_per_lease=4, samples_per_version=4)
    await feed(rig.queue, 4)
    scope = anyio.CancelScope()
    rig.actor.on_step = lambda step: scope.cancel()
    with scope:
        await rig.run()
    assert scope.cancelled_caught
    counts = await rig.counts()
    assert (counts.trained, counts.leased, counts.ready) == (2, 0, 2)


async def test_a_fully_rejected_lease_is_an_error_that_names_the_thresholds() -> None:
    rig = TrainerRig()
    rig.experience.change = lambda batch: batch["loss_mask"].zero_()
    with pytest.raises(DataError, match="rollout_rs_threshold"):
        await rig.run(2)
    assert (await rig.counts()).ready == 2


def reject(*indices: int) -> Callable[[TensorDict], None]:
    """Return a change with which the correction rejects all tokens of the samples with these feed indices."""

    def change(batch: TensorDict) -> None:
        first = batch["input_ids"][torch.arange(len(batch)), batch["prompt_lens"]]
        batch["loss_mask"][torch.isin(first, torch.tensor(indices))] = False

    return change


async def test_fully_rejected_samples_are_filtered_without_a_step() -> None:
    rig = TrainerRig(total_steps=3, samples_per_lease=4, samples_per_version=4, with_critic=True)
    assert rig.critic is not None
    rig.experience.change = reject(1, 3, 4)
    rewards = {2: (0.0, 4.0), 5: (0.0, 6.0)}
    await rig.run_while_feeding(9, lambda sample_id: make_sample(sample_id, rewards.get(sample_id.index, (0.0, 1.0))))
    # The first lease has one sample left, but the version still takes four.
    assert rig.actor.steps == rig.critic.steps == [[2], [5, 6], [7]]
    assert [record.version for record in rig.records] == [0, 0, 1]
    assert [record.rewards for record in rig.records] == [(2.0,), (3.0, 0.5), (0.5,)]
    assert all(record.metrics["tokens/trained"] > 0 for record in rig.records)
    counts = await rig.counts()
    assert (counts.trained, counts.dropped["filtered"], counts.leased) == (4, 3, 0)


@pytest.mark.parametrize(
    ("total_steps", "rejected", "num_fed", "steps"),
    [(2, (3, 4), 6, [[1, 2], [5, 6]]), (3, (1, 5, 6), 7, [[2, 3], [4], [7]])],
    ids=["the last of a lease", "a whole lease"],
)
async def test_rejected_samples_at_the_end_of_the_stream_are_replaced(
    total_steps: int, rejected: tuple[int, ...], num_fed: int, steps: list[list[int]]
) -> None:
    rig = TrainerRig(total_steps=total_steps, samples_per_lease=4, samples_per_version=4)
    rig.experience.change = reject(*rejected)
    await rig.run_while_feeding(num_fed)
    assert rig.actor.steps == steps
    assert (await rig.counts()).trained == 4


async def test_a_sample_rejected_after_the_end_of_the_stream_is_replaced() -> None:
    """The lease at the end of the stream is not full."""
    rig = TrainerRig(total_steps=100, total_samples=3, samples_per_lease=4, samples_per_version=4)
    rig.experience.change = reject(3)
    await rig.run_while_feeding(4)
    assert rig.actor.steps == [[1, 2], [4]]
    assert (await rig.counts()).trained == 3


async def test_only_consecutive_rejections_are_an_error() -> None:
    rig = TrainerRig(samples_per_version=3)
    rig.experience.change = reject(3, 7)
    await rig.run_while_feeding(8)
    assert rig.actor.steps == [[1, 2], [4], [5, 6], [8]]


async def test_the_adaptive_kl_coefficient_is_carried_from_batch_to_batch() -> None:
    rig = TrainerRig(Progress(kl_coef=8.0))
    await rig.run(8)
    assert rig.experience.kl_coefs == [8.0, 4.0, 2.0, 1.0]
    [(progress, _)] = rig.checkpoints.saved
    assert progress.kl_coef == 0.5


# ------------------------------------------------------------------------------------------------ passes


async def test_every_pass_is_a_step_and_a_sample_is_committed_with_its_first_pass() -> None:
    rig = TrainerRig(total_steps=12, ppo_epochs=3, samples_per_lease=4, samples_per_version=4)
    trained: list[int] = []
    rig.actor.on_step = lambda step: trained.append(rig.queue.state.trained)
    records = await rig.run(8)
    assert [record.version for record in records] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2]
    assert [len(record.rewards) for record in records] == [2, 2, 0, 0, 0, 0] * 2
    assert [len(record.staleness) for record in records] == [2, 2, 0, 0, 0, 0] * 2
    assert trained == [0, 2, 4, 4, 4, 4, 4, 6, 8, 8, 8, 8]
    assert rig.actor.steps[:2] == [[1, 2], [3, 4]]
    for first in (0, 6):
        for epoch in range(3):
            steps = rig.actor.steps[first + 2 * epoch : first + 2 * epoch + 2]
            assert sorted(index for step in steps for index in step) == [1 + first // 6 * 4 + n for n in range(4)]
    assert (rig.loop.progress.trained_samples, rig.loop.progress.trained_tokens) == (8, 12 * 16)
    assert rig.queue.state.trained_tokens == 12 * 16, "the queue also counts the tokens of later passes"


@pytest.mark.parametrize("stop_after", range(1, 8))
async def test_a_run_stopped_between_passes_can_resume(stop_after: int) -> None:
    settings: dict[str, Any] = {"total_steps": 8, "ppo_epochs": 2, "samples_per_lease": 4, "samples_per_version": 4}
    first = TrainerRig(**settings)
    first.actor.on_step = lambda step: first.loop.stop() if step == stop_after else None
    await first.run(8)
    [(progress, snapshot)] = first.checkpoints.saved
    assert progress.step == stop_after
    second = TrainerRig(progress=progress, restore=snapshot, **settings)
    # Every two remaining steps are two passes over one mini-batch of two samples; the last pass may be left out.
    wanted = math.ceil((8 - stop_after) / 2) * 2
    await feed(second.queue, wanted)
    await second.run()
    counts = await second.counts()
    assert (counts.trained, counts.num_dropped) == (snapshot.counts.trained + wanted, 0)
    assert second.loop.progress.version >= 2
    assert second.loop.progress.published_step == second.loop.progress.step == 8


# ------------------------------------------------------------------------------------------------ critic


async def test_the_critic_trains_on_the_whole_batch_before_the_policy() -> None:
    rig = TrainerRig(total_steps=2, samples_per_lease=4, samples_per_version=4, with_critic=True, critic_epochs=2)
    assert rig.critic is not None
    order: list[str] = []
    rig.critic.on_step = lambda step: order.append("critic")
    rig.actor.on_step = lambda step: order.append("actor")
    records = await rig.run(4)
    assert order == ["critic"] * 4 + ["actor"] * 2
    assert rig.critic.steps[:2] == [[1, 2], [3, 4]]
    assert [("critic/loss" in record.metrics, "actor/loss" in record.metrics) for record in records] == [
        (True, True),
        (False, True),
    ]


async def test_critic_warmup_steps_leave_the_policy_unchanged() -> None:
    rig = TrainerRig(total_steps=4, samples_per_lease=4, samples_per_version=4, with_critic=True, critic_warmup_steps=3)
    assert rig.critic is not None
    records = await rig.run(8)
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert rig.critic.steps == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert rig.actor.steps == [[7, 8]]
    assert rig.actor.published == [(1, 2, 0, False), (2, 4, 1, True)]
    assert (await rig.counts()).trained == 8


# ------------------------------------------------------------------------------------------------ checkpoints


async def test_training_continues_while_a_checkpoint_of_an_earlier_moment_is_written() -> None:
    rig = TrainerRig(total_steps=4, save_freq=1)
    release = anyio.Event()
    rig.actor.on_step = lambda step: release.set() if step == 2 else None
    rig.checkpoints.on_finish = release.wait
    await rig.run(8)
    assert [progress.step for progress, _ in rig.checkpoints.saved] == [1, 2, 3, 4]
    assert [snapshot.counts.trained for _, snapshot in rig.checkpoints.saved] == [2, 4, 6, 8]


async def test_the_run_ends_after_the_last_checkpoint() -> None:
    rig = TrainerRig()
    release = anyio.Event()
    rig.checkpoints.on_finish = release.wait
    await feed(rig.queue, 8)
    async with anyio.create_task_group() as group:
        group.start_soon(rig.run)
        while not (rig.checkpoints.begun and rig.loop.waits.snapshot()):  # only the writing of the checkpoint is left
            await anyio.lowlevel.checkpoint()
        assert len(rig.records) == 4 and rig.checkpoints.saved == []
        assert [wait.edge for wait in rig.loop.waits.snapshot()] == ["checkpoint"]
        assert not (await rig.queue.admit(1, timeout_s=0.01)).closed, (
            "the run may still go back to an earlier checkpoint"
        )
        release.set()
    assert len(rig.checkpoints.saved) == 1
    assert (await rig.queue.admit(1, timeout_s=0.1)).closed


async def test_payloads_are_deleted_after_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TrainerRig(save_freq=2)
    events: list[tuple[str, int]] = []
    mark = rig.queue.mark

    async def marked(step: int) -> Any:
        events.append(("mark", step))
        return await mark(step)

    async def cover(step: int, oldest_kept: int) -> None:
        events.append(("covered", step))

    rig.checkpoints.on_finish = lambda: events.append(("named", rig.checkpoints.begun[-1]))
    monkeypatch.setattr(rig.queue, "mark", marked)
    monkeypatch.setattr(rig.queue, "cover", cover)
    await rig.run(8)
    for step in (2, 4):
        assert [what for what, number in events if number == step] == ["mark", "named", "covered"]


async def test_payloads_stay_after_a_failed_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full() -> None:
        raise DiskFullError("the disk is full")

    async def cover(step: int, oldest_kept: int) -> None:
        raise AssertionError(step)

    rig = TrainerRig()
    rig.checkpoints.on_finish = full
    monkeypatch.setattr(rig.queue, "cover", cover)
    with pytest.raises(DiskFullError):
        await rig.run(8)
    assert not (await rig.queue.admit(1, timeout_s=0.01)).closed, "a resumed run needs the open queue"


@pytest.mark.parametrize("written", [True, False])
async def test_a_failure_waits_for_a_running_checkpoint(written: bool) -> None:
    rig = TrainerRig(total_steps=4, save_freq=1)
    failed = anyio.Event()

    def fail(step: int) -> None:
        if step == 2:
            failed.set()
            raise DivergenceError("nan")

    async def write() -> None:
        await failed.wait()
        for _ in range(20):  # by now the failed step has raised its error
            await anyio.lowlevel.checkpoint()
        if not written:
            raise InfraError("its ranks are gone")

    rig.actor.on_step = fail
    rig.checkpoints.on_finish = write
    with pytest.raises(DivergenceError):
        await rig.run(8)
    assert [progress.step for progress, _ in rig.checkpoints.saved] == [1] * written


async def test_stop_ends_the_critics_passes_after_the_current_step() -> None:
    rig = TrainerRig(total_steps=4, samples_per_lease=4, samples_per_version=4, with_critic=True, critic_epochs=50)
    assert rig.critic is not None
    rig.critic.on_step = lambda step: rig.loop.stop() if step == 3 else None
    await feed(rig.queue, 4)
    assert await rig.run() == []
    assert (len(rig.critic.steps), rig.actor.steps) == (3, [])
    assert (await rig.counts()).dropped["shutdown"] == 4


async def test_calls_to_ranks_have_a_time_limit_and_waits_for_samples_have_none() -> None:
    rig = TrainerRig(total_steps=1, call_s=1000.0, with_critic=True)
    assert rig.critic is not None
    seen: dict[str, bool] = {}

    def look(*args: Any) -> None:
        seen.update({wait.edge: wait.bounded for wait in rig.loop.waits.snapshot()})

    rig.experience.change = rig.actor.on_step = rig.critic.on_step = rig.actor.on_publish = look

    async def write() -> None:
        await anyio.lowlevel.checkpoint()  # let the loop wait for the checkpoint
        look()

    rig.checkpoints.on_finish = write
    async with anyio.create_task_group() as group:
        group.start_soon(rig.run)
        await feed(rig.queue, 1)
        while not seen:
            await anyio.lowlevel.checkpoint()
            look()
        assert seen == {"samples": False}
        await feed(rig.queue, 1)
    bounded = dict.fromkeys(("experience", "critic", "train", "publish", "checkpoint"), True)
    assert seen == {"samples": False} | bounded


async def test_a_failed_checkpoint_ends_a_run_that_waits_for_samples() -> None:
    async def fail() -> None:
        raise InfraError("the disk is full")

    rig = TrainerRig(call_s=1000.0, save_freq=1)
    rig.checkpoints.on_finish = fail
    with pytest.raises(InfraError, match="the disk is full"):
        await rig.run(3)
    counts = await rig.counts()
    assert (counts.trained, counts.leased, counts.ready) == (2, 0, 1)


def test_settings_follow_from_the_configuration() -> None:
    config = Config.model_validate(
        {
            "seed": 3,
            "timeouts": {"train_s": 7.0},
            "algorithm": {"adv_estimator": "gae"},
            "trainer": {
                "ppo_mini_batch_size": 4,
                "ppo_epochs": 2,
                "test_freq": 5,
                "save_last": False,
                "partial_final_batch": "drop",
            },
            "critic": {"ppo_epochs": 7, "warmup_steps": 8},
            "async_training": {"require_batches": 3, "trigger_parameter_sync_step": 2},
            "data": {"val_files": ["val.jsonl"]},
        }
    )
    expected = LoopSettings(
        total_steps=9,
        mini_batch_samples=4,
        ppo_epochs=2,
        samples_per_lease=12,
        samples_per_version=24,
        drop_partial=True,
        critic_epochs=7,
        critic_warmup_steps=8,
        has_validation=True,
        test_freq=5,
        save_last=False,
        seed=3,
        call_limit_s=7.0,
        has_probes=True,
        lineage=2,
    )
    assert LoopSettings.from_config(config, total_steps=9, lineage=2) == expected
    without = config.model_copy(update={"algorithm": AlgorithmConfig()})
    assert LoopSettings.from_config(without, total_steps=9).critic_warmup_steps == 0


@pytest.mark.parametrize(
    ("changes", "lineage", "limit"),
    [
        ({}, 0, 1e-4),
        ({"weight_sync": {"max_mismatch_kl": 0.5}}, 0, 0.5),
        ({"weight_sync": {"max_mismatch_kl": None}}, 0, None),
        ({"async_training": {"trigger_parameter_sync_step": 2}}, 0, None),
        ({"async_training": {"staleness_threshold": 0.5}}, 0, None),
        ({"skip": {"async_rollout": {"enable": True, "steps": "all"}}}, 0, None),
        ({}, 1, None),
    ],
)
def test_only_fresh_on_policy_samples_are_held_to_the_engines_distribution(
    changes: dict[str, Any], lineage: int, limit: float | None
) -> None:
    on_policy = {"async_training": {"staleness_threshold": 0.0, "trigger_parameter_sync_step": 1}}
    merged = {name: on_policy.get(name, {}) | changes.get(name, {}) for name in on_policy | changes}
    settings = LoopSettings.from_config(Config.model_validate(merged), total_steps=9, lineage=lineage)
    assert settings.max_mismatch_kl == limit
