"""`asyncrl eval` without Ray: the model that it finds, its directory and files, its output, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from asyncrl.cli.main import BAD_CONFIG, FAILED, INTERRUPTED
from asyncrl.config.compose import load_config
from asyncrl.config.schema import Config
from asyncrl.core.failures import ConfigError
from asyncrl.driver import evaluate as driver
from asyncrl.driver.evaluate import find_model, settings_of
from asyncrl.driver.evaluation_records import EvaluationRecords, figure_metrics, step_of
from asyncrl.storage.answer_files import Answer, AnsweredPrompt, append_answers, read_answers
from tests.fakes.command_line import CommandLine

NUM_PROMPTS = 6
SHORT = (
    "quickstart",
    "data.max_val_samples=6",
    "rollout.val.n=2",
    "rollout.val.temperature=1.0",
    "logging.console=plain",
)


class Answering:
    """Stands in for Ray, engines and Rollouter: it answers the prompts that have no line yet, up to `limit`."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.limit = NUM_PROMPTS
        self.fails: dict[int, str] = {}
        self.configs: list[Config] = []

    async def __call__(
        self, config: Config, directory: Path, view: Any, records: EvaluationRecords
    ) -> Mapping[str, Any] | None:
        self.configs.append(config)
        file = directory / "answers.jsonl"
        known = [number for number, one in read_answers(file).items() if one.answers]
        missing = [number for number in range(NUM_PROMPTS) if number not in known][: self.limit]
        for number in missing:
            self.asked.append(number)
            source, error = "ab"[number % 2], self.fails.get(number, "")
            answers = tuple(
                Answer(float(right), right, "4" if right else "<5>", f"<b>it is {number}", 3 + number, "stop")
                for right in (number > 1, number > 3)
            )
            prompt = ({"role": "user", "content": f"<script>{number}"},)
            line = AnsweredPrompt(number, f"d{number}", source, prompt, "4", () if error else answers, error)
            append_answers(file, line)
        failed = sum(number in self.fails for number in missing)
        return {
            "prompts": NUM_PROMPTS, "known": len(known), "answered": len(missing) - failed, "failed": failed,
            "generated_tokens": 10,
        }  # fmt: skip


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answering:
    monkeypatch.chdir(tmp_path)
    fake = Answering()
    monkeypatch.setattr(driver, "_evaluate", fake)
    return fake


@pytest.fixture
def evaluate(answering: Answering, cli: CommandLine, tmp_path: Path) -> Callable[..., Any]:
    """Evaluate the quickstart's model into `tmp_path/out`, and return the printed JSON."""

    def run(*more: object, code: int = 0) -> Any:
        printed = cli("eval", *SHORT, "--json", "--out", tmp_path / "out", *more, code=code)
        return json.loads(printed.out) if code == 0 else printed.err

    return run


# ------------------------------------------------------------------------------------------------ results


def test_figures_are_printed_and_written(answering: Answering, cli: CommandLine, tmp_path: Path) -> None:
    printed = cli("eval", *SHORT)
    (directory,) = (tmp_path / "evals" / "quickstart").iterdir()
    assert directory.name.startswith("quickstart-")
    found = json.loads((directory / "evaluation.json").read_text())
    assert (found["prompts"], found["answered"], found["failed"], found["kept"]) == (6, 6, [], 0)
    assert list(found["sources"]) == ["a", "b"]
    figures = {name: one["value"] for name, one in found["all"]["figures"].items()}
    expected = {"mean@2": 0.5, "pass@1": 0.5, "pass@2": 4 / 6, "best@2": 4 / 6, "maj@2": 0.5}
    assert figures == pytest.approx(expected)
    interval = found["all"]["figures"]["pass@2"]
    assert interval["low"] < interval["value"] < interval["high"]
    assert "0.667 [" in printed.out and "pass@2" in printed.out and str(directory / "index.html") in printed.out
    page = (directory / "index.html").read_text()
    assert "pass@2" in page and "&lt;script&gt;5" in page and "<script" not in page and "<b>it" not in page
    assert page.count("src=") == 1 and "data:image/png;base64," in page, "it is self-contained"
    assert (directory / "figures.png").read_bytes().startswith(b"\x89PNG")
    config = answering.configs[0]
    assert config.validates_only and config.data.train_files == () and config.profiler.level == "off"


