"""At the end of a run, however it ends, the journal, summary.json, `asyncrl status` and the terminal have the same
counts of samples and tokens."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, Self
from unittest.mock import AsyncMock

import anyio
import pytest
from ray.exceptions import ActorDiedError

from asyncrl.config.schema import Config
from asyncrl.core.failures import (
    BugError,
    ConfigError,
    DiskFullError,
    DivergenceError,
    InfraError,
    UserCodeError,
)
from asyncrl.core.ports import SampleCounts
from asyncrl.core.records import RunRecord
from asyncrl.driver import launch as launch_module
from asyncrl.driver import run as run_module
from asyncrl.driver.stall_watchdog import StallError, Watchdog
from asyncrl.observe.status import run_status
from asyncrl.observe.status.run_files import read_run, status_report
from asyncrl.queue import journal_reader
from asyncrl.queue.actor import QueueActor, QueueClient
from asyncrl.queue.journal_reader import read_counts
from asyncrl.storage.checkpoint_manifest import (
    MANIFEST,
    Manifest,
    Progress,
    checkpoint_name,
    dump_manifest,
    run_identity,
)
from asyncrl.storage.run_dir import JOURNAL
from asyncrl.weights.object_store import WeightStoreActor
from tests.fakes.metric_records import rollouter_status, step, trainer_status
from tests.fakes.one_run import LocalActor, without_ray
from tests.fakes.queues import meta, payload

SAMPLES = 8
"""Samples per step."""
STEPS = 4
GENERATED, TRAINED = 5, 4
"""Tokens per sample."""


class Parts:
    """The processes of a run: Rollouter and Trainer generate and train as fast as they can, so that the run is over
    before the driver asks for their statuses again.

    `ends` is awaited once the Trainer has committed its last step, whose record the driver does not get if this
    raises.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.ends: Callable[[], Any] = AsyncMock()
        self.starts: Callable[[], Any] = AsyncMock()
        self.resumed_step = 0
        self.saves: Callable[[int], Any] = AsyncMock()
        """Awaited with the number of each step that is committed."""
        self.scores: Callable[[], Any] = AsyncMock()
        self.queue_started = anyio.Event()
        self.stopped = anyio.Event()
        self.tokens = 0
        self.actor: QueueActor | None = None
        self.calls_fail: Exception | None = None
        self.full_disk = False
        parts = self

        class Run(run_module.Run):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                rollouter, trainer = self._rollouter_part, self._trainer_part
                rollouter.prepared = {
                    "num_prompts": 64, "num_filtered": 0, "num_val_filtered": 0, "call_format": "hermes",
                }  # fmt: skip
                rollouter.start, trainer.start = AsyncMock(), parts._start  # type: ignore[method-assign]
                rollouter.run, trainer.run = parts._generate, parts._train  # type: ignore[method-assign]
                rollouter.kill = trainer.kill = rollouter.stop = AsyncMock()  # type: ignore[method-assign]
                trainer.stop = parts._stop  # type: ignore[method-assign]
                rollouter.status = parts._rollouter_status  # type: ignore[method-assign, assignment]
                trainer.status = parts._trainer_status  # type: ignore[method-assign, assignment]

        replaced: dict[str, Any] = {
            "Run": Run,
            "claim_store": AsyncMock(side_effect=lambda *_, **__: LocalActor(WeightStoreActor())),
            "start_queue": self._start_queue,
            "start_app": AsyncMock(),
        }
        for name, value in replaced.items():
            monkeypatch.setattr(run_module, name, value)
        monkeypatch.setattr(launch_module, "cluster", self._cluster)
        monkeypatch.setattr(launch_module, "link_logs", lambda logs: None)
        write = run_status.replace_file
        monkeypatch.setattr(run_status, "replace_file", lambda *args: self._write(write, *args))

    @asynccontextmanager
    async def _cluster(self, config: Config, name: str, *, stale: str) -> AsyncIterator[str]:
        yield name

    def _start_queue(self, options: Any, restore: Any, *, run_dir: Path | None, identity: Any, **_: Any) -> Any:
        self.actor = QueueActor(options, restore, run_dir, identity)
        anyio.from_thread.run_sync(self.queue_started.set)
        return anyio.from_thread.run_sync(LocalActor, self)

    async def call(self, *args: Any) -> Any:
        """The method of the queue's actor."""
        if self.calls_fail is not None:
            raise self.calls_fail
        assert self.actor is not None
        return await self.actor.call(*args)

    async def abandon(self, request_id: str) -> None:
        assert self.actor is not None
        await self.actor.abandon(request_id)

    async def _start(self, incarnation: int) -> None:
        await self.starts()

    async def _stop(self) -> None:
        self.stopped.set()

    def _write(self, write: Any, *args: Any) -> None:
        if self.full_disk:
            raise OSError(errno.ENOSPC, "no space left")
        write(*args)

    async def _rollouter_status(self, limit_s: float) -> Any:
        return rollouter_status(generated_tokens=self.tokens, crash_isolation={"explained": 0})

    async def _trainer_status(self, limit_s: float) -> Any:
        return trainer_status(step=0)

    def _client(self, part: Any) -> QueueClient:
        return QueueClient(LocalActor(self), 5.0, part=part, incarnation=1)

    async def _generate(self) -> AsyncGenerator[RunRecord, None]:
        queue = self._client("rollouter")
        while not (admitted := await queue.admit(2 * SAMPLES, timeout_s=5.0)).closed:
            self.tokens += GENERATED * len(admitted.sample_ids)
            await self.scores()
            for sample_id in admitted.sample_ids:
                await queue.offer(meta(sample_id), payload(sample_id))
        for record in ():
            yield record

    async def _train(self) -> AsyncGenerator[RunRecord, None]:
        queue = self._client("trainer")
        for number in range(self.resumed_step + 1, STEPS + 1):
            lease = await queue.lease(SAMPLES, trainer_version=0, timeout_s=5.0)
            sample_ids = [sample.meta.sample_id for sample in lease.samples]
            await queue.commit(lease.lease_id, sample_ids, trained_tokens=number * SAMPLES * TRAINED)
            await self.saves(number)
            if number == STEPS:
                await self.ends()
            yield step(number, **{"tokens/trained": float(SAMPLES * TRAINED)})
        await queue.close()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    with without_ray({}):
        yield Parts(monkeypatch)


