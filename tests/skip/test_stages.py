"""Tests of the roles other than generation: their records, their fingerprints, and the results that they refuse."""

from __future__ import annotations

import datetime
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
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
from skip.record import MANIFEST, Content, to_files
from skip.stages import ToolOutcome
from tests.fakes.conversations import dialogue
from tests.fakes.skip_roles import recording, records_of, role_of

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


def forward_batch(seed: int = 0, **changes: Tensor) -> TensorDict:
    tensors = {
        "input_ids": torch.randint(0, 100, (2, 5), generator=torch.Generator().manual_seed(seed)),
        "response_lens": torch.tensor([3, 1]),
        "response_mask": torch.tensor([[True, True, True], [True, False, False]]),
    }
    return TensorDict({**tensors, **changes}, batch_size=[2])


ANSWERS = (answer(4, 5), answer(6))
SCORES = [Score(0.2, {"rule": 1 / 3, "length": 2.0}), Score(0.1, {"rule": 1 / 3, "length": 1.0})]
LOG_PROBS = torch.tensor([[-0.1, -1e-30, -0.0], [-3.3, 0.0, 0.0]])
OUTCOME = ToolOutcome("42", 1 / 3, {"hits": 2.0}, "refused", True)
CALLS: dict[str, dict[str, Any]] = {
    "reward": {"sample_id": SampleId(0, 7), "prompt": PROMPT, "trajectories": ANSWERS},
    "ref_log_prob": {"request": forward_batch()},
    "tool": {"sample_id": SampleId(0, 7), "trajectory": 0, "turn": 0, "name": "search", "arguments": {}},
}
"""Arguments of a stage, by role."""
RESULTS: dict[str, Any] = {"reward": SCORES, "ref_log_prob": LOG_PROBS, "tool": OUTCOME}


