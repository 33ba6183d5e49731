"""The reward model: scores of single conversations and batches, and failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
import ray
import torch

from asyncrl.config.schema import Config
from asyncrl.config.sections.trainer import RewardModelConfig
from asyncrl.core.failures import ConfigError, DataError, DeadlineError, InfraError
from rollouter.rewards.classifier import RewardClassifier
from rollouter.rewards.conversation import ScoredConversation
from rollouter.serving.handles import connect
from rollouter.serving.reward_model import RewardReplica, build_reward_app
from tests.fakes.reward_model import CONTEXT, QUICKSTART, make_classifier, make_pair_classifier

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_classifier(tmp_path_factory.mktemp("classifier"))


def load(path: str, **changes: Any) -> RewardClassifier:
    return RewardClassifier.load(RewardModelConfig(placement="serve", path=path, **changes))


def user(text: str, response: str) -> ScoredConversation:
    return ScoredConversation(({"role": "user", "content": text},), response)


CONVERSATIONS = [user("1+2=", "3"), user("10+20+30=", "10+20=30;30+30=60;#60"), user("7=", ""), user("4+4=", "#8")]


def reference(path: str, ids: list[int]) -> float:
    """Return the score of the head on the last token's hidden state, in float64 and for this row alone."""
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification.from_pretrained(path).double().eval()
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state
        return float((hidden[0, -1] @ model.score.weight[0]).item())


@pytest.mark.asyncio
async def test_a_replica_without_a_reserved_gpu_takes_none(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray does not hide GPUs from a process that has reserved none."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = Config.model_validate({"reward_model": {"placement": "serve", "path": path}})
    app = build_reward_app(config, gpus=False, driver="")
    replica = RewardReplica.__new__(RewardReplica)
    await replica.__init__(*app._bound_deployment.init_args)  # type: ignore[misc]  # as Serve does
    assert replica._classifier._model.device.type == "cpu"
    assert build_reward_app(config, gpus=True, driver="")._bound_deployment.init_args[1] == "cuda"


@pytest.mark.parametrize("pad_token_id", [None, 0])
@pytest.mark.parametrize("template", [True, False])
def test_scores_of_a_batch_are_those_of_each_conversation_alone(
    tmp_path: Path, pad_token_id: int | None, template: bool
) -> None:
    path = make_classifier(tmp_path, pad_token_id=pad_token_id, template=template)
    classifier = load(path)
    batch = classifier.score(CONVERSATIONS)
    expected = [reference(path, classifier.encode(conversation).ids) for conversation in CONVERSATIONS]
    assert batch == pytest.approx(expected, abs=1e-5)
    assert [classifier.score([conversation])[0] for conversation in CONVERSATIONS] == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 4) for value in expected}) == len(expected)


