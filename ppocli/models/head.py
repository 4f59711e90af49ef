"""Log-probability, entropy and KL at chosen tokens straight from hidden states.

The logits exist one chunk of rows at a time. For the backward pass those of few tokens are kept,
and turned into their gradient in place; those of more are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ppocli.distributed.backend import to_device
from ppocli.distributed.deepspeed_internals import whole_shape
from ppocli.models.kernels import Product, product_of
from ppocli.models.trunk import state_scale

ABSENT = -1e15
"""the logit of an id without a token: its probability is 0 in fp32, and unlike with -inf no figure
that is made of it becomes NaN"""


@dataclass(frozen=True)
class Vocabulary:
    """The ids that a model may sample, out of the rows of its output embedding: of the 152064 of
    Qwen2.5-7B 151665 have tokens. The policy is the distribution over these alone."""

    rows: int
    size: int
    """the highest id with a token, and 1"""
    gaps: tuple[int, ...] = ()
    """lower ids without a token"""

    @staticmethod
    def of(tokenizer: Any, lm: Any) -> Vocabulary:
        """The tokenizer's ids in a language model."""
        ids = set(tokenizer.get_vocab().values())
        rows = output_rows(lm)
        size = min(max(ids, default=rows - 1) + 1, rows)
        unnamed = set(range(size)) - ids - set(tokenizer.all_special_ids) if ids else set[int]()
        gaps = []
        for i in sorted(unnamed):
            token = None  # of several ids with one token, such as fairseq's fillers, some list one
            with suppress(Exception):  # the tokenizer's own code, asked for an id that it lacks
                token = tokenizer.convert_ids_to_tokens(i)
            if token in (None, "", tokenizer.unk_token):
                gaps.append(i)
        return Vocabulary(rows, size, tuple(gaps))

    @property
    def absent(self) -> list[int]:
        """All ids without a token."""
        return [*self.gaps, *range(self.size, self.rows)]

    @cached_property
    def _gaps(self) -> torch.Tensor:
        return torch.tensor(self.gaps, dtype=torch.long)

    def gaps_on(self, device: torch.device) -> torch.Tensor:
        """[n] the gaps on a device."""
        return to_device(self._gaps, device)

    def lacks(self, ids: torch.Tensor) -> torch.Tensor:
        """Which ids on the CPU have no token: bool, of the same shape."""
        return (ids < 0) | (ids >= self.size) | torch.isin(ids, self._gaps)

    def cut(self, logits: torch.Tensor, gaps: torch.Tensor | None) -> torch.Tensor:
        """Logits [..., size] of [..., rows]: without the spare rows, the ``gaps`` at ``ABSENT``."""
        logits = logits[..., :self.size]
        return logits if gaps is None else logits.float().index_fill(-1, gaps, ABSENT)


def output_rows(lm: Any) -> int:
    """Rows of a language model's output embedding, on all ranks together."""
    return whole_shape(lm.get_output_embeddings().weight)[0]


def vocabulary_of(lm: Any) -> Vocabulary:
    """The ids that a model may sample; all, where :func:`set_vocabulary` hasn't been called."""
    vocabulary: Vocabulary | None = getattr(lm, "ppocli_vocabulary", None)
    return vocabulary or Vocabulary(rows := output_rows(lm), rows)


def set_vocabulary(lm: Any, vocabulary: Vocabulary) -> None:
    """Make a model sample and score these ids alone from now on, as far as it has rows for them."""
    rows = output_rows(lm)
    lm.ppocli_vocabulary = Vocabulary(rows, min(vocabulary.size, rows),
                                      tuple(i for i in vocabulary.gaps if i < rows))
    lm.ppocli_logit_map = LogitMap.of(lm)


# Its products -------------------------------------------------------------------------------------

class LogitMap(NamedTuple):
    """What a model makes of its output embedding's products: it scales them, or bounds them."""

    scale: float = 1.0
    """by which they are multiplied (Cohere, Granite, T5)"""
    cap: float | None = None
    """logits x become cap tanh(x / cap), once they are scaled (Gemma 2, arXiv 2408.00118)"""

    @staticmethod
    def of(lm: Any) -> LogitMap:
        """Of a language model, as its configuration says."""
        config, logit_scale = lm.config, getattr(lm, "logit_scale", None)
        scale = state_scale(lm) * (logit_scale if isinstance(logit_scale, float) else 1.0)
        scale *= getattr(config, "lm_head_multiplier", 1.0) / getattr(config, "logits_scaling", 1.0)
        text = config.get_text_config(decoder=True)
        cap = getattr(text, "final_logit_softcapping", None)
        return LogitMap(scale, cap or getattr(text, "logits_soft_cap", None) or None)

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        """The model's logits."""
        out = products if self.scale == 1.0 else products * self.scale
        return out if self.cap is None else (out.float() / self.cap).tanh_().mul_(self.cap)


