"""Log-probability and entropy of chosen tokens straight from hidden states.

The logits exist one chunk of rows at a time. For the backward pass those of few tokens are kept,
and turned into their gradient in place; those of more are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ppocli.models.fast.gemm import Product, product_of
from ppocli.models.trunk import logit_scale


class HeadWeights(NamedTuple):
    """An output embedding as it is now: [V, D] and [V] or None. It stays when the module's own
    tensors are swapped."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    """of the logits"""
    product: Product

    @staticmethod
    def of(lm: Any) -> HeadWeights:
        """Of a language model."""
        head = lm.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return HeadWeights(head.weight.detach(), None if bias is None else bias.detach(),
                           logit_scale(lm), product_of(head))

    def log_probabilities(self, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
        """[N, V] fp32 of [N, D] states."""
        logits = _logits(self.product, hidden, self.weight, self.bias, temperature / self.scale)
        return torch.log_softmax(logits, -1)


CHUNK_BYTES = 64 * 2**20
"""most memory that the fp32 logits of one chunk may take"""
KEPT_BYTES = 256 * 2**20
"""most memory that all fp32 logits of a pass may take until its backward pass"""


def _chunk_rows(vocabulary: int) -> int:
    return max(CHUNK_BYTES // (4 * vocabulary), 1)


def _compute_dtype(hidden: torch.Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _logits(product: Product, hidden: torch.Tensor, weight: torch.Tensor,
            bias: torch.Tensor | None, temperature: float) -> torch.Tensor:
    """[n, V] fp32, a tensor of its own."""
    out = product(hidden, weight)
    if bias is not None:
        out = out.add_(bias)
    return out.float() if temperature == 1.0 else out.float().div_(temperature)


def _entropy(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    probabilities = torch.exp(logits - lse[:, None])
    return lse - (probabilities * logits).sum(-1)


class _TokenLogprob(torch.autograd.Function):
    """(logprob [N], entropy [N]) of ``targets`` under softmax((h W^T + b) / temperature)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                targets: torch.Tensor, temperature: float, want_entropy: bool, product: Product
                ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = _compute_dtype(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            h, w = hidden.to(dtype), weight.to(dtype)
            b = None if bias is None else bias.to(dtype)
            logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
            lses, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
            keep = any(ctx.needs_input_grad[:3]) and (
                4 * len(targets) * weight.shape[0] <= KEPT_BYTES)
            kept = []
            for part in _chunks(len(targets), weight.shape[0]):
                logits = _logits(product, h[part], w, b, temperature)
                lses[part] = torch.logsumexp(logits, -1)
                logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - lses[part]
                if want_entropy:
                    entropies[part] = _entropy(logits, lses[part])
                if keep:
                    kept.append(logits)
        ctx.save_for_backward(hidden, weight, bias, targets, lses, entropies)
        ctx.kept, ctx.temperature, ctx.dtype = kept, temperature, dtype
        ctx.want_entropy, ctx.product = want_entropy, product
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor) -> Any:
        hidden, weight, bias, targets, lses, entropies = ctx.saved_tensors
        h, w = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        b = None if bias is None else bias.to(ctx.dtype)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        kept = iter(ctx.kept)
        ctx.kept = None
        for part in _chunks(len(targets), weight.shape[0]):
            logits = next(kept, None)
            if logits is None:
                logits = _logits(ctx.product, h[part], w, b, ctx.temperature)
            grad = _logit_gradient(
                logits, lses[part], targets[part], grad_logprob[part],
                (entropies[part], grad_entropy[part]) if ctx.want_entropy else None)
            del logits
            grad = (grad.div_(ctx.temperature) if ctx.temperature != 1.0 else grad).to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = ctx.product(grad, w.t())
            if need_weight:
                grad_weight = _added(grad_weight,
                                     ctx.product(grad.t(), h[part].t()).to(weight.dtype))
            if grad_bias is not None:
                grad_bias += grad.sum(0).to(bias.dtype)
        if need_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _chunks(count: int, vocabulary: int) -> Iterator[slice]:
    rows = _chunk_rows(vocabulary)
    for start in range(0, count, rows):
        yield slice(start, start + rows)


def _added(total: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    """``total`` in its place; in a function of its own, since ``more`` is as large and should be
    gone before the next one comes."""
    return more if total is None else total.add_(more)


def _logit_gradient(logits: torch.Tensor, lse: torch.Tensor, targets: torch.Tensor,
                    grad_logprob: torch.Tensor,
                    entropy: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """[n, V] gradient by the logits, in their place.

    d logprob / d logit = onehot - p; d entropy / d logit = -p (log p + entropy).

    Args:
        entropy: [n] entropies and the gradients by them.
    """
    log_p = logits.sub_(lse[:, None])
    if entropy is None:
        grad = log_p.exp_().mul_(-grad_logprob[:, None])
    else:
        found, grad_entropy = entropy
        p = log_p.exp()
        grad = log_p.add_(found[:, None]).mul_(-grad_entropy[:, None]).sub_(
            grad_logprob[:, None]).mul_(p)
    return grad.scatter_add_(-1, targets[:, None], grad_logprob[:, None])


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
                                              want_entropy, product_of(head))
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
