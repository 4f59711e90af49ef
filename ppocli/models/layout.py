"""Prompts and responses laid out for a forward pass: right-padded rows, response tokens flat.

Rollouts are stored left-padded (prompt) and right-padded (response). For scoring and training the
left padding is cut out, so that a row is its prompt, its response, then padding: a causal model
needs no attention mask for that, absolute positions are right by construction, and the result of a
row does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """b rows of T tokens that hold N response tokens. Made per micro-batch, read by the models."""

    tokens: torch.Tensor
    """[b, T] int64, prompt then response without its last token, then padding"""
    predictors: torch.Tensor
    """[N] int64 index into b*T of the position whose output predicts each response token"""
    targets: torch.Tensor
    """[N] int64 response token ids, row by row"""

    def to(self, device: torch.device) -> SequenceBatch:
        """The same batch on ``device``."""
        return SequenceBatch(self.tokens.to(device), self.predictors.to(device),
                             self.targets.to(device))


def lay_out(prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor, response_tokens: torch.Tensor,
            response_mask: torch.Tensor) -> SequenceBatch:
    """Build a :class:`SequenceBatch` from left-padded prompts and right-padded responses.

    Args:
        prompt_tokens, prompt_mask: [b, Q], padding on the left; each row has at least one token.
        response_tokens, response_mask: [b, R], padding on the right.
    """
    num_prompt = prompt_tokens.shape[1]
    prompt_lengths = prompt_mask.sum(dim=1)
    lengths = prompt_lengths + response_mask.sum(dim=1) - 1  # the last token predicts nothing
    width = max(int(lengths.max()), 1)
    both = torch.cat([prompt_tokens, response_tokens], dim=1)
    columns = torch.arange(width)[None, :] + (num_prompt - prompt_lengths)[:, None]
    tokens = both.gather(1, columns.clamp(max=both.shape[1] - 1))
    tokens = tokens.masked_fill(torch.arange(width)[None, :] >= lengths[:, None], 0)
    row, position = response_mask.nonzero(as_tuple=True)
    predictors = row * width + prompt_lengths[row] + position - 1
    return SequenceBatch(tokens, predictors, response_tokens[row, position])
