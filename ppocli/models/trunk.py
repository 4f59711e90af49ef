"""A model's trunk over prompts and responses that are laid out for it."""

from __future__ import annotations

from typing import Any

import torch

from ppocli.models.layout import SequenceBatch


def response_hidden(lm: Any, batch: SequenceBatch) -> torch.Tensor:
    """[N, D] final hidden states of ``lm``'s trunk at the positions that predict the response."""
    states = lm.base_model(input_ids=batch.tokens, use_cache=False).last_hidden_state
    return states.reshape(-1, states.shape[-1]).index_select(0, batch.predictors)
