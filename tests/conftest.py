"""Settings of all tests: no network, one thread per library and a quiet Ray, set before the libraries are imported."""

from __future__ import annotations

import os
import sys

os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # On a busy machine, Serve's proxy takes longer to start than the 5 s after which Serve kills it.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    }
)

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from asyncrl.core import failures
from asyncrl.profiling import profile
from skip import SkipManager


class FileScheduling(LoadScopeScheduling):
    """Runs the tests of a file in one process. Of a suite with other tests, those that start engines run one after
    another; in the slow round, two launches share the machine, because each leaves cores idle while it starts, and the
    tests of the fuzz, which share nothing, run in any process."""

    def _split_scope(self, nodeid: str) -> str:
        is_slow_round = self.config.option.markexpr == "slow"
        if is_slow_round and nodeid.startswith("tests/fuzz/"):
            return nodeid
        if not is_slow_round and nodeid.startswith("tests/e2e/"):
            return "tests/e2e"
        return nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling:
    """Distribute the tests under `pytest -n`."""
    return FileScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the runs that need engines, which take longest; another process runs the other tests meanwhile."""
    items.sort(key=lambda item: "tests/e2e/" not in item.path.as_posix())


# The duration of an example depends on the machine.
settings.register_profile("asyncrl", deadline=None)
settings.load_profile("asyncrl")


@pytest.fixture(autouse=True)
def nothing_skipped() -> Iterator[None]:
    """Disable the roles that a test enabled and reset the step that a loop set."""
    yield
    SkipManager.reset()


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the secrets of other tests, whose values may be ordinary words."""
    monkeypatch.setattr(failures, "_hidden", {})


@pytest.fixture(autouse=True)
def nothing_profiled() -> Iterator[None]:
    """Stop recording events when the test ends."""
    yield
    if profile.enabled:
        profile.close()


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """Fail a test that does not leave its process group, which would break later tests that join one."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test did not leave its process group: it did not close an engine")
