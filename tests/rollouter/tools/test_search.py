"""The search tool: BM25 compared with a plain reference, passages, and invalid files."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.core.failures import ConfigError, DataError
from rollouter.tools import BadArgumentsError
from rollouter.tools.search import Bm25Index, SearchTool, snippet, words

DOCUMENTS: list[dict[str, Any]] = [
    {"id": "a", "title": "Whales", "text": "Whales are mammals. The blue whale is the largest animal."},
    {"id": "b", "title": "Sharks", "text": "Sharks are fish. The whale shark is the largest fish."},
    {"id": "c", "text": "Granite is a rock."},
]


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in DOCUMENTS))
    return str(file)


def reference(texts: list[str], query: list[str], k1: float, b: float) -> list[float]:
    """Compute BM25 scores by the formula in float64."""
    split = [Counter(words(text)) for text in texts]
    mean = sum(counts.total() for counts in split) / len(split)
    scores = [0.0] * len(texts)
    for word in query:
        n = sum(word in counts for counts in split)
        idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
        for number, counts in enumerate(split):
            f = counts[word]
            norm = k1 * (1 - b + b * counts.total() / mean)
            scores[number] += idf * f * (k1 + 1) / (f + norm) if f else 0.0
    return scores


@pytest.mark.parametrize(("k1", "b"), [(1.2, 0.75), (0.0, 0.0), (2.0, 1.0)])
def test_scores_are_those_of_the_formula(k1: float, b: float) -> None:
    rng = np.random.default_rng(0)
    # There are more texts than in a chunk of the index build, and some of them are empty.
    texts = [" ".join(f"w{n}" for n in rng.zipf(1.5, rng.integers(0, 30)) % 60) for _ in range(3000)]
    index = Bm25Index(texts, k1=k1, b=b)
    assert index.num_texts == 3000
    for query in (["w1"], ["w7", "w30"], ["w59", "absent", "w2"]):
        expected = reference(texts, query, k1, b)
        best = sorted((score for score in expected if score > 0), reverse=True)[:20]
        hits = index.search(query, 20)
        np.testing.assert_allclose([hit.score for hit in hits], best, rtol=1e-5)
        np.testing.assert_allclose([expected[hit.number] for hit in hits], best, rtol=1e-5)


def test_equal_scores_keep_their_order() -> None:
    index = Bm25Index(["x y", "x z", "q", "x y"])
    assert [hit.number for hit in index.search(["x"], 2)] == [0, 1]
    assert [hit.number for hit in index.search(["x"], 9)] == [0, 1, 3]
    assert index.search(["absent"], 3) == []
    assert index.search([], 3) == []
    assert Bm25Index([]).search(["x"], 3) == []
    assert Bm25Index(["", "..."]).search(["x"], 3) == []


def test_a_search_shows_rank_title_and_passage(path: str) -> None:
    tool = SearchTool(path=path)
    response = tool.execute(None, {"query": "largest WHALE?"})
    assert response.text == (
        "1. Whales\nWhales are mammals. The blue whale is the largest animal.\n\n"
        "2. Sharks\nSharks are fish. The whale shark is the largest fish."
    )
    assert response.metrics == {"hits": 2.0}
    assert tool.execute(None, {"query": "rock"}).text == "1. c\nGranite is a rock."
    assert tool.execute(None, {"query": "whales"}).text.startswith("1. Whales\n")  # words of the title count
    assert tool.execute(None, {"query": "the", "top_k": 1}).text.count("\n") == 1
    nothing = tool.execute(None, {"query": "basalt"})
    assert (nothing.text, nothing.metrics) == ("No document has any of these words.", {"hits": 0.0})
    with pytest.raises(BadArgumentsError, match="no words"):
        tool.execute(None, {"query": " ?! "})


def test_the_number_of_results_is_limited(path: str) -> None:
    tool = SearchTool(path=path, top_k=1, max_top_k=2)
    assert tool.execute(None, {"query": "is"}).metrics == {"hits": 1.0}
    assert tool.execute(None, {"query": "is", "top_k": 50}).metrics == {"hits": 2.0}


def test_a_passage_contains_the_rarest_words() -> None:
    text = "common " + "filler " * 50 + "rare common " + "filler " * 50 + "end."
    passage = snippet(text, {"common": 0.1, "rare": 3.0}, 10)
    assert "rare common" in passage and passage.startswith("… filler") and passage.endswith("filler …")
    assert len(words(passage)) == 10
    assert snippet(text, {"absent": 1.0}, 3) == "common filler filler …"
    assert snippet(text, {"end": 1.0}, 3) == "… filler filler end."
    assert snippet("(one, two)", {"two": 1.0}, 5) == "(one, two)"
    assert snippet("a  b\nc", {"a": 1.0}, 5) == "a b c"
    assert snippet(" ?! ", {"a": 1.0}, 5) == "?!"


def test_jsonl_and_parquet_give_the_same_results(path: str, tmp_path: Path) -> None:
    file = tmp_path / "documents.parquet"
    pq.write_table(pa.Table.from_pylist([{**row, "more": 1} for row in DOCUMENTS]), file)
    query = {"query": "largest fish"}
    assert SearchTool(path=str(file)).execute(None, query) == SearchTool(path=path).execute(None, query)


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("a.jsonl", "", ConfigError, r"a\.jsonl is empty"),
        ("a.jsonl", "\n", ConfigError, "has no documents"),
        ("a.txt", "x", ConfigError, r"suffix '\.txt'; expected \.parquet or \.jsonl"),
        ("a.jsonl", '{"text": "a"}\n{"text"\n', DataError, r"a\.jsonl, line 2: it is not JSON"),
        ("a.jsonl", '{"text": "a"}\n\n[1]\n', DataError, r"a\.jsonl, line 3: .* is not a JSON object"),
        ("a.jsonl", '{"title": "a"}\n', DataError, r"line 1: field 'text' is missing"),
        ("a.jsonl", '{"text": 7}\n', DataError, r"line 1: field 'text' is 7; expected a string"),
        ("a.jsonl", '{"text": "a", "title": 7}\n', DataError, r"line 1: field 'title' is 7"),
        ("a.parquet", "no parquet", DataError, r"cannot be read as .parquet"),
    ],
)
def test_invalid_document_files_are_refused(
    tmp_path: Path, name: str, content: str, error: type[Exception], message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(error, match=message):
        SearchTool(path=str(tmp_path / name))


def test_settings_are_checked(path: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "absent.jsonl"))):
        SearchTool(path=str(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match="is not a file"):
        SearchTool(path=str(tmp_path))
    with pytest.raises(ConfigError, match="top_k: 0 cannot be used"):
        SearchTool(path=path, top_k=0)
    with pytest.raises(ConfigError, match="b: 2 cannot be used"):
        SearchTool(path=path, b=2)
