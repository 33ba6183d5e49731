"""Composition of files and overrides into one typed Config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from asyncrl.config.compose import (
    CONF,
    check_config,
    groups,
    load_config,
    recipes,
    split_arguments,
    to_yaml,
    value_sources,
)
from asyncrl.config.problems import ConfigProblem, errors
from asyncrl.config.rules import as_sync
from asyncrl.config.schema import Config
from asyncrl.config.sections import engine_arguments, quantization, trainer_rules
from asyncrl.config.sources import COMMAND_LINE, DTYPE, QUANTIZATION, SYNC, source_of
from asyncrl.core.failures import ConfigError
from tests.fakes.configurations import single


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write(tmp_path / "rows.jsonl", '{"prompt": "1+1"}\n' * 100)


CORRECTION = "algorithm.rollout_correction"


def only_problem(*overrides: str, source: str | None = None) -> ConfigProblem:
    return single(check_config(source, overrides).problems)


@pytest.mark.parametrize("recipe", recipes())
@pytest.mark.parametrize("mode", ["fully_async", "sync"])
def test_every_shipped_recipe_loads_without_a_warning(recipe: str, mode: str) -> None:
    checked = check_config(recipe, mode=mode)  # type: ignore[arg-type]
    assert checked.problems == ()
    assert checked.require().mode == mode


@pytest.mark.parametrize("example", ["openai_agent", "subprocess_agent"])
def test_the_agent_examples_have_valid_configurations(example: str) -> None:
    config = Path(__file__).parents[3] / "examples" / example / "config.yaml"
    assert errors(check_config(str(config), [], mode="fully_async").problems) == []


CHOICES = [(group, file.stem) for group in groups() for file in sorted((CONF / group).glob("*.yaml"))]


@pytest.mark.parametrize(("group", "option"), CHOICES)
def test_every_group_option_can_be_chosen(group: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_rules, "visible_gpus", lambda: 8)
    needs = {"gpu": ["trainer.device=cuda"], "on_policy_distill": ["teacher.path=asyncrl://quickstart"]}
    chosen = load_config(None, [f"{group}={option}", *needs.get(option, [])]).model_dump(mode="json")[group]
    values = yaml.safe_load((CONF / group / f"{option}.yaml").read_text(encoding="utf-8"))
    values = {key: value for key, value in values.items() if key != "defaults" and not isinstance(value, dict)}
    assert values.items() <= {key: value for key, value in chosen.items() if key in values}.items()


def test_two_ranks_train_as_the_quickstart_does() -> None:
    two, one = load_config("fsdp2_two_ranks").trainer, load_config().trainer
    assert (two.strategy, two.num_workers) == ("fsdp2", 2)
    assert two.model_copy(update={"strategy": one.strategy, "num_workers": one.num_workers}) == one


def test_without_a_config_the_quickstart_is_loaded() -> None:
    assert load_config() == load_config("quickstart")
    assert load_config().model.path == "asyncrl://quickstart"


QUANTIZED = ("rollout.quantization=fp8_per_channel", "rollout.dtype=bfloat16")


@pytest.mark.parametrize(
    ("more", "bypass_mode", "rollout_is", "limit"),
    [
        ([], False, "token", 0.1),
        (["weight_sync.max_mismatch_kl=0.5"], False, "token", 0.5),
        (["weight_sync={max_mismatch_kl: 0.5}"], False, "token", 0.5),
        (["algorithm=rloo"], True, "token", 0.1),
        (["algorithm=icepop"], False, "token", 0.1),
        ([f"{CORRECTION}.rollout_is=sequence"], False, "sequence", 0.1),
        ([f"{CORRECTION}.bypass_mode=false"], False, "token", 0.1),
    ],
)
def test_quantized_engines_set_the_correction_unless_it_is_given(
    more: list[str], bypass_mode: bool, rollout_is: str, limit: float
) -> None:
    checked = check_config(None, [*QUANTIZED, *more])
    config = checked.require()
    correction = config.algorithm.rollout_correction
    assert (correction.bypass_mode, correction.rollout_is) == (bypass_mode, rollout_is)
    assert config.weight_sync.max_mismatch_kl == limit
    assert not checked.warnings
    without = check_config(None, more).config
    assert without is not None and without.weight_sync.max_mismatch_kl == (limit if limit == 0.5 else 1e-4)
    sources = value_sources(None, [*QUANTIZED, *more], config)
    assert (sources.get("weight_sync.max_mismatch_kl") == QUANTIZATION) == (limit == 0.1)
    if not more:
        assert sources[f"{CORRECTION}.bypass_mode"] == sources[f"{CORRECTION}.rollout_is"] == QUANTIZATION


@pytest.mark.parametrize("given", ["bypass_mode: true", "rollout_is: none"])
@pytest.mark.parametrize("where", ["override", "mapping", "file", "other file", "group option"])
def test_a_correction_that_is_switched_off_stays_off_with_a_warning(
    tmp_path: Path, rows: str, given: str, where: str
) -> None:
    key, value = given.split(": ")
    nested = f"rollout_correction:\n  {given}\n"
    in_algorithm = "algorithm:\n  " + nested.replace("\n  ", "\n    ")
    data = f"data: {{train_files: [{rows}]}}\n"
    source, overrides = None, [*QUANTIZED]
    if where == "override":
        overrides.append(f"{CORRECTION}.{key}={value}")
    elif where == "mapping":
        overrides.append(f"{CORRECTION}={{{given}}}")
    elif where == "file":
        source = write(tmp_path / "mine.yaml", f"defaults: [quickstart]\n{in_algorithm}")
    elif where == "other file":
        write(tmp_path / "other.yaml", in_algorithm)
        source = write(tmp_path / "mine.yaml", f"defaults: [quickstart, other]\n{data}")
    else:
        write(tmp_path / "algorithm" / "mine.yaml", nested)
        source = write(tmp_path / "mine.yaml", "defaults: [quickstart, {override algorithm: mine}]\n")
    checked = check_config(source, overrides)
    correction = checked.require().algorithm.rollout_correction
    assert (correction.bypass_mode, correction.rollout_is) == (True, "none")
    assert [one.key for one in checked.warnings] == [f"{CORRECTION}.rollout_is"]


@pytest.mark.parametrize(("overrides", "limit"), [((), 1e-4), (("rollout.dtype=bfloat16",), 1e-3), (QUANTIZED, 0.1)])
def test_other_values_may_refer_to_the_defaults_that_the_quantization_sets(
    overrides: tuple[str, ...], limit: float
) -> None:
    reference = "async_training.staleness_threshold=${weight_sync.max_mismatch_kl}"
    text = "experiment_name=limit-${weight_sync.max_mismatch_kl}"
    config = load_config(None, [*overrides, reference, text])
    assert config.async_training.staleness_threshold == config.weight_sync.max_mismatch_kl == limit
    assert config.experiment_name == f"limit-{limit}"


@pytest.mark.parametrize("key", ["rollout.dtype", "trainer.dtype"])
def test_a_dtype_of_16_bits_raises_the_limit_unless_it_is_given(key: str) -> None:
    overrides = [f"{key}=bfloat16"]
    config = load_config(None, overrides)
    assert config.weight_sync.max_mismatch_kl == 1e-3
    assert value_sources(None, overrides, config)["weight_sync.max_mismatch_kl"] == DTYPE
    given = [*overrides, "weight_sync.max_mismatch_kl=null"]
    config = load_config(None, given)
    assert config.weight_sync.max_mismatch_kl is None
    assert value_sources(None, given, config)["weight_sync.max_mismatch_kl"] == COMMAND_LINE


def test_a_run_that_is_continued_with_quantized_engines_warns_of_its_limit(tmp_path: Path) -> None:
    """Its config.yaml has all keys, so none is set by the quantization."""
    source = write(tmp_path / "config.yaml", to_yaml(load_config()))
    checked = check_config(source, QUANTIZED)
    assert [one.key for one in checked.warnings] == [f"{CORRECTION}.rollout_is", "weight_sync.max_mismatch_kl"]


def test_a_quantization_that_needs_a_gpu_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("rollout.quantization=mxfp8", "rollout.dtype=bfloat16")
    assert "on GPUs only" in only_problem(*overrides).consequence
    monkeypatch.setattr(quantization, "visible_gpus", lambda: 1)
    assert check_config(None, overrides).problems == ()


def test_expert_parallelism_is_refused_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.32 starts such an engine there, whose workers die with their first requests."""
    parallel, more = "rollout.engine_kwargs={enable_expert_parallel: true}", "rollout.tensor_parallel_size=2"
    assert check_config(None, [parallel]).problems == (), "one process has all experts"
    assert "workers die with it on CPUs" in errors(check_config(None, [parallel, more]).problems)[0].consequence
    monkeypatch.setattr(engine_arguments, "visible_gpus", lambda: 2)
    assert not errors(check_config(None, [parallel, more]).problems)