class HeadWeights(NamedTuple):
    """An output embedding, [V, D] and [V] or None, and what is made of its products."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    logit_map: LogitMap = LogitMap()
    product: Product = torch.nn.functional.linear
    spare: int = 0
    """rows at the end of the weight whose logits are left out: they stand for no token, or are
    zeros, see :meth:`to`"""
    gaps: torch.Tensor | None = None
    """[n] other rows that stand for no token, which get the probability 0"""

    @staticmethod
    def of(lm: Any, *, all_rows: bool = False) -> HeadWeights:
        """Of a language model; with ``all_rows`` also those that stand for no token count."""
        layer, vocabulary = lm.get_output_embeddings(), vocabulary_of(lm)
        return HeadWeights(
            layer.weight, getattr(layer, "bias", None),
            getattr(lm, "ppocli_logit_map", None) or LogitMap.of(lm), product_of(layer),
            0 if all_rows else vocabulary.rows - vocabulary.size,
            None if all_rows or not vocabulary.gaps else vocabulary.gaps_on(layer.weight.device))

    def as_now(self) -> HeadWeights:
        """The same without gradients; stays when the layer's own tensors are swapped."""
        return self._replace(weight=self.weight.detach(),
                             bias=None if self.bias is None else self.bias.detach())

    def to(self, dtype: torch.dtype) -> HeadWeights:
        """The same in another type; see :meth:`_filled`."""
        if self.weight.device.type != "cpu" and dtype.itemsize == 2 and len(self.weight) % ALIGNED:
            return self._filled(dtype)
        return self._replace(weight=self.weight.to(dtype),
                             bias=None if self.bias is None else self.bias.to(dtype))

    def _filled(self, dtype: torch.dtype) -> HeadWeights:
        """The same in half precision, filled up with zeros to a multiple of 8 rows: for other
        numbers, such as the 50257 of GPT-2, cuBLAS takes kernels of older GPUs."""
        count, width = self.weight.shape
        fill = -count % ALIGNED
        weight = self.weight.new_empty(count + fill, width, dtype=dtype)
        weight[:count], weight[count:] = self.weight.detach(), 0
        return self._replace(weight=weight, spare=self.spare + fill,
                             bias=None if self.bias is None else self.bias.to(dtype))

    def products(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] of [n, D] states: logits before anything is made of them, without spare rows."""
        out = self.product(hidden, self.weight)
        out = out[:, :out.shape[1] - self.spare] if self.spare else out
        return out if self.bias is None else out.add_(self.bias[:out.shape[1]])


class OtherHead(NamedTuple):
    """What another model makes of N tokens, to be compared with; without gradients."""

    states: torch.Tensor
    """[N, D] its final hidden states, where the policy's are"""
    head: HeadWeights


class TokenFigures(NamedTuple):
    """What a model's logits say of N tokens; fp32, each [N]."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    """None unless it was wanted, as is ``kl``"""
    kl: torch.Tensor | None
    """from another model, over the whole vocabulary"""
    values: torch.Tensor | None = None
    """of the states before the tokens, where a value function was asked"""


ALIGNED = 8
CHUNK_BYTES, DEVICE_CHUNK_BYTES = 64 * 2**20, 256 * 2**20
"""most memory that the fp32 logits of one chunk may take on a CPU, and on a GPU: each chunk's part
of the weight's gradient is as large as the weight, and is added to those before it"""
KEPT_BYTES = 256 * 2**20
"""most memory that all fp32 logits of a pass may take until its backward pass"""