def test_the_figures_go_to_the_sinks_of_a_run(
    answering: Answering, evaluate: Callable[..., Any], cli: CommandLine, tmp_path: Path
) -> None:
    Path("sinks.py").write_text(
        "import json\n"
        "from pathlib import Path\n"
        "from asyncrl.observe.metrics.sinks import Tracker\n\n\n"
        "class Mine(Tracker):\n"
        "    def write(self, row):\n"
        "        with (self._tracked.directory / 'mine.jsonl').open('a') as file:\n"
        "            file.write(json.dumps([row.kind, row.step, row.metrics, self._tracked.resumed]) + '\\n')\n"
    )
    answering.limit = 4
    sinks = "logging.sinks=[jsonl,tensorboard,sinks.py:Mine]"
    evaluate(sinks, code=INTERRUPTED)
    state = cli("status", tmp_path / "out", "--json").json
    assert (state["mode"], state["phase"], state["live"]) == ("eval", "interrupted", False)
    assert state["answers"] == {"prompts": 6, "known": 0, "answered": 4, "failed": 0}
    assert "answered 4/6" in cli("status", tmp_path / "out").out
    answering.limit = NUM_PROMPTS
    found = evaluate(sinks)
    (line,) = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    figures = found["all"]["figures"]
    assert (line["kind"], line["step"]) == ("validation", 0)
    assert line["validation/reward/mean"] == figures["mean@2"]["value"] == 0.5
    assert line["validation/pass@2"] == figures["pass@2"]["value"]
    assert line["validation/pass/b@2"] == found["sources"]["b"]["figures"]["pass@2"]["value"]
    assert line["validation/num_prompts"] == 6 and line["validation/length_share"] == 0.0
    assert any((tmp_path / "out" / "tensorboard").iterdir())
    (mine,) = map(json.loads, (tmp_path / "out" / "mine.jsonl").read_text().splitlines())
    assert mine[:2] == ["validation", 0] and mine[2]["validation/pass@2"] == line["validation/pass@2"]
    assert mine[3] is True, "an interrupted evaluation continues its run of the tracker"
    state = cli("status", tmp_path / "out", "--json").json
    assert (state["phase"], state["answers"]["known"], state["answers"]["answered"]) == ("completed", 4, 2)
    assert "is an evaluation" in cli("report", tmp_path / "out", code=BAD_CONFIG).err
    assert cli("why", tmp_path / "out").out == "run completed\n"
    assert "there is no module" in evaluate("--fresh", "logging.sinks=[nowhere:Sink]", code=BAD_CONFIG)


def test_figures_have_the_names_and_the_step_of_a_validation_in_a_run() -> None:
    assert step_of("/runs/a/checkpoints/step_000050/hf") == 50
    assert step_of("/models/step_by_step") == step_of("asyncrl://quickstart") == 0
    group = {
        "prompts": 2, "answers": 4, "figures": {"mean@2": {"value": 0.5}, "pass@2": {"value": 1.0}},
        "tokens": {"mean": 3.0, "max": 4}, "finish_reasons": {"length": 1, "stop": 3},
    }  # fmt: skip
    assert figure_metrics({"all": group, "sources": {"x": group}, "wall_s": 2.0}) == {
        "reward/mean": 0.5, "reward/mean/x": 0.5, "pass@2": 1.0, "response_tokens/mean": 3.0,
        "response_tokens/max": 4.0, "length_share": 0.25, "num_prompts": 2.0, "duration_s": 2.0,
    }  # fmt: skip


