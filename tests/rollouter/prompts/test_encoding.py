"""Tokenized rows depend on their content alone: neither on the cache nor on the number of processes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sections.data import DataConfig, ModelConfig
from asyncrl.core.failures import ConfigError, InfraError
from asyncrl.core.types import SampleId
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts import encoding
from rollouter.prompts.chat_template import encode_text, load_tokenizer
from rollouter.prompts.dataset import FileRows
from rollouter.prompts.encoding import EncodedPrompts, RowEncoder, encode_rows
from rollouter.prompts.encoding_processes import EncodingJob, EncodingProcess
from rollouter.prompts.source import LoadedPrompts, load_prompts

pytestmark = pytest.mark.timeout(300)  # a process imports transformers
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelConfig())


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "CHUNK_ROWS", 7)
    monkeypatch.setattr(encoding, "ROWS_PER_PROCESS", 10)


def row(number: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": f"{number}+{number * number}="}], **fields}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return str(path)


def prompts_of(loaded: LoadedPrompts, epochs: int = 2) -> list[Any]:
    size = len(loaded.train)
    ids = [SampleId((index - 1) // size, index) for index in range(1, size * epochs + 1)]
    found = [loaded.train.at(one) for one in ids]
    return [(one.prompt_ids.tolist(), one.messages, one.ground_truth, one.extra_info) for one in found]


def test_samples_and_their_order_depend_neither_on_the_cache_nor_on_the_number_of_processes(
    tmp_path: Path, tokenizer: Any, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(n, reward_model={"ground_truth": n}, extra_info={"index": n}) for n in range(60)]
    lines = write(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows[:25]), tmp_path / "b.parquet")
    files = (lines, str(tmp_path / "b.parquet"))
    starts: list[int] = []
    original = EncodingProcess.encode
    monkeypatch.setattr(
        EncodingProcess, "encode", lambda self, start, stop: (starts.append(start), original(self, start, stop))[1]
    )

    def load(cache: str, processes: int, **data: Any) -> LoadedPrompts:
        config = Config(data=DataConfig(train_files=files, num_workers=processes, max_prompt_length=10, **data))
        return load_prompts(config, tokenizer, tmp_path / cache)

    expected = prompts_of(load("alone", 0))
    assert starts == []
    assert prompts_of(load("together", 2)) == expected
    assert sorted(starts) == list(range(0, 85, 7))
    for cache in ("alone", "together"):
        assert prompts_of(load(cache, 2)) == expected
    assert len(starts) == 13, "the cache has the tokens"
    assert 0 < load("alone", 0).num_filtered < 85
    in_files = [(tmp_path / cache / "tokens").iterdir() for cache in ("alone", "together")]
    one, other = (next(entries) for entries in in_files)
    assert one.name == other.name
    assert all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in ("ids.bin", "ends.npy", "flags.npy")
    )


def test_the_first_malformed_row_is_named_by_any_number_of_processes(
    tmp_path: Path, tokenizer: Any, small_chunks: None
) -> None:
    rows: list[Any] = [row(n) for n in range(60)]
    rows[50], rows[31], rows[33] = {"prompt": 1}, {"prompt": 2}, {"prompt": 3}
    path = write(tmp_path / "a.jsonl", rows)
    for processes in (0, 2):
        config = Config(data=DataConfig(train_files=(path,), num_workers=processes))
        with pytest.raises(ConfigError, match=r"data\.train_files: .*a\.jsonl, line 32: field 'prompt' is 2"):
            load_prompts(config, tokenizer, tmp_path / "cache")
    assert not (tmp_path / "cache" / "tokens").exists()


def test_a_process_that_dies_is_a_failure_that_can_be_retried(tmp_path: Path, tokenizer: Any) -> None:
    cache = DataCache(tmp_path / "cache")
    rows = FileRows.open([write(tmp_path / "a.jsonl", [row(1)])], key="data.train_files", cache=cache)
    encoder = RowEncoder(tokenizer)
    process = EncodingProcess(EncodingJob.of(rows, encoder, ModelConfig(), cache), encoder.fingerprint)
    process._process.kill()
    with pytest.raises(InfraError, match=r"ended with code -9; .* lower data\.num_workers"):
        process.encode(0, 1)
    process.close()


def test_tokens_are_made_again_when_something_they_depend_on_has_changed(tmp_path: Path, tokenizer: Any) -> None:
    cache = DataCache(tmp_path / "cache")
    other = load_tokenizer(ModelConfig())
    other.chat_template = str(tokenizer.chat_template) + " "

    def entries(*encoders: RowEncoder, num_rows: int = 3, file: str = "a.jsonl") -> int:
        rows = FileRows.open([str(tmp_path / file)], key="data.train_files", cache=cache)
        for encoder in encoders:
            encode_rows(rows, encoder, cache, num_rows=num_rows)
        return len(list((cache.root / "tokens").iterdir()))

    write(tmp_path / "a.jsonl", [row(n) for n in range(3)])
    write(tmp_path / "copy.jsonl", [row(n) for n in range(3)])
    plain = RowEncoder(tokenizer)
    assert entries(plain, plain, RowEncoder(load_tokenizer(ModelConfig()))) == 1
    assert entries(plain, file="copy.jsonl") == 1, "the name of the file does not matter"
    assert entries(RowEncoder(other)) == 2
    assert entries(RowEncoder(tokenizer, tools=[TOOL])) == 3
    assert entries(RowEncoder(tokenizer, template_kwargs={"enable_thinking": False})) == 4
    assert entries(plain, num_rows=2) == 5
    write(tmp_path / "a.jsonl", [row(n + 1) for n in range(3)])
    assert entries(plain) == 6


def test_damaged_tokens_are_made_again(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = DataCache(tmp_path / "cache")
    rows = FileRows.open([write(tmp_path / "a.jsonl", [row(n) for n in range(5)])], key="x", cache=cache)
    first = encode_rows(rows, RowEncoder(tokenizer), cache, num_rows=5)
    (entry,) = (cache.root / "tokens").iterdir()
    ids = [first.of_row(index).tolist() for index in range(5)]
    (entry / "ids.bin").write_bytes(b"\0" * 4)
    again = encode_rows(rows, RowEncoder(tokenizer), cache, num_rows=5)
    assert [again.of_row(index).tolist() for index in range(5)] == ids
    assert "the tokens in the cache are damaged" in caplog.text


def test_tokens_are_those_of_the_prompts_one_by_one(tmp_path: Path, tokenizer: Any) -> None:
    cache = DataCache(tmp_path / "cache")
    rows = FileRows.open([write(tmp_path / "a.jsonl", [row(n) for n in range(20)])], key="x", cache=cache)
    encoded = encode_rows(rows, RowEncoder(tokenizer), cache, num_rows=20)
    assert (len(encoded), len(EncodedPrompts(next((cache.root / "tokens").iterdir())))) == (20, 20)
    for index in range(20):
        messages = rows.row(index)["prompt"]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert encoded.of_row(index).tolist() == encode_text(tokenizer, text)
        assert encoded.lengths[index] == len(encode_text(tokenizer, text))


def test_columns_may_have_other_names(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"question": f"{n}+1=", "answer": str(n + 1), "meta": {"from": "sums", "label": n}} for n in range(3)]
    path = write(tmp_path / "a.jsonl", rows)
    names = {"prompt_key": "question", "ground_truth_key": "answer", "shuffle": False}
    config = Config(data=DataConfig(train_files=(path,), **names))
    prompt = load_prompts(config, tokenizer, tmp_path / "cache").train.at(SampleId(0, 2))
    assert (prompt.messages[0]["content"], prompt.ground_truth, prompt.data_source) == ("1+1=", "2", "default")
    dotted = {**names, "ground_truth_key": "meta.label", "reward_fn_key": "question"}
    prompt = load_prompts(
        Config(data=DataConfig(train_files=(path,), **dotted)), tokenizer, tmp_path / "cache"
    ).train.at(SampleId(0, 2))
    assert (prompt.ground_truth, prompt.data_source) == (1, "1+1=")
    wrong = Config(data=DataConfig(train_files=(path,), prompt_key="questions"))
    with pytest.raises(
        ConfigError, match=r"no field 'questions'; the row has question, answer, meta\. Set data\.prompt"
    ):
        load_prompts(wrong, tokenizer, tmp_path / "cache")


def test_progress_of_both_splits_is_reported(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouter.prompts.files.REPORT_S", 0.0)
    path = write(tmp_path / "a.jsonl", [row(n) for n in range(3)])
    lines: list[str] = []
    config = Config(data=DataConfig(train_files=(path,), val_files=(path,), max_val_samples=2))
    with caplog.at_level(logging.INFO):
        load_prompts(config, tokenizer, tmp_path / "cache", report=lines.append)
    assert [line.partition(" (")[0] for line in lines] == [
        "tokenizing data.train_files: 3 of 3 rows",
        "tokenizing data.val_files: 2 of 2 rows",
    ]
