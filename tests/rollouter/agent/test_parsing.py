"""Parsing turns of models with vLLM's parsers."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import ConfigError
from rollouter.agent.parsing import (
    NO_TOOLS,
    ParsedCall,
    ParsedTurn,
    ToolCallParser,
    assistant_message,
    call_arguments,
    call_id,
    check_format,
    known_formats,
    resolve_format,
    tool_message,
)
from tests.fakes.hostile import BROKEN_JSON, LONE, dumps, texts, values
from tests.fakes.tools import schema_of

NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
TOOLS = [schema_of("add", {"type": "object", "properties": NUMBERS, "required": ["a"]})]
SPECIAL = ["<|im_end|>", "<|im_start|>", "<|eom|>", "<|python_tag|>", "[TOOL_CALLS]"]
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")


@cache
def parser(name: str) -> ToolCallParser:
    eom = tokenizer().convert_tokens_to_ids("<|eom|>")
    return ToolCallParser(name, tokenizer(), TOOLS, end_ids=[eom])


def parse(name: str, text: str) -> ParsedTurn:
    return parser(name).parse(tokenizer()(text, add_special_tokens=False)["input_ids"])


def called(parsed: ParsedTurn) -> list[tuple[str, Any]]:
    return [(call.name, call_arguments(call)) for call in parsed.calls]


ONE = [("add", {"a": 1, "b": 2})]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "pythonic": "[add(a=1, b=2)]",
    "qwen3_xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("end", ["<|im_end|>", "<|eom|>", ""])
def test_a_call_in_each_format(name: str, end: str) -> None:
    parsed = parse(name, WRITTEN[name] + end)
    assert (called(parsed), parsed.content, parsed.malformed) == (ONE, "", False)
    assert parsed.text == WRITTEN[name]


@pytest.mark.parametrize("name", WRITTEN)
def test_text_without_a_call_is_content(name: str) -> None:
    for text in ("It is 3: \\frac{6}{2} [1], é…", 'In JSON: {"a": 3}', ""):
        assert parse(name, text + "<|im_end|>") == ParsedTurn(text, text=text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1\n</tool_call>'),
        ("hermes", '<tool_call>{"function": "add"}</tool_call>'),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n<tool_call>\nnonsense\n</tool_call>'),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1'),
        ("llama3_json", '<|python_tag|>{"name": "add"}'),
        ("pythonic", "[add(a=1, b="),
        ("qwen3_xml", "<tool_call>\nadd 1 and 2\n</tool_call>"),
    ],
)
def test_broken_calls_are_malformed(name: str, text: str) -> None:
    assert parse(name, text + "<|im_end|>") == ParsedTurn(text, malformed=True, text=text)


def test_text_before_calls_is_content_and_repeated_calls_are_kept() -> None:
    parsed = parse("hermes", f"I add.\n{WRITTEN['hermes']}\n{WRITTEN['hermes']}<|im_end|>")
    assert (parsed.content, called(parsed)) == ("I add.", ONE * 2)


def test_parsing_a_turn_does_not_change_later_ones() -> None:
    """vLLM's parsers keep state between calls."""
    for _ in range(2):
        for name in WRITTEN:
            assert parse(name, "It is 3.").calls == ()
            assert called(parse(name, WRITTEN[name])) == ONE


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nwell\n</think>\n\n3", "\nwell\n", "\n\n3"),
        ("well\n</think>\n\n3", "well\n", "\n\n3"),  # the prompt ends with the opening tag
        ("<think>well, <tool_call>", "well, <tool_call>", ""),  # the turn was cut within its reasoning
        ("3 <think>late</think>", "", "3 <think>late</think>"),
    ],
)
def test_reasoning_is_separated_from_content(text: str, reasoning: str, content: str) -> None:
    for name in ("hermes", NO_TOOLS):
        assert parse(name, text) == ParsedTurn(content, reasoning=reasoning, text=text)


def test_calls_inside_reasoning_are_ignored() -> None:
    parsed = parse("hermes", f"<think>Shall I {WRITTEN['hermes']}?</think>{WRITTEN['hermes']}")
    assert called(parsed) == ONE


def test_without_tools_no_calls_are_parsed() -> None:
    assert parse(NO_TOOLS, WRITTEN["hermes"] + "<|im_end|>").content == WRITTEN["hermes"]


def test_a_parser_exception_is_a_malformed_call_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = ToolCallParser("hermes", tokenizer(), TOOLS)

    def fail(text: str) -> Any:
        raise RecursionError(text)

    monkeypatch.setattr(made._vllm, "extract", fail)
    ids = tokenizer()("x", add_special_tokens=False)["input_ids"]
    with caplog.at_level(logging.WARNING):
        assert [made.parse(ids), made.parse(ids)] == [ParsedTurn("x", malformed=True, text="x")] * 2
    assert sum("RecursionError" in record.getMessage() for record in caplog.records) == 1


