"""The part of the Hugging Face Hub that a push talks to, as a small HTTP server of our own.

It keeps what it is sent, byte for byte. Commands reach it through
``HF_ENDPOINT``. Weights travel by git LFS: the storage that ``hf_xet`` speaks to isn't here.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_doubleABCDEFGHIJKLMNOPQRSTUVWX"
USER = "tester"
Files = dict[str, bytes]


@dataclass
class Repo:
    """A model repository."""

    private: bool
    branches: dict[str, Files] = field(default_factory=lambda: {"main": {}})
    lfs: set[str] = field(default_factory=set)
    """paths whose content came by LFS"""


class Refusal(Exception):
    """Ends the handling of a request with an error: status, code, message."""


class HubDouble:
    """A running server; use it as a context manager."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.store: Files = {}
        """LFS objects by sha256"""
        self.lock = threading.RLock()
        self.server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        """for ``HF_ENDPOINT``"""

    def __enter__(self) -> HubDouble:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def repo(self, name: str) -> Repo:
        if name not in self.repos:
            raise Refusal(404, "RepoNotFound", "Repository not found")
        return self.repos[name]

    def files(self, name: str, revision: str | None) -> Files:
        branches = self.repo(name).branches
        if (revision or "main") not in branches:
            raise Refusal(404, "RevisionNotFound", "Invalid rev id")
        return branches[revision or "main"]


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    hub: HubDouble
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        request = f"{self.command} {unquote(urlsplit(self.path).path)}"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            try:
                answer = self._route(request, body)
            except Refusal as wrong:
                status, code, message = wrong.args
                self._send(status, {"error": message, "url": message},
                           {"X-Error-Code": code, "X-Error-Message": message})
            else:
                self._send(200, answer)

    do_POST = do_PUT = do_GET

    def _send(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        kind = "text/plain" if isinstance(answer, bytes) else "application/json"
        for name, value in {"Content-Type": kind, "Content-Length": str(len(raw)),
                            **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    def _route(self, request: str, body: bytes) -> Any:
        for pattern, answer in _ROUTES.items():
            if match := re.fullmatch(pattern.replace("NAME", "([^/]+/[^/]+)"), request):
                if not request.startswith("PUT") and "Authorization" not in self.headers:
                    raise Refusal(401, "", "Invalid username or password.")
                return answer(self.hub, body, *match.groups())
        raise Refusal(404, "", f"no {request}")


def _create(hub: HubDouble, body: bytes) -> Any:
    fields = json.loads(body)
    name = f"{fields.get('organization') or USER}/{fields['name']}"
    if name in hub.repos:
        raise Refusal(409, "", f"{hub.url}/{name}")
    hub.repos[name] = Repo(bool(fields.get("private", fields.get("visibility") == "private")))
    return {"url": f"{hub.url}/{name}", "id": name}


def _info(hub: HubDouble, body: bytes, name: str, revision: str | None = None) -> Any:
    files = hub.files(name, revision)
    return {"_id": "1", "id": name, "private": hub.repo(name).private, "sha": "0" * 40,
            "tags": [], "downloads": 0, "likes": 0, "siblings": [{"rfilename": f} for f in files]}


def _tree(hub: HubDouble, body: bytes, name: str, revision: str) -> Any:
    return [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40}
            for path, data in hub.files(name, revision).items()]


def _validate(hub: HubDouble, body: bytes) -> Any:
    assert isinstance(yaml.safe_load(json.loads(body)["content"].split("---")[1]), dict)
    return {"errors": [], "warnings": []}


def _preupload(hub: HubDouble, body: bytes, name: str, revision: str) -> Any:
    hub.files(name, revision)
    return {"files": [{"path": file["path"], "shouldIgnore": False, "uploadMode":
                       "lfs" if file["path"].endswith(".safetensors") else "regular"}
                      for file in json.loads(body)["files"]]}


def _lfs_batch(hub: HubDouble, body: bytes, name: str) -> Any:
    hub.repo(name)
    return {"transfer": "basic", "objects": [
        {"oid": wanted["oid"], "size": wanted["size"], "actions": {
            "upload": {"href": f"{hub.url}/lfs-objects/{wanted['oid']}", "header": {}}}}
        for wanted in json.loads(body)["objects"]]}


def _lfs_put(hub: HubDouble, body: bytes, oid: str) -> Any:
    hub.store[oid] = body
    return {}


def _commit(hub: HubDouble, body: bytes, name: str, revision: str) -> Any:
    files, repo = dict(hub.files(name, revision)), hub.repo(name)
    for entry in map(json.loads, filter(None, body.split(b"\n"))):
        value, path = entry["value"], entry["value"].get("path")
        if entry["key"] == "file":
            files[path] = base64.b64decode(value["content"])
            repo.lfs.discard(path)
        elif entry["key"] == "lfsFile":
            files[path] = hub.store[value["oid"]]
            repo.lfs.add(path)
        elif entry["key"] == "deletedFile":
            del files[path]
        else:
            assert entry["key"] == "header"
    repo.branches[revision] = files
    return {"commitUrl": f"{hub.url}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}


_ROUTES: dict[str, Callable[..., Any]] = {
    "POST /api/repos/create": _create,
    "POST /api/validate-yaml": _validate,
    "GET /api/models/NAME": _info,
    "GET /api/models/NAME/revision/(.+)": _info,
    "GET /api/models/NAME/tree/(.+)": _tree,
    "POST /api/models/NAME/preupload/(.+)": _preupload,
    "POST /api/models/NAME/commit/(.+)": _commit,
    r"POST /NAME\.git/info/lfs/objects/batch": _lfs_batch,
    "PUT /lfs-objects/([0-9a-f]{64})": _lfs_put,
}
