"""From files and overrides to one typed Config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config import engine_checks, rules, sources
from asyncrl.config.compose import examine, load_config, to_yaml
from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.failures import ConfigError


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write(tmp_path / "rows.jsonl", '{"prompt": "1+1"}\n' * 100)


def only_problem(*overrides: str, source: str | None = None) -> Problem:
    (problem,) = examine(source, overrides).problems
    return problem


@pytest.mark.parametrize("recipe", sources.recipes())
@pytest.mark.parametrize("mode", ["fully_async", "sync"])
def test_every_shipped_recipe_loads_without_a_warning(recipe: str, mode: str) -> None:
    outcome = examine(recipe, mode=mode)  # type: ignore[arg-type]
    assert outcome.problems == ()
    assert outcome.require().mode == mode


CHOICES = [(group, file.stem) for group in sources.groups() for file in sorted((sources.CONF / group).glob("*.yaml"))]


def delta_of(group: str, option: str) -> dict[str, Any]:
    """What an option's file sets, without the options that it builds on."""
    tree = yaml.safe_load((sources.CONF / group / f"{option}.yaml").read_text(encoding="utf-8"))
    return {key: value for key, value in tree.items() if key != "defaults"}


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_group_option_can_be_chosen(group: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "visible_gpus", lambda: 8)
    also = ["trainer.device=cuda"] if option == "gpu" else []
    config = load_config(None, [f"{group}={option}", *also])
    delta = delta_of(group, option)
    chosen = config.model_dump(mode="json")[group]
    assert {key: chosen[key] for key in delta if not isinstance(delta[key], dict)} == {
        key: value for key, value in delta.items() if not isinstance(value, dict)
    }


def test_packaged_yaml_holds_no_unknown_key() -> None:
    for group, option in CHOICES:
        assert set(delta_of(group, option)) <= set(type(getattr(Config(), group)).model_fields), (group, option)


def test_two_ranks_train_as_the_quickstart_does() -> None:
    two, one = load_config("fsdp2_two_ranks").trainer, load_config().trainer
    assert (two.strategy, two.num_workers) == ("fsdp2", 2)
    assert two.model_copy(update={"strategy": one.strategy, "num_workers": one.num_workers}) == one


def test_no_config_is_the_quickstart() -> None:
    assert load_config() == load_config("quickstart")
    assert load_config().model.path == "asyncrl://quickstart"


def test_the_four_modes_are_those_of_the_design() -> None:
    def knobs(recipe: str) -> tuple[bool, bool, bool]:
        drift = load_config(recipe).async_training
        return drift.trigger_parameter_sync_step > 1, drift.staleness_threshold > 0, drift.partial_rollout

    assert knobs("mode_a_on_policy")[:2] == (False, False)
    assert knobs("mode_b_stream_off_policy")[:2] == (True, False)
    assert knobs("mode_c_async_stale")[1:] == (True, False)
    assert knobs("mode_d_async_partial")[1:] == (True, True)


def test_a_file_changes_the_schema_defaults_and_nothing_of_the_quickstart_leaks_in(tmp_path: Path, rows: str) -> None:
    file = write(tmp_path / "my.yaml", f"data: {{train_files: [{rows}]}}\nrollout: {{n: 4}}\n")
    config = load_config(file)
    expected = Config().model_dump() | {"data": config.data.model_dump(), "rollout": config.rollout.model_dump()}
    assert config.model_dump() == expected
    assert config.data.train_files == (rows,)
    assert config.rollout == Config().rollout.model_copy(update={"n": 4})


def test_later_sources_win(tmp_path: Path) -> None:
    file = write(tmp_path / "my.yaml", "defaults: [quickstart]\nrollout: {n: 4, response_length: 50}\n")
    config = load_config(file, ["rollout.n=6"])
    assert (config.rollout.n, config.rollout.response_length) == (6, 50)
    assert config.trainer == load_config().trainer


