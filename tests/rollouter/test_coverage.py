"""Whether records cover a run, so that it needs no engine; and what is said if they do not after all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.failures import ConfigError
from asyncrl.ports import Publication
from asyncrl.types import Prompt
from rollouter.coverage import NoFleet, ToCome, first_uncovered
from skip import SkipManager
from skip.catalog import find
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import ListPrompts, make_prompt
from tests.rollouter.test_pump import Rig
from tests.rollouter.test_pump_skip import recording, run

PROMPTS = [make_prompt(1, 2), make_prompt(3, 4), make_prompt(5, 6)]


async def record(tmp_path: Path, total: int, prompts: list[Prompt] = PROMPTS) -> None:
    await run(Rig(skip=recording(tmp_path), fleet=FakeFleet(), total=total, prompts=prompts), total)


def uncovered(tmp_path: Path, total: int, prompts: list[Prompt] = PROMPTS, **settings: Any) -> str:
    config = Rig(skip=recording(tmp_path, **settings), total=total, prompts=prompts).config
    with SkipManager.session(config):
        return first_uncovered(config, ListPrompts(prompts), ToCome(total))


async def test_a_run_whose_samples_are_all_recorded_is_covered_over_epochs(tmp_path: Path) -> None:
    await record(tmp_path, 5)
    assert uncovered(tmp_path, 5) == ""


async def test_the_first_that_is_not_is_named_with_the_reason(tmp_path: Path) -> None:
    await record(tmp_path, 4)
    assert uncovered(tmp_path, 5).startswith("sample_1_5 has no record that can be used in ")
    assert uncovered(tmp_path, 4, steps="1-2") == "sample_0_3 is not among skip.async_rollout.steps=1-2"
    (find(tmp_path)[1].path / "manifest.json").write_text("{}")
    assert uncovered(tmp_path, 4).startswith("sample_0_2 has no record")


async def test_another_prompt_is_not_covered_by_the_record_of_its_index(tmp_path: Path) -> None:
    await record(tmp_path, 3)
    other = [*PROMPTS[:2], make_prompt(7, 8)]
    assert uncovered(tmp_path, 3, other).startswith("sample_0_3 has no record")
    with pytest.raises(ConfigError, match=r"on_mismatch=error: the record .* differs in prompt_ids"):
        uncovered(tmp_path, 3, other, on_mismatch="error")


async def test_any_record_covers_a_run_that_repeats(tmp_path: Path) -> None:
    await record(tmp_path, 1)
    assert uncovered(tmp_path, 9, action="repeat") == ""
    assert uncovered(tmp_path / "empty", 9, action="repeat").startswith("sample_0_1 has no record")


async def test_prompts_that_will_be_dropped_are_passed_over(tmp_path: Path) -> None:
    prompts = [PROMPTS[0], make_prompt(*range(1, 40)), PROMPTS[1], PROMPTS[2]]
    await record(tmp_path, 3, prompts)
    assert uncovered(tmp_path, 3, prompts) == ""
    assert uncovered(tmp_path, 3, [prompts[1]]) == "no prompt can be asked for"


async def test_looking_does_not_count_as_replaying(tmp_path: Path) -> None:
    await record(tmp_path, 2)
    config = Rig(skip=recording(tmp_path), total=2, prompts=PROMPTS).config
    with SkipManager.session(config):
        first_uncovered(config, ListPrompts(PROMPTS), ToCome(2))
        assert SkipManager.status() == {"async_rollout": {}}


async def test_without_engines_nothing_is_generated_and_every_version_is_applied() -> None:
    fleet = NoFleet()
    assert await fleet.apply(Publication(1, 1, 0, {})) == []
    with pytest.raises(ConfigError, match=r"sample_0_9 has no record, and there is no engine .*covered=true"):
        await fleet.generate([], session="sample_0_9")
