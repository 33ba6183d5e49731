"""Parses sampled turns into content, reasoning and tool calls with vLLM's own parsers, chosen by name.

No text of a model raises an exception here. A broken call makes its turn `malformed`, so that the model can be
informed, and the turn does not count as an answer.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.config.import_path import nearest
from asyncrl.config.sections.data import ModelConfig
from asyncrl.core.failures import ConfigError, DataError
from asyncrl.core.text import encodable, encodable_values, parse_json
from rollouter.agent.chat import ChatTokenizer
from rollouter.prompts.chat_template import end_token_ids, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NO_TOOLS = "no_tools"
"""The format for models without tools: the whole text is content."""
AUTO = "auto"
KEY = "rollout.multi_turn.format"


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments_json: str
    """The parser's output, unchecked; it can be encoded, but may contain lone surrogates as JSON escapes."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A parsed turn of the model."""

    content: str
    """The text without reasoning, calls and end-of-turn token. With `malformed`, the text of the calls stays in it."""
    calls: tuple[ParsedCall, ...] = ()
    malformed: bool = False
    """Whether the turn contains text that looks like a call but cannot be parsed."""
    reasoning: str = ""
    """The text of a leading `<think>…</think>`, or before `</think>` if the prompt has opened it."""
    text: str = ""
    """The unparsed text without the end-of-turn token."""


class ToolCallParser:
    """Parses the turns of one model. Each turn gets a new vLLM parser, because parsers have state."""

    def __init__(
        self,
        format: str,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        end_ids: Collection[int] = (),
    ) -> None:
        """Load vLLM's parser `format`; the first time takes seconds.

        `tools` are OpenAI function schemas. `end_ids` are end-of-turn tokens in addition to the tokenizer's.

        Raises:
            ConfigError: there is no parser of that name, or it needs another tokenizer.
        """
        self.format = format
        self._tokenizer = tokenizer
        self.end_ids = frozenset({*end_ids, tokenizer.eos_token_id})
        """Tokens that are omitted at the end of a turn."""
        self._warned: set[str] = set()
        self._vllm = None
        if format != NO_TOOLS:
            check_format(format)
            self._vllm = _VllmParser(format, tokenizer, tools)

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Parse one turn, with or without its end-of-turn token."""
        text = self.decode(ids)
        reasoning, content = _split_reasoning(text)
        if self._vllm is None or not content.strip():
            return ParsedTurn(content, reasoning=reasoning, text=text)
        if _repeats_too_much(content):
            return ParsedTurn(content, malformed=True, reasoning=reasoning, text=text)
        try:
            rest, calls = self._vllm.extract(content)
        except Exception as error:  # noqa: BLE001  # parsers may raise anything on a model's text
            kind = type(error).__name__
            if kind not in self._warned:
                self._warned.add(kind)
                logger.warning("%s: the parser raised %s: %s; such turns count as malformed calls", KEY, kind, error)
            return ParsedTurn(content, malformed=True, reasoning=reasoning, text=text)
        if calls:
            return ParsedTurn(rest.rstrip(), calls, reasoning=reasoning, text=text)
        malformed = self._vllm.looks_like_call(content)
        return ParsedTurn(content, malformed=malformed, reasoning=reasoning, text=text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of a turn or of a part of one, without end-of-turn tokens at its end."""
        tokens = [int(token) for token in ids]
        while tokens and tokens[-1] in self.end_ids:
            tokens.pop()
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._vllm is None)
        assert isinstance(text, str)
        return text

    def settled(self, text: str, *, opened: bool) -> tuple[str, str]:
        """Return the reasoning and the content of an unfinished turn, without what more text may turn into reasoning,
        into a call, or into the blanks before one.

        More text usually extends both. Rarely it does not: when reasoning begins or ends out of place, or when a
        parser drops text before a call.

        Args:
            text: The text so far, see `decode`.
            opened: Whether the prompt ends with `<think>`.
        """
        begin = re.match(r"\s*<think>", text)
        if begin or opened:
            reasoning, close, content = text[begin.end() if begin else 0 :].partition("</think>")
            if not close:
                return before_any(text[begin.end() if begin else 0 :], ["</think>"]), ""
        elif "<think>".startswith(text.lstrip()):
            return "", ""
        else:
            reasoning, content = "", text
        return reasoning, content if self._vllm is None else self._vllm.before_calls(content).rstrip()


def _repeats_too_much(text: str) -> bool:
    """Whether a parser may need minutes for the text: the patterns of some, such as `deepseek_v3`, try all pairs of
    marks, or all ways to divide blanks. Linear."""
    marks = Counter(_MARK.findall(text))
    return max(marks.values(), default=0) > MAX_REPEATS or _LONG_BLANK.search(text) is not None


