"""The reference, and a value function with its own model: from names or folders to models, which
must read tokens as the policy does."""

import json
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from ppocli.config import tasks
from ppocli.config.schema import HardwareConfig, ModelConfig
from ppocli.distributed.deepspeed_internals import whole_shape
from ppocli.errors import CheckpointError, InputError
from ppocli.models.loading import language_model
from ppocli.models.loading.language_model import LoadedLM, frozen_dtype, merged
from ppocli.models.loading.load_adapters import Adapter, peft_names
from ppocli.models.policy import ScoreHead, ValueHead, ValueModel
from ppocli.models.trunk import has_encoder, state_width
from ppocli.runs import checkpoints, model_files

log = logging.getLogger("ppocli")


def load_reference(load: Callable[..., LoadedLM], cfg: ModelConfig, hardware: HardwareConfig
                   ) -> LoadedLM:
    """The frozen reference (default: the model that the policy starts from) in its storage type;
    eval mode, no gradients.

    Args:
        load: as :func:`ppocli.models.loading.language_model.load_lm`.
    """
    key, dtype, cfg = "model.path", frozen_dtype(cfg, hardware), replace(cfg, quantization=None)
    if cfg.reference.path is not None:
        key, cfg = "model.reference.path", replace(cfg, path=cfg.reference.path, revision=None)
    reference = load(cfg, dtype=dtype, key=key)
    if reference.adapter is not None and key == "model.path" and tasks.adapter_kind(cfg) is None:
        # merged in fp32, as the policy's start is
        reference = merged(reference if dtype == torch.float32 else load(cfg, key=key))
        reference.lm.to(dtype)
    reference.lm.requires_grad_(False)
    return reference


def load_value_model(cfg: ModelConfig, tokenizer: Any, policy: Any, seed: int
                     ) -> tuple[ValueModel, ValueHead | ScoreHead]:
    """The trunk of ``model.value.path`` (default: the policy's own start) and a head on it; where
    another run's critic is named, what that one was before it was trained.

    A reward model's score layer becomes the head, so that values start as its scores (as TRL's
    ``value_model``); any other trunk gets a fresh head that starts at 0.

    Args:
        tokenizer: the policy's, whose tokens the value model sees.
        policy: the policy's model.
        seed: of a fresh head.

    Raises:
        InputError: the model is missing, broken, of another kind or vocabulary, or sees later
            tokens.
    """
    key = "model.value.path" if cfg.value.path else "model.path"
    cfg = checkpoints.value_start(cfg)
    name = cfg.path
    source = model_files.find_model(name, key=key, revision=cfg.revision, needs="model")
    model, config = language_model.load_weights(cfg, source, _class_of_value, key=key,
                                                dtype=torch.float32, what="value model")
    language_model.make_ready(cfg, model)
    trunk, score = model.base_model, getattr(model, "score", None)
    if getattr(trunk, "pooler", None) is not None:
        trunk.pooler = None  # it returns one token's state for classifiers, and no values
    check_same_tokens(tokenizer, policy, trunk, cfg, key)
    if not has_encoder(trunk):  # a decoder beside an encoder is causal
        _check_causal(trunk, name, key)
    if trunk is not model and config.num_labels == 1 and isinstance(score, torch.nn.Linear):
        log.info("values start as the scores of %s", name)
        return ValueModel(trunk), ScoreHead(score)
    return ValueModel(trunk), ValueHead(state_width(trunk), torch.Generator().manual_seed(seed))


