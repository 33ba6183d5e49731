"""Tests of the comparison with other systems: jobs, figures, tables, and peers that are real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import __main__ as program
from benchmarks.compare.measure import PeerFailedError, Usage, sample
from benchmarks.compare.peers import PEERS, Peer, threads
from benchmarks.compare.plot import draw
from benchmarks.compare.results import (
    Comparison,
    Figures,
    Generated,
    Progress,
    TrainedStep,
    figures,
    read_metrics,
    read_progress,
)
from benchmarks.compare.reward import share_of_digits
from benchmarks.compare.workloads import EOS, LENGTHS, SIZES, Job, Workload

EQUAL = Workload("0.9M", "equal", steps=3)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return EQUAL.job("asyncrl", tmp_path, tmp_path / "run-0", cores=2)


def test_long_responses_may_be_four_times_as_long_as_equal_ones(tmp_path: Path) -> None:
    jobs = [Workload("8M", lengths, 5).job("verl", tmp_path, tmp_path, 4) for lengths in ("equal", "long")]
    assert [job.max_tokens for job in jobs] == [128, 512]
    assert all(job.group * job.samples == 64 and job.steps == 5 and job.cores == 4 for job in jobs)
    assert all(8 * size.prompts % size.micro_batch == 0 for size in SIZES.values()), "micro-batches of whole steps"


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_model_decides_how_long_responses_are_and_training_hardly_changes_it(tmp_path: Path, lengths: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    workload = Workload("0.9M", lengths, steps=3)
    workload.prepare(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=SIZES["0.9M"].learning_rate)
    prompts = torch.randint(3, 103, (16, 8), generator=torch.Generator().manual_seed(0))

    def ending() -> torch.Tensor:
        rows = model.generate(prompts, do_sample=True, top_k=0, max_new_tokens=64, eos_token_id=None, pad_token_id=0)
        log_probs = model(rows).logits[:, 8:].log_softmax(-1)
        liked = log_probs[..., 3:13].logsumexp(-1).mean()
        optimizer.zero_grad()
        (-liked).backward()
        optimizer.step()
        return log_probs.detach()[..., EOS].exp()

    ends = torch.stack([ending() for _ in range(6)])
    if lengths == "equal":
        assert ends.max() == 0
    else:
        assert ends[0].mean() == pytest.approx(1 / 64, rel=0.05) and ends[0].std() < 0.1 / 64
        assert 0.5 / 64 < ends[-1].mean() < 1.5 / 64


def test_asyncrl_gets_the_numbers_of_the_job(job: Job) -> None:
    command = PEERS["asyncrl"].command(job)
    assert command[1:5] == ["-m", "asyncrl", "launch", "fully_async"]
    expected = {"rollout.n=8", "trainer.ppo_mini_batch_size=8", "rollout.response_length=64", f"model.path={job.model}"}
    expected |= {"trainer.total_training_steps=3", "trainer.optim.lr=0.0005", "trainer.ppo_max_token_len=8192"}
    assert expected | {"trainer.cpu_threads=1", "rollout.cpu_threads=1"} <= set(command)


def test_sides_that_alternate_have_all_cores_and_others_half() -> None:
    assert [threads(peer, 4) for peer in PEERS] == [2, 4, 4, 2, 2]
    assert threads("asyncrl", 1) == 1


def test_a_peer_without_environment_names_the_command_that_creates_it(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("benchmarks.compare.peers.ENVIRONMENTS", tmp_path)
    with pytest.raises(PeerFailedError, match="make bench-setup"):
        PEERS["trl-hf"].command(job)
    python = tmp_path / "trl/bin/python"
    python.parent.mkdir(parents=True)
    python.touch()
    (tmp_path / "trl/install.err").write_text("ERROR: No matching distribution found for trl\n")
    with pytest.raises(PeerFailedError, match="could not be installed:\nERROR: No matching"):
        PEERS["trl-hf"].command(job)


def test_figures_leave_out_the_first_two_steps() -> None:
    rewards = (0.1, 0.2, 0.3, 0.6, 0.7)
    steps = [TrainedStep(110.0 + 2 * number, reward, 100) for number, reward in enumerate(rewards)]
    generated = [Generated(step.end_s - 1, 120) for step in steps]
    usage = Usage(
        started_s=100.0,
        roles={1: "engine", 2: "engine", 3: "trainer"},
        cpu={
            1: [(99.0, 0.0), (112.0, 5.0), (118.0, 8.0)], 2: [(115.0, 0.0), (117.0, 2.0)],
            3: [(100.0, 0.0), (118.0, 18.0)],
        },
        peak_mb=500.0,
    )  # fmt: skip
    found = figures(Progress(steps, generated), usage)
    assert found.step_s == pytest.approx(2.0) and found.cold_start_s == pytest.approx(10.0)
    assert found.trained_tokens_s == pytest.approx(50.0) and found.generated_tokens_s == pytest.approx(60.0)
    assert found.reward_s == pytest.approx(18.0), "0.3, 0.6 and 0.7 are the first three with a mean of 0.5"
    assert found.cpu_s == {"trainer": pytest.approx(2.0), "engine": pytest.approx(5.0 / 3)}
    assert list(found.cpu_s) == ["trainer", "engine"], "the largest first"
    assert found.rewards[0] == (pytest.approx(10.0), 0.1)


def test_a_reward_that_is_not_reached_has_no_time() -> None:
    steps = [TrainedStep(float(number), 0.4, 1) for number in range(1, 6)]
    assert figures(Progress(steps, []), Usage(0.0)).reward_s is None


def test_steps_of_asyncrl_are_read_from_its_metrics(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"time/monotonic_s": 5.0, "reward/mean": 0.1, "tokens/trained": 7, "rollouter/generated_tokens": 20},
        {"time/monotonic_s": 6.0, "reward/mean": 0.2, "tokens/trained": 8, "rollouter/generated_tokens": 31},
    ]
    lines = [{"kind": "step"} | lines[0], {"kind": "apply"}, {"kind": "step"} | lines[1]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(tmp_path) == Progress(
        [TrainedStep(5.0, 0.1, 7), TrainedStep(6.0, 0.2, 8)], [Generated(5.0, 20), Generated(6.0, 11)]
    )


def run(rate: float) -> Figures:
    return Figures(64 / rate, rate, rate, 9.0, None, {"trainer": 1.0}, 700.0, [(9.0, 0.1), (10.0, 0.2)])


def test_the_table_marks_losses_and_failures(tmp_path: Path) -> None:
    runs = {
        "asyncrl": [run(100), run(60), run(90)], "trl-hf": [run(50), run(40), run(45)],
        "trl-vllm": [run(200), run(30), run(180)], "verl": [],
    }  # fmt: skip
    comparison = Comparison({"8M long": runs}, {("8M long", "verl"): "exited with 1:\nno GPU"})
    ours, hf, vllm, verl = comparison.rows()
    assert ours["trained tokens/s"] == "90 (60 to 100)" and ours["asyncrl's tokens/s"] == ""
    assert hf["asyncrl's tokens/s"] == "2.00 times"
    assert vllm["asyncrl's tokens/s"] == "0.50 times (LOSS)", "the median of 0.5, 2 and 0.5"
    assert (verl["s/step"], verl["asyncrl's tokens/s"]) == ("failed", "no comparison")
    assert hf["CPU s/step"] == "trainer 1.00" and hf["reward 0.5 after s"] == "not reached"
    assert comparison.failures() == [{"workload": "8M long", "system": "verl", "error": "exited with 1:\nno GPU"}]
    draw(comparison, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_system_that_has_not_run_yet_has_not_failed() -> None:
    comparison = Comparison({"8M long": {"asyncrl": [run(100)], "trl-hf": []}}, {})
    ours, hf = comparison.rows()
    assert (hf["s/step"], hf["CPU s/step"], hf["asyncrl's tokens/s"]) == ("not run yet", "not run yet", "no comparison")
    assert ours["trained tokens/s"] == "100 (100 to 100)"


FAILING = "import sys; sys.stderr.write('Loading\\n\\nRuntimeError: this system needs a GPU\\n'); sys.exit(3)"
WORKING = """
import json, pathlib, sys, time
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
steps = []
for _ in range(job["steps"]):
    until = time.process_time() + 0.7
    while time.process_time() < until:
        pass
    steps.append([time.monotonic(), 0.5, 4096])
