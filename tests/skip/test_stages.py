"""The roles beside generation: what they keep, what makes two calls the same, and what they refuse."""

from __future__ import annotations

import datetime
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tensordict import TensorDict
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.core.failures import BugError, ConfigError
from asyncrl.core.ports import Score
from asyncrl.core.trajectory import Trajectory, single_turn
from asyncrl.core.types import FinishReason, Prompt, SampleId, Span, Turn
from skip import Call, SkipManager
from skip.fingerprint import differing, field
from skip.record import MANIFEST, to_files
from skip.stages import ToolOutcome
from tests.fakes.conversations import dialogue


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    SkipManager.reset()
    yield
    SkipManager.reset()


def configure(tmp_path: Path, role: str, *, settings: Mapping[str, Any] | None = None, **sections: Any) -> Config:
    section = {"enable": True, "dump_dir": str(tmp_path / "dump"), "steps": "all", **(settings or {})}
    return Config.model_validate({"skip": {role: section}, **sections})


def skip_of(tmp_path: Path, role: str, **sections: Any) -> Any:
    with SkipManager.session(configure(tmp_path, role, **sections)):
        return SkipManager.get(role)


def directory(tmp_path: Path, role: str) -> Path:
    return tmp_path / "dump" / "asyncrl" / "quickstart" / role


# ------------------------------------------------------------------------------------------------ reward


PROMPT = Prompt(
    np.array([1, 2, 3], dtype=np.int32),
    ({"role": "user", "content": "1+1?"},),
    "sums",
    "2",
    {"index": 5, "tags": ["a"]},
)


def answer(*tokens: int) -> Trajectory:
    log_probs = np.zeros(len(tokens), dtype=np.float32)
    return single_turn(PROMPT, Turn(np.array(tokens, dtype=np.int32), log_probs, (Span(0, 0),), FinishReason.STOP))


ANSWERS = (answer(4, 5), answer(6))


