"""The shipped calculator model: rows, chat template, calls for vLLM's parser, and the quality of its responses."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from asyncrl.assets import resolve

SCRIPT = Path(__file__).parents[2] / "examples" / "calculator" / "make_model.py"
SHIPPED = Path(resolve("asyncrl://calculator"))
EXPRESSION, RESULT = "347*28", "9716"
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": "347*28"}}\n</tool_call>'
USER = {"role": "user", "content": "347*28="}
CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "calc", "arguments": {"x": EXPRESSION}}}],
}
TOOLS = [{"type": "function", "function": {"name": "calc", "description": "Calculates.", "parameters": {}}}]


@pytest.fixture(scope="module")
def script() -> Any:
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(SHIPPED)


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SHIPPED / name).read_text(encoding="utf-8").splitlines()]


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], go_on: bool, **more: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=go_on, tokenize=True, return_dict=False, **more
    )
    return ids


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def test_the_rows_are_right_and_validation_is_held_out() -> None:
    train, val = rows("train.jsonl"), rows("val.jsonl")
    assert (len(train), len(val)) == (2048, 128)
    for split in (train, val):
        for index, row in enumerate(split):
            (message,) = row["prompt"]
            assert message["role"] == "user"
            # The text has only digits and one operator, so eval is safe. The script computes the answer in another way.
            assert row["reward_model"] == {
                "style": "rule",
                "ground_truth": str(eval(message["content"].removesuffix("="), {})),
            }
            assert row["data_source"] == "calculator"
            assert row["extra_info"]["index"] == index
    questions = [row["prompt"][0]["content"] for row in (*train, *val)]
    assert len(set(questions)) == len(questions)


def test_the_script_reproduces_the_shipped_files(script: Any, tmp_path: Path) -> None:
    settings = script.Settings()
    train, val = script.draw_rows(settings)
    script.write_rows(tmp_path / "train.jsonl", train)
    script.write_rows(tmp_path / "val.jsonl", val)
    tokenizer = script.build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for made in tmp_path.iterdir():
        assert made.read_bytes() == (SHIPPED / made.name).read_bytes(), made.name
    model = script.build_model(settings, tokenizer)
    shipped = AutoModelForCausalLM.from_pretrained(SHIPPED)
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in shipped.state_dict().items()
    }
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 5e6


def test_a_small_run_of_the_script_gives_a_model_that_loads(script: Any, tmp_path: Path) -> None:
    script.make(tmp_path, script.Settings(steps=2, shy_steps=1, examples_per_step=8, train_rows=4, val_rows=2))
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in SHIPPED.iterdir()}
    ids = render(AutoTokenizer.from_pretrained(tmp_path), [USER], go_on=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([ids])).logits.shape == (1, len(ids), 110)


def test_a_conversation_renders_to_the_tokens_of_its_rollout(tokenizer: PreTrainedTokenizerBase) -> None:
    prompt = render(tokenizer, [USER], go_on=True)
    first = encode(tokenizer, CALL + "<eos>")
    delta = encode(tokenizer, f"<tool>{RESULT}<eos><assistant>")
    second = encode(tokenizer, RESULT + "<eos>")
    messages = [USER, CALLING, {"role": "tool", "content": RESULT}, {"role": "assistant", "content": RESULT}]
    assert render(tokenizer, messages[:2], go_on=False) == prompt + first
    assert render(tokenizer, messages[:3], go_on=True) == prompt + first + delta
    assert render(tokenizer, messages, go_on=False) == prompt + first + delta + second
    assert tokenizer.unk_token_id not in prompt + first + delta + second
    assert (first[-1], second[-1]) == (tokenizer.eos_token_id, tokenizer.eos_token_id)
    assert len(first) <= 24
    assert tokenizer.decode(first, skip_special_tokens=True) == CALL


def test_later_messages_never_rewrite_the_tokens_of_earlier_ones(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Calculate."}, USER, CALLING, {"role": "tool", "content": "error: busy\n"},
        CALLING, {"role": "tool", "content": RESULT}, {"role": "assistant", "content": RESULT},
        {"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"},
    ]  # fmt: skip
    whole = render(tokenizer, messages, go_on=False)
    for end in range(1, len(messages)):
        part = render(tokenizer, messages[:end], go_on=False)
        assert whole[: len(part)] == part


def test_calls_render_to_the_tokens_of_their_text(tokenizer: PreTrainedTokenizerBase) -> None:
    written = render(tokenizer, [USER, {"role": "assistant", "content": CALL}], go_on=False)
    (call,) = CALLING["tool_calls"]
    as_text = {"function": {"name": "calc", "arguments": json.dumps({"x": EXPRESSION})}}
    for calls in ([call], [as_text], [call["function"]]):
        assert render(tokenizer, [USER, {"role": "assistant", "tool_calls": calls}], go_on=False) == written
    assert render(tokenizer, [USER, CALLING], go_on=False, tools=TOOLS) == written
    spoken = {**CALLING, "content": "Hm. ", "tool_calls": [call, call]}
    text = tokenizer.decode(render(tokenizer, [USER, spoken], go_on=False))
    assert text == f"<bos><user>347*28=<eos><assistant>Hm. {CALL}\n{CALL}<eos>"


def test_vllms_parser_reads_the_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    parser = ToolParserManager.get_tool_parser("hermes")(tokenizer)
    request = ChatCompletionRequest(messages=[USER], tools=TOOLS)

    def parse(text: str) -> Any:
        ids = encode(tokenizer, text)
        return parser.extract_tool_calls(tokenizer.decode(ids, skip_special_tokens=False), request)

    read = parse(CALL + "<eos>")
    (call,) = read.tool_calls
    assert read.tools_called
    assert read.content is None
    assert (call.function.name, json.loads(call.function.arguments)) == ("calc", {"x": EXPRESSION})
    assert not parse(CALL.replace('"}}', '"}') + "<eos>").tools_called
    assert not parse(RESULT + "<eos>").tools_called


def test_the_model_mostly_guesses_wrong_and_knows_how_to_call(script: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    figures = script.measure(model, tokenizer, rows("val.jsonl"), sample=True, repeats=4)
    assert figures.asked == 512
    assert 0.2 <= figures.calls / figures.asked <= 0.4
    assert figures.well_formed >= 0.95 * figures.calls
    assert figures.right_after_call >= 0.95 * figures.well_formed
    assert figures.right_directly < 0.1 * (figures.asked - figures.calls)
