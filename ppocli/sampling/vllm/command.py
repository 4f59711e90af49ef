"""The command that starts a vLLM server for a run."""

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ppocli.config import keys, schema
from ppocli.models.loading.model_config import ModelFacts, max_positions
from ppocli.storage.model_files import find_whole

ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""the routes that take weights are those of its development mode"""
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
    text = config.get_text_config()
    shape = {name: getattr(text, name, None) for name in _SHAPE}
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()
    return f"ppocli-{text.model_type}-{served_dtype(cfg)}-{digest[:8]}"


def most_tokens(cfg: schema.TrainConfig, longest_prompt: int) -> int:
    """Tokens of the longest prompt and the longest response or episode together."""
    new = [cfg.generation.max_new_tokens, *keys.several(cfg.generation.eval.max_new_tokens)]
    return longest_prompt + max([*new, *([] if cfg.env.fn is None else [cfg.env.max_tokens])])


def server_command(cfg: schema.TrainConfig, facts: ModelFacts, python: str, url: str
                   ) -> tuple[Mapping[str, str], list[str]]:
    """Variables of the environment, and words.

    Output embeddings are weights of their own: vLLM reads new weights layer by layer, and those
    that two layers share would stay the old ones in one of them, without an error.

    Args:
        facts: of ``model.path``.
        python: the interpreter that has vLLM.
        url: where it listens.
    """
    parts, model = urlsplit(url), cfg.model
    limit, longest = max_positions(facts), cfg.prompts.max_length
    length = limit if longest is None else most_tokens(cfg, longest)
    source = find_whole(model.path, key="model.path", revision=model.revision)[0]
    source = os.path.abspath(source) if os.path.isdir(source) else source
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", source,
             "--served-model-name", served_name(cfg, facts.config),
             "--host", parts.hostname or "127.0.0.1", "--port", str(parts.port or 8000),
             "--dtype", served_dtype(cfg),
             *([] if length is None else ["--max-model-len", str(length)]),
             "--hf-overrides", json.dumps({"tie_word_embeddings": False}),
             "--logprobs-mode", "processed_logprobs", "--enable-scale-out",
             "--generation-config", "vllm",
             *(["--revision", model.revision] if model.revision else []),
             *(["--tokenizer", model.tokenizer_path] if model.tokenizer_path else []),
             *(["--trust-remote-code"] if model.trust_remote_code else []),
             *cfg.rollout.server_args]
    return ENVIRONMENT, words


def shell_line(environment: Mapping[str, str], words: Sequence[str]) -> str:
    """A command as a shell takes it."""
    return " ".join([*(f"{name}={value}" for name, value in environment.items()),
                     shlex.join(words)])