class Stage:
    """A stage of any role, which returns `result` and counts its calls."""

    def __init__(self, role: str, result: Any = None) -> None:
        self.num_calls = 0
        self._defaults = CALLS[role]
        self._result = RESULTS[role] if result is None else result
        self._annotated = SkipManager.annotate(role=role)(self._run)

    async def __call__(self, **changes: Any) -> Any:
        SkipManager.set_step(7)
        return await self._annotated(**self._defaults | changes)

    async def _run(
        self,
        sample_id: Any = None,
        prompt: Any = None,
        trajectories: Any = (),
        request: Any = None,
        trajectory: int = 0,
        turn: int = 0,
        name: str = "",
        arguments: Any = None,
        background: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        self.num_calls += 1
        return self._result


def fingerprint(role: Any, **changes: Any) -> Mapping[str, str]:
    found: Mapping[str, str] = role.fingerprint(Call(CALLS[role.active.role] | changes, {}))
    return found


def rewrite(role: Any, data: Mapping[str, Any]) -> None:
    """Give the role's only record other content with correct checksums."""
    (name,) = role.files.names()
    record = role.files.read(name)
    manifest, _ = to_files(replace(record, content=replace(record.content, data=data)))
    (role.files.root / name / MANIFEST).write_bytes(manifest)


# ------------------------------------------------------------------------------------------------ every role

JUDGE = {"model": "judge-1", "base_url": "http://127.0.0.1:1/v1"}
SERVED = {"placement": "serve", "path": "some/model"}
WORKER = {"placement": "worker", "path": "some/model"}
TALKING = {"rollout": {"multi_turn": {"enable": True}}}
CALCULATOR: dict[str, Any] = {"class_name": "calculator"}


def judged(**judge: Any) -> dict[str, Any]:
    return {**TALKING, "reward": {"judge": JUDGE | judge}}


def with_tools(*tools: Any) -> dict[str, Any]:
    return {"rollout": {"multi_turn": {"tools": tools}}}


@pytest.mark.parametrize(
    ("role", "before", "after", "differs"),
    [
        ("reward", {}, {"reward": {"timeout_s": 7.0, "max_concurrency": 1}}, ()),
        ("reward", {}, {"reward": {"function": "math_verify"}}, ("function",)),
        ("reward", {}, {"reward": {"kwargs": {"pattern": "(a)"}}}, ("kwargs",)),
        ("reward", {}, {"reward": {"batch": True}}, ("batch",)),
        ("reward", {}, {"reward": {"weight": 0.5}}, ("weight",)),
        ("reward", {}, {"reward_model": SERVED}, ("reward_model",)),
        ("reward", {}, {"reward_model": WORKER}, ("reward_model",)),
        ("reward", {"reward_model": SERVED}, {"reward_model": SERVED | {"weight": 2.0}}, ("reward_model",)),
        ("reward", {"reward_model": SERVED}, {"reward_model": SERVED | {"path": "another/model"}}, ("reward_model",)),
        ("reward", {"reward_model": WORKER}, {"reward_model": WORKER | {"weight": 2.0}}, ()),
        ("reward", {}, {"reward": {"functions": [{"name": "more", "function": "exact_match"}]}}, ("functions",)),
        ("reward", {}, {"reward": {"judge": {"model": "judge-1"}}}, ("judge",)),
        ("reward", {}, {"reward": {"judge": {"prompt": "{response}?"}}}, ()),
        ("reward", {}, {"reward": {"tool_weight": 2.0, "turn_weight": 2.0}}, ()),
        ("reward", {}, TALKING, ("conversation_weights",)),
        ("reward", {}, {"model": {"tokenizer_path": "some/tokenizer"}}, ("tokenizer",)),
        ("reward", judged(), judged(timeout_s=7.0, max_concurrency=1, max_attempts=9), ()),
        ("reward", judged(), judged(prompt="{response}?"), ("judge",)),
        ("reward", judged(), judged(weight=2.0), ("judge",)),
        ("reward", judged(), judged(params={"temperature": 0}), ("judge",)),
        ("reward", judged(), {**TALKING, "reward": {"judge": JUDGE, "turn_weight": 2.0}}, ("conversation_weights",)),
        ("ref_log_prob", {}, {"trainer": {"optim": {"lr": 1.0}}}, ()),
        ("ref_log_prob", {}, {"ref": {"dtype": "bfloat16"}}, ("dtype",)),
        ("ref_log_prob", {}, {"trainer": {"dtype": "bfloat16"}}, ("dtype",)),
        ("ref_log_prob", {}, {"trainer": {"dtype": "bfloat16"}, "ref": {"dtype": "float32"}}, ()),
        ("ref_log_prob", {}, {"ref": {"strategy": "local"}}, ("strategy",)),
        ("ref_log_prob", {}, {"model": {"lora_rank": 4}, "ref": {"strategy": "local"}}, ()),
        (
            "ref_log_prob",
            {},
            {"model": {"lora_rank": 4}, "ref": {"strategy": "local", "placement": "own"}},
            ("strategy",),
        ),
        ("ref_log_prob", {}, {"model": {"path": "some/model"}}, ("model",)),
        ("ref_log_prob", {}, {"rollout": {"sampling": {"temperature": 0.7}}}, ("temperature",)),
        ("tool", with_tools(CALCULATOR), with_tools(CALCULATOR), ()),
        (
            "tool",
            with_tools(CALCULATOR),
            with_tools(CALCULATOR | {"timeout_s": 1.0, "max_concurrency": 1, "max_per_s": 2.0, "on_error": "stop"}),
            (),
        ),
        ("tool", with_tools(CALCULATOR), with_tools(CALCULATOR | {"config": {"name": "c"}}), ("tools",)),
        ("tool", with_tools(CALCULATOR), with_tools(CALCULATOR | {"tool_schema": {"type": "function"}}), ("tools",)),
        ("tool", with_tools(CALCULATOR), with_tools({"function": "a:b"}), ("tools",)),
        ("tool", with_tools(CALCULATOR), with_tools({"mcp": {"command": ["server"]}}), ("tools",)),
        ("tool", with_tools(CALCULATOR), with_tools(CALCULATOR, CALCULATOR), ("tools",)),
        ("tool", with_tools(CALCULATOR), with_tools(), ("tools",)),
    ],
)
def test_settings_that_change_a_result_are_in_the_fingerprint(
    tmp_path: Path, role: str, before: dict[str, Any], after: dict[str, Any], differs: tuple[str, ...]
) -> None:
    one, other = (fingerprint(role_of(tmp_path, role, **sections)) for sections in (before, after))
    assert differing(one, other) == differs


def changed_turn(trajectory: Trajectory, **changes: Any) -> Trajectory:
    return replace(trajectory, turns=(replace(trajectory.turns[0], **changes), *trajectory.turns[1:]))


def talk() -> Trajectory:
    return dialogue("add", "#22", rewards=[0.5, 0.0], scores={"add": 1.0})


TALK = talk()
CALL = TALK.turns[0].calls[0]
BACKGROUND = {"background": {"before": [], "prompt": ["1+1?"]}}


def prompted(**changes: Any) -> dict[str, Any]:
    return {"prompt": replace(PROMPT, **changes)}


@pytest.mark.parametrize(
    ("role", "before", "after", "differs"),
    [
        ("reward", {}, {"trajectories": (answer(4, 5), answer(6))}, ()),
        ("reward", {}, {"trajectories": (answer(4), answer(5, 6))}, ("response_ids",)),
        ("reward", {}, {"trajectories": ANSWERS[:1]}, ("response_ids",)),
        ("reward", {}, prompted(prompt_ids=np.array([1, 2], dtype=np.int32)), ("prompt_ids",)),
        ("reward", {}, prompted(messages=()), ("messages",)),
        ("reward", {}, prompted(data_source="other"), ("data_source",)),
        ("reward", {}, prompted(ground_truth=2), ("ground_truth",)),
        ("reward", {}, prompted(extra_info={"tags": ["a"], "index": np.int64(5)}), ()),
        ("reward", {}, prompted(extra_info={"index": 5, "tags": ["b"]}), ("extra_info",)),
        *(
            ("reward", {"trajectories": [TALK]}, {"trajectories": [other]}, differs)
            for other, differs in [
                (talk(), ()),
                (changed_turn(TALK, generate_s=3.0, user_s=2.0), ()),
                (changed_turn(TALK, calls=(replace(CALL, duration_s=1.0, wait_s=1.0),)), ()),
                (changed_turn(TALK, calls=(replace(CALL, status="raised"),)), ("conversations",)),
                (changed_turn(TALK, reward=0.25), ("conversations",)),
                (replace(TALK, scores={"add": 2.0}), ("conversations",)),
                (replace(TALK, finish_reason=FinishReason.MAX_TURNS), ("conversations",)),
                (replace(TALK, messages=TALK.messages[:-1]), ("conversations",)),
                (replace(TALK, rows=(TALK.rows[0], answer(6).rows[0])), ("response_ids",)),
                (answer(*TALK.rows[0].response_ids.tolist()), ("conversations",)),
            ]
        ),
        *(
            ("ref_log_prob", {}, {"request": forward_batch(**{name: tensor})}, differs)
            for name, tensor, differs in [
                ("input_ids", torch.zeros(2, 5, dtype=torch.int64), ("input_ids",)),
                ("response_lens", torch.tensor([3, 1], dtype=torch.int32), ("response_lens",)),
                ("response_mask", torch.ones(2, 3, dtype=torch.bool), ("response_mask",)),
                ("loss_mask", torch.ones(2, 3, dtype=torch.bool), ()),  # a forward pass does not use the loss mask
            ]
        ),
        ("tool", BACKGROUND, BACKGROUND, ()),
        ("tool", BACKGROUND, {"background": {"before": [[0, "{}"]], "prompt": ["1+1?"]}}, ("before",)),
        ("tool", BACKGROUND, {"background": {"before": [], "prompt": ["2+2?"]}}, ("prompt",)),
    ],
)
async def test_arguments_that_change_a_result_are_in_the_fingerprint(
    tmp_path: Path,
    role: str,
    before: dict[str, Any],
    after: dict[str, Any],
    differs: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, stage = role_of(tmp_path, role), Stage(role)
    assert differing(fingerprint(made, **before), fingerprint(made, **after)) == differs
    if role == "reward":
        return  # the results of this role depend on the number of trajectories
    with SkipManager.session(recording(tmp_path, role)):
        for changes in (before, after):
            await stage(**changes)
    assert stage.num_calls == (2 if differs else 1)
    assert all(f"it differs in {name}" in caplog.text for name in differs)


@pytest.mark.parametrize(
    ("role", "result"),
    [
        ("reward", [Score(float("nan")), Score(1.0)]),
        ("reward", [Score(1.0, {"part": float("inf")}), Score(1.0)]),
        ("ref_log_prob", LOG_PROBS[:, :2]),
        ("ref_log_prob", LOG_PROBS.double()),
        ("ref_log_prob", LOG_PROBS.bfloat16()),
        ("ref_log_prob", torch.full((2, 3), float("nan"))),
        ("tool", "text"),
        ("tool", ToolOutcome(text=b"")),  # type: ignore[arg-type]
        ("tool", ToolOutcome(reward=float("nan"))),
        ("tool", ToolOutcome(metrics={"hits": float("inf")})),
    ],
)
async def test_results_that_cannot_be_replayed_are_returned_and_not_recorded(
    tmp_path: Path, role: str, result: Any
) -> None:
    with SkipManager.session(recording(tmp_path, role)):
        assert await Stage(role, result)() is result
        assert SkipManager.status() == {role: {"unrecorded": 1}}


INTACT = {"text": "", "reward": 0.0, "metrics": {}, "status": "ok", "done": False}


@pytest.mark.parametrize(
    ("role", "content"),
    [
        ("reward", {"rewards": [1.0], "extras": [{}]}),
        ("reward", {"rewards": [1.0, 0.0], "extras": [{}]}),
        ("reward", {"rewards": [1.0, "0.0"], "extras": [{}, {}]}),
        ("reward", {"rewards": [1.0, 0.0], "extras": [{}, {"rule": None}]}),
        ("reward", {"rewards": [1.0, 0.0], "extras": [{}, []]}),
        ("reward", {"rewards": 1.0, "extras": {}}),
        ("reward", {"rewards": [1.0, 0.0]}),
        ("reward", {"rewards": [1.0, 0.0], "extras": [{}, {}], "turn_rewards": [[]]}),
        ("reward", {"rewards": [1.0, 0.0], "extras": [{}, {}], "turn_rewards": [[], [1.0, 2.0]]}),
        ("reward", {"rewards": [1.0, 0.0], "extras": [{}, {}], "turn_rewards": [[], ["1.0"]]}),
        ("reward", {"rewards": [1.0, 0.0], "extras": [{}, {}], "turn_rewards": [[], 1.0]}),
        ("ref_log_prob", {"shape": [3, 2]}),
        ("ref_log_prob", {"shape": [6]}),
        ("ref_log_prob", {"shape": [2, 4]}),
        ("ref_log_prob", {"shape": None}),
        ("tool", {}),
        ("tool", {"result": "of another time"}),
        ("tool", INTACT | {"more": 1}),
        ("tool", INTACT | {"text": 3}),
        ("tool", INTACT | {"reward": None}),
        ("tool", INTACT | {"metrics": {"hits": "2"}}),
        ("tool", INTACT | {"metrics": []}),
        ("tool", INTACT | {"status": "fine"}),
        ("tool", INTACT | {"done": 0}),
    ],
)
async def test_malformed_records_count_as_absent(tmp_path: Path, role: str, content: dict[str, Any]) -> None:
    stage = Stage(role)
    with SkipManager.session(recording(tmp_path, role)):
        await stage()
        rewrite(SkipManager.get(role), content)
        assert await stage() is RESULTS[role]
        assert stage.num_calls == 2
        await stage()
        assert SkipManager.status() == {role: {"recorded": 2, "damaged": 1, "replayed": 1}}


def test_a_lone_surrogate_in_a_recorded_answer_is_replaced(tmp_path: Path) -> None:
    served: Any = SimpleNamespace(record=SimpleNamespace(content=Content({}, INTACT | {"text": "\ud83d"})))
    assert role_of(tmp_path, "tool").to_result(Call({}, {}), served).text == "?"


@pytest.mark.parametrize("role", ["ref_log_prob", "tool"])
def test_repeat_is_refused_for_roles_that_do_not_support_it(tmp_path: Path, role: str) -> None:
    with pytest.raises(ValidationError, match=rf"skip\.{role}\.action\n  Input should be 'cache'"):
        recording(tmp_path, role, settings={"action": "repeat"})


@pytest.mark.parametrize("role", ["reward", "tool"])
async def test_a_malformed_id_names_the_role(tmp_path: Path, role: str) -> None:
    expected = rf"skip\.{role} takes its step from the sample's id: .*e\.g\. sample_0_42"
    with SkipManager.session(recording(tmp_path, role)), pytest.raises(BugError, match=expected):
        await Stage(role)(sample_id="sample_7")


def test_the_roles_need_no_torch() -> None:
    """The Rollouter does not import torch."""
    program = "import sys, skip.generation, skip.stages; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("role", "reference"), [("reward", "{file}:Own"), ("reward", "own_code_of_a_test:Own"), ("tool", "{file}:Own")]
)
def test_a_change_in_the_source_of_user_code_changes_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, reference: str
) -> None:
    file = tmp_path / "own_code_of_a_test.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    name = reference.format(file=file)
    sections = {"reward": {"function": name}} if role == "reward" else with_tools({"class_name": name})
    found = []
    for source in ("class Own: pass\n", "class Own: a = 1\n"):
        file.write_text(source)
        found.append(fingerprint(role_of(tmp_path, role, **sections)))
    assert differing(*found) == ("source" if role == "reward" else "tools",)
    assert "own_code_of_a_test" not in sys.modules, "the fingerprint reads the file and does not import it"


