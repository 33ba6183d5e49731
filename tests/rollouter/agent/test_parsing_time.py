"""The processor time of parsing turns that repeat themselves."""

from __future__ import annotations

import inspect
import json
import re
import sys
import time
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import vllm
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.core.failures import ConfigError
from rollouter.agent import parsing
from rollouter.agent.parsing import ToolCallParser, known_formats
from tests.fakes.tools import schema_of

TOKENS = 4_000
MARKER = re.compile(r"<[|｜/\w][^\s<>()*\\?={}]{1,40}>|\[/?[A-Z_]{3,}\]")
PYTHON_AND_JSON = ["[a(a=1, ", '{"name": "a", ', '["', "[", "{", '"', " ", "\n"]
TOOLS = [schema_of("add", {"type": "object", "properties": {"a": {"type": "string"}}})]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with every marker in the sources of vLLM's parsers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    home = Path(vllm.__file__).parent
    sources = [path.read_text() for folder in ("tool_parsers", "parser") for path in Path(home, folder).glob("*.py")]
    markers = {marker for source in sources for marker in MARKER.findall(source)}
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in sorted(markers)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")


def parser_of(name: str) -> ToolCallParser | None:
    """Return the parser, or None if it reads only the messages of vLLM's own API or needs tokenizers of its own."""
    try:
        return ToolCallParser(name, tokenizer(), TOOLS)
    except ConfigError:
        return None


def markers_of(parser: ToolCallParser) -> list[str]:
    """Return the markers in the sources of a parser of vLLM in their order, without those of reasoning."""
    made = parser._vllm._parser()  # type: ignore[union-attr]
    classes = [*type(made).__mro__, *type(getattr(made, "_parser_engine", made)).__mro__]
    modules = dict.fromkeys(one.__module__ for one in classes if one.__module__.startswith("vllm."))
    found = [marker for name in modules for marker in MARKER.findall(inspect.getsource(sys.modules[name]))]
    return [marker for marker in dict.fromkeys([*parsing._markers(made), *found]) if "think" not in marker]


def repeated(markers: list[str]) -> list[tuple[str, str]]:
    """Return the beginnings of turns, and what they repeat."""
    begins = [marker for marker in markers if not re.search(r"/|end|suffix", marker)]
    one_by_one = [("".join(begins), unit) for unit in PYTHON_AND_JSON]
    pairs = [(begins[0], first + second) for first, second in pairwise(begins)][:6]
    bare = [("", unit) for unit in PYTHON_AND_JSON[:3]]
    return [*one_by_one, *pairs, *bare, ("", "".join(begins)), ("", "".join(markers))]


def seconds(parser: ToolCallParser, head: str, unit: str) -> float:
    vocabulary = tokenizer()
    first, rest = (vocabulary(text, add_special_tokens=False)["input_ids"] for text in (head, unit))
    ids = (first + rest * (TOKENS // max(1, len(rest))))[:TOKENS]
    start = time.process_time()
    parser.parse(ids)
    return time.process_time() - start


UNREAD = {"openai", "cohere_command3", "cohere_command4", "hf"}
"""Parsers that read no text, or only with the settings of certain tokenizers."""


@pytest.mark.parametrize("name", sorted({*known_formats()} - UNREAD))
def test_no_repetition_makes_a_parser_slow(name: str) -> None:
    parser = parser_of(name)
    if parser is None:
        pytest.skip("the parser needs another tokenizer")
    taken = {(head, unit): seconds(parser, head, unit) for head, unit in repeated(markers_of(parser)) if unit}
    assert {case: needed for case, needed in taken.items() if needed > 2} == {}


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v31"])
def test_repeated_begins_of_calls_are_malformed(name: str) -> None:
    parser = parser_of(name)
    assert parser is not None
    text = "<｜tool▁calls▁begin｜>" + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add" * 2_000
    start = time.process_time()
    parsed = parser.parse(tokenizer()(text, add_special_tokens=False)["input_ids"])
    assert (parsed.calls, parsed.malformed, parsed.content) == ((), True, text)
    assert time.process_time() - start < 2


ARGUMENTS = {"a": "def f(x):\n    return [x]\n" * 40}
JSON = json.dumps(ARGUMENTS)
CALLS = {
    "hermes": ("", f'<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call>\n', ""),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "llama3_json": ("", f'{{"name": "add", "parameters": {JSON}}}; ', ""),
    "pythonic": ("[", f"add(a={ARGUMENTS['a']!r}), ", "add(a='')]"),
    "qwen3_xml": (
        "",
        f"<tool_call>\n<function=add>\n<parameter=a>\n{ARGUMENTS['a']}\n</parameter>\n</function>\n</tool_call>\n",
        "",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_turns_with_many_long_calls_are_parsed(name: str) -> None:
    parser = parser_of(name)
    assert parser is not None
    begin, call, end = CALLS[name]
    number = 31 if name == "pythonic" else 32
    parsed = parser.parse(tokenizer()(begin + call * number + end, add_special_tokens=False)["input_ids"])
    assert [one.name for one in parsed.calls] == ["add"] * 32
    assert json.loads(parsed.calls[0].arguments_json) == ARGUMENTS
