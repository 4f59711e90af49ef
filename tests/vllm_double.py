"""A small server that speaks the routes of vLLM 0.32 that ppocli uses, on a tiny model through our
decode loop. What it does where something goes wrong was seen in vLLM itself: a reload that fails
ends its engine, one that isn't in checkpoint format and has no weights changes nothing, output
embeddings that are shared keep old weights; answers to changes of adapters are no JSON.
"""

import copy
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import peft
import torch
from helpers import running
from safetensors.torch import load_file
from sessions import session_of, small_config

from ppocli.config.schema import ModelConfig, RolloutConfig, TrainConfig
from ppocli.distributed.ranks import StopFlag
from ppocli.models.loading.tokenizer import load_tokenizer
from ppocli.ppo.policy_samples import share_of_prompts
from ppocli.ppo.session import Session
from ppocli.sampling.decode_state import Decoder
from ppocli.sampling.decoding import load_decodable
from ppocli.sampling.sampler import DecodeSampler, GenerationModel, decode
from ppocli.sampling.samples import ROLLOUT, Samples, SamplingSpec
from ppocli.sampling.vllm.server import Server
from ppocli.sampling.vllm.server_process import served_name

Spoilt = Callable[[str, int, dict[str, Any]], tuple[int, Any] | None]
"""asked with route, number of the request to it and its body: what is answered in place of the
right answer; an exception breaks the connection off"""


class Engine:
    """The model and what is remembered between requests."""

    def __init__(self, cfg: TrainConfig, *, name: str | None = None, tied: bool = False,
                 most_tokens: int = 64) -> None:
        loaded = load_decodable(cfg.model)
        self.lm, self.tokenizer = loaded.lm, load_tokenizer(cfg.model)
        self.adapters = dict[str, Any]()
        """by name, each on a model of its own"""
        self.known = set[str]()
        """names and paths that adapters have had, which caches remember"""
        self.name = name or served_name(cfg, loaded.export_config)
        self.tied, self.most_tokens = tied, most_tokens
        self.head = torch.nn.Parameter(self.lm.get_output_embeddings().weight.detach().clone())
        self.lm.get_output_embeddings().weight = self.head
        self.version, self.dead, self.paused = "default", False, False
        self.asleep, self.empty = set[str](), False
        """parts without memory; whether weights were dropped"""
        self.stale = False
        """whether the prefix cache is of other weights"""
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    def answer(self, path: str, body: dict[str, Any], query: str = "") -> tuple[int, Any]:
        if path in ("/sleep", "/wake_up", "/is_sleeping"):
            return self.doze(path, query)
        if self.dead and path != "/v1/models":
            return 500, {"error": {"message": "EngineCore encountered an issue."}}
        if path == "/v1/models":
            return 200, {"data": [{"id": self.name, "max_model_len": self.most_tokens}, *(
                {"id": name, "parent": self.name} for name in self.adapters)]}
        if path.startswith("/v1/"):
            return self.change_adapters(path, **body)
        if path in ("/health", "/pause", "/resume"):
            self.paused = path == "/pause" or (self.paused and path == "/health")
            return 200, None
        if path == "/reset_prefix_cache":
            self.stale = False
            return 200, {"success": True}
        if path == "/weight_info":
            return 200, {"weight_version": self.version}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return 200, {"success": True}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            return self.reload(**body["kwargs"])
        if path == "/inference/v1/generate":
            model = body.get("model", self.name)
            if model not in (self.name, *self.adapters):
                return 404, {"error": {"message": f"The model `{model}` does not exist."}}
            status, said = self.generate(self.adapters.get(model, self.lm), body["token_ids"],
                                         body["sampling_params"])
            return status, {**said, "model": model}
        return 404, {"detail": "Not Found"}

    def doze(self, path: str, query: str) -> tuple[int, Any]:
        if path == "/sleep":
            self.asleep, self.empty, self.paused = {"weights", "kv_cache"}, query == "level=2", True
        if path == "/wake_up":
            self.asleep -= {query.removeprefix("tags=")} if query else self.asleep
            self.paused = bool(self.asleep)
        return 200, {"is_sleeping": bool(self.asleep)}

    def change_adapters(self, path: str, lora_name: str, lora_path: str = "") -> tuple[int, Any]:
        if path == "/v1/unload_lora_adapter":
            del self.adapters[lora_name]
            return 200, b"Success: removed"
        if not (Path(lora_path) / "adapter_config.json").is_file():
            return 404, {"error": {"message": f"Loading lora {lora_name} failed: No adapter found "
                                   f"for {lora_path}"}}
        assert not self.known & {lora_name, lora_path}, "caches have answers of other weights"
        self.known |= {lora_name, lora_path}
        model = peft.PeftModel.from_pretrained(copy.deepcopy(self.lm), lora_path)
        self.adapters[lora_name] = model.base_model.model.eval()
        return 200, b"Success: added"

    def reload(self, weights_path: str, is_checkpoint_format: bool = True) -> tuple[int, Any]:
        files = sorted(Path(weights_path).glob("*.safetensors"))
        if not files:
            self.dead = is_checkpoint_format
            return 500, {"error": {"message": f"Worker failed with error '{weights_path}'"}}
        assert "weights" not in self.asleep
        if is_checkpoint_format:
            self.load({name: tensor for file in files for name, tensor in load_file(file).items()})
        return 200, {"results": [None]}

    def load(self, found: dict[str, torch.Tensor]) -> None:
        if self.tied:
            del found["lm_head.weight"]
        self.lm.load_state_dict(found, strict=not self.tied)
        self.stale, self.empty = True, False

    def generate(self, lm: Any, ids: list[int], params: dict[str, Any]) -> tuple[int, Any]:
        assert not self.stale, "the prefix cache is of other weights"
        assert not self.paused, "this would wait for ever"
        assert not self.asleep
        assert not self.empty, "the weights were dropped"
        if len(ids) + params["max_tokens"] > self.most_tokens:
            params = {**params, "max_tokens": self.most_tokens - len(ids)}
        spec = SamplingSpec(
            params["max_tokens"], tuple(params.get("stop_token_ids", ())),
            min_new_tokens=params.get("min_tokens", 0), temperature=params["temperature"] or 1.0,
            top_k=params.get("top_k", 0), top_p=params.get("top_p", 1.0),
            do_sample=params["temperature"] > 0, stop_sequences=tuple(params.get("stop", ())))
        noise = np.random.default_rng(params.get("seed", 0)).random((1, spec.max_new_tokens))
        tokens = torch.tensor([ids])
        bias = torch.zeros(len(self.head))
        for one, value in params.get("logit_bias", {}).items():
            bias[int(one)] = value
        with torch.no_grad(), self.lock, lm.get_output_embeddings().register_forward_hook(
                lambda *given: given[-1] + bias):
            out, = decode(Decoder(lm, spec, self.tokenizer), tokens, torch.ones_like(
                tokens).bool(), noise)
        said, logprobs = out.tokens[0].tolist(), out.logprobs[0].tolist()
        return 200, {"choices": [{
            "token_ids": said, "finish_reason": "stop" if bool(out.finished[0]) else "length",
            "logprobs": {"content": [{"token_id": one, "logprob": value} for one, value in zip(
                said, logprobs, strict=True)]},
            "weight_versions": [{"version": self.version, "start": 0, "end": len(said)}]}]}