# ------------------------------------------------------------------------------------------------ reward


async def test_a_recorded_sample_is_not_scored_again(tmp_path: Path) -> None:
    config = recording(tmp_path, "reward", settings={"steps": "1-9"})
    first, second = Stage("reward"), Stage("reward")
    with SkipManager.session(config):
        assert await first() == SCORES
    with SkipManager.session(config):
        again = await second()
        assert again == SCORES and [type(score) for score in again] == [Score, Score]
        assert (first.num_calls, second.num_calls) == (1, 0)
        assert SkipManager.status() == {"reward": {"replayed": 1}}
        for index in (8, 10):
            assert await second(sample_id=SampleId(0, index)) == SCORES
        assert second.num_calls == 2
        assert SkipManager.status() == {"reward": {"replayed": 1, "recorded": 1}}
    directory = records_of(tmp_path, "reward")
    assert {path.name for path in directory.iterdir()} == {"7", "8"}
    manifest = json.loads((directory / "7" / MANIFEST).read_text())
    assert manifest["content"]["rewards"] == [0.2, 0.1]
    assert "turn_rewards" not in manifest["content"]


def test_records_of_single_turns_have_no_fields_of_conversations(tmp_path: Path) -> None:
    """Records from versions without conversations remain valid."""
    found = fingerprint(role_of(tmp_path, "reward"))
    assert sorted(found) == [
        "batch", "code", "data_source", "extra_info", "function", "ground_truth", "kwargs", "messages", "prompt_ids",
        "response_ids", "reward_model", "source", "tokenizer", "weight",
    ]  # fmt: skip
    assert found["response_ids"] == field([np.array([4, 5], dtype=np.int32), np.array([6], dtype=np.int32)])