def test_a_file_chooses_groups_and_brings_options_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    write(folder / "algorithm" / "mine.yaml", "clip_ratio_high: 0.3\n")
    text = "defaults: [_self_, quickstart, {async_training: mode_b}, {algorithm: mine}]\n"
    config = load_config(write(folder / "my.yaml", text))
    assert config.algorithm.clip_ratio_high == 0.3
    assert config.async_training.trigger_parameter_sync_step > 1
    assert load_config(str(folder / "my.yaml"), ["algorithm=grpo_kl"]).algorithm.use_kl_loss


def test_interpolations_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHO", "me")
    text = "defaults: [quickstart]\nexperiment_name: n${rollout.n}-${oc.env:WHO}\nrollout: {n: 4}\n"
    assert load_config(write(tmp_path / "my.yaml", text)).experiment_name == "n4-me"
    assert load_config(None, ["rollout.max_num_seqs=${rollout.n}"]).rollout.max_num_seqs == 8


def test_a_resolved_configuration_composes_to_itself(tmp_path: Path) -> None:
    for mode in ("fully_async", "sync"):
        config = load_config(None, ["rollout.engine_kwargs={a: 1, b.c: x}", "async_training=mode_b"], mode=mode)  # type: ignore[arg-type]
        file = write(tmp_path / f"{mode}.yaml", to_yaml(config))
        assert load_config(file, mode=mode) == config  # type: ignore[arg-type]


def test_keys_below_a_section_that_is_off_and_in_free_mappings(tmp_path: Path) -> None:
    config = load_config(
        None,
        ["data.train_files=[]", "data.val_files=[]", "data.reasoning_gym.task=chain_sum",
         "data.reasoning_gym.kwargs.min_terms=2", "+rollout.engine_kwargs.block_size=16"],
    )  # fmt: skip
    assert config.data.reasoning_gym is not None
    assert config.data.reasoning_gym.kwargs == {"min_terms": 2}
    assert config.rollout.engine_kwargs == {"block_size": 16}


FREE_TEXT = ["007", "1e5", "true", "a,b", "with (parentheses)", 'say "hi"', "back\\slash", "end\\", '\\"', "x: y"]


@pytest.mark.parametrize("text", FREE_TEXT)
def test_free_text_on_the_command_line_is_taken_as_it_is(text: str) -> None:
    assert load_config(None, [f"project_name={text}"]).project_name == text


@pytest.mark.parametrize(
    ("text", "modules"), [("[q_proj,v_proj]", ("q_proj", "v_proj")), ("all-linear", "all-linear"), ("q_proj", "q_proj")]
)
def test_a_list_is_a_list_where_a_name_would_do_too(text: str, modules: str | tuple[str, ...]) -> None:
    overrides = ["model.lora_rank=4", f"model.target_modules={text}"]
    assert load_config(None, overrides).model.target_modules == modules


