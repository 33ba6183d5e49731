"""Weights & Biases: offline, unless `WANDB_MODE` says otherwise or somebody is logged in.

An offline run lies in wandb/ of the run directory; `wandb sync` uploads it later.
"""

from __future__ import annotations

import importlib
import logging
import netrc
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.telemetry.rows import Row
from asyncrl.telemetry.sinks.remote import TrackedRun, Tracker, values

logger = logging.getLogger(__name__)

INIT_S = 30
"""For its server to answer; then the run is kept offline."""
_HOST = "api.wandb.ai"


class WandbTracker(Tracker):
    def __init__(self, run: TrackedRun) -> None:
        self._of = run
        self._wandb: Any = None
        self._run: Any = None
        self._abandoned = False

    def open(self) -> None:
        # The terminal is the live view's.
        os.environ.setdefault("WANDB_SILENT", "true")
        self._wandb = importlib.import_module("wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if _is_logged_in(self._wandb) else "offline")
        try:
            self._run = self._init(mode)
        except Exception as error:
            if mode != "online" or self._abandoned:
                raise
            logger.warning("wandb does not answer (%s): its run is kept offline; upload it with `wandb sync`", error)
            self._run = self._init("offline")
        self._of.keep_id("wandb", self._run.id)
        # Its own count of calls only ever grows; steps are trained again when training goes back.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        self._run.log({"step": row.step, **values(row)})

    def close(self, *, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)
        self._wandb.teardown()

    def abandon(self) -> None:
        self._abandoned = True

    def _init(self, mode: str) -> Any:
        of = self._of
        return self._wandb.init(
            project=of.project,
            group=of.experiment,
            name=of.title,
            id=of.kept_id("wandb"),
            resume="allow",
            dir=str(of.directory),
            config=of.config,
            mode=mode,
            settings=self._wandb.Settings(silent=True, console="off", init_timeout=INIT_S),
        )


def _is_logged_in(wandb: Any) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = {_HOST, urlsplit(wandb.Settings().base_url).netloc}
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        known = netrc.netrc(path)
    except (OSError, netrc.NetrcParseError):
        return False
    return any(known.authenticators(host) for host in hosts)
