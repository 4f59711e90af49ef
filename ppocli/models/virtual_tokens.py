"""Trained virtual tokens before every prompt: keys and values in the cache (prefix tuning, Li and
Liang 2021) or embeddings in front of the words' (prompt tuning, Lester et al. 2021).

As in PEFT (``peft/peft_model.py``, ``PeftModelForCausalLM.forward``) they take the first positions,
so that a prompt's first token has the position ``count``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ppocli.models.layout import SequenceBatch
from ppocli.models.loading import peft_internals

_NAME = "virtual_tokens"


class VirtualTokens(nn.Module):
    """The virtual tokens of a causal LM, of which it becomes a part.

    Args:
        peft_model: PEFT's model around the causal LM; it makes the tokens out of what trains.
        in_cache: prefix tuning, whose tokens are keys and values; else embeddings.
    """

    _peft_model: Any

    def __init__(self, peft_model: Any, *, in_cache: bool) -> None:
        super().__init__()
        self.prompt_encoder = peft_model.prompt_encoder
        object.__setattr__(self, "_peft_model", peft_model)  # no submodule: it holds the whole LM
        self.in_cache = in_cache
        self.count: int = peft_model.active_peft_config.num_virtual_tokens
        self.enabled = True

    def cache(self, rows: int) -> Any:
        """A new cache that holds the keys and values of the virtual tokens for ``rows`` rows."""
        return peft_internals.prompt(self._peft_model, self.prompt_encoder, rows)

    def forget_values(self) -> None:
        """Keep shapes only, for passes over tensors without values."""
        peft_internals.forget_prompt_values(self._peft_model)

    def in_front(self, embeddings: torch.Tensor) -> torch.Tensor:
        """[b, T, D] embeddings of words, with the virtual ones before them: [b, count + T, D]."""
        own = peft_internals.prompt(self._peft_model, self.prompt_encoder, len(embeddings))
        return torch.cat([own.to(embeddings.dtype), embeddings], dim=1)


def add_virtual_tokens(lm: Any, tokens: VirtualTokens) -> None:
    """Make them a part of a causal LM: moved, trained and sharded with it."""
    lm.add_module(_NAME, tokens)


def virtual_tokens(lm: Any) -> VirtualTokens | None:
    """The virtual tokens of a causal LM that are switched on; None without any."""
    found = lm._modules.get(_NAME)
    return found if found is not None and found.enabled else None


def switch_virtual_tokens(lm: Any, enabled: bool) -> None:
    """Leave the virtual tokens of a causal LM out, or take them in again."""
    found = lm._modules.get(_NAME)
    if found is not None:
        found.enabled = enabled


def num_virtual_tokens(lm: Any) -> int:
    """How many positions of a causal LM virtual tokens take, switched on or not."""
    modules = getattr(lm, "_modules", None)
    if modules is None:  # a model that is not loaded yet
        return int(lm.num_virtual_tokens)
    return modules[_NAME].count if _NAME in modules else 0


def trunk_states(lm: Any, batch: SequenceBatch) -> torch.Tensor:
    """[b, T, D] final hidden states of the trunk for the tokens of a batch without an encoder."""
    tokens, virtual = batch.tokens, virtual_tokens(lm)
    if virtual is None:
        packed: dict[str, Any] = {}
        if batch.packing is not None:
            packed = {"position_ids": batch.positions, "attention_mask": batch.packing.mask()}
        return lm.base_model(input_ids=tokens, use_cache=False, **packed).last_hidden_state
    if virtual.in_cache:
        return lm.base_model(input_ids=tokens, past_key_values=virtual.cache(len(tokens)),
                             use_cache=True).last_hidden_state
    embeddings = virtual.in_front(lm.get_input_embeddings()(tokens))
    states = lm.base_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    return states[:, virtual.count:]