async def test_rewards_of_turns_are_recorded(tmp_path: Path) -> None:
    stage = Stage("reward", [Score(1.5, {"rule": 1.0}, (0.25, 0.25)), Score(1.0)])
    for _ in range(2):
        with SkipManager.session(recording(tmp_path, "reward")):
            found = await stage(trajectories=[TALK, answer(6)])
            assert found == [Score(1.5, {"rule": 1.0}, (0.25, 0.25)), Score(1.0)]
    assert stage.num_calls == 1
    manifest = json.loads((records_of(tmp_path, "reward") / "7" / MANIFEST).read_text())
    assert manifest["content"]["turn_rewards"] == [[0.25, 0.25], []]


@pytest.mark.parametrize(
    "function", ["exact_match", "no_such_module:score", "no.such:score", "gone.py:score", "sys:exit"]
)
def test_a_function_without_a_file_has_no_source(tmp_path: Path, function: str) -> None:
    assert fingerprint(role_of(tmp_path, "reward", reward={"function": function}))["source"] == ""


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
    stage = Stage("reward")
    with SkipManager.session(recording(tmp_path, "reward")):
        for _ in range(2):
            assert await stage(**prompted(ground_truth=truth, extra_info={"truth": truth})) == SCORES
        assert stage.num_calls == 1


