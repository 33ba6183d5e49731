"""Generated samples as records, and what makes two of them the same."""

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
from asyncrl.config.schema import Config
from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import BugError
from asyncrl.core.trajectory import TokenRow, ToolCall, Trajectory, TurnInfo, single_turn
from asyncrl.core.types import FinishReason, Media, Prompt, SampleId, Span, Turn
from rollouter.agent.conversation import ConversationTokens
from skip import Call, SkipManager
from skip.fingerprint import differing, model_identity, tokenizer_identity
from skip.generation import Generated, SampleRequest, from_content, step_of_sample, to_content, versions

ids = st.integers(0, 2**31 - 1)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    tokens = draw(st.lists(ids, max_size=8))
    firsts = sorted(draw(st.sets(st.integers(1, 7), max_size=2))) if tokens else []
    spans = tuple(Span(first, draw(st.integers(0, 9))) for first in ([0, *firsts] if tokens else []))
    log_probs = np.array([-0.5 * token for token in range(len(tokens))], dtype=np.float32)
    return Turn(np.array(tokens, dtype=np.int32), log_probs, spans, draw(st.sampled_from(FinishReason)))


# As tools give them: a mapping of any kind.
metrics = st.sampled_from([MappingProxyType({}), MappingProxyType({"found": 2.0}), {"found": 1.0}])
calls = st.builds(
    ToolCall, st.text(max_size=3), st.text(max_size=3), st.text(max_size=3), duration_s=st.floats(0, 9), metrics=metrics
)


@st.composite
def conversations(draw: st.DrawFn, prompt: Prompt) -> Trajectory:
    """Of one turn, or of several in one or more rows."""
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
def generated(draw: st.DrawFn) -> Generated:
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


@given(st.lists(generated(), max_size=4))
def test_samples_come_back(samples: list[Generated]) -> None:
    back = from_content(to_content(samples))
    assert len(back) == len(samples) and all(map(same, back, samples))


@given(st.lists(generated(), min_size=1, max_size=2), st.data())
def test_descriptions_that_do_not_fit_the_tokens_are_refused(samples: list[Generated], data: st.DataObject) -> None:
    content = to_content(samples)
    made = [one for sample in content.data["samples"] for one in sample["trajectories"]]
    rows = [row for one in made for row in one["rows"]]
    what = data.draw(st.sampled_from([*rows, *content.data["samples"]]))
    key = "response_tokens" if "response_tokens" in what else "prompt_tokens"
    what[key] += data.draw(st.sampled_from([-1, 1, -100, 100]))
    with pytest.raises(ValueError, match=r"tokens|outside of its row"):
        from_content(content)


def make_asked(**changes: Any) -> SampleRequest:
    prompt = Prompt(np.array([1, 2, 3], dtype=np.int32))
    fields: dict[str, Any] = {"prompt": prompt, "sampling": {"temperature": 1.0, "max_tokens": 8}, "n": 4}
    return SampleRequest(**{"sample_id": SampleId(0, 7), **fields, **changes})


def skip_of(tmp_path: Path, role: str = "async_rollout", **sections: Any) -> Any:
    settings = {"enable": True, "dump_dir": str(tmp_path), "steps": "all"}
    SkipManager.init(Config.model_validate({"skip": {role: settings}, **sections}))
    made = SkipManager.get(role)
    SkipManager.reset()
    return made


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
def test_what_changes_the_answer_changes_the_fingerprint(
    tmp_path: Path, changes: dict[str, Any], differs: tuple[str, ...]
) -> None:
    made = skip_of(tmp_path)
    one, other = (made.fingerprint(Call({"request": asked}, {})) for asked in (make_asked(), make_asked(**changes)))
    assert differing(one, other) == differs
    batches = [Call({"batch": [make_asked(), asked]}, {}) for asked in (make_asked(), make_asked(**changes))]
    batch = skip_of(tmp_path, "rollout")
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
    call = Call({"request": make_asked()}, {})
    one, other = skip_of(tmp_path), skip_of(tmp_path, rollout={"dtype": "bfloat16"}, model={"path": str(copy)})
    assert set(differing(one.fingerprint(call), other.fingerprint(call))) == {"model", "dtype"}


@pytest.mark.parametrize("bad", ["7", "sample_7", "sample_0_0", "sample_0_1_2", None])
def test_a_malformed_id_shows_the_expected_form(bad: Any) -> None:
    with pytest.raises(BugError, match=r"skip\.reward takes its step"):
        step_of_sample(bad, "reward")
    if isinstance(bad, str):
        with pytest.raises(BugError, match=r"expected sample_\{epoch\}_\{index\}, e\.g\. sample_0_42"):
            step_of_sample(bad, "tool")
    assert step_of_sample("sample_3_42", "tool") == step_of_sample(SampleId(3, 42), "tool") == 42


