"""A tool that searches a local file of documents with an in-memory BM25 index."""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from asyncrl.config.sections.base import ConfigSection, Positive, Share
from asyncrl.core.failures import ConfigError, DataError
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts.dataset import FileRows
from rollouter.tools.base import BadArgumentsError, BaseTool, ToolResponse
from rollouter.user_code import parse_settings, shown

log = logging.getLogger(__name__)

_WORD = re.compile(r"\w+")
_CHUNK_TEXTS = 2048


class SearchDocument(NamedTuple):
    id: str
    title: str
    text: str


class SearchHit(NamedTuple):
    number: int
    """The text's position in the index, from 0."""
    score: float


def words(text: str) -> list[str]:
    """Return the lower-case runs of letters, digits and underscores."""
    return _WORD.findall(text.lower())


class Bm25Index:
    """An index of texts with precomputed BM25 weights. It reads the texts as a stream, so they need not fit in memory.

    A text's score is the sum over the query's words of `idf · f (k1 + 1) / (f + k1 (1 - b + b · l / mean l))`, with `f`
    occurrences in a text of `l` words, and `idf = ln(1 + (N - n + ½) / (n + ½))` for a word in `n` of `N` texts. This
    `idf` is the weight of Robertson and Spärck Jones (1976) without relevance judgements, kept above zero. Saturation
    and length normalization follow Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond
    (2009), eq. 3.15.
    """

    def __init__(self, texts: Iterable[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        numbers: defaultdict[str, int] = defaultdict()
        numbers.default_factory = numbers.__len__
        terms, owners, counts, lengths = _count(texts, numbers.__getitem__)
        self._numbers: Mapping[str, int] = dict(numbers)
        self.num_texts = len(lengths)
        in_texts = np.bincount(terms, minlength=len(numbers))
        self._idf = np.log1p((self.num_texts - in_texts + 0.5) / (in_texts + 0.5))
        order = np.argsort(terms, kind="stable")
        self._starts: NDArray[np.int64] = np.concatenate([[0], np.cumsum(in_texts)])
        """Offsets of each word's postings in the two arrays below."""
        self._owners: NDArray[np.int32] = owners[order]
        frequency = counts[order].astype(np.float64)
        norm = 1 - b + b * lengths / max(float(lengths.mean()) if len(lengths) else 0.0, 1.0)
        gain = self._idf[terms[order]] * frequency * (k1 + 1) / (frequency + k1 * norm[self._owners])
        self._gains: NDArray[np.float32] = gain.astype(np.float32)

    def idf(self, word: str) -> float:
        """Return the word's inverse document frequency, 0 if no text contains it."""
        number = self._numbers.get(word)
        return 0.0 if number is None else float(self._idf[number])

    def search(self, query: Sequence[str], top_k: int) -> list[SearchHit]:
        """Return the `top_k` best texts that contain a word of the query, best first. Equal texts keep their order."""
        scores = np.zeros(self.num_texts, dtype=np.float32)
        for word in query:
            if (number := self._numbers.get(word)) is not None:
                postings = slice(self._starts[number], self._starts[number + 1])
                scores[self._owners[postings]] += self._gains[postings]
        found = int(np.count_nonzero(scores))
        top_k = min(top_k, found)
        if not top_k:
            return []
        # Include all texts with the lowest score of the result, so that their order decides between them.
        worst = np.partition(scores, len(scores) - top_k)[len(scores) - top_k]
        best = np.flatnonzero(scores >= worst)
        best = best[np.argsort(-scores[best], kind="stable")][:top_k]
        return [SearchHit(int(number), float(scores[number])) for number in best]


def _count(
    texts: Iterable[str], number_of: Callable[[str], int]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
    """Count the words of all texts.

    Return three arrays with one item per pair of a word and a text that contains it: the word's number, the text's
    number, and the number of occurrences. The fourth array is the length of each text in words.
    """
    parts: list[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]] = []
    lengths: list[int] = []
    remaining = iter(texts)
    while chunk := list(islice(remaining, _CHUNK_TEXTS)):
        ids = [np.fromiter(map(number_of, words(text)), dtype=np.int64) for text in chunk]
        sizes = [len(one) for one in ids]
        owner = np.repeat(np.arange(len(chunk), dtype=np.int64), sizes)
        pairs, counts = np.unique(np.concatenate(ids) * len(chunk) + owner, return_counts=True)
        word, text = np.divmod(pairs, len(chunk))
        parts.append((word.astype(np.int32), (text + len(lengths)).astype(np.int32), counts.astype(np.int32)))
        lengths += sizes
    none = np.zeros(0, dtype=np.int32)
    columns = [np.concatenate([none, *column]) for column in zip(*parts, strict=True)] if parts else [none] * 3
    return columns[0], columns[1], columns[2], np.asarray(lengths, dtype=np.int64)


class SearchSettings(ConfigSection):
    """The settings of `SearchTool`."""

    path: str
    """A .jsonl or .parquet file."""
    top_k: Positive = 3
    """Number of documents shown by default."""
    max_top_k: Positive = 10
    """Maximum number of documents that the model can request."""
    snippet_words: Positive = 60
    """Number of words shown of each document."""
    k1: Annotated[float, Field(ge=0)] = 1.2
    """Saturation of repeated words. With 0, only the presence of a word counts."""
    b: Share = 0.75
    """Penalty of long documents."""


class SearchTool(BaseTool[None]):
    """Searches documents of a JSONL or Parquet file with `text` and optionally `id` and `title`.

    The constructor builds the index: 100,000 documents of 100 words (50 MB) take 8 s of one core and 230 MB; a query
    takes 1 ms. Words are compared in lower case, without stemming. Languages without spaces between words need another
    tool.
    """

    name: ClassVar[str] = "search"
    schema: ClassVar[Mapping[str, Any]] = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the documents for words. Shows the best ones: title, and the passage that fits.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "The words to search for."},
                    "top_k": {"type": "integer", "minimum": 1, "description": "How many documents to show."},
                },
                "required": ["query"],
            },
        },
    }

    def __init__(self, **settings: Any) -> None:
        """Read the documents and build the index. Blocks.

        Args:
            settings: The keys of `SearchSettings`.

        Raises:
            ConfigError: there is no such file, or a value is invalid.
            DataError: a row is not a document; the message names the file and the row.
        """
        chosen = parse_settings(SearchSettings, settings)
        self._settings = chosen
        started = time.monotonic()
        self._documents = read_documents(chosen.path)
        if not self._documents:
            raise ConfigError(f"path: {chosen.path} has no documents")
        texts = (f"{one.title} {one.text}" for one in self._documents)
        self._index = Bm25Index(texts, k1=chosen.k1, b=chosen.b)
        log.info("%d documents of %s indexed in %.1f s", len(self._documents), chosen.path, time.monotonic() - started)

    def execute(self, state: None, arguments: Mapping[str, Any], **kwargs: Any) -> ToolResponse:
        """Search for the documents that match the query best.

        Raises:
            BadArgumentsError: the query has no words.
        """
        query = list(dict.fromkeys(words(arguments["query"])))
        if not query:
            raise BadArgumentsError("the query has no words; say what to search for")
        top_k = min(arguments.get("top_k") or self._settings.top_k, self._settings.max_top_k)
        hits = self._index.search(query, top_k)
        shown = [self._shown(rank, self._documents[hit.number], query) for rank, hit in enumerate(hits, start=1)]
        text = "\n\n".join(shown) or "No document has any of these words."
        return ToolResponse(text, metrics={"hits": float(len(hits))})

    def _shown(self, rank: int, document: SearchDocument, query: Sequence[str]) -> str:
        weights = {word: self._index.idf(word) for word in query}
        return (
            f"{rank}. {document.title or document.id}\n{snippet(document.text, weights, self._settings.snippet_words)}"
        )


