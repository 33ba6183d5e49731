from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from asyncrl.core.failures import AsyncRLError, ConfigError, DeadlineError, InfraError
from tests.fakes.trainer_model import write_model
from tests.trainer.engines.state_ranks import (
    ADAPTER_RANKS,
    DAMAGES,
    DIRECTORIES,
    KINDS,
    assert_same,
    checks,
    make,
    make_spec,
    snapshot,
    step,
)
from trainer.engines.models import load_model
from trainer.engines.state import storage
from trainer.engines.state.checkpoint import begin_save, load
from trainer.engines.state.storage import ShardWriter

DEADLINE_S = 180


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("state") / "model")


@pytest.fixture(scope="module")
def two_ranks(model: Path) -> dict[str, str | None]:
    """Return the outcome of each check on two ranks: None, or the failure of either rank."""
    directory = model.parent
    for adapters in ADAPTER_RANKS:
        spec = make_spec(model, adapters)
        live, optimizer = make(spec)
        step(live, optimizer)
        step(live, optimizer)
        (directory / f"from_one_{adapters}").mkdir()
        begin_save(directory / f"from_one_{adapters}", live, optimizer, 2, spec).wait()
        step(live, optimizer)
        storage.write_tensors(snapshot(live), directory / f"next_{adapters}.safetensors")
    for name in (*DIRECTORIES, *DAMAGES):
        (directory / name).mkdir()
    command = [sys.executable, "-m", "tests.trainer.engines.state_ranks"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(directory)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)
    ]
    try:
        logs = [rank.communicate(timeout=DEADLINE_S)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    outcomes: dict[str, str | None] = {}
    for number in range(2):
        path = directory / f"outcomes_{number}.json"
        found = json.loads(path.read_text()) if path.exists() else {}
        for name in checks(directory):
            outcomes[name] = outcomes.get(name) or found.get(name, f"never ended on rank {number}:\n{logs[number]}")
    return outcomes


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("check", checks(Path()))
def test_checks_pass_on_two_ranks(two_ranks: dict[str, str | None], check: str) -> None:
    assert two_ranks[check] is None, two_ranks[check]


@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("adapters", ADAPTER_RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_state_saved_by_two_ranks_loads_bit_for_bit_in_one_process(
    two_ranks: dict[str, str | None], model: Path, kind: str, adapters: int
) -> None:
    spec = make_spec(model, adapters)
    expected = make(spec)
    for _ in range(2):
        step(*expected)
    found = make(spec, seed=3)
    assert load(model.parent / f"{kind}_{adapters}", *found, spec) == 2
    assert_same_state(found, expected)
    saved = dict(load_model(str(model.parent / f"{kind}_{adapters}" / "hf")).named_parameters())
    assert_same(snapshot(expected[0]), {name: value.detach() for name, value in saved.items()})


def assert_same_state(
    left: tuple[nn.Module, torch.optim.Optimizer], right: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    assert_same(dict(left[0].named_parameters()), dict(right[0].named_parameters()))
    theirs = dict(right[0].named_parameters())
    for name, parameter in left[0].named_parameters():
        assert_same(left[1].state.get(parameter, {}), right[1].state.get(theirs[name], {}))


@pytest.mark.parametrize("adapters", ADAPTER_RANKS)
def test_a_resumed_engine_continues_bit_for_bit(
    model: Path, tmp_path: Path, adapters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(model, adapters)
    first = make(spec)
    step(*first)
    begin_save(tmp_path, *first, 1, spec).wait()
    generator = torch.get_rng_state()
    step(*first)
    second = make(spec, seed=5)
    monkeypatch.setattr(torch, "load", _no_pickle)
    monkeypatch.setattr(pickle, "load", _no_pickle)
    monkeypatch.setattr(pickle, "loads", _no_pickle)
    assert load(tmp_path, *second, spec) == 1
    assert torch.equal(torch.get_rng_state(), generator)
    step(*second)
    assert_same_state(first, second)


def _no_pickle(*_: Any, **__: Any) -> None:
    raise AssertionError("the code reads a pickle")


def test_only_safetensors_and_json_are_written(model: Path, tmp_path: Path) -> None:
    spec = make_spec(model, 3)
    live = make(spec)
    step(*live)
    begin_save(tmp_path, *live, 1, spec, hf=tmp_path / "hf").wait()
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {
        "dcp/index.json",
        "dcp/rank_00000.safetensors",
        "rng_0.safetensors",
        "engine.json",
        "hf/config.json",
        "hf/generation_config.json",
        "hf/model.safetensors",
        "hf/tokenizer.json",
    }
    index = json.loads((tmp_path / "dcp/index.json").read_text())["tensors"]
    assert all(".lora_" in name for name in index), "with LoRA only adapters are trained and saved"


def test_a_checkpoint_has_the_state_at_the_start_of_the_save(model: Path, tmp_path: Path) -> None:
    spec = make_spec(model)
    live = make(spec)
    step(*live)
    before = snapshot(live[0])
    pending = begin_save(tmp_path, *live, 1, spec, hf=tmp_path / "hf")
    with torch.no_grad():
        for parameter in live[0].parameters():
            parameter.zero_()
    pending.wait_for_files()
    assert (tmp_path / "engine.json").exists()
    pending.wait()
    load(tmp_path, *live, spec)
    assert_same(snapshot(live[0]), before)
    saved = load_model(str(tmp_path / "hf")).named_parameters()
    assert_same({name: value.detach() for name, value in saved}, before)


def test_without_an_optimizer_only_weights_are_restored(model: Path, tmp_path: Path) -> None:
    spec = make_spec(model)
    live = make(spec)
    step(*live)
    begin_save(tmp_path, *live, 1, spec).wait()
    frozen = load_model(str(model)).requires_grad_(False)
    assert load(tmp_path, frozen, None, spec) == 1
    assert_same(snapshot(frozen), snapshot(live[0]))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)


def _lose_a_tensor(path: Path) -> None:
    content = json.loads(path.read_text())
    del content["tensors"]["model.model.norm.weight"]
    path.write_text(json.dumps(content))


def _lose_a_part(path: Path) -> None:
    content = json.loads(path.read_text())
    content["tensors"]["model.model.norm.weight"]["parts"] = []
    path.write_text(json.dumps(content))


def _point_outside(path: Path) -> None:
    path.write_text(path.read_text().replace('"rank_00000.safetensors"', '"../../rank_00000.safetensors"'))


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("dcp/rank_00000.safetensors", Path.unlink, "rank_00000"),
        ("dcp/rank_00000.safetensors", _truncate, "rank_00000"),
        ("dcp/rank_00000.safetensors", _flip_a_bit, "checksum"),
        ("dcp/rank_00000.safetensors", lambda path: path.write_bytes(b""), "rank_00000"),
        ("dcp/index.json", Path.unlink, "index.json"),
        ("dcp/index.json", _truncate, "index.json"),
        ("dcp/index.json", lambda path: path.write_text("[]"), "index.json"),
        ("dcp/index.json", _lose_a_tensor, "model.norm.weight"),
        ("dcp/index.json", _lose_a_part, "do not add up"),
        ("dcp/index.json", _point_outside, r"index\.json.*is not a valid name of a file"),
        ("dcp/index.json", lambda path: path.write_text("[" * 100_000), "index.json"),
        ("engine.json", Path.unlink, "engine.json"),
        ("engine.json", lambda path: path.write_text("{}"), "engine.json"),
        ("rng_0.safetensors", Path.unlink, "rng_0"),
        ("rng_0.safetensors", _truncate, "rng_0"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_changes_nothing(
    model: Path, tmp_path: Path, file: str, damage: Callable[[Path], object], words: str
) -> None:
    spec = make_spec(model)
    saved = make(spec)
    step(*saved)
    begin_save(tmp_path, *saved, 1, spec).wait()
    damage(tmp_path / file)
    live, untouched = make(spec, seed=2), make(spec, seed=2)
    for _ in range(2):
        step(*live)
        step(*untouched)
    generator = torch.get_rng_state()
    with pytest.raises(ConfigError, match=words) as caught:
        load(tmp_path, *live, spec)
    assert str(tmp_path) in str(caught.value)
    assert "resume=none" in str(caught.value)
    assert "the one before" not in str(caught.value), "there may be no earlier checkpoint"
    assert_same_state(live, untouched)
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"hidden": 32}, r"model\.model\.embed_tokens\.weight.*\(24, 16\).*\(24, 32\)"),
        ({"tied": False}, r"model\.lm_head\.weight is nothing there"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    model: Path, tmp_path: Path, other: dict[str, Any], words: str
) -> None:
    spec = make_spec(model)
    begin_save(tmp_path, *make(spec), 0, spec).wait()
    elsewhere = make_spec(write_model(tmp_path / "other", **other))
    live = make(elsewhere)
    before = snapshot(live[0])
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, *live, elsewhere)
    assert_same(snapshot(live[0]), before)


@pytest.mark.parametrize(("saved", "live"), [(3, 0), (0, 3), (3, 2)])
def test_a_checkpoint_with_other_adapters_is_refused(model: Path, tmp_path: Path, saved: int, live: int) -> None:
    begin_save(tmp_path, *make(make_spec(model, saved)), 0, make_spec(model, saved)).wait()
    with pytest.raises(ConfigError, match=r"model\.lora_rank"):
        load(tmp_path, *make(make_spec(model, live)), make_spec(model, live))


def test_moments_of_another_optimizer_are_refused(model: Path, tmp_path: Path) -> None:
    spec = make_spec(model)
    live, optimizer = make(spec)
    step(live, optimizer)
    del optimizer.state[next(live.parameters())]
    begin_save(tmp_path, live, optimizer, 1, spec).wait()
    with pytest.raises(ConfigError, match=r"optimizer\.model\.embed_tokens\.weight\.exp_avg is nothing there"):
        load(tmp_path, *make(spec), spec)


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_have_the_permissions_that_the_umask_gives(model: Path, tmp_path: Path, umask: int) -> None:
    spec = make_spec(model)
    before = os.umask(umask)
    try:
        begin_save(tmp_path, *make(spec), 0, spec, hf=tmp_path / "hf").wait()
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"model.safetensors", "rank_00000.safetensors", "rng_0.safetensors"} <= {path.name for path in files}
    modes = {str(path.relative_to(tmp_path)): oct(path.stat().st_mode & 0o777) for path in files}
    assert modes == dict.fromkeys(modes, oct(0o666 & ~umask))


