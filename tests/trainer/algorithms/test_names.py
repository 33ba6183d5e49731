"""The names in the schema, in the registries and in the documentation agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from asyncrl.config.sections.algorithm import AlgorithmConfig, FilterGroupsConfig, RolloutCorrectionConfig
from asyncrl.config.sections.base import ConfigSection
from trainer.algorithms.advantages import ESTIMATORS
from trainer.algorithms.corrections import REJECTIONS, WEIGHTS
from trainer.algorithms.losses import KL_ESTIMATES, POLICY_OBJECTIVES
from trainer.batches import GROUP_FILTERS
from trainer.engines.compute.packing import AGGREGATIONS

DOCS = Path(__file__).parents[3] / "docs" / "algorithms"
PAGES = sorted(DOCS.glob("*.md"))


def names(section: type[ConfigSection], key: str) -> set[str]:
    """Return the built-in names of a key, without those of a list's entries."""
    options = section.model_fields[key].annotation
    literals = [option for option in (options, *get_args(options)) if get_origin(option) is Literal]
    return {name for literal in literals for name in get_args(literal)}


def test_the_registered_names_are_those_of_the_schema() -> None:
    assert names(AlgorithmConfig, "adv_estimator") == set(ESTIMATORS)
    assert names(AlgorithmConfig, "policy_loss") == set(POLICY_OBJECTIVES)
    assert names(AlgorithmConfig, "kl_loss_type") == set(KL_ESTIMATES)
    assert names(AlgorithmConfig, "kl_penalty") == {name for name in KL_ESTIMATES if not name.endswith("+")}
    assert names(AlgorithmConfig, "loss_agg_mode") == set(AGGREGATIONS)
    assert names(RolloutCorrectionConfig, "rollout_is") == {"none", *WEIGHTS}
    assert names(RolloutCorrectionConfig, "rollout_rs") == {"none", *REJECTIONS}
    assert names(FilterGroupsConfig, "drop") == set(GROUP_FILTERS)


@pytest.mark.parametrize("name", sorted(ESTIMATORS | POLICY_OBJECTIVES))
def test_every_estimator_and_objective_has_a_page(name: str) -> None:
    title, *_ = (DOCS / f"{name}.md").read_text().splitlines()
    assert f"`adv_estimator: {name}`" in title or f"`policy_loss: {name}`" in title


@pytest.mark.parametrize(
    ("page", "section", "key"),
    [
        ("kl", AlgorithmConfig, "kl_penalty"),
        ("aggregation", AlgorithmConfig, "loss_agg_mode"),
        ("corrections", RolloutCorrectionConfig, "rollout_rs"),
        ("corrections", RolloutCorrectionConfig, "rollout_is"),
        ("corrections", RolloutCorrectionConfig, "rollout_is_mode"),
    ],
)
def test_every_choice_is_on_its_page(page: str, section: type[ConfigSection], key: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    missing = {name for name in names(section, key) - {"none"} if not re.search(rf"`({key}: )?{name}`", text)}
    assert not missing


@pytest.mark.parametrize("page", [page.name for page in PAGES if page.name != "index.md"])
def test_every_page_is_in_the_index_and_names_its_source(page: str) -> None:
    text = (DOCS / page).read_text()
    assert f"]({page})" in (DOCS / "index.md").read_text()
    assert re.search(r"\*\*Source\.\*\*.*http", text, re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_pages_have_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (DOCS / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_in_the_pages_exist(page: Path) -> None:
    """Every `key: value` in backticks is a key of the schema."""
    fields = {name for section in _sections(ConfigSection) for name in section.model_fields}
    for key in re.findall(r"`([a-z_][\w.]*): [^`]+`", page.read_text()):
        assert key.rsplit(".", 1)[-1] in fields, f"{page.name} mentions {key}"


def _sections(of: type[ConfigSection]) -> list[type[ConfigSection]]:
    return [found for section in of.__subclasses__() for found in [section, *_sections(section)]]
