"""A real vLLM engine under Ray Serve, with a weight store beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

from asyncrl.config.schema import Config
from asyncrl.core.ports import WeightsProbe
from asyncrl.core.types import Turn
from benchmarks.models import TransformerShape, make_llama
from tests.e2e.launches import kill_started

NAMESPACE = "e2e-serving"
VOCABULARY = 64
MAX_MODEL_LEN = 512


TINY = TransformerShape(
    hidden_size=64,
    layers=2,
    heads=2,
    kv_heads=1,
    intermediate_size=160,
    vocab_size=VOCABULARY,
    max_positions=MAX_MODEL_LEN,
)


@dataclass
class EngineProcess:
    """A started application, with what a test needs to publish weights and to check the responses."""

    config: Config
    store: Any
    model: Any
    """A transformers model in float32 that stands in for the Trainer's."""
    version: int = 0
    lineage: int = 0

    def perturb(self, scale: float = 0.02) -> dict[str, np.ndarray]:
        """Change the model's weights at random, and return them as a Trainer would publish them."""
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(scale * torch.randn_like(parameter))
        return {name: tensor.detach().numpy() for name, tensor in self.model.state_dict().items()}

    def probe(self) -> WeightsProbe:
        """Return a probe of the model's current weights."""
        import torch

        ids = torch.arange(5, 45)
        with torch.no_grad():
            table = self.model(ids[None]).logits[0, :-1].log_softmax(-1)
        log_probs = table.gather(-1, ids[1:, None])[:, 0]
        return WeightsProbe((tuple(ids.tolist()),), (tuple(log_probs.tolist()),))

    def log_probs(self, prompt_ids: np.ndarray, turn: Turn) -> np.ndarray:
        """Return the log-probs of the turn's tokens under the model's current weights: float32 `[L]`."""
        import torch

        ids = torch.from_numpy(np.concatenate([prompt_ids, turn.response_ids])).long()
        with torch.no_grad():
            table = self.model(ids[None]).logits[0].log_softmax(-1)
        start = len(prompt_ids)
        return table[start - 1 : -1].gather(-1, ids[start:, None])[:, 0].numpy()


@pytest.fixture(autouse=True)
def kill_launches() -> Iterator[None]:
    """Kill the launches that a test leaves when it fails, which would slow down all tests that follow."""
    yield
    kill_started()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[EngineProcess]:
    """Start an engine for the tests of a module, whose `ROLLOUT` has further keys of `rollout`. A process has one Ray
    cluster, and other modules start their own."""
    import ray
    import torch
    from ray import serve
    from transformers import LlamaForCausalLM

    from asyncrl.weights.object_store import ServedRun, start_store
    from rollouter.serving.app import start_app, stop_app

    torch.set_num_threads(1)
    path = make_llama(tmp_path_factory.mktemp("model"), TINY)
    config = Config.model_validate(
        {
            "model": {"path": str(path)},
            "rollout": {"max_model_len": MAX_MODEL_LEN, **getattr(request.module, "ROLLOUT", {})},
            "timeouts": {"start_s": 240, "apply_s": 60, "generate_s": 120, "engine_s": 30, "probe_s": 30},
        }
    )
    ray.init(
        address="local",
        num_cpus=2,
        namespace=NAMESPACE,
        include_dashboard=False,
        object_store_memory=300 << 20,
        log_to_driver=False,
    )
    try:
        store = start_store(NAMESPACE, ServedRun.of(config, name="the tests", namespace=NAMESPACE))
        anyio.run(partial(start_app, config, namespace=NAMESPACE))
        yield EngineProcess(config, store, LlamaForCausalLM.from_pretrained(path))
        anyio.run(stop_app, NAMESPACE)
        serve.shutdown()  # a handle that reports metrics for autoscaling would start Ray again
    finally:
        ray.shutdown()
