"""vLLM servers: one, as its routes see it; the policy's weights, as servers read them from a folder
of safetensors that is new for each version; rows of a rollout handed to whichever is free."""

import json
import logging
import math
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from ppocli.config.schema import RolloutConfig
from ppocli.config.user_code import shorten
from ppocli.errors import DiskError, SamplerError
from ppocli.models.head import Vocabulary
from ppocli.models.loading.load_adapters import Adapter, merged_tensors
from ppocli.rewards.remote import Client, from_environment, retry_after

log = logging.getLogger(__name__)

ANSWER, A_TOKEN = 2**20, 2**10
"""bytes that an answer may have at any rate, and those for each token with its logprob"""
NEVER = -1e9
"""what is added to the logits of ids that must not be sampled"""
BUSY, TRIES, LONGEST_PAUSE = (429, 503), 4, 30.0
"""statuses that are tried again, how often, and the most seconds before"""
LOOK = 10.0
"""seconds for an answer that needs no work"""
_PREFIX = "ppocli-weights-"
SEEN = "seen"
"""a folder without weights beside them: who can read it sees the weights, too"""
POLL_SECONDS = 0.1
HOW_TO = ("start it as `ppocli vllm-command` with this run's words prints it; a run that has begun "
          "goes on by ppocli resume")
