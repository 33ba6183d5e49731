"""The test browser leaves no process behind."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.browser.chromium import NAMES

_BROWSE = """
import sys
import psutil
from asyncrl.driver.cluster.processes import adopt_orphans
from tests.browser.chromium import Tab, browsing

adopt_orphans()
with browsing(sys.argv[1]) as browser, Tab.opened(browser, "about:blank"):
    during = psutil.Process().children(recursive=True)
print(len(during), [(each.name(), each.status()) for each in psutil.Process().children(recursive=True)])
"""


def test_no_process_remains_even_where_orphans_are_adopted() -> None:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("there is no browser on this machine")
    ran = subprocess.run([sys.executable, "-c", _BROWSE, path], capture_output=True, text=True, timeout=60, check=True)
    during, remaining = ran.stdout.split(maxsplit=1)
    assert int(during) > 3
    assert remaining.strip() == "[]"
