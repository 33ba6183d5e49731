"""Prompts through the configured chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.assets import resolve
from asyncrl.config.schema import Config
from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import DataError
from asyncrl.core.types import SampleId
from rollouter.agent.chat import ChatTokenizer
from rollouter.agent.loop import BuiltInAgent
from rollouter.agent.parsing import NO_TOOLS, ToolCallParser
from rollouter.prompts.chat_template import _tokenizer_class, end_token_ids, load_tokenizer, prompt_text, render
from rollouter.prompts.source import load_prompts

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name + '\n' }}{% endfor %}{{ messages[0].content }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ ' (briefly)' }}{% endif %}"
    "{% if messages[0].content == 'no' %}{{ raise_exception('nothing of that kind') }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return ModelConfig(chat_template=str(path), chat_template_kwargs={"enable_thinking": False})


def test_the_template_gets_its_arguments_and_the_tools(model: ModelConfig, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+2"}]}), encoding="utf-8")
    config = Config()
    data = config.data.model_copy(update={"train_files": (str(rows),), "val_files": (), "max_prompt_length": 64})
    config = config.model_copy(update={"model": model, "data": data})
    tokenizer = load_tokenizer(model)
    loaded = load_prompts(config, tokenizer, tmp_path, tools=[TOOL])
    ids = loaded.train.at(SampleId(0, 1)).prompt_ids.tolist()
    assert ids == tokenizer("add\n1+2 (briefly)", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", ["quickstart", "calculator"])
def test_a_tokenizer_that_is_loaded_without_torch_is_that_of_auto_tokenizer(name: str) -> None:
    from transformers import AutoTokenizer

    loaded, expected = (
        load_tokenizer(ModelConfig(path=f"asyncrl://{name}")),
        AutoTokenizer.from_pretrained(resolve(f"asyncrl://{name}")),
    )
    assert type(loaded) is type(expected)
    assert loaded.init_kwargs == expected.init_kwargs and loaded.get_vocab() == expected.get_vocab()
    assert loaded.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert loaded.chat_template == expected.chat_template


@pytest.mark.parametrize(
    ("model", "tokenizer"),
    [
        ({"model_type": "qwen2"}, {"tokenizer_class": "TokenizersBackend"}),
        ({"model_type": "llama"}, {"tokenizer_class": "LlamaTokenizer"}),
        ({"model_type": "llama"}, {"tokenizer_class": "TokenizersBackend", "auto_map": {"AutoTokenizer": "a.B"}}),
        ([], {}),
    ],
)
def test_auto_tokenizer_chooses_the_class_of_other_tokenizers(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "config.json").write_text(json.dumps(model), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert _tokenizer_class(tmp_path) is AutoTokenizer
    assert _tokenizer_class(tmp_path / "missing") is AutoTokenizer


def test_a_row_chooses_its_tools(model: ModelConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "rows.jsonl"
    infos: list[dict[str, Any]] = [
        {"tools_kwargs": {"mul": {"create_kwargs": {"digits": 3}}, "add": None}},
        {"tools_kwargs": {"of_another_run": {}}},
        {"need_tools_kwargs": True},
    ]
    rows = [{"prompt": [{"role": "user", "content": "1+2"}], "extra_info": info} for info in infos]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = Config.model_validate(
        {"model": model.model_dump(), "data": {"train_files": [str(file)], "shuffle": False, "max_prompt_length": 64}}
    )
    tokenizer, mul = load_tokenizer(model), {"type": "function", "function": {"name": "mul"}}
    prompts = load_prompts(config, tokenizer, tmp_path, tools=[TOOL, mul]).train
    rendered = [tokenizer.decode(prompts.at(SampleId(0, number)).prompt_ids) for number in (1, 2, 3)]
    assert rendered == ["mul\n1+2 (briefly)", "add\nmul\n1+2 (briefly)", "add\nmul\n1+2 (briefly)"]
    assert "1 rows, the first one" in caplog.text
    assert "rows.jsonl, line 3, set extra_info.need_tools_kwargs and have no extra_info.tools_kwargs" in caplog.text

    agent = BuiltInAgent(
        config,
        chat=ChatTokenizer(tokenizer, tools=[TOOL, mul], template_kwargs=model.chat_template_kwargs),
        parser=ToolCallParser(NO_TOOLS, tokenizer),
        schemas=[TOOL, mul],
        tools=None,
        interactions=None,
    )
    for number in (1, 2, 3):
        prompt = prompts.at(SampleId(0, number))
        assert agent.chat_of(prompt).prompt(prompt.messages) == prompt.prompt_ids.tolist()


def test_a_refusal_names_the_row_and_quotes_the_template(model: ModelConfig) -> None:
    tokenizer = load_tokenizer(model)
    with pytest.raises(DataError, match=r"rows\[3\]: the chat template refuses field 'prompt': nothing of"):
        prompt_text(tokenizer, [{"role": "user", "content": "no"}], "rows[3]")
    with pytest.raises(DataError, match="refuses the messages: nothing of that kind"):
        render(tokenizer, [{"role": "user", "content": "no"}], add_generation_prompt=True)


def test_end_tokens_are_those_at_which_the_engine_stops(model: ModelConfig, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    eos = tokenizer.eos_token_id
    assert end_token_ids(model, tokenizer) == (eos,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, eos]}), encoding="utf-8")
    elsewhere = model.model_copy(update={"path": str(tmp_path)})
    assert end_token_ids(elsewhere, tokenizer) == (eos, 7)
    assert end_token_ids(model.model_copy(update={"path": str(tmp_path / "nothing")}), tokenizer) == (eos,)
