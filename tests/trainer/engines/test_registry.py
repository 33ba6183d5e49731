"""Engines by name: registration, lookup, and the errors of both."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from asyncrl.core.failures import ConfigError
from tests.fakes.trainer_model import make_spec
from trainer.engines import registry
from trainer.engines.base import BaseEngine
from trainer.engines.registry import EngineRegistry
from trainer.engines.replicated import LocalEngine
from trainer.engines.torch_engine import TorchEngine


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineRegistry, "_engines", dict(EngineRegistry._engines))


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("fsdp_2", "fsdp2 or fsdp"),
        ("fsdp3", "fsdp or fsdp2"),
        ("fdsp", "fsdp or fsdp2"),
        ("FSDP", "fsdp or fsdp2"),
        ("locale", "local"),
        ("dpp", "ddp"),
        ("zzz", "[a-z0-9]+"),
    ],
)
def test_the_error_for_an_unknown_backend_names_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"trainer\.strategy={wrong}: .*did you mean {near}\? Known: .*fsdp2"):
        EngineRegistry.new(make_spec("/nowhere", strategy=wrong))


def test_defining_an_engine_without_required_methods_is_an_error() -> None:
    with pytest.raises(TypeError, match="Half lacks adapters_off, close, finish_save, forward_backward, infer, "):

        class Half(BaseEngine):
            def plan(self, total_steps: int) -> None: ...

    with pytest.raises(TypeError, match="Unwrapped lacks _wrap:"):

        class Unwrapped(TorchEngine):
            pass


def test_an_abstract_engine_cannot_be_registered() -> None:
    class Base(BaseEngine, abstract=True):
        pass

    register = EngineRegistry.register("language_model", "half", "cpu")
    for engine in (Base, TorchEngine):
        with pytest.raises(TypeError, match=f"engine half: {engine.__name__} is abstract: it lacks "):
            register(engine)
    with pytest.raises(TypeError, match="is no BaseEngine"):
        register(Path)  # type: ignore[type-var]
    assert "half" not in EngineRegistry.backends()


@pytest.mark.parametrize(("model_type", "device"), [("langauge_model", "cpu"), ("language_model", "tpu")])
def test_unknown_model_types_and_devices_are_refused(model_type: Any, device: Any) -> None:
    with pytest.raises(TypeError, match="is none of "):
        EngineRegistry.register(model_type, "mine", device)


def test_a_backend_runs_only_registered_model_types_and_devices() -> None:
    EngineRegistry.register(("language_model", "value_model"), "mine", "cpu")(LocalEngine)
    assert EngineRegistry.find("mine", "value_model", "cpu") is LocalEngine
    assert EngineRegistry.model_types("mine", "cpu") == {"language_model", "value_model"}
    assert EngineRegistry.model_types("mine", "cuda") == set()
    with pytest.raises(ConfigError, match="does not run a reward_model on cpu, only language_model on cpu"):
        EngineRegistry.find("mine", "reward_model", "cpu")


def test_a_package_registers_through_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_engine.py").write_text(
        "from trainer.engines.replicated import LocalEngine\n"
        "from trainer.engines.registry import EngineRegistry\n"
        "@EngineRegistry.register('language_model', backend='theirs', device='cpu')\n"
        "class TheirEngine(LocalEngine): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [
        EntryPoint("theirs", "their_engine", registry.ENTRY_POINTS),
        EntryPoint("broken", "their_missing_module", registry.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "asyncrl.engines" else [])
    assert {"theirs", "broken", "fsdp2"} <= set(EngineRegistry.backends())
    assert "their_engine" not in sys.modules
    assert EngineRegistry.find("theirs", "language_model", "cpu").__name__ == "TheirEngine"
    with pytest.raises(ConfigError, match=r"their_missing_module cannot be loaded \(.*No module"):
        EngineRegistry.find("broken", "language_model", "cpu")


@pytest.mark.parametrize("failure", ["OSError('libmissing.so: cannot open')", "RuntimeError('operator exists twice')"])
def test_a_broken_package_is_a_configuration_error(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_broken_engine.py").write_text(f"raise {failure}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("theirs", "their_broken_engine", registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    with pytest.raises(ConfigError, match=r"strategy=theirs: .*their_broken_engine cannot be loaded \(.*Error: "):
        EngineRegistry.find("theirs", "language_model", "cpu")