def test_unusual_columns_are_equal_by_value(tmp_path: Path) -> None:
    made = role_of(tmp_path, "reward")

    def truth_field(truth: Any) -> str:
        return fingerprint(made, **prompted(ground_truth=truth))["ground_truth"]

    objects = [np.array([{"a": letter}, [1]], dtype=object) for letter in "xxy"]
    assert truth_field(objects[0]) == truth_field(objects[1]) != truth_field(objects[2])
    long = [np.arange(5000) % modulus for modulus in (4999, 4999, 5000)]
    assert truth_field({(1, 2): long[0]}) == truth_field({(1, 2): long[1]}) != truth_field({(1, 2): long[2]})
    assert truth_field("2") != truth_field(2) and truth_field({"1": 0}) != truth_field({1: 0})
    assert truth_field({"b": {2, 1}, "a": 0}) == truth_field({"a": 0, "b": {1, 2}})


async def test_repeat_serves_the_scores_of_the_same_responses_at_another_step(tmp_path: Path) -> None:
    stage = Stage("reward")
    with SkipManager.session(recording(tmp_path, "reward")):
        await stage()
    with SkipManager.session(recording(tmp_path, "reward", settings={"action": "repeat"})):
        assert await stage(sample_id=SampleId(0, 9)) == SCORES
        assert stage.num_calls == 1
        await stage(sample_id=SampleId(0, 8), trajectories=(answer(1), answer(2, 3)))
        assert stage.num_calls == 2
        assert SkipManager.status() == {"reward": {"substituted": 1, "recorded": 1}}


