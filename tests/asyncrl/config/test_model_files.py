"""Files of a model are checked before a run: weights, their index, tokenizer and chat template."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from asyncrl.assets import resolve
from asyncrl.config.model_files import check_model_files
from tests.fakes.configurations import config_with, single


def weights(*names: str) -> bytes:
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4 * len(names))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the quickstart's model, in two files of weights with an index."""
    folder = tmp_path / "model"
    shutil.copytree(resolve("asyncrl://quickstart"), folder)
    (folder / "model.safetensors").unlink()
    (folder / "a.safetensors").write_bytes(weights("x", "y"))
    (folder / "b.safetensors").write_bytes(weights("z"))
    files = {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def problem_of(model: Path, **changes: str | None) -> tuple[str, str, str]:
    one = single(check_model_files(config_with({"model.path": str(model)} | changes)))
    return one.key, one.consequence, one.fix


def test_a_sound_model_has_no_problem(model: Path) -> None:
    assert list(check_model_files(config_with({"model.path": str(model)}))) == []
    assert list(check_model_files(config_with({"model.path": "asyncrl://quickstart"}))) == []
    assert list(check_model_files(config_with({"model.path": "Qwen/Qwen3-8B"}))) == [], "a name on the hub"


@pytest.mark.parametrize(
    ("content", "consequence"),
    [
        (b"", "a.safetensors has 0 bytes and no complete header"),
        (weights("x", "y")[:-3], "and its header describes"),
        (weights("x", "y")[:30], "no complete header: it was cut off"),
        (struct.pack("<Q", 4) + b"nope", "a header that cannot be read"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "is a pointer of Git LFS"),
        (weights("x"), "a.safetensors lacks y, which model.safetensors.index.json says are in it"),
        (None, "names a.safetensors, which is not there"),
    ],
)
def test_damaged_weights_are_reported(model: Path, content: bytes | None, consequence: str) -> None:
    file = model / "a.safetensors"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    key, text, fix = problem_of(model)
    assert (key, fix == "git lfs pull") == ("model.path", "Git LFS" in consequence)
    assert consequence in text


def test_an_index_that_cannot_be_read_is_reported(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("{")
    assert "no weight_map" in problem_of(model)[1]


def test_a_missing_tokenizer_is_not_a_missing_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    key, text, fix = problem_of(model)
    assert key == "model.chat_template" and "has none" in text and "instruction-tuned" in fix
    for file in model.glob("token*"):
        file.unlink()
    key, text, fix = problem_of(model)
    assert key == "model.path" and "no tokenizer" in text and "model.tokenizer_path" in fix
    apart = {"model.tokenizer_path": "asyncrl://quickstart"}
    assert list(check_model_files(config_with({"model.path": str(model)} | apart))) == []


def test_a_template_may_be_in_the_tokenizers_settings_or_configured(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert list(check_model_files(config_with({"model.path": str(model)}))) == []
    (model / "tokenizer_config.json").write_text("{}")
    own = {"model.path": str(model), "model.chat_template": "asyncrl://quickstart/chat_template.jinja"}
    assert list(check_model_files(config_with(own))) == []


def test_a_tokenizer_that_was_cut_off_is_reported(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"model":')
    assert "tokenizer.json cannot be read as JSON" in problem_of(model)[1]


def test_models_of_other_roles_are_checked(model: Path) -> None:
    (model / "b.safetensors").write_bytes(b"")
    critic = {"algorithm.adv_estimator": "gae", "critic.path": str(model)}
    assert single(check_model_files(config_with(critic))).key == "critic.path"
    scored = {"reward_model.placement": "serve", "reward_model.path": str(model)}
    assert single(check_model_files(config_with(scored))).key == "reward_model.path"