def test_pipeline_stages_are_refused_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = ["rollout.pipeline_parallel_size=2"]
    assert "fails on CPUs" in errors(check_config(None, stages).problems)[0].consequence
    monkeypatch.setattr(engine_arguments, "visible_gpus", lambda: 2)
    assert not errors(check_config(None, stages).problems)


def test_the_formats_of_quantized_engines_are_those_of_vllm() -> None:
    from vllm.config.quantization import _ONLINE_SHORTHANDS

    of_linear_layers = {name for name, formats in _ONLINE_SHORTHANDS.items() if formats.linear is not None}
    assert set(get_args(quantization.Quantization)) == of_linear_layers, "of vLLM 0.32"


def test_the_four_mode_recipes_set_the_keys_of_their_modes() -> None:
    def settings(recipe: str) -> tuple[bool, bool, bool]:
        keys = load_config(recipe).async_training
        return keys.trigger_parameter_sync_step > 1, keys.staleness_threshold > 0, keys.partial_rollout

    assert settings("mode_a_on_policy")[:2] == (False, False)
    assert settings("mode_b_stream_off_policy")[:2] == (True, False)
    assert settings("mode_c_async_stale")[1:] == (True, False)
    assert settings("mode_d_async_partial")[1:] == (True, True)


def test_a_file_starts_from_the_schema_defaults_and_not_from_the_quickstart(tmp_path: Path, rows: str) -> None:
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


