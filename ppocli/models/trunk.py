"""A model's trunk over prompts and responses that are laid out for it."""

from __future__ import annotations

from typing import Any

import torch

from ppocli.models.layout import SequenceBatch
from ppocli.models.virtual_tokens import trunk_states

RELATIVE_POSITIONS = ("t5", "mt5", "umt5", "longt5", "switch_transformers")
_SCALES_STATES = RELATIVE_POSITIONS


def has_encoder(lm: Any) -> bool:
    """Whether prompts go to an encoder and responses come from a decoder."""
    return bool(getattr(lm.config, "is_encoder_decoder", False))


def decoder_start(lm: Any) -> int | None:
    """The token that the decoder of an encoder-decoder starts from; None for other models."""
    if not has_encoder(lm):
        return None
    start = lm.config.decoder_start_token_id
    return lm.config.pad_token_id if start is None else start


def state_scale(lm: Any) -> float:
    """By which a model multiplies its final states on their way into the output embedding.

    T5 and its kin scale the decoder's states where the embeddings are tied (Raffel et al. 2020,
    arXiv 1910.10683, from the Mesh TensorFlow implementation).
    """
    config = lm.config
    if config.model_type not in _SCALES_STATES:
        return 1.0
    scales = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
    return float(config.d_model) ** -0.5 if scales else 1.0


def response_hidden(lm: Any, batch: SequenceBatch) -> torch.Tensor:
    """[N, D] final hidden states of ``lm``'s trunk at the positions that predict the response."""
    if batch.encoder_tokens is None:
        states = trunk_states(lm, batch)
    else:
        encoded = lm.get_encoder()(input_ids=batch.encoder_tokens,
                                   attention_mask=batch.encoder_mask).last_hidden_state
        states = lm.get_decoder()(
            input_ids=batch.tokens, encoder_hidden_states=encoded,
            encoder_attention_mask=batch.encoder_mask, use_cache=False).last_hidden_state
    return states.reshape(-1, states.shape[-1]).index_select(0, batch.predictors)
