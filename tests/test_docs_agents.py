"""The examples of docs/agents.md and docs/data.md are valid and behave as the pages describe."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from asyncrl.config.compose import check_config
from asyncrl.config.rules import check_rules
from asyncrl.config.schema import Config
from asyncrl.core.failures import DataError
from asyncrl.core.trajectory import CallStatus
from asyncrl.core.types import DropReason, FinishReason, SampleId
from asyncrl.observe.metrics.registry import describe
from asyncrl.storage.data_cache import DataCache
from rollouter.agent.parsing import known_formats
from rollouter.interactions.base import EpisodeContext
from rollouter.interactions.loading import BUILT_IN as INTERACTIONS
from rollouter.interactions.loading import load_interactions
from rollouter.prompts.chat_template import load_tokenizer
from rollouter.prompts.dataset import FileRows, parse_row
from rollouter.prompts.source import load_prompts
from rollouter.tools import ToolContext
from rollouter.tools.loading import BUILT_IN as TOOLS
from rollouter.tools.loading import LoadedMcpServer, load_tools
from rollouter.tools.toolbox import Toolbox

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("agents", "data")}
NAMED = re.compile(r"\A# (\S+\.(?:py|yaml))\n")


def blocks(page: str, language: str) -> dict[str, str]:
    """Return the blocks of this language by the file name in their first line."""
    found = re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)
    named = {}
    for text in found:
        match = NAMED.match(text)
        assert match is not None, f"a block of docs/{page}.md does not begin with its file's name:\n{text}"
        named[match[1]] = text
    return named


def rows(page: str) -> list[Mapping[str, Any]]:
    return [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGES[page], flags=re.DOTALL)]


YAML = [(page, name) for page in PAGES for name in blocks(page, "yaml")]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that has every block as a file."""
    monkeypatch.chdir(tmp_path)
    for page in PAGES:
        for name, text in {**blocks(page, "python"), **blocks(page, "yaml")}.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def config(here: Path, name: str) -> Config:
    found = check_config(here / name).config
    assert found is not None
    assert [str(problem) for problem in check_rules(found)] == []
    return found


@pytest.mark.parametrize(("page", "name"), YAML)
def test_every_configuration_is_valid(here: Path, page: str, name: str) -> None:
    turns = config(here, name).rollout.multi_turn
    # The machine may lack the sandbox that the tool `python` needs.
    load_tools([tool for tool in turns.tools if tool.class_name != "python"])
    load_interactions(turns.interactions)
    assert turns.format in known_formats()


async def test_the_function_is_a_tool(here: Path) -> None:
    (tool,) = load_tools(config(here, "shop.yaml").rollout.multi_turn.tools)
    assert not isinstance(tool, LoadedMcpServer)
    parameters = tool.schema.schema["function"]["parameters"]
    assert list(parameters["properties"]) == ["item", "number"] and parameters["required"] == ["item"]
    async with Toolbox([tool]) as toolbox, toolbox.session(ToolContext("val", 0, extra_info={})) as session:
        asked = [await session.call("price", json.dumps(one), turn=0) for one in ({"item": "pear", "number": 2}, {})]
        asked.append(await session.call("price", '{"item": "plum"}', turn=0))
        results = [(one.call.status, one.call.result) for one in asked]
    assert results[0] == ("ok", "8") and results[1][0] == "bad_arguments"
    assert results[2] == ("refused", "there is no plum here; there is apple, pear")


async def test_the_tool_class_reads_its_row(here: Path) -> None:
    (tool,) = load_tools(config(here, "basket.yaml").rollout.multi_turn.tools)
    (row,) = rows("agents")
    context = ToolContext("val", 0, extra_info=parse_row(row, "docs/agents.md").extra_info)
    async with Toolbox([tool]) as toolbox, toolbox.session(context) as session:
        first = await session.call("buy", '{"cents": 4}', turn=0)
        assert (first.call.result, first.call.reward, first.done) == ("bought; 4 cents left", 0.1, False)
        assert (await session.call("buy", '{"cents": 5}', turn=1)).call.status == "refused"
        assert (await session.call("buy", '{"cents": 4}', turn=2)).done
        assert await session.scores() == {"buy": 1.0}


async def test_the_environment_answers_and_is_chosen_by_a_row(here: Path) -> None:
    loaded = load_interactions(config(here, "coach.yaml").rollout.multi_turn.interactions)
    (*_, row) = rows("data")
    extra_info = parse_row(row, "docs/data.md").extra_info
    async with loaded.session(EpisodeContext("val", 0, extra_info=extra_info)) as session:
        assert await session.reset() == ({"role": "user", "content": "Multiply."},)
        reply = await session.step("2800", ())
        assert (reply.text, reply.reward, reply.done) == ("Write the answer behind a #.", -0.05, False)
        assert (await session.step("#2800", ())).done
    chosen = {"interaction_kwargs": {"name": "retry", "hint": "There is none."}}
    async with loaded.session(EpisodeContext("val", 0, extra_info=chosen)) as session:
        with pytest.raises(DataError, match="hint"):
            await session.reset()


def test_generated_and_printed_rows_can_be_read(here: Path) -> None:
    runpy.run_path(str(here / "make_rows.py"))
    data = config(here, "data.yaml").data
    found = FileRows.open(data.train_files, key="data.train_files", cache=DataCache(here / "cache"))
    assert len(found) == 64
    assert parse_row(found.row(0), found.where(0)).data_source == "products"
    for row in (*rows("agents"), *rows("data")):
        assert parse_row(row, "docs").messages


def test_rows_with_other_columns_load(here: Path) -> None:
    (here / "questions.json").write_text(json.dumps([{"question": "2+2?", "answer": "4"}]))
    settings = config(here, "columns.yaml")
    prompt = load_prompts(settings, load_tokenizer(settings.model), here / "cache").train.at(SampleId(0, 1))
    assert (prompt.messages, prompt.ground_truth) == (({"role": "user", "content": "2+2?"},), "4")


def test_the_tables_are_complete() -> None:
    agents = PAGES["agents"]
    for reason in FinishReason:
        assert f"| `{reason}` |" in agents
    for status in get_args(CallStatus):
        assert f"| `{status}` |" in agents
    for name in (*TOOLS, *INTERACTIONS):
        assert f"`{name}`" in agents
    assert f"DROPPED({DropReason.SURPLUS})" in agents


def test_named_metrics_and_formats_exist() -> None:
    agents = PAGES["agents"]
    for name in re.findall(
        r"`((?:rollouter|validation|queue|rows|reward|sampled_tokens|response_tokens)/[^` ]+)`", agents
    ):
        describe(name)
    table = agents[agents.index("| `format` | models |") :].partition("\n\n")[0]
    shown = set(re.findall(r"`([a-z0-9_]+)`", re.sub(r"\|[^|]*\|$", "|", table, flags=re.MULTILINE))) - {"format"}
    assert shown - {"no_tools"} <= set(known_formats())


@pytest.mark.parametrize("page", PAGES)
def test_links_have_a_target(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        file = (DOCS / path).resolve() if path else DOCS / f"{page}.md"
        assert file.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}, target
