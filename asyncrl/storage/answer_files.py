"""The answers to a validation set in one file, as lines of JSON for users, their scripts and `asyncrl eval`. Blocking.

    {"number": 17, "digest": "5f0c…", "data_source": "gsm8k", "prompt": [{"role": "user", "content": …}],
     "ground_truth": "42", "error": "",
     "answers": [{"reward": 1.0, "is_correct": true, "answer": "42", "text": "…", "num_tokens": 34,
                  "finish_reason": "stop", "extra": {"acc": 1.0}, "messages": []}, …]}

Each line is a prompt with all its answers, or the error that excluded it. A line is appended when the prompt is done,
so the lines are in order of completion. If a prompt has several lines, the last one counts. A process that is killed
leaves at most one incomplete line, which is ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from asyncrl.core.answer_statistics import Graded
from asyncrl.core.types import Prompt
from asyncrl.storage.run_dir import read_lines
from asyncrl.storage.trajectory_files import open_at_line, plain

ANSWERS = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class Answer:
    """One scored answer."""

    reward: float
    is_correct: bool
    answer: str | None
    """The final answer that the reward function extracted (`pred`); None: none."""
    text: str
    """The last turn of the assistant."""
    num_tokens: int
    """Tokens that the policy sampled, in all turns."""
    finish_reason: str
    extra: Mapping[str, float | None] = field(default_factory=dict)
    """Further numbers that the reward function returned, and parts of the reward."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The whole conversation; empty if the prompt and `text` are all of it."""

    @property
    def graded(self) -> Graded:
        return Graded(self.reward, self.is_correct, self.answer, self.num_tokens, self.finish_reason)


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """One line."""

    number: int
    """Number of the prompt in the validation set, from 0, after filtering."""
    digest: str
    """See `prompt_digest`."""
    data_source: str
    prompt: tuple[Mapping[str, Any], ...]
    """The messages of the prompt."""
    ground_truth: Any
    answers: tuple[Answer, ...] = ()
    error: str = ""
    """Why there are no answers; empty: there are."""


_ANSWERED: TypeAdapter[AnsweredPrompt] = TypeAdapter(AnsweredPrompt)


def prompt_digest(prompt: Prompt) -> str:
    """Return a digest of what the model sees and of what its answers are compared with."""
    content = json.dumps([prompt.data_source, plain(prompt.ground_truth)], sort_keys=True).encode()
    return hashlib.sha256(prompt.prompt_ids.astype("<i4").tobytes() + content).hexdigest()[:16]


def append_answers(path: Path, answered: AnsweredPrompt) -> None:
    """Append a line. An incomplete line of a process that was killed stays a line of its own.

    Raises:
        OSError: the line could not be written completely.
    """
    fields = {name: plain(getattr(answered, name)) for name in answered.__slots__ if name != "answers"}
    fields["answers"] = [{name: plain(getattr(one, name)) for name in one.__slots__} for one in answered.answers]
    text = json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n"
    data = text.encode("utf-8", "replace")  # lone surrogates, which pydantic does not read
    descriptor = open_at_line(str(path), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def read_answers(path: Path) -> dict[int, AnsweredPrompt]:
    """Return the last line of each prompt, by number and in its order; lines that cannot be read are left out.

    Raises:
        OSError: the file exists and cannot be read.
    """
    found: dict[int, AnsweredPrompt] = {}
    try:
        for line in read_lines(path):
            try:
                answered = _ANSWERED.validate_json(line)
            except ValidationError:
                continue
            found[answered.number] = answered
    except FileNotFoundError:
        return {}
    return dict(sorted(found.items()))