class Scorer:
    """Scores by the number of tokens; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[SampleId] = []

    @SkipManager.annotate(role="reward")
    async def score(self, sample_id: SampleId, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        self.asked.append(sample_id)
        lengths = [one.num_sampled for one in trajectories]
        return [Score(0.1 * length, {"rule": 1 / 3, "length": length}) for length in lengths]


async def test_a_sample_is_scored_once(tmp_path: Path) -> None:
    config = configure(tmp_path, "reward", settings={"steps": "1-9"})
    first, scorer = Scorer(), Scorer()
    with SkipManager.session(config):
        scored = await first.score(SampleId(0, 7), PROMPT, ANSWERS)
    with SkipManager.session(config):
        again = await scorer.score(SampleId(0, 7), PROMPT, ANSWERS)
        assert again == scored and [type(score) for score in again] == [Score, Score]
        assert (len(first.asked), scorer.asked) == (1, [])
        assert SkipManager.status() == {"reward": {"replayed": 1}}
        assert await scorer.score(SampleId(0, 8), PROMPT, ANSWERS) == scored
        assert await scorer.score(SampleId(0, 10), PROMPT, ANSWERS) == scored
        assert [sample_id.index for sample_id in scorer.asked] == [8, 10]
        assert SkipManager.status() == {"reward": {"replayed": 1, "recorded": 1}}
    assert {path.name for path in directory(tmp_path, "reward").iterdir()} == {"7", "8"}
    manifest = json.loads((directory(tmp_path, "reward") / "7" / MANIFEST).read_text())
    assert manifest["content"]["rewards"] == [0.2, 0.1]
    assert "turn_rewards" not in manifest["content"]


def fingerprint(made: Any, prompt: Prompt = PROMPT, trajectories: Sequence[Trajectory] = ANSWERS) -> Mapping[str, str]:
    told: Mapping[str, str] = made.fingerprint(
        Call({"sample_id": SampleId(0, 7), "prompt": prompt, "trajectories": trajectories}, {})
    )
    return told


@pytest.mark.parametrize(
    ("changes", "trajectories", "differs"),
    [
        ({}, (answer(4, 5), answer(6)), ()),
        ({}, (answer(4), answer(5, 6)), ("response_ids",)),
        ({}, ANSWERS[:1], ("response_ids",)),
        ({"prompt_ids": np.array([1, 2], dtype=np.int32)}, ANSWERS, ("prompt_ids",)),
        ({"messages": ()}, ANSWERS, ("messages",)),
        ({"data_source": "other"}, ANSWERS, ("data_source",)),
        ({"ground_truth": 2}, ANSWERS, ("ground_truth",)),
        ({"extra_info": {"tags": ["a"], "index": np.int64(5)}}, ANSWERS, ()),
        ({"extra_info": {"index": 5, "tags": ["b"]}}, ANSWERS, ("extra_info",)),
    ],
)
def test_what_changes_a_reward_changes_its_fingerprint(
    tmp_path: Path, changes: dict[str, Any], trajectories: Sequence[Trajectory], differs: tuple[str, ...]
) -> None:
    made = skip_of(tmp_path, "reward")
    assert differing(fingerprint(made), fingerprint(made, replace(PROMPT, **changes), trajectories)) == differs


@pytest.mark.parametrize(
    ("sections", "differs"),
    [
        ({"reward": {"timeout_s": 7.0, "max_concurrency": 1}}, ()),
        ({"reward": {"function": "math_verify"}}, ("function",)),
        ({"reward": {"kwargs": {"pattern": "(a)"}}}, ("kwargs",)),
        ({"reward": {"batch": True}}, ("batch",)),
        ({"reward": {"weight": 0.5}}, ("weight",)),
        ({"reward_model": {"placement": "serve", "path": "some/model"}}, ("reward_model",)),
        ({"reward_model": {"placement": "worker", "path": "some/model"}}, ("reward_model",)),
        ({"reward": {"functions": [{"name": "more", "function": "exact_match"}]}}, ("functions",)),
        ({"reward": {"judge": {"model": "judge-1"}}}, ("judge",)),
        ({"reward": {"judge": {"prompt": "{response}?"}}}, ()),
        ({"reward": {"tool_weight": 2.0, "turn_weight": 2.0}}, ()),
        ({"rollout": {"multi_turn": {"enable": True}}}, ("conversation_weights",)),
        ({"model": {"tokenizer_path": "some/tokenizer"}}, ("tokenizer",)),
    ],
)
def test_what_scores_is_in_the_fingerprint(tmp_path: Path, sections: dict[str, Any], differs: tuple[str, ...]) -> None:
    one, other = skip_of(tmp_path, "reward"), skip_of(tmp_path, "reward", **sections)
    assert differing(fingerprint(one), fingerprint(other)) == differs


@pytest.mark.parametrize(
    ("placement", "change", "differs"),
    [
        ("serve", {"weight": 2.0}, ("reward_model",)),
        ("serve", {"path": "another/model"}, ("reward_model",)),
        ("worker", {"weight": 2.0}, ()),
    ],
)
def test_a_served_reward_model_is_in_the_fingerprint(
    tmp_path: Path, placement: str, change: dict[str, Any], differs: tuple[str, ...]
) -> None:
    model = {"placement": placement, "path": "some/model"}
    one, other = (skip_of(tmp_path, "reward", reward_model=section) for section in (model, {**model, **change}))
    assert differing(fingerprint(one), fingerprint(other)) == differs


JUDGE = {"model": "judge-1", "base_url": "http://127.0.0.1:1/v1"}


@pytest.mark.parametrize(
    ("reward", "differs"),
    [
        ({"judge": {**JUDGE, "timeout_s": 7.0, "max_concurrency": 1, "max_attempts": 9}}, ()),
        ({"judge": {**JUDGE, "prompt": "{response}?"}}, ("judge",)),
        ({"judge": {**JUDGE, "weight": 2.0}}, ("judge",)),
        ({"judge": {**JUDGE, "params": {"temperature": 0}}}, ("judge",)),
        ({"judge": JUDGE, "turn_weight": 2.0}, ("conversation_weights",)),
    ],
)
def test_a_judge_and_weights_count_where_they_are_of_use(
    tmp_path: Path, reward: dict[str, Any], differs: tuple[str, ...]
) -> None:
    rollout = {"multi_turn": {"enable": True}}
    one, other = (
        skip_of(tmp_path, "reward", reward=section, rollout=rollout) for section in ({"judge": JUDGE}, reward)
    )
    assert differing(fingerprint(one), fingerprint(other)) == differs


def test_what_was_recorded_of_single_turns_before_is_of_use(tmp_path: Path) -> None:
    """Fields of conversations, and of sources that a run does not have, are left out."""
    assert sorted(fingerprint(skip_of(tmp_path, "reward"))) == [
        "batch", "code", "data_source", "extra_info", "function", "ground_truth", "kwargs", "messages", "prompt_ids",
        "response_ids", "reward_model", "source", "tokenizer", "weight",
    ]  # fmt: skip
    assert fingerprint(skip_of(tmp_path, "reward"))["response_ids"] == field(
        [np.array([4, 5], dtype=np.int32), np.array([6], dtype=np.int32)]
    )


def changed_turn(trajectory: Trajectory, **changes: Any) -> Trajectory:
    return replace(trajectory, turns=(replace(trajectory.turns[0], **changes), *trajectory.turns[1:]))


TALK = dialogue("add", "#22", rewards=[0.5, 0.0], scores={"add": 1.0})


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (dialogue("add", "#22", rewards=[0.5, 0.0], scores={"add": 1.0}), ()),
        (changed_turn(TALK, generate_s=3.0, user_s=2.0), ()),
        (changed_turn(TALK, calls=(replace(TALK.turns[0].calls[0], duration_s=1.0, wait_s=1.0),)), ()),
        (changed_turn(TALK, calls=(replace(TALK.turns[0].calls[0], status="raised"),)), ("conversations",)),
        (changed_turn(TALK, reward=0.25), ("conversations",)),
        (replace(TALK, scores={"add": 2.0}), ("conversations",)),
        (replace(TALK, finish_reason=FinishReason.MAX_TURNS), ("conversations",)),
        (replace(TALK, messages=TALK.messages[:-1]), ("conversations",)),
        (replace(TALK, rows=(TALK.rows[0], answer(6).rows[0])), ("response_ids",)),
        (answer(*TALK.rows[0].response_ids.tolist()), ("conversations",)),
    ],
)
def test_what_changes_the_reward_of_a_conversation(tmp_path: Path, other: Trajectory, differs: tuple[str, ...]) -> None:
    made = skip_of(tmp_path, "reward")
    assert differing(fingerprint(made, PROMPT, [TALK]), fingerprint(made, PROMPT, [other])) == differs


async def test_rewards_of_turns_are_recorded(tmp_path: Path) -> None:
    scores = [Score(1.5, {"rule": 1.0}, (0.25, 0.25)), Score(1.0)]
    calls = 0

    @SkipManager.annotate(role="reward")
    async def score(sample_id: SampleId, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        nonlocal calls
        calls += 1
        return scores

    for _ in range(2):
        with SkipManager.session(configure(tmp_path, "reward")):
            assert await score(SampleId(0, 7), PROMPT, [TALK, answer(6)]) == scores
    assert calls == 1
    manifest = json.loads((directory(tmp_path, "reward") / "7" / MANIFEST).read_text())
    assert manifest["content"]["turn_rewards"] == [[0.25, 0.25], []]


@pytest.mark.parametrize("written", ["{file}:score", "own_rewards_of_a_test:score"], ids=["file", "module"])
def test_another_source_of_the_users_function_is_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    file = tmp_path / "own_rewards_of_a_test.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    section = {"function": written.format(file=file)}
    found = []
    for source in ("def score(**asked): return 0.0\n", "def score(**asked): return 1.0\n"):
        file.write_text(source)
        found.append(fingerprint(skip_of(tmp_path, "reward", reward=section)))
    assert differing(*found) == ("source",)
    assert "own_rewards_of_a_test" not in sys.modules, "it is looked at, not imported"


@pytest.mark.parametrize(
    "function", ["exact_match", "no_such_module:score", "no.such:score", "gone.py:score", "sys:exit"]
)
def test_a_function_without_a_file_has_no_source(tmp_path: Path, function: str) -> None:
    assert fingerprint(skip_of(tmp_path, "reward", reward={"function": function}))["source"] == ""


UNUSUAL: list[Any] = [
    None,
    float("nan"),
    "\ud800",
    b"bytes",
    Decimal("0.1"),
    datetime.date(2024, 2, 29),
    {1, 2},
    {(1, 2): 3},
    {"a": 1, 2: "b"},
    [np.float32(0.1), np.longdouble(1), np.datetime64("2024-02-29")],
    np.array([1.5, 2.5]),
    np.array([[1], "two", {"three": {3}}], dtype=object),
    np.array(["2024-02-29"], dtype="datetime64[D]"),
    np.array(["a", "b"]),
    object(),
]


@pytest.mark.parametrize("truth", UNUSUAL, ids=lambda truth: type(truth).__name__)
async def test_columns_of_any_type_are_accepted(tmp_path: Path, truth: Any) -> None:
    prompt, scorer = replace(PROMPT, ground_truth=truth, extra_info={"truth": truth}), Scorer()
    with SkipManager.session(configure(tmp_path, "reward")):
        for _ in range(2):
            assert len(await scorer.score(SampleId(0, 7), prompt, ANSWERS)) == 2
        assert len(scorer.asked) == 1


def test_unusual_columns_are_equal_by_value(tmp_path: Path) -> None:
    made = skip_of(tmp_path, "reward")

    def of(truth: Any) -> str:
        return fingerprint(made, replace(PROMPT, ground_truth=truth))["ground_truth"]

    objects = [np.array([{"a": letter}, [1]], dtype=object) for letter in "xxy"]
    assert of(objects[0]) == of(objects[1]) != of(objects[2])
    long = [np.arange(5000) % modulus for modulus in (4999, 4999, 5000)]
    assert of({(1, 2): long[0]}) == of({(1, 2): long[1]}) != of({(1, 2): long[2]})
    assert of("2") != of(2) and of({"1": 0}) != of({1: 0})
    assert of({"b": {2, 1}, "a": 0}) == of({"a": 0, "b": {1, 2}})


@pytest.mark.parametrize("score", [Score(float("nan")), Score(1.0, {"part": float("inf")})], ids=["reward", "extra"])
async def test_scores_that_are_not_finite_are_returned_and_not_recorded(tmp_path: Path, score: Score) -> None:
    @SkipManager.annotate(role="reward")
    async def odd(sample_id: SampleId, prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [score]

    with SkipManager.session(configure(tmp_path, "reward")):
        assert await odd(SampleId(0, 7), PROMPT, ANSWERS[:1]) == [score]
        assert SkipManager.status() == {"reward": {"unrecorded": 1}}


@pytest.mark.parametrize(
    "content",
    [
        {"rewards": [1.0], "extras": [{}]},
        {"rewards": [1.0, 0.0], "extras": [{}]},
        {"rewards": [1.0, "0.0"], "extras": [{}, {}]},
        {"rewards": [1.0, 0.0], "extras": [{}, {"rule": None}]},
        {"rewards": [1.0, 0.0], "extras": [{}, []]},
        {"rewards": 1.0, "extras": {}},
        {"rewards": [1.0, 0.0]},
        {"rewards": [1.0, 0.0], "extras": [{}, {}], "turn_rewards": [[]]},
        {"rewards": [1.0, 0.0], "extras": [{}, {}], "turn_rewards": [[], [1.0, 2.0]]},
        {"rewards": [1.0, 0.0], "extras": [{}, {}], "turn_rewards": [[], ["1.0"]]},
        {"rewards": [1.0, 0.0], "extras": [{}, {}], "turn_rewards": [[], 1.0]},
    ],
)
async def test_scores_that_do_not_fit_count_as_absent(tmp_path: Path, content: dict[str, Any]) -> None:
    scorer = Scorer()
    with SkipManager.session(configure(tmp_path, "reward")):
        scored = await scorer.score(SampleId(0, 7), PROMPT, ANSWERS)
        rewrite(SkipManager.get("reward"), "7", content)
        assert await scorer.score(SampleId(0, 7), PROMPT, ANSWERS) == scored
        assert await scorer.score(SampleId(0, 7), PROMPT, ANSWERS) == scored
        assert len(scorer.asked) == 2
        assert SkipManager.status() == {"reward": {"recorded": 2, "damaged": 1, "replayed": 1}}


def rewrite(made: Any, name: str, data: Mapping[str, Any]) -> None:
    """Give a record other content, checksums included."""
    record = made.files.read(name)
    manifest, _ = to_files(replace(record, content=replace(record.content, data=data)))
    (made.files.root / name / MANIFEST).write_bytes(manifest)


async def test_repeat_gives_the_scores_of_the_same_responses_at_another_step_and_of_no_others(tmp_path: Path) -> None:
    scorer = Scorer()
    with SkipManager.session(configure(tmp_path, "reward")):
        scored = await scorer.score(SampleId(0, 7), PROMPT, ANSWERS)
    with SkipManager.session(configure(tmp_path, "reward", settings={"action": "repeat"})):
        assert await scorer.score(SampleId(0, 9), PROMPT, ANSWERS) == scored
        assert len(scorer.asked) == 1
        await scorer.score(SampleId(0, 8), PROMPT, (answer(1), answer(2, 3)))
        assert len(scorer.asked) == 2
        assert SkipManager.status() == {"reward": {"substituted": 1, "recorded": 1}}


# ------------------------------------------------------------------------------------------------ ref_log_prob


def asked(seed: int = 0, changes: Mapping[str, Tensor] = MappingProxyType({})) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    tensors = {
        "input_ids": torch.randint(0, 100, (2, 5), generator=generator),
        "response_lens": torch.tensor([3, 1]),
        "response_mask": mask,
    }
    return TensorDict({**tensors, **changes}, batch_size=[2])


class Reference:
    def __init__(self, log_probs: Tensor) -> None:
        self.log_probs = log_probs
        self.num_asked = 0

    @SkipManager.annotate(role="ref_log_prob")
    async def _ref_log_probs(self, request: TensorDict) -> Tensor:
        self.num_asked += 1
        return self.log_probs


LOG_PROBS = torch.tensor([[-0.1, -1e-30, -0.0], [-3.3, 0.0, 0.0]])


async def test_log_probs_come_back_bit_for_bit_and_can_be_written_to(tmp_path: Path) -> None:
    config, reference = configure(tmp_path, "ref_log_prob"), Reference(LOG_PROBS)
    for _ in range(2):
        with SkipManager.session(config):
            for step in (1, 2):
                SkipManager.set_step(step)
                found = await reference._ref_log_probs(asked(step))
                assert found.dtype is torch.float32 and found.shape == LOG_PROBS.shape
                assert found.numpy().tobytes() == LOG_PROBS.numpy().tobytes()
    assert reference.num_asked == 2
    found += 1.0
    assert {path.name for path in directory(tmp_path, "ref_log_prob").iterdir()} == {"1", "2"}


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, ()),
        ({"input_ids": torch.zeros(2, 5, dtype=torch.int64)}, ("input_ids",)),
        ({"response_lens": torch.tensor([3, 1], dtype=torch.int32)}, ("response_lens",)),
        ({"response_mask": torch.ones(2, 3, dtype=torch.bool)}, ("response_mask",)),
        ({"loss_mask": torch.ones(2, 3, dtype=torch.bool)}, ()),  # no matter of a forward pass
    ],
)
async def test_other_tensors_are_another_question(
    tmp_path: Path, changes: dict[str, Tensor], differs: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    made, reference = skip_of(tmp_path, "ref_log_prob"), Reference(LOG_PROBS)
    one, other = (made.fingerprint(Call({"request": tensors}, {})) for tensors in (asked(), asked(changes=changes)))
    assert differing(one, other) == differs
    with SkipManager.session(configure(tmp_path, "ref_log_prob")):
        SkipManager.set_step(1)
        for tensors in (asked(), asked(changes=changes)):
            await reference._ref_log_probs(tensors)
    assert reference.num_asked == (2 if differs else 1)
    assert all(f"it differs in {name}" in caplog.text for name in differs)


@pytest.mark.parametrize(
    ("sections", "differs"),
    [
        ({"trainer": {"optim": {"lr": 1.0}}}, ()),
        ({"ref": {"dtype": "bfloat16"}}, ("dtype",)),
        ({"trainer": {"dtype": "bfloat16"}}, ("dtype",)),
        ({"trainer": {"dtype": "bfloat16"}, "ref": {"dtype": "float32"}}, ()),
        ({"ref": {"strategy": "local"}}, ("strategy",)),
        ({"model": {"lora_rank": 4}, "ref": {"strategy": "local"}}, ()),
        ({"model": {"lora_rank": 4}, "ref": {"strategy": "local", "placement": "own"}}, ("strategy",)),
        ({"model": {"path": "some/model"}}, ("model",)),
        ({"rollout": {"sampling": {"temperature": 0.7}}}, ("temperature",)),
    ],
)
def test_another_reference_is_another_fingerprint(
    tmp_path: Path, sections: dict[str, Any], differs: tuple[str, ...]
) -> None:
    call = Call({"request": asked()}, {})
    one, other = skip_of(tmp_path, "ref_log_prob"), skip_of(tmp_path, "ref_log_prob", **sections)
    assert differing(one.fingerprint(call), other.fingerprint(call)) == differs


@pytest.mark.parametrize(
    "log_probs",
    [LOG_PROBS[:, :2], LOG_PROBS.double(), LOG_PROBS.bfloat16(), torch.full((2, 3), float("nan"))],
    ids=["shape", "float64", "bfloat16", "nan"],
)
async def test_log_probs_that_cannot_be_replayed_are_not_recorded(tmp_path: Path, log_probs: Tensor) -> None:
    reference = Reference(log_probs)
    with SkipManager.session(configure(tmp_path, "ref_log_prob")):
        SkipManager.set_step(1)
        assert await reference._ref_log_probs(asked()) is log_probs
        assert SkipManager.status() == {"ref_log_prob": {"unrecorded": 1}}


@pytest.mark.parametrize("shape", [[3, 2], [6], [2, 4], None])
async def test_log_probs_of_another_shape_count_as_absent(tmp_path: Path, shape: Any) -> None:
    reference = Reference(LOG_PROBS)
    with SkipManager.session(configure(tmp_path, "ref_log_prob")):
        SkipManager.set_step(1)
        await reference._ref_log_probs(asked())
        rewrite(SkipManager.get("ref_log_prob"), "1", {"shape": shape})
        assert torch.equal(await reference._ref_log_probs(asked()), LOG_PROBS)
        assert SkipManager.status() == {"ref_log_prob": {"recorded": 2, "damaged": 1}}


# ------------------------------------------------------------------------------------------------ tool


class Tools:
    """Each call gives another result, so that a call which runs again is seen."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self._delays = random.Random(0)

    @SkipManager.annotate(role="tool")
    async def call(
        self,
        sample_id: SampleId,
        trajectory: int,
        turn: int,
        name: str,
        arguments: Any,
        background: Mapping[str, Any] = MappingProxyType({}),
    ) -> ToolOutcome:
        await anyio.sleep(0.02 * self._delays.random())
        call = f"{sample_id} {trajectory} {turn} {name} {json.dumps(arguments)}"
        self.ran[call] += 1
        text = f"{call}: {self.ran[call]} \N{SNOWMAN}"
        return ToolOutcome(text, 1 / 3, {"hits": 2.0}, "refused", True, duration_s=0.5, wait_s=0.25)