def test_a_file_chooses_group_options_and_may_add_new_ones(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    write(folder / "algorithm" / "mine.yaml", "clip_ratio_high: 0.3\n")
    text = "defaults: [_self_, quickstart, {async_training: mode_b}, {algorithm: mine}]\n"
    config = load_config(write(folder / "my.yaml", text))
    assert config.algorithm.clip_ratio_high == 0.3
    assert config.async_training.trigger_parameter_sync_step > 1
    assert load_config(str(folder / "my.yaml"), ["algorithm=grpo_kl"]).algorithm.use_kl_loss


def test_interpolations_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER_NAME", "me")
    text = "defaults: [quickstart]\nexperiment_name: n${rollout.n}-${oc.env:USER_NAME}\nrollout: {n: 4}\n"
    assert load_config(write(tmp_path / "my.yaml", text)).experiment_name == "n4-me"
    assert load_config(None, ["rollout.max_num_seqs=${rollout.n}"]).rollout.max_num_seqs == 8


def test_a_resolved_configuration_composes_to_itself(tmp_path: Path) -> None:
    odd = "rollout.engine_kwargs={additional_config: {a: 1, b.c: x}}"
    for mode in ("fully_async", "sync"):
        config = load_config(None, [odd, "async_training=mode_b"], mode=mode)  # type: ignore[arg-type]
        file = write(tmp_path / f"{mode}.yaml", to_yaml(config))
        assert load_config(file, mode=mode) == config  # type: ignore[arg-type]


def test_keys_of_a_disabled_section_and_of_a_mapping_can_be_set() -> None:
    config = load_config(
        None,
        ["data.train_files=[]", "data.val_files=[]", "data.reasoning_gym.task=chain_sum",
         "data.reasoning_gym.kwargs.min_terms=2", "+rollout.engine_kwargs.block_size=16"],
    )  # fmt: skip
    assert config.data.reasoning_gym is not None
    assert config.data.reasoning_gym.kwargs == {"min_terms": 2}
    assert config.rollout.engine_kwargs == {"block_size": 16}


def test_an_empty_mapping_on_the_command_line_removes_what_the_file_has(tmp_path: Path) -> None:
    rollout = "rollout: {engine_kwargs: {block_size: 16}, node_labels: {pool: a}}\n"
    file = write(tmp_path / "my.yaml", f"defaults: [quickstart]\n{rollout}ray: {{address: auto}}\n")
    config = load_config(file, ["rollout.engine_kwargs={}", "rollout.node_labels={}", "rollout.node_labels.zone=b"])
    assert (config.rollout.engine_kwargs, config.rollout.node_labels) == ({}, {"zone": "b"})


FREE_TEXT = ["007", "1e5", "true", "a,b", "with (parentheses)", 'say "hi"', "back\\slash", "end\\", '\\"', "x: y"]


@pytest.mark.parametrize("text", FREE_TEXT)
def test_free_text_on_the_command_line_needs_no_quotes(text: str) -> None:
    assert load_config(None, [f"project_name={text}"]).project_name == text


@pytest.mark.parametrize(
    ("text", "modules"), [("[q_proj,v_proj]", ("q_proj", "v_proj")), ("all-linear", "all-linear"), ("q_proj", "q_proj")]
)
def test_a_key_accepts_a_list_or_a_name(text: str, modules: str | tuple[str, ...]) -> None:
    overrides = ["model.lora_rank=4", f"model.target_modules={text}"]
    assert load_config(None, overrides).model.target_modules == modules


def test_a_problem_names_the_group_option_that_sets_the_value(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("defaults: [quickstart]\nseed: 1\ntrainer: {num_workers: 1}\n")
    problems = check_config(tmp_path / "my.yaml", ["trainer=gpu"]).problems
    assert {one.key: one.where for one in problems}["trainer.device"] == "trainer=gpu"


def test_null_unsets_a_text() -> None:
    assert load_config(None, ["run_dir=null"]).run_dir is None


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("async_training.stalenes_threshold=2", "async_training.stalenes_threshold", ".staleness_threshold?"),
        ("rollout.lr=1", "rollout.lr", "did you mean trainer.optim.lr?"),
        ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.n", "use rollout.n, which verl calls actor_"),
        ("rollout.nn=4", "rollout.nn", "did you mean rollout.n?"),
        ("trainer.steps=4", "trainer.steps", "did you mean trainer.total_training_steps?"),
        ("trainer.epochs=4", "trainer.epochs", "did you mean trainer.total_epochs or trainer.ppo_epochs?"),
        ("rollout.temperature=1", "rollout.temperature", "did you mean rollout.sampling.temperature?"),
        ("rolout.n=4", "rolout", "did you mean rollout?"),
        ("weight_sync.probe=true", "weight_sync.probe", "mean weight_sync.verify or weight_sync.max_mismatch_kl?"),
        ("rollout.engine.max_num_seqs=4", "rollout.engine", "did you mean rollout.engine_kwargs?"),
        (
            "trainer.context_parallel_size=2",
            "trainer.context_parallel_size",
            "did you mean trainer.ulysses_sequence_parallel_size?",
        ),
        ("nothing_like_it=4", "nothing_like_it", "the top level has mode, "),
        ("nope.name=4", "nope.name", "the top level has mode, "),
        ("trainer.optim.learning_rate=1", "trainer.optim.learning_rate", "use trainer.optim.lr, which TRL calls"),
        ("critic.optim.learning_rate=1", "critic.optim.learning_rate", "use critic.optim.lr"),
        ("trainer.logger=wandb", "trainer.logger", "use logging.sinks, which verl calls trainer.logger"),
        ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.name", "it is a key of verl; the engine"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
         "actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "use trainer.tensor_parallel_size, which verl"),
        ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
         "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", "leave it out, it is a key of verl"),
        ("tensor_model_parallel_size=2", "tensor_model_parallel_size", "use trainer.tensor_parallel_size, which slime"),
        ("actor_rollout_ref.no.key=1", "actor_rollout_ref.no.key", "leave it out, it is a key of verl"),
        ("data.train_batch_size=4", "data.train_batch_size", "use async_training.require_batches, which verl calls"),
        ("train_batch_size=4", "train_batch_size", "use async_training.require_batches, which verl calls"),
        ("per_device_train_batch_size=4", "per_device_train_batch_size", "use trainer.ppo_mini_batch_size, which TRL"),
        ("num_generations=4", "num_generations", "use rollout.n, which TRL calls num_generations"),
        ("trainer.num_generation=4", "trainer.num_generation", "use rollout.n, which TRL calls num_generations"),
        ("max_completion_length=4", "max_completion_length", "use rollout.response_length, which TRL"),
        ("vllm_mode=colocate", "vllm_mode", "for `colocate`, set placement=colocated"),
        ("orchestrator.group_size=4", "orchestrator.group_size", "use rollout.n, which prime-rl calls"),
        ("saver.freq_steps=4", "saver.freq_steps", "use trainer.save_freq, which AReaL calls"),
        ("n_samples_per_prompt=4", "n_samples_per_prompt", "use rollout.n, which slime calls"),
        ("data.reasoning_gym.tsk=x", "data.reasoning_gym.tsk", "did you mean data.reasoning_gym.task?"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_reported_with_the_key_that_means_it(override: str, key: str, expected: str) -> None:
    problem = next(p for p in check_config(None, [override]).problems if p.key == key)
    assert expected in problem.fix
    assert problem.where == "command line"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.n=true", "an integer > 0"),
        ("rollout.n=0", "greater than 0"),
        ("rollout.n=8.5", "an integer > 0"),
        ("rollout.n='8'", "an integer > 0"),
        ("rollout.dtype=bfloat", "did you mean bfloat16?"),
        ("trainer.device=gpu", "did you mean cuda?"),
        ("rollout.quantization=fp8", "did you mean fp8_per_tensor or fp8_per_block or fp8_per_channel?"),
        ("logging.sinks=wandb", "e.g. [wandb]"),
        ("profiler.steps=3", "give a list, each an integer > 0, e.g. [3]"),
        ("profiler.steps=[0]", "give a list, each an integer > 0 "),
        ("logging.sinks=tensorboard", "e.g. [tensorboard]"),
        ("trainer.optim.betas=[0.9]", "a list of 2"),
        ("model.path=null", "give text"),
        ("data.reasoning_gym.train_size=4", "Name of the reasoning-gym data set"),
        ("trainer.optim.lr=inf", "finite number"),
        ("trainer.optim.betas=[0.9,1.0]", "less than 1"),
        ("rollout.sampling.top_k=0", "no token could be drawn"),
        ("rollout.val.top_k=-2", "no token could be drawn"),
        (f"{CORRECTION}.rollout_rs='token_k1,seq_mean_k3'", "write [token_k1,seq_mean_k3], and a list of thresholds"),
        (f"{CORRECTION}.rollout_rs=token_k9", "there is no such value"),
        (f"{CORRECTION}.rollout_rs_threshold='0.5_2.0'", "bounds of a ratio, and here k1 is bounded in nats"),
        (f"{CORRECTION}.rollout_is_threshold='0.5_5.0'", "write 5.0, with rollout_is_threshold_low=0.5"),
        ("trainer.test_freq=0", "no number of steps"),
        ("trainer.save_freq=-2", "no number of steps"),
        ("rollout.n=4,8", "one run"),
        ("rollout=5", "rollout is a group"),
        ("reward=null", "reward is a group and has no option of this name"),
        ("algorithm=grpo_lk", "did you mean grpo_kl?"),
        ("~rollout.n", "every key has a default"),
        ("hydra.run.dir=x", "no effect"),
        ("rollout.n", "neither a config file nor an override"),
        ("ppo_critic", "put it first: ppo_critic KEY=VALUE"),
        ("rollout.n=[1", "cannot be read"),
        ("algorithm@x=grpo", "a group always sets the section"),
        ("rollout.multi_turn.tools.class_name=a", "class_name is not the number of an entry"),
        ("rollout.multi_turn.tools.*.mcp.url=a", "give the whole list, rollout.multi_turn.tools=[...]"),
        ("logging.sinks.x=1", "logging.sinks is a list"),
    ],
)
def test_an_invalid_override_is_reported_with_valid_ones(override: str, expected: str) -> None:
    problem = only_problem(override)
    assert expected in str(problem)
    assert problem.where == ("command line" if problem.key in override else "")  # a missing required key has no place