_REMEDIES = {401: "rollout.token_env=VARIABLE names the variable that holds its token",
             404: f"{HOW_TO}; the routes are those of vLLM 0.32"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, as a server gave it."""

    ids: list[int]
    logprobs: list[float]
    """of each token under what it was drawn from"""
    finished: bool
    """whether a stop rule ended it"""
    versions: list[str]
    """of the weights, in the order of their tokens"""


class Server:
    """A server and its routes, all of which raise SamplerError: it is away, too slow or broken, the
    request is refused, or the answer makes no sense."""

    def __init__(self, url: str, cfg: RolloutConfig, vocabulary: Vocabulary | None = None) -> None:
        token = cfg.token_env and from_environment(cfg.token_env, "Authorization",
                                                   "rollout.token_env", SamplerError)
        self.url = url.rstrip("/")
        absent = [] if vocabulary is None else vocabulary.absent
        self._rows, self._absent = 2**31 if vocabulary is None else vocabulary.rows, set(absent)
        self._bias = {"logit_bias": dict.fromkeys(map(str, absent), NEVER)} if absent else {}
        """of ids without a token, which the server's model has rows for"""
        self._client = Client(url, timeout=cfg.timeout, keep=cfg.concurrency,
                              headers={"Authorization": f"Bearer {token}"} if token else {})

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, most: int = ANSWER,
            timeout: float | None = None) -> Any:
        """The JSON that a route answers to a GET, or to a POST of ``body``."""
        content = self._content(path, body, most, timeout)
        try:
            return json.loads(content or b"null")
        except (ValueError, RecursionError):
            raise _refused(f"{self.url}{path} answered with what is no JSON: {_message(content)}"
                           ) from None

    def _content(self, path: str, body: Mapping[str, Any] | None, most: int = ANSWER,
                 timeout: float | None = None) -> bytes:
        method, sent = ("GET", b"") if body is None else ("POST", json.dumps(body).encode())
        for attempt in range(TRIES):
            try:
                answer = self._client.ask(method, self.url + path, sent, most, timeout)
            except (TimeoutError, ConnectionError) as error:
                # vLLM closes a connection behind an error without saying so
                if attempt == 0 and isinstance(error, ConnectionError):
                    continue
                raise _refused(str(error)) from error
            status, content = answer.status_code, answer.content
            reply = f"{self.url}{path} answered {status}"
            if status not in BUSY or attempt == TRIES - 1:
                break
            pause = max(2.0**attempt, retry_after(answer, LONGEST_PAUSE))
            log.warning("%s; trying again in %g s", reply, pause)
            time.sleep(pause)
        if status != 200 or len(content) > most:
            raise _refused(f"{reply}: {_message(content)}", _REMEDIES.get(status, HOW_TO))
        return content

    def check(self, name: str, tokens: int) -> None:
        """Make sure that the run's own model is served, at its length.

        Args:
            name: that :func:`~ppocli.sampling.vllm.server_process.served_name` gives it.
            tokens: of the longest prompt and response together.
        """
        listing = self.ask("/v1/models", timeout=LOOK)
        try:
            models = {str(one["id"]): int(one.get("max_model_len") or 0) for one in listing["data"]}
        except (KeyError, TypeError, ValueError, AttributeError):
            models = {}
        if models.get(name, -1) < tokens:
            served = ", ".join(f"{one} (up to {most} tokens)" for one, most in models.items())
            raise _refused(f"{self.url} serves {served or 'no model'}; this run's is {name}, with "
                           f"up to {tokens} tokens.")

    def holds(self, version: str) -> bool:
        """Whether it has this version of the weights."""
        info = self.ask("/weight_info", timeout=LOOK)
        return isinstance(info, dict) and info.get("weight_version") == version

    def load(self, send: Callable[[], None], version: str) -> None:
        """Replace the weights, and forget all that was made by others.

        Args:
            send: gives them to the server.
        """
        self.ask("/pause?mode=abort", {})  # what a run has left that was killed
        send()
        done = self.ask("/reset_prefix_cache", {})
        if not (isinstance(done, dict) and done.get("success")):
            raise _refused(f"{self.url} could not forget its prefix cache.")
        self.ask("/update_weight_version", {"new_version": version})
        self.ask("/resume", {})

    def load_adapter(self, folder: Path, name: str) -> None:
        """Read an adapter, and forget all others. vLLM's caches know adapters by their names and
        paths: both have to be new for other weights."""
        self._content("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        for model in self.ask("/v1/models", timeout=LOOK)["data"]:
            if model.get("parent") and model["id"] != name:
                self._content("/v1/unload_lora_adapter", {"lora_name": model["id"]})

    def sleep(self, level: int) -> bool:
        """Give back the memory of its device; whether it says that it did.

        Args:
            level: 1 keeps the weights in host memory, 2 drops them.
        """
        self.ask(f"/sleep?level={level}", {})
        return bool(self.ask("/is_sleeping", timeout=LOOK)["is_sleeping"])

    def wake(self, part: str | None = None) -> None:
        """Take memory again, for all or for a part (``weights``, ``kv_cache``); one that is awake
        stays so."""
        self.ask("/wake_up" if part is None else f"/wake_up?tags={part}", {})

    def generate(self, ids: Sequence[int], params: Mapping[str, Any], adapter: str | None = None
                 ) -> Answer:
        """One response to a prompt.

        Args:
            params: fields of vLLM's ``SamplingParams``.
            adapter: that :meth:`load_adapter` has given a name; None: the model without one.
        """
        limit = int(params["max_tokens"])
        reply = self.ask("/inference/v1/generate", most=ANSWER + A_TOKEN * limit, body={
            "token_ids": list(ids), **({} if adapter is None else {"model": adapter}),
            "sampling_params": {"n": 1, "logprobs": 0, **self._bias, **params}})
        try:
            choice, = reply["choices"]
            tokens = [int(one) for one in choice["token_ids"]]
            content, reason = choice["logprobs"]["content"], choice["finish_reason"]
            logprobs = [float(one["logprob"]) for one in content]
            versions = [str(one["version"]) for one in choice["weight_versions"]]
            same = [one["token_id"] for one in content] == tokens and (
                adapter is None or reply["model"] == adapter)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _refused(f"{self.url} answered no response with logprobs and weight versions "
                           f"({error!r}): {shorten(json.dumps(reply))}") from None
        fits = 0 < len(tokens) <= limit and (reason == "stop" or len(tokens) == limit) and all(
            0 <= one < self._rows and one not in self._absent for one in tokens)
        # NaN is in no range; what is certain may be rounded to a little more than 0
        if not (same and fits and all(-math.inf < logprob < 1e-2 for logprob in logprobs)):
            raise _refused(f"{self.url} answered what its model can't have sampled, or broke a "
                           f"response off ({reason}): {shorten(json.dumps(choice))}",
                           "give each run servers of its own, started as `ppocli vllm-command` "
                           "prints it")
        return Answer(tokens, logprobs, reason == "stop", versions)


def _refused(what: str, fix: str = HOW_TO) -> SamplerError:
    return SamplerError(what, where="rollout.urls", fix=fix)


def _message(content: bytes) -> str:
    """What an answer says went wrong."""
    text = content.decode(errors="replace")
    with suppress(ValueError, RecursionError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"] or text)
    return shorten(text) or "nothing"


def tensors_of(lm: Any, adapter: Adapter | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The state dict of a causal LM, LoRA's products added, in the type that servers compute in.
    Output embeddings that are the input ones are there a second time."""
    state = lm.state_dict() if adapter is None else merged_tensors(adapter)
    tensors: dict[str, torch.Tensor] = {}
    places = set[int]()
    for name, tensor in state.items():
        sent = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)
        if sent.data_ptr() in places:
            sent = sent.clone()
        places.add(sent.data_ptr())
        tensors[name] = sent
    return tensors


class WeightsFolder:
    """Versions of the weights, put into a folder one after another; it goes when the process ends.

    Args:
        parent: a folder that the servers see (default: the one for temporary files).

    Raises:
        DiskError: nothing can be written there.
    """

    def __init__(self, parent: str | None) -> None:
        try:
            if parent is None:
                _remove_abandoned()
            self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=parent)
                             ).resolve()
        except OSError as error:
            raise _no_room(parent, error) from error
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self._newest = self.path

    def write(self, save: Callable[[Path], object], version: str) -> None:
        """Write weights in place of the version before.

        Args:
            save: writes them into a folder, under the names of their checkpoint format.

        Raises:
            DiskError: the disk is full.
        """
        self._newest = folder = self.path / version
        if folder.is_dir():
            return
        old = list(self.path.iterdir())
        try:
            (folder / SEEN).mkdir(parents=True)
            save_file({}, folder / SEEN / "model.safetensors")
            save(folder)
        except OSError as error:
            raise _no_room(str(folder), error) from error
        for path in old:
            shutil.rmtree(path, ignore_errors=True)

    def check_readable(self, server: Server) -> None:
        """Make sure that a server sees the folder: a reload that fails takes vLLM's engine with it.
        It loads a folder without weights, which changes nothing.

        Raises:
            SamplerError.
        """
        try:
            _reload(server, self._newest / SEEN, is_checkpoint_format=False)
        except SamplerError as error:
            if error.fix in _REMEDIES.values():
                raise  # it is the route or the token, not the folder
            raise self._unreadable(server, error) from error

    def _unreadable(self, server: Server, error: SamplerError) -> SamplerError:
        server.ask("/health", timeout=LOOK)
        return SamplerError(f"{server.url} can't read the weights in {self._newest}: {error.what}",
                            where="rollout.weights_dir",
                            fix="name a folder that the servers see under the same path")

    def load(self, server: Server) -> None:
        """Replace a server's weights by the newest, from a thread of its own for each server."""
        _reload(server, self._newest)

    def load_adapter(self, server: Server) -> None:
        """Give a server the newest version, an adapter, which is then called like that.

        Raises:
            SamplerError: as :meth:`check_readable`; the server is as before.
        """
        try:
            server.load_adapter(self._newest, self._newest.name)
        except SamplerError as error:
            if "No adapter found" in error.what:
                raise self._unreadable(server, error) from error
            raise


def _reload(server: Server, folder: Path, **how: Any) -> None:
    server.ask("/collective_rpc", {"method": "reload_weights",
                                   "kwargs": {"weights_path": str(folder), **how}})


def _remove_abandoned() -> None:
    """Remove the folders of processes of this machine that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _no_room(folder: str | None, error: OSError) -> DiskError:
    return DiskError(f"Weights for servers can't be written: {error}.", where="rollout.weights_dir",
                     fix=f"make room in {folder or tempfile.gettempdir()}, or name another folder")


class Dealing:
    """Rows under way at several servers.

    Args:
        ask: has a server answer a row.
        count: how many rows there are.
        each: most rows under way at one server.
    """

    def __init__(self, servers: Sequence[Server], ask: Callable[[Server, int], Answer], count: int,
                 each: int) -> None:
        self._ask, self._closed = ask, threading.Event()
        self._answers: list[Future[Answer]] = [Future() for _ in range(count)]
        self._waiting = deque(range(count))
        for _ in range(min(each, count)):
            for server in servers:  # in turn: fewer rows than one could take are split evenly too
                # daemons: a server that hangs must not keep a process that wants to end
                threading.Thread(target=self._serve, args=[server], daemon=True,
                                 name=f"asking {server.url}").start()

    def take(self, rows: Iterable[int], poll: Callable[[], None]) -> list[Answer]:
        """The answers to these rows, once they are all there.

        Args:
            poll: called every now and then; may raise to stop.

        Raises:
            SamplerError: a server is lost, or what one says makes no sense.
        """
        answers = [self._answers[row] for row in rows]
        while (state := wait(answers, POLL_SECONDS, "FIRST_EXCEPTION")).not_done:
            poll()
            for answer in state.done:
                answer.result()  # raises what went wrong
        return [answer.result() for answer in answers]

    def close(self) -> None:
        """Ask for nothing more."""
        self._closed.set()

    def _serve(self, server: Server) -> None:
        with suppress(IndexError):
            while not self._closed.is_set():
                row = self._waiting.popleft()
                try:
                    self._answers[row].set_result(self._ask(server, row))
                except BaseException as error:
                    self._answers[row].set_exception(error)
