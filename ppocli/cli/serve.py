"""``ppocli serve-reward``: a reward function or model in a process of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ppocli.cli.output import complain, say
from ppocli.errors import ConfigError, InputError, StoppedError

if TYPE_CHECKING:
    from ppocli.config.schema import TrainConfig
    from ppocli.rewards.serving import RewardServer, Service

MIB = 2**20


def serve_reward(words: Sequence[str], *, host: str, port: int, token_env: str | None,
                 tokenizer: str | None, max_body_mib: int) -> None:
    """Serve the reward that the words name until a signal comes.

    Args:
        words: as for ``ppocli train``; only what they say of the reward counts.
        port: 0 takes any that is free.
        token_env: variable of the environment that holds the token to be asked for.
        tokenizer: folder or Hub name, for rewards that ask for the policy's tokenizer.

    Raises:
        ConfigError: wrong words, host or port, or a variable that isn't set.
        RewardError, InputError: the reward can't be made.
    """
    cfg = _reward_config(words)
    token = _token(token_env)
    from ppocli.cli.working import working

    server = None
    try:
        with working() as stop:
            service = _service(cfg, token, tokenizer, max_body_mib * MIB)
            server = _listen(host, port, service, stop.check)
            _introduce(server, host, token_env)
            with server:
                try:
                    server.serve_forever(poll_interval=0.2)
                finally:
                    with stop.defer():
                        if not server.finish():
                            complain("warning: a request under way was not answered")
    except StoppedError as stopped:
        if server is None:  # it wasn't there yet
            raise
        say(f"{stopped.what}; {server.samples} samples scored in {server.requests} requests")


def _reward_config(words: Sequence[str]) -> TrainConfig:
    from ppocli.config.compose import compose
    from ppocli.config.problems import find_problems, raise_problems
    from ppocli.config.words import read_words

    cfg = compose(read_words(words)).values()
    raise_problems([problem for problem in find_problems(cfg)
                    if problem.key.split(", ")[0].startswith("reward.")],
                   fix="ppocli serve-reward reward.fn=my_rewards:score, or +recipe=NAME")
    if "http" in [cfg.reward.fn, *(entry.get("fn") for entry in cfg.reward.fns.values())]:
        raise ConfigError("reward.fn=http asks a server; to serve it would only pass it on.",
                          where="reward.fn", fix="name the reward itself")
    return cfg


def _token(name: str | None) -> str | None:
    if name is None:
        return None
    token = os.environ.get(name)
    if not token:
        raise ConfigError(f"The environment has no variable {name!r}, or it is empty.",
                          where="--token-env", fix=f"export {name}=...")
    return token


def _service(cfg: TrainConfig, token: str | None, tokenizer: str | None, max_body: int) -> Service:
    from ppocli.rewards.scoring import build_reward
    from ppocli.rewards.serving import Service
    from ppocli.train import random_state as generators

    generators.seed(cfg.seed)
    reward = build_reward(cfg.reward)
    for path in reward.code_files:
        say(f"running code from {path}")
    if tokenizer is None:
        for part in reward.parts:
            if any(p.name == "tokenizer" for p in part.bound.parameters):
                say(f"{part.bound.label} asks for a tokenizer and gets None; to hand it one: "
                    "--tokenizer FOLDER")
    return Service(replace(reward, skip_invalid=True), max_body, token,
                   None if tokenizer is None else _load_tokenizer(cfg, tokenizer))


def _load_tokenizer(cfg: TrainConfig, name: str) -> Any:
    from ppocli.models.loading.language_model import load_tokenizer

    try:
        return load_tokenizer(replace(cfg.model, path=name, tokenizer_path=None, revision=None))
    except InputError as error:
        error.where = "--tokenizer"
        raise


def _listen(host: str, port: int, service: Service, poll: Any) -> RewardServer:
    from ppocli.rewards.serving import RewardServer

    try:
        return RewardServer(host, port, service, poll)
    except socket.gaierror as error:
        raise ConfigError(f"{host!r} is no address of this machine: {error.strerror}",
                          where="--host", fix="--host 127.0.0.1, or 0.0.0.0 for all") from error
    except OSError as error:
        raise ConfigError(f"{host}:{port} can't be listened at: {error.strerror}.", where="--port",
                          fix="another port; 0 takes one that is free") from error


def _introduce(server: RewardServer, host: str, token_env: str | None) -> None:
    """Where it listens (on standard output, for scripts) and what to say in training."""
    from ppocli.rewards.remote import is_loopback
    from ppocli.rewards.serving import HEALTH, SCORE

    port = server.server_address[1]
    open_to_all = host in ("0.0.0.0", "::")
    name = socket.gethostname() if open_to_all else f"[{host}]" if ":" in host else host
    address = f"http://{name}:{port}"
    if not is_loopback(host):
        guarded = "whoever has the token" if token_env else "anyone who"
        complain(f"warning: {host} can be reached from other machines: {guarded} can "
                 "have samples scored here" + ("" if token_env else "; --token-env NAME asks for "
                                               "a token"))
    token = f" reward.kwargs.token_env={token_env}" if token_env else ""
    say(f"serving {', '.join(part.bound.label for part in server.service.reward.parts)}; "
        f"{address}{HEALTH} says how it is; Ctrl-C ends it")
    for path in server.rewards:
        what = "" if path == SCORE else f" ({path.removeprefix(SCORE + '/')} alone)"
        say(f"in training{what}: reward.fn=http reward.kwargs.url={address}{path}{token}")
    print(address, flush=True)
