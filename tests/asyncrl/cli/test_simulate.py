"""Tests of `asyncrl simulate`: its table, JSON, sweep, files, and errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.config.compose import check_config
from asyncrl.config.sections.trainer_rules import DRIVER_ENVIRONMENT, RULES
from asyncrl.core.failures import ConfigError
from asyncrl.simulate.sweep import swept_settings
from asyncrl.simulate.trace import read_trace
from benchmarks.synthetic_run import RunPlan, write_run
from tests.fakes.command_line import CommandLine, in_subprocess
from tests.fakes.configurations import config_with

SPEEDS = """
lengths: {mean_tokens: 40, sigma: 0.5}
engine: {step_s: {1: 0.005, 128: 0.02}}
trainer: {update_tokens_per_s: {1: 3000}, step_s: 0.1}
sync: {publish_s: 0.1, fetch_s: 0.1, pause_s: 0.01}
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def speeds(tmp_path: Path) -> Path:
    file = tmp_path / "speeds.yaml"
    file.write_text(SPEEDS)
    return file


def test_the_table_compares_with_the_synchronous_run(run: CommandLine, speeds: Path) -> None:
    printed = run("simulate", "--trace", speeds, "--steps", 20).out
    heading, sync, other = printed.splitlines()[1:4]
    assert heading.split()[:2] == ["setting", "run"]
    assert sync.startswith("mode=sync") and other.startswith("mode=fully_async")
    found = run("simulate", "--trace", speeds, "--steps", 20, "--json").json
    assert [row["setting"] for row in found["settings"]] == ["mode=sync", "mode=fully_async"]
    assert found["settings"][1]["speedup"] > 1 == found["settings"][0]["speedup"]
    assert found["settings"][0]["mean_staleness"] == 0


