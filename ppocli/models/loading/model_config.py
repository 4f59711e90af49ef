"""What is known of a model before its weights are loaded: its configuration, and how long a text it
takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppocli.config.adapters import adapter_kind
from ppocli.config.schema import ModelConfig
from ppocli.errors import ConfigError, InputError
from ppocli.models.trunk import RELATIVE_POSITIONS
from ppocli.models.virtual_tokens import num_virtual_tokens
from ppocli.storage.model_files import find_model
from ppocli.text import first_line


@dataclass(frozen=True, slots=True)
class Unloaded:
    """What is known of a model before its weights are loaded."""

    config: Any
    num_virtual_tokens: int = 0
    """that ``model.peft`` puts before every prompt"""


def read_lm(cfg: ModelConfig) -> Unloaded:
    """The configuration of ``model.path``, whose files are all there.

    Raises:
        InputError: folder or Hub model missing or broken.
        ConfigError: virtual tokens leave no room.
    """
    from transformers import AutoConfig

    source, _ = find_model(cfg.path, key="model.path", revision=cfg.revision, needs="model")
    try:
        config = AutoConfig.from_pretrained(source, revision=cfg.revision,
                                            trust_remote_code=cfg.trust_remote_code)
    except Exception as error:  # transformers raises many kinds here, all about the folder
        raise InputError(f"The model {cfg.path} can't be loaded: {first_line(error)}",
                         where="model.path", fix="check the folder's config.json and "
                         "model.safetensors, or give another one") from error
    found = unloaded(cfg, config)
    check_room(found)
    return found


def unloaded(cfg: ModelConfig, config: Any) -> Unloaded:
    """What ``model.path`` will be, with the virtual tokens of ``model.peft``."""
    virtual = adapter_kind(cfg) in ("prefix", "prompt")
    return Unloaded(config, int((cfg.peft or {})["num_virtual_tokens"]) if virtual else 0)


def check_room(lm: Any) -> None:
    """Raise where virtual tokens leave no position to words.

    Raises:
        ConfigError: so it is.
    """
    positions, own = _positions(lm), num_virtual_tokens(lm)
    if positions is not None and own >= positions:
        raise ConfigError(f"{own} virtual tokens leave no room: the model has {positions} "
                          "positions.", where="model.peft.num_virtual_tokens",
                          fix=f"set it far below {positions}")


def max_positions(lm: Any) -> int | None:
    """Longest sequence the model has positions for, beside its virtual tokens; None when its
    configuration has no limit."""
    positions = _positions(lm)
    return None if positions is None else max(positions - num_virtual_tokens(lm), 0)


def _positions(lm: Any) -> int | None:
    if lm.config.model_type in RELATIVE_POSITIONS:
        return None  # n_positions in their files is what they were trained with, not a limit
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        value = getattr(lm.config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
