"""Roles as users of verl write them: own files in an own format, and no fingerprint."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path
from typing import Any

from skip import BaseSkip, SkipAction, register_skip


@register_skip("pickled")
class PickledSkip(BaseSkip):
    """Keeps results as pickles. It counts its own calls, which is only right if they never overlap."""

    support_actions = [SkipAction.CACHE, SkipAction.REPEAT]  # noqa: RUF012  as in verl

    def __init__(self, local_config: Any, global_config: Any) -> None:
        super().__init__(local_config, global_config)
        self.root = Path(self.dump_dir).expanduser() / "pickles"
        self.threads: set[int] = set()
        self.num_calls = 0

    def meet_precondition(self, step: int, func: Any, *args: Any, **kwargs: Any) -> bool:
        self._work()
        return self._find(step) is not None

    def warp_function(self, step: int, func: Any, *args: Any, **kwargs: Any) -> Any:
        self._work()
        return pickle.loads(self._path(self._find(step)).read_bytes())

    def prepare_data(self, step: int, result: Any, *args: Any, **kwargs: Any) -> None:
        self._work()
        self.root.mkdir(parents=True, exist_ok=True)
        self._path(step).write_bytes(pickle.dumps(result))

    def _work(self) -> None:
        self.threads.add(threading.get_ident())
        before = self.num_calls
        time.sleep(0.001)
        self.num_calls = before + 1

    def _path(self, step: int | None) -> Path:
        return self.root / f"{step}.pkl"

    def _find(self, step: int) -> int | None:
        if self._path(step).exists():
            return step
        if self.action == SkipAction.CACHE or not self.root.is_dir():
            return None
        found = sorted(int(path.stem) for path in self.root.iterdir())
        earlier = [one for one in found if one < step]
        return earlier[-1] if earlier else found[0] if found else None


@register_skip("pickled_online")
class PickledOnlineSkip(PickledSkip):
    """Takes its step from the call, `function(step, ...)`."""

    support_online_step = True

    def extract_step(self, *args: Any, **kwargs: Any) -> int:
        self.threads.add(threading.get_ident())
        return int(args[0] if args else kwargs["step"])


@register_skip("nothing")
class EmptySkip(BaseSkip):
    """Skips the function: each result is `local_config.value`, a key of its own, or None."""

    support_actions = [SkipAction.EMPTY]  # noqa: RUF012

    def __init__(self, local_config: Any, global_config: Any) -> None:
        super().__init__(local_config, global_config)
        self.value = getattr(local_config, "value", None)

    def meet_precondition(self, step: int, func: Any, *args: Any, **kwargs: Any) -> bool:
        return True

    def warp_function(self, step: int, func: Any, *args: Any, **kwargs: Any) -> Any:
        return self.value
