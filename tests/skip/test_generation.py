"""Tests of records of generated samples, and of the fingerprint of a request."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.assets import resolve
from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import BugError
from asyncrl.core.trajectory import Generated, SampleRequest, TokenRow, ToolCall, Trajectory, TurnInfo, single_turn
from asyncrl.core.types import FinishReason, Media, Prompt, SampleId, Span, Turn
from rollouter.agent.conversation import ConversationTokens
from skip import Call, SkipManager
from skip.fingerprint import differing, model_identity, tokenizer_identity
from skip.generation import from_content, step_of_sample, to_content, versions
from tests.fakes.skip_roles import recording, role_of

ids = st.integers(0, 2**31 - 1)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    tokens = draw(st.lists(ids, max_size=8))
    firsts = sorted(draw(st.sets(st.integers(1, 7), max_size=2))) if tokens else []
    spans = tuple(Span(first, draw(st.integers(0, 9))) for first in ([0, *firsts] if tokens else []))
    log_probs = np.array([-0.5 * token for token in range(len(tokens))], dtype=np.float32)
    return Turn(np.array(tokens, dtype=np.int32), log_probs, spans, draw(st.sampled_from(FinishReason)))


# Tools may return any kind of mapping.
metrics = st.sampled_from([MappingProxyType({}), MappingProxyType({"found": 2.0}), {"found": 1.0}])
calls = st.builds(
    ToolCall, st.text(max_size=3), st.text(max_size=3), st.text(max_size=3), duration_s=st.floats(0, 9), metrics=metrics
)


@st.composite
def conversations(draw: st.DrawFn, prompt: Prompt) -> Trajectory:
    """Draw a conversation of one turn, or of several in one or more rows."""
    if draw(st.booleans()):
        return single_turn(prompt, draw(turns()))
    tokens = ConversationTokens(draw(st.sampled_from([prompt.prompt_ids, np.array([9], dtype=np.int32)])))
    infos = []
    for number in range(draw(st.integers(1, 3))):
        if number:
            more = draw(st.lists(ids, min_size=1, max_size=3))
            (tokens.fork if draw(st.booleans()) else tokens.add_unsampled)(more)
        turn = draw(turns().filter(lambda turn: len(turn.response_ids) > 0))
        row, first = tokens.add_turn(turn)
        made = tuple(draw(st.lists(calls, max_size=2)))
        infos.append(TurnInfo(row, first, len(turn.response_ids), turn.finish_reason, 0.5, made, draw(st.floats(0, 1))))
    messages = ({"role": "assistant", "content": draw(st.text(max_size=3))},)
    scores = draw(st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=2))
    return Trajectory(tokens.rows(), tuple(infos), draw(st.sampled_from(FinishReason)), messages, scores, {"m": 1.0})


@st.composite
def drawn_samples(draw: st.DrawFn) -> Generated:
    prompt = Prompt(
        np.array(draw(st.lists(ids, max_size=5)), dtype=np.int32),
        ({"role": "user", "content": draw(st.text(max_size=5))},),
        draw(st.text(max_size=3)),
        draw(st.sampled_from([None, "7", {"answer": [1, 2]}])),
        {"index": draw(st.integers(0, 5))},
        draw(
            st.lists(st.builds(Media, st.sampled_from(["image", "video"]), st.binary(max_size=3)), max_size=2).map(
                tuple
            )
        ),
    )
    return Generated(prompt, tuple(draw(st.lists(conversations(prompt), max_size=3))), draw(st.floats(0, 10)))


def same_row(one: TokenRow, other: TokenRow) -> bool:
    arrays = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs")
    mine, theirs = ([getattr(row, name) for name in arrays] for row in (one, other))
    return one.spans == other.spans and all(
        (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()) for a, b in zip(mine, theirs, strict=True)
    )


def same_trajectory(one: Trajectory, other: Trajectory) -> bool:
    fields = ("turns", "finish_reason", "messages", "scores", "metrics")
    return (
        all(getattr(one, name) == getattr(other, name) for name in fields)
        and len(one.rows) == len(other.rows)
        and all(map(same_row, one.rows, other.rows))
    )


def same(one: Generated, other: Generated) -> bool:
    prompt, another = one.prompt, other.prompt
    return (
        prompt.prompt_ids.tolist() == another.prompt_ids.tolist()
        and all(
            getattr(prompt, name) == getattr(another, name)
            for name in ("messages", "data_source", "ground_truth", "extra_info", "media")
        )
        and len(one.trajectories) == len(other.trajectories)
        and all(map(same_trajectory, one.trajectories, other.trajectories))
        and one.generate_s == other.generate_s
    )


@given(st.lists(drawn_samples(), max_size=4))
def test_recorded_samples_are_read_back_unchanged(samples: list[Generated]) -> None:
    back = from_content(to_content(samples))
    assert len(back) == len(samples) and all(map(same, back, samples))


def test_lone_surrogates_in_a_record_are_replaced() -> None:
    prompt = Prompt(np.array([1], dtype=np.int32))
    row = TokenRow(*(np.zeros(1, dtype) for dtype in (np.int32, np.int32, np.bool_, np.float32)), (Span(0, 1),))
    turn = TurnInfo(0, 0, 1, FinishReason.STOP)
    messages = ({"role": "assistant", "content": "\ud83d"},)
    content = to_content([Generated(prompt, (Trajectory((row,), (turn,), FinishReason.STOP, messages),))])
    (back,) = from_content(content)
    assert back.trajectories[0].messages == ({"role": "assistant", "content": "?"},)


@given(st.lists(drawn_samples(), min_size=1, max_size=2), st.data())
def test_descriptions_that_do_not_fit_the_tokens_are_refused(samples: list[Generated], data: st.DataObject) -> None:
    content = to_content(samples)
    made = [one for sample in content.data["samples"] for one in sample["trajectories"]]
    rows = [row for one in made for row in one["rows"]]
    what = data.draw(st.sampled_from([*rows, *content.data["samples"]]))
    key = "response_tokens" if "response_tokens" in what else "prompt_tokens"
    what[key] += data.draw(st.sampled_from([-1, 1, -100, 100]))
    with pytest.raises(ValueError, match=r"tokens|outside of its row"):
        from_content(content)


def make_request(**changes: Any) -> SampleRequest:
    prompt = Prompt(np.array([1, 2, 3], dtype=np.int32))
    fields: dict[str, Any] = {"prompt": prompt, "sampling": {"temperature": 1.0, "max_tokens": 8}, "n": 4}
    return SampleRequest(**{"sample_id": SampleId(0, 7), **fields, **changes})


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"sample_id": SampleId(3, 7)}, ()),
        ({"prompt": Prompt(np.array([1, 2], dtype=np.int32))}, ("prompt_ids",)),
        ({"sampling": {"max_tokens": 8, "temperature": 1.0}}, ()),
        ({"sampling": {"temperature": 0.9, "max_tokens": 8}}, ("sampling.temperature",)),
        ({"n": 5}, ("n",)),
        ({"baseline": {"temperature": 0.0}}, ("baseline",)),
        ({"agent": {"tools": [{"name": "search"}]}}, ("agent.tools",)),
        ({"extra": 2}, ("extra",)),
        ({"prompt": Prompt(np.array([1, 2, 3], dtype=np.int32), media=(Media("image", b"a"),))}, ("media",)),
    ],
)
def test_arguments_that_change_the_response_are_in_the_fingerprint(
    tmp_path: Path, changes: dict[str, Any], differs: tuple[str, ...]
) -> None:
    made = role_of(tmp_path, "async_rollout")
    one, other = (made.fingerprint(Call({"request": asked}, {})) for asked in (make_request(), make_request(**changes)))
    assert differing(one, other) == differs
    batches = [Call({"batch": [make_request(), asked]}, {}) for asked in (make_request(), make_request(**changes))]
    batch = role_of(tmp_path, "rollout")
    assert differing(*map(batch.fingerprint, batches)) == differs


def test_another_model_tokenizer_or_dtype_is_another_fingerprint(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(resolve("asyncrl://quickstart"), copy)
    here = ModelConfig()
    assert model_identity(ModelConfig(path=str(copy))) == model_identity(here)
    assert tokenizer_identity(ModelConfig(path=str(copy))) == tokenizer_identity(here)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    assert tokenizer_identity(ModelConfig(chat_template=str(template))) != tokenizer_identity(here)
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert model_identity(ModelConfig(path=str(copy))) != model_identity(here)
    assert model_identity(ModelConfig(path="some/hub-name")) == "some/hub-name"
    call = Call({"request": make_request()}, {})
    one, other = (
        role_of(tmp_path, "async_rollout"),
        role_of(tmp_path, "async_rollout", rollout={"dtype": "bfloat16"}, model={"path": str(copy)}),
    )
    assert set(differing(one.fingerprint(call), other.fingerprint(call))) == {"model", "dtype"}


@pytest.mark.parametrize("bad", ["7", "sample_7", "sample_0_0", "sample_0_1_2", None])
def test_a_malformed_id_shows_the_expected_form(bad: Any) -> None:
    with pytest.raises(BugError, match=r"skip\.reward takes its step"):
        step_of_sample(bad, "skip.reward")
    if isinstance(bad, str):
        with pytest.raises(BugError, match=r"expected sample_\{epoch\}_\{index\}, e\.g\. sample_0_42"):
            step_of_sample(bad, "skip.tool")
    assert step_of_sample("sample_3_42", "tool") == step_of_sample(SampleId(3, 42), "tool") == 42


@given(st.lists(drawn_samples(), max_size=3))
def test_versions_of_samples_cover_all_tokens(samples: list[Generated]) -> None:
    found = {v for sample in samples for one in sample.trajectories for v in one.versions}
    assert versions(samples) == ((min(found), max(found)) if found else None)


class GenerationStage:
    """A stage that returns `results` by feed index and keeps the indices for which it ran."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.results: dict[int, Generated] = {}

    @SkipManager.annotate(role="async_rollout")
    async def generate(self, request: SampleRequest) -> Generated:
        self.ran.append(request.sample_id.index)
        made = generated(request.n, baseline=request.baseline is not None)
        return self.results.get(request.sample_id.index, replace(made, prompt=request.prompt))


