"""Data sets: files, error messages for rows, overlong prompts, and the order of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.config.sections.data import DataConfig, ModelConfig, ReasoningGymConfig
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.config.sections.run import RayConfig
from asyncrl.config.sections.trainer import TrainerConfig
from asyncrl.core.failures import ConfigError, DataError
from asyncrl.core.types import SampleId
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts.chat_template import cut, load_tokenizer
from rollouter.prompts.check import check_data
from rollouter.prompts.dataset import FileRows, GymRows, parse_row
from rollouter.prompts.encoding import RowEncoder, encode_rows
from rollouter.prompts.source import LoadedPrompts, PromptSet, ShuffledPrompts, epoch_order, load_prompts
from tests.fakes.hostile import BROKEN_JSON, messages, texts, values

QUICKSTART = "asyncrl://quickstart"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelConfig(path=QUICKSTART))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> DataCache:
    return DataCache(tmp_path_factory.mktemp("cache"))


def question(text: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], **fields}


def write_jsonl(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def unscored(*train_files: str, **data: Any) -> Config:
    """Return a configuration for rows without correct answers."""
    return Config(data=DataConfig(train_files=train_files, **data), reward=RewardConfig(function="none"))


def load(tmp_path: Path, tokenizer: Any, *files: str, **data: Any) -> LoadedPrompts:
    config = Config(data=DataConfig(train_files=files, **data))
    return load_prompts(config, tokenizer, tmp_path / "cache")


# ------------------------------------------------------------------------------------------------ files


def test_verl_parquet_loads_unchanged(tmp_path: Path, tokenizer: Any) -> None:
    """The rows have the columns of verl's gsm8k script and, as in verl's countdown task, a mapping as ground truth."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n}+{n}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": {"target": 2 * n, "numbers": [n, n]}},
            "extra_info": {"split": "train", "index": n, "answer": "…", "question": f"{n}+{n}="},
        }
        for n in range(3)
    ]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    train = load(tmp_path, tokenizer, str(path), shuffle=False).train
    prompt = train.at(SampleId(0, 3))
    assert len(train) == 3
    assert prompt.data_source == "openai/gsm8k"
    assert prompt.ground_truth == {"target": 4, "numbers": [2, 2]}
    assert prompt.extra_info["index"] == 2
    assert prompt.messages == ({"role": "user", "content": "2+2="},)
    assert prompt.prompt_ids.dtype == np.int32
    expected = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
    assert prompt.prompt_ids.tolist() == expected


def test_jsonl_rows_keep_their_own_keys_and_types(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(
        tmp_path / "a.jsonl",
        question("1+1=", reward_model={"ground_truth": "007"}, extra_info={"a": 1}),
        "",
        {"prompt": "1+2=", "reward_model": {"ground_truth": 7}, "extra_info": {"b": "x"}},
        question("1+3=", data_source=""),
    )
    train = load(tmp_path, tokenizer, path, shuffle=False).train
    first, second, third = (train.at(SampleId(0, index)) for index in (1, 2, 3))
    assert (first.ground_truth, first.extra_info) == ("007", {"a": 1})
    assert (second.ground_truth, second.extra_info) == (7, {"b": "x"})
    assert second.messages == ({"role": "user", "content": "1+2="},)
    assert second.data_source == third.data_source == "default", "a metric needs a name"


def test_several_files_of_different_kinds_form_one_data_set(tmp_path: Path, tokenizer: Any) -> None:
    (data := tmp_path / "data").mkdir()
    lines = write_jsonl(data / "a.jsonl", question("1"), question("2"))
    pq.write_table(pa.Table.from_pylist([question("3")]), data / "b.parquet")
    train = load(tmp_path, tokenizer, lines, str(data / "b.parquet"), shuffle=False).train
    assert [train.at(SampleId(0, i)).messages[0]["content"] for i in (1, 2, 3)] == ["1", "2", "3"]
    assert sorted(file.name for file in data.iterdir()) == ["a.jsonl", "b.parquet"], "caches are elsewhere"


def test_messages_from_parquet_have_no_null_keys(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "1"}, {"role": "tool", "content": "2", "name": "calc"}]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    rows = FileRows.open([str(tmp_path / "a.parquet")], key="data.train_files", cache=DataCache(tmp_path / "cache"))
    assert parse_row(rows.row(0), "here").messages[0] == {"role": "user", "content": "1"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"data_source": "x"}, "there is no field 'prompt'; the row has data_source"),
        ({"prompt": []}, "field 'prompt' is []"),
        ({"prompt": [{"content": "hi"}]}, "field 'prompt[0]'"),
        ({"prompt": 3}, "field 'prompt' is 3"),
        (
            {"prompt": [*question("1")["prompt"], {"role": "assistant", "content": "2"}]},
            "field 'prompt[1]' is a message of",
        ),
        (question("1", reward_model="4"), "field 'reward_model' is '4'"),
        (question("1", extra_info=[1]), "field 'extra_info' is [1]"),
        (question("1", extra_info={"sampling_params": {"seed": 1}}), "sampling_params.seed"),
        (question("1", extra_info={"sampling_params": {"max_tokens": 0}}), "sampling_params.max_tokens' is 0"),
        (question("1", extra_info={"sampling_params": {"top_p": 0.5}}), "sampling_params.top_p' is 0.5"),
        (question("1", extra_info={"sampling_params": {"logit_bias": {"3": 1}}}), "sampling_params.logit_bias' is"),
        ('{"prompt": ', "not JSON"),
        ("[1]", "not a JSON object"),
    ],
)
def test_errors_name_the_malformed_row(tmp_path: Path, tokenizer: Any, row: Any, expected: str) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", question("1"), "", row)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, tokenizer, path)
    (problem,) = check_data(unscored(path))
    assert (problem.key, problem.value, problem.severity) == ("data.train_files", path, "error")
    for text in (caught.value.message, problem.consequence):
        assert f"{path}, line 3" in text
        assert expected in text


