"""Threads of engines and ranks on CPU: `auto`, and processes that share CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.compose import check_config, load_config
from asyncrl.config.environment import usable_cpus
from asyncrl.config.resources import threads
from asyncrl.config.resources.plan import MachineResources, computing_processes, make_plan, shortages, threads_at_once
from asyncrl.config.resources.threads import KEYS, share_cpus, take_auto, with_threads
from asyncrl.config.schema import Config
from tests.fakes.configurations import config_with, single

ENGINES, RANKS = KEYS
BOTH = (f"{ENGINES}=auto", f"{RANKS}=auto")


def chosen(cpus: int, config: Config, *keys: str, gpus: int = 0, trains: bool = True) -> tuple[int, int]:
    """Return the threads of engines and ranks on a machine."""
    config = with_threads(config, keys or KEYS, MachineResources(cpus, gpus), trains=trains)
    return config.rollout.cpu_threads, config.trainer.cpu_threads


@pytest.mark.parametrize(("cpus", "each"), [(1, 1), (2, 1), (4, 2), (6, 3), (8, 3), (9, 4), (64, 31)])
def test_engines_and_ranks_share_the_cpus(cpus: int, each: int) -> None:
    """From 8 CPUs on, one is left for the rest of the run."""
    assert chosen(cpus, Config()) == (each, each)


def test_auto_takes_what_the_other_side_leaves() -> None:
    assert chosen(16, config_with({RANKS: 4}), ENGINES) == (11, 4)
    assert chosen(16, config_with({ENGINES: 2, "rollout.num_replicas": 3}), RANKS) == (2, 9)
    assert chosen(2, config_with({RANKS: 4}), ENGINES) == (1, 4)
    many = config_with({"rollout.num_replicas": 2, "trainer.num_workers": 2, "trainer.strategy": "fsdp2"})
    assert chosen(17, many) == (4, 4)


def test_the_sides_of_a_synchronous_run_have_all_cpus_in_turn() -> None:
    config = load_config(mode="sync")
    assert chosen(4, config) == (4, 4)
    full = with_threads(config, KEYS, MachineResources(4, 0))
    plan = make_plan(full, MachineResources(4, 0), num_parameters=None, num_prompts=None)
    assert list(shortages(plan, full)) == [], "they take turns"
    assert share_cpus(full, MachineResources(4, 0)), "but the threads of both exist"


def test_a_side_without_processes_on_cpu_has_one_thread() -> None:
    assert chosen(16, Config(), gpus=8) == (1, 1)
    assert chosen(16, config_with({"trainer.device": "cpu"}), gpus=8) == (1, 15)
    assert chosen(16, Config(), trains=False) == (15, 1)
    assert chosen(16, Config(mode="sft")) == (1, 15)


@given(st.integers(1, 128), st.integers(1, 6), st.integers(1, 6))
def test_auto_never_needs_more_cpus_than_there_are_unless_the_processes_alone_do(
    cpus: int, engines: int, ranks: int
) -> None:
    config = config_with({"rollout.num_replicas": engines, "trainer.num_workers": ranks, "trainer.strategy": "ddp"})
    machine = MachineResources(cpus, 0)
    config = with_threads(config, KEYS, machine)
    used = threads_at_once(computing_processes(config, machine), alternating=False)
    assert used <= max(cpus, engines + ranks)


def test_auto_on_the_command_line_is_a_number_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: 12)
    monkeypatch.setattr(threads, "visible_gpus", lambda: 0)
    config = load_config(None, BOTH)
    assert (config.rollout.cpu_threads, config.trainer.cpu_threads) == (5, 5)
    assert config.trainer.max_cpu_threads == 12, "ranks try the CPUs that the engines leave idle"
    assert load_config(None, [f"{ENGINES}=auto"]).trainer.max_cpu_threads is None
    assert load_config(None, [*BOTH, "trainer.max_cpu_threads=7"]).trainer.max_cpu_threads == 7
    deterministic = "async_training.deterministic=true"
    assert load_config(None, [*BOTH, deterministic]).trainer.max_cpu_threads is None
    problem = single(list(check_config(None, ["trainer.max_cpu_threads=7", deterministic]).problems))
    assert problem.key == "trainer.max_cpu_threads" and problem.severity == "error"
    [unused] = check_config(None, ["trainer.max_cpu_threads=7"], mode="sync").problems
    assert (unused.key, unused.severity) == ("trainer.max_cpu_threads", "error")
    assert with_threads(Config(mode="sft"), KEYS, MachineResources(16, 0)).trainer.max_cpu_threads is None
    assert load_config(None, BOTH, mode="sync").trainer.max_cpu_threads is None
    assert take_auto({"rollout": {"cpu_threads": 2}, "trainer": None}) == []


def test_fewer_threads_at_most_than_at_first_are_refused() -> None:
    problem = single(list(check_config(None, [f"{RANKS}=3", "trainer.max_cpu_threads=2"]).problems))
    assert (problem.key, problem.consequence) == (
        "trainer.max_cpu_threads", "each process begins with trainer.cpu_threads=3"
    )  # fmt: skip


def test_auto_is_refused_on_a_cluster() -> None:
    problems = check_config(None, [f"{RANKS}=auto", "ray.address=10.0.0.1:6379"]).problems
    problem = single([one for one in problems if one.key == RANKS])
    assert problem.severity == "error" and problem.value == "auto" and problem.fix == "give a number of threads"


def test_a_misspelt_auto_is_answered_with_the_values() -> None:
    problem = single(list(check_config(None, [f"{RANKS}=automatic"]).problems))
    assert problem.fix == "give an integer > 0 or auto (default 1)"


def test_cpus_are_shared_where_the_threads_leave_none() -> None:
    config = config_with({ENGINES: 4, RANKS: 3})
    assert [share_cpus(config, MachineResources(cpus, 0)) for cpus in (4, 7, 8)] == [True, True, False]
    assert not share_cpus(config, MachineResources(4, 8)), "on GPUs, one thread feeds each"


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    unlimited = usable_cpus(tmp_path / "missing")
    for text, cpus in (("150000 100000", 2), ("50000 100000", 1), ("max 100000", unlimited)):
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert usable_cpus(tmp_path / "cpu.max") == min(cpus, unlimited)
