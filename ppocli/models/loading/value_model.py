"""From a name or a folder to a value function that is a model of its own."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ppocli.config.schema import ModelConfig
from ppocli.errors import InputError
from ppocli.models.fast.kernels import use_kernels
from ppocli.models.loading.compatibility import check_same_tokens
from ppocli.models.loading.language_model import check_complete, silence_dropout, without_dropout
from ppocli.models.loading.model_config import attention_wanted, loading
from ppocli.models.policy import ValueHead
from ppocli.models.trunk import has_encoder
from ppocli.models.value_function import ScoreHead, ValueModel
from ppocli.storage.model_files import find_model

log = logging.getLogger("ppocli")


def load_value_model(cfg: ModelConfig, tokenizer: Any, policy: Any, seed: int
                     ) -> tuple[ValueModel, ValueHead | ScoreHead]:
    """The trunk of ``model.value.path`` (default: the policy's own start) and a head on it.

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
    name = cfg.value.path or cfg.path
    revision = None if cfg.value.path else cfg.revision
    source, _ = find_model(name, key=key, revision=revision, needs="model")
    trunk, score = _load(cfg, name, source, key, revision)
    check_same_tokens(tokenizer, policy, trunk, name=name, key=key,
                    trust_remote_code=cfg.trust_remote_code)
    if not has_encoder(trunk):  # a decoder beside an encoder is causal
        _check_causal(trunk, name, key)
    if score is not None:
        log.info("values start as the scores of %s", name)
        return ValueModel(trunk), ScoreHead(score.weight.detach(), score.bias if score.bias is None
                                            else score.bias.detach())
    width = trunk.get_input_embeddings().weight.shape[1]
    width = getattr(trunk.config, "hidden_size", width)
    return ValueModel(trunk), ValueHead(width, torch.Generator().manual_seed(seed))


def _load(cfg: ModelConfig, name: str, source: str, key: str, revision: str | None
          ) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    hub = {"revision": revision, "trust_remote_code": cfg.trust_remote_code}
    with loading(f"value model {name}", key):
        config = AutoConfig.from_pretrained(source, **hub)
        scores = any("ForSequenceClassification" in a for a in config.architectures or [])
        kind = AutoModelForSequenceClassification if scores else AutoModel
        loaded: Any = kind.from_pretrained(
            source, config=without_dropout(config), dtype=torch.float32, output_loading_info=True,
            **hub, **attention_wanted(cfg))
        model, info = loaded
    check_complete(info, type(model).__name__, name, key)
    model.config.pad_token_id = None
    model.eval()
    silence_dropout(model)
    trunk = model.base_model
    if cfg.attn_implementation is None:
        use_kernels(trunk)
    if getattr(trunk, "pooler", None) is not None:
        trunk.pooler = None  # it reads one token's state for classifiers; no value comes from it
    score = getattr(model, "score", None) if scores else None
    if scores and (config.num_labels != 1 or not isinstance(score, torch.nn.Linear)):
        log.info("%s has %d labels and no single score: its values start anew, at 0", name,
                 config.num_labels)
        score = None
    return trunk, score


@torch.no_grad()
def _check_causal(trunk: Any, name: str, key: str) -> None:
    """The value of a state must not depend on tokens that come after it."""
    probe = torch.tensor([[0, 1, 0], [0, 1, 1]], device=trunk.device)
    states = trunk(input_ids=probe, use_cache=False).last_hidden_state
    if not torch.allclose(states[0, :2], states[1, :2], rtol=1e-4, atol=1e-4):
        raise InputError(f"{name} is not causal: what it says of a token depends on later ones.",
                         where=key, fix="take a value model built on a causal language model")