async def test_each_call_of_a_sample_has_a_record_of_its_own(tmp_path: Path) -> None:
    """64 at once, all of one step but a few."""
    tools, results = Tools(), []
    calls = [
        (SampleId(0, index), trajectory, turn, name, {"query": query})
        for index in (7, 8)
        for trajectory in range(4)
        for turn in range(2)
        for name in ("search", "open")
        for query in ("a", "b")
    ]
    assert len(calls) == 64
    with SkipManager.session(configure(tmp_path, "tool")):
        for _ in range(2):
            found: dict[int, ToolOutcome] = {}

            async def ask(number: int, found: dict[int, ToolOutcome] = found) -> None:
                found[number] = await tools.call(*calls[number])

            async with anyio.create_task_group() as group:
                for number in range(64):
                    group.start_soon(ask, number)
            results.append(found)
        assert SkipManager.status() == {"tool": {"recorded": 64, "replayed": 64}}
    assert set(tools.ran.values()) == {1} and len(tools.ran) == 64
    for number, outcome in results[0].items():
        # All of it, but for the time: none has passed.
        assert results[1][number] == outcome._replace(duration_s=0.0, wait_s=0.0, replayed=True)
    names = [path.name for path in directory(tmp_path, "tool").iterdir()]
    assert Counter(name.partition("-")[0] for name in names) == {"7": 32, "8": 32}


