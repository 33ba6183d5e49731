"""Demonstrations: the tokens of conversations, which of them are trained, and rows that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.config.sections.data import DataConfig, ModelConfig, SftConfig
from asyncrl.core.failures import ConfigError, DataError
from rollouter.prompts.chat_template import encode_text, end_token_ids, load_tokenizer, prompt_text, render
from rollouter.prompts.demonstrations import (
    ConversationTokenizer,
    check_demonstrations,
    conversation,
    load_demonstrations,
)

MODEL = ModelConfig()
TOKENIZER = load_tokenizer(MODEL)
QWEN3 = Path(__file__).parents[1] / "agent" / "templates" / "qwen3.jinja"
CONVERSATION = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+2="},
    {"role": "assistant", "content": "#3"},
    {"role": "user", "content": "3+4="},
    {"role": "assistant", "content": "3+4=7;#7"},
]
texts = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="<"), max_size=8)
turns = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


def tokenized(model: ModelConfig = MODEL, *, last: bool = False) -> ConversationTokenizer:
    tokenizer = load_tokenizer(model)
    return ConversationTokenizer(
        tokenizer, end_ids=end_token_ids(model, tokenizer), template_kwargs={}, last_turn_only=last
    )


CONVERT = tokenized().convert


@given(turns=turns)
def test_the_turns_of_the_assistant_are_trained_up_to_their_end(turns: list[tuple[str, str]]) -> None:
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    (made,) = CONVERT(messages, "a row")
    assert TOKENIZER.decode(made.token_ids) == render(TOKENIZER, messages, add_generation_prompt=False)
    trained = TOKENIZER.decode(made.token_ids[made.mask])
    assert trained == "".join(f"{answer}<eos>" for _, answer in turns)
    first = int(made.mask.argmax())
    prompt = prompt_text(TOKENIZER, messages[:1], "a row")
    assert made.token_ids[:first].tolist() == encode_text(TOKENIZER, prompt)  # as a launch prompts


def test_only_the_last_turn_is_trained_if_asked() -> None:
    (made,) = tokenized(last=True).convert(CONVERSATION, "a row")
    assert TOKENIZER.decode(made.token_ids[made.mask]) == "3+4=7;#7<eos>"
    assert TOKENIZER.decode(made.token_ids) == render(TOKENIZER, CONVERSATION, add_generation_prompt=False)


def test_what_follows_the_end_of_a_turn_is_not_trained(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}{{ '!' if not add_generation_prompt }}"
    )
    made = tokenized(ModelConfig(chat_template=str(template))).convert(CONVERSATION, "a row")
    assert [TOKENIZER.decode(one.token_ids[one.mask]) for one in made] == ["#3<eos>", "3+4=7;#7<eos>"]
    twice = "{% for m in messages %}{{ m.content + eos_token + eos_token }}{% endfor %}"
    template.write_text(twice)
    (both,) = tokenized(ModelConfig(chat_template=str(template))).convert(CONVERSATION, "a row")
    assert TOKENIZER.decode(both.token_ids[both.mask]) == "#3<eos>3+4=7;#7<eos>"


def test_a_template_that_rewrites_history_gives_several_demonstrations() -> None:
    model = ModelConfig(chat_template=str(QWEN3))
    thought = [{**message, "reasoning_content": f"thought {at}"} for at, message in enumerate(CONVERSATION)]
    made = tokenized(model).convert(thought, "a row")
    shown = [TOKENIZER.decode(one.token_ids) for one in made]
    assert [TOKENIZER.decode(one.token_ids[one.mask]) for one in made] == [
        "<think>\nthought 2\n</think>\n\n#3<|im_end|>\n",
        "<think>\nthought 4\n</think>\n\n3+4=7;#7<|im_end|>\n",
    ]
    assert "thought 2" in shown[0] and "thought 2" not in shown[1] and "assistant\n#3<|im_end|>" in shown[1]


def test_a_turn_that_a_launch_would_begin_otherwise_is_refused(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:<think>' }}{% endif %}"
    )
    with pytest.raises(DataError, match=r"row 3: the chat template writes message 2 otherwise .*<think>"):
        tokenized(ModelConfig(chat_template=str(template))).convert(CONVERSATION, "row 3")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "1+2"}, "neither a field 'messages' nor 'prompt' and 'response'; the row has text"),
        ({"prompt": "1+2="}, "neither a field 'messages'"),
        ({"prompt": "1+2=", "response": 3}, "field 'response' is 3; expected a text"),
        ({"messages": []}, "field 'messages' is .*; expected a non-empty list"),
        ({"messages": [{"role": "user"}]}, r"field 'messages\[0\]'.*'role' and 'content'"),
        ({"messages": CONVERSATION[:2]}, "has no message of the assistant"),
        ({"messages": CONVERSATION[2:]}, "begins with a message of the assistant"),
        ({"messages": CONVERSATION, "images": ["a.png"]}, "images or videos"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "half of a surrogate pair"),
    ],
)
def test_a_row_that_shows_no_answer_is_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=f"here: .*{problem}"):
        conversation(row, "here", Config())


def test_rows_are_messages_or_pairs_under_any_name() -> None:
    sft = SftConfig(messages_key="chat", response_key="answer")
    config = Config(sft=sft, data=DataConfig(prompt_key="question"))
    pair = conversation({"question": "1+2=", "answer": "#3"}, "here", config)
    assert pair == ({"role": "user", "content": "1+2="}, {"role": "assistant", "content": "#3"})
    # What follows the last answer is not learned.
    longer = [*CONVERSATION, {"role": "user", "content": "5+6="}]
    assert list(conversation({"chat": longer, "question": "x"}, "here", config)) == CONVERSATION
    asked = conversation({"question": CONVERSATION[:2], "answer": "#3", "chat": None}, "here", config)
    assert list(asked) == CONVERSATION[:3]


def config_of(tmp_path: Path, rows: list[dict[str, Any]], **keys: Any) -> Config:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Config.model_validate(
        {"mode": "sft", "data": {"train_files": [str(file)], "cache_dir": str(tmp_path / "cache")}, **keys}
    )


def test_long_conversations_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": CONVERSATION}, {"prompt": "1+2=", "response": "#3"}]
    config = config_of(tmp_path, rows, sft={"max_length": 12})
    loaded = load_demonstrations(config, TOKENIZER, "train")
    assert loaded is not None and (loaded.num_conversations, loaded.num_left_out) == (2, 1)
    (row,) = loaded.rows
    assert (row.token_ids.dtype, row.mask.dtype) == (np.int32, np.bool_)
    assert TOKENIZER.decode(row.token_ids) == "<bos><user>1+2=<eos><assistant>#3<eos>"
    assert "1 of 2 conversations are longer than sft.max_length = 12" in caplog.text
    assert load_demonstrations(config, TOKENIZER, "val") is None
    short = config_of(tmp_path, rows, sft={"max_length": 5})
    with pytest.raises(ConfigError, match=r"data\.train_files: no row is left of 2"):
        load_demonstrations(short, TOKENIZER, "train")


def test_a_wrong_row_is_found_before_anything_starts(tmp_path: Path) -> None:
    config = config_of(tmp_path, [{"prompt": "1+2=", "response": "#3"}, {"prompt": "3+4="}])
    (problem,) = check_demonstrations(config, limit_s=5.0)
    assert problem.key == "data.train_files" and "rows.jsonl, line 2: there is neither" in problem.consequence
    assert problem.fix.startswith("set sft.messages_key")
    with pytest.raises(ConfigError, match=r"data\.train_files: .*line 2"):
        load_demonstrations(config, TOKENIZER, "train")
    assert list(check_demonstrations(config, limit_s=-1.0)) == []
    one_row = config.model_copy(update={"data": config.data.model_copy(update={"max_train_samples": 1})})
    assert list(check_demonstrations(one_row, limit_s=5.0)) == [], "the run does not use the second row"
    (tmp_path / "rows.jsonl").write_text("")
    (problem,) = check_demonstrations(config, limit_s=5.0)
    assert "the file is empty" in problem.consequence


@pytest.mark.parametrize(
    ("code", "consequence"),
    [
        ("def rows(split):\n    return [{'prompt': '1+2=', 'response': '#3'}]\n", ""),
        ("def rows(split):\n    return [{'prompt': '1+2='}]\n", "mine.py:rows train, row 0: there is neither a field"),
        ("def rows(split):\n    return missing\n", "mine.py:2: NameError: name 'missing' is not defined"),
        ("def rows():\n    return []\n", "mine.py:1: it is called with (split, **dataset_kwargs)"),
    ],
)
def test_a_data_set_of_the_users_is_called_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, consequence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(code)
    own = {"train_files": [], "val_files": [], "dataset": "mine.py:rows"}
    problems = list(check_demonstrations(Config.model_validate({"mode": "sft", "data": own}), limit_s=5.0))
    assert [one.key for one in problems] == ["data.dataset"] * bool(consequence)
    assert all(consequence in one.consequence for one in problems), problems