def test_all_problems_are_reported_at_once_with_their_places(tmp_path: Path) -> None:
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
    ("text", "expected"),
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
def test_an_unusable_file_is_reported(tmp_path: Path, text: str, expected: str) -> None:
    found = check_config(write(tmp_path / "my.yaml", text)).problems
    assert any(expected in str(problem) for problem in errors(found))


@pytest.mark.parametrize(
    ("entry", "value", "consequence", "fix"),
    [
        (
            "quickstrat",
            "quickstrat",
            "no recipe of this name, and no file quickstrat.yaml in",
            "did you mean quickstart?",
        ),
        ("mien", "mien", "no recipe of this name", "did you mean mine?"),
        ("{algoritm: grpo_kl}", {"algoritm": "grpo_kl"}, "there is no group algoritm", "did you mean algorithm?"),
        ("{rollout: {n: 4}}", {"rollout": {"n": 4}}, "is the name of a file", "write keys of rollout outside of"),
        ("{seed: 4}", {"seed": 4}, "there is no group seed", "Groups are algorithm"),
        (
            "{algorithm: grpo_lk}",
            {"algorithm": "grpo_lk"},
            "has no option of this name",
            "did you mean grpo_kl? Options",
        ),
    ],
)
def test_a_wrong_entry_of_the_defaults_is_reported_with_its_line(
    tmp_path: Path, entry: str, value: Any, consequence: str, fix: str
) -> None:
    write(tmp_path / "mine.yaml", "seed: 3\n")
    text = f"# first\ndefaults:\n  - quickstart\n  - {entry}\n"
    problem = single(check_config(write(tmp_path / "my.yaml", text)).problems)
    assert (problem.key, problem.value, problem.where) == ("defaults", value, "my.yaml line 4")
    assert consequence in problem.consequence
    assert fix in problem.fix