def generated(n: int = 4, *, baseline: bool = False, tokens: int = 3, **columns: Any) -> Generated:
    prompt = Prompt(np.array([7, 8], dtype=np.int32), **columns)
    ids = np.arange(tokens, dtype=np.int32)
    one = Turn(ids, np.zeros(tokens, np.float32), (Span(0, 0),), FinishReason.STOP)
    return Generated(prompt, (single_turn(prompt, one),) * (n + baseline), has_baseline=baseline)


async def test_one_sample_is_generated_once(tmp_path: Path) -> None:
    stage = GenerationStage()
    with SkipManager.session(recording(tmp_path, "async_rollout", settings={"steps": "1-10"})):
        first, second = await stage.generate(make_request()), await stage.generate(make_request())
        assert (first.replayed_from, second.replayed_from, second.substituted) == (None, 7, False)
        assert all(map(same_trajectory, first.trajectories, second.trajectories)) and stage.ran == [7]
        for _ in range(2):
            await stage.generate(make_request(sample_id=SampleId(0, 11)))
        assert stage.ran == [7, 11, 11], "step 11 is not among the configured steps"
    with SkipManager.session(recording(tmp_path, "async_rollout", settings={"action": "repeat"})):
        request = make_request(sample_id=SampleId(1, 9), prompt=Prompt(np.array([9], dtype=np.int32)))
        other = await stage.generate(request)
        assert len(stage.ran) == 3 and (other.replayed_from, other.substituted) == (7, True)
        assert other.prompt.prompt_ids.tolist() == [1, 2, 3], "a substitute keeps the prompt of its turns"