def test_rows_are_checked_before_the_run_as_far_as_it_uses_them_and_time_allows(tmp_path: Path) -> None:
    good = write_jsonl(
        tmp_path / "good.jsonl", question("1"), question("2", extra_info={"sampling_params": {"n": None}})
    )
    bad = write_jsonl(tmp_path / "bad.jsonl", question("1"), {"prompt": 3}, {"prompt": 4})
    pq.write_table(pa.Table.from_pylist([question("1"), {"prompt": []}]), tmp_path / "bad.parquet")
    (tmp_path / "empty.jsonl").write_text("")
    parquet, empty = str(tmp_path / "bad.parquet"), str(tmp_path / "empty.jsonl")

    def found(*train_files: str, **data: Any) -> list[tuple[str, str]]:
        return [(one.key, one.consequence) for one in check_data(unscored(*train_files, **data))]

    assert found(good, QUICKSTART + "/train.jsonl", val_files=(good, "nowhere.jsonl")) == []
    (train, row), (val, other) = found(good, bad, val_files=(parquet,))
    assert (train, val) == ("data.train_files", "data.val_files")
    assert row.startswith(f"{bad}, line 2: field 'prompt' is 3; expected")
    assert other.startswith(f"{parquet}, row 2: field 'prompt' is []; expected")
    assert found(empty) == [("data.train_files", "the file is empty: it has no rows")]
    assert found(good, bad, max_train_samples=3) == []
    assert len(found(good, bad, max_train_samples=4)) == 1
    own = {"temperature": 0.5}
    rows = write_jsonl(tmp_path / "own.jsonl", question("1", extra_info={"sampling_params": own}))
    assert [key for key, _ in found(rows, val_files=(rows,))] == ["data.train_files"]
    ticks = iter(range(100))
    late = check_data(unscored(bad), limit_s=0.5, clock=lambda: next(ticks))
    assert list(late) == []
    cluster = unscored(bad).model_copy(update={"ray": RayConfig(address="auto")})
    assert [one.severity for one in check_data(cluster)] == ["warning"]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("data", "reward", "key", "expected"),
    [
        ({"ground_truth_key": "answer"}, "exact_match", None, ""),
        ({"ground_truth_key": "anser"}, "exact_match", "data.ground_truth_key", "set data.ground_truth_key=answer"),
        ({"ground_truth_key": "anser"}, "none", "data.ground_truth_key", "set data.ground_truth_key=answer"),
        ({}, "exact_match", "data.ground_truth_key", "set data.ground_truth_key=answer, or use another"),
        ({}, "math_verify", "data.ground_truth_key", "set data.ground_truth_key=answer, or use another"),
        ({"ground_truth_key": "meta"}, "none", None, ""),
        ({}, "none", None, ""),
        ({}, "rewards.py:mine", None, ""),
        ({"ground_truth_key": "meta.levl"}, "exact_match", "data.ground_truth_key", "ground_truth_key=meta.level"),
        ({"reward_fn_key": "orign"}, "none", "data.reward_fn_key", "set data.reward_fn_key=origin"),
        ({"ground_truth_key": "answer", "image_key": "image"}, "none", "data.image_key", "or leave it out"),
    ],
)  # fmt: skip
def test_the_columns_that_the_configuration_names_exist_and_built_in_rewards_have_answers(
    tmp_path: Path, suffix: str, data: dict[str, str], reward: str, key: str | None, expected: str
) -> None:
    row = {"question": "1+1=", "answer": "2", "origin": "here", "meta": {"level": 1}}
    path = str(tmp_path / f"a.{suffix}")
    if suffix == "jsonl":
        write_jsonl(tmp_path / "a.jsonl", row)
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    names = DataConfig(train_files=(path,), prompt_key="question", **data)
    found = list(check_data(Config(data=names, reward=RewardConfig(function=reward))))
    assert [(one.key, one.severity) for one in found] == ([(key, "error")] if key else [])
    assert all(expected in one.fix and "question, answer, origin, meta.level" in one.consequence for one in found)