def test_a_file_may_build_on_another_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "mine.yaml", "seed: 3\n")
    for name in ("mine", "mine.yaml"):
        text = f"defaults: [quickstart, {name}, {{algorithm: null}}]\n"
        assert load_config(write(tmp_path / "my.yaml", text)).seed == 3


TOOL = {"class_name": "calculator"}


def test_an_entry_of_a_list_is_reported_with_its_own_line(tmp_path: Path) -> None:
    text = "defaults: [calculator]\nrollout:\n  multi_turn:\n    tools:\n      - class_name: calculator\n"
    file = write(
        tmp_path / "my.yaml", f"{text}      - class_name: calculator\n        timout_s: 3\n      - calculator\n"
    )
    entry, key = check_config(file).problems
    if entry.key.endswith("timout_s"):
        entry, key = key, entry
    assert (entry.key, entry.where) == ("rollout.multi_turn.tools.2", "my.yaml line 8")
    assert (key.key, key.where) == ("rollout.multi_turn.tools.1.timout_s", "my.yaml line 7")
    given = only_problem("rollout.multi_turn.tools=[{class_name: calculator}, {timout_s: 3}]", source=file)
    assert given.where == "command line"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({**TOOL, "timout_s": 3}, ("tools.0.timout_s = 3", "there is no such key\n    fix: did you mean timeout_s?")),
        ({**TOOL, "max_concurrency": 0}, ("tools.0.max_concurrency = 0", "greater than 0", "an integer > 0")),
        ({"mcp": {"urrl": "x"}}, ("tools.0.mcp.urrl", "did you mean url?")),
        ({"class_name": 3}, ("tools.0.class_name = 3", "valid string")),
        ("calculator", ("tools.0 = calculator", "give a section of keys")),
    ],
)
def test_an_entry_of_a_list_is_reported_with_its_number(tmp_path: Path, entry: Any, expected: tuple[str, ...]) -> None:
    tree = {"defaults": ["calculator"], "rollout": {"multi_turn": {"tools": [entry]}}}
    problem = str(only_problem(source=write(tmp_path / "my.yaml", yaml.safe_dump(tree))))
    assert all(text in problem for text in expected), problem