@pytest.mark.parametrize(
    ("recorded", "changes", "fits"),
    [
        (generated(4), {}, True),
        (generated(3), {}, False),
        (generated(5), {}, False),
        (generated(3, baseline=True), {}, False),  # the number of trajectories fits, but one of them is greedy
        (generated(4, baseline=True), {"baseline": {"temperature": 0.0}}, True),
        (generated(5), {"baseline": {"temperature": 0.0}}, False),
        (generated(4, tokens=9), {}, False),  # the request allows only 8 tokens
        (generated(4, extra_info={"when": b"x"}), {}, False),  # JSON cannot represent the prompt of the record
    ],
)
async def test_repeat_serves_only_records_that_fit_the_request(
    tmp_path: Path, recorded: Generated, changes: dict[str, Any], fits: bool
) -> None:
    stage = GenerationStage()
    stage.results[1] = recorded
    with SkipManager.session(recording(tmp_path, "async_rollout", settings={"action": "repeat"})):
        await stage.generate(make_request(sample_id=SampleId(0, 1)))
        served = await stage.generate(make_request(**changes))
        assert stage.ran == ([1] if fits else [1, 7])
        assert served.substituted is fits
        assert SkipManager.status()["async_rollout"].get("damaged", 0) == 0


@pytest.mark.parametrize("odd", [float("nan"), b"1", np.arange(3), {1: "a"}, ("a", "b"), np.float32(2)])
async def test_samples_are_recorded_without_columns_that_are_not_json(tmp_path: Path, odd: Any) -> None:
    """With `cache`, a replayed sample has the columns of the requested prompt."""
    stage = GenerationStage()
    prompt = Prompt(np.array([1, 2, 3], dtype=np.int32), ground_truth=odd, extra_info={"odd": odd})
    with SkipManager.session(recording(tmp_path, "async_rollout")):
        for _ in range(2):
            one = await stage.generate(make_request(prompt=prompt))
            assert one.prompt.ground_truth is odd
    assert stage.ran == [7]