def test_a_sweep_is_the_product_and_recommends_one_of_its_settings(
    run: CommandLine, speeds: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "sweep.png"
    found = run(
        "simulate", "quickstart", "--trace", speeds, "--steps", 12, "--json", "--plot", picture,
        "--sweep", "rollout.num_replicas=1,2", "--sweep", "async_training=mode_a,mode_b,mode_d",
    ).json  # fmt: skip
    names = [row["setting"] for row in found["settings"]]
    assert len(names) == len(set(names)) == 6
    assert any(f"use {name}" in found["advice"] for name in names)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_gpus_are_split_between_both_sides(run: CommandLine, speeds: Path) -> None:
    found = run(
        "simulate", "--trace", speeds, "--steps", 8, "--json", "--gpus", 8, "trainer.strategy=fsdp2",
        "rollout.tensor_parallel_size=2", "--sweep", "async_training=mode_a,mode_d",
    ).json  # fmt: skip
    names = [row["setting"] for row in found["settings"]]
    splits = [f"rollout.num_replicas={replicas}, trainer.num_workers={8 - 2 * replicas}" for replicas in (1, 2, 3)]
    assert names == [f"{split}, async_training={mode}" for mode in ("mode_a", "mode_d") for split in splits]
    assert any(f"use {name}" in found["advice"] for name in names)


@pytest.mark.parametrize(
    ("ulysses", "tensor", "fsdp"), [(4, 1, 1), (1, 4, 1), (1, 1, 4), (1, 2, 4), (2, 1, 4), (4, 1, 6)]
)
def test_all_splits_whose_ranks_a_launch_accepts_are_offered(ulysses: int, tensor: int, fsdp: int) -> None:
    given = {
        "trainer.strategy": "fsdp2", "trainer.ulysses_sequence_parallel_size": ulysses,
        "trainer.tensor_parallel_size": tensor, "trainer.fsdp_size": fsdp,
    }  # fmt: skip

    def accepted(ranks: int) -> bool:
        config = config_with({**given, "trainer.num_workers": ranks})
        problems = (problem for rule in (*RULES, *DRIVER_ENVIRONMENT) for problem in rule(config))
        return not any("cannot be divided" in problem.consequence for problem in problems)

    expected = [ranks for ranks in range(15, 0, -1) if accepted(ranks)]
    arguments = [f"{key}={value}" for key, value in {**given, "trainer.num_workers": expected[0]}.items()]
    settings = swept_settings(None, arguments, [], 16)
    assert [int(one["trainer.num_workers"]) for one in settings] == expected


def test_a_recommendation_is_compared_with_the_given_configuration(run: CommandLine, speeds: Path) -> None:
    key = "async_training.staleness_threshold"
    arguments = ("simulate", "--trace", speeds, "--steps", 8, "--json", "--sweep", f"{key}=1")
    found = run(*arguments, f"{key}=0").json
    assert len(found["settings"]) == 1
    times = re.search(r"([\d.]+) times the given configuration \(\d replicas?, 1 rank\)", found["advice"])
    assert times and float(times[1]) > 1
    same = run(*arguments, f"{key}=1").json["advice"]
    assert "trained tokens/s, which is the given configuration. " in same


def test_advice_of_a_synchronous_run_does_not_promise_that_async_is_faster(run: CommandLine, speeds: Path) -> None:
    advice = run("simulate", "mode=sync", "--trace", speeds, "--steps", 8, "--json").json["advice"]
    assert "because they take turns. Whether mode=fully_async is faster depends on how the GPUs are split" in advice


def test_shared_gpus_are_not_simulated_in_silence(run: CommandLine, speeds: Path) -> None:
    arguments = ("simulate", "mode=sync", "placement=colocated", "--trace", speeds, "--steps", 4)
    assert "placement=colocated has no effect on the simulation" in run(*arguments).out
    assert "placement = colocated: both sides have all GPUs in turns" in run(*arguments, "--gpus", 4, code=2).err


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("missing/x.png", "No such file or directory. Give a file in a folder that exists"),
        ("x.txt", "Give a .png, .svg or .pdf file"),
    ],
)
def test_a_figure_that_cannot_be_written_is_an_error(
    run: CommandLine, speeds: Path, tmp_path: Path, file: str, message: str
) -> None:
    error = run("simulate", "mode=sync", "--trace", speeds, "--steps", 2, "--plot", tmp_path / file, code=2).err
    assert message in error


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "step_s: {1: 0.005",
            "stepp_s: {1: 0.005",
            "engine.stepp_s is no key of a trace (did you mean engine.step_s?). ",
        ),
        ("sync:", "synk:", "synk is no key of a trace (did you mean sync?). "),
        ("publish_s", "colour", "sync.colour is no key of a trace. "),
        ("step_s: {1: 0.005, 128: 0.02}", "", "engine.step_s is missing"),
    ],
)
def test_wrong_keys_of_a_trace_are_named(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    file = tmp_path / "speeds.yaml"
    file.write_text(SPEEDS.replace(right, wrong, 1))
    with pytest.raises(ConfigError) as error:
        read_trace(file)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("address", "ranks_per_node", "nodes"),
    [
        ("auto", 1, "rollout.nnodes=1, trainer.nnodes=2"),
        ("auto", 4, "rollout.nnodes=1, trainer.nnodes=null, trainer.n_gpus_per_node=null"),
        ("null", 1, "rollout.nnodes=1, trainer.nnodes=null, trainer.n_gpus_per_node=null"),
    ],
)
def test_the_recommended_split_can_be_launched_with_a_configuration_of_nodes(
    run: CommandLine, speeds: Path, address: str, ranks_per_node: int, nodes: str
) -> None:
    given = (
        f"ray.address={address}", "rollout.tensor_parallel_size=8", "trainer.strategy=fsdp2", "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={ranks_per_node}", "rollout.nnodes=1", "rollout.n_gpus_per_node=8",
    )  # fmt: skip
    advice = run("simulate", *given, "--trace", speeds, "--steps", 4, "--gpus", 10, "--json").json["advice"]
    recommended = advice.removeprefix("use ").partition(": ")[0]
    assert recommended == f"rollout.num_replicas=1, trainer.num_workers=2, {nodes}"
    config = check_config(None, [*given, *recommended.split(", ")], scope="simulation").require()
    assert (config.rollout.num_replicas, config.trainer.num_workers) == (1, 2)


