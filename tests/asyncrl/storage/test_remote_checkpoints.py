"""Checkpoints on an fsspec URL: upload, fetch, interruptions, and the claim, on `file://` and `memory://`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations, registry

from asyncrl.config.compose import check_config
from asyncrl.core.failures import ConfigError, DeadlineError, FencedError, InfraError
from asyncrl.core.ports import QueueSnapshot, SampleCounts
from asyncrl.driver.resume import find_resume
from asyncrl.storage import run_dir as run_dirs
from asyncrl.storage.checkpoint_claim import claim_checkpoints, pull_claim, read_claim, record_history
from asyncrl.storage.checkpoint_manifest import MANIFEST, NO_REWINDS, Progress, load_manifest
from asyncrl.storage.remote_checkpoints import RemoteCheckpoints
from asyncrl.storage.run_dir import RunDir
from trainer.checkpoints import CheckpointDirectory

SNAPSHOT = QueueSnapshot(1, (), SampleCounts(), 0)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(run_dirs, "MIRRORS", tmp_path / "mirrors")
    MemoryFileSystem.store.clear()
    yield f"file://{tmp_path}/bucket/run" if request.param == "file" else "memory://bucket/run"
    MemoryFileSystem.store.clear()


def launched(path: Path, url: str, *, new: bool = True, history: Any = NO_REWINDS) -> RunDir:
    """Claim the URL for a run in `path`, as a launch does."""
    path.mkdir(parents=True, exist_ok=True)
    run_dir = RunDir.of(path, url)
    claim_checkpoints(run_dir, history, new=new, exclusive=new, mode=0o700)
    return run_dir


def directory(run_dir: RunDir, history: Any = NO_REWINDS, keep: int = 2) -> CheckpointDirectory:
    assert run_dir.checkpoint_url is not None
    remote = RemoteCheckpoints(run_dir.checkpoint_url, run_dir.checkpoints)
    run_id = (run_dir.path / "run.id").read_text().strip()
    return CheckpointDirectory(
        run_dir.checkpoints, identity={"seed": 1}, keep=keep, history=history, run_id=run_id, remote=remote
    )


def save(files: CheckpointDirectory, step: int, content: bytes = b"weights") -> None:
    building = files.open(step, ("actor",))
    (building / "actor" / "model").write_bytes(content)
    (building / "actor" / ".metadata").write_bytes(b"")
    files.commit(building, Progress(step=step), SNAPSHOT)
    files.prune()


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Go on as on another machine, which has neither the mirror nor the run directory."""
    monkeypatch.setattr(run_dirs, "MIRRORS", tmp_path / "other-mirrors")


