"""Engines by name and by import path, and the errors of both."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from asyncrl.core.failures import ConfigError, UserCodeError
from tests.fakes.trainer_model import make_spec
from trainer.engines import registry
from trainer.engines.base import BaseEngine
from trainer.engines.registry import BUILT_IN, engines, find_engine, new_engine
from trainer.engines.torch_engine import TorchEngine

THEIRS = """
from trainer.engines.replicated import LocalEngine
class TheirEngine(LocalEngine):
    model_types = ("language_model",)
number = 3
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of an engine in a directory of modules."""
    (tmp_path / "their_engine.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "their_engine.py"


@pytest.mark.parametrize(
    ("wrong", "near"), [("fsdp_2", "fsdp2"), ("fdsp", "fsdp"), ("locale", "local"), ("megatron", "megatron_layers")]
)
def test_the_error_for_an_unknown_engine_names_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.strategy: '{wrong}' is not built in; did you mean .{near}.\?"):
        new_engine(make_spec("/nowhere", strategy=wrong))


def test_every_built_in_name_is_an_engine_and_is_imported_only_when_used() -> None:
    assert [issubclass(find_engine(name), BaseEngine) for name in BUILT_IN] == [True] * 4


def test_defining_an_engine_without_required_methods_is_an_error() -> None:
    with pytest.raises(TypeError, match="Half lacks adapters_off, close, finish_save, forward_backward, infer, "):

        class Half(BaseEngine):
            def plan(self, total_steps: int) -> None: ...

    with pytest.raises(TypeError, match="Unwrapped lacks _wrap:"):

        class Unwrapped(TorchEngine):
            pass


def test_an_engine_is_named_by_its_module_or_file(theirs: Path) -> None:
    for name in ("their_engine:TheirEngine", "their_engine.TheirEngine", f"{theirs}:TheirEngine"):
        assert find_engine(name).__name__ == "TheirEngine"
    with pytest.raises(ConfigError, match=r"does not run a reward_model, only language_model; choose another"):
        new_engine(make_spec("/nowhere", model_type="reward_model", strategy=f"{theirs}:TheirEngine"))
    with pytest.raises(ConfigError, match="has no 'TheirEngin'; did you mean 'TheirEngine'"):
        find_engine(f"{theirs}:TheirEngin")
    for name, message in (("number", "3 is no BaseEngine"), ("Path", "no 'Path'")):
        with pytest.raises(ConfigError, match=message):
            find_engine(f"{theirs}:{name}")
    with pytest.raises(ConfigError, match="TorchEngine is abstract, it lacks _wrap"):
        find_engine("trainer.engines.torch_engine:TorchEngine")


def test_a_package_gives_its_engine_a_name_by_an_entry_point(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("theirs", "their_engine:TheirEngine", registry.ENTRY_POINTS),
        EntryPoint("missing", "their_missing_module:Engine", registry.ENTRY_POINTS),
        EntryPoint("fsdp2", "their_engine:TheirEngine", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "asyncrl.engines" else [])
    sys.modules.pop("their_engine", None)
    assert {"theirs", "missing"} <= set(engines())
    assert "their_engine" not in sys.modules
    assert find_engine("theirs").__name__ == "TheirEngine"
    assert find_engine("fsdp2").__name__ == "Fsdp2Engine", "a built-in name means the built-in engine"
    with pytest.raises(ConfigError, match="there is no module 'their_missing_module'"):
        find_engine("missing")


@pytest.mark.parametrize("failure", ["OSError('libmissing.so: cannot open')", "ImportError('no_such_library')"])
def test_what_a_broken_module_raises_is_named(failure: str, theirs: Path) -> None:
    theirs.with_name("their_broken_engine.py").write_text(f"raise {failure}\n")
    with pytest.raises(UserCodeError, match=r"trainer\.strategy: importing their_broken_engine failed: (lib|no_such)"):
        find_engine("their_broken_engine:Engine")