def _logits(head: HeadWeights, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
    """[n, V] fp32 logits / temperature, a tensor of its own."""
    logits, (scale, cap) = head.products(hidden).float(), head.logit_map
    if cap is not None:
        logits.mul_(scale / cap).tanh_().mul_(cap / temperature)
    elif (divisor := temperature / scale) != 1.0:
        logits.div_(divisor)
    return logits if head.gaps is None else logits.index_fill_(
        1, head.gaps.to(logits.device), ABSENT)


def _entropy(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """[n] ``-sum p log p``. ``lse - sum p logit`` would be a small difference of numbers as large
    as the logits: 4e-3 nats off where 50257 of them lie around -300."""
    log_p = logits - lse[:, None]
    return -log_p.exp().mul_(log_p).sum(-1)


def _kl(logits: torch.Tensor, lse: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """[n] ``sum p (log p - log q)``."""
    log_p = logits - lse[:, None]
    log_ratio = log_q.neg_().add_(log_p)  # in its place
    return log_ratio.mul_(log_p.exp_()).sum(-1)


def _log_q(other: OtherHead, part: slice, temperature: float) -> torch.Tensor:
    """[n, V] what the other model gives to each token, rounded as the policy's are: two equal
    models are 0 apart."""
    logits = _logits(other.head, other.states[part], temperature)
    return logits.sub_(torch.logsumexp(logits, -1)[:, None])


class _TokenLogprob(torch.autograd.Function):
    """(logprob [N], entropy [N], KL [N]) of ``targets`` under softmax(map(h W^T + b) / temperature)
    and, the last, against ``other``; zero what wasn't wanted."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                targets: torch.Tensor, temperature: float, want_entropy: bool, head: HeadWeights,
                other: OtherHead | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        kind, kept = hidden.device.type, list[torch.Tensor]()
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        keep = any(ctx.needs_input_grad[:3]) and 4 * len(targets) * len(weight) <= KEPT_BYTES
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        lses, entropies, kls = map(torch.zeros_like, (logprobs,) * 3)
        with torch.autocast(kind, enabled=False):
            h, cast = hidden.to(dtype), head.to(dtype)
            if other is not None:
                other = OtherHead(other.states.to(dtype), other.head.to(dtype))
            for part in _chunks(len(targets), weight):
                logits = _logits(cast, h[part], temperature)
                lses[part] = torch.logsumexp(logits, -1)
                logprobs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - lses[part]
                if want_entropy:
                    entropies[part] = _entropy(logits, lses[part])
                if other is not None:
                    kls[part] = _kl(logits, lses[part], _log_q(other, part, temperature))
                if keep:
                    kept.append(logits)
        ctx.save_for_backward(hidden, weight, bias, targets, lses, entropies, kls)
        ctx.kept, ctx.temperature, ctx.dtype = kept, temperature, dtype
        ctx.want_entropy, ctx.head, ctx.other = want_entropy, head, other
        return logprobs, entropies, kls

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor,
                 grad_kl: torch.Tensor) -> Any:
        hidden, weight, bias, targets, lses, entropies, kls = ctx.saved_tensors
        h, head = hidden.to(ctx.dtype), ctx.head._replace(weight=weight, bias=bias).to(ctx.dtype)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight and not len(targets) else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        kept, (scale, cap) = iter(ctx.kept), head.logit_map
        ctx.kept = None
        for part in _chunks(len(targets), weight):
            if (logits := next(kept, None)) is None:
                logits = _logits(head, h[part], ctx.temperature)
            # d logits / d products, but for the scale, where a cap makes it other than 1
            slope = None if cap is None else 1.0 - (logits * (ctx.temperature / cap)).square_()
            log_q = ctx.other and _log_q(ctx.other, part, ctx.temperature)
            log_p, upstream = logits.sub_(lses[part, None]), grad_logprob[part, None]
            if ctx.want_entropy or ctx.other:
                grad = _further_gradient(log_p, upstream, entropies[part], grad_entropy[part],
                                         ctx.other and (log_q, kls[part], grad_kl[part]))
            else:
                grad = log_p.exp_().mul_(-upstream)
            grad.scatter_add_(-1, targets[part, None], upstream)  # d logprob / d logit = onehot - p
            del logits, log_p, log_q
            if (divisor := ctx.temperature / scale) != 1.0:
                grad.div_(divisor)
            if slope is not None:
                grad.mul_(slope)
            grad = _with_spare(grad, head.spare, ctx.dtype) if head.spare else grad.to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = head.product(grad, head.weight.t())
            if need_weight:
                more = head.product(grad.t(), h[part].t())
                if len(more) > len(weight):  # never a view of all: autograd would copy it
                    more = more[:len(weight)]
                grad_weight = (more.to(weight.dtype) if grad_weight is None
                               else grad_weight.add_(more))
                del more  # as large as the weight, and gone before the next one comes
            if grad_bias is not None:
                grad_bias += grad[:, :len(bias)].sum(0).to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _chunks(count: int, weight: torch.Tensor) -> Iterator[slice]:
    most = CHUNK_BYTES if weight.device.type == "cpu" else DEVICE_CHUNK_BYTES
    rows = max(most // (4 * weight.shape[0]), 1)
    for start in range(0, count, rows):
        yield slice(start, start + rows)


def _further_gradient(log_p: torch.Tensor, upstream: torch.Tensor, entropies: torch.Tensor,
                      grad_entropy: torch.Tensor,
                      kl: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """[n, V] in place of ``log_p``: -p of the logprob's gradient; d entropy / d logit = -p (log p +
    entropy); d KL / d logit = p (log p - log q - KL).

    Args:
        upstream: [n, 1] gradients by the logprobs.
        entropies, grad_entropy: [n] and the gradients by them.
        kl: log q [n, V], which is used up, KLs [n] and the gradients by them.
    """
    p = log_p.exp()
    pull = kl and kl[0].neg_().add_(log_p).sub_(kl[1][:, None]).mul_(kl[2][:, None])
    grad = log_p.add_(entropies[:, None]).mul_(-grad_entropy[:, None]).sub_(upstream)
    return (grad if pull is None else grad.add_(pull)).mul_(p)


def _with_spare(grad: torch.Tensor, spare: int, dtype: torch.dtype) -> torch.Tensor:
    """[n, V] gradients in another type, with so many columns of zeros behind them."""
    out = grad.new_empty(len(grad), grad.shape[1] + spare, dtype=dtype)
    out[:, :-spare], out[:, -spare:] = grad, 0
    return out


class DecodingHead:
    """[b, V] logits of [b, D] states without gradients, for as long as the weights stay; ids that
    stand for no token may be among them."""

    def __init__(self, lm: Any) -> None:
        self.layer, self.weights = lm.get_output_embeddings(), HeadWeights.of(lm)
        self._cast: HeadWeights | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """The model's logits."""
        if hidden.device.type == "cpu" or not torch.is_autocast_enabled(hidden.device.type):
            return self.weights.logit_map(self.layer(hidden))
        return self._in_half(hidden)

    def _in_half(self, hidden: torch.Tensor) -> torch.Tensor:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind)
        cast = self._cast = self._cast or self.weights.to(dtype)
        with torch.autocast(kind, enabled=False):
            return self.weights.logit_map(cast.products(hidden.to(dtype)))


def token_logprobs(hidden: torch.Tensor, head: HeadWeights, targets: torch.Tensor, *,
                   temperature: float, want_entropy: bool = False,
                   other: OtherHead | None = None) -> TokenFigures:
    """Log-probabilities of ``targets`` [N] under logits / temperature, in fp32, from the final
    hidden states [N, D] at the predicting positions; if wanted the entropy of each distribution,
    and KL(this || other) ``sum_v p_v (log p_v - log q_v)``, all with their gradients."""
    logprobs, entropies, kls = _TokenLogprob.apply(
        hidden, head.weight, head.bias, targets, temperature, want_entropy, head, other)
    return TokenFigures(logprobs, entropies if want_entropy else None,
                        None if other is None else kls)


@torch.no_grad()
def full_kl(hidden: torch.Tensor, head: HeadWeights, ref_hidden: torch.Tensor,
            ref_head: HeadWeights, *, temperature: float) -> torch.Tensor:
    """KL(policy || reference) over the whole vocabulary at each token, [N] fp32 nats.

    ``sum_v p_v (log p_v - log q_v)``, chunk by chunk (TRL 0.11's ``kl_penalty=full``).
    """
    out = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
    for part in _chunks(len(hidden), head.weight):
        log_p = torch.log_softmax(_logits(head, hidden[part], temperature), -1)
        log_q = torch.log_softmax(_logits(ref_head, ref_hidden[part], temperature), -1)
        out[part] = (log_p.exp() * (log_p - log_q)).sum(-1)
    return out