def test_swept_sizes_of_replicas_have_splits_of_their_own(run: CommandLine, speeds: Path) -> None:
    arguments = ("--trace", speeds, "--steps", 4, "--gpus", 10, "trainer.strategy=fsdp2")
    found = run("simulate", *arguments, "--json", "--sweep", "rollout.tensor_parallel_size=2,8").json
    names = [row["setting"].split(", ") for row in found["settings"]]
    sizes = [[int(part.partition("=")[2]) for part in name] for name in names]
    assert sizes == [[1, 8, 2], [2, 6, 2], [3, 4, 2], [4, 2, 2], [1, 2, 8]]
    (limit,) = found["limits"]
    assert limit.startswith("rollout.tensor_parallel_size changes only the number of GPUs")
    assert run("simulate", *arguments, "--json").json["limits"] == []


def test_speeds_of_a_run_can_be_saved_and_simulated_again(run: CommandLine, tmp_path: Path) -> None:
    recorded, saved = tmp_path / "runs" / "recorded", tmp_path / "saved.yaml"
    write_run(recorded, RunPlan(steps=8, turns=1))
    by_run = run("simulate", "--trace", recorded, "--steps", 10, "--json", "--save-trace", saved).json
    by_file = run("simulate", "--trace", saved, "--steps", 10, "--json").json
    for one, other in zip(by_run["settings"], by_file["settings"], strict=True):
        assert one["run_s"] == pytest.approx(other["run_s"], rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sweep", "rollout.num_replicas"), "--sweep rollout.num_replicas names no values"),
        (("--sweep", "rollout.num_replica=1,2"), "did you mean"),
        (("mode=fast",), "mode = fast is no mode"),
        (("--sweep", "seed=" + ",".join(map(str, range(300)))), "300 combinations"),
        (("rollout.num_replicas=0",), "rollout.num_replicas"),
        (("--gpus", "4", "rollout.tensor_parallel_size=8"), "--gpus 4 cannot be split"),
        (
            ("--gpus", "4", "trainer.strategy=fsdp2", "trainer.tensor_parallel_size=4"),
            "training a multiple of 4 (trainer.ulysses_sequence_parallel_size, trainer.tensor_parallel_size and",
        ),
        (("--gpus", "4"), "trainer.strategy"),
        (("--gpus", "8", "--sweep", "rollout.num_replicas=4"), "--sweep rollout.num_replicas=4: --gpus 8 chooses"),
        (("--gpus", "8", "--sweep", "trainer.num_workers=6,60"), "--sweep trainer.num_workers=6,60: --gpus 8 chooses"),
        (
            ("--gpus", "8", "rollout.autoscaling.enable=true", "rollout.autoscaling.max_replicas=4"),
            "rollout.autoscaling.enable = true: the run would change",
        ),
        (("algorithm.adv_estimator=remax",), "greedy responses"),
    ],
)
def test_errors_name_the_key(run: CommandLine, speeds: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in run("simulate", *arguments, "--trace", speeds, code=2).err


def test_without_a_run_the_error_says_where_speeds_come_from(
    run: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = run("simulate", code=2).err
    assert "there are no runs" in error and "--trace FILE.yaml" in error
    assert "rollout.num_replicas" in run("simulate", "rollout.num_replicas=0", code=2).err, (
        "the configuration comes first"
    )
    (tmp_path / "runs" / "quickstart" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "one" / "config.yaml").write_text("{}")
    error = run("simulate", "--trace", "nope", code=2).err
    assert "(1 run). The simulation" in error


def test_neither_ray_nor_torch_is_loaded(speeds: Path) -> None:
    code, modules = in_subprocess("simulate", "--trace", str(speeds), "--steps", "4")
    assert code == 0
    assert not {"ray", "vllm", "torch"} & modules