def test_a_row_without_an_answer_among_others_is_named(tmp_path: Path) -> None:
    rows = [question("1", reward_model={"ground_truth": truth}) for truth in ("1", None)]
    config = Config(data=DataConfig(train_files=(write_jsonl(tmp_path / "a.jsonl", *rows),)))
    (problem,) = check_data(config)
    assert f"{tmp_path}/a.jsonl, line 2: the row has no correct answer" in problem.consequence


def test_the_fix_of_a_wrong_row_or_file_fits_its_cause(tmp_path: Path) -> None:
    named = write_jsonl(tmp_path / "named.jsonl", {"question": "1"})
    cut, empty = tmp_path / "cut.parquet", tmp_path / "empty.parquet"
    cut.write_bytes(b"PAR1")
    empty.write_bytes(b"")
    fixes = {name: next(check_data(unscored(name))).fix for name in (named, str(cut), str(empty))}
    assert fixes[named].startswith("set data.prompt_key to the field")
    assert fixes[str(cut)] == "give another file, or write it again"
    assert fixes[str(empty)] == "give a file with prompts"


@pytest.mark.parametrize(
    ("files", "error", "message"),
    [
        (["nowhere.jsonl"], ConfigError, r"data\.train_files: .*nowhere\.jsonl is not a file"),
        (["a.csv"], ConfigError, r"expected \.parquet or \.jsonl"),
        (["a.parquet"], ConfigError, r"a\.parquet: cannot be read"),
        ([], ConfigError, "set one of the two"),
    ],
)
def test_errors_name_unreadable_files(
    tmp_path: Path, tokenizer: Any, files: list[str], error: type[Exception], message: str
) -> None:
    for name in ("a.csv", "a.parquet"):
        (tmp_path / name).write_text("junk")
    with pytest.raises(error, match=message):
        load(tmp_path, tokenizer, *(str(tmp_path / name) for name in files))


def test_each_data_set_has_a_maximum_number_of_samples(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", *(question(str(n)) for n in range(10)))
    loaded = load(tmp_path, tokenizer, path, val_files=(path,), max_train_samples=4, max_val_samples=3)
    assert loaded.val is not None
    assert (len(loaded.train), len(loaded.val)) == (4, 3)
    assert loaded.val[2].messages[0]["content"] == "2"
    assert load(tmp_path, tokenizer, path).val is None


# ------------------------------------------------------------------------------------------------ overlong prompts


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("left", [3, 4, 5, 6, 7]), ("right", [1, 2, 3, 4, 5]), ("middle", [1, 2, 5, 6, 7])],
)
def test_overlong_prompts_are_cut_as_configured(mode: Any, expected: list[int]) -> None:
    assert cut(np.arange(1, 8, dtype=np.int32), 5, mode).tolist() == expected
    assert cut(np.arange(1, 6, dtype=np.int32), 5, mode).tolist() == [1, 2, 3, 4, 5]


def test_the_first_overlong_prompt_is_named_where_they_are_errors(tmp_path: Path, tokenizer: Any) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", question("1"), question("1" * 100), question("1" * 200))
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2: the prompt has \d+ tokens, more than .* = 20; raise"):
        load(tmp_path, tokenizer, path, max_prompt_length=20, overlong_prompts="error")


