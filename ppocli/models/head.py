"""Log-probability and entropy of chosen tokens straight from hidden states.

The logits exist one chunk of rows at a time; a full [tokens, vocabulary] fp32 tensor is never kept.
The backward pass either reuses a small chunk's logits in place or computes them again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ppocli.models.trunk import logit_scale


class HeadWeights(NamedTuple):
    """An output embedding as it is now: [V, D] and [V] or None. It stays when the module's own
    tensors are swapped."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    """of the logits"""

    @staticmethod
    def of(lm: Any) -> HeadWeights:
        """Of a language model."""
        head = lm.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return HeadWeights(head.weight.detach(), None if bias is None else bias.detach(),
                           logit_scale(lm))

    def log_probabilities(self, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
        """[N, V] fp32 of [N, D] states."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias).float()
        return torch.log_softmax(logits * (self.scale / temperature), -1)


CHUNK_BYTES = 64 * 2**20
"""most memory that the fp32 logits of one chunk may take"""


def _chunk_rows(vocabulary: int) -> int:
    return max(CHUNK_BYTES // (4 * vocabulary), 1)


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
            temperature: float) -> torch.Tensor:
    out = torch.nn.functional.linear(hidden, weight, bias).float()
    return out if temperature == 1.0 else out / temperature


def _entropy(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    probabilities = torch.exp(logits - lse[:, None])
    return lse - (probabilities * logits).sum(-1)


class _TokenLogprob(torch.autograd.Function):
    """(logprob [N], entropy [N]) of ``targets`` under softmax((h W^T + b) / temperature)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                targets: torch.Tensor, temperature: float, want_entropy: bool
                ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = _compute_dtype(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(dtype), weight.to(dtype)
            b = None if bias is None else bias.to(dtype)
            rows = _chunk_rows(weight.shape[0])
            logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
            lses, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
            kept = None
            for start in range(0, len(targets), rows):
                part = slice(start, start + rows)
                logits = _logits(h[part], w, b, temperature)
                lses[part] = torch.logsumexp(logits, -1)
                logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - lses[part]
                if want_entropy:
                    entropies[part] = _entropy(logits, lses[part])
                if len(targets) <= rows:
                    kept = logits
        ctx.save_for_backward(hidden, weight, bias, targets, lses, entropies)
        ctx.logits, ctx.temperature, ctx.dtype = kept, temperature, dtype
        ctx.want_entropy = want_entropy
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad_logprob, grad_entropy = grads
        hidden, weight, bias, targets, lses, entropies = ctx.saved_tensors
        h, w = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        b = None if bias is None else bias.to(ctx.dtype)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        rows = _chunk_rows(weight.shape[0])
        for start in range(0, len(targets), rows):
            part = slice(start, start + rows)
            logits = ctx.logits
            if logits is None:
                logits = _logits(h[part], w, b, ctx.temperature)
            log_p = logits.sub_(lses[part, None])
            p = log_p.exp()
            # d logprob / d logit = onehot - p; d entropy / d logit = -p (log p + entropy)
            grad = p * -grad_logprob[part, None]
            if ctx.want_entropy:
                grad -= p * (log_p + entropies[part, None]) * grad_entropy[part, None]
            grad.scatter_add_(-1, targets[part, None], grad_logprob[part, None])
            grad = (grad / ctx.temperature if ctx.temperature != 1.0 else grad).to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = (grad @ w).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += (grad.t() @ h[part]).to(weight.dtype)
            if grad_bias is not None:
                grad_bias += grad.sum(0).to(bias.dtype)
        ctx.logits = None
        return grad_hidden, grad_weight, grad_bias, None, None, None


def token_logprobs(hidden: torch.Tensor, head: Any, targets: torch.Tensor, *,
                   temperature: float, want_entropy: bool
                   ) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of ``targets`` under logits / temperature, in fp32.

    Args:
        hidden: [N, D] final hidden states at the predicting positions.
        head: the model's output embedding, a linear layer with weight [V, D].
        targets: [N] token ids.
        want_entropy: also return the entropy of each distribution, with its gradient.

    Returns:
        logprobs [N] and entropies [N] (None unless wanted), fp32.
    """
    bias = getattr(head, "bias", None)
    logprobs, entropies = _TokenLogprob.apply(hidden, head.weight, bias, targets, temperature,
                                              want_entropy)
    return logprobs, (entropies if want_entropy else None)


@torch.no_grad()
def full_kl(hidden: torch.Tensor, head: HeadWeights, ref_hidden: torch.Tensor,
            ref_head: HeadWeights, *, temperature: float) -> torch.Tensor:
    """KL(policy || reference) over the whole vocabulary at each token, [N] fp32 nats.

    ``sum_v p_v (log p_v - log q_v)``, chunk by chunk (TRL 0.11's ``kl_penalty=full``).
    """
    rows = _chunk_rows(head.weight.shape[0])
    out = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        log_p = head.log_probabilities(hidden[part], temperature)
        log_q = ref_head.log_probabilities(ref_hidden[part], temperature)
        out[part] = (log_p.exp() * (log_p - log_q)).sum(-1)
    return out