def test_null_is_null_where_text_may_be_missing() -> None:
    assert load_config(None, ["run_dir=null"]).run_dir is None


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("async_training.stalenes_threshold=2", "async_training.stalenes_threshold", ".staleness_threshold?"),
        ("rollout.lr=1", "rollout.lr", "did you mean trainer.optim.lr?"),
        ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.n", "did you mean rollout.n?"),
        ("rollout.temperature=1", "rollout.temperature", "did you mean rollout.sampling.temperature?"),
        ("rolout.n=4", "rolout", "did you mean rollout?"),
        ("nothing_like_it=4", "nothing_like_it", "the top has mode, "),
        ("data.reasoning_gym.tsk=x", "data.reasoning_gym.tsk", "did you mean data.reasoning_gym.task?"),
    ],
)  # fmt: skip
def test_an_unknown_key_gets_the_nearest(override: str, key: str, says: str) -> None:
    problem = next(p for p in examine(None, [override]).problems if p.key == key)
    assert says in problem.fix
    assert problem.where == "command line"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.n=true", "an integer > 0"),
        ("rollout.n=0", "greater than 0"),
        ("rollout.n=8.5", "an integer > 0"),
        ("rollout.n='8'", "an integer > 0"),
        ("rollout=5", "a section of keys"),
        ("rollout.dtype=bfloat", "did you mean bfloat16?"),
        ("data.train_files=a.jsonl", "e.g. [a.jsonl]"),
        ("profiler.steps=3", "give a list, each an integer > 0, e.g. [3]"),
        ("profiler.steps=[0]", "give a list, each an integer > 0 "),
        ("logging.sinks=tensorboard", "e.g. [tensorboard]"),
        ("logging.sinks=jsnl", "did you mean [jsonl]? It is a list, each one of jsonl,"),
        ("logging.sinks=[jsnl]", "did you mean jsonl? It is a list, each one of jsonl,"),
        ("logging.sinks=[xyz]", "give a list, each one of jsonl, tensorboard, wandb, mlflow, trackio, prometheus ("),
        ("trainer.optim.betas=[0.9]", "a list of 2"),
        ("model.path=null", "give text"),
        ("data.reasoning_gym.train_size=4", "Data set name"),
    ],
)
def test_a_wrong_type_or_value(override: str, says: str) -> None:
    if override.startswith("rollout=5"):
        assert "rollout is a group" in only_problem(override).consequence
        return
    assert says in str(only_problem(override))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rollout.n=4,8", "one run"),
        ("algorithm=grpo_lk", "did you mean grpo_kl?"),
        ("~rollout.n", "every key has a default"),
        ("hydra.run.dir=x", "no effect"),
        ("rollout.n", "neither a config file nor an override"),
        ("ppo_critic", "put it first: ppo_critic KEY=VALUE"),
        ("rollout.n=[1", "cannot be read"),
        ("algorithm@x=grpo", "groups have one place"),
    ],
)
def test_overrides_that_are_none(override: str, says: str) -> None:
    problem = only_problem(override)
    assert says in str(problem)
    assert problem.where == "command line"


def test_all_problems_are_told_at_once_with_their_places(tmp_path: Path) -> None:
    text = "defaults: [quickstart]\nrollout:\n  m: 4\n  n: many\ntrainer: {optim: {learning_rate: 1}}\n"
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path / "my.yaml", text), ["algorithm=nope", "timeouts.call=3"])
    message = caught.value.message
    assert message.startswith("5 problems in the configuration:")
    for expected in (
        "rollout.m = 4  (my.yaml line 3)",
        "rollout.n = many  (my.yaml line 4)",
        "trainer.optim.learning_rate = 1  (my.yaml line 5)",
        "algorithm = nope  (command line)",
        "timeouts.call = 3  (command line)\n    there is no such key, so it would have no effect\n"
        "    fix: did you mean timeouts.call_s?",
    ):
        assert expected in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rollout: [", "cannot be read as YAML"),
        ("- a\n- b\n", "not a mapping"),
        ("rollout: {n: 4}\nrollout: {n: 5}\n", "duplicate key"),
        ("defaults: quickstart\n", "defaults are a list"),
        ("defaults: [{algorithm: nope}]\n", "nope"),
        ("defaults: [nope]\n", "nope"),
        ("defaults: [quickstart]\nexperiment_name: ${no.such}\n", "no.such"),
        ("defaults: [quickstart]\ndata:\n  reasoning_gym:\n    task: ???\n", "data.reasoning_gym.task"),
        ("defaults: [quickstart]\nmode: sync\n", "the command sets it"),
        ("defaults: [quickstart]\nrollout:\n", "a section of keys"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"problem") as caught:
        load_config(write(tmp_path / "my.yaml", text))
    assert says in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path / "mine.yaml", "")
    assert "mine.yaml?" in only_problem(source=str(tmp_path / "mina.yaml")).fix
    assert "did you mean quickstart?" in only_problem(source="quickstrat").fix


def test_sync_is_a_barrier_over_the_same_samples() -> None:
    both = ["async_training.trigger_parameter_sync_step=4", "async_training.require_batches=2"]
    free, barrier = load_config(None, both), load_config(None, both, mode="sync")
    drift = barrier.async_training
    assert (drift.require_batches, drift.trigger_parameter_sync_step) == (8, 1)
    assert (drift.staleness_threshold, drift.partial_rollout) == (0, False)
    assert barrier.samples_per_version == free.samples_per_version
    assert barrier.samples_per_lease == barrier.samples_per_version
    assert rules.as_sync(barrier) == barrier
