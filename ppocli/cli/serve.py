"""``ppocli serve-reward``, a reward in a process of its own, and ``vllm-command``, how to start a
server that samples."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ppocli.cli.options import Overrides, option
from ppocli.cli.output import complain, say, working
from ppocli.config import import_guard
from ppocli.distributed import host_memory
from ppocli.distributed.standard_output import put
from ppocli.errors import ConfigError, StoppedError

if TYPE_CHECKING:
    from ppocli.config.schema import TrainConfig
    from ppocli.rewards.scoring import Reward
    from ppocli.rewards.serving import RewardServer


def serve_reward(
        overrides: Overrides = None,
        host: str = option("HOST", "The address to listen on; 0.0.0.0 lets other machines connect.",
            default="127.0.0.1"),
        port: int = option("PORT", "The port; 0 takes a free one.", default=8123, min=0, max=65535),
        token_env: str | None = option("NAME", "Require the token in this environment variable."),
        tokenizer: str | None = option(
            "FOLDER", "The policy's tokenizer, for rewards that need it."),
        max_body_mib: int = option(
            "MIB", "Size of the largest request, in MiB.", default=64, min=1)) -> None:
    """Serve a reward function or reward model over HTTP to training runs.

    Takes the settings of ppocli train, serves the reward they describe and ignores the rest. Prints
    its address, and the settings with which a training run uses it. Ctrl-C or SIGTERM ends it after
    the requests in progress are answered.

    \b
    Examples:
      ppocli serve-reward reward.fn=my_rewards:score
      ppocli serve-reward reward=reward_model reward.kwargs.model=./rm \\
          reward.kwargs.device=cuda:1 --port 8200
      ppocli serve-reward +recipe=quickstart --host 0.0.0.0 --token-env REWARD_KEY
      ppocli train +recipe=quickstart reward=null reward.fn=http \\
          reward.kwargs.url=http://127.0.0.1:8123/score
    """
    from ppocli.rewards.remote import from_environment

    cfg = _reward_config(overrides or [])
    token = None if token_env is None else from_environment(
        token_env, "Authorization", "--token-env", ConfigError)
    for library in ("starlette", "uvicorn"):
        import_guard.require(library, "ppocli serve-reward", "ppocli serve-reward")
    host_memory.share_one_heap()
    server = None
    try:
        with working() as stop:
            reward = _reward(cfg)
            server = _listen(
                host, port, reward, max_body=max_body_mib * 2**20, token=token,
                tokenizer=None if tokenizer is None else _load_tokenizer(cfg, tokenizer),
                stop_requested=lambda: stop.requested is not None)
            _introduce(server, host, token_env)
            server.serve()
            if server.waiting:
                complain("warning: a request in progress was not answered")
            stop.check()
    except StoppedError as stopped:
        if server is None:  # it wasn't there yet
            raise
        say(f"{stopped.what}; {server.samples} samples scored in {server.requests} requests")


def _reward_config(words: Sequence[str]) -> TrainConfig:
    from ppocli.config import compose, problems
    from ppocli.config.command_words import read_words
    from ppocli.launch.target_config import JUDGED, allow_code

    composed = compose.compose(read_words(words))
    cfg = composed.values()
    for note in composed.notes:
        say(note)
    allow_code(composed, JUDGED)
    problems.raise_problems([problem for problem in problems.find_problems(cfg)
                             if problem.key.split(", ")[0].startswith("reward.")],
                            fix="ppocli serve-reward reward.fn=my_rewards:score, or +recipe=NAME")
    return cfg


def _reward(cfg: TrainConfig) -> Reward:
    from ppocli.distributed.torch_settings import settle_threads
    from ppocli.rewards.scoring import build_reward
    from ppocli.training.state import seed_generators

    settle_threads(cfg.hardware.num_threads)
    seed_generators(cfg.seed)
    reward = build_reward(replace(cfg.reward, on_invalid="skip"))
    for path in reward.code_files:
        say(f"running code from {path}")
    return reward


def _load_tokenizer(cfg: TrainConfig, name: str) -> Any:
    from ppocli.models.loading.tokenizer import load_tokenizer

    return load_tokenizer(replace(cfg.model, path=name, tokenizer_path=None, revision=None,
                                  chat_template=None, chat_template_kwargs={}))


def _listen(host: str, port: int, reward: Reward, **settings: Any) -> RewardServer:
    from ppocli.rewards.serving import RewardServer

    try:
        return RewardServer(host, port, reward, **settings)
    except OSError as error:  # socket.gaierror, too: there is no such address
        raise ConfigError(f"{host}:{port} can't be listened on: {error.strerror}.",
                          where="--host, --port",
                          fix="--host 127.0.0.1, or another --port; 0 takes a free one") from error


def print_vllm_command(overrides: Overrides = None) -> None:
    """Print the command that starts a vLLM server for a run (docs/vllm.md).

    Takes the settings of ppocli train; reward, prompts and length may be left out. Prints a line
    for each address of rollout.urls (default: http://127.0.0.1:8000), to be run in an environment
    that has vLLM.

    \b
    Examples:
      ppocli vllm-command +recipe=quickstart
      ppocli vllm-command model.path=./llama hardware=gpu_bf16 'rollout.urls=[http://10.0.0.2:8000]'
    """
    from ppocli.cli.estimate import composed
    from ppocli.models.loading.model_config import read_lm
    from ppocli.sampling.vllm.server_process import DEFAULT_URL, server_command, shell_line

    words = list(overrides or [])
    for key, value in (("engine", "vllm"), ("urls", f"[{DEFAULT_URL}]")):
        if not any(word.startswith(f"rollout.{key}=") for word in words):
            words.append(f"rollout.{key}={value}")
    cfg = composed(words)
    facts = read_lm(cfg.model)
    for url in cfg.rollout.urls:
        put(shell_line(server_command(cfg, facts, "python", url)))


def _introduce(server: RewardServer, host: str, token_env: str | None) -> None:
    """Where it listens (on standard output, for scripts) and what to say in training."""
    from ppocli.rewards import serving
    from ppocli.rewards.remote import is_loopback

    port = server.port
    open_to_all = host in ("0.0.0.0", "::")
    name = socket.gethostname() if open_to_all else f"[{host}]" if ":" in host else host
    address = f"http://{name}:{port}"
    if not is_loopback(host):
        complain(f"warning: {host} can be reached from other machines: " + (
            "whoever has the token can have samples scored here" if token_env else
            "anyone can have samples scored here; --token-env NAME asks for a token"))
    token = f" reward.kwargs.token_env={token_env}" if token_env else ""
    say(f"serving {', '.join(part.label for part in server.reward.parts)}; "
        f"{address}{serving.HEALTH} says how it is; Ctrl-C ends it")
    for path in server.rewards:
        what = "" if path == serving.SCORE else f" ({path.removeprefix(serving.SCORE + '/')} alone)"
        say(f"in training{what}: reward.fn=http reward.kwargs.url={address}{path}{token}")
    put(address)
