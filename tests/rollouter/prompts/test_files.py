"""Data files: JSON lists, URLs and their copies in the cache, and names on the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.config.sections.data import DataConfig, HubName, data_suffix, is_remote
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.core.failures import ConfigError, DataError, InfraError
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts import check as check_module
from rollouter.prompts.check import check_data
from rollouter.prompts.dataset import FileRows
from rollouter.prompts.files import REPORT_S, DataFile, LoadingProgress, find_files
from rollouter.prompts.row_files import json_spans, read_spans
from tests.fakes.hub import COMMIT, FakeHub, serving

KEY = "data.train_files"

NO_REWARD = RewardConfig(function="none")


def row(text: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}]}


def open_files(tmp_path: Path, *names: str) -> FileRows:
    return FileRows.open(names, key=KEY, cache=DataCache(tmp_path / "cache"))


def contents(rows: FileRows) -> list[Any]:
    return [rows.row(index)["prompt"][0]["content"] for index in range(len(rows))]


# ------------------------------------------------------------------------------------------------ JSON


@settings(max_examples=100)
@given(
    st.lists(st.dictionaries(st.text(max_size=3), st.text() | st.lists(st.text(max_size=3)), max_size=3), max_size=5),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_the_entries_of_a_json_list_are_found_without_parsing_it(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], indent: int | None, ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_bytes(json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass") + b" \n")
    found = [(json.loads(raw), span.number) for raw, span in read_spans(DataFile("a.json", path, ".json"))]
    assert found == [(value, number) for number, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"prompt": "1"}, {"prompt": "2"}', "the list that begins it does not end"),
        ('[{"prompt": "1"}] {"prompt": "2"}', "something follows the list"),
        ('[{"prompt": "1"}}', "the list that begins it does not end"),
    ],
)
def test_a_json_list_that_is_none_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=f"a.json: it is not JSON: {problem}"):
        list(json_spans(DataFile("a.json", path, ".json")))
    (found,) = check_data(Config(data=DataConfig(train_files=(str(path),)), reward=NO_REWARD))
    assert problem in found.consequence


def test_json_files_are_lists_or_lines_and_name_their_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([row("1"), row("2,]}")], indent=2))
    (tmp_path / "b.json").write_text("\n".join(["", json.dumps(row("3"))]))
    rows = open_files(tmp_path, str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert contents(rows) == ["1", "2,]}", "3"]
    assert [rows.where(index) for index in (1, 2)] == [f"{tmp_path}/a.json, entry 2", f"{tmp_path}/b.json, line 2"]


def test_a_row_that_changes_after_the_start_is_an_error_and_appended_rows_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row(text)) + "\n" for text in ("one", "two")))
    rows = open_files(tmp_path, str(path))
    with path.open("r+") as file:
        file.write(path.read_text().replace("two", "six") + json.dumps(row("three")))
    assert (len(rows), rows.row(0)) == (2, row("one"))
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: the file has changed since the run began"):
        rows.row(1)
    assert contents(open_files(tmp_path, str(path))) == ["one", "six", "three"]


def test_parquet_files_are_converted_once_and_keep_their_values(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"prompt": ["a", "b", "a"], "kind": pa.array(["x", "y", "x"]).dictionary_encode(), "n": [1, 2, 3]})
    pq.write_table(table, path, row_group_size=2)
    cache = DataCache(tmp_path / "cache")
    for _ in range(2):
        rows = FileRows.open([str(path)], key=KEY, cache=cache)
        assert [dict(rows.row(index)) for index in range(len(rows))] == table.to_pylist()
        (entry,) = (cache.root / "rows").iterdir()
    (entry / "rows.arrow").write_bytes(b"damaged")
    assert len(FileRows.open([str(path)], key=KEY, cache=cache)) == 3
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    assert len(FileRows.open([str(path)], key=KEY, cache=cache)) == 0


# ------------------------------------------------------------------------------------------------ URLs


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    files = MemoryFileSystem()
    yield files
    files.rm("/bucket", recursive=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    """Serve the directory `web`."""
    (web := tmp_path / "web").mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(web))) as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def test_a_url_is_downloaded_once_per_version(tmp_path: Path, memory: MemoryFileSystem, monkeypatch: Any) -> None:
    url = "memory://bucket/a.jsonl"
    memory.pipe_file("/bucket/a.jsonl", json.dumps(row("first")).encode())
    downloads: list[str] = []
    original = MemoryFileSystem.get_file
    monkeypatch.setattr(
        MemoryFileSystem,
        "get_file",
        lambda self, path, *a, **k: (downloads.append(path), original(self, path, *a, **k)),
    )
    assert contents(open_files(tmp_path, url)) == contents(open_files(tmp_path, url)) == ["first"]
    assert downloads == ["/bucket/a.jsonl"]
    memory.pipe_file("/bucket/a.jsonl", json.dumps(row("later")).encode())
    rows = open_files(tmp_path, url)
    assert (contents(rows), len(downloads)) == (["later"], 2)
    assert rows.where(0) == f"{url}, line 1"


def test_the_places_of_rows_have_no_credentials_of_the_url(
    tmp_path: Path, server: ThreadingHTTPServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouter.prompts.files.REPORT_S", 0.0)
    caplog.set_level("INFO")
    (tmp_path / "web" / "a.jsonl").write_text(json.dumps(row("here")))
    rows = open_files(tmp_path, f"http://user:c4n4ry@127.0.0.1:{server.server_port}/a.jsonl")
    assert rows.where(0) == f"http://…@127.0.0.1:{server.server_port}/a.jsonl, line 1"
    assert "downloading http://…@127.0.0.1" in caplog.text and "c4n4ry" not in caplog.text


def test_local_urls_are_read_where_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([row("here")]))
    (file,) = find_files(f"file://{tmp_path}/a.json", KEY, DataCache(tmp_path / "cache"))
    assert file.path == tmp_path / "a.json"
    assert not (tmp_path / "cache").exists()


def test_files_of_a_web_server_are_checked_before_the_run_and_used_without_it_later(
    tmp_path: Path, server: ThreadingHTTPServer, caplog: pytest.LogCaptureFixture
) -> None:
    base = f"http://127.0.0.1:{server.server_port}"
    web, cache_dir = tmp_path / "web", str(tmp_path / "cache")
    (web / "a.jsonl").write_text("".join(json.dumps(row(str(n))) + "\n" for n in range(5000)))
    (web / "bad.jsonl").write_text(json.dumps(row("1")) + "\n" + json.dumps({"question": "2"}))
    (web / "list.json").write_text(json.dumps([row("x" * 1000) for _ in range(500)]))
    (web / "empty.jsonl").write_text("\n")

    def problems(*names: str) -> list[tuple[str, str, str]]:
        data = DataConfig(train_files=tuple(f"{base}/{name}" for name in names), cache_dir=cache_dir)
        return [
            (one.severity, str(one.value), one.consequence)
            for one in check_data(Config(data=data, reward=NO_REWARD), limit_s=30)
        ]

    assert problems("a.jsonl?download=true", "list.json") == []
    (bad, missing, empty) = problems("bad.jsonl", "nowhere.jsonl", "empty.jsonl")
    assert bad[:2] == ("error", f"{base}/bad.jsonl")
    assert "bad.jsonl, line 2: there is no field 'prompt'; the row has question" in bad[2]
    assert "there is no such file" in missing[2]
    assert "has no rows" in empty[2]
    assert len(open_files(tmp_path, f"{base}/a.jsonl")) == 5000
    server.shutdown()
    server.server_close()
    assert len(open_files(tmp_path, f"{base}/a.jsonl")) == 5000
    assert "The copy of an earlier launch is used" in caplog.text
    assert problems("a.jsonl") == [], "there is a copy"
    (unreachable,) = problems("list.json")
    assert unreachable[0] == "error"
    assert "cannot be read" in unreachable[2]
    with pytest.raises(InfraError, match=r"list\.json cannot be read: .*Check the network"):
        open_files(tmp_path, f"{base}/list.json")


def test_a_server_that_does_not_answer_delays_the_check_no_longer_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(check_module, "_first_rows", lambda *_: answers.wait() and ())
    data = DataConfig(train_files=("s3://bucket/a.jsonl",), val_files=("s3://bucket/b.parquet",))
    found = list(check_data(Config(data=data), limit_s=0.2))
    answers.set()
    assert [(one.key, one.severity) for one in found] == [
        ("data.train_files", "warning"),
        ("data.val_files", "warning"),
    ]
    assert "did not arrive within 0.2 s" in found[0].consequence


def test_an_interrupted_download_leaves_nothing(tmp_path: Path, memory: MemoryFileSystem, monkeypatch: Any) -> None:
    memory.pipe_file("/bucket/a.jsonl", json.dumps(row("whole")).encode())

    def broken(self: Any, path: str, target: str, **_: Any) -> None:
        Path(target).write_text("{")
        raise ConnectionResetError("the server went away")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", broken)
        with pytest.raises(InfraError, match="ConnectionResetError: the server went away"):
            open_files(tmp_path, "memory://bucket/a.jsonl")
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == []
    assert contents(open_files(tmp_path, "memory://bucket/a.jsonl")) == ["whole"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gs://bucket/a.jsonl", r"data\.train_files: gs://bucket/a\.jsonl cannot be read: .*pip install gcsfs"),
        ("nope://bucket/a.jsonl", "cannot be read: Protocol not known: nope"),
        ("memory://bucket/a.csv", r"has the suffix '\.csv'; expected \.parquet or"),
        ("memory://bucket/a.jsonl", "there is no such file"),
        ("hub:a/b/c", "does not name a data set on the hub; write hub:owner/name:split"),
    ],
)
def test_a_url_that_cannot_be_read_is_an_error_with_a_fix(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_files(tmp_path, name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hub:openai/gsm8k:main/test", ("openai/gsm8k", None, "main", "test")),
        ("hub:trl-lib/DeepMath-103K", ("trl-lib/DeepMath-103K", None, None, "train")),
        ("hub:a/b@v1.0:test", ("a/b", "v1.0", None, "test")),
    ],
)
def test_names_on_the_hub_have_a_configuration_and_a_split(name: str, expected: tuple[str | None, ...]) -> None:
    assert HubName.parse(name, KEY)[1:] == expected
    assert is_remote(name)


FIND = """
import json, sys
from pathlib import Path
from asyncrl.core.failures import AsyncRLError
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts.files import find_files
found = []
for name in sys.argv[2:]:
    try:
        files = find_files(name, "data.x", DataCache(Path(sys.argv[1])))
        found.append([[file.name, file.path.read_text()] for file in files])
    except AsyncRLError as error:
        found.append(f"{type(error).__name__}: {error.message}")
