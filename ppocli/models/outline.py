"""The models of a run on torch's meta device: every shape and type, but no weights, from their
configurations alone."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from ppocli.config import adapters, algorithm, schema, tasks
from ppocli.models import policy
from ppocli.models.layer_stack import layer_stack
from ppocli.models.loading import model_config
from ppocli.models.loading.language_model import DTYPES
from ppocli.models.loading.load_adapters import attach, peft_config
from ppocli.models.trunk import state_width
from ppocli.runs import model_files
from ppocli.runs.checkpoints import value_start

CLASSIFIER = "AutoModelForSequenceClassification"


class Models(NamedTuple):
    """What a run trains; parameters that are frozen in the run are frozen here."""

    lm: Any
    value_head: nn.Module | None
    value_trunk: Any
    """a value model's trunk, or the layers of a value branch"""


def read_config(cfg: schema.ModelConfig, key: str) -> Any:
    """The configuration of a model, whose folder needs to hold nothing but ``config.json``.

    Args:
        key: that names the model, for messages.

    Raises:
        InputError: no such model, or its configuration can't be read.
    """
    source, revision = str(Path(cfg.path).expanduser()), cfg.revision
    if not (Path(source) / "config.json").is_file():
        source, revision = model_files.find_whole(cfg.path, key=key, revision=revision)
    section = "model" if key.startswith("model.") else key.rpartition(".")[0]
    with model_config.loading(f"configuration of {cfg.path}", key,
                              f"{section}.trust_remote_code=true"):
        return transformers.AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=cfg.trust_remote_code)


def outline(cfg: schema.ModelConfig, key: str, config: Any = None, *, auto_class: str | None = None,
            dtype: torch.dtype = torch.float32) -> Any:
    """The model at ``cfg.path`` without weights.

    Args:
        key: as of :func:`read_config`.
        config: of the model, if it has been read already.
        auto_class: the class of transformers that makes it (default: that of language models).
    """
    config = read_config(cfg, key) if config is None else config
    auto = getattr(transformers, auto_class or (
        "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"))
    with model_config.loading(f"outline of {cfg.path}", key), torch.device("meta"):
        model = auto.from_config(config, dtype=dtype, trust_remote_code=cfg.trust_remote_code,
                                 **model_config.attention_wanted(cfg, config))
        model.tie_weights()
    return model


def models_of(cfg: schema.TrainConfig, config: Any = None) -> Models:
    """What a run of ``cfg`` trains, without weights.

    Args:
        config: of ``model.path``, if it has been read already.

    Raises:
        InputError: a model is missing, transformers can't make a language model of it, or its
            layers can't be told apart.
        ConfigError: the adapter doesn't fit the model.
    """
    model, adapter, value = cfg.model, adapters.adapter_kind(cfg.model), cfg.model.value
    dtype = cfg.hardware.weights if adapter is None else model.dtype or cfg.hardware.precision
    auto_class, kind = None, value.kind if algorithm.needs_critic(cfg) else "none"
    if tasks.task_name(cfg) == "reward_model":
        auto_class, config = CLASSIFIER, copy.deepcopy(config or read_config(model, "model.path"))
        config.num_labels = 1
    lm = outline(model, "model.path", config, dtype=DTYPES[dtype], auto_class=auto_class)
    model_config.check_text_alone(lm)
    head = trunk = None
    with model_config.loading(f"outline of {model.path}", "model.path"):
        if adapter is not None:
            settings = peft_config(adapter, adapters.adapter_settings(model), tokenizer=model.path,
                                   revision=model.revision, pair=lm.config.is_encoder_decoder)
            with torch.device("meta"):
                attach(lm, settings, seed=0)
        policy.freeze_lower_layers(lm, model.num_layers_unfrozen)
        if kind == "branch":
            trunk = copy.deepcopy(layer_stack(lm)[-value.num_layers_unfrozen:]).requires_grad_(True)
        elif kind == "model":
            key = "model.value.path" if value.path else "model.path"
            trunk = outline(value_start(model), key, auto_class="AutoModel")
            policy.freeze_lower_layers(trunk, value.num_layers_unfrozen)
        if trunk is not None and value.freeze_attention:
            policy.freeze_attention(trunk)
        if kind != "none":
            width = state_width(trunk if kind == "model" else lm)
            with torch.device("meta"):
                head = policy.ValueHead(width, torch.Generator())
    return Models(lm, head, trunk)
