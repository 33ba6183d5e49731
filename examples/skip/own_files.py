"""The judge of `my_stage.py` with a class for verl's interface: it keeps its own files, and there is no fingerprint.

python examples/skip/ask_twice.py own_files
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from skip import BaseSkip, SkipAction, SkipManager, register_skip


@register_skip("grade")
class GradeSkip(BaseSkip):
    """The role of `grade`: a file for each question and response."""

    support_actions = (SkipAction.CACHE,)
    support_online_step = True

    def extract_step(self, row: int, response: str, answer: str) -> int:
        return row

    def meet_precondition(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        return self._file(*args).exists()

    def warp_function(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
        return float(json.loads(self._file(*args).read_text()))

    def prepare_data(self, step: int, result: float, *args: Any, **kwargs: Any) -> None:
        file = self._file(*args)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result))

    def _file(self, row: int, response: str, answer: str) -> Path:
        name = hashlib.sha256(f"{answer}\n{response}".encode()).hexdigest()[:16]
        return Path(self.dump_dir) / "grades" / f"{row}-{name}.json"


@SkipManager.annotate(role="grade")
def grade(row: int, response: str, answer: str) -> float:
    """Return a grade from 0 to 1, after a delay that simulates a request to a service."""
    time.sleep(0.25)
    return float(response.endswith(answer))


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]) -> float:
    """Return the reward of a response; configured as `reward.function`."""
    return grade(extra_info["index"], solution_str, ground_truth)
