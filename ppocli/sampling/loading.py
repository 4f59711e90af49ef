"""Loading models to sample from, with a check that decoding gives the same probabilities as one
pass."""

from __future__ import annotations

from dataclasses import replace

import torch

from ppocli.config.adapters import adapter_kind, adapter_settings
from ppocli.config.schema import HardwareConfig, ModelConfig
from ppocli.errors import InputError
from ppocli.models.loading.adapters import Adapter, attach, identify, peft_config
from ppocli.models.loading.language_model import DTYPES, LoadedLM, load_lm
from ppocli.models.loading.model_config import check_room
from ppocli.models.trunk import has_encoder
from ppocli.sampling.decoding import check_steps, find_decoding, say_decoding
from ppocli.storage.model_files import is_adapter


def load_decodable(cfg: ModelConfig, *, dtype: torch.dtype = torch.float32,
                   key: str = "model.path") -> LoadedLM:
    """As :func:`load_lm`, with the way of decoding found that suits the model.

    Raises:
        InputError: as there; or the model can't be decoded rightly.
    """
    loaded = load_lm(cfg, dtype=dtype, key=key)
    find_decoding(loaded.lm, loaded.decoder_start, cfg.path, key)
    return loaded


def load_policy(cfg: ModelConfig, hardware: HardwareConfig, seed: int) -> LoadedLM:
    """The model that a training starts from, with a new adapter on it where one is asked for.

    Raises:
        InputError: as :func:`load_decodable`; or ``model.path`` is an adapter itself.
        ConfigError: the adapter doesn't fit the model.
    """
    kind = adapter_kind(cfg)
    dtype = torch.float32 if kind is None else DTYPES[cfg.dtype or hardware.precision]
    loaded = load_decodable(cfg, dtype=dtype)
    say_decoding(loaded.lm)
    if loaded.adapter is not None:
        raise InputError(f"{cfg.path} holds only an adapter.", where="model.path",
                         fix=f"merge it into its base first: ppocli export {cfg.path} --merge "
                         "-o FOLDER, then model.path=FOLDER")
    if kind is None:
        return loaded
    base = identify(loaded.lm, cfg.path, cfg.revision)
    config = peft_config(kind, adapter_settings(cfg), pair=has_encoder(loaded.lm),
                         revision=cfg.revision, tokenizer=loaded.lm.config.name_or_path)
    check_steps(loaded.lm, virtual=kind != "lora")
    model = attach(loaded.lm, config, seed=seed)
    check_room(loaded.lm)
    return replace(loaded, adapter=Adapter(model, base))


def load_judged(cfg: ModelConfig, hardware: HardwareConfig) -> LoadedLM:
    """A policy to be judged; the base of an adapter in the type that a training holds it in."""
    frozen = is_adapter(cfg.path) and cfg.quantization is None
    loaded = load_decodable(cfg, dtype=DTYPES[cfg.dtype or hardware.precision] if frozen
                            else torch.float32)
    say_decoding(loaded.lm)
    return loaded