def test_entries_of_lists_are_read_from_a_file(tmp_path: Path) -> None:
    functions = "functions: [{name: brief, function: exact_match, weight: 0.5}]"
    judge = "judge: {model: judge-1, base_url: 'http://127.0.0.1:8000/v1', params: {temperature: 0}}"
    reward = load_config(
        write(tmp_path / "my.yaml", f"defaults: [quickstart]\nreward: {{{functions}, {judge}}}\n")
    ).reward
    assert (reward.functions[0].name, reward.functions[0].weight) == ("brief", 0.5)
    assert reward.judge.params == {"temperature": 0}


def test_a_single_file_needs_no_list(tmp_path: Path) -> None:
    rows = str(write(tmp_path / "rows.jsonl", "{}"))
    file = write(tmp_path / "my.yaml", f"data: {{train_files: {rows}, val_files: []}}\n")
    assert load_config(file, [f"data.val_files={rows}"]).data.val_files == (rows,)
    assert load_config(file).data.train_files == (rows,)


def test_a_file_of_another_system_is_named_before_its_keys(tmp_path: Path) -> None:
    verl = write(tmp_path / "verl.yaml", "actor_rollout_ref: {rollout: {n: 4}}\ntrainer: {project_name: x}\n")
    first, *others = check_config(verl).problems
    assert (first.key, first.consequence) == ("config", "it is a configuration of verl")
    assert f"asyncrl migrate {verl}" in first.fix
    assert [one.fix for one in others if one.key == "trainer.project_name"] == [
        "use project_name, which verl calls trainer.project_name"
    ]
    trl = write(tmp_path / "trl.yaml", "num_generations: 4\nlearning_rate: 1e-6\nmax_completion_length: 9\nbeta: 0\n")
    first, *others = check_config(trl).problems
    assert first.consequence == "it is a configuration of TRL" and "docs/coming-from.md" in first.fix
    assert [one.key for one in others].count("data.train_files") == 1
    single_key = write(tmp_path / "mine.yaml", "num_generations: 4\n")
    assert "config" not in [one.key for one in check_config(single_key).problems]