class _VllmParser:
    """A parser class of vLLM with the inputs it needs."""

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

        # vLLM's parsers log a traceback for each malformed call; `ToolCallParser` marks such turns instead.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._class = ToolParserManager.get_tool_parser(name)
        self._tokenizer = get_cached_tokenizer(tokenizer)
        self._request = ChatCompletionRequest(messages=[], model="", tools=[dict(tool) for tool in tools] or None)
        try:
            self._parser().extract_tool_calls("a", self._request)
        except NotImplementedError as error:
            raise ConfigError(
                f"{KEY}: vLLM's parser {name!r} reads no text, only the messages of vLLM's own chat API. Name another "
                "one that fits the model, or connect an agent to the run's endpoint (rollout.agent)"
            ) from error
        except Exception as error:
            raise ConfigError.wrap(
                f"{KEY}: {name!r} does not fit this model's tokenizer: {error}. Name the parser of the model's family",
                error,
            ) from error
        markers, shapes = _markers(self._parser()), _SHAPES.get(name, ())
        self._marker = re.compile("|".join([*map(re.escape, markers), *shapes]) or _ANY)
        self._markers = markers or ["<", "["]
        self._begins_bare = bool(shapes)

    def _parser(self) -> Any:
        return self._class(self._tokenizer, self._request.tools)

    def extract(self, text: str) -> tuple[str, tuple[ParsedCall, ...]]:
        """Return the text outside of calls, and the calls.

        Raises:
            Exception: whatever the parser raises.
        """
        result = self._parser().extract_tool_calls(text, self._request)
        functions = [call.function for call in result.tool_calls]
        calls = tuple(ParsedCall(encodable(function.name), encodable(function.arguments)) for function in functions)
        return result.content or "", calls if result.tools_called else ()

    def looks_like_call(self, text: str) -> bool:
        return self._marker.search(text) is not None

    def before_calls(self, text: str) -> str:
        """Return the part of an unfinished text in which no call can begin."""
        if self._begins_bare and text.lstrip()[:1] in ("", "{", "["):
            return ""
        return before_any(text, self._markers)


def before_any(text: str, needles: Sequence[str]) -> str:
    """Return `text` up to the first of `needles`, or up to where one of them may begin at its end."""
    end = min((at for needle in needles if (at := text.find(needle)) >= 0), default=len(text))
    longest = max((len(needle) for needle in needles), default=1) - 1
    for start in range(max(0, end - longest), end):
        if any(needle.startswith(text[start:end]) for needle in needles):
            return text[:start]
    return text[:end]


MAX_REPEATS = 64
"""How often a turn may contain the same mark of a call."""
_MARK = re.compile(r"<[|｜][^\s<>]{1,40}[|｜]>|<dots_\w{1,40}>")
_LONG_BLANK = re.compile(r"\s{1001}")
_BEGINS = re.compile(r"^(?!response|think|arg).*(?:start|begin|bot)\w*_token$|^bot_token$|^tc_start$")
_JSON_CALL = r"\A\s*\{\s*\"(?:name|type|function|arguments|parameters)\""
_PYTHON_CALL = r"\A\s*\[\s*[A-Za-z_][\w.]*\("
_SHAPES = {
    "llama3_json": (_JSON_CALL,),
    "llama4_json": (_JSON_CALL,),
    "pythonic": (_PYTHON_CALL,),
    "llama4_pythonic": (_PYTHON_CALL,),
    "olmo3": (_PYTHON_CALL,),
    "xlam": (r"\[TOOL_CALLS\]", r"<tool_call>", r"\A\s*\[?\s*\{\s*\"name\""),
}
"""Patterns that match the beginning of calls, for model families whose calls begin without a special token."""
_ANY = r"<\W{0,3}(?:tool|function|plugin|action|invoke)"
"""The pattern for parsers whose attributes do not show how calls begin."""


def _markers(parser: Any) -> list[str]:
    """Return the texts with which a parser's calls begin, as far as its attributes show them."""
    names = {name for name in dir(parser) if _BEGINS.search(name)}
    values: list[Any] = [getattr(parser, name, None) for name in names]
    engine = getattr(parser, "_parser_engine", None)
    terminals = getattr(getattr(engine, "parser_engine_config", None), "terminals", {})
    for name, spellings in terminals.items():
        if name.startswith("TOOL") and not name.endswith(("END", "ERROR")):
            values += [spellings] if isinstance(spellings, str) else spellings
    return sorted({value for value in values if isinstance(value, str) and value.strip()})


