"""An evaluation with a fake fleet: what it writes, and what it asks again after it was stopped, killed or changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.config.sections.rollout import RolloutConfig, ValSamplingConfig
from asyncrl.core.answer_statistics import summarize
from asyncrl.core.failures import BugError, ConfigError, DataError, InfraError, UserCodeError
from asyncrl.core.ports import Score
from asyncrl.core.types import Prompt
from asyncrl.storage.answer_files import AnsweredPrompt, read_answers
from rollouter.loading import RolloutTask
from rollouter.validation.evaluation import Evaluation
from tests.fakes.engine import FakeFleet
from tests.fakes.parts import FakeScorer, ListPrompts, make_prompt

PROMPTS = [make_prompt(*range(1, 2 + number), data_source="ab"[number % 2], ground_truth=number) for number in range(6)]


class EvaluationRig:
    def __init__(
        self,
        file: Path,
        *,
        prompts: Sequence[Prompt] = PROMPTS,
        n: int = 2,
        fleet: FakeFleet | None = None,
        scorer: FakeScorer | None = None,
        reward: RewardConfig | None = None,
    ) -> None:
        config = Config(
            rollout=RolloutConfig(
                response_length=8, max_model_len=16, max_concurrent_samples=3, val=ValSamplingConfig(n=n)
            ),
            reward=reward or RewardConfig(),
        )
        source = ListPrompts(prompts)
        task = RolloutTask(source, source, scorer or FakeScorer(), lambda ids: " ".join(map(str, ids)))
        self.file = file
        self.fleet = fleet or FakeFleet()
        self.evaluation = Evaluation(config, task, file, fleet=self.fleet)

    async def run(self) -> dict[int, AnsweredPrompt]:
        with anyio.fail_after(20):
            await self.evaluation.run()
        return read_answers(self.file)

    @property
    def asked(self) -> list[int]:
        return sorted(int(session.split("_")[2]) for session in self.fleet.sessions)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def cut_off(file: Path) -> None:
    """Add half a line, as a process that is killed while it writes."""
    file.write_bytes(file.read_bytes() + b'{"number": 2, "dig')


def figures(answers: dict[int, AnsweredPrompt]) -> Any:
    return summarize([(one.data_source, [answer.graded for answer in one.answers]) for one in answers.values()])


async def test_every_prompt_is_answered_n_times(file: Path) -> None:
    rig = EvaluationRig(file)
    answers = await rig.run()
    assert list(answers) == [0, 1, 2, 3, 4, 5]
    assert [len(one.answers) for one in answers.values()] == [2] * 6
    assert [one.answers[0].text for one in answers.values()][:3] == ["1", "1 2", "1 2 3"]
    assert [one.answers[1].reward for one in answers.values()] == [1, 2, 3, 4, 5, 6]
    assert rig.evaluation.status() == {"prompts": 6, "known": 0, "answered": 6, "failed": 0, "generated_tokens": 42}


async def test_an_evaluation_that_was_stopped_continues_with_what_is_missing(file: Path) -> None:
    whole = figures(await EvaluationRig(file.with_name("whole.jsonl")).run())
    first = EvaluationRig(file, fleet=FakeFleet(hold=True))
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            group.start_soon(first.evaluation.run)
            await first.fleet.until_in_flight("val_0_0", "val_0_1", "val_0_2")
            first.fleet.release("val_0_1")
            await first.fleet.until_in_flight("val_0_3")
            await anyio.sleep(0.05)
            first.evaluation.stop()
    assert list(read_answers(file)) == [1], "those in flight are lost"
    cut_off(file)
    second = EvaluationRig(file)
    answers = await second.run()
    assert second.asked == [0, 2, 3, 4, 5]
    assert second.evaluation.status()["known"] == 1
    assert figures(answers) == whole
    third = EvaluationRig(file)
    await third.run()
    assert third.asked == [], "nothing is missing"


async def test_prompts_that_changed_and_other_numbers_of_answers_are_asked_again(file: Path) -> None:
    await EvaluationRig(file).run()
    changed = [*PROMPTS[:2], make_prompt(9, 9), *PROMPTS[3:]]
    rig = EvaluationRig(file, prompts=changed)
    answers = await rig.run()
    assert rig.asked == [2]
    assert answers[2].answers[0].text == "9 9"
    rig = EvaluationRig(file, prompts=changed, n=3)
    assert [len(one.answers) for one in (await rig.run()).values()] == [3] * 6
    assert rig.asked == [0, 1, 2, 3, 4, 5]


async def test_a_prompt_that_fails_is_named_and_tried_again(file: Path) -> None:
    rig = EvaluationRig(file)
    rig.fleet.fail("val_0_3", DataError("the engine refuses it"))
    answers = await rig.run()
    assert (answers[3].answers, answers[3].error) == ((), "the engine refuses it")
    assert rig.evaluation.status()["failed"] == 1
    again = EvaluationRig(file)
    assert (await again.run())[3].error == ""
    assert again.asked == [3]


async def test_a_failure_ends_the_evaluation_and_keeps_the_answers(file: Path) -> None:
    class Broken(FakeScorer):
        async def score(self, prompt: Prompt, trajectories: Any) -> list[Score]:
            if len(prompt.prompt_ids) == 4:
                raise UserCodeError("boom")
            return await super().score(prompt, trajectories)

    with pytest.raises(UserCodeError, match="val_0_3: boom"):
        await EvaluationRig(file, scorer=Broken()).run()
    kept = set(read_answers(file))
    assert 3 not in kept
    rig = EvaluationRig(file)
    await rig.run()
    assert set(rig.asked) == set(range(6)) - kept
    rig = EvaluationRig(file.with_name("drop.jsonl"), scorer=Broken(), reward=RewardConfig(on_error="drop"))
    assert "boom" in (await rig.run())[3].error


async def test_engines_with_other_weights_are_refused(file: Path) -> None:
    fleet = FakeFleet()
    fleet.replaced = {f"val_0_2{suffix}": 7 for suffix in ("", "_try_2", "_try_3")}
    with pytest.raises(InfraError, match="weights of a run instead of the model's files"):
        await EvaluationRig(file, fleet=fleet).run()


async def test_a_file_that_cannot_be_written_ends_the_evaluation(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, InfraError), match="cannot write"):
        await EvaluationRig(tmp_path).run()


def test_an_evaluation_needs_a_validation_set(file: Path) -> None:
    source = ListPrompts(PROMPTS)
    with pytest.raises(BugError, match="without a validation set"):
        Evaluation(Config(), RolloutTask(source, None, FakeScorer(), str), file, fleet=FakeFleet())