def test_lone_surrogates_in_calls_are_replaced() -> None:
    parsed = parse("hermes", '<tool_call>\n{"name": "\\ud83d", "arguments": {"\\ud83d": "\\ud83d"}}\n</tool_call>')
    assert parsed.calls == (ParsedCall("?", '{"?": "?"}'),)
    assert call_arguments(ParsedCall("add", '{"a": "\\ud83d"}')) == {"a": "?"}


@pytest.mark.parametrize("arguments", BROKEN_JSON)
def test_a_call_with_broken_json_stays_text(arguments: str) -> None:
    call = ParsedCall("add", arguments)
    assert call_arguments(call) is None
    message = assistant_message(ParsedTurn("", (call,), text="x"))
    assert "tool_calls" not in message and arguments in message["content"]


@pytest.mark.parametrize("name", WRITTEN)
@settings(max_examples=20)
@given(function=texts(), arguments=values(), before=texts())
def test_turns_with_any_text_are_parsed(name: str, function: str, arguments: Any, before: str) -> None:
    """Tokens decode to text without lone surrogates, so the model writes them as JSON escapes."""
    written = dumps({"name": function, "arguments": arguments, "parameters": arguments})
    for text in (before, f"{before}<tool_call>{written}</tool_call>", f"[TOOL_CALLS] [{written}]", written):
        message = assistant_message(parse(name, text.replace(LONE, "").encode(errors="ignore").decode()))
        json.dumps(message, ensure_ascii=False).encode()


class TestFormats:
    def test_format_names_are_those_of_vllm(self) -> None:
        from vllm.tool_parsers import ToolParserManager

        assert known_formats() == sorted(ToolParserManager.lazy_parsers)

    def test_a_typo_gets_the_nearest_name_before_vllm_is_loaded(self) -> None:
        with pytest.raises(ConfigError, match=r"rollout\.multi_turn\.format: .*'hermess'.*did you mean 'hermes'"):
            check_format("hermess")
        program = (
            "import sys; from rollouter.agent.parsing import check_format; check_format('hermes'); "
            "sys.exit('vllm' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

    @pytest.mark.parametrize(
        ("template", "format"),
        [("hermes", "hermes"), ("qwen25", "hermes"), ("qwen3", "hermes"), ("llama3", "llama3_json")],
    )
    def test_auto_finds_the_parser_that_reads_the_template(
        self, tmp_path: Path, template: str, format: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level("INFO", "rollouter.agent.parsing"):
            assert resolve_format("auto", model(tmp_path, template)) == format
        assert f"the parser {format} reads the calls of the chat template" in caplog.text

    def test_auto_refuses_a_template_that_writes_no_calls(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"format: auto: .*name the parser"):
            resolve_format("auto", model(tmp_path, "chatml"))

    def test_a_parser_for_another_tokenizer_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="'deepseek_v3' does not fit this model's tokenizer"):
            ToolCallParser("deepseek_v3", tokenizer(), TOOLS)

    def test_a_parser_that_does_not_parse_text_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="'openai' reads no text"):
            ToolCallParser("openai", tokenizer(), TOOLS)


def model(directory: Path, template: str) -> ModelConfig:
    """Write the tokenizer of these tests with a template of tests/rollouter/agent/templates."""
    made = tokenizer()
    made.chat_template = (Path(__file__).parent / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
    made.save_pretrained(directory)
    return ModelConfig(path=str(directory), tokenizer_path=str(directory))


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


class TestMessages:
    def test_a_message_has_content_reasoning_and_calls(self) -> None:
        parsed = ParsedTurn("So:", (ParsedCall("add", '{"a": 1}'),), reasoning="well", text="…")
        call = {"type": "function", "id": call_id(2, 0), "function": {"name": "add", "arguments": {"a": 1}}}
        assert assistant_message(parsed, turn=2) == assistant(
            "So:", reasoning_content="well", tool_calls=[call], text="…"
        )

    def test_a_plain_answer_has_only_content(self) -> None:
        assert assistant_message(ParsedTurn("3", text="3")) == assistant("3")

    @pytest.mark.parametrize("arguments", ["[1]", "1", "{", ""])
    def test_arguments_that_are_not_an_object_stay_text(self, arguments: str) -> None:
        parsed = ParsedTurn("", (ParsedCall("add", arguments), ParsedCall("add", "{}")))
        message = assistant_message(parsed)
        assert message["content"] == f'{{"name": "add", "arguments": {arguments}}}'
        assert [call["id"] for call in message["tool_calls"]] == [call_id(0, 1)]

    def test_ids_are_unique_with_nine_letters_and_digits(self) -> None:
        made = {call_id(turn, number) for turn in range(20) for number in range(20)}
        assert len(made) == 400 and all(len(one) == 9 and one.isalnum() for one in made)
        assert call_id(3, 1) == call_id(3, 1)

    def test_the_message_of_a_tool_response(self) -> None:
        message = {"role": "tool", "tool_call_id": "abc123def", "name": "add", "content": "3"}
        assert tool_message("abc123def", "add", "3") == message
