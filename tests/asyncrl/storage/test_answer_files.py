"""The file of a validation's answers is read as it was written, whatever is in the texts and wherever it was cut."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from asyncrl.core.answer_statistics import Graded
from asyncrl.storage.answer_files import Answer, AnsweredPrompt, append_answers, prompt_digest, read_answers
from tests.fakes.parts import make_prompt

ANSWER = Answer(1.0, True, "4", "It is 4.", 5, "stop", {"acc": 1.0})
PROMPT = AnsweredPrompt(3, "d1", "sums", ({"role": "user", "content": "2+2?"},), "4", (ANSWER,))


def test_answers_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    failed = replace(PROMPT, number=1, answers=(), error="the prompt is too long")
    append_answers(file, PROMPT)
    append_answers(file, failed)
    assert read_answers(file) == {1: failed, 3: PROMPT}
    assert list(read_answers(file)) == [1, 3], "in the order of the set"
    assert ANSWER.graded == Graded(1.0, True, "4", 5, "stop")
    assert read_answers(tmp_path / "none.jsonl") == {}


def test_the_last_line_of_a_prompt_counts(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    append_answers(file, replace(PROMPT, answers=(), error="an engine crashed"))
    append_answers(file, PROMPT)
    assert read_answers(file) == {3: PROMPT}


def test_a_file_that_was_cut_at_any_byte_loses_at_most_its_last_prompt(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    for number in range(3):
        append_answers(file, replace(PROMPT, number=number))
    whole = file.read_bytes()
    line = len(whole) // 3
    for cut in range(len(whole) + 1):
        file.write_bytes(whole[:cut])
        kept = list(read_answers(file))
        assert kept == list(range((cut + 1) // line)), "a complete line counts without its newline, too"
        append_answers(file, replace(PROMPT, number=9))
        assert list(read_answers(file)) == [*kept, 9]


@given(st.text(st.characters(codec=None), max_size=20), st.floats(), st.integers())
@example("\ud800", 0.0, 0)
def test_any_text_and_number_can_be_written(tmp_path_factory, text: str, number: float, count: int) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    message = {"role": "user", "content": text}
    odd = Answer(number if math.isfinite(number) else 0.0, False, text, text, 1, "stop", {}, (message,))
    append_answers(file, replace(PROMPT, prompt=(message,), ground_truth={"a": [number, count, text]}, answers=(odd,)))
    assert len(file.read_bytes().splitlines()) >= 1
    assert file.read_bytes().count(b"\n") == 1
    json.loads(file.read_bytes())
    assert list(read_answers(file)) == [3]


def test_lines_of_another_kind_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"number": "x"}\n[]\nnull\n{"number": 1}\n\xff\n')
    append_answers(file, PROMPT)
    assert list(read_answers(file)) == [3]


def test_a_digest_is_of_tokens_source_and_truth() -> None:
    base = make_prompt(1, 2, data_source="a", ground_truth="x")
    same = make_prompt(1, 2, data_source="a", ground_truth="x", extra_info={"index": 4})
    others = [
        make_prompt(1, 3, data_source="a", ground_truth="x"),
        make_prompt(1, 2, data_source="b", ground_truth="x"),
        make_prompt(1, 2, data_source="a", ground_truth="y"),
    ]
    assert prompt_digest(base) == prompt_digest(same)
    assert len({prompt_digest(one) for one in (base, *others)}) == 4