# ------------------------------------------------------------------------------------------------ ref_log_prob


async def test_log_probs_are_replayed_bit_for_bit_and_are_writable(tmp_path: Path) -> None:
    stage = Stage("ref_log_prob")
    for _ in range(2):
        with SkipManager.session(recording(tmp_path, "ref_log_prob")):
            found = await stage()
            assert found.dtype is torch.float32 and found.shape == LOG_PROBS.shape
            assert found.numpy().tobytes() == LOG_PROBS.numpy().tobytes()
    assert stage.num_calls == 1
    found += 1.0
    assert {path.name for path in records_of(tmp_path, "ref_log_prob").iterdir()} == {"7"}


# ------------------------------------------------------------------------------------------------ tool


class Tools:
    """A tool stage in which each call has another result, so that a test notices when a call runs again."""

    def __init__(self) -> None:
        self.ran: Counter[str] = Counter()
        self._delays = random.Random(0)

    @SkipManager.annotate(role="tool")
    async def call(self, sample_id: SampleId, trajectory: int, turn: int, name: str, arguments: Any) -> ToolOutcome:
        await anyio.sleep(0.02 * self._delays.random())
        call = f"{sample_id} {trajectory} {turn} {name} {json.dumps(arguments)}"
        self.ran[call] += 1
        text = f"{call}: {self.ran[call]} \N{SNOWMAN}"
        return ToolOutcome(text, 1 / 3, {"hits": 2.0}, "refused", True, duration_s=0.5, wait_s=0.25)