def test_the_conversation_goes_through_the_models_own_template(path: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "#3"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert load(path).encode(user("1+2=", "#3")) == (expected, [0] * len(expected))
    plain = load(make_classifier(tmp_path, template=False))
    assert plain.encode(user("1+2=", "#3")).ids == tokenizer("1+2=", "#3")["input_ids"]
    assert tokenizer.decode(plain.encode(user("1+2=", "#3")).ids) == "1+2=#3"


def test_a_pair_model_gets_token_type_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertForSequenceClassification

    path = make_pair_classifier(tmp_path)
    model, tokenizer = BertForSequenceClassification.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    expected = []
    for conversation in CONVERSATIONS:
        pair = tokenizer(conversation.messages[0]["content"], conversation.response, return_tensors="pt")
        with torch.no_grad():
            expected.append(model(**pair).logits.item())
            blind = model(input_ids=pair["input_ids"], attention_mask=pair["attention_mask"]).logits.item()
        assert (abs(blind - expected[-1]) > 1e-3) == bool(conversation.response)
    assert load(path).score(CONVERSATIONS) == pytest.approx(expected, abs=1e-5)


def test_a_conversation_that_cannot_be_scored_gets_an_error(path: str) -> None:
    too_long, odd = user("1" * CONTEXT, "3"), ScoredConversation(({"role": "user", "content": None},), "3")
    classifier = load(path)
    scores = classifier.score([CONVERSATIONS[0], too_long, CONVERSATIONS[1], odd])
    assert scores[0] == pytest.approx(classifier.score([CONVERSATIONS[0]])[0], abs=1e-6)
    assert isinstance(scores[1], DataError)
    assert f"the reward model takes 1 to {CONTEXT}" in scores[1].message
    assert isinstance(scores[2], float)
    assert isinstance(scores[3], DataError)


def test_a_score_that_is_not_finite_is_an_error(path: str) -> None:
    classifier = load(path)
    with torch.no_grad():
        classifier._model.score.weight.fill_(torch.nan)
    (score,) = classifier.score(CONVERSATIONS[:1])
    assert isinstance(score, DataError)
    assert "nan, which is not finite" in score.message


def without_head(path: str) -> None:
    from safetensors.torch import load_file, save_file

    file = Path(path) / "model.safetensors"
    weights = load_file(file)
    del weights["score.weight"]
    save_file(weights, file, metadata={"format": "pt"})


def pickled(path: str) -> None:
    (Path(path) / "model.safetensors").unlink()
    torch.save({}, Path(path) / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("num_labels", "spoil", "expected"),
    [
        (1, without_head, "its files have no score.weight, which would be random numbers"),
        (3, lambda path: None, "the model has 3 labels, not one"),
        (1, pickled, "no reward model can be loaded from there: "),
        (1, lambda path: (Path(path) / "config.json").write_text(json.dumps({"model_type": "lama"})), "lama"),
    ],
)
def test_invalid_reward_models_are_refused(tmp_path: Path, num_labels: int, spoil: Any, expected: str) -> None:
    path = make_classifier(tmp_path / "model", num_labels=num_labels)
    spoil(path)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.message.startswith(f"reward_model.path={path}: ")
    assert expected in caught.value.message
    assert "name a sequence-classification model with one label" in caught.value.message
    # Serve reports only the last line of an error in a constructor.
    assert "\n" not in str(caught.value)


def test_a_causal_model_and_a_missing_path_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no reward model can be loaded|labels, not one|its files have no"):
        load(QUICKSTART)
    with pytest.raises(ConfigError, match=r"reward_model\.path=.*nothing-here: no reward model can be loaded"):
        load(str(tmp_path / "nothing-here"))
    with pytest.raises(ConfigError, match=r"reward_model\.path: null"):
        RewardClassifier.load(RewardModelConfig(placement="serve"))


# ------------------------------------------------------------------------------------------------ deployment calls


CONVERSATION = user("1+2=", "3")


class Handle:
    """A Serve handle with scripted answers: a score, an error, or an event after which the score is 1.0. Calls after
    the end of the script never answer.
    """

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.score = self
        self.num_calls = 0

    def remote(self, conversation: ScoredConversation) -> Handle:
        self.num_calls += 1
        return self

    def __await__(self) -> Any:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        if not self._answers:
            await anyio.sleep_forever()
        answer = self._answers.pop(0)
        if isinstance(answer, anyio.Event):
            await answer.wait()
            return 1.0
        if isinstance(answer, Exception) and not isinstance(answer, DataError):
            raise answer
        return answer

    def cancel(self) -> None:
        self.cancelled = True


def served(
    monkeypatch: pytest.MonkeyPatch, handle: Handle, *, timeout_s: float = 60.0, start_s: float = 90.0
) -> tuple[Any, list[float]]:
    from rollouter.serving.reward_model import ServedRewardModel

    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("ray.serve.get_deployment_handle", lambda *_: handle)
    config = Config.model_validate({"reward": {"timeout_s": timeout_s}, "timeouts": {"start_s": start_s}})
    return ServedRewardModel(config, namespace="run", sleep=sleep), slept


async def test_failed_calls_are_retried_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(RuntimeError("died"), RuntimeError("died"), 0.5)
    model, slept = await connect(lambda: served(monkeypatch, handle), 30.0)  # in a thread, as the Rollouter does
    assert await model.score([CONVERSATION]) == [0.5]
    assert slept == [1.0, 2.0]
    handle = Handle(*[RuntimeError("died")] * 3, 0.5)
    model, _ = served(monkeypatch, handle)
    with pytest.raises(InfraError, match="the reward model failed 3 times"):
        await model.score([CONVERSATION])
    assert handle.num_calls == 3


async def test_a_row_that_cannot_be_scored_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(DataError("too long"), 0.5)
    model, _ = served(monkeypatch, handle)
    with pytest.raises(DataError, match="too long"):
        await model.score([CONVERSATION])
    assert handle.num_calls == 1


async def test_a_model_that_does_not_answer_fails_within_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle()
    model, _ = served(monkeypatch, handle, timeout_s=0.05)
    with anyio.fail_after(10), pytest.raises(DeadlineError, match=r"reward\.timeout_s = 0\.05 s"):
        await model.score([CONVERSATION])
    assert handle.cancelled


async def test_calls_have_more_time_while_a_replica_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve delays calls while no replica is up, including calls from before the death, so a slow call does not mean
    that the model is slow."""
    first, third = anyio.Event(), anyio.Event()
    handle = Handle(first, ray.exceptions.ActorDiedError(), third)
    model, _ = served(monkeypatch, handle, timeout_s=0.5, start_s=30.0)

    async def loads() -> None:
        await anyio.sleep(0.7)
        first.set()
        third.set()

    async with anyio.create_task_group() as group:
        group.start_soon(loads)
        assert await model.score([CONVERSATION, CONVERSATION]) == [1.0, 1.0]
    # A replica is up again, so the usual deadline applies to slow calls.
    with pytest.raises(DeadlineError, match=r"reward\.timeout_s = 0\.5 s"):
        await model.score([CONVERSATION])


async def test_calls_fail_if_a_replica_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(ray.exceptions.ActorDiedError())
    model, _ = served(monkeypatch, handle, timeout_s=0.05, start_s=0.05)
    with anyio.fail_after(10), pytest.raises(DeadlineError, match=r"reward\.timeout_s"):
        await model.score([CONVERSATION])
    assert handle.num_calls == 2
