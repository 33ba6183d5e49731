"""The reward model on a real Ray Serve: runs that share a cluster, batches, a replica that dies, and a bad model.

The tests replace the application of the engines, which needs vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError, DataError
from rollouter.rewards.classifier import RewardClassifier
from rollouter.rewards.conversation import ScoredConversation
from rollouter.serving.options import app_name
from tests.fakes.parts import make_prompt
from tests.fakes.reward_model import make_classifier

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    import ray

    ray.init(
        num_cpus=2, namespace="rewards-1", include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the engines by a deployment that is up at once."""
    from ray import serve

    class Idle:
        pass

    idle = serve.deployment(name="rollout", ray_actor_options={"num_cpus": 0})(Idle).bind()
    monkeypatch.setattr("rollouter.serving.app.build_rollout_app", lambda *args, **kwargs: idle)


def config(path: str, **changes: Any) -> Config:
    model = {"placement": "serve", "path": path, "max_batch_size": 4, **changes}
    return Config.model_validate({"reward_model": model, "reward": {"timeout_s": 60}, "timeouts": {"start_s": 90}})


def question(text: str) -> Any:
    return make_prompt(1, messages=({"role": "user", "content": text},))


def apps() -> set[str]:
    from ray import serve

    return set(serve.status().applications)


@pytest.mark.slow
async def test_two_runs_on_a_cluster_have_separate_reward_models(tmp_path: Path) -> None:
    from rollouter.serving.app import start_app, stop_app
    from rollouter.serving.reward_model import ServedRewardModel

    good, bad = make_classifier(tmp_path / "good"), make_classifier(tmp_path / "bad", num_labels=2)
    with anyio.fail_after(110):
        await start_app(config(good), namespace="rewards-1")
        with pytest.raises(ConfigError) as caught:
            await start_app(config(bad), namespace="rewards-2")
        assert caught.value.message == (
            f"reward_model.path={bad}: the model has 2 labels, not one; name a sequence-classification model with one "
            "label, saved by save_pretrained"
        )
        assert apps() == {app_name(f"rewards-{n}", part) for n in (1, 2) for part in ("rollout", "reward")}
        await stop_app("rewards-2")
        await stop_app("rewards-2")  # nothing to do
        assert apps() == {app_name("rewards-1", "rollout"), app_name("rewards-1", "reward")}

        model = ServedRewardModel(config(good), namespace="rewards-1")
        prompt = question("1+2=")
        texts = [f"#{number}" for number in range(10)]
        alone = RewardClassifier.load(config(good).reward_model)
        conversations = [ScoredConversation(prompt.messages, text) for text in texts]
        expected = alone.score(conversations)
        assert await model.score(conversations) == pytest.approx(expected, abs=1e-5)
        with pytest.raises(DataError, match=r"a conversation of .* tokens cannot be scored"):
            await model.score([ScoredConversation(prompt.messages, text) for text in ("#3", "1" * 100)])

        kill_replica("rewards-1")
        assert await model.score(conversations) == pytest.approx(expected, abs=1e-5)
        await stop_app("rewards-1")
    assert apps() == set()


def kill_replica(namespace: str) -> None:
    """Kill the process of the run's reward replica as the kernel may do."""
    import ray

    wanted = app_name(namespace, "reward")
    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    (name,) = (name for name in names if name and name.startswith(f"SERVE_REPLICA::{wanted}#"))
    ray.kill(ray.get_actor(name, namespace="serve"))