result = {"steps": steps, "generated": [[end_s, 4096] for end_s, _, _ in steps]}
pathlib.Path(job["directory"], "result.json").write_text(json.dumps(result))
"""


def peer(name: str, script: str) -> Peer:
    return Peer(
        name,
        lambda job: [sys.executable, "-c", script, str(job.file)],
        lambda job: read_progress(Path(job.directory) / "result.json"),
    )


def test_a_peer_that_fails_is_listed_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peers = {"asyncrl": peer("asyncrl", WORKING), "verl": peer("verl", FAILING)}
    monkeypatch.setattr(program, "PEERS", peers)
    files = {name: tmp_path / name for name in ("compare.json", "compare.png")}
    options = ["--peers", "verl", "--sizes", "0.9M", "--lengths", "equal", "--steps", "3", "--rounds", "2"]
    program.main([*options, "--json", str(files["compare.json"]), "--plot", str(files["compare.png"])])
    found = json.loads(files["compare.json"].read_text(encoding="utf-8"))
    error = "exited with 3:\nLoading\nRuntimeError: this system needs a GPU"
    assert found["failures"] == [{"workload": "0.9M equal", "system": "verl", "error": error}]
    first, second = found["runs"]["0.9M equal"]["asyncrl"]
    assert found["runs"]["0.9M equal"]["verl"] == []
    assert all(run["step_s"] >= 0.7 and run["peak_mb"] > 1 for run in (first, second))
    # The meter reads from outside, so on a busy machine it misses what a process used after the last reading.
    assert 0 < sum(first["cpu_s"].values()) < 1.1
    shown = capsys.readouterr()
    assert "this system needs a GPU" in shown.out and "0.9M equal: verl exited with 3" in shown.err
    assert shown.err.count("exited with 3") == 1, "it is not tried again"
    assert files["compare.png"].stat().st_size > 0


def test_an_engine_that_started_as_an_unnamed_process_gets_its_role() -> None:
    name = "'VLLM' '::Worker'"  # in two parts, so that the command line does not have it
    script = f"import setproctitle; print('up'); input(); setproctitle.setproctitle({name}); print('named'); input()"
    usage = Usage(0.0)
    with subprocess.Popen(
        [sys.executable, "-uc", script, "spawn_main"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdin is not None and engine.stdout is not None
        assert engine.stdout.readline() == "up\n"  # a process has no command line for a moment when it starts
        sample(engine.pid, usage, {}, 0)
        assert list(usage.roles.values()) == ["rollout worker"]
        print(file=engine.stdin, flush=True)
        assert engine.stdout.readline() == "named\n"
        sample(engine.pid, usage, {}, 0)
        assert list(usage.roles.values()) == ["engine"]
        print(file=engine.stdin, flush=True)


def test_a_peer_without_a_whole_result_fails(job: Job) -> None:
    with pytest.raises(PeerFailedError, match="cannot be read: FileNotFoundError"):
        program.run_peer(peer("verl", ""), job)
    script = WORKING.replace('range(job["steps"])', "range(1)").replace("0.7", "0.0")
    with pytest.raises(PeerFailedError, match="reported 1 of 3 steps"):
        program.run_peer(peer("trl-hf", script), job)


def test_a_peer_that_trains_other_work_fails(job: Job) -> None:
    script = WORKING.replace("0.7", "0.05").replace("4096", "1659")
    run = program.run_peer(peer("trl-hf", script), job)
    with pytest.raises(PeerFailedError, match="trained 1659 tokens a step instead of 4096"):
        program.check_work(EQUAL, job, run)
    program.check_work(Workload("0.9M", "long", steps=3), job, run)


def test_the_reward_is_the_share_of_digits() -> None:
    assert [share_of_digits(text) for text in ("", "12", "1a", "²", "<pad>1")] == [0.0, 1.0, 0.5, 0.0, 1.0]


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--steps", "2"])
    assert "2 steps leave none to measure" in capsys.readouterr().err
