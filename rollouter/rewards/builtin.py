"""The built-in reward functions, with verl's names for the arguments."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from asyncrl.failures import UserCodeError


def exact_match(
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    pattern: str | None = None,
) -> list[float]:
    """1.0 where the answer is the ground truth as text, else 0.0; surrounding white space does not count.

    `pattern` is a regular expression: the answer is group 1 of its last match, and a response without a match scores
    0.0. Without one the answer is what follows the last `#`, as in `#### 42` (GSM8K), or the whole response.
    """
    truths = [_text(truth) for truth in ground_truths]
    if pattern is not None:
        answers: list[tuple[str | None, ...]] = [(_last_group(pattern, text),) for text in solution_strs]
    else:
        answers = [(text.strip(), text.rpartition("#")[2].strip()) for text in solution_strs]
    return [float(truth in answer) for answer, truth in zip(answers, truths, strict=True)]


def _last_group(pattern: str, text: str) -> str | None:
    groups = [match[1] for match in re.finditer(pattern, text)]
    return groups[-1].strip() if groups and groups[-1] is not None else None


def math_verify(
    *, data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], timeout_s: int = 5
) -> float:
    """1.0 where math-verify finds the response's last answer equal to the ground truth, else 0.0.

    The ground truth is LaTeX or a plain expression. `timeout_s` bounds each parse and the comparison, by a signal: the
    function only runs in the main thread of a process. What takes longer (a response may well say 9^9^9^9) scores 0.0.

    Raises:
        ValueError: the ground truth itself cannot be parsed.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # a response that it cannot parse is no event
    truth = _parsed_truth(_text(ground_truth), timeout_s)
    return float(verify(truth, parse(solution_str, parsing_timeout=timeout_s), timeout_seconds=timeout_s))


@lru_cache(maxsize=1024)
def _parsed_truth(truth: str, timeout_s: int) -> Any:
    from math_verify import parse

    # Bare LaTeX is only recognized between dollar signs.
    parsed = parse(truth, parsing_timeout=timeout_s) or parse(f"${truth}$", parsing_timeout=timeout_s)
    if not parsed:
        raise ValueError(f"math_verify cannot parse the ground truth {truth!r}")
    return parsed


def reasoning_gym(
    *,
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any]],
    tag: str = "answer",
) -> list[float]:
    """The task's own `score_answer`, on what stands in the last `<tag>…</tag>`, or else on the whole response.

    Raises:
        ValueError: a row has no `extra_info.entry` with the task's name in its metadata.
    """
    from reasoning_gym.utils import extract_answer

    scores = []
    for text, info in zip(solution_strs, extra_infos, strict=True):
        entry = info.get("entry")
        metadata = entry.get("metadata") if isinstance(entry, Mapping) else None
        if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
            raise ValueError(
                "the row has no extra_info.entry with metadata.source_dataset; the reasoning_gym reward scores prompts "
                "made by data.reasoning_gym, or rows that carry the task's entry"
            )
        answer = extract_answer(text, tag_name=tag)
        scores.append(
            float(_score_answer(metadata["source_dataset"])(text.strip() if answer is None else answer, entry))
        )
    return scores


@cache
def _score_answer(task: str) -> Any:
    import reasoning_gym as gym

    return gym.get_score_answer_fn(task)


def _text(truth: Any) -> str:
    if truth is None:
        raise UserCodeError("the row has no reward_model.ground_truth to compare with")
    return str(truth).strip()


BUILT_IN: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
}
BATCH = frozenset({"exact_match", "reasoning_gym"})
"""Score a whole group in one call: each response takes microseconds."""
IN_PROCESS = frozenset({"math_verify"})
"""Called in a worker process: it needs a main thread for its time limit, and sympy can hold the interpreter."""