def test_a_checkpoint_is_found_on_another_machine(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = directory(launched(tmp_path / "run", url))
    for step in (1, 2, 3):
        save(files, step, b"weights %d" % step)
    elsewhere(monkeypatch, tmp_path)
    there = RunDir.of(tmp_path / "new", url)
    remote = RemoteCheckpoints(url, there.checkpoints)
    remote.pull()
    assert sorted(path.name for path in there.checkpoints.iterdir()) == ["step_000002", "step_000003"]
    for step in (2, 3):
        fetched = there.checkpoints / f"step_{step:06d}"
        assert load_manifest(fetched).progress.step == step
        assert (fetched / "actor" / "model").read_bytes() == b"weights %d" % step
    pull_claim(remote)
    claim = read_claim(there.checkpoints)
    assert claim is not None and claim.run_dir == tmp_path / "run"


def test_a_checkpoint_without_its_manifest_does_not_count(url: str, tmp_path: Path) -> None:
    run_dir = launched(tmp_path / "run", url)
    files = directory(run_dir)
    save(files, 1)
    remote = RemoteCheckpoints(url, run_dir.checkpoints)
    building = files.open(2, ())
    (building / "model").write_bytes(b"x")

    class Lost(Exception):
        pass

    def lose() -> None:
        raise Lost

    path = run_dir.checkpoints / "step_000002"
    building.rename(path)
    with pytest.raises(Lost):
        remote.upload(path, lose)
    assert remote.read("step_000002/model") == b"x"
    assert list(remote.steps()) == ["step_000001"]
    remote.pull()
    assert not path.exists(), "the mirror has what the URL has"
    remote.keep(["step_000001"])
    assert remote.read("step_000002/model") is None


def test_the_mirror_is_replaced_where_the_url_has_another_checkpoint_of_the_step(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = launched(tmp_path / "run", url)
    save(directory(here), 1, b"old")
    elsewhere(monkeypatch, tmp_path)
    history = NO_REWINDS.after_rewind(0)
    there = launched(tmp_path / "new", url, new=False, history=history)
    save(directory(there, history), 1, b"new")
    remote = RemoteCheckpoints(url, here.checkpoints)
    remote.pull()
    assert (here.checkpoints / "step_000001" / "actor" / "model").read_bytes() == b"new"


def test_the_earlier_run_is_refused_after_another_machine_has_continued_it(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = launched(tmp_path / "run", url)
    files = directory(run_dir)
    save(files, 1)
    building = files.open(2, ())
    with monkeypatch.context() as patched:
        elsewhere(patched, tmp_path)
        launched(tmp_path / "new", url, new=False, history=NO_REWINDS.after_rewind(1))
    with pytest.raises(FencedError, match="was claimed by the run in"):
        files.commit(building, Progress(step=2), SNAPSHOT)
    with pytest.raises(FencedError):
        files.prune()
    with pytest.raises(FencedError):
        record_history(run_dir, NO_REWINDS.after_rewind(1))
    assert list(RemoteCheckpoints(url, run_dir.checkpoints).steps()) == ["step_000001"]


def test_a_new_run_is_refused_at_the_url_of_another(url: str, tmp_path: Path) -> None:
    launched(tmp_path / "run", url)
    with pytest.raises(ConfigError) as refused:
        launched(tmp_path / "second", url)
    assert url in str(refused.value) and "belongs to another run" in str(refused.value)
    save(directory(launched(tmp_path / "run", url, new=False)), 1)
    with pytest.raises(ConfigError, match="has checkpoints"):
        launched(tmp_path / "second", url)


def test_a_file_that_leads_out_of_its_checkpoint_is_not_fetched(tmp_path: Path) -> None:
    class Hostile(MemoryFileSystem):
        def find(self, path: str, *args: Any, **kwargs: Any) -> list[str]:
            return [f"{path}/../../outside"]

    remote = RemoteCheckpoints("memory://bucket/run", tmp_path / "mirror")
    remote.write(f"step_000001/{MANIFEST}", b"{}")
    remote._files = Hostile()
    with pytest.raises(ConfigError, match=r"memory://bucket/run: step_000001 has a file that leads out of it"):
        remote.pull()
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (PermissionError("403 Forbidden"), ConfigError, "credentials"),
        (TimeoutError("connect timed out"), InfraError, "resume=auto"),
        (RuntimeError("endpoint gone"), InfraError, "resume=auto"),
        (FileNotFoundError("The specified bucket does not exist"), ConfigError, "Create the bucket"),
    ],
)
def test_a_failing_transfer_names_the_url(
    error: Exception, kind: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    remote = RemoteCheckpoints("memory://bucket/run", tmp_path)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail)
    with pytest.raises(kind, match="memory://bucket/run") as failed:
        remote.write("run.json", b"{}")
    assert text in str(failed.value)


def test_a_manifest_that_no_run_writes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.storage.remote_checkpoints.MAX_FILE_BYTES", 1_000)
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    remote = RemoteCheckpoints("memory://bucket/run", tmp_path)
    remote.write(f"step_000001/{MANIFEST}", b"x" * 1_000)
    assert list(remote.steps()) == ["step_000001"]
    remote.write(f"step_000001/{MANIFEST}", b"x" * 1_001)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", None)
    with pytest.raises(ConfigError, match=r"memory://bucket/run: step_000001/manifest.json has 1001 bytes"):
        remote.steps()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Let a method of the filesystem never answer; the event is set when it is called."""
    end = threading.Event()

    def make(method: str) -> threading.Event:
        called = threading.Event()

        def never(*args: Any, **options: Any) -> None:
            called.set()
            end.wait()

        monkeypatch.setattr(MemoryFileSystem, method, never)
        return called

    monkeypatch.setattr(MemoryFileSystem, "store", {})
    yield make
    end.set()


@pytest.mark.parametrize("method", ["ls", "size", "cat_file"])
def test_a_filesystem_that_never_answers_ends_a_launch_that_resumes(
    method: str, hang: Callable[[str], threading.Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dirs, "MIRRORS", tmp_path / "mirrors")
    save(directory(launched(tmp_path / "run", "memory://bucket/run")), 1)
    hang(method)
    given = ("trainer.checkpoint_dir=memory://bucket/run", "resume=auto", "timeouts.call_s=0.3")
    config = check_config(None, given).config
    assert config is not None
    with pytest.raises(DeadlineError, match=r"memory://bucket/run does not answer: .*timeouts.call_s=0.3 s. Check"):
        find_resume(config, root=tmp_path)


async def test_the_upload_of_a_checkpoint_ends_when_it_is_cancelled(
    hang: Callable[[str], threading.Event], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dirs, "MIRRORS", tmp_path / "mirrors")
    files = directory(launched(tmp_path / "run", "memory://bucket/run"))
    uploading = hang("put_file")
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(to_thread.run_sync, save, files, 1)
            assert await to_thread.run_sync(uploading.wait, 10)
            tasks.cancel_scope.cancel()
    assert RemoteCheckpoints("memory://bucket/run", tmp_path).steps() == {}


def test_a_missing_package_or_an_unknown_protocol_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known_implementations, "s3", {"class": "absent.S3", "err": "Install s3fs"})
    for given, text in (("s3://bucket/run", "Install s3fs"), ("nowhere://bucket/run", "nowhere")):
        if given.startswith("s3") and "s3" in registry:
            pytest.skip("s3fs is installed and loaded")
        with pytest.raises(ConfigError, match=text):
            RemoteCheckpoints(given, tmp_path)
        problems = check_config(None, (f"trainer.checkpoint_dir={given}", "trainer.save_freq=1")).problems
        assert [text in str(one) for one in problems if one.key == "trainer.checkpoint_dir"] == [True]
