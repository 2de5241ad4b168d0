"""A local HTTP server with the Hub's endpoints for reading checkpoints and data sets.

with HubStandIn() as hub:
    hub.add("models", "org/name", folder)                 # branch main
    hub.add("models", "org/name", other, branch="v2")
    ... HF_ENDPOINT=hub.endpoint ...
    hub.served                                            # path -> bytes that went out
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+))?(?:/(.*))?$")
FILE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


class LocalServer:
    """HTTP server on a local port for the duration of a context; `handler` answers requests and finds this object as
    `hub`.
    """

    handler: type[BaseHTTPRequestHandler]

    def __enter__(self) -> Any:
        handler = type("Handler", (self.handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class FakeHub(LocalServer):
    """A read-only Hub on a local port.

    Attributes:
        gated: ids that require accepted terms; requests fail.
        private: ids that only `token` may read.
    """

    def __init__(self, token: str = ""):
        self.token = token
        self.repos: dict[tuple[str, str], dict[str, Path]] = {}
        self.gated: set[str] = set()
        self.private: set[str] = set()
        self.served: Counter[str] = Counter()

    def add(self, kind: str, name: str, folder: Path, branch: str = "main") -> None:
        """Add a branch of a repository with the files of a folder."""
        self.repos.setdefault((kind, name), {})[branch] = folder

    def commit(self, kind: str, name: str, branch: str = "main") -> str:
        """Return the commit of a branch."""
        return hashlib.sha1(f"{kind} {name} {branch}".encode()).hexdigest()


class _HttpError(Exception):
    def __init__(self, status: int, code: str):
        self.status, self.code = status, code


class _ReadHandler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_GET

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlparse(self.path).path)
        try:
            if found := API.match(path):
                self._api(*found.groups(), body.decode())
            elif found := FILE.match(path):
                self._file(*found.groups())
            else:
                raise _HttpError(404, "EntryNotFound")
        except _HttpError as refused:
            self._send(b"{}", refused.status, {"X-Error-Code": refused.code, "X-Error-Message": refused.code})

    def _folder(self, kind: str, name: str, revision: str) -> tuple[Path, str]:
        hub = self.hub
        branches = hub.repos.get((kind, name))
        opened = hub.token and self.headers.get("Authorization") == f"Bearer {hub.token}"
        if branches is None or (name in hub.private and not opened):
            raise _HttpError(401, "RepoNotFound")
        if name in hub.gated:
            raise _HttpError(403, "GatedRepo")
        for branch, folder in branches.items():
            if revision in (branch, hub.commit(kind, name, branch)):
                return folder, hub.commit(kind, name, branch)
        raise _HttpError(404, "RevisionNotFound")

    def _api(self, kind: str, name: str, what: str | None, revision: str | None, below: str | None, body: str) -> None:
        folder, commit = self._folder(kind, name, revision or "main")
        files = [_file_entry(p, folder) for p in sorted(folder.rglob("*")) if p.is_file()]
        if what == "tree":
            answer: object = [f for f in files if not below or f["path"].startswith(f"{below}/")]
        elif what == "paths-info":
            wanted = re.findall(r"[\w./-]+", body)
            answer = [f for f in files if f["path"] in wanted]
        else:
            siblings = [{"rfilename": f["path"]} for f in files]
            answer = {"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
        self._send(json.dumps(answer).encode(), 200, {"Content-Type": "application/json"})

    def _file(self, kind: str | None, name: str, revision: str, inside: str) -> None:
        folder, commit = self._folder(kind or "models", name, revision)
        path = folder / inside
        if not path.is_file():
            raise _HttpError(404, "EntryNotFound")
        whole, status = path.read_bytes(), 200
        etag = hashlib.sha256(whole).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        part = whole
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(wanted[1]), min(int(wanted[2] or len(whole) - 1), len(whole) - 1)
            part, status = whole[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{last}/{len(whole)}"
        if self.command == "GET":
            self.hub.served[inside] += len(part)
        self._send(part, status, headers)

    def _send(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _file_entry(path: Path, folder: Path) -> dict[str, object]:
    content = path.read_bytes()
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"type": "file", "path": path.relative_to(folder).as_posix(), "size": len(content), "oid": oid}


FakeHub.handler = _ReadHandler