def config_of(tmp_path: Path, **keys: Any) -> Config:
    sections: dict[str, Any] = {
        "run_dir": str(tmp_path / "run"),
        "logging": {"console": "plain"},
        "trainer": {"total_training_steps": STEPS, "ppo_mini_batch_size": SAMPLES},
        "async_training": {"staleness_threshold": STEPS, "require_batches": 1, "trigger_parameter_sync_step": 1},
        "recovery": {"max_restarts": 0},
    }
    return Config.model_validate(sections | keys)


def completes(parts: Parts) -> None:
    """Nothing fails."""


def fails(error: Exception) -> Callable[[Parts], None]:
    def arrange(parts: Parts) -> None:
        parts.ends = AsyncMock(side_effect=error)

    return arrange


def a_reward_returns_nan(parts: Parts) -> None:
    parts.scores = AsyncMock(side_effect=UserCodeError("the reward of sample_0_13 is NaN"))


def the_disk_is_full(parts: Parts) -> None:
    async def ends() -> None:
        parts.full_disk = True
        raise DiskFullError("trained.jsonl cannot be written")

    parts.ends = ends


def the_journal_cannot_be_written(parts: Parts) -> None:
    async def ends() -> None:
        assert parts.actor is not None
        journal: Any = parts.actor._queue._core.log

        def commit(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        parts.monkeypatch.setattr(journal, "_commit", commit)
        parts.full_disk = True
        await parts._client("trainer").close()

    parts.ends = ends


def the_queue_is_gone(parts: Parts) -> None:
    async def ends() -> None:
        parts.calls_fail = ActorDiedError()
        await anyio.sleep_forever()

    parts.ends = ends


def the_record_of_a_step_is_damaged(parts: Parts) -> None:
    def write(row: Any) -> None:
        raise BugError("a metric is not registered")

    parts.monkeypatch.setattr(run_module.Recorder, "_write", lambda self, row: write(row))


def the_run_stalls(parts: Parts) -> None:
    stalled: list[bool] = []

    async def ends() -> None:
        stalled.append(True)
        await anyio.sleep_forever()

    def observe(self: Watchdog, now_s: float, state: Any) -> None:
        if stalled:
            raise StallError("no progress")

    parts.ends = ends

    parts.monkeypatch.setattr(Watchdog, "observe", observe)


def ctrl_c(parts: Parts) -> None:
    async def ends() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await parts.stopped.wait()

    parts.ends = ends


def ctrl_c_twice(parts: Parts) -> None:
    async def ends() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await parts.stopped.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep_forever()

    parts.ends = ends


def the_start_fails(parts: Parts) -> None:
    parts.starts = AsyncMock(side_effect=ConfigError("model.path=x: is none; give another"))


ENDS = [
    pytest.param(completes, "completed", id="completed"),
    pytest.param(ctrl_c, "interrupted", id="ctrl-c"),
    pytest.param(ctrl_c_twice, "interrupted", id="ctrl-c twice"),
    pytest.param(a_reward_returns_nan, "failed", id="user code"),
    pytest.param(fails(DivergenceError("the loss is not finite")), "failed", id="divergence"),
    pytest.param(fails(BugError("an illegal transition")), "failed", id="bug"),
    pytest.param(fails(RuntimeError("something else")), "failed", id="unknown error"),
    pytest.param(fails(InfraError("a rank died")), "failed", id="spent restart budget"),
    pytest.param(the_record_of_a_step_is_damaged, "failed", id="recorder"),
    pytest.param(the_disk_is_full, "failed", id="full disk"),
    pytest.param(the_journal_cannot_be_written, "failed", id="full disk of the journal"),
    pytest.param(the_queue_is_gone, "failed", id="dead queue"),
    pytest.param(the_run_stalls, "failed", id="watchdog"),
]


@dataclass(frozen=True)
class Counts:
    """The counts of samples by state, and the generated and the trained tokens."""

    samples: Mapping[str, Any]
    generated: int
    trained: int

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Return those of summary.json or of `asyncrl status --json`."""
        dropped = {reason: count for reason, count in content["samples"]["dropped"].items() if count}
        tokens = content["tokens"]
        return cls({**content["samples"], "dropped": dropped}, tokens["generated"], tokens["trained"])

    def lines(self) -> tuple[str, str]:
        """Return the lines of the closing summary on the terminal."""
        samples, dropped = self.samples, self.samples["dropped"]
        reasons = f" ({', '.join(f'{reason} {count}' for reason, count in dropped.items())})" if dropped else ""
        return (
            f"{samples['fed']} fed, {samples['trained']} trained, {sum(dropped.values())} dropped{reasons}",
            f"{self.generated} generated, {self.trained} trained",
        )


def counts_of(samples: SampleCounts, *, generated: int, trained: int) -> Counts:
    return Counts.of({"samples": asdict(samples), "tokens": {"generated": generated, "trained": trained}})


def end_of(config: Config, capsys: pytest.CaptureFixture[str]) -> tuple[str, Counts]:
    """Run to the end. Return the outcome, and the counts of which summary, status and terminal have the same."""
    run_dir = Path(str(config.run_dir))
    launch_module.launch(config)
    summary = json.loads((run_dir / "summary.json").read_text())
    counts = Counts.of(summary)
    assert Counts.of(status_report(read_run(run_dir))) == counts
    shown = capsys.readouterr().out
    assert all(line in shown for line in counts.lines()), (counts.lines(), shown)
    return summary["status"], counts


@pytest.mark.parametrize(("arrange", "status"), ENDS)
def test_all_records_have_the_counts_of_the_journal(
    arrange: Callable[[Parts], None], status: str, parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrange(parts)
    outcome, counts = end_of(config_of(tmp_path), capsys)
    assert outcome == status
    journal = read_counts(tmp_path / "run")
    assert counts == counts_of(journal.samples, generated=parts.tokens, trained=journal.trained_tokens)
    assert counts.generated > 0
    assert counts.trained == counts.samples["trained"] * TRAINED


def test_the_counts_of_a_journal_of_any_size_are_read_at_the_end(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that inspect a run refuse a snapshot of more than 600,000 samples; the run itself has to read it."""
    monkeypatch.setattr(journal_reader, "MAX_INSPECTED_BYTES", 100)
    monkeypatch.setattr(journal_reader, "MAX_INSPECTED_ROW_BYTES", 100)
    the_queue_is_gone(parts)
    _, counts = end_of(config_of(tmp_path), capsys)
    journal = read_counts(tmp_path / "run", is_own=True)
    assert counts == counts_of(journal.samples, generated=parts.tokens, trained=journal.trained_tokens)
    assert counts.samples["trained"] == STEPS * SAMPLES


@pytest.mark.parametrize(
    "arrange", [completes, ctrl_c, ctrl_c_twice, a_reward_returns_nan, fails(DivergenceError("nan")), the_run_stalls]
)
def test_without_a_journal_all_records_have_the_counts_of_the_queues_last_answer(
    arrange: Callable[[Parts], None], parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrange(parts)
    _, counts = end_of(config_of(tmp_path, journal="off"), capsys)
    assert parts.actor is not None
    state = parts.actor._queue.state
    assert counts == counts_of(state.counts(), generated=parts.tokens, trained=state.trained_tokens)
    assert counts.samples["fed"] > 0


def test_the_queue_starts_while_the_engines_start(
    parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start_app(*_: Any, **__: Any) -> None:
        with anyio.fail_after(10.0):
            await parts.queue_started.wait()

    monkeypatch.setattr(run_module, "start_app", start_app)
    assert launch_module.launch(config_of(tmp_path)) == launch_module.COMPLETED


def test_the_parser_that_auto_has_found_is_shown(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch_module.launch(config_of(tmp_path))
    assert "the parser of tool calls: hermes (rollout.multi_turn.format=auto)" in capsys.readouterr().out


def test_a_queue_without_a_journal_that_is_gone_has_the_counts_of_its_previous_answer(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    the_queue_is_gone(parts)
    outcome, _ = end_of(config_of(tmp_path, journal="off"), capsys)
    assert outcome == "failed"


def test_a_run_that_fails_before_its_queue_starts_has_no_samples(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    the_start_fails(parts)
    outcome, counts = end_of(config_of(tmp_path), capsys)
    assert (outcome, counts) == ("failed", counts_of(SampleCounts(), generated=0, trained=0))
    assert not (tmp_path / "run" / JOURNAL).exists()


def test_a_resumed_run_that_fails_at_its_start_keeps_the_counts_of_its_journal(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(DivergenceError("the loss is not finite"))(parts)
    _, before = end_of(config_of(tmp_path), capsys)
    the_start_fails(parts)
    assert end_of(config_of(tmp_path, resume="auto"), capsys) == ("failed", before)
    assert before.samples["trained"] == STEPS * SAMPLES


def test_a_run_whose_directory_is_lost_has_the_counts_of_its_checkpoint_and_of_what_follows(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = {"total_training_steps": STEPS, "ppo_mini_batch_size": SAMPLES, "save_freq": 2}
    first = config_of(tmp_path, trainer=training | {"checkpoint_dir": str(tmp_path / "network")})

    async def save(number: int) -> None:
        if number == 2:
            snapshot = await parts._client("trainer").mark(number)
            at = Progress(step=2, trained_samples=2 * SAMPLES, trained_tokens=2 * SAMPLES * TRAINED)
            checkpoint = tmp_path / "network" / checkpoint_name(2)
            (checkpoint / "hf").mkdir(parents=True)
            (checkpoint / "hf" / "config.json").write_text("{}")
            (checkpoint / MANIFEST).write_text(dump_manifest(Manifest(at, snapshot, run_identity(first))))

    parts.saves = save
    fails(DivergenceError("the machine is lost"))(parts)
    assert end_of(first, capsys)[1].samples["trained"] == STEPS * SAMPLES
    rmtree(tmp_path / "run")
    parts.ends, parts.saves, parts.resumed_step, parts.tokens = AsyncMock(), AsyncMock(), 2, 0
    second = first.model_copy(update={"run_dir": str(tmp_path / "second"), "resume": "auto"})
    launch_module.launch(second)
    summary, journal = json.loads((tmp_path / "second" / "summary.json").read_text()), read_counts(tmp_path / "second")
    counts = Counts.of(summary)
    assert counts == counts_of(journal.samples, generated=parts.tokens, trained=STEPS * SAMPLES * TRAINED)
    assert counts == Counts.of(status_report(read_run(tmp_path / "second")))
    samples = counts.samples
    assert (summary["status"], summary["lineage"], samples["trained"]) == ("completed", 1, STEPS * SAMPLES)
    assert samples["fed"] == samples["trained"] + sum(samples["dropped"].values()), "nothing is fed twice"
    notice = summary["resumed"]["lost"]
    assert f"the run directory, {tmp_path / 'run'} on " in notice and "which is step 2 " in notice
    assert "".join(notice.split()) in "".join(capsys.readouterr().out.split())
    assert notice in (tmp_path / "second" / "logs" / "driver.log").read_text()
    lines = map(json.loads, (tmp_path / "second" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["kind"] == "step"] == [3, 4]


def test_if_the_journal_cannot_be_read_the_queues_last_answer_counts(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ends() -> None:
        assert parts.actor is not None
        await anyio.to_thread.run_sync(parts.actor._queue._core.log._connection.execute, "DROP TABLE snapshots")  # type: ignore[union-attr]
        raise DivergenceError("the loss is not finite")

    parts.ends = ends
    _, counts = end_of(config_of(tmp_path), capsys)
    assert counts == counts_of(
        SampleCounts(fed=STEPS * SAMPLES, trained=STEPS * SAMPLES),
        generated=parts.tokens,
        trained=STEPS * SAMPLES * TRAINED,
    )
    assert "its journal cannot be read" in (tmp_path / "run" / "logs" / "driver.log").read_text()


def test_on_a_shared_cluster_the_queue_has_ended_before_its_journal_is_read(
    parts: Parts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(DivergenceError("the loss is not finite"))(parts)
    ended = AsyncMock()
    parts.monkeypatch.setattr(run_module, "kill", ended)
    parts.monkeypatch.setattr(run_module, "check_room", AsyncMock(return_value=""))
    parts.monkeypatch.setattr(run_module, "pending_demands", lambda namespace, app: ())
    end_of(config_of(tmp_path, ray={"address": "auto"}), capsys)
    [((_, [process], _), _)] = ended.await_args_list
    assert (process.part, process.pid) == ("queue", os.getpid())