def value_tensors(folder: Path, names: Iterable[str], adapter: Adapter
                  ) -> dict[str, torch.Tensor]:
    """The tensors of a :class:`ValueAdapter` that was exported into a folder.

    Args:
        names: those of the tensors here.
        adapter: the policy's.

    Raises:
        CheckpointError: the folder's adapter belongs to another base, or is scaled otherwise.
    """
    import peft
    from safetensors.torch import load_file

    saved = peft.PeftConfig.from_pretrained(str(folder))
    base = json.loads((folder / model_files.ADAPTER_BASE).read_bytes())
    alpha = adapter.model.active_peft_config.lora_alpha
    if (base["digest"], saved.lora_alpha) != (adapter.base.digest, alpha):
        raise CheckpointError(f"The value adapter in {folder} has lora_alpha={saved.lora_alpha} on "
                              f"{base['path']}, the policy's {alpha} on {adapter.base.path}.",
                              where="model.value.path", fix="use the base and the model.peft that "
                              "it was trained with")
    names_here = {exported: name for name in names
                  for exported in peft_names({name: torch.empty(0)})}
    return {names_here.get(name, name): tensor
            for name, tensor in load_file(folder / model_files.ADAPTER_WEIGHTS).items()}


def _class_of_value(config: Any) -> Any:
    """transformers' class for a reward model, or for a bare trunk."""
    return transformers.AutoModelForSequenceClassification if model_files.scores(config) else \
        transformers.AutoModel


@torch.no_grad()
def _check_causal(trunk: Any, name: str, key: str) -> None:
    """The value of a state must not depend on tokens that come after it."""
    probe = torch.tensor([[0, 1, 0], [0, 1, 1]], device=trunk.device)
    states = trunk(input_ids=probe, use_cache=False).last_hidden_state
    if not torch.allclose(states[0, :2], states[1, :2], rtol=1e-4, atol=1e-4):
        raise InputError(f"{name} is not causal: what it says of a token depends on later ones.",
                         where=key, fix="take a value model built on a causal language model")


def check_same_tokens(tokenizer: Any, policy: Any, other: Any, source: ModelConfig, key: str
                      ) -> None:
    """Refuse a model that takes prompts in another way than the policy, or has other tokens.

    Args:
        tokenizer: the policy's.
        policy, other: models; of ``other`` a trunk will do.
        source: where ``other`` comes from.
        key: that names it.

    Raises:
        InputError: one has an encoder and the other hasn't, or an id means another token.
    """
    name = source.path
    if has_encoder(policy) != has_encoder(other):
        kinds = ("an encoder-decoder", "a causal model")
        theirs, ours = kinds if has_encoder(other) else reversed(kinds)
        raise InputError(f"{name} is {theirs}, the policy {ours}.", where=key,
                         fix=f"give {ours} of the policy's vocabulary")
    vocabulary = tokenizer.get_vocab()
    highest = max(vocabulary.values(), default=-1)
    rows = whole_shape(other.get_input_embeddings().weight)[0]
    if highest >= rows:
        raise InputError(f"The policy's tokenizer has ids up to {highest}, {name} embeds only "
                         f"{rows}.", where=key,
                         fix="give a model of the policy's own family and vocabulary")
    if (theirs_by_token := _vocabulary(source, key)) is None:
        return
    odd = next((token for token, i in sorted(vocabulary.items(), key=lambda item: item[1])
                if theirs_by_token.get(token, i) != i), None)
    missing = sum(token not in theirs_by_token for token in vocabulary)
    if odd is not None or missing > len(vocabulary) // 2:
        what = (f"{odd!r} is {vocabulary[odd]} for the policy and {theirs_by_token[odd]} for {name}"
                if odd is not None else
                f"{name} lacks {missing} of the policy's {len(vocabulary)} tokens")
        raise InputError(f"The tokenizers differ: {what}.", where=key,
                         fix="give a model with the policy's own tokenizer")


def _vocabulary(cfg: ModelConfig, key: str) -> dict[str, int] | None:
    """Token -> id of a model's tokenizer; None if it has none to compare with."""
    with suppress(Exception):  # weights alone are enough: ids are checked by their range
        source = model_files.find_model(cfg.path, key=key, revision=cfg.revision, needs="tokenizer")
        return transformers.AutoTokenizer.from_pretrained(
            source, revision=cfg.revision, trust_remote_code=cfg.trust_remote_code
        ).get_vocab() or None
    return None
