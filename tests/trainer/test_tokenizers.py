"""Models that read the policy's tokens must have its tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from tests.fakes.reward_model import QUICKSTART
from trainer.tokenizer_checks import check_tokenizers


def tokenizer_like_the_policys(directory: Path, *, swapped: bool = False, added: bool = False) -> str:
    """Write the quickstart's tokenizer, unchanged, with two ids swapped, or with one more token."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(Path(QUICKSTART) / name, directory / name)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    if swapped:
        first, second, *_ = (token for token in vocabulary if token.isdigit())
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    if added:
        vocabulary["a token more"] = 1 + max(
            *vocabulary.values(), *(token["id"] for token in content.get("added_tokens", []))
        )
    file.write_text(json.dumps(content))
    return str(directory)


def config_of(**sections: Any) -> Config:
    return Config.model_validate({"model": {"path": "asyncrl://quickstart"}, **sections})


def with_reward_model(path: str, placement: str = "worker") -> Config:
    return config_of(reward_model={"placement": placement, "path": path})


@pytest.mark.parametrize("added", [False, True])
def test_the_same_tokenizer_with_or_without_more_tokens_is_accepted(
    tmp_path: Path, added: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check_tokenizers(with_reward_model(tokenizer_like_the_policys(tmp_path / "model", added=added)))
    assert caplog.records == []


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tokenizer_like_the_policys(tmp_path / "model", swapped=True)
    with pytest.raises(ConfigError, match=r"reward_model.path=.*2 of \d+ tokens differ.*placement=serve"):
        check_tokenizers(with_reward_model(path))
    check_tokenizers(with_reward_model(path, "serve"))
    with pytest.raises(ConfigError, match=r"critic.path=.*2 of \d+ tokens differ.*leave critic.path out"):
        check_tokenizers(config_of(critic={"path": path}, algorithm={"adv_estimator": "gae"}))
    with pytest.raises(ConfigError, match=r"teacher.path=.*2 of \d+ tokens differ.*teacher of the policy's family"):
        check_tokenizers(config_of(teacher={"path": path}))


def test_missing_tokenizers_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_tokenizers(with_reward_model(str(tmp_path)))
    [record] = caplog.records
    assert f"no tokenizer can be loaded from {tmp_path}" in record.message
