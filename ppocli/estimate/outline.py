"""The policy of a run as modules without weights: every shape and type, from configurations alone.

What is built is what :mod:`ppocli.tasks.ppo.building` builds, with the same functions where they
need no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ppocli.config.adapters import adapter_kind, adapter_settings
from ppocli.config.algorithm import estimator_of
from ppocli.config.schema import ModelConfig, TrainConfig
from ppocli.errors import InputError, PpocliError
from ppocli.models.fast.kernels import use_kernels
from ppocli.models.loading.adapters import attach, peft_config
from ppocli.models.loading.language_model import DTYPES, without_dropout
from ppocli.models.loading.model_config import attention_wanted, first_line
from ppocli.models.policy import Policy, ValueHead, build_value_head, freeze_lower_layers
from ppocli.models.value_function import ScoreHead, ValueBranch, ValueModel


def read_config(name: str, *, key: str, revision: str | None = None, trust_remote_code: bool = False
                ) -> Any:
    """A model's configuration; of a folder nothing but ``config.json`` has to be there.

    Raises:
        InputError: no such model, or its configuration can't be read.
    """
    from transformers import AutoConfig

    from ppocli.storage.model_files import find_model

    source: str = str(Path(name).expanduser())
    if not (Path(source) / "config.json").is_file():
        source, _ = find_model(name, key=key, revision=revision, needs="model")
    try:
        return AutoConfig.from_pretrained(source, revision=revision,
                                          trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many kinds, all about this file
        raise InputError(f"The configuration of {name} can't be read: {first_line(error)}",
                         where=key, fix="check config.json, or give another model") from error


def outline_lm(cfg: ModelConfig, config: Any | None = None, *, path: str | None = None,
               dtype: torch.dtype = torch.float32, key: str = "model.path") -> Any:
    """A language model on torch's meta device: every shape and no memory.

    Args:
        config: of the model, if it has been read already.
        path: where it is (default: ``model.path``).
        dtype: of its weights.
        key: where the path comes from, for messages.

    Raises:
        InputError: the model is missing, or transformers can't make a language model of it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    name = path or cfg.path
    if config is None:
        config = read_config(name, key=key, revision=None if path else cfg.revision,
                             trust_remote_code=cfg.trust_remote_code)
    pair = bool(getattr(config, "is_encoder_decoder", False))
    auto = AutoModelForSeq2SeqLM if pair else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            lm = auto.from_config(without_dropout(config), dtype=dtype,
                                  trust_remote_code=cfg.trust_remote_code, **attention_wanted(cfg))
            lm.tie_weights()
        if cfg.attn_implementation is None:
            use_kernels(lm)
    except Exception as error:
        raise _unlike(name, error, key) from error
    return lm.eval()


def outline(cfg: TrainConfig, config: Any | None = None) -> Policy:
    """The policy of a run on torch's meta device, frozen where it is frozen, with its adapter and
    its value function.

    Args:
        config: of ``model.path``, if it has been read already.

    Raises:
        InputError: a model is missing, transformers can't make a language model of it, or its
            layers can't be told apart.
        ConfigError: the adapter doesn't fit the model.
    """
    model, kind = cfg.model, adapter_kind(cfg.model)
    dtype = torch.float32 if kind is None else DTYPES[model.dtype or cfg.hardware.precision]
    lm = outline_lm(model, config, dtype=dtype)
    try:
        if kind is not None:
            settings = peft_config(
                kind, adapter_settings(model), revision=model.revision, tokenizer=model.path,
                pair=bool(getattr(lm.config, "is_encoder_decoder", False)))
            with torch.device("meta"):
                attach(lm, settings, seed=0)
        freeze_lower_layers(lm, model.num_layers_unfrozen)
        head, trunk = _value_function(cfg, lm)
    except PpocliError:
        raise
    except Exception as error:
        raise _unlike(model.path, error, "model.path") from error
    return Policy(lm, head, trunk).eval()


def _value_function(cfg: TrainConfig, lm: Any) -> tuple[Any, Any]:
    value = cfg.model.value
    if not estimator_of(cfg.ppo).needs_critic:
        return None, None
    if value.kind == "model":
        return _value_model(cfg.model)
    # a branch makes a pass, in which transformers asks meta tensors, but no fake ones, for values
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("meta"):
        branch = ValueBranch(lm, value.num_layers_unfrozen) if value.kind == "branch" else None
    with torch.device("meta"):
        return build_value_head(lm, 0), branch


def _value_model(cfg: ModelConfig) -> tuple[ValueHead | ScoreHead, ValueModel]:
    """As :func:`ppocli.models.loading.value_model.load_value_model`."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    key = "model.value.path" if cfg.value.path else "model.path"
    name = cfg.value.path or cfg.path
    config = read_config(name, key=key, revision=None if cfg.value.path else cfg.revision,
                         trust_remote_code=cfg.trust_remote_code)
    scores = any("ForSequenceClassification" in a for a in config.architectures or [])
    auto = AutoModelForSequenceClassification if scores else AutoModel
    try:
        with torch.device("meta"):
            whole = auto.from_config(without_dropout(config), dtype=torch.float32,
                                     trust_remote_code=cfg.trust_remote_code,
                                     **attention_wanted(cfg))
            score = getattr(whole, "score", None) if scores and config.num_labels == 1 else None
            trunk = whole.base_model
            if cfg.attn_implementation is None:
                use_kernels(trunk)
            width = getattr(config, "hidden_size", trunk.get_input_embeddings().weight.shape[1])
            head = (ScoreHead(score.weight, score.bias) if isinstance(score, nn.Linear)
                    else ValueHead(width, torch.Generator()))
        freeze_lower_layers(trunk, cfg.value.num_layers_unfrozen)
    except Exception as error:
        raise _unlike(name, error, key) from error
    return head, ValueModel(trunk.eval())


def _unlike(name: str, error: Exception, key: str) -> InputError:
    return InputError(f"The model {name} can't be outlined: {first_line(error)}", where=key,
                      fix="give a language model that transformers knows")
