"""Errors as users read them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from asyncrl.core import failures
from asyncrl.core.failures import UserCodeError, users_frame


def test_the_users_frame_is_the_last_one_outside_of_libraries(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import json\n\n\ndef f():\n    return json.loads('x')\n")
    function = runpy.run_path(str(tmp_path / "mine.py"))["f"]
    with pytest.raises(ValueError) as caught:
        function()
    cause = UserCodeError.wrap("f raised", caught.value).cause
    assert users_frame(cause) == f"{tmp_path}/mine.py line 5, in f: return json.loads('x')"
    ours = f'  File "{Path(failures.__file__)}", line 3, in wrap\n    return cls()\n'
    assert users_frame("") == users_frame(ours) == users_frame("ValueError: x") == ""
