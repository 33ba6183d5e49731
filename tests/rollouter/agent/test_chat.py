"""Tokens of conversations with the chat templates of common model families and with several kinds of tokenizers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.assets import resolve
from asyncrl.core.failures import DataError
from rollouter.agent.chat import ChatTokenizer, cut_text
from rollouter.agent.parsing import call_id, tool_message
from tests.fakes.tools import schema_of

TEMPLATES = Path(__file__).parent / "templates"
MARKUP = {
    "chatml": ("<|im_end|>", ["<|im_start|>"]),
    "hermes": ("<|im_end|>", ["<|im_start|>", "<s>"]),
    "qwen25": ("<|im_end|>", ["<|im_start|>"]),
    "qwen3": ("<|im_end|>", ["<|im_start|>"]),
    "sealed": ("<|endoftext|>", ["<|im_start|>", "<|im_end|>"]),
    "llama3": ("<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"]),
    "mistral": ("</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"]),
    "gemma": ("<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "r1": ("<|end|>", ["<|User|>", "<|Assistant|>"]),
    "glm": ("<|endoftext|>", ["<|user|>", "<|assistant|>", "<|observation|>"]),
    "bare": ("<|endoftext|>", []),
}
"""The end of sequence of each template, and its other special tokens."""
TOOLS = [schema_of("add", {"type": "object", "properties": {}})]
USER = {"role": "user", "content": "What is 1 + 2?"}
TEXT = "user assistant system tool What is the sum? It is 3. {'name': 'add', 'arguments': {}} <think> hello there\n"


@cache
def tokenizer(name: str, kind: str = "bytes") -> PreTrainedTokenizerFast:
    """Return a tokenizer with the template `name`.

    The kind `bytes` is byte-level; `greedy` is too, and its special tokens absorb blanks after them; `metaspace` puts a
    space before a sequence and nowhere else.
    """
    eos, others = MARKUP[name]
    special = [AddedToken(text, special=True, rstrip=kind == "greedy", normalized=False) for text in (eos, *others)]
    plain = [AddedToken(text, special=False, normalized=False) for text in ("<tool_response>", "</tool_response>")]
    core = Tokenizer(models.BPE(byte_fallback=kind == "metaspace"))
    if kind == "metaspace":
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        core.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = sorted({chr(code) for code in range(32, 127)} | {"\n", "é"})
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=list(alphabet), special_tokens=special, show_progress=False
    )
    core.train_from_iterator([TEXT] * 4, trainer)
    core.add_tokens(plain)
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)
    made.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return made


def chat(name: str, kind: str = "bytes", *, tools: bool = False, **kwargs: Any) -> ChatTokenizer:
    return ChatTokenizer(tokenizer(name, kind), tools=TOOLS if tools else (), **kwargs)


def ids(name: str, text: str, kind: str = "bytes") -> list[int]:
    found: list[int] = tokenizer(name, kind)(text, add_special_tokens=False)["input_ids"]
    return found


def text(name: str, tokens: list[int]) -> str:
    decoded = tokenizer(name).decode(tokens, skip_special_tokens=False)
    assert isinstance(decoded, str)
    return decoded


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def calls(*arguments: dict[str, Any], content: str = "", turn: int = 0, **more: Any) -> dict[str, Any]:
    made = [
        {"type": "function", "id": call_id(turn, number), "function": {"name": "add", "arguments": one}}
        for number, one in enumerate(arguments)
    ]
    return assistant(content, tool_calls=made, **more)


def answers(*texts: str, turn: int = 0) -> list[dict[str, Any]]:
    return [tool_message(call_id(turn, number), "add", one) for number, one in enumerate(texts)]


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
RESPONSE = "<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
LLAMA_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
TOOL_RESPONSES = [
    ("hermes", HERMES + "<|im_end|>", f"\n<|im_start|>tool\n{RESPONSE}"),
    ("qwen25", HERMES + "<|im_end|>", f"\n<|im_start|>user\n{RESPONSE}"),
    ("qwen3", HERMES + "<|im_end|>", f"\n<|im_start|>user\n{RESPONSE}"),
    (
        "llama3",
        '{"name": "add", "parameters": {"a": 1}}<|eot_id|>',
        LLAMA_HEADER.format("ipython") + '"3"<|eot_id|>' + LLAMA_HEADER.format("assistant"),
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]</s>',
        f'[TOOL_RESULTS] {{"content": "3", "call_id": "{call_id(0, 0)}"}}[/TOOL_RESULTS]',
    ),
]


@pytest.mark.parametrize(("name", "sampled", "delta"), TOOL_RESPONSES)
def test_a_tool_response_adds_only_its_delta(name: str, sampled: str, delta: str) -> None:
    reasoning = {"reasoning_content": "I add."} if name == "qwen3" else {}
    before, end = [USER, calls({"a": 1}, **reasoning)], MARKUP[name][0]
    talk = chat(name, tools=True)
    more = talk.extend(before, answers("3"), ids(name, sampled))
    assert (text(name, more.ids), more.rewritten) == (delta, False)
    assert more.ids == ids(name, delta)
    cut = talk.extend(before, answers("3"), ids(name, sampled.removesuffix(end)))
    assert text(name, cut.ids) == end + delta, "the delta adds the end that a cut turn lacks"


@pytest.mark.parametrize("name", ["hermes", "qwen25"])
def test_responses_to_parallel_calls_share_a_message(name: str) -> None:
    before = [USER, calls({"a": 1}, {"a": 2}, content="Both.")]
    more = chat(name, tools=True).extend(before, answers("3", "4"), ids(name, "…<|im_end|>"))
    message = text(name, more.ids)
    assert not more.rewritten
    assert message.count("<|im_start|>") == 2 and message.count("<tool_response>") == 2


def test_several_calls_become_text_if_the_template_allows_only_one() -> None:
    two = calls({"a": 1}, {"a": 2}, text='{"name": "add"}; {"name": "add"}')
    llama = chat("llama3", tools=True)
    more = llama.extend([USER, two], answers("3", "4"), ids("llama3", '{"name": "add"}; {"name": "add"}<|eot_id|>'))
    assert not more.rewritten
    assert text("llama3", more.ids).count("ipython") == 2
    assert '\n\n{"name": "add"}; {"name": "add"}<|eot_id|>' in text("llama3", llama.retokenized([USER, two]))


def test_a_template_without_special_tokens_is_continued_as_text() -> None:
    talk = chat("bare")
    for end in ("", "<|endoftext|>"):
        more = talk.extend([USER, assistant("3")], [USER], ids("bare", f"3{end}"))
        assert text("bare", more.ids) == "\n\nuser: What is 1 + 2?\n\nassistant: " and not more.rewritten


def test_a_turn_may_end_with_the_token_that_begins_the_next_one() -> None:
    ends = tokenizer("glm").convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    talk = chat("glm", end_ids=ends)
    before = [USER, assistant("3")]
    for new, end in (([USER], "<|user|>"), (answers("4"), "<|observation|>")):
        whole = talk.prompt([*before, *new])
        for sampled in (ids("glm", f"3{end}"), ids("glm", "3")):
            more = talk.extend(before, new, sampled)
            assert [*talk.prompt([USER]), *sampled, *more.ids] == whole and not more.rewritten


def test_a_token_after_the_last_turn_does_not_count_as_rewriting() -> None:
    talk = chat("sealed")
    more = talk.extend([USER, assistant("3")], [USER], ids("sealed", "3<|im_end|>"))
    assert text("sealed", more.ids).startswith("\n<|im_start|>user") and not more.rewritten
    assert talk.ends(ids("sealed", "3<|im_end|>")) and talk.ends(ids("sealed", "3<|endoftext|>"))
    assert not talk.ends(ids("sealed", "3")) and not talk.ends([])


class TestRewriting:
    """If the template rewrites history, the conversation continues in a new row."""

    thought = assistant("It is 3.", reasoning_content="\n1 + 2\n", text="<think>\n1 + 2\n</think>\n\nIt is 3.")

    def test_reasoning_is_kept_for_tool_results_and_dropped_for_a_user_turn(self) -> None:
        talk = chat("qwen3", tools=True)
        before = [USER, calls({"a": 1}, reasoning_content="\nI add.\n")]
        more = talk.extend(before, answers("3"), ids("qwen3", "…<|im_end|>"))
        assert not more.rewritten
        before += [*answers("3"), self.thought]
        new = [{"role": "user", "content": "Sure?"}]
        again = talk.extend(before, new, ids("qwen3", "…<|im_end|>"))
        assert again.rewritten and again.ids == talk.prompt([*before, *new])
        assert "<think>" not in text("qwen3", again.ids)

    def test_a_generation_header_that_is_not_in_history_counts_as_rewriting(self) -> None:
        talk = chat("qwen3", template_kwargs={"enable_thinking": False})
        assert text("qwen3", talk.prompt([USER])).endswith("<think>\n\n</think>\n\n")
        assert talk.extend([USER, assistant("3")], [USER], ids("qwen3", "3<|im_end|>")).rewritten

    def test_reasoning_that_is_never_in_history_counts_as_rewriting(self) -> None:
        talk = chat("r1")
        more = talk.extend([USER, self.thought], [USER], ids("r1", "1 + 2</think>It is 3.<|end|>"))
        assert more.rewritten and "1 + 2\n" not in text("r1", more.ids)

    def test_a_tool_list_that_the_template_moves_to_the_last_question_counts_as_rewriting(self) -> None:
        talk = chat("mistral", tools=True)
        assert talk.extend([USER, assistant("3")], [USER], ids("mistral", "3</s>")).rewritten
        assert not chat("mistral").extend([USER, assistant("3")], [USER], ids("mistral", "3</s>")).rewritten

    def test_text_beside_a_call_that_the_template_drops_counts_as_rewriting(self) -> None:
        before = [USER, calls({"a": 1}, content="I shall add.")]
        assert chat("llama3", tools=True).extend(before, answers("3"), ids("llama3", "…<|eot_id|>")).rewritten

    def test_unsupported_reasoning_and_calls_become_text(self) -> None:
        written = f"<think>\nI add.\n</think>\n\n{HERMES}"
        before = [USER, calls({"a": 1}, reasoning_content="\nI add.\n", text=written)]
        talk = chat("chatml")
        sampled = ids("chatml", written + "<|im_end|>")
        more = talk.extend(before, answers("3"), sampled)
        assert not more.rewritten
        assert [*talk.prompt([USER]), *sampled, *more.ids] == talk.prompt([*before, *answers("3")])
        talk = chat("qwen25")  # this template supports calls and no reasoning
        assert not talk.extend(before, answers("3"), ids("qwen25", written + "<|im_end|>")).rewritten
        assert "<think>\nI add.\n</think>\n<tool_call>" in text("qwen25", talk.retokenized(before))


@pytest.mark.parametrize("name", ["chatml", "hermes", "qwen25", "qwen3", "llama3", "mistral"])
@pytest.mark.parametrize("kind", ["bytes", "greedy", "metaspace"])
def test_special_tokens_in_tool_results_stay_text(name: str, kind: str) -> None:
    eos, others = MARKUP[name]
    odd = f"{eos}{others[0]}{eos[0]}{eos}{eos[1:]}</tool_response> é\n{eos}"
    made = tokenizer(name, kind)
    talk = ChatTokenizer(made, tools=TOOLS)
    before = [USER, calls({"a": 1}, reasoning_content="r", text="<think>r</think>")]
    if name == "chatml":
        before = [USER, assistant("x")]
    sampled = ids(name, f"x{eos}", kind)
    plain, full = talk.extend(before, answers("word"), sampled), talk.extend(before, answers(odd), sampled)
    special = set(made.all_special_ids)
    marks = [token for token in full.ids if token in special]
    assert marks == [token for token in plain.ids if token in special]
    if "tool_response" in made.chat_template:
        close = made.convert_tokens_to_ids("</tool_response>")
        assert full.ids.count(close) == plain.ids.count(close) == 1
    if kind == "bytes" and name != "llama3" and name != "mistral":  # these two templates write the result as JSON
        assert odd in made.decode(full.ids, skip_special_tokens=False)
    whole = talk.prompt([*before, *answers(odd)])
    assert full.rewritten or whole[-len(full.ids) :] == full.ids


def test_special_tokens_in_messages_of_the_data_set_are_special() -> None:
    given = [{"role": "user", "content": "a<|im_end|>b"}]
    eos = tokenizer("chatml").eos_token_id
    assert chat("chatml").prompt(given).count(eos) == 3
    assert chat("chatml").prompt([USER, assistant("x"), *given]).count(eos) == 4  # system and messages


def test_an_end_token_written_as_text_does_not_end_a_turn() -> None:
    talk = chat("chatml")
    before = [USER, assistant("I end it: <|im_end|>", tool_calls=[])]
    more = talk.extend(before, [USER], ids("chatml", "…<|im_end|>"))
    assert not more.rewritten and text("chatml", more.ids).startswith("\n<|im_start|>user")


def test_an_exception_in_the_template_is_a_data_error() -> None:
    talk = chat("gemma")
    with pytest.raises(DataError, match="the chat template refuses the messages: Conversation roles must alternate"):
        talk.extend([USER, assistant("3")], answers("3"), ids("gemma", "3<end_of_turn>"))
    with pytest.raises(DataError, match="Only user, assistant and tool roles"):
        chat("mistral").prompt([{"role": "system", "content": "Be brief."}, USER])


WORDS = st.text(st.sampled_from("ab cé.,!{}\"'<|>\n12"), min_size=1, max_size=12).map(str.strip).filter(bool)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b"]), WORDS | st.integers(), max_size=2)
TURN = st.tuples(st.none() | WORDS, st.lists(st.tuples(ARGUMENTS, WORDS), max_size=3), WORDS)


@pytest.mark.parametrize("kind", ["bytes", "greedy", "metaspace"])
@pytest.mark.parametrize("name", ["chatml", "hermes", "qwen25", "sealed", "llama3", "mistral", "gemma"])
@settings(max_examples=15)
@given(rounds=st.lists(TURN, min_size=1, max_size=3))
def test_rows_equal_a_full_tokenization(name: str, kind: str, rounds: list[Any]) -> None:
    """If turns are tokenized as the template renders them, prompt, turns and deltas equal the tokens of all
    messages."""
    takes_calls = name not in ("chatml", "sealed", "gemma")
    talk = ChatTokenizer(tokenizer(name, kind), tools=TOOLS if name in ("hermes", "qwen25", "llama3") else ())
    messages: list[dict[str, Any]] = [USER]
    row = talk.prompt(messages)
    for turn, (content, made, reply) in enumerate(rounds):
        if takes_calls and made:
            made = made[:1] if name == "llama3" else made
            beside = content if content and name in ("hermes", "qwen25") else ""
            message = calls(*(arguments for arguments, _ in made), content=beside, turn=turn)
            new = answers(*(answer for _, answer in made), turn=turn)
        else:
            message, new = assistant(content or "x"), [{"role": "user", "content": reply}]
        before = [*messages, message]
        finished = talk.retokenized(before)
        last = max(place for place, token in enumerate(finished) if talk.ends([token]))
        if name == "sealed":
            last = max(place for place, token in enumerate(finished[:-1]) if talk.ends([token]))
        assert finished[: len(row)] == row
        sampled = finished[len(row) : last + 1]
        more = talk.extend(before, new, sampled)
        assert not more.rewritten
        cut = talk.extend(before, new, sampled[:-1])
        assert cut.ids == [sampled[-1], *more.ids]
        row += [*sampled, *more.ids]
        messages = [*before, *new]
        assert row == talk.prompt(messages)


def test_the_quickstart_tokenizer_extends_rows_as_its_template_does() -> None:
    made = AutoTokenizer.from_pretrained(resolve("asyncrl://quickstart"))
    talk = ChatTokenizer(made)
    sampled = made("3<eos>", add_special_tokens=False)["input_ids"]
    before, new = [USER, assistant("3")], [{"role": "user", "content": "4+<eos>5"}]
    more = talk.extend(before, new, sampled)
    assert [*talk.prompt([USER]), *sampled, *more.ids] == talk.prompt([*before, *new])
    assert more.ids.count(made.eos_token_id) == 1


class TestDifference:
    def test_a_row_that_equals_the_template_has_no_difference(self) -> None:
        talk = chat("chatml")
        row = [*talk.prompt([USER]), *ids("chatml", "It is 3.<|im_end|>")]
        assert talk.difference(row, [USER, assistant("It is 3.")]) is None
        assert talk.difference(row[:-1], [USER, assistant("It is 3.")]) is None  # the turn is cut before its end token

    def test_the_message_of_a_difference_has_position_and_context(self) -> None:
        talk = chat("chatml")
        prompt = talk.prompt([USER])
        message = talk.difference([*prompt, *ids("chatml", "It is 4.<|im_end|>")], [USER, assistant("It is 3.")])
        assert message is not None
        place = len(prompt) + len(ids("chatml", "It is"))
        assert message.startswith(f"token {place} of ") and "4" in message and "the chat template gives" in message

    def test_another_tokenization_of_the_same_text_is_a_difference(self) -> None:
        talk = chat("chatml")
        spelled = [token for letter in "It is 3." for token in ids("chatml", letter)]
        assert talk.difference([*talk.prompt([USER]), *spelled], [USER, assistant("It is 3.")]) is not None

    def test_missing_or_additional_tokens_are_a_difference(self) -> None:
        talk = chat("chatml")
        assert talk.first_difference([5, 6, 7], [5, 6]) is not None
        assert talk.first_difference(ids("chatml", "a"), ids("chatml", "a b")) is not None
        assert talk.first_difference(ids("chatml", "a"), ids("chatml", "a<|im_end|>\n")) is None

    def test_all_end_tokens_count_as_equal(self) -> None:
        eom = tokenizer("llama3").convert_tokens_to_ids("<|eom_id|>")
        talk = chat("llama3", end_ids=[eom])
        row = [*talk.prompt([USER]), *ids("llama3", "3<|eom_id|>")]
        assert talk.difference(row, [USER, assistant("3")]) is None

    def test_a_last_turn_that_the_template_shortens_is_not_compared(self) -> None:
        talk = chat("r1")
        row = [*talk.prompt([USER]), *ids("r1", "1 + 2</think>It is 3.<|end|>")]
        assert talk.difference(row, [USER, TestRewriting.thought]) is None
        assert talk.difference([row[1], *row[1:]], [USER, TestRewriting.thought]) is not None


class TestCut:
    long = "".join(f"line {number}: é\n" for number in range(200))

    @pytest.mark.parametrize("side", ["left", "middle", "right"])
    @pytest.mark.parametrize("most", [1, 2, 3, 17, 64])
    def test_a_cut_text_uses_the_allowed_tokens(self, side: Any, most: int) -> None:
        talk = chat("chatml")
        cut = talk.cut(self.long, most, side)
        used = len(ids("chatml", cut))
        assert used <= most
        assert "\ufffd" not in cut
        if most >= 17:
            assert used >= most - 2
            head, tail = cut.split("…")
            assert self.long.startswith(head) and self.long.endswith(tail)
            assert (side != "left" or not head) and (side != "right" or not tail)

    def test_a_text_that_fits_is_unchanged(self) -> None:
        assert chat("chatml").cut("short", 5, "middle") == "short"
        assert chat("chatml").cut("", 1, "left") == ""

    def test_text_that_looks_like_special_tokens_counts_as_plain_text(self) -> None:
        talk = chat("chatml")
        lookalikes = "<|im_end|>" * 20
        sampled = ids("chatml", "x<|im_end|>")
        empty = len(talk.extend([USER, assistant("x")], answers(""), sampled).ids)
        cut = talk.cut(lookalikes, 30, "right")
        assert len(talk.extend([USER, assistant("x")], answers(cut), sampled).ids) - empty <= 30

    def test_text_is_cut_without_an_ellipsis_if_the_tokenizer_has_none(self) -> None:
        made = AutoTokenizer.from_pretrained(resolve("asyncrl://quickstart"))
        cut = ChatTokenizer(made).cut("1+2=3" * 20, 10, "left")
        assert len(made(cut, add_special_tokens=False)["input_ids"]) <= 10 and cut.endswith("=3")

    def test_a_limit_of_zero_tokens_gives_empty_text(self) -> None:
        assert cut_text("abc", 0, "left", encode=lambda part: list(part.encode()), decode=lambda _: "") == ""
