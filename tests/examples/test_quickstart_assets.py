"""The shipped model, tokenizer and rows: complete, small, usable offline, and of the difficulty the quickstart
needs."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.assets import resolve

HOME = Path(resolve("asyncrl://quickstart"))
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "make_model.py"
ANSWER = re.compile(r"#(-?\d+)$")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(HOME)


@pytest.fixture(scope="module")
def make_model() -> dict[str, Any]:
    """Return the global names of the script that made the assets."""
    return runpy.run_path(str(SCRIPT))


def rows(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HOME / f"{split}.jsonl").read_text().splitlines()]


def terms_of(row: dict[str, Any]) -> list[int]:
    return [int(term) for term in row["prompt"][0]["content"].removesuffix("=").split("+")]


def test_everything_together_is_at_most_5_mb() -> None:
    assert sum(path.stat().st_size for path in HOME.iterdir()) <= 5_000_000


def test_a_character_is_a_token_and_text_survives_the_round_trip(tokenizer: Any) -> None:
    text = "17+25=42;42+8=50;#50 (yes,\nwhy not?)"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_the_chat_template_marks_every_turn_with_one_token(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+2="},
        {"role": "assistant", "content": "#3"},
        {"role": "user", "content": "3+4="},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><system>Add.<eos><user>1+2=<eos><assistant>#3<eos><user>3+4=<eos><assistant>"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    contents = sum(len(message["content"]) for message in messages)
    assert len(ids) == 1 + contents + 2 * len(messages) + 1
    assert tokenizer.unk_token_id not in ids


def test_rows_have_verls_fields_and_right_answers() -> None:
    for split, least in (("train", 3500), ("val", 128)):
        loaded = rows(split)
        assert len(loaded) >= least
        for index, row in enumerate(loaded):
            assert row["reward_model"] == {"style": "rule", "ground_truth": str(sum(terms_of(row)))}
            assert row["extra_info"] == {"index": index, "split": split}
            assert row["data_source"] == "asyncrl/chain_sum"
            assert [message["role"] for message in row["prompt"]] == ["user"]


def test_no_prompt_occurs_twice_in_the_training_and_validation_sets() -> None:
    prompts = [row["prompt"][0]["content"] for split in ("train", "val") for row in rows(split)]
    assert len(prompts) == len(set(prompts))


def test_response_lengths_have_a_long_tail(make_model: dict[str, Any], tokenizer: Any) -> None:
    lengths = [len(tokenizer.encode(make_model["solution"](terms_of(row)))) + 1 for row in rows("train")]
    assert max(lengths) >= 4 * sum(lengths) / len(lengths)


def test_the_script_reproduces_the_shipped_rows_and_tokenizer(make_model: dict[str, Any], tokenizer: Any) -> None:
    train, val = make_model["draw_rows"](make_model["Settings"]())
    assert train == rows("train")
    assert val == rows("val")
    assert make_model["build_tokenizer"]().get_vocab() == tokenizer.get_vocab()


def test_demonstrations_never_show_a_held_out_prompt(make_model: dict[str, Any], tokenizer: Any) -> None:
    terms = range(1, 20)
    held_out = {f"{a}+{b}+{c}=" for a in terms for b in terms for c in terms if c != 7}
    examples = make_model["Examples"](tokenizer, make_model["Settings"](), held_out)
    for _ in range(20):
        ids, labels = examples.draw(3, None)
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        assert re.fullmatch(r"\d+\+\d+\+7=\d+\+\d+=\d+;\d+\+7=\d+;#\d+", shown)
        assert tokenizer.decode([label for label in labels if label >= 0]).endswith("<eos>")


def test_the_base_model_can_add_but_not_well(tokenizer: Any) -> None:
    """At temperature 1, 15% to 50% of its answers are right: enough to learn from, with room to improve."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(HOME, dtype=torch.float32)
    tokenizer.padding_side = "left"
    asked = rows("val")
    prompts = [tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in asked]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    generated = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        temperature=1.0,
        max_new_tokens=160,
    )
    texts = tokenizer.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [match[1] if (match := ANSWER.search(text)) else "" for text in texts]
    right = sum(answer == row["reward_model"]["ground_truth"] for answer, row in zip(answers, asked, strict=True))
    assert 0.15 <= right / len(asked) <= 0.5