def test_a_full_disk_is_raised_by_finish_save_and_training_continues(model: Path, tmp_path: Path) -> None:
    spec = make_spec(model)
    live = make(spec)
    (tmp_path / "engine.json").symlink_to("/dev/full")
    pending = begin_save(tmp_path, *live, 0, spec)
    step(*live)
    with pytest.raises(InfraError, match=r"disk is full: cannot write .*engine\.json.*run_dir=PATH"):
        pending.wait()


def test_a_full_disk_is_the_same_error_for_tensors_as_for_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(storage, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        storage.write_tensors({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "a.safetensors"))


def test_a_directory_that_cannot_be_written_is_named(model: Path, tmp_path: Path) -> None:
    spec = make_spec(model)
    (tmp_path / "dcp").write_text("a file where a directory has to go")
    with pytest.raises(AsyncRLError, match="dcp"):
        begin_save(tmp_path, *make(spec), 0, spec).wait()


def test_a_cpu_engine_does_not_use_a_gpu(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(model)
    spec = replace(spec, engine=spec.engine.model_copy(update={"device": "cpu"}))
    live = make(spec)

    def touched(*_: Any) -> None:
        raise AssertionError("the call creates a CUDA context")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", touched)
    monkeypatch.setattr(torch.cuda, "set_rng_state", touched)
    begin_save(tmp_path, *live, 1, spec).wait()
    assert load(tmp_path, *live, spec) == 1
    assert set(storage.safe_open(tmp_path / "rng_0.safetensors", framework="pt").keys()) == {"cpu"}


def test_waiting_for_a_disk_that_hangs_is_bounded(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, release = replace(make_spec(model), collective_s=0.01), threading.Event()
    monkeypatch.setattr(ShardWriter, "flush", lambda self: release.wait(60))
    try:
        pending = begin_save(tmp_path, *make(spec), 1, spec)
        with pytest.raises(DeadlineError, match=r"rank 0 has not written .* within 0\.12 s.*timeouts\.collective_s"):
            pending.wait()
        pending.wait_for_files()
    finally:
        release.set()