print(json.dumps(found))
"""


def found_on_hub(tmp_path: Path, url: str, *names: str) -> list[Any]:
    """Return what a process finds whose hub is at `url`: the hub's clients read the address when they are imported."""
    online = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
    environment = {**os.environ, **online, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", FIND, str(tmp_path / "cache"), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    answer: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.timeout(600)
def test_a_data_set_on_the_hub_is_downloaded_at_one_revision_and_used_offline_later(tmp_path: Path) -> None:
    """The real clients `datasets` and `huggingface_hub`, and a server that answers as the hub does."""
    lines = "".join(json.dumps({"question": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(3))
    parts = {
        name: lines.encode() for name in ("main/train-0.jsonl", "main/train-1.jsonl", "main/test.jsonl", "o/x.csv")
    }
    configs = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*.jsonl
  - split: test
    path: main/test.jsonl
- config_name: other
  data_files: o/*.csv
---
"""
    hub = FakeHub("lab/sums", {"README.md": configs.encode(), **parts})
    with serving(hub) as url:
        names = ("main/train", "main/nothing", "train", "other/train")
        whole, split, config, kind, missing = found_on_hub(
            tmp_path, url, *(f"hub:lab/sums:{name}" for name in names), "hub:lab/none:train"
        )
    base = f"hf://datasets/lab/sums@{COMMIT}/main"
    assert whole == [[f"{base}/train-0.jsonl", lines], [f"{base}/train-1.jsonl", lines]]
    assert split.endswith("hub:lab/sums:main/nothing: there is no split 'nothing'; the data set has train, test")
    assert "available configs: ['main', 'other']. Write hub:lab/sums:CONFIG/SPLIT" in config
    assert "x.csv has the suffix '.csv'; expected .parquet" in kind
    assert missing.startswith("ConfigError: data.x: hub:lab/none:train: Dataset 'lab/none' doesn't exist on the Hub")
    again, other = found_on_hub(tmp_path, url, "hub:lab/sums:main/train", "hub:lab/sums:main/test")
    assert again == whole, "the hub cannot be reached any more"
    assert other.startswith("InfraError: data.x: hub:lab/sums:main/test cannot be read: ")
    assert other.endswith("Check the network of this machine, or give a local copy")


def test_a_hub_that_cannot_be_reached_is_named_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("rollouter.prompts.files.getproxies", dict)
    data = DataConfig(train_files=("hub:openai/gsm8k:main/train",), cache_dir=str(tmp_path / "cache"))
    began = time.monotonic()
    (problem,) = check_data(Config(data=data, reward=NO_REWARD), limit_s=30)
    assert time.monotonic() - began < 20, "the hub's client is not asked, which tries again and again"
    assert (problem.key, problem.severity) == (KEY, "error")
    assert "cannot be read: ConnectionRefusedError" in problem.consequence
    assert problem.fix == "Check the network of this machine, or give a local copy"
    assert "Retrying" not in caplog.text


def test_validation_on_the_hub_needs_a_split() -> None:
    with pytest.raises(ConfigError, match="names no split, and only training has a default"):
        HubName.parse("hub:openai/gsm8k", "data.val_files")


def test_the_suffix_of_a_url_is_that_of_its_path() -> None:
    assert [data_suffix(name) for name in ("https://a.b/c.JSONL?x=.csv", "s3://b/c.parquet", "d/e.json")] == [
        ".jsonl",
        ".parquet",
        ".json",
    ]


# ------------------------------------------------------------------------------------------------ progress


def test_progress_is_reported_every_few_seconds_with_the_time_that_is_left() -> None:
    lines: list[str] = []
    now = 100.0
    progress = LoadingProgress("tokenizing prompts", 1_000_000, "rows", lines.append, lambda: now)
    for _ in range(10):
        now += REPORT_S / 2
        progress.advance(10_000)
    assert lines[0] == "tokenizing prompts: 20,000 of 1,000,000 rows (2%), 4,000 rows/s, 245 s left"
    assert len(lines) == 5
    unknown = LoadingProgress("downloading x", None, "bytes", lines.append, lambda: now)
    now += REPORT_S
    unknown.advance(10**7)
    assert lines[-1] == "downloading x: 10.0 MB, 2.0 MB/s"