@contextmanager
def serving(engine: Engine, spoil: Spoilt = lambda *_: None, port: int = 0) -> Iterator[str]:
    """The address of a server."""
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            path, query = urlsplit(self.path).path, urlsplit(self.path).query
            engine.asked[path] += 1
            engine.bodies.append(body)
            engine.headers.append(dict(self.headers))
            try:
                status, said = (spoil(path, engine.asked[path], body)
                                or engine.answer(path, body, query))
            except ConnectionError:
                self.close_connection = True
                return
            raw = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Whoever asked is gone, which tests do on purpose."""

    server = Quiet(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    with running(server) as url:
        yield url


def config(folder: Path, *urls: str, **keys: Any) -> TrainConfig:
    return small_config(folder, rollout__engine="vllm", rollout__urls=list(urls),
                        rollout__timeout=20.0, **keys)


def engine_of(folder: Path, *, tied: bool = False, **keys: Any) -> Engine:
    return Engine(small_config(folder, **keys), tied=tied)


@contextmanager
def one_server(folder: Path, spoil: Any = lambda *_: None, engine: Engine | None = None,
               **keys: Any) -> Iterator[tuple[Session, Engine]]:
    """A run's session on one server."""
    engine = engine or engine_of(folder)
    with serving(engine, spoil) as url, session_of(config(folder, url, **keys)) as session:
        yield session, engine


@contextmanager
def answering(status: int, reply: Any, seconds: float = 0.0) -> Iterator[
        tuple[Server, list[dict[str, Any]]]]:
    """A server that answers everything alike, after some seconds; and what it is asked."""
    def spoil(path: str, number: int, body: dict[str, Any]) -> tuple[int, Any]:
        time.sleep(seconds)
        return status, reply

    nothing: Any = SimpleNamespace(asked=Counter(), bodies=[], headers=[])
    with serving(nothing, spoil) as url:
        yield Server(url, RolloutConfig(timeout=0.5)), nothing.bodies


def dying(after: int) -> Spoilt:
    """A server that is there for so many responses, and then breaks connections off."""
    count = Counter[str]()

    def spoil(path: str, number: int, body: dict[str, Any]) -> None:
        count[path] += 1
        if count["/inference/v1/generate"] > after:
            raise ConnectionResetError

    return spoil


def drawn(session: Session, count: int = 6, **spec: Any) -> Samples:
    prompts = share_of_prompts(session, 0, count)[0]
    with session.sampler.acting(session.policy) as policy:
        return Samples.joined(list(session.sampler.sample(
            prompts, replace(session.sampling, **spec), ROLLOUT, GenerationModel(policy.lm),
            StopFlag(), at_once=count, chunk=4)))


def ours(session: Session, count: int = 6, **spec: Any) -> Samples:
    own = replace(session, sampler=DecodeSampler(session.sampler.setup))
    return drawn(own, count, **spec)


def disturb(session: Session) -> None:
    with torch.no_grad():
        for parameter in session.policy.lm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


LORA = {"type": "lora", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


def move_adapter(session: Session) -> None:
    with torch.no_grad():
        for parameter in session.loaded.adapter.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))


def assert_same(found: Samples, wanted: Samples) -> None:
    assert found.action_ids == wanted.action_ids
    assert found.finished.tolist() == wanted.finished.tolist()
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=5e-5, rtol=1e-4)


def main() -> None:
    """Serve in the place of ``vllm.entrypoints.openai.api_server``, with its words."""
    words = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    engine = Engine(TrainConfig(model=ModelConfig(path=words["--model"])),
                    name=words["--served-model-name"], most_tokens=int(words["--max-model-len"]))
    with serving(engine, port=int(words["--port"])):
        threading.Event().wait()


if __name__ == "__main__":
    main()