async def test_arguments_are_equal_in_any_order_and_with_any_values(tmp_path: Path) -> None:
    tools = Tools()
    with SkipManager.session(configure(tmp_path, "tool")):
        first = await tools.call(SampleId(0, 7), 0, 0, "search", {"a": 1, "b": None})
        again = await tools.call(SampleId(0, 7), 0, 0, "search", {"b": None, "a": 1})
        assert again.replayed and again.text == first.text
        assert not (await tools.call(SampleId(0, 7), 0, 0, "search", {"b": None, "a": "1"})).replayed
        await tools.call(SampleId(0, 7), 0, 0, "\ud800", {"\ud800": "\ud800"})
    assert sum(tools.ran.values()) == 3


async def test_a_mismatch_of_a_tool_call_names_its_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two calls meet in one name."""
    tools = Tools()
    with SkipManager.session(configure(tmp_path, "tool", settings={"on_mismatch": "error"})):
        made = SkipManager.get("tool")
        monkeypatch.setattr(made, "call_name", lambda call: "0" * 16)
        await tools.call(SampleId(0, 7), 0, 0, "search", {"query": "a"})
        with pytest.raises(ConfigError, match=r"it differs in arguments \(recorded .*a.*, now .*b.*\), name"):
            await tools.call(SampleId(0, 7), 0, 0, "open", {"query": "b"})


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({}, ()),
        ({"before": [[0, "{}"]]}, ("before",)),
        ({"before": []}, ()),
        ({"prompt": ["2+2?"]}, ("prompt",)),
    ],
)
async def test_background_of_a_tool_call_is_in_the_fingerprint_by_name(
    tmp_path: Path, changes: dict[str, Any], differs: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    background, tools = {"before": [], "prompt": ["1+1?"]}, Tools()
    with SkipManager.session(configure(tmp_path, "tool")):
        await tools.call(SampleId(0, 7), 0, 1, "search", "{}", background)
        outcome = await tools.call(SampleId(0, 7), 0, 1, "search", "{}", {**background, **changes})
    assert outcome.replayed == (not differs)
    assert all(f"it differs in {name}" in caplog.text for name in differs)


CALCULATOR: dict[str, Any] = {"class_name": "calculator"}


@pytest.mark.parametrize(
    ("tools", "differs"),
    [
        ([CALCULATOR], ()),
        ([CALCULATOR | {"timeout_s": 1.0, "max_concurrency": 1, "max_per_s": 2.0, "on_error": "stop"}], ()),
        ([CALCULATOR | {"config": {"name": "c"}}], ("tools",)),
        ([CALCULATOR | {"tool_schema": {"type": "function"}}], ("tools",)),
        ([{"function": "a:b"}], ("tools",)),
        ([{"mcp": {"command": ["server"]}}], ("tools",)),
        ([CALCULATOR, CALCULATOR], ("tools",)),
        ([], ("tools",)),
    ],
)
def test_other_tools_are_another_fingerprint(tmp_path: Path, tools: Any, differs: tuple[str, ...]) -> None:
    call = Call({"sample_id": SampleId(0, 7), "trajectory": 0, "turn": 0, "name": "c", "arguments": "{}"}, {})
    one, other = (
        skip_of(tmp_path, "tool", rollout={"multi_turn": {"tools": its}}).fingerprint(call)
        for its in ([CALCULATOR], tools)
    )
    assert differing(one, other) == differs


def test_another_source_of_a_tool_is_another_fingerprint(tmp_path: Path) -> None:
    file, found = tmp_path / "own_tool.py", []
    call = Call({"sample_id": SampleId(0, 7), "trajectory": 0, "turn": 0, "name": "c", "arguments": "{}"}, {})
    for source in ("class Own: pass\n", "class Own: a = 1\n"):
        file.write_text(source)
        tools = [{"class_name": f"{file}:Own"}]
        found.append(skip_of(tmp_path, "tool", rollout={"multi_turn": {"tools": tools}}).fingerprint(call))
    assert differing(*found) == ("tools",)


@pytest.mark.parametrize(
    "outcome",
    ["text", ToolOutcome(text=b""), ToolOutcome(reward=float("nan")), ToolOutcome(metrics={"hits": float("inf")})],  # type: ignore[arg-type]
    ids=repr,
)
async def test_outcomes_that_cannot_be_replayed_are_not_recorded(tmp_path: Path, outcome: Any) -> None:
    @SkipManager.annotate(role="tool")
    async def call(sample_id: SampleId, trajectory: int, turn: int, name: str, arguments: str) -> Any:
        return outcome

    with SkipManager.session(configure(tmp_path, "tool")):
        assert await call(SampleId(0, 7), 0, 0, "draw", "{}") is outcome
        assert SkipManager.status() == {"tool": {"unrecorded": 1}}


SOUND = {"text": "", "reward": 0.0, "metrics": {}, "status": "ok", "done": False}


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"result": "of another time"},
        SOUND | {"more": 1},
        SOUND | {"text": 3},
        SOUND | {"reward": None},
        SOUND | {"metrics": {"hits": "2"}},
        SOUND | {"metrics": []},
        SOUND | {"status": "fine"},
        SOUND | {"done": 0},
    ],
    ids=repr,
)
async def test_a_malformed_outcome_counts_as_absent(tmp_path: Path, content: dict[str, Any]) -> None:
    tools = Tools()
    with SkipManager.session(configure(tmp_path, "tool")):
        await tools.call(SampleId(0, 7), 0, 0, "search", {})
        made = SkipManager.get("tool")
        assert made is not None
        rewrite(made, made.files.names()[0], content)
        assert (await tools.call(SampleId(0, 7), 0, 0, "search", {})).text.endswith(": 2 \N{SNOWMAN}")
        assert SkipManager.status() == {"tool": {"recorded": 2, "damaged": 1}}


# ------------------------------------------------------------------------------------------------ all of them


@pytest.mark.parametrize("role", ["ref_log_prob", "tool"])
def test_repeat_is_refused_for_roles_that_cannot(tmp_path: Path, role: str) -> None:
    with pytest.raises(ValidationError, match=rf"skip\.{role}\.action\n  Input should be 'cache'"):
        configure(tmp_path, role, settings={"action": "repeat"})


@pytest.mark.parametrize("role", ["reward", "tool"])
async def test_a_malformed_id_names_the_role(tmp_path: Path, role: str) -> None:
    bad: Any = "sample_7"
    with (
        SkipManager.session(configure(tmp_path, role)),
        pytest.raises(BugError, match=rf"skip\.{role} takes its step from the sample's id: .*e\.g\. sample_0_42"),
    ):
        await (Scorer().score(bad, PROMPT, ANSWERS) if role == "reward" else Tools().call(bad, 0, 0, "search", {}))


def test_the_roles_need_no_torch() -> None:
    """The Rollouter has none."""
    program = "import sys, skip.generation, skip.stages; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
