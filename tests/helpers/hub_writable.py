"""A local HTTP server with the Hub's endpoints for writing: repositories, branches, large files, commits.

with WritableHub(token) as hub:
    hub.files("me/model")            # path -> bytes of the last commit on main
    hub.stored                       # sha256 -> bytes of large files, whether committed or not
    hub.fail_after = 1                   # accept this many large files, then break off the next one
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlparse

from helpers.hub_standin import LocalServer

READ = re.compile(r"/api/models/([^/]+/[^/]+)(?:/tree/([^/]+))?$")
REPO = re.compile(r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/([^/]+)$")
BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch$")


class WritableHub(LocalServer):
    """A Hub on a local port that accepts uploads. forbidden_owners: organizations that the token may not write to."""

    def __init__(self, token: str):
        self.token = token
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.private: set[str] = set()
        self.messages: list[str] = []
        self.stored: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.fail_after: int | None = None
        self.forbidden_owners = {"others"}

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """Return path -> bytes of the branch's last commit."""
        return self.repos[repo][branch]


class _WriteHandler(BaseHTTPRequestHandler):
    hub: WritableHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlparse(self.path).path)
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._send(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":  # the head of a card
            self._send(200, {"errors": [], "warnings": []})
        elif found := BATCH.match(path):
            self._batch(found[1], json.loads(body))
        elif (found := REPO.match(path)) and found[1] in self.hub.repos:
            getattr(self, f"_{found[2]}")(found[1], found[3], body)
        else:
            self._send(404, {"error": "Repository not found"})

    def do_GET(self) -> None:
        """Answer requests for information and content."""
        found = READ.match(unquote(urlparse(self.path).path))
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._send(401, {"error": "Invalid username or password."})
        elif not found or found[1] not in self.hub.repos:
            self._send(404, {"error": "Repository not found"})
        elif found[2]:
            files = self.hub.repos[found[1]][found[2]]
            self._send(200, [{"type": "file", "oid": "0" * 40, "size": len(b), "path": p} for p, b in files.items()])
        else:
            self._send(200, {"id": found[1], "private": found[1] in self.hub.private, "siblings": []})

    def do_PUT(self) -> None:
        """Accept a large file at its signed address."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        oid = urlparse(self.path).path.rsplit("/", 1)[-1]
        if self.hub.fail_after is not None and len(self.hub.sent) >= self.hub.fail_after:
            self._send(403, {"error": "connection lost"})
            return
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.stored[oid] = body
        self.hub.sent.append(oid)
        self._send(200, {})

    def _create(self, request: dict[str, Any]) -> None:
        owner = request.get("organization") or "me"
        repo = f"{owner}/{request['name']}"
        if owner in self.hub.forbidden_owners:
            self._send(403, {"error": f"You don't have the rights to create a model under the namespace {owner}"})
        elif repo in self.hub.repos:
            self._send(409, {"error": "You already created this model repo", "url": f"{self.hub.endpoint}/{repo}"})
        else:
            self.hub.repos[repo] = {"main": {}}
            self.hub.private |= {repo} if request.get("private") or request.get("visibility") == "private" else set()
            self._send(200, {"url": f"{self.hub.endpoint}/{repo}", "name": repo})

    def _branch(self, repo: str, branch: str, body: bytes) -> None:
        known = self.hub.repos[repo]
        if branch in known:
            self._send(409, {"error": "Reference already exists"})
        else:
            known[branch] = dict(known["main"])
            self._send(200, {})

    def _preupload(self, repo: str, branch: str, body: bytes) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".png")) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self._send(200, {"files": files})

    def _batch(self, repo: str, request: dict[str, Any]) -> None:
        objects = []
        for wanted in request["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.stored:
                entry["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{wanted['oid']}"}}
            objects.append(entry)
        self._send(200, {"transfer": "basic", "objects": objects})

    def _commit(self, repo: str, branch: str, body: bytes) -> None:
        """Apply a commit completely or not at all, as the Hub does."""
        new: dict[str, bytes] = {}
        gone: set[str] = set()
        for line in body.decode().splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif item["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "deletedFile":
                gone.add(value["path"])
            else:
                assert item["key"] == "lfsFile"
                new[value["path"]] = self.hub.stored[value["oid"]]
        assert gone <= self.hub.repos[repo][branch].keys() - new.keys()
        kept = {path: content for path, content in self.hub.repos[repo][branch].items() if path not in gone}
        self.hub.repos[repo][branch] = kept | new
        oid = hashlib.sha1(body).hexdigest()
        self._send(200, {"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{oid}", "commitOid": oid})

    def _send(self, status: int, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


WritableHub.handler = _WriteHandler
