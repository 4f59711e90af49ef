"""The command that starts a vLLM server for a run, and servers beside a run on this machine
(``rollout.launch``)."""

import hashlib
import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ppocli.config import schema, tasks
from ppocli.distributed.host_memory import on_cuda
from ppocli.errors import ConfigError, SamplerError
from ppocli.models.loading.model_config import ModelFacts, max_positions
from ppocli.models.trunk import has_encoder
from ppocli.runs.model_files import ADAPTER_CONFIG, adapter_at, find_whole
from ppocli.sampling.vllm import keeper
from ppocli.sampling.vllm.server import Server

log = logging.getLogger("ppocli")

_DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""the routes that take weights are those of its development mode"""
_UPDATES_LORA = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
_LORA = "--enable-lora"
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""what ``--max-lora-rank`` may be"""
_LORA_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_LORA_LAYERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                          "down_proj"})
"""all linear layers of these classes, but for the output embedding"""
_NO_LORA = ("use_dora", "lora_bias", "modules_to_save", "target_parameters", "use_qalora",
            "trainable_token_indices", "alora_invocation_tokens")
"""fields of PEFT's configuration that vLLM refuses, or does nothing with"""
_PAUSE = 0.5
DEFAULT_URL = "http://127.0.0.1:8000"
_SHAPE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "intermediate_size")


def served_dtype(cfg: schema.TrainConfig) -> str:
    """The type that the server computes in, which the weights are sent in: the run's own."""
    return {"fp32": "float32", "bf16": "bfloat16"}[cfg.hardware.precision]


def served_name(cfg: schema.TrainConfig, config: Any) -> str:
    """What a run's server calls its model: weights of another shape would end its engine, and those
    of another type, or a server that was started otherwise, give other tokens.

    Args:
        config: of the model, as transformers reads it.
    """
    text, rank = config.get_text_config(), lora_rank(cfg, config)
    shape = {name: getattr(text, name, None) for name in _SHAPE}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
    return (f"ppocli-{text.model_type}-{served_dtype(cfg)}-{digest[:8]}"
            + ("" if rank is None else f"-lora{rank}") + "-sleeps" * cfg.rollout.sleep)


def why_merged(cfg: schema.TrainConfig, config: Any) -> str | None:
    """Why servers get an adapter merged into its base; None where they take it by itself, as far as
    vLLM 0.32 has it for this class of model.

    Args:
        config: as of :func:`served_name`.
    """
    settings = _adapter_settings(cfg.model)
    name, layers = (config.architectures or ["class"])[0], settings.get("target_modules") or ()
    refused = [field for field in _NO_LORA if settings.get(field)] + [
        "bias"] * (settings.get("bias", "none") != "none")
    if name not in _LORA_CLASSES:
        return f"vLLM's {name} takes no LoRA"
    if refused:
        return f"vLLM doesn't take model.peft.{refused[0]}"
    if layers != "all-linear" and (isinstance(layers, str) or not _LORA_LAYERS.issuperset(
            layer.rpartition(".")[2] for layer in layers)):
        return f"vLLM has LoRA for {', '.join(sorted(_LORA_LAYERS))} alone"
    if _largest_rank(settings) > _LORA_RANKS[-1]:
        return f"vLLM takes ranks up to {_LORA_RANKS[-1]}"
    if cfg.hardware.precision == "fp32" and on_cuda(cfg.hardware):
        return "vLLM's LoRA on a GPU needs hardware.precision=bf16"
    return None


def lora_rank(cfg: schema.TrainConfig, config: Any) -> int | None:
    """The ``--max-lora-rank`` of servers that get the adapter by itself; None where weights are
    sent.

    Args:
        config: as of :func:`served_name`.
    """
    if tasks.adapter_kind(cfg.model) is None or why_merged(cfg, config) is not None:
        return None
    largest = _largest_rank(_adapter_settings(cfg.model))
    return next(rank for rank in _LORA_RANKS if rank >= largest)


def _adapter_settings(model: schema.ModelConfig) -> dict[str, Any]:
    """Fields of PEFT's configuration, with those of an adapter that goes on."""
    folder = adapter_at(model.path, key="model.path", revision=model.revision)
    saved = {} if folder is None else json.loads((folder / ADAPTER_CONFIG).read_bytes())
    return {**saved, **tasks.adapter_settings(model)}


def _largest_rank(settings: Mapping[str, Any]) -> int:
    return max([int(settings.get("r", 8)), *(settings.get("rank_pattern") or {}).values()])


def most_tokens(cfg: schema.TrainConfig, longest_prompt: int) -> int:
    """Tokens of the longest prompt and the longest response or episode together."""
    new = [cfg.generation.max_new_tokens, cfg.generation.eval.max_new_tokens or 0]
    return longest_prompt + max([*new, *([] if cfg.env.fn is None else [cfg.env.max_tokens])])


