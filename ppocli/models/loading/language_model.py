"""From a name or a folder to a language model. It is checked for faults that transformers lets
pass: missing weights, ids beyond the embedding."""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from ppocli.config.schema import HardwareConfig, ModelConfig
from ppocli.distributed.deepspeed_internals import whole_shape
from ppocli.errors import CheckpointError, InputError
from ppocli.models.head import LogitMap, Vocabulary, set_vocabulary
from ppocli.models.kernels import use_kernels
from ppocli.models.layout import SequenceBatch
from ppocli.models.loading import load_adapters, model_config
from ppocli.models.trunk import decoder_start, has_encoder, response_hidden
from ppocli.runs import model_files

log = logging.getLogger("ppocli")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALIGNMENT = 64
"""bytes to which torch aligns tensors on a CPU"""


def frozen_dtype(cfg: ModelConfig, hardware: HardwareConfig) -> torch.dtype:
    """The storage type of weights that never train: the base under an adapter, a separate
    reference."""
    return DTYPES[cfg.dtype or hardware.precision]


@dataclass(frozen=True, slots=True)
class LoadedLM:
    """A causal LM or an encoder-decoder, ready for PPO."""

    lm: Any
    """eval mode, dropout rates zero; every parameter that trains is fp32"""
    export_config: Any
    """its original configuration, saved with the trained weights"""
    generation_config: Any
    """its generation defaults; read for EOS ids and saved again, never used to sample; None for a
    model that scores texts"""
    decoder_start: int | None
    """the token that the decoder of an encoder-decoder starts from; None for a causal LM"""
    adapter: load_adapters.Adapter | None = None
    """the adapter that trains in its place"""


def without_dropout(config: Any) -> Any:
    """A copy of ``config`` whose dropout rates are 0: the ratio must be 1 before the first update,
    also in train mode, which gradient checkpointing needs. RWKV's rescaling is off too: it guards
    fp16, and divides the weights themselves for eval mode, as which they would be saved."""
    quiet = copy.deepcopy(config)
    _drop_nothing(quiet)
    if getattr(quiet, "rescale_every", 0):
        quiet.rescale_every = 0
    return quiet


def _drop_nothing(owner: Any) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(owner, name, 0.0)


def load_lm(cfg: ModelConfig, *, dtype: torch.dtype = torch.float32, key: str = "model.path",
            goes_on: Mapping[str, Any] | None = None, score_seed: int | None = None) -> LoadedLM:
    """Load ``cfg.path`` with every weight found in its files.

    Args:
        key: where the path comes from, for messages.
        score_seed: where given, the model is loaded as one that scores texts, a sequence classifier
            with one label; the seed is that of its head, where the files have none.
        goes_on: as of :func:`ppocli.models.loading.load_adapters.load_adapter`, where the path
        names an
            adapter.

    Raises:
        InputError: folder or Hub model missing or broken, neither a causal LM nor an
            encoder-decoder, weights missing, or an architecture whose logits are not a plain linear
            map of its trunk.
    """
    source = model_files.find_model(cfg.path, key=key, revision=cfg.revision, needs="model",
                                    adapters=True)
    if model_files.is_adapter(source):
        return _load_on_base(cfg, Path(source), dtype, goes_on, score_seed)
    lm, config = load_weights(
        cfg, source, partial(_class_of, cfg, key, score_seed is not None), key=key, dtype=dtype,
        new={} if score_seed is None else {load_adapters.SCORE: partial(_new_score,
                                                                        seed=score_seed)},
        **model_config.quantized(cfg))
    if score_seed is not None:
        return _ready(cfg, lm, config, None)
    made = _ready(cfg, lm, config,
                  copy.deepcopy(lm.generation_config) or transformers.GenerationConfig())
    _check_logits(lm, cfg.path, key)
    return made


