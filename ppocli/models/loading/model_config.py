"""Facts about a model before its weights are loaded, and the arguments for loading it with
transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ppocli.config import schema, tasks
from ppocli.config.text import first_line
from ppocli.errors import InputError, PpocliError
from ppocli.models.trunk import RELATIVE_POSITIONS, has_encoder
from ppocli.runs.model_files import adapter_at, find_whole


def policy_config(cfg: schema.ModelConfig, policy: str) -> schema.ModelConfig:
    """The configuration for loading ``policy``, a model trained from the one that ``cfg`` names."""
    if policy == cfg.path:
        return cfg
    return replace(cfg, path=policy, tokenizer_path=None, revision=None, chat_template=None)


@contextmanager
def loading(what: str, key: str, trusting: str = "model.trust_remote_code=true",
            fix: str = "check the folder's config.json and model.safetensors, or give another one"
            ) -> Iterator[None]:
    """Turn the many kinds of errors that transformers raises for an unreadable folder into one.

    Args:
        what: what is loaded, such as "model NAME".
        key: that names it.
        trusting: what lets its own code run.
        fix: where nothing better is known.

    Raises:
        InputError: the folder can't be read.
    """
    try:
        yield
    except PpocliError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            fix = f"if you trust that code: {trusting}"
        if "attn_implementation" in str(error) or "FlashAttention" in str(error):
            key, fix = "model.attn_implementation", "set it to sdpa or eager, or leave it out"
        raise InputError(f"The {what} can't be loaded: {first_line(error)}", where=key,
                         fix=fix) from error


def attention_wanted(cfg: schema.ModelConfig, config: Any) -> dict[str, Any]:
    """Arguments of transformers for ``model.attn_implementation``, for the model with ``config``.

    Soft-capped attention (Gemma 2) is eager, as transformers 5.23 has it by itself: 5.17 would take
    torch's kernel, which leaves the cap out.

    Raises:
        InputError: that kernel is asked for, for such a model.
    """
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if capped and cfg.attn_implementation == "sdpa":
        raise InputError("sdpa leaves out the cap that this model puts on attention's logits.",
                         where="model.attn_implementation", fix="leave it out, which takes eager")
    implementation = cfg.attn_implementation or ("eager" if capped else None)
    return {"attn_implementation": implementation} if implementation else {}


def check_text_alone(lm: Any) -> None:
    """Refuse to train a model that reads images or sounds beside text: no pass would reach the
    weights for these.

    Raises:
        InputError: it is such a model.
    """
    if not has_encoder(lm) and lm.config.get_text_config(decoder=True) is not lm.config:
        raise InputError(f"{type(lm).__name__} reads more than text, and ppocli trains language "
                         "models alone.", where="model.path", fix="save its language model by "
                         "itself, as docs/kinds.md shows, and give that folder")


def quantized(cfg: schema.ModelConfig) -> dict[str, Any]:
    """Arguments of transformers for weights that bitsandbytes quantizes on the device of this
    process."""
    if cfg.quantization is None:
        return {}
    from accelerate import PartialState
    from transformers import BitsAndBytesConfig

    device = PartialState().device
    how = (BitsAndBytesConfig(load_in_8bit=True) if cfg.quantization == "8bit" else
           BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                              bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=(
                                  torch.float32 if device.type == "cpu" else torch.bfloat16)))
    return {"quantization_config": how, "device_map": {"": device}}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model before its weights are loaded."""

    config: Any


def read_lm(cfg: schema.ModelConfig) -> ModelFacts:
    """The configuration of ``model.path``, whose files are all there.

    Raises:
        InputError: folder or Hub model missing or broken, or one that can't be saved.
    """
    from transformers import AutoConfig

    source, revision = find_whole(cfg.path, key="model.path", revision=cfg.revision)
    with loading(f"model {cfg.path}", "model.path"):
        config = AutoConfig.from_pretrained(source, revision=revision,
                                            trust_remote_code=cfg.trust_remote_code)
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") == "gguf":
        # also for plain weights that were converted long ago: transformers would fail at the first
        # save
        raise InputError(f"{cfg.path} is marked as quantized by GGUF, and transformers can't save "
                         "such a model.", where="model.path", fix="if its weights are safetensors, "
                         "remove quantization_config from its config.json")
    return ModelFacts(config)


def reference_kind(cfg: schema.ModelConfig) -> str:
    """As :func:`ppocli.config.tasks.reference_kind`. A policy that trains an existing adapter
    further doesn't start at its base, so its reference is a copy unless ``kind=adapter`` is set.
    """
    kind = tasks.reference_kind(cfg)
    starts_apart = kind == "adapter" != cfg.reference.kind and adapter_at(
        cfg.path, key="model.path", revision=cfg.revision)
    return "copy" if starts_apart else kind


def max_positions(lm: Any) -> int | None:
    """Longest sequence the model has positions for; None when its configuration has no limit."""
    if lm.config.model_type in RELATIVE_POSITIONS:
        return None  # n_positions in their files is the length they were trained with, not a limit
    limits = (getattr(lm.config, name, None)
              for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"))
    return next((value for value in limits if isinstance(value, int) and value > 0), None)