def known_formats() -> list[str]:
    """Return the names of vLLM's parsers from its source files, because importing vLLM is slow; none without vLLM."""
    spec = importlib.util.find_spec("vllm")
    for place in (spec.submodule_search_locations or []) if spec else []:
        source = Path(place, "tool_parsers", "__init__.py")
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if source.is_file() else ():
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                return sorted(ast.literal_eval(node.value))
    return []


_COMMON = ("hermes", "mistral", "llama3_json", "qwen3_coder", "deepseek_v3", "deepseek_v31", "kimi_k2", "glm45")
"""Formats that `auto` tries first: some others read the same calls less exactly."""
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}


def resolve_format(format: str, model: ModelConfig) -> str:
    """Return the format, or for `auto` the first one whose parser reads the call that the chat template writes. `auto`
    loads the tokenizer and takes seconds.

    Raises:
        ConfigError: the template writes no calls, or no parser reads them.
    """
    if format != AUTO:
        return format
    tokenizer = load_tokenizer(model)
    end_ids, kwargs = end_token_ids(model, tokenizer), model.chat_template_kwargs
    chat = ChatTokenizer(tokenizer, tools=[_PROBE_TOOL], template_kwargs=kwargs, end_ids=end_ids)
    try:
        text = chat.probe_call()
    except DataError as error:
        raise ConfigError(
            f"{KEY}: auto: the chat template writes no tool calls ({error.message}), so they cannot show their format; "
            "name the parser of the model's family"
        ) from error
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    for name in dict.fromkeys([*_COMMON, *known_formats()]):
        try:
            parsed = ToolCallParser(name, tokenizer, [_PROBE_TOOL], end_ids=chat.end_ids).parse(ids)
        except Exception:  # noqa: BLE001  parsers of other models may raise anything
            continue
        if [(call.name, call_arguments(call)) for call in parsed.calls] == [("f", {"a": "b"})]:
            logger.info("%s: auto: the parser %s reads the calls of the chat template", KEY, name)
            return name
    raise ConfigError(
        f"{KEY}: auto: no parser of vLLM reads the call that the chat template writes, {text!r}; name the parser of "
        "the model's family"
    )


def check_format(format: str) -> None:
    """Check that a parser of this name exists. Cheap; without vLLM every name passes.

    Raises:
        ConfigError: there is no such parser.
    """
    known = known_formats()
    if known and format not in (*known, NO_TOOLS, AUTO):
        raise ConfigError(
            f"{KEY}: vLLM has no tool parser {format!r}, so no call would be understood{nearest(format, known)}\n"
            f"    It has: {', '.join(known)}; {NO_TOOLS} is for models that call nothing"
        )


def assistant_message(parsed: ParsedTurn, *, turn: int = 0) -> dict[str, Any]:
    """Return the turn as a message. A call whose arguments are not a JSON object stays text in the content.

    `turn` is the turn's number, from which the ids of its calls are derived. If the turn has reasoning or calls, the
    key `text` contains its whole text: `ChatTokenizer` needs it if a template cannot render them.
    """
    content, calls = parsed.content, []
    for number, call in enumerate(parsed.calls):
        arguments = call_arguments(call)
        if arguments is None:
            content += f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments_json}}}'
            continue
        function = {"name": call.name, "arguments": arguments}
        calls.append({"type": "function", "id": call_id(turn, number), "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if calls:
        message["tool_calls"] = calls
    if parsed.reasoning or parsed.calls:
        message["text"] = parsed.text
    return message


def call_arguments(call: ParsedCall) -> dict[str, Any] | None:
    """Return the arguments, or None if they are not a JSON object. All texts in them can be encoded."""
    try:
        arguments = encodable_values(parse_json(call.arguments_json))
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def call_id(turn: int, number: int) -> str:
    """Return a deterministic id of a turn's call: nine letters and digits, as the strictest templates require."""
    return hashlib.sha256(f"{turn}/{number}".encode()).hexdigest()[:9]


def tool_message(call_id: str, name: str, text: str) -> dict[str, Any]:
    """Return the message with a tool's answer to a call."""
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}


def _split_reasoning(text: str) -> tuple[str, str]:
    """Split `text` into reasoning and the rest. If the reasoning is unfinished, all of `text` is reasoning."""
    begin = re.match(r"\s*<think>", text)
    head, close, tail = text.partition("</think>")
    if begin:
        return head[begin.end() :], tail
    if close and "<think>" not in head:
        return head, tail
    return "", text
