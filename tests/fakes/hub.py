"""A server that answers as the Hugging Face Hub does about one data set, for its own clients."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """The data set `name` with `files`, at one commit."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        self.name, self.files = name, files
        self.requests: list[str] = []

    def answer(self, method: str, target: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        self.requests.append(f"{method} {target}")
        path = unquote(urlsplit(target).path)
        if match := re.fullmatch(rf"/datasets/{self.name}/resolve/[^/]+/(.*)", path):
            return self._file(match[1])
        if re.fullmatch(rf"/api/datasets/{self.name}(/revision/[^/]+)?", path):
            return _json(self._info())
        if re.fullmatch(rf"/api/datasets/{self.name}/paths-info/[^/]+", path):
            wanted = parse_qs(body.decode()).get("paths") or json.loads(body or b"{}").get("paths", [])
            return _json([one for one in self._tree() if one["path"] in wanted])
        if match := re.fullmatch(rf"/api/datasets/{self.name}/tree/[^/]+/?(.*)", path):
            return _json([one for one in self._tree() if one["path"].startswith(match[1])])
        return _missing("RepoNotFound")

    def _file(self, name: str) -> tuple[int, dict[str, str], bytes]:
        if (content := self.files.get(name)) is None:
            return _missing("EntryNotFound")
        return 200, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}, content

    def _info(self) -> dict[str, Any]:
        siblings = [{"rfilename": name} for name in self.files]
        flags = {"private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        return {
            "id": self.name,
            "sha": COMMIT,
            "siblings": siblings,
            "lastModified": "2026-01-01T00:00:00.000Z",
        } | flags

    def _tree(self) -> list[dict[str, Any]]:
        folders = {name.rpartition("/")[0] for name in self.files} - {""}
        files = [
            {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
            for name, content in self.files.items()
        ]
        return [
            *({"type": "directory", "path": name, "size": 0, "oid": _oid(name.encode())} for name in folders),
            *files,
        ]


def _oid(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _missing(code: str) -> tuple[int, dict[str, str], bytes]:
    return 404, {"X-Error-Code": code, "X-Repo-Commit": COMMIT}, b"{}"


@contextmanager
def serving(hub: FakeHub) -> Iterator[str]:
    """Serve the hub on this machine, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, content = hub.answer(self.command, self.path, body)
            if status == 200 and (match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")):
                start, end = int(match[1]), min(int(match[2] or len(content)) + 1, len(content))
                headers = headers | {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}
                status, content = 206, content[start:end]
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = _answer

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
