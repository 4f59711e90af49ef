"""Which rows of a model's output embedding stand for tokens.

Many models have more rows than their tokenizer has ids: Qwen2.5-7B 152064 for 151665, T5 32128 for
32100. The others decode to nothing. The policy is the distribution over the tokenizer's ids alone,
where it is sampled and where its probabilities are computed.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ppocli.distributed.backend import to_device
from ppocli.distributed.deepspeed_internals import whole_shape

ABSENT = -1e15
"""the logit of an id without a token: its probability is 0 in fp32, and unlike with -inf no figure
that is made of it becomes NaN"""


@dataclass(frozen=True)
class Vocabulary:
    """The ids that a model may sample, out of the rows of its output embedding."""

    rows: int
    size: int
    """the highest id with a token, and 1"""
    gaps: tuple[int, ...] = ()
    """lower ids without a token"""

    @staticmethod
    def of(tokenizer: Any, lm: Any) -> "Vocabulary":
        """The tokenizer's ids in a language model."""
        ids = set(tokenizer.get_vocab().values())
        rows = output_rows(lm)
        size = min(max(ids, default=rows - 1) + 1, rows)
        special = set(tokenizer.all_special_ids)
        return Vocabulary(rows, size, tuple(
            i for i in sorted(set(range(size)) - ids - special) if not _has_token(tokenizer, i))
            if ids else ())

    @property
    def spare(self) -> int:
        """Rows behind the last id with a token."""
        return self.rows - self.size

    @property
    def absent(self) -> list[int]:
        """All ids without a token."""
        return [*self.gaps, *range(self.size, self.rows)]

    @cached_property
    def _gaps(self) -> torch.Tensor:
        return torch.tensor(self.gaps, dtype=torch.long)

    def gaps_on(self, device: torch.device) -> torch.Tensor | None:
        """[n] the gaps on a device; None without any."""
        return to_device(self._gaps, device) if self.gaps else None

    def lacks(self, ids: torch.Tensor) -> torch.Tensor:
        """Which ids on the CPU have no token: bool, of the same shape."""
        out = (ids < 0) | (ids >= self.size)
        return out | torch.isin(ids, self._gaps) if self.gaps else out

    def cut(self, logits: torch.Tensor, gaps: torch.Tensor | None) -> torch.Tensor:
        """Logits [..., size] of [..., rows]: without the spare rows, the gaps at ``ABSENT``.

        Args:
            gaps: of :meth:`gaps_on`, where the logits are.
        """
        logits = logits[..., :self.size]
        return logits if gaps is None else logits.float().index_fill(-1, gaps, ABSENT)


def output_rows(lm: Any) -> int:
    """Rows of a language model's output embedding, on all ranks together."""
    return whole_shape(lm.get_output_embeddings().weight)[0]


def vocabulary_of(lm: Any) -> Vocabulary:
    """The ids that a model may sample; all, where :func:`set_vocabulary` hasn't been called."""
    rows = output_rows(lm)
    return getattr(lm, "ppocli_vocabulary", None) or Vocabulary(rows, rows)


def set_vocabulary(lm: Any, vocabulary: Vocabulary) -> None:
    """Make a model sample and score these ids alone from now on, as far as it has rows for them."""
    rows = output_rows(lm)
    lm.ppocli_vocabulary = Vocabulary(rows, min(vocabulary.size, rows),
                                      tuple(i for i in vocabulary.gaps if i < rows))


def _has_token(tokenizer: Any, token_id: int) -> bool:
    """Whether an id that ``get_vocab`` leaves out has a token after all: of several ids with the
    same token, such as fairseq's fillers, some tokenizers list one."""
    try:
        token = tokenizer.convert_ids_to_tokens(token_id)
    except Exception:  # the tokenizer's own code, asked for an id that it lacks
        return False
    return token not in (None, "", tokenizer.unk_token)