def test_a_dry_run_checks_everything_and_starts_nothing(
    answering: Answering, evaluate: Callable[..., Any], cli: CommandLine, tmp_path: Path
) -> None:
    out = cli("eval", *SHORT, "--dry-run").out
    assert (
        "temperature: 1.0  # command line" in out
        and "level: 'off'  # evaluation" in out
        and f"into {tmp_path}/evals/quickstart/quickstart-" in out
    )
    assert not (tmp_path / "evals").exists() and not answering.asked
    answering.limit = 2
    evaluate(code=INTERRUPTED)
    assert "which has answers to 2 prompts" in cli("eval", *SHORT, "--out", tmp_path / "out", "--dry-run").out
    (tmp_path / "broken.py").write_text("def score(**row):\n    return 1 / 0\n")
    broken = f"reward.function={tmp_path}/broken.py:score"
    assert "broken.py" in cli("eval", *SHORT, broken, "--dry-run", code=BAD_CONFIG).err


def test_the_same_command_continues_and_then_only_shows_its_figures(
    answering: Answering, evaluate: Callable[..., Any], tmp_path: Path
) -> None:
    whole = evaluate("--out", tmp_path / "whole")
    answering.limit, answering.asked = 4, []
    assert "interrupted: 4 prompts are answered" in evaluate(code=INTERRUPTED)
    assert not (tmp_path / "out" / "evaluation.json").exists()
    answering.limit = NUM_PROMPTS
    found = evaluate()
    assert answering.asked == [0, 1, 2, 3, 4, 5], "none twice"
    assert found["kept"] == 4
    assert (found["all"], found["sources"]) == (whole["all"], whole["sources"])
    assert evaluate() == found and len(answering.asked) == 6, "nothing is left to ask"
    evaluate("--fresh")
    assert len(answering.asked) == 12


def test_prompts_that_fail_are_named_and_tried_again(
    answering: Answering, evaluate: Callable[..., Any], cli: CommandLine, tmp_path: Path
) -> None:
    answering.fails = {2: "the engine refuses it"}
    found = evaluate()
    assert found["answered"] == 5 and found["all"]["prompts"] == 5
    assert found["failed"] == [{"number": 2, "data_source": "a", "error": "the engine refuses it"}]
    assert "the engine refuses it" in (tmp_path / "out" / "index.html").read_text()
    answering.fails, answering.asked = {}, []
    assert evaluate()["failed"] == [] and answering.asked == [2]
    answering.fails = dict.fromkeys(range(NUM_PROMPTS), "no room")
    assert "no prompt of 6 could be answered; the first error: no room" in evaluate("--fresh", code=FAILED)


def test_answers_of_other_settings_are_not_mixed(evaluate: Callable[..., Any], tmp_path: Path) -> None:
    evaluate()
    message = evaluate("rollout.val.n=4", code=BAD_CONFIG)
    assert f"{tmp_path}/out/settings.json has rollout.val.n=2, and this evaluation has 4" in message
    assert "--out DIR" in message and "--fresh" in message
    assert evaluate("rollout.num_replicas=2", "reward.timeout_s=9")["kept"] == 0, "they change no answer"
    assert len(evaluate("rollout.val.n=4", "--fresh")["sources"]) == 2


