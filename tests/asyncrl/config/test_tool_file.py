"""Files of tools: asyncrl's and verl's, in a launch and in `asyncrl migrate`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.compose import check_config, load_config, value_sources
from asyncrl.config.from_verl.migration import migrate
from rollouter.tools.loading import LoadedTool, load_tools

VERLS_FILE = """\
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "Calculates the reward."
        parameters:
          type: "object"
          properties: {answer: {type: "string", description: "The answer, digits."}}
          required: ["answer"]
  - class_name: "verl.tools.sandbox_fusion_tools.SandboxFusionTool"
    config: {sandbox_fusion_url: "http://sandbox", num_workers: 8, type: native}
    tool_schema:
      type: "function"
      function:
        name: "code_interpreter"
        parameters: {type: "object", properties: {code: {type: "string"}}, required: ["code"]}
  - class_name: "verl.tools.search_tool.SearchTool"
    config: {retrieval_service_url: "http://search", type: native}
    tool_schema:
      type: "function"
      function: {name: "search", parameters: {type: "object", properties: {query_list: {type: "array"}}}}
  - class_name: own_tools.Lookup
    config: {type: native, url: "${oc.env:LOOKUP_URL}"}
"""


def with_file(path: object, *more: str) -> list[str]:
    return ["rollout.multi_turn.enable=true", f"rollout.multi_turn.tool_config_path={path}", *more]


def test_a_file_of_verl_gives_a_launch_and_a_migration_the_same_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOKUP_URL", "http://lookup")
    file = tmp_path / "tools.yaml"
    file.write_text(VERLS_FILE)
    overrides = with_file(file, "rollout.multi_turn.tools=[{class_name: calculator}]", "rollout.response_length=500")
    config = check_config(None, overrides).config
    assert config is not None
    tools = config.rollout.multi_turn.tools
    assert config.rollout.multi_turn.tool_config_path is None
    expected = [
        ("calculator", None, {}),
        ("gsm8k", "calc_gsm8k_reward", {}),
        ("python", "code_interpreter", {}),
        ("search", None, {}),  # verl's takes a list of queries
        ("own_tools.Lookup", None, {"url": "http://lookup"}),
    ]
    schemas = [one.tool_schema and one.tool_schema["function"]["name"] for one in tools]
    assert [(one.class_name, name, one.config) for one, name in zip(tools, schemas, strict=True)] == expected
    turns = "actor_rollout_ref.rollout.multi_turn"
    verl = [f"{turns}.enable=true", f"{turns}.tool_config_path={file}"]
    migrated: list[dict[str, Any]] = migrate(None, verl).keys["rollout.multi_turn.tools"].value
    launched = [one.model_dump(exclude_defaults=True) for one in tools[1:]]
    launched[-1]["config"]["url"] = "${oc.env:LOOKUP_URL}"
    assert migrated == launched
    gsm8k, python = load_tools(tools[1:3])
    assert isinstance(gsm8k, LoadedTool) and isinstance(python, LoadedTool)
    assert (type(gsm8k.tool).__name__, gsm8k.name) == ("Gsm8kTool", "calc_gsm8k_reward")
    assert gsm8k.schema.problem({"answer": 3}) == "answer: 3 is not of type 'string'"
    assert (type(python.tool).__name__, python.name) == ("PythonTool", "code_interpreter")


def test_the_plan_names_the_origin_of_the_tools_and_a_saved_configuration_needs_no_file(tmp_path: Path) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text("tools: [{class_name: calculator, timeout_s: 3.0}]")
    overrides = with_file(file, "rollout.response_length=500")
    config = load_config(None, overrides)
    assert value_sources(None, overrides, config)["rollout.multi_turn.tools"] == "command line"
    (tmp_path / "off.yaml").write_text(f"rollout: {{multi_turn: {{tool_config_path: {tmp_path}/nope.yaml}}}}")
    assert check_config(tmp_path / "off.yaml").config is not None, "the tools of a run without them are not read"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- class_name: calculator", "tool_config_path: it cannot be used: it has no list `tools`"),
        ("tools: [calculator]", "tool_config_path: it cannot be used: tools.0 is 'calculator'"),
        ("tools: [{class_name: calculator, timeout: 3}]", "tools.0.timeout: there is no such key"),
        ("tools: [", "tool_config_path: it cannot be used: while parsing"),
        (None, "tool_config_path: it cannot be used: .*No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "tools.yaml").write_text(text)
    outcome = check_config(None, with_file(tmp_path / "tools.yaml"))
    shown = [f"{one.key}: {one.consequence}" for one in outcome.problems]
    assert outcome.config is None and len(shown) == 1
    assert re.search(problem, shown[0]), shown
