"""Every example of docs/extending.md is configured as its first line says, passes the checks, and computes what its
text says."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from asyncrl.config.compose import load_config
from asyncrl.config.import_path import load_function, own_code
from asyncrl.config.problems import ConfigProblem
from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm import RolloutCorrectionConfig
from asyncrl.core.ports import Score
from asyncrl.core.trajectory import Trajectory, single_turn
from asyncrl.core.types import FinishReason, Prompt, Span, Turn
from asyncrl.weights.transport import OwnChunk, check_transport
from rollouter.prompts.check import check_own_data
from rollouter.prompts.dataset import OwnRows
from rollouter.prompts.source import own_order
from rollouter.rewards.scorer import check_own_manager, load_scorer
from trainer.algorithms.advantages import AdvantageInputs, advantage_estimator
from trainer.algorithms.corrections import importance_weights, rejection_mask
from trainer.algorithms.losses import Rows, kl_estimate, policy_terms
from trainer.algorithms.own_functions import check_own_functions
from trainer.algorithms.rewards import Trajectories
from trainer.engines.compute.packing import LossCounts

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
EXAMPLES = {
    heading: code
    for heading, code in re.findall(r"^## (.+?)$.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configured(heading: str) -> Config:
    """Write the example to mine.py, and return the configuration with the overrides in its comments."""
    code = EXAMPLES[heading]
    Path("mine.py").write_text(code)
    overrides = [word for line in code.splitlines() if line.startswith("# ") for word in line[2:].split()]
    return load_config(None, overrides)


def problems(config: Config) -> Iterator[ConfigProblem]:
    yield from check_own_data(config)
    yield from check_own_functions(config)
    yield from check_transport(config)
    yield from check_own_manager(config)


@pytest.mark.parametrize("heading", EXAMPLES)
def test_an_example_is_short_and_passes_the_checks(here: Path, heading: str) -> None:
    assert len(EXAMPLES[heading].splitlines()) < 25
    assert list(problems(configured(heading))) == []


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_estimator_subtracts_the_median_of_a_group(here: Path) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 0]]).bool()
    scores = numbers(1.0, 0.25, 3.0)
    inputs = AdvantageInputs(
        scores[:, None] * mask, scores, mask, torch.tensor([0, 0, 1]), Trajectories.of(torch.arange(3))
    )
    actual = advantage_estimator(configured("Advantage estimator").algorithm)(inputs)
    assert actual.advantages.tolist() == [[0.75, 0.75, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_the_loss_weighs_the_ratio(here: Path) -> None:
    log_probs = numbers(-1.0, -2.0).requires_grad_()
    algorithm = configured("Policy loss").algorithm
    terms = policy_terms(log_probs, numbers(-1.0, -2.0), numbers(1.0, -0.5), Rows(torch.tensor([0, 0]), 1), algorithm)
    weight = 1 / (1 + np.exp(-4.0))
    assert terms.loss.tolist() == pytest.approx([-weight, 0.5 * weight])
    assert terms.ratio.tolist() == [1.0, 1.0]
    assert torch.autograd.grad(terms.loss.sum(), log_probs)[0].tolist() == pytest.approx([-weight, 0.5 * weight])


def test_the_kl_estimate_is_quadratic_and_then_linear(here: Path) -> None:
    name = configured("KL estimator").algorithm.kl_loss_type
    assert kl_estimate(numbers(-1.0, -1.0), numbers(-1.5, -4.0), name).tolist() == pytest.approx([0.125, 2.5])


def test_the_aggregation_divides_by_the_root_of_the_length(here: Path) -> None:
    name = configured("Loss aggregation").algorithm.loss_agg_mode
    weigh = load_function(name, "algorithm.loss_agg_mode", {})
    assert weigh(LossCounts(numbers(4.0, 9.0, 0.0), 13.0, 2.0, 100.0)).tolist() == pytest.approx([1 / 4, 1 / 6, 1 / 2])


def test_the_correction_has_own_weights_and_an_own_statistic(here: Path) -> None:
    correction = configured("Off-policy correction").algorithm.rollout_correction
    rows, log_ratio = Rows(torch.tensor([0, 0, 1, 1]), 2), numbers(0.2, 0.4, 5.0, 0.0)
    weights = importance_weights(log_ratio, rows, correction)
    assert weights.weights.tolist() == pytest.approx([np.exp(0.3), np.exp(0.3), 2.0, 2.0]), "bounded by the threshold"
    assert rejection_mask(log_ratio, rows, correction).tolist() == [True, True, False, False]
    assert (
        correction.rejections
        == RolloutCorrectionConfig(rollout_rs=("mine.py:spread",), rollout_rs_threshold=(2.0,)).rejections
    )


def test_the_filter_drops_what_is_too_easy(here: Path) -> None:
    drop = load_function(configured("Filter of groups").algorithm.filter_groups.drop, "drop", {})
    assert [drop(rewards) for rewards in ([0.0, 0.0], [1.0, 0.0], [1.0] * 19 + [0.0])] == [True, False, True]


def test_the_data_set_has_rows_for_both_splits(here: Path) -> None:
    data = configured("Data set").data
    train, val = (OwnRows.load(data, split) for split in ("train", "val"))
    assert train is not None
    assert val is not None
    assert (len(train), len(val)) == (512, 16)
    assert val.row(0)["prompt"] == "512 + 512 ="


def prompt(length: int) -> Prompt:
    return Prompt(np.zeros(length, np.int32))


def test_the_sampler_begins_with_short_prompts(here: Path) -> None:
    sampler = str(configured("Sampler").data.sampler)
    prompts = [prompt(3), prompt(1), prompt(2)]
    assert own_order(sampler, prompts, seed=0, epoch=0).tolist() == [1, 2, 0]
    assert sorted(own_order(sampler, prompts, seed=0, epoch=1).tolist()) == [0, 1, 2]


def response(length: int) -> Trajectory:
    ids = np.ones(length, np.int32)
    return single_turn(prompt(1), Turn(ids, np.zeros(length, np.float32), (Span(0, 0),), FinishReason.STOP))


def scores(config: Config, *lengths: int) -> list[Score]:
    scorer = load_scorer(config, {}, lambda ids: "x" * len(ids))
    return anyio.run(scorer.score, prompt(1), [response(length) for length in lengths])


def test_the_reward_manager_prefers_the_longest(here: Path) -> None:
    config = configured("Reward manager")
    assert [score.reward for score in scores(config, 2, 5, 3)] == [0.0, 1.0, 0.0]
    assert [score.extra for score in scores(config, 2)] == [{"length": 2.0}]


def test_the_transport_stores_reads_and_frees_a_chunk(here: Path) -> None:
    backend = configured("Weight sync").weight_sync.backend
    stored = OwnChunk.put(backend, {"a": np.arange(3)})
    assert pickle.loads(pickle.dumps(stored)).get()["a"].tolist() == [0, 1, 2]
    stored.drop()
    assert not list(here.glob("weights-*"))


CODE = """
import torch
def raises(log_probs, ref_log_probs):
    return log_probs - missing
