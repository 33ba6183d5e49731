"""Training engines by `trainer.strategy`: a built-in name, the name of a package's entry point, or an import path."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points

from asyncrl.config.import_path import load_registered
from asyncrl.core.failures import ConfigError
from asyncrl.core.imports import collection_paused
from trainer.engines.base import BaseEngine, EngineSpec, missing_methods

BUILT_IN = {
    "local": "trainer.engines.replicated:LocalEngine",
    "ddp": "trainer.engines.replicated:DdpEngine",
    "fsdp": "trainer.engines.sharded:FsdpEngine",
    "fsdp2": "trainer.engines.sharded:Fsdp2Engine",
}
LIBRARY_ENGINES = {
    "torchtitan": "trainer.engines.torchtitan:TorchtitanEngine",
    "megatron_layers": "trainer.engines.megatron:MegatronEngine",
    "nemo_automodel": "trainer.engines.automodel:AutomodelEngine",
    "veomni": "trainer.engines.veomni:VeomniEngine",
}
"""Engines with the models or the sharding of another library, which has to be installed."""
ENTRY_POINTS = "asyncrl.engines"
"""Group of the entry points of other packages, each `name = module:Class`."""


def engines() -> Mapping[str, str]:
    """Return the import paths of the engine classes that have a name. Nothing is imported."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)} | LIBRARY_ENGINES | BUILT_IN


def find_engine(strategy: str) -> type[BaseEngine]:
    """Return the engine class that a value of `trainer.strategy` names.

    Raises:
        ConfigError: there is no such engine (the message names the nearest), or the object is none.
        UserCodeError: its module raised when it was imported.
    """
    key = "trainer.strategy"
    with collection_paused():
        engine = load_registered(strategy, key, engines(), "Class")
    if not (isinstance(engine, type) and issubclass(engine, BaseEngine)):
        raise ConfigError(f"{key}={strategy}: {engine!r} is no BaseEngine; name a class as in docs/training.md")
    if missing := missing_methods(engine):
        raise ConfigError(f"{key}={strategy}: {engine.__name__} is abstract, it lacks {', '.join(missing)}")
    return engine


def new_engine(spec: EngineSpec) -> BaseEngine:
    """Create the engine that `spec` describes.

    Raises:
        ConfigError: see `find_engine`; or the engine does not run this type of model, or refuses the configuration.
        UserCodeError: see `find_engine`.
    """
    engine = find_engine(spec.engine.strategy)
    if spec.model_type not in engine.model_types:
        raise ConfigError(
            f"trainer.strategy={spec.engine.strategy}: it does not run a {spec.model_type}, only "
            f"{', '.join(engine.model_types)}; choose another strategy"
        )
    if spec.router_aux_loss_coef and not engine.balances_experts:
        raise ConfigError(
            f"trainer.router_aux_loss_coef={spec.router_aux_loss_coef:g}: strategy {spec.engine.strategy} has no "
            "load-balancing loss; set it to 0, or use fsdp2"
        )
    return engine(spec)
