"""Hostile YAML: a few aliases that stand for billions of values, deep nesting, and files of any size."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from asyncrl.config.compose import check_config
from asyncrl.config.from_verl.migration import migrate
from asyncrl.config.yaml_files import load_yaml
from asyncrl.core.failures import ConfigError
from asyncrl.storage.run_dir import SavedConfig
from tests.fakes.command_line import CommandLine


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def aliases(first: str, next_: str, levels: int = 9) -> str:
    lines = [f"a0: &a0 {first}"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} " + next_.format(", ".join([f"*a{level - 1}"] * 9)))
    return "\n".join(lines) + "\n"


HOSTILE = {
    "aliases of lists": (aliases("[x]", "[{}]"), "exceed 1000000 characters"),
    "aliases of mappings": (aliases("{x: 1}", "{{a: [{}]}}"), "exceed 1000000 characters"),
    "merged mappings": (aliases("{x: 1}", "{{<<: [{}]}}"), "exceed 1000000 characters"),
    "aliases of a long text": (f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 50)}]\n", "exceed 1000000 characters"),
    "an alias of its own list": ("a: &a [1, *a]\n", "refers to a value that contains it"),
    "nested lists": ("a: " + "[" * 100_000, "nested more than 50 levels"),
    "nested mappings": ("a: " + "{b: " * 30_000, "nested more than 50 levels"),
    "nested blocks": ("- " * 50_000, "nested more than 50 levels"),
    "many values": ("a: [" + "1," * 100_000 + "1]\n", "exceed 1000000 characters"),
    "a reference of many arguments": (f"a: '${{a:{'b,' * 40_000}b}}'\n", "exceed 1000000 characters"),
    "aliases of a reference": (
        f"a: &a '${{a:{'b,' * 1_000}b}}'\nb: [{', '.join(['*a'] * 50)}]\n",
        "exceed 1000000 characters",
    ),
    "an integer to the base 60": ("a: 1" + ":1" * 100_000, "a number has more than 300 characters"),
    "a hexadecimal integer": ("a: [0x" + "f" * 100_000 + "]\n", "a number has more than 300 characters"),
    "a tagged integer": ("a: !!int 0b" + "1" * 100_000, "a number has more than 300 characters"),
    "a quoted integer": ('seed: !!int "0x' + "f" * 20_000 + '"\n', "a number has more than 300 characters"),
    "a quoted integer of an unspecific tag": ("a: ! '0x" + "f" * 20_000 + "'\n", "more than 300 characters"),
    "a quoted integer of a tag in full": (
        "a: !<tag:yaml.org,2002:int> '0x" + "f" * 20_000 + "'\n",
        "more than 300 characters",
    ),
    "a quoted integer as a key": ('? !!int "0x' + "f" * 20_000 + '"\n: 1\n', "more than 300 characters"),
    "a quoted integer in a list": ('a: [!!int "0x' + "f" * 20_000 + '"]\n', "more than 300 characters"),
    "a quoted integer to the base 60": ('a: !!int "1' + ":1" * 120_000 + '"\n', "more than 300 characters"),
    "an integer as a block": ("a: !!int |-\n  1" + ":1" * 120_000 + "\n", "more than 300 characters"),
    "a quoted number to the base 60": ('a: !!float "1' + ":1" * 120_000 + '"\n', "more than 300 characters"),
    "a number that exceeds a float": ("a: 1" + ":1" * 200 + ".5\n", "more than 300 characters"),
    "an integer in a mapping": ('a: !!int {=: "0x' + "f" * 20_000 + '"}\n', "has the tag tag:yaml.org,2002:int"),
    "an integer in a list with a tag": ("a: !!int [1]\n", "has the tag tag:yaml.org,2002:int"),
    "no boolean": ("a: !!bool maybe\n", "does not fit its tag tag:yaml.org,2002:bool"),
    "no time": ("a: !!timestamp '2024-99-99'\n", "does not fit its tag tag:yaml.org,2002:timestamp"),
    "no integer": ("a: !!int ''\n", "does not fit its tag tag:yaml.org,2002:int"),
    "nested references": ("a: '" + "${" * 5_000 + "b" + "}" * 5_000 + "'", "more than 20 references"),
    "a large file": ("# " + "x" * (256 << 10), "more than 256 KiB"),
}
HOSTILE_CONFIGS = HOSTILE | {
    "aliases of a short list": (f"a: &a [1]\nb: [{', '.join(['*a'] * 9_000)}]\n", "exceed 1000000 characters"),
}
"""OmegaConf takes longer for a value than YAML."""


@pytest.mark.parametrize("name", HOSTILE_CONFIGS)
def test_a_hostile_config_is_refused_quickly_with_its_file_and_the_limit(name: str, tmp_path: Path) -> None:
    text, why = HOSTILE_CONFIGS[name]
    file = write(tmp_path / "my.yaml", text)
    started = time.thread_time()
    (problem,) = check_config(file).problems
    assert time.thread_time() - started < 2
    assert problem.key == "config" and str(file) in problem.consequence and why in problem.consequence


NESTED_REFERENCE = f"${{a:{'[' * 2000}{']' * 2000}}}"


def test_a_reference_of_deeply_nested_brackets_is_refused(tmp_path: Path) -> None:
    given = f"data: {{train_files: '{NESTED_REFERENCE}'}}\n"
    file = write(tmp_path / "my.yaml", given)
    write(tmp_path / "algorithm" / "mine.yaml", given)
    chosen = write(tmp_path / "chosen.yaml", "defaults: [quickstart, {algorithm: mine}]\n")
    nested = NESTED_REFERENCE[4:-1]
    for source, overrides in [
        (file, []),
        (chosen, []),
        (None, [f"data.train_files={NESTED_REFERENCE}"]),
        (None, [f"seed={NESTED_REFERENCE}"]),
        (None, [f"seed={nested}"]),
    ]:
        (problem,) = check_config(source, overrides).problems
        assert "nested too deeply" in problem.consequence
    with pytest.raises(ConfigError, match="cannot be read"):
        migrate(file)


@pytest.mark.parametrize("text", ["{}", "b:\n{}"])
def test_only_for_some_of_many_unknown_keys_a_similar_one_is_looked_up(text: str, tmp_path: Path) -> None:
    keys = "".join(f"  k{number}: 1\n" for number in range(2400))
    problems = check_config(write(tmp_path / "my.yaml", text.format(keys))).problems
    unknown = [problem for problem in problems if "there is no such key" in problem.consequence]
    assert len(unknown) == 2400
    assert sum(problem.fix == "take it out; docs/config.md has all keys" for problem in unknown) == 2300


def test_a_trace_of_thousands_of_turns_is_read(tmp_path: Path) -> None:
    turns = [[250, 1.5]] * 5000
    assert load_yaml(write(tmp_path / "trace.yaml", f"turns: {turns}\n")) == {"turns": turns}


def references(first: str, times: int) -> str:
    """Return values that each refer to the next one several times."""
    keys = ("experiment_name", "project_name", "run_dir", "resume", "mode")
    lines = [f"{key}: {f'${{{other}}}' * times!r}" for key, other in pairwise(keys)]
    return "\n".join([*lines, f"{keys[-1]}: {first}"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (references("x", 20), "more than 200 references"),
        (references("x" * 10_000, 4), "more than 100000 characters"),
    ],
)
def test_references_of_references_are_resolved_up_to_a_limit(text: str, why: str, tmp_path: Path) -> None:
    file = write(tmp_path / "my.yaml", text)
    problems = check_config(file).problems
    assert any(why in problem.consequence for problem in problems), problems


def test_references_of_a_configuration_of_verl_are_resolved_up_to_a_limit(tmp_path: Path) -> None:
    """A value beyond the limit stays as it was written, and is no valid one."""
    done = migrate(write(tmp_path / "verl.yaml", f"a: {'x' * 10_000}\nb: '{'${a}' * 20}'\ndata: {{seed: '${{b}}'}}\n"))
    assert any("seed" in problem.key for problem in done.problems), done.problems


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["x" * 256, "é" * 128, "x" * 100_000 + "!", "a/b", ".."])
def test_a_name_that_no_directory_can_have_is_refused(name: str) -> None:
    (problem,) = check_config(None, [f"experiment_name={name}"]).problems
    assert problem.key == "experiment_name" and "not a valid name" in problem.consequence


@pytest.mark.parametrize("name", HOSTILE_CONFIGS)
def test_a_hostile_option_of_a_group_is_refused_like_a_config(name: str, tmp_path: Path) -> None:
    text, why = HOSTILE_CONFIGS[name]
    option = write(tmp_path / "algorithm" / "mine.yaml", text)
    file = write(tmp_path / "my.yaml", "defaults: [quickstart, {algorithm: mine}]\n")
    (problem,) = check_config(file).problems
    assert str(option) in problem.consequence and why in problem.consequence


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_config_of_a_run_directory_has_no_values(name: str, tmp_path: Path) -> None:
    write(tmp_path / "config.yaml", HOSTILE[name][0])
    started = time.thread_time()
    assert SavedConfig(tmp_path).value("a") is None
    assert time.thread_time() - started < 2


def test_the_report_of_a_run_with_a_hostile_config_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "config.yaml", f"profiler: {{level: !!int '0x{'f' * 20_000}'}}\n")
    printed = CommandLine(capsys)("report", tmp_path, code=2)
    assert "has no events to report" in printed.err and "Traceback" not in printed.err


def doubled(levels: int) -> str:
    """Return a configuration in which the value at a.b has 2 ** levels references."""
    lines = [f"k{level}: ${{k{level - 1}}}${{k{level - 1}}}" for level in range(1, levels + 1)]
    return "\n".join(["k0: x", *lines, f"a: {{b: '${{k{levels}}}'}}"])


@pytest.mark.parametrize("levels", [12, 40])
def test_references_of_references_in_a_run_directory_stay_unresolved(levels: int, tmp_path: Path) -> None:
    write(tmp_path / "config.yaml", doubled(levels))
    started = time.thread_time()
    assert SavedConfig(tmp_path).value("a", "b") == f"${{k{levels}}}"
    assert time.thread_time() - started < 2


def test_references_in_a_run_directory_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/data")
    written = {
        "${a.root}/x": "/data/x",
        "${oc.env:PLACE}": "/data",
        "${oc.env:NOT_SET,${a.n}}": "4",
        "${oc.env:NOT_SET, 'home'}/${a.n}": "home/4",
        "${a.n}": 4,
        "${oc.env:NOT_SET}/x": "${oc.env:NOT_SET}/x",
        "${secret:PLACE}": "${secret:PLACE}",
        "${a}": "${a}",
        "${oc.decode:1}": "${oc.decode:1}",
        "${x.none}": "${x.none}",
        "${": "${",
    }
    values = {"a": {"root": "${oc.env:PLACE}", "n": 4}, "x": {f"k{n}": text for n, text in enumerate(written)}}
    write(tmp_path / "config.yaml", yaml.safe_dump(values))
    saved = SavedConfig(tmp_path)
    assert [saved.value("x", f"k{number}") for number in range(len(written))] == list(written.values())


def test_unreadable_options_of_a_group_are_reported(tmp_path: Path) -> None:
    write(tmp_path / "algorithm" / "mine.yaml", "clip: [1\n")
    file = write(tmp_path / "my.yaml", "defaults: [quickstart, {algorithm: mine}]\n")
    (problem,) = check_config(file).problems
    assert "algorithm/mine.yaml" in str(problem) and "cannot be read as YAML" in problem.consequence


def test_an_integer_of_thousands_of_digits_is_reported(tmp_path: Path) -> None:
    (problem,) = check_config(write(tmp_path / "my.yaml", f"seed: {'9' * 5000}\n")).problems
    assert "cannot be read as YAML" in problem.consequence


def test_yaml_within_the_limits_is_read(tmp_path: Path) -> None:
    shared = "base: &base {n: 4, files: [a, b]}\none: {<<: *base, n: 5}\ntwo: *base\n"
    file = write(tmp_path / "one.yaml", shared)
    assert load_yaml(file) == yaml.safe_load(shared)
    deep = "[" * 50 + "]" * 50
    assert load_yaml(write(file, deep)) == yaml.safe_load(deep)
    assert load_yaml(write(file, "")) is None
