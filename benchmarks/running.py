"""Helpers that the measurements share: Ray and an engine, commands, alternating rounds."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from asyncrl.config.schema import Config
from asyncrl.core.ports import Publication, WeightBucket, WeightPublisher, WeightsProbe
from asyncrl.weights.transport import in_buckets

if TYPE_CHECKING:
    from rollouter.serving.fleet import ServeFleet

Variant = TypeVar("Variant")
SAMPLE_S = 0.002


def alternating(variants: Iterable[Variant], rounds: int) -> Iterator[tuple[bool, Variant]]:
    """Yield each variant once in every round, after a warm-up round, and whether the round counts."""
    variants = list(variants)
    for number in range(rounds + 1):
        for variant in variants:
            yield number > 0, variant


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of the same rounds."""
    return statistics.median(one / other for one, other in zip(values, others, strict=True))


def print_progress(text: str) -> None:
    sys.stderr.write(f"{text}\n")


async def publish_tensors(
    publisher: WeightPublisher,
    version: int,
    step: int,
    tensors: WeightBucket,
    *,
    validate: bool = False,
    probe: WeightsProbe | None = None,
) -> Publication:
    """Publish tensors as a version, as rank 0 of the Trainer does."""
    upload = publisher.begin(version)
    for bucket in in_buckets(tensors.items(), publisher.bucket_bytes):
        await upload.put(bucket)
    return await upload.publish(step, validate=validate, probe=probe)


def megabytes(directory: Path, prefix: str = "") -> float:
    """Return the size of the files in and below the directory whose names begin with `prefix`."""
    size = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # the run deletes files meanwhile
                size += (Path(parent) / name).stat().st_size if name.startswith(prefix) else 0
    return size / 1e6


def run_asyncrl(*arguments: str) -> None:
    """Run an `asyncrl` command in its own process.

    Raises:
        RuntimeError: the command failed; the message contains the end of its output.
    """
    command = [sys.executable, "-m", "asyncrl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stdout + done.stderr)[-4000:]
        raise RuntimeError(f"asyncrl {' '.join(arguments)} exited with {done.returncode}:\n{output}")


def failure_cause(output: str) -> str:
    """Return the cause in a failed launch's output: what stands between the line `failed after …` and the sample
    counts, and of a traceback the error."""
    cause = re.split(r"^(?:samples|reward) ", output.rpartition("failed after")[2], maxsplit=1, flags=re.MULTILINE)[0]
    errors = re.split(r"^(?=[\w.]+(?:Error|Exception): )", cause, flags=re.MULTILINE)
    text = " ".join((errors[-1] if len(errors) > 1 else cause.partition("\n")[2] or output).split())
    return text if len(text) <= 300 else f"{text[:300]}…"


@contextmanager
def sampled_peak(pid: int | Literal["self"] = "self") -> Iterator[list[int]]:
    """Sample the anonymous memory of a process in a thread; the list has the samples after the block."""
    samples, ended = [resident_bytes("RssAnon", pid)], threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            samples.append(resident_bytes("RssAnon", pid))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def resident_bytes(name: str, pid: int | Literal["self"] = "self") -> int:
    """Return a value of a process in bytes: VmRSS is its resident memory, VmHWM the peak of it, RssAnon the part that
    is no file."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(kilobytes) * 1024


@contextmanager
def local_ray(namespace: str, *, num_cpus: int = 4, **options: Any) -> Iterator[None]:
    """Start Ray on this machine for the duration of the block, with `num_cpus` logical cores."""
    import ray
    from ray import serve

    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
    ray.init(address="local", namespace=namespace, num_cpus=num_cpus, **quiet, **options)
    try:
        yield
    finally:
        serve.shutdown()  # a handle that reports metrics for autoscaling would start Ray again
        ray.shutdown()


@asynccontextmanager
async def serving(config: Config, namespace: str) -> AsyncIterator[ServeFleet]:
    """Serve the model with engines for the duration of the block."""
    from rollouter.serving.app import start_app, stop_app
    from rollouter.serving.fleet import ServeFleet

    await start_app(config, namespace=namespace)
    try:
        yield ServeFleet(config, namespace=namespace)
    finally:
        await stop_app(namespace)