def snippet(text: str, weights: Mapping[str, float], max_words: int) -> str:
    """Return the passage of at most `max_words` words whose distinct words have the largest sum of weights.

    Among equal passages, the first one is returned. The matching words are in its centre.
    """
    found = list(_WORD.finditer(text))
    if not found:
        return text.strip()
    matches = [(at, word) for at, match in enumerate(found) if (word := match[0].lower()) in weights]
    first = last = 0
    most = 0.0
    for number, (begin, _) in enumerate(matches):
        inside = list(islice(matches, number, number + max_words))
        inside = [(at, word) for at, word in inside if at < begin + max_words]
        weight = sum(weights[word] for word in dict.fromkeys(word for _, word in inside))
        if weight > most:
            first, last, most = begin, inside[-1][0], weight
    start = max(0, min(first - (max_words - (last - first + 1)) // 2, len(found) - max_words))
    end = min(len(found), start + max_words)
    left = "" if start == 0 else "… "
    right = "" if end == len(found) else " …"
    passage = text[found[start].start() if start else 0 : found[end - 1].end() if right else len(text)]
    return left + " ".join(passage.split()) + right


def read_documents(path: str) -> list[SearchDocument]:
    """Return the documents of a JSONL or Parquet file.

    Raises:
        ConfigError: there is no such file, or it has another suffix.
        DataError: a row is not a document; the message names the file and the row.
    """
    with TemporaryDirectory(prefix="asyncrl-search-") as cache:
        rows = FileRows.open([path], key="path", cache=DataCache(Path(cache)))
        return [_document(row, number, where) for number, (row, where) in enumerate(rows, start=1)]


def _document(row: Mapping[str, Any], number: int, where: str) -> SearchDocument:
    title = row.get("title")
    values: dict[str, Any] = {"text": row.get("text"), "title": "" if title is None else title}
    for field, value in values.items():
        if not isinstance(value, str):
            state = "missing" if value is None else shown(value)
            raise DataError(f"{where}: field '{field}' is {state}; expected a string")
    given = row.get("id")
    return SearchDocument(str(number if given is None else given), values["title"], values["text"])