@given(st.lists(generated(), max_size=3))
def test_versions_are_those_of_all_tokens(samples: list[Generated]) -> None:
    found = {v for sample in samples for one in sample.trajectories for v in one.versions}
    assert versions(samples) == ((min(found), max(found)) if found else None)


async def test_one_sample_is_generated_once(tmp_path: Path) -> None:
    settings = {"enable": True, "dump_dir": str(tmp_path), "steps": "1-10"}
    turn = Turn(np.array([5], dtype=np.int32), np.array([-1], dtype=np.float32), (Span(0, 2),), FinishReason.STOP)
    ran: list[SampleId] = []

    @SkipManager.annotate(role="async_rollout")
    async def generate(request: SampleRequest) -> Generated:
        ran.append(request.sample_id)
        return Generated(request.prompt, (single_turn(request.prompt, turn),) * request.n, 1.5)

    config = {"skip": {"async_rollout": settings}}
    with SkipManager.session(Config.model_validate(config)):
        first, second = await generate(make_asked()), await generate(make_asked())
        assert (first.replayed_from, second.replayed_from, second.substituted) == (None, 7, False)
        assert same(first, second) and len(ran) == 1
        await generate(make_asked(sample_id=SampleId(0, 11)))
        await generate(make_asked(sample_id=SampleId(0, 11)))
        assert len(ran) == 3, "step 11 is none of those"
    settings["action"] = "repeat"
    with SkipManager.session(Config.model_validate(config)):
        other = await generate(make_asked(sample_id=SampleId(1, 9), prompt=Prompt(np.array([9], dtype=np.int32))))
        assert len(ran) == 3 and (other.replayed_from, other.substituted) == (7, True)
        assert other.prompt.prompt_ids.tolist() == [1, 2, 3], "the prompt that these turns answer"


# ------------------------------------------------------------------------------------------------ what does not fit


def generated(n: int = 4, *, baseline: bool = False, tokens: int = 3, **columns: Any) -> Generated:
    prompt = Prompt(np.array([7, 8], dtype=np.int32), **columns)
    ids = np.arange(tokens, dtype=np.int32)
    one = Turn(ids, np.zeros(tokens, np.float32), (Span(0, 0),), FinishReason.STOP)
    return Generated(prompt, (single_turn(prompt, one),) * (n + baseline), has_baseline=baseline)


@pytest.mark.parametrize(
    ("recorded", "changes", "fits"),
    [
        (generated(4), {}, True),
        (generated(3), {}, False),
        (generated(5), {}, False),
        (generated(3, baseline=True), {}, False),  # as many turns, and one of them greedy
        (generated(4, baseline=True), {"baseline": {"temperature": 0.0}}, True),
        (generated(5), {"baseline": {"temperature": 0.0}}, False),
        (generated(4, tokens=9), {}, False),  # of at most 8
        (generated(4, extra_info={"when": b"x"}), {}, False),  # its own prompt cannot be told
    ],
)
async def test_repeat_serves_only_what_answers_the_question(
    tmp_path: Path, recorded: Generated, changes: dict[str, Any], fits: bool
) -> None:
    settings = {"enable": True, "dump_dir": str(tmp_path), "steps": "all", "action": "repeat"}
    ran = []

    @SkipManager.annotate(role="async_rollout")
    async def generate(request: SampleRequest) -> Generated:
        ran.append(request.sample_id.index)
        return recorded if request.sample_id.index == 1 else generated(4, baseline=request.baseline is not None)

    with SkipManager.session(Config.model_validate({"skip": {"async_rollout": settings}})):
        await generate(make_asked(sample_id=SampleId(0, 1)))
        served = await generate(make_asked(**changes))
        assert ran == ([1] if fits else [1, 7])
        assert served.substituted is fits
        assert SkipManager.status()["async_rollout"].get("damaged", 0) == 0


@pytest.mark.parametrize("odd", [float("nan"), b"1", np.arange(3), {1: "a"}, ("a", "b"), np.float32(2)])
async def test_columns_that_are_no_json_are_recorded_without_them(tmp_path: Path, odd: Any) -> None:
    """A data set's columns hold what they like; `cache` takes those of the prompt that is asked for."""
    settings = {"enable": True, "dump_dir": str(tmp_path), "steps": "all"}
    prompt = Prompt(np.array([1, 2, 3], dtype=np.int32), ground_truth=odd, extra_info={"odd": odd})
    ran = []

    @SkipManager.annotate(role="async_rollout")
    async def generate(request: SampleRequest) -> Generated:
        ran.append(request.sample_id.index)
        return replace(generated(4), prompt=request.prompt)

    with SkipManager.session(Config.model_validate({"skip": {"async_rollout": settings}})):
        for _ in range(2):
            one = await generate(make_asked(prompt=prompt))
            assert one.prompt.ground_truth is odd
    assert ran == [7]