@pytest.mark.parametrize(
    ("overrides", "runs_in"),
    [
        (["async_training=mode_a", "async_training.staleness_threshold=2"], "mode_d"),
        (["async_training=mode_b", "async_training.trigger_parameter_sync_step=1"], "mode_a"),
        (["async_training=mode_d", "async_training.partial_rollout=false"], "mode_c"),
        (["async_training=mode_b", "async_training.trigger_parameter_sync_step=8"], None),
        (["async_training=mode_c", "async_training.staleness_threshold=3"], None),
        (["async_training.staleness_threshold=0"], None),
    ],
)
def test_values_of_another_mode_than_the_chosen_one_give_a_warning(overrides: list[str], runs_in: str | None) -> None:
    found = [one for one in check_config(None, overrides).problems if one.key == "async_training"]
    assert [one.severity for one in found] == (["warning"] if runs_in else [])
    assert all(f"the run is in {runs_in}: it has trigger" in one.consequence for one in found)


def test_a_mode_in_the_defaults_of_a_file_is_chosen(tmp_path: Path) -> None:
    head = "defaults: [quickstart, {override async_training: mode_a}]\n"
    assert check_config(write(tmp_path / "a.yaml", head)).problems == ()
    problem = only_problem(
        source=str(write(tmp_path / "b.yaml", f"{head}async_training: {{staleness_threshold: 1}}\n"))
    )
    assert (problem.key, problem.value, problem.severity) == ("async_training", "mode_a", "warning")


@pytest.mark.parametrize(("text", "line"), [("seed: 1\nseed: 2\n", 2), ("trainer:\n\tx: 2\n", 2), ("a: [\n", 2)])
def test_an_error_of_yaml_names_the_file(tmp_path: Path, text: str, line: int) -> None:
    file = write(tmp_path / "my.yaml", text)
    assert f'"{file}", line {line}' in only_problem(source=str(file)).consequence


def test_the_name_of_a_column_is_no_secret() -> None:
    assert only_problem("sft.prompt_key=question").value == "question"
    assert only_problem("reward.api_key=canary").value == "…"


def test_a_mapping_has_the_sources_of_its_values(tmp_path: Path) -> None:
    write(tmp_path / "rows.py", "def rows(split, size, more): return []\n")
    text = (
        f"data: {{dataset: '{tmp_path}/rows.py:rows', dataset_kwargs: {{more: 1}}, train_files: [], val_files: []}}\n"
    )
    file = write(tmp_path / "my.yaml", f"defaults: [quickstart]\n{text}")
    overrides = ["data.dataset_kwargs.size=512"]
    sources = value_sources(file, overrides, load_config(file, overrides))
    assert source_of("data.dataset_kwargs", sources) == "my.yaml line 2, command line"
    assert source_of("data.sampler", sources) == "default"