def check_servable(cfg: schema.TrainConfig, lm: Any) -> None:
    """Refuse a model that servers can't have.

    Args:
        lm: the model, or what is known of it.

    Raises:
        ConfigError: it has an encoder; or a quantized base, and its adapter can't go by itself.
    """
    if has_encoder(lm):
        raise ConfigError("vLLM serves no encoder-decoder.", where="rollout.engine, model.path",
                          fix="set rollout.engine=decode")
    if cfg.model.quantization and (why := why_merged(cfg, lm.config)) is not None:
        raise ConfigError(f"Servers can't get the adapter by itself: {why}; and a quantized base "
                          "has no weights to merge it into.",
                          where="rollout.engine, model.quantization",
                          fix="set rollout.engine=decode, or leave model.quantization out")


def server_command(cfg: schema.TrainConfig, facts: ModelFacts, python: str, url: str) -> list[str]:
    """Its words, for an environment with :func:`variables`.

    Where weights are sent, output embeddings are weights of their own: vLLM reads new weights layer
    by layer, and those that two layers share would stay the old ones in one of them, without an
    error.

    Args:
        facts: of ``model.path``.
        python: the interpreter that has vLLM.
        url: where it listens.

    Raises:
        ConfigError: vLLM doesn't serve such a model.
    """
    check_servable(cfg, facts)
    parts, model, rank = urlsplit(url), cfg.model, lora_rank(cfg, facts.config)
    limit, longest = max_positions(facts), cfg.prompts.max_length
    length = limit if longest is None else min(most_tokens(cfg, longest), limit or sys.maxsize)
    source, revision = find_whole(model.path, key="model.path", revision=model.revision)
    source, tokenizer = (os.path.abspath(name) if os.path.isdir(name) else name
                         for name in (source, model.tokenizer_path or ""))
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model", source,
            "--served-model-name", served_name(cfg, facts.config),
            "--host", parts.hostname or "127.0.0.1", "--port", str(parts.port or 8000),
            "--dtype", served_dtype(cfg),
            *([] if length is None else ["--max-model-len", str(length)]),
            *(["--hf-overrides", json.dumps({"tie_word_embeddings": False})] if rank is None
              else [_LORA, "--max-lora-rank", str(rank)]),
            "--logprobs-mode", "processed_logprobs", "--enable-scale-out",
            "--generation-config", "vllm",
            # on a CPU vLLM refuses the word, and takes the routes without doing anything
            *["--enable-sleep-mode"] * (cfg.rollout.sleep and on_cuda(cfg.hardware)),
            *(["--revision", revision] if revision else []),
            *(["--tokenizer", tokenizer] if tokenizer else []),
            *(["--trust-remote-code"] if model.trust_remote_code else []),
            *cfg.rollout.server_args]


def variables(words: Sequence[str]) -> dict[str, str]:
    """The environment variables of a command."""
    return _DEV_MODE | (_UPDATES_LORA if _LORA in words else {})


def shell_line(words: Sequence[str]) -> str:
    """The command as a shell takes it."""
    return " ".join([*(f"{name}={value}" for name, value in variables(words).items()),
                     shlex.join(words)])


def launch_servers(owner: object, cfg: schema.TrainConfig, facts: ModelFacts,
                   servers: Sequence[Server]) -> None:
    """Start a server at each address, which lives as long as ``owner`` and this process do.

    Raises:
        SamplerError: one doesn't come up.
    """
    folder = Path(cfg.output_dir) / cfg.run_name if cfg.run_name else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    begun = []
    for server in servers:
        if _answers(server):
            raise SamplerError(f"Somebody's server answers at {server.url} already.",
                               where="rollout.urls, rollout.launch",
                               fix="end it, or give another address; rollout.launch=false uses it")
    for i, server in enumerate(servers):
        path = folder / f"vllm-{i}.log"
        words = server_command(cfg, facts, str(cfg.rollout.python), server.url)
        log.info("starting a vLLM server at %s, which says in %s what it does", server.url, path)
        log.debug("%s", shlex.join(words))
        with path.open("ab") as output:
            process = subprocess.Popen([sys.executable, "-I", keeper.__file__, *words],
                                       stdin=subprocess.PIPE, stdout=output, stderr=output,
                                       env={**os.environ, **variables(words)},
                                       start_new_session=True)
        # the keeper ends the server when the pipe is closed, as the kernel does for a process that
        # was killed
        weakref.finalize(owner, _end, process)
        begun.append((server, process, path))
    for server, process, path in begun:
        _wait(server, process, path, cfg.rollout.timeout)


def _answers(server: Server) -> bool:
    with suppress(SamplerError):
        server.ask("/health", timeout=_PAUSE)
        return True
    return False


def _wait(server: Server, process: subprocess.Popen[bytes], path: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not _answers(server):
        ended = process.poll() is not None
        if ended or time.monotonic() > until:
            what = "has ended" if ended else f"was not there within {seconds:g} s"
            raise SamplerError(f"The vLLM server at {server.url} {what}.", where=str(path),
                               fix="its last lines say why; rollout.timeout is how long it may "
                               "take to start")
        time.sleep(_PAUSE)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait(2 * keeper.GRACE)
