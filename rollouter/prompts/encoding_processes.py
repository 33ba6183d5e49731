"""Tokenizes chunks of rows in other processes: `python -m rollouter.prompts.encoding_processes`. Blocking.

    parent ─▶ the job, then "start stop" for each chunk ─▶ process
    parent ◀─ {"rows": …, "tokens": …} and the arrays, or {"error": …} ◀─ process

A process opens the files from the cache by itself, so that rows are neither sent nor pickled. It ends when its input
does, and so with its parent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Self

import numpy as np

from asyncrl.config.sections.data import ModelConfig
from asyncrl.core import failures
from asyncrl.core.failures import AsyncRLError, BugError, InfraError
from asyncrl.storage.data_cache import DataCache
from rollouter.prompts.chat_template import load_tokenizer
from rollouter.prompts.dataset import FileRows, RowKeys
from rollouter.prompts.encoding import EncodedChunk, RowEncoder
from rollouter.prompts.files import DataFile
from rollouter.prompts.media import VisionEncoder
from rollouter.prompts.row_files import open_rows


@dataclass(frozen=True, slots=True)
class EncodingJob:
    """What a process needs in order to encode the rows of a data set."""

    files: tuple[tuple[str, str, str, str], ...]
    """Name, path, suffix and content of each file, which the cache has indexed or converted."""
    cache_dir: str
    model: Mapping[str, Any]
    tools: tuple[Mapping[str, Any], ...]
    keys: tuple[str, ...]

    @classmethod
    def of(cls, rows: FileRows, encoder: RowEncoder, model: ModelConfig, cache: DataCache) -> Self:
        files = ((one.file.name, str(one.file.path), one.file.suffix, one.content) for one in rows.files)
        return cls(
            tuple(files), str(cache.root), model.model_dump(mode="json"), tuple(encoder.tools), tuple(encoder.keys)
        )

    def open(self) -> tuple[FileRows, RowEncoder]:
        """Open files and tokenizer in this process."""
        cache = DataCache(Path(self.cache_dir))
        rows = [
            open_rows(DataFile(name, Path(path), suffix), cache, content) for name, path, suffix, content in self.files
        ]
        model = ModelConfig.model_validate(self.model)
        tokenizer = load_tokenizer(model)
        encoder = RowEncoder(
            tokenizer,
            tools=self.tools,
            template_kwargs=model.chat_template_kwargs,
            keys=RowKeys(*self.keys),
            vision=VisionEncoder(model, tokenizer),
        )
        return FileRows(rows), encoder


class EncodingProcess:
    """A process that encodes chunks, one at a time."""

    def __init__(self, job: EncodingJob, fingerprint: str | None) -> None:
        """
        Args:
            fingerprint: that of the parent's tokenizer, which the process must have, too.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TOKENIZERS_PARALLELISM": "false",  # the processes are the parallelism
        }
        self._fingerprint = fingerprint
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollouter.prompts.encoding_processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        fields = {name: getattr(job, name) for name in EncodingJob.__slots__}
        self._send(json.dumps(fields))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        with suppress(BrokenPipeError), self._process:  # closes its pipes, and waits for it
            pass

    def encode(self, start: int, stop: int) -> EncodedChunk:
        """Return a chunk.

        Raises:
            AsyncRLError: the failure of the process, or InfraError if it has died.
        """
        self._send(f"{start} {stop}")
        head = json.loads(self._read(int.from_bytes(self._read(4))))
        if error := head.get("error"):
            raise _error(error)
        if head["fingerprint"] != self._fingerprint:
            raise BugError("a process that tokenizes the data has loaded another tokenizer than the Rollouter")
        rows, tokens = head["rows"], head["tokens"]
        return EncodedChunk(
            np.frombuffer(self._read(4 * tokens), np.int32),
            np.frombuffer(self._read(8 * rows), np.int64),
            np.frombuffer(self._read(rows), np.uint8),
        )

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except OSError:
            raise self._died() from None

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise self._died()
        return data

    def _died(self) -> InfraError:
        code = self._process.wait(10)
        hint = "; it may have had too little memory: lower data.num_workers" if code == -9 else ""
        return InfraError(f"data.num_workers: a process that tokenizes the data ended with code {code}{hint}")


def encode_in_processes(
    job: EncodingJob, bounds: Sequence[tuple[int, int]], num_processes: int, fingerprint: str | None
) -> Iterator[EncodedChunk]:
    """Yield the chunks of all `bounds` in their order, and keep only a few that are ready early.

    Raises:
        AsyncRLError: the failure of the first chunk that failed, in the order of the rows.
    """
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(num_processes, thread_name_prefix="encoding"))
        idle: SimpleQueue[EncodingProcess] = SimpleQueue()
        for _ in range(num_processes):
            process = EncodingProcess(job, fingerprint)
            stack.callback(process.close)  # before the threads are joined, which wait for the processes
            idle.put(process)

        def encode(start: int, stop: int) -> EncodedChunk:
            process = idle.get()
            try:
                return process.encode(start, stop)
            finally:
                idle.put(process)

        waiting: deque[Future[EncodedChunk]] = deque()
        rest = iter(bounds)
        stack.callback(lambda: [future.cancel() for future in waiting])
        while True:
            while len(waiting) < 2 * num_processes and (bound := next(rest, None)) is not None:
                waiting.append(threads.submit(encode, *bound))
            if not waiting:
                return
            yield waiting.popleft().result()


def _error(error: Mapping[str, Any]) -> AsyncRLError:
    """Return the error of a process again."""
    kind = getattr(failures, error["type"], InfraError)
    made: AsyncRLError = kind(error["message"], error["cause"])
    return made


def main() -> None:
    """Encode chunks as standard input asks for them."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    requests: IO[bytes] = sys.stdin.buffer
    job = EncodingJob(**json.loads(requests.readline()))
    opened: tuple[FileRows, RowEncoder] | None = None
    for line in requests:
        start, stop = map(int, line.split())
        arrays: Sequence[np.ndarray[Any, Any]] = ()
        head: dict[str, Any]
        try:
            rows, encoder = opened = opened or job.open()
            arrays = encoder.encode(rows, start, stop)
            head = {"rows": stop - start, "tokens": len(arrays[0]), "fingerprint": encoder.fingerprint}
        except AsyncRLError as error:
            head = {"error": {"type": type(error).__name__, "message": error.message, "cause": error.cause}}
        text = json.dumps(head).encode()
        answers.write(len(text).to_bytes(4) + text)
        for array in arrays:
            answers.write(array.tobytes())
        answers.flush()


if __name__ == "__main__":
    main()