def test_overlong_prompts_are_filtered_and_counted(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", question("1"), question("1" * 100), question("2"))
    loaded = load(tmp_path, tokenizer, path, max_prompt_length=20, shuffle=False)
    assert (len(loaded.train), loaded.num_filtered) == (2, 1)
    assert loaded.train.at(SampleId(0, 2)).messages[0]["content"] == "2"
    assert "1 of 3 prompts are longer than data.max_prompt_length = 20" in caplog.text
    shorter = load(tmp_path, tokenizer, path, max_prompt_length=20, overlong_prompts="left", shuffle=False).train
    assert len(shorter.at(SampleId(0, 2)).prompt_ids) == 20
    with pytest.raises(ConfigError, match="no prompt is left of 3 rows"):
        load(tmp_path, tokenizer, path, max_prompt_length=1)


# ------------------------------------------------------------------------------------------------ order


@given(st.integers(1, 200), st.integers(0, 2**32), st.integers(0, 50))
def test_every_epoch_is_a_reproducible_permutation(num_prompts: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_prompts, seed, epoch, shuffle=True)
    assert sorted(order.tolist()) == list(range(num_prompts))
    assert np.array_equal(order, epoch_order(num_prompts, seed, epoch, shuffle=True))


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = {tuple(epoch_order(50, seed, epoch, shuffle=True)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert epoch_order(4, 0, 7, shuffle=False).tolist() == [0, 1, 2, 3]


def test_a_feed_index_alone_determines_the_prompt(tmp_path: Path, tokenizer: Any) -> None:
    """A new source yields the same prompts from any index, in any order of access."""
    path = write_jsonl(tmp_path / "a.jsonl", *(question(str(n)) for n in range(7)))
    prompts = load(tmp_path, tokenizer, path, max_prompt_length=64).train._prompts
    ids = [SampleId((index - 1) // 7, index) for index in range(1, 22)]
    first = ShuffledPrompts(prompts, seed=3, shuffle=True)
    in_order = [first.at(i).messages[0]["content"] for i in ids]
    again = ShuffledPrompts(prompts, seed=3, shuffle=True)
    assert [again.at(i).messages[0]["content"] for i in reversed(ids)] == in_order[::-1]
    assert [sorted(in_order[at : at + 7]) for at in (0, 7, 14)] == [sorted(map(str, range(7)))] * 3
    with pytest.raises(ConfigError, match="sample_1_3 would be in epoch 0 of these 7 prompts"):
        again.at(SampleId(1, 3))


# ------------------------------------------------------------------------------------------------ reasoning-gym


def test_reasoning_gym_prompts_contain_their_entry(tmp_path: Path, tokenizer: Any) -> None:
    gym = ReasoningGymConfig(task="chain_sum", train_size=8, val_size=4, kwargs={"max_terms": 3}, system_prompt="Sum.")
    rows = GymRows(gym, split="train", seed=5)
    prompt = parse_row(rows.row(3), rows.where(3))
    entry = prompt.extra_info["entry"]
    assert prompt.messages[0] == {"role": "system", "content": "Sum."}
    assert prompt.messages[1]["content"] == entry["question"]
    assert prompt.ground_truth == entry["answer"]
    assert prompt.data_source == "chain_sum"
    assert [rows.row(i) for i in range(8)] == [GymRows(gym, split="train", seed=5).row(i) for i in range(8)]


def test_reasoning_gym_rows_have_their_own_columns(tmp_path: Path, tokenizer: Any) -> None:
    gym = ReasoningGymConfig(task="chain_sum", train_size=4, val_size=0)
    data = DataConfig(reasoning_gym=gym, prompt_key="question", max_prompt_length=200)
    assert len(load_prompts(Config(data=data), tokenizer, tmp_path / "cache").train) == 4


def test_reasoning_gym_splits_and_seeds_do_not_overlap() -> None:
    gym = ReasoningGymConfig(task="chain_sum", train_size=50, val_size=50, kwargs={"min_digits": 4})
    questions = [
        {rows.row(i)["extra_info"]["entry"]["question"] for i in range(len(rows))}
        for rows in (GymRows(gym, split=split, seed=seed) for split in ("train", "val") for seed in (0, 1))
    ]
    assert len(set.union(*questions)) == sum(map(len, questions))


def test_errors_name_wrong_reasoning_gym_settings() -> None:
    with pytest.raises(ConfigError, match="did you mean 'chain_sum'"):
        GymRows(ReasoningGymConfig(task="chain_sums"), split="train", seed=0)
    with pytest.raises(ConfigError, match=r"data\.reasoning_gym\.kwargs: task 'chain_sum' refuses"):
        GymRows(ReasoningGymConfig(task="chain_sum", kwargs={"foo": 1}), split="train", seed=0)


# ------------------------------------------------------------------------------------------------ template


def test_errors_name_a_missing_tokenizer_or_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: no tokenizer can be loaded from"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"model\.chat_template: .* cannot be read"):
        load_tokenizer(ModelConfig(path=QUICKSTART, chat_template=str(tmp_path / "none.jinja")))


# ------------------------------------------------------------------------------------------------ hostile rows


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (question("\ud83d"), r"field 'prompt\[0\]\.content': character 0 is '\\ud83d', half of a surrogate pair"),
        (question("1", extra_info={"a": ["b\udc00"]}), r"field 'extra_info\.a\[0\]': character 1 is '\\udc00'"),
        (question("1", extra_info={"\ud83d": 1}), r"field 'extra_info\.\?': character 0 is"),
        (question("1", reward_model={"ground_truth": "\ud83d"}), r"field 'reward_model\.ground_truth': character 0"),
        (
            question("1", extra_info={"sampling_params": {"stop": 5}}),
            r"sampling_params\.stop' is 5; expected a text or",
        ),
        *(
            (text or " {", "not JSON|not a JSON object|nested more than|an integer of 5000 digits")
            for text in BROKEN_JSON
        ),
    ],
)
def test_a_row_with_unusable_text_is_refused_with_its_line(
    tmp_path: Path, tokenizer: Any, row: Any, message: str
) -> None:
    text = row if isinstance(row, str) else json.dumps(row)
    path = write_jsonl(tmp_path / "bad.jsonl", question("1"), text.encode(errors="replace").decode() or "{")
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, tokenizer, path)
    assert "bad.jsonl, line 2" in caught.value.message


class OneRow:
    """A data set of one row."""

    def __init__(self, row: Any) -> None:
        self._row = row

    def __len__(self) -> int:
        return 1

    def row(self, index: int) -> Any:
        return self._row

    def where(self, index: int) -> str:
        return "rows.jsonl, line 1"

    def directory(self, index: int) -> None:
        return None


@settings(max_examples=50)
@given(
    prompt=texts() | st.lists(messages(), max_size=3) | values(),
    fields=st.dictionaries(st.sampled_from(["data_source", "reward_model", "extra_info", "images", "other"]), values()),
    sampling=values(),
)
def test_rows_of_any_shape_are_prompts_or_data_errors(
    tokenizer: Any, cache: DataCache, prompt: Any, fields: Any, sampling: Any
) -> None:
    for row in ({"prompt": prompt, **fields}, question("1", extra_info={"sampling_params": sampling}), fields):
        try:
            encoder, rows = RowEncoder(tokenizer), OneRow(row)
            encoded = encode_rows(rows, encoder, cache, num_rows=1)
            made = PromptSet(rows, encoder, encoded, max_prompt_length=10**6, overlong="error")[0]
        except DataError as error:
            assert error.message.startswith("rows.jsonl, line 1: ")
        else:
            assert len(made.prompt_ids)
            json.dumps([made.messages, made.extra_info, made.ground_truth], ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (question("1", data_source=10**5000), "data_source"),
        (question("1", extra_info={"a": [10**5000]}), "extra_info.a[0]"),
        (question("1", extra_info={10**5000: 1}), "extra_info.<int whose repr raised ValueError>"),
    ],
)
def test_integers_that_python_cannot_write_are_refused(row: Any, field: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_row(row, "my.py, row 1")
    assert caught.value.message == f"my.py, row 1: field '{field}': it contains an integer of more than 4,300 digits"


def test_an_evaluation_reads_the_validation_set_alone(tmp_path: Path, tokenizer: Any) -> None:
    file = write_jsonl(tmp_path / "val.jsonl", question("1+1"), question("2+2"))
    steps = TrainerConfig(total_training_steps=0)
    config = Config(data=DataConfig(train_files=("/nowhere.jsonl",), val_files=(file,)), trainer=steps)
    loaded = load_prompts(config, tokenizer, tmp_path / "cache")
    assert loaded.val is not None and len(loaded.val) == len(loaded.train) == 2
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        load_prompts(Config(trainer=steps), tokenizer, tmp_path / "cache")