@pytest.mark.parametrize("kind", ["pipe", "directory"])
def test_a_configuration_that_is_no_regular_file_is_reported_as_such(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "my.yaml"
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    problem = only_problem(source=str(path))
    assert (problem.key, problem.value) == ("config", str(path))
    assert f"it is no regular file but a {kind}" in problem.consequence
    assert "write the configuration into a file" in problem.fix


def test_a_missing_file_is_reported_with_a_similar_one(tmp_path: Path) -> None:
    write(tmp_path / "mine.yaml", "")
    assert "mine.yaml?" in only_problem(source=str(tmp_path / "mina.yaml")).fix
    assert "did you mean quickstart?" in only_problem(source="quickstrat").fix


def test_sync_mode_adds_a_barrier_and_keeps_the_samples_per_version() -> None:
    both = ["async_training.trigger_parameter_sync_step=4", "async_training.require_batches=2"]
    free, barrier = load_config(None, both), load_config(None, both, mode="sync")
    keys = barrier.async_training
    assert (keys.require_batches, keys.trigger_parameter_sync_step) == (8, 1)
    assert (keys.staleness_threshold, keys.partial_rollout) == (0, False)
    assert barrier.samples_per_version == free.samples_per_version
    assert barrier.samples_per_lease == barrier.samples_per_version
    assert as_sync(barrier) == barrier


@pytest.mark.parametrize(
    ("arguments", "split"),
    [
        ((), (None, ())),
        (("my.yaml", "rollout.n=4"), ("my.yaml", ("rollout.n=4",))),
        (("rollout.n=4",), (None, ("rollout.n=4",))),
        (("~data.val_files",), (None, ("~data.val_files",))),
        (("dapo", "~data.val_files"), ("dapo", ("~data.val_files",))),
    ],
)
def test_the_first_argument_is_a_config_unless_it_is_an_override(
    arguments: tuple[str, ...], split: tuple[str | None, tuple[str, ...]]
) -> None:
    assert split_arguments(arguments) == split


def test_a_supervised_run_has_the_defaults_in_sections_that_only_a_launch_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    (tmp_path / "train.jsonl").write_text("{}\n")
    file = tmp_path / "both.yaml"
    file.write_text(
        "data: {train_files: ['${oc.env:FOLDER}/train.jsonl']}\n"
        "reward: {function: none, kwargs: {where: '${oc.env:FOLDER}'}, judge: {model: one, base_url: 'http://j/v1'}}\n"
        "rollout: {n: 4, sampling: {temperature: 0.5}}\n"
        "trainer: {ppo_epochs: 2, ppo_max_token_len: 64}\n"
        "sft: {max_length: 64}\n"
    )
    config = load_config(file, mode="sft")
    assert (config.mode, config.longest_trajectory, config.trainer.ppo_epochs) == ("sft", 64, 1)
    assert (config.rollout, config.reward) == (Config().rollout, Config().reward)
    assert config.public_values()["data"]["train_files"] == ["${oc.env:FOLDER}/train.jsonl"]
    assert config.public_values()["reward"]["kwargs"] == {}
    (problem,) = check_config(file, ["data.sampler=nowhere.py:order"], mode="sft").warnings[-1:]
    assert problem.key == "data.sampler"


def test_the_configuration_of_a_run_is_launched_in_the_other_mode(tmp_path: Path) -> None:
    file = tmp_path / "mode=sync" / "config.yaml"
    file.parent.mkdir()
    file.write_text(to_yaml(load_config(None, [], mode="sync")))
    assert split_arguments([str(file), "seed=2"]) == (str(file), ("seed=2",)), "a path may have ="
    config = load_config(file, mode="sync")
    assert value_sources(file, [], config, mode="sync")["async_training.partial_rollout"].startswith("config.yaml line")
    problem = check_config(file).problems[0]
    assert (problem.key, "set mode=fully_async" in problem.fix) == ("mode", True)
    overrides = ["mode=sync"]
    file.write_text(to_yaml(load_config(None, ["async_training=mode_b"])))
    config = load_config(file, overrides, mode="sync")
    sources = value_sources(file, overrides, config, mode="sync")
    assert sources["async_training.require_batches"] == sources["mode"] == SYNC
