"""The part of the Hugging Face Hub that a push talks to, as a small HTTP server of our own.

It keeps what it is sent, byte for byte, and fails on request. Commands reach it through
``HF_ENDPOINT``. Weights travel by git LFS: the storage that ``hf_xet`` speaks to isn't here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
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
    commits: list[str] = field(default_factory=list)
    pulls: list[str] = field(default_factory=list)


@dataclass
class Failure:
    """What goes wrong with requests ``METHOD /path`` that match, the next ``times`` times."""

    match: str
    status: int
    """HTTP status; 0: the connection is closed without an answer"""
    times: int
    message: str = ""


class HubDouble:
    """A running server; use it as a context manager."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.store: dict[str, bytes] = {}
        """LFS objects by sha256"""
        self.requests: list[str] = []
        """``METHOD /path`` of every request, in order"""
        self.failures: list[Failure] = []
        self.role = "write"
        self.lock = threading.RLock()
        double = self

        class Handler(_Handler):
            hub = double

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        """For ``HF_ENDPOINT``."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> HubDouble:
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def fail(self, match: str, status: int = 0, times: int = 10**6, message: str = "") -> None:
        """Let requests fail."""
        self.failures.append(Failure(match, status, times, message))

    def environment(self, **over: str) -> dict[str, str]:
        """Variables of a command that is to talk to this server."""
        return {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1", **over}

    def count(self, match: str) -> int:
        """How many requests there were."""
        return sum(bool(re.match(match, request)) for request in self.requests)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class Answer(Exception):
    """Ends the handling of a request with an error."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    hub: HubDouble
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._handle()

    do_POST = do_PUT = do_HEAD = do_GET

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = f"{self.command} {path}"
        with self.hub.lock:
            self.hub.requests.append(request)
            for failure in self.hub.failures:
                if failure.times and re.match(failure.match, request):
                    failure.times -= 1
                    if not failure.status:
                        self.close_connection = True
                        return
                    self._send(failure.status, {"error": failure.message})
                    return
            try:
                answer = self._route(path, body)
            except Answer as wrong:
                self._send(wrong.status, {"error": wrong.message},
                           {"X-Error-Code": wrong.code, "X-Error-Message": wrong.message})
            else:
                self._send(200, answer)

    def _send(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(answer, bytes)
                         else "application/json")
        self.send_header("Content-Length", str(len(raw)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def _route(self, path: str, body: bytes) -> Any:
        for pattern, handler in _ROUTES:
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                if not pattern.startswith("PUT") and "Authorization" not in self.headers:
                    raise Answer(401, message="Invalid username or password.")
                return handler(self.hub, body, **match.groupdict())
        raise Answer(404, message=f"no {self.command} {path}")


def _whoami(hub: HubDouble, body: bytes) -> Any:
    return {"type": "user", "name": USER, "orgs": [],
            "auth": {"type": "access_token", "accessToken": {"role": hub.role}}}


def _create(hub: HubDouble, body: bytes) -> Any:
    wanted = json.loads(body)
    name = f"{wanted.get('organization') or USER}/{wanted['name']}"
    if name in hub.repos:
        raise Answer(409, message="You already created this model repo")
    private = wanted.get("private", wanted.get("visibility") == "private")
    hub.repos[name] = Repo(private=bool(private))
    return {"url": f"{hub.url}/{name}", "id": name}


def _repo(hub: HubDouble, name: str) -> Repo:
    if name not in hub.repos:
        raise Answer(404, "RepoNotFound", "Repository not found")
    return hub.repos[name]


def _files(hub: HubDouble, name: str, revision: str | None) -> Files:
    branches = _repo(hub, name).branches
    if (revision or "main") not in branches:
        raise Answer(404, "RevisionNotFound", "Invalid rev id")
    return branches[revision or "main"]


def _info(hub: HubDouble, body: bytes, name: str, revision: str | None = None) -> Any:
    files = _files(hub, name, revision)
    return {"_id": "1", "id": name, "private": _repo(hub, name).private, "sha": "0" * 40,
            "tags": [], "downloads": 0, "likes": 0, "siblings": [{"rfilename": f} for f in files]}


def _tree(hub: HubDouble, body: bytes, name: str, revision: str) -> Any:
    return [{"type": "file", "path": path, "size": len(data), "oid": _git_oid(data)}
            for path, data in _files(hub, name, revision).items()]


def _validate(hub: HubDouble, body: bytes) -> Any:
    content = json.loads(body)["content"]
    try:
        data = yaml.safe_load(content.split("---")[1])
    except (yaml.YAMLError, IndexError) as error:
        raise Answer(400, message=str(error)) from error
    assert isinstance(data, dict)
    return {"errors": [], "warnings": []}


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _preupload(hub: HubDouble, body: bytes, name: str, revision: str) -> Any:
    there, repo = _files(hub, name, revision), _repo(hub, name)
    answers = []
    for file in json.loads(body)["files"]:
        path = file["path"]
        lfs = path.endswith(".safetensors")
        answer = {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
        if path in there:
            data = there[path]
            answer["oid"] = (hashlib.sha256(data).hexdigest() if path in repo.lfs
                             else _git_oid(data))
        answers.append(answer)
    return {"files": answers}


def _lfs_batch(hub: HubDouble, body: bytes, name: str) -> Any:
    _repo(hub, name)
    objects = []
    for wanted in json.loads(body)["objects"]:
        oid = wanted["oid"]
        answer: dict[str, Any] = {"oid": oid, "size": wanted["size"]}
        if oid not in hub.store:
            answer["actions"] = {"upload": {"href": f"{hub.url}/lfs-objects/{oid}", "header": {}},
                                 "verify": {"href": f"{hub.url}/lfs-verify", "header": {}}}
        objects.append(answer)
    return {"transfer": "basic", "objects": objects}


def _lfs_put(hub: HubDouble, body: bytes, oid: str) -> Any:
    if hashlib.sha256(body).hexdigest() != oid:
        raise Answer(400, message="content does not match its oid")
    hub.store[oid] = body
    return {}


def _lfs_verify(hub: HubDouble, body: bytes) -> Any:
    wanted = json.loads(body)
    if len(hub.store.get(wanted["oid"], b"")) != wanted["size"]:
        raise Answer(404, message="no such object")
    return {}


def _commit(hub: HubDouble, body: bytes, name: str, revision: str) -> Any:
    files, repo = dict(_files(hub, name, revision)), _repo(hub, name)
    for line in filter(None, body.split(b"\n")):
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "header":
            repo.commits.append(value["summary"])
        elif entry["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
            repo.lfs.discard(value["path"])
        elif entry["key"] == "lfsFile":
            files[value["path"]] = hub.store[value["oid"]]
            repo.lfs.add(value["path"])
        elif entry["key"] == "deletedFile":
            del files[value["path"]]
        else:
            raise Answer(400, message=f"unknown operation {entry['key']}")
    repo.branches[revision] = files
    oid = hashlib.sha1(body).hexdigest()
    return {"commitUrl": f"{hub.url}/{name}/commit/{oid}", "commitOid": oid}


def _branch(hub: HubDouble, body: bytes, name: str, branch: str) -> Any:
    repo = _repo(hub, name)
    if branch in repo.branches:
        raise Answer(409, message="Reference already exists")
    repo.branches[branch] = dict(repo.branches["main"])
    return {}


def _open_pull(hub: HubDouble, body: bytes, name: str) -> Any:
    repo = _repo(hub, name)
    repo.pulls.append(json.loads(body)["title"])
    repo.branches[f"refs/pr/{len(repo.pulls)}"] = dict(repo.branches["main"])
    return {"num": len(repo.pulls)}


def _pull(hub: HubDouble, body: bytes, name: str, number: str) -> Any:
    return {"title": _repo(hub, name).pulls[int(number) - 1], "num": int(number), "events": [],
            "author": {"name": USER}, "createdAt": "2026-01-01T00:00:00.000Z", "status": "draft",
            "repo": {"name": name, "type": "model"}, "isPullRequest": True,
            "changes": {"base": "refs/heads/main"}, "filesWithConflicts": [], "diff": ""}


def _resolve(hub: HubDouble, body: bytes, name: str, revision: str, path: str) -> Any:
    files = _files(hub, name, revision)
    if path not in files:
        raise Answer(404, "EntryNotFound", "Entry not found")
    return files[path]


_NAME = r"(?P<name>[^/]+/[^/]+)"
_ROUTES: list[tuple[str, Any]] = [
    (r"GET /api/whoami-v2", _whoami),
    (r"POST /api/repos/create", _create),
    (r"POST /api/validate-yaml", _validate),
    (rf"GET /api/models/{_NAME}", _info),
    (rf"GET /api/models/{_NAME}/revision/(?P<revision>.+)", _info),
    (rf"GET /api/models/{_NAME}/tree/(?P<revision>.+)", _tree),
    (rf"POST /api/models/{_NAME}/preupload/(?P<revision>.+)", _preupload),
    (rf"POST /api/models/{_NAME}/commit/(?P<revision>.+)", _commit),
    (rf"POST /api/models/{_NAME}/branch/(?P<branch>.+)", _branch),
    (rf"POST /api/models/{_NAME}/discussions", _open_pull),
    (rf"GET /api/models/{_NAME}/discussions/(?P<number>\d+)", _pull),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", _lfs_batch),
    (r"PUT /lfs-objects/(?P<oid>[0-9a-f]{64})", _lfs_put),
    (r"POST /lfs-verify", _lfs_verify),
    (rf"GET /{_NAME}/resolve/(?P<revision>main|refs/pr/\d+|[^/]+)/(?P<path>.+)", _resolve),
]