def takes_one(log_probs):
    return log_probs
def wrong_shape(log_probs, ref_log_probs):
    return log_probs[:1]
def not_finite(log_probs, ref_log_probs):
    return log_probs / 0
def frozen(log_probs, old_log_probs, advantages, rows, algorithm):
    return -advantages * log_probs.detach()
number = 3
def one_weight(counts):
    return counts.row_tokens[:1]
def few(prompts, epoch, seed):
    return range(len(prompts) - 1)
def random_order(prompts, epoch, seed):
    return torch.randperm(len(prompts)).numpy()
def no_prompt(split):
    return [{"question": "?"}]
class Silent:
    whole_group = False
    def __init__(self, functions, config, decode): pass
    def score(self, prompt, trajectories): return []
class Loses:
    def put(self, chunk): return 1
    def get(self, handle): return {}
    def drop(self, handle): pass
class Widens(Loses):
    def put(self, chunk): return chunk
    def get(self, handle): return {name: array.astype("float64") for name, array in handle.items()}
class Unborn:
    def __init__(self):
        raise ValueError("no bucket")
class Unfinished:
    def put(self, chunk): raise OSError("no room")
class Raises(Silent):
    async def score(self, prompt, trajectories): raise KeyError("lost")
def no_rows(split):
    return 3
"""


@pytest.mark.parametrize(
    ("key", "name", "consequence"),
    [
        ("algorithm.kl_loss_type", "raises", "mine.py:4: NameError: name 'missing' is not defined"),
        ("algorithm.kl_loss_type", "takes_one", "mine.py:5: it is called with (log_probs, ref_log_probs): takes_one"),
        ("algorithm.kl_loss_type", "wrong_shape", "mine.py:7: mine.py:wrong_shape returned a tensor of shape (1,); "),
        ("algorithm.kl_loss_type", "not_finite", "mine.py:9: mine.py:not_finite returned numbers that are not finite"),
        ("algorithm.policy_loss", "frozen", "mine.py:11: mine.py:frozen returned a loss without a gradient"),
        ("algorithm.loss_agg_mode", "one_weight", "expected a number or a tensor of shape (4,)"),
        ("algorithm.policy_loss", "number", "mine.py:number is a int, not a function"),
        ("data.sampler", "few", "expected 8 prompt numbers from 0 to 7"),
        ("data.sampler", "random_order", "two calls for the same epoch returned different orders"),
        ("reward.manager", "Silent", "it needs `async def score"),
        ("reward.manager", "Raises", "KeyError: 'lost'"),
        ("weight_sync.backend", "Loses", "mine.py:26: get returned another tensor 'a'"),
        ("weight_sync.backend", "Unfinished", "it has no method get"),
        ("weight_sync.backend", "Widens", "get returned another tensor 'a'"),
        ("weight_sync.backend", "Unborn", "ValueError: no bucket"),
        ("data.dataset", "no_rows", "mine.py:40: it returned 3 for 'train'; expected a sequence of rows"),
        ("data.dataset", "no_prompt", "mine.py:no_prompt train, row 0: there is no field 'prompt'"),
    ],
)
def test_a_function_that_cannot_work_is_an_error_with_its_place(
    here: Path, key: str, name: str, consequence: str
) -> None:
    (here / "mine.py").write_text(CODE)
    section, field = key.split(".")
    overrides: dict[str, Any] = {section: {field: f"mine.py:{name}"}}
    (found,) = problems(Config.model_validate(overrides))
    assert (found.key, found.value) == (key, f"mine.py:{name}")
    assert consequence in found.consequence


def test_the_code_that_travels_is_what_the_configuration_names(here: Path) -> None:
    (here / "mine.py").write_text("")
    (here / "losses.py").write_text("")
    (here / "tools").mkdir()
    (here / "tools" / "__init__.py").write_text("")
    names = ["mine.py:loss", f"{here}/mine.py:other", "losses:clip", "tools.search.Search", "json:loads", "gone.py:f"]
    assert own_code([*names, "http://host:80/v1", "grpo"]) == [here / "mine.py", here / "losses.py", here / "tools"]