def test_a_directory_with_other_files_or_damaged_settings_is_refused(
    evaluate: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("")
    message = evaluate(code=BAD_CONFIG)
    assert f"--out={out} has other files (thesis.tex)" in message and "nothing there is overwritten" in message
    (out / "thesis.tex").unlink()
    (out / "settings.json").write_text("[")
    assert "settings.json cannot be read" in evaluate(code=BAD_CONFIG)


def test_a_launch_of_no_steps_is_an_evaluation(answering: Answering, cli: CommandLine, tmp_path: Path) -> None:
    cli("launch", "fully_async", *SHORT, "trainer.total_training_steps=0", f"run_dir={tmp_path}/here")
    assert (tmp_path / "here" / "evaluation.json").is_file() and (tmp_path / "here" / "index.html").is_file()
    assert answering.configs[0].validates_only


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("data.val_files=[]",), "there are no prompts to evaluate"),
        (("checkpoint=nowhere",), "checkpoint=nowhere: it is no run, no checkpoint and no model directory"),
        (("rollout.attach=servers", "ray.address=auto"), "set rollout.attach=null"),
        (("rollout.val.m=2",), "there is no such key"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_starts(
    arguments: tuple[str, ...], expected: str, answering: Answering, cli: CommandLine
) -> None:
    assert expected in cli("eval", *SHORT, *arguments, code=BAD_CONFIG).err
    assert answering.configs == []


def test_a_run_of_no_steps_continues_nothing(answering: Answering, cli: CommandLine, tmp_path: Path) -> None:
    arguments = ("launch", "fully_async", *SHORT, "trainer.total_training_steps=0", f"resume={tmp_path}")
    assert f"asyncrl eval checkpoint={tmp_path}" in cli(*arguments, code=BAD_CONFIG).err


# ------------------------------------------------------------------------------------------------ which model


def write_run(path: Path, *steps: int, **config: Any) -> Path:
    """Write a run with checkpoints at these steps."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    for step in steps:
        model = path / "checkpoints" / f"step_{step:06d}" / "hf"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model.parent / "manifest.json").write_text('{"lineage": 0}')
    return path


def test_a_checkpoint_is_found_by_run_experiment_path_and_model(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    run = write_run(root / "mine" / "20260101-000000", 5, 10)
    newest, older = (run / "checkpoints" / f"step_{step:06d}" / "hf" for step in (10, 5))
    for given in (run, run / "checkpoints", newest, newest.parent, "mine"):
        assert find_model(str(given), root=root) == (str(newest), run)
    assert find_model(str(older.parent)) == (str(older), run)
    alone = tmp_path / "model"
    alone.mkdir()
    (alone / "config.json").write_text("{}")
    assert find_model(str(alone)) == (str(alone), None)
    assert find_model("asyncrl://quickstart") == ("asyncrl://quickstart", None)


def test_checkpoints_outside_of_the_run_directory_are_found(tmp_path: Path) -> None:
    elsewhere = write_run(tmp_path / "disk", 3) / "checkpoints"
    run = write_run(tmp_path / "run", trainer={"checkpoint_dir": str(elsewhere)})
    assert find_model(str(run)).path == str(elsewhere / "step_000003" / "hf")


def test_runs_without_a_checkpoint_and_checkpoints_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no checkpoint yet") as caught:
        find_model(str(write_run(tmp_path / "young")))
    assert "model.path" in str(caught.value)
    run = write_run(tmp_path / "bare", 1)
    (run / "checkpoints" / "step_000001" / "hf" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"hf has no model in Hugging Face format.*trainer\.hf_export=last or never"):
        find_model(str(run))


def copy_model(run: Path) -> Path:
    """Copy the quickstart's model into the checkpoint of a run, and return its directory there."""
    (hf,) = run.glob("checkpoints/*/hf")
    for file in (Path(driver.resolve("asyncrl://quickstart"))).iterdir():
        (hf / file.name).write_bytes(file.read_bytes())
    return hf


def test_a_supervised_runs_checkpoint_is_evaluated_with_a_reward(
    answering: Answering, cli: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+2=", "response": "#3"}\n')
    pairs = [f"data.train_files=[{tmp_path}/pairs.jsonl]", f"data.val_files=[{tmp_path}/pairs.jsonl]"]
    values = load_config("quickstart", [*pairs, "sft.max_length=128"], mode="sft").public_values()
    run = write_run(tmp_path / "warm", 4, **values)
    hf = copy_model(run)
    refused = cli("eval", f"checkpoint={run}", code=BAD_CONFIG).err
    assert "reward.function=exact_match" in refused and "data.val_files" in refused
    given = ("reward.function=exact_match", "data.ground_truth_key=response", "rollout.response_length=64")
    cli("eval", f"checkpoint={run}", *given)
    assert answering.configs[0].model.path == str(hf)
    cli("eval", f"checkpoint={run}", *given, "--dry-run")


def test_the_configuration_is_that_of_the_checkpoints_run(
    monkeypatch: pytest.MonkeyPatch, cli: CommandLine, tmp_path: Path
) -> None:
    """Of a run in the same directory that resumed another one, in synchronous mode."""
    values = load_config("quickstart", ["data.max_val_samples=3"], mode="sync").public_values()
    run = write_run(tmp_path / "run", 4, **{**values, "run_dir": str(tmp_path / "run"), "resume": "auto"})
    hf = copy_model(run)
    evaluate = Mock(return_value=0)
    monkeypatch.setattr(driver, "evaluate", evaluate)
    cli("eval", f"checkpoint={run}", "rollout.val.n=3", "rollout.val.temperature=0.5")
    (config,) = evaluate.call_args.args
    assert (config.model.path, config.data.max_val_samples, config.rollout.val.n) == (str(hf), 3, 3)
    assert (config.run_dir, config.resume) == (None, "none")


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file or directory that of another user."""
    if os.geteuid() == 0:
        os.chown(path, 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


@pytest.mark.parametrize("part", ["", "config.yaml"])
def test_the_code_that_another_users_run_names_runs_only_if_its_configuration_is_named(
    part: str, answering: Answering, cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\ndef score(**row): return 1.0\n"
    (tmp_path / "evil.py").write_text(code)
    overrides = [f"reward.function={tmp_path}/evil.py:score", "data.max_val_samples=6"]
    run = write_run(tmp_path / "run", 4, **load_config("quickstart", overrides).public_values())
    copy_model(run)
    (tmp_path / "ran").unlink(missing_ok=True)
    give_away(run / part, monkeypatch)
    for options in ((), ("--dry-run",)):
        refused = cli("eval", f"checkpoint={run}", *options, code=BAD_CONFIG).err
        assert "belongs to another user" in refused and f"asyncrl eval {run}/config.yaml checkpoint={run}" in refused
    cli("eval", *SHORT, f"checkpoint={run}", "--dry-run")
    assert not (tmp_path / "ran").exists()
    cli("eval", run / "config.yaml", f"checkpoint={run}", "--dry-run")
    assert (tmp_path / "ran").exists()


def test_no_variable_is_sent_to_the_address_that_another_users_run_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVAL_TOKEN", "c4n4ry")
    opened = Mock(return_value=None)
    monkeypatch.setattr(driver, "remote_checkpoints", opened)
    run = write_run(tmp_path / "run", trainer={"checkpoint_dir": "http://nowhere/${oc.env:EVAL_TOKEN}"})
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        find_model(str(run))
    assert opened.call_args.args[0].checkpoint_url == "http://nowhere/c4n4ry", "one's own run is fetched"
    opened.reset_mock()
    give_away(run, monkeypatch)
    with pytest.raises(ConfigError, match=r"belongs to another user.*Copy a checkpoint to this machine"):
        find_model(str(run))
    opened.assert_not_called()


def test_settings_follow_the_models_files_and_the_users_code(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("def score(**row): return 1.0\n")
    config = load_config("quickstart", [f"reward.function={code}:score"])
    before = settings_of(config)
    assert before == settings_of(config) and before["code"].keys() == {"mine.py"}
    code.write_text("def score(**row): return 2.0\n")
    assert settings_of(config)["code"] != before["code"]
    faster = load_config(
        "quickstart", [f"reward.function={code}:score", "reward.max_concurrency=3", "trainer.optim.lr=1"]
    )
    assert settings_of(faster) == settings_of(config)