def take_lm(cfg: ModelConfig, lm: Any) -> LoadedLM:
    """A model that the caller has loaded, to train its own weights; its dropout is turned off for
    good.

    Raises:
        InputError: its logits are not a plain linear map of its trunk.
    """
    config, declared = copy.deepcopy(lm.config), copy.deepcopy(lm.generation_config)
    for part in lm.modules():
        _drop_nothing(part)
    lm.config = without_dropout(lm.config)
    made = _ready(cfg, lm, config, declared or transformers.GenerationConfig())
    _check_logits(lm, type(lm).__name__, "model")
    return made


def load_weights(cfg: ModelConfig, source: str, class_of: Callable[[Any], Any], *, key: str,
                 dtype: torch.dtype, what: str = "model",
                 new: Mapping[str, Callable[[torch.Tensor], None]] = MappingProxyType({}),
                 **how: Any) -> tuple[Any, Any]:
    """A model all of whose weights are in its files, and its original configuration.

    Args:
        source: what ``cfg.path`` stands for.
        class_of: transformers' class for a configuration.
        key: that names the model, for messages.
        what: is loaded, for messages.
        new: functions that fill weights of these names if the files lack them.

    Raises:
        InputError: files are broken, or lack other weights.
    """
    hub = {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    with model_config.loading(f"{what} {cfg.path}", key):
        config = transformers.AutoConfig.from_pretrained(source, **hub)

        def read() -> tuple[Any, Any]:
            model, info = class_of(config).from_pretrained(
                source, config=without_dropout(config), dtype=dtype, output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **hub, **model_config.attention_wanted(cfg, config), **how)
            return model, info

        model, info = read()
        if [rows for name, (rows, *_), _ in info["mismatched_keys"]
                if name.endswith(model_files.HEADS)] == [1] and not model_files.states_labels(
                    source, cfg.revision):
            config.num_labels = 1
            model, info = read()
    for lacking in new.keys() & info["missing_keys"]:
        new[lacking](model.get_parameter(lacking).data)
    for name, in_file, here in sorted(info["mismatched_keys"]):
        raise InputError(f"{cfg.path} does not fit its config.json: {name} is {list(in_file)} in "
                         f"the files, {list(here)} by the configuration.", where=key,
                         fix="mend config.json, or give a complete checkpoint"
                         if not name.endswith(model_files.HEADS) else "mend id2label in "
                         "config.json, which has an entry for each row of this head; a reward "
                         "model and a value have one")
    if missing := sorted(set(info["missing_keys"]) - new.keys()):
        raise InputError(f"{cfg.path} lacks {len(missing)} weights that {type(model).__name__} "
                         f"needs (the first: {missing[0]}); they would be random.", where=key,
                         fix="give a complete checkpoint")
    _align(model)
    return model, config


def _align(model: torch.nn.Module) -> None:
    """Align weights as torch would: loaded ones keep their place in the file, at any multiple of a
    few bytes. MKL's rounding depends on alignment, and the same weights must give the same numbers
    whatever file they come from."""
    for parameter in model.parameters():
        if (type(parameter) is torch.nn.Parameter and parameter.device.type == "cpu"
                and parameter.data_ptr() % ALIGNMENT):
            parameter.data = parameter.data.clone()


def make_ready(cfg: ModelConfig, model: Any) -> None:
    """Prepare a new model for the engine."""
    if cfg.attn_implementation is None:
        use_kernels(model)
    # we check ids ourselves; transformers' padding check would synchronise at every call
    if model.config.model_type != "led":  # pads prompts up to its window itself
        try:
            model.config.pad_token_id = None
        except StrictDataclassError:  # a configuration that accepts only numbers
            model.config.pad_token_id = -1
    if model.base_model is model and hasattr(model, "model"):
        model.base_model_prefix = "model"  # Llama4ForCausalLM names another model's trunk
    decoder_config = model.config.get_text_config(decoder=True)
    if decoder_config is not model.config and has_encoder(model):
        # T5Gemma's decoder would leave this id out of its context, also where it was sampled
        decoder_config.pad_token_id = -1
    for part in model.eval().modules():
        if isinstance(part, torch.nn.Dropout):  # a nested configuration may have turned it on
            part.p = 0.0
        elif isinstance(part, torch.nn.Embedding) and "Sinusoidal" in type(part).__name__:
            part.requires_grad_(False)  # computed, and read without gradients (Marian, Pegasus)


def _ready(cfg: ModelConfig, lm: Any, config: Any, generation_config: Any) -> LoadedLM:
    loaded = LoadedLM(lm, config, generation_config, decoder_start(lm))
    make_ready(cfg, lm)
    return loaded


def read_config(cfg: ModelConfig, key: str) -> Any:
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


def outline(cfg: ModelConfig, key: str, config: Any, kind: Any, *,
            dtype: torch.dtype = torch.float32) -> Any:
    """A model of transformers' class ``kind`` without the weights in its files: on the device that
    is current. To be tied by the caller, since weights on no device may not be."""
    with model_config.loading(f"outline of {cfg.path}", key):
        return kind.from_config(config, dtype=dtype, trust_remote_code=cfg.trust_remote_code,
                                **model_config.attention_wanted(cfg, config))


def empty_lm(cfg: ModelConfig, *, dtype: torch.dtype = torch.float32, key: str = "model.path",
             scores: bool = False) -> LoadedLM:
    """As :func:`load_lm`, without reading weights: parameters are on the meta device, and the
    values of buffers are undefined.

    Raises:
        InputError: the model's configuration can't be read.
    """
    from accelerate import init_empty_weights

    config = read_config(cfg, key)
    kind = _class_of(cfg, key, scores, config)
    with init_empty_weights(include_buffers=False):
        lm = outline(cfg, key, without_dropout(config), kind, dtype=dtype)
    lm.tie_weights()  # not inside the block, which replaces every parameter that is set
    return _ready(cfg, lm, config, None if scores else transformers.GenerationConfig())


def _new_score(weight: torch.Tensor, seed: int) -> None:
    """Fill a new head [1, D] with normal numbers of deviation 0.1 / sqrt(D): the states behind the
    final norm are about sqrt(D) long, so that scores start at about 0.1 whatever the width. The
    loss then starts at log 2, and the trunk has a gradient from the first update on, which it would
    not have under a head of zeros."""
    values = torch.empty(weight.shape, dtype=torch.float32).normal_(
        std=0.1 * weight.shape[-1]**-0.5, generator=torch.Generator().manual_seed(seed))
    weight.copy_(values)


def _class_of(cfg: ModelConfig, key: str, scores: bool, config: Any) -> Any:
    """transformers' class for an encoder-decoder, or for a causal language model: whichever
    the configuration says; or for a model that scores texts, and
    ``config`` becomes one of one label.

    Raises:
        InputError: the model is to score and has an encoder, so that none of its states has read a
            whole text.
    """
    pair = bool(getattr(config, "is_encoder_decoder", False))
    if scores and pair:
        raise InputError(f"{cfg.path} is an encoder-decoder ({config.model_type}): a score is read "
                         "at the last token of a text, which a causal language model has read as a "
                         "whole.", where=key, fix="give a causal language model, or a reward model "
                         "made of one")
    if scores:
        config.num_labels = 1
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModelForSeq2SeqLM if pair else transformers.AutoModelForCausalLM


def _load_on_base(cfg: ModelConfig, folder: Path, dtype: torch.dtype,
                  goes_on: Mapping[str, Any] | None, score_seed: int | None = None) -> LoadedLM:
    """Load an adapter's folder: the base that it names, with the adapter on it."""
    path, revision, identity = model_files.named_base(folder)
    try:
        loaded = load_lm(replace(cfg, path=path, revision=revision), dtype=dtype,
                         score_seed=score_seed)
    except InputError as error:
        raise InputError(f"The base of the adapter in {folder} can't be loaded: {error.what}",
                         where=str(folder / (model_files.ADAPTER_BASE if identity
                                             else model_files.ADAPTER_CONFIG)),
                         fix=f"name the base there as it is called now; {error.fix}") from error
    if loaded.adapter is not None:
        raise InputError(f"The base of the adapter in {folder} is an adapter itself: {path}.",
                         where=str(folder), fix="merge that one into its base")
    base = load_adapters.identify(loaded.lm, path, revision)
    if identity is not None and identity.storage == base.storage and identity.digest != base.digest:
        raise CheckpointError(f"{path} is not the model that the adapter in {folder} was trained "
                              "on: its weights have changed.",
                              where=str(folder / model_files.ADAPTER_BASE),
                              fix="put the model back, or name it there as it is called now")
    return replace(loaded, adapter=load_adapters.load_adapter(loaded.lm, folder, base, goes_on))


def _with_weights(loaded: LoadedLM, lm: Any) -> LoadedLM:
    """The loaded model with the weights of a merge."""
    config = copy.deepcopy(loaded.export_config)
    if not lm.config.get_text_config(decoder=True).tie_word_embeddings:
        load_adapters.untie(config)
    return replace(loaded, lm=lm.requires_grad_(True), adapter=None, export_config=config)


def merged(loaded: LoadedLM) -> LoadedLM:
    """A base with its LoRA merged into one model, all of whose weights train."""
    assert loaded.adapter is not None
    return _with_weights(loaded, load_adapters.merge(loaded.adapter.model))


@torch.no_grad()
def _check_logits(lm: Any, name: str, key: str) -> None:
    """Check that head(trunk(x)), from which the engine computes logits where they are needed, gives
    the model's own logits. A model that does more with them than :class:`LogitMap` would be trained
    on wrong probabilities."""
    try:
        if _logits_agree(lm):
            return
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:  # foreign code's
        if isinstance(error, torch.OutOfMemoryError):
            raise
    raise InputError(f"{type(lm).__name__} ({name}) does not compute its logits as a linear map of "
                     "its trunk's output, scaled or soft-capped, in a way that ppocli knows; it "
                     "can't be trained.", where=key,
                     fix="use a language model of another architecture")


def _logits_agree(lm: Any) -> bool:
    """Compare logits of two tokens. Neither is 0, whose embedding may be 0 for padding; 16 bits
    round each step."""
    probe = 1 + torch.arange(2, device=lm.device)[None]
    head, pair = lm.get_output_embeddings(), has_encoder(lm)
    if head is None or (lm.base_model is lm and not pair):
        return False
    both, decoder_inputs = probe[0] - 1, {"decoder_input_ids": probe} if pair else {}
    batch = SequenceBatch(probe, both, both, *((probe, torch.ones_like(probe)) if pair else ()))
    hidden = response_hidden(lm, batch).to(head.weight.dtype)  # some keep fp32 beside bf16
    ours = LogitMap.of(lm)(head(hidden)).float()[None]
    theirs = lm(input_ids=probe, use_cache=False, **decoder_inputs).logits.float()
    off = 1e-3 if head.weight.dtype == torch.float32 else 2e-2 * float(theirs.abs().max())
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-3, atol=off)


def fit_vocabulary(tokenizer: Any, lm: Any, cfg: ModelConfig) -> None:
    """Restrict a language model to sampling ids of its tokenizer, and log if it has others.

    Raises:
        InputError: the tokenizer can produce ids that the model has no embedding for.
    """
    highest = max(tokenizer.get_vocab().values(), default=-1)
    rows = whole_shape(lm.get_input_embeddings().weight)[0]
    if highest >= rows:
        raise InputError(f"The tokenizer of {cfg.tokenizer_path or cfg.path} has ids up to "
                         f"{highest}, the model {cfg.path} embeds only {rows}.",
                         where="model.tokenizer_path" if cfg.tokenizer_path else "model.path",
                         fix="use the tokenizer the model was trained with")
    if lm.get_output_embeddings() is None:  # it scores texts
        return
    vocabulary = Vocabulary.of(tokenizer, lm)
    set_vocabulary(lm, vocabulary)
    if vocabulary.absent:
        log.info("%s has %d output rows and its tokenizer %d ids: the other %d stand for no token "
                 "and are never sampled", cfg.path, vocabulary.rows,
                 vocabulary.rows - len(vocabulary.absent), len(vocabulary.absent))