async def test_each_call_of_a_sample_has_a_separate_record(tmp_path: Path) -> None:
    """The test makes 64 concurrent calls, 32 for each of two steps."""
    tools, results = Tools(), []
    calls = [
        (SampleId(0, index), trajectory, turn, name, {"query": query})
        for index in (7, 8)
        for trajectory in range(4)
        for turn in range(2)
        for name in ("search", "open")
        for query in ("a", "b")
    ]
    with SkipManager.session(recording(tmp_path, "tool")):
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
        assert results[1][number] == outcome._replace(duration_s=0.0, wait_s=0.0, replayed=True)
    names = [path.name for path in records_of(tmp_path, "tool").iterdir()]
    assert Counter(name.partition("-")[0] for name in names) == {"7": 32, "8": 32}


async def test_arguments_are_compared_in_any_order_and_with_any_values(tmp_path: Path) -> None:
    stage = Stage("tool")
    with SkipManager.session(recording(tmp_path, "tool")):
        assert not (await stage(arguments={"a": 1, "b": None})).replayed
        assert (await stage(arguments={"b": None, "a": 1})).replayed
        assert not (await stage(arguments={"b": None, "a": "1"})).replayed
        await stage(name="\ud800", arguments={"\ud800": "\ud800"})
    assert stage.num_calls == 3


async def test_a_mismatch_of_a_tool_call_names_its_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two calls have the same record name."""
    stage = Stage("tool")
    with SkipManager.session(recording(tmp_path, "tool", settings={"on_mismatch": "error"})):
        monkeypatch.setattr(SkipManager.get("tool"), "call_name", lambda call: "0" * 16)
        await stage(arguments={"query": "a"})
        with pytest.raises(ConfigError, match=r"it differs in arguments \(recorded .*a.*, now .*b.*\), name"):
            await stage(name="open", arguments={"query": "b"})


@pytest.mark.parametrize(
    ("role", "section", "path"),
    [
        ("reward", {"reward": {"kwargs": {"a": "c4n4ry"}}}, ("reward", "kwargs", "a")),
        ("reward", {"reward": {"function": "c4n4ry:f"}}, ("reward", "function")),
        ("reward", judged(prompt="c4n4ry"), ("reward", "judge", "prompt")),
        ("tool", with_tools({"function": "c4n4ry:f"}), ("rollout", "multi_turn", "tools")),
    ],
)
def test_records_have_digests_of_values_from_the_environment(
    role: str, section: Any, path: tuple[str, ...], tmp_path: Path
) -> None:
    config = recording(tmp_path, role, **section)
    plain = fingerprint(role_in(config, role))
    hidden = fingerprint(role_in(config.with_unresolved({path: "${oc.env:CANARY}"}), role))
    assert "c4n4ry" not in str(hidden)
    assert len(differing(plain, hidden)) == 1


def role_in(config: Config, role: str) -> Any:
    with SkipManager.session(config):
        return SkipManager.get(role)
