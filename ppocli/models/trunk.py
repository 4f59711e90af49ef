"""Facts about a language model: its kind, how it is decoded, the virtual tokens before its prompts,
which rows of its output embedding stand for tokens; and its trunk's pass over samples."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ppocli.distributed.backend import to_device
from ppocli.distributed.deepspeed_internals import whole_shape
from ppocli.models.layout import SequenceBatch, placeholder_mask
from ppocli.models.loading import peft_internals
from ppocli.models.transformers_internals import cache_name

RELATIVE_POSITIONS = ("t5", "mt5", "umt5", "longt5", "switch_transformers")


def has_encoder(lm: Any) -> bool:
    """Whether prompts go to an encoder and responses come from a decoder."""
    return bool(getattr(lm.config, "is_encoder_decoder", False))


def decoder_start(lm: Any) -> int | None:
    """The token that the decoder of an encoder-decoder starts from; None for other models. To be
    asked before :func:`ppocli.models.loading.language_model.make_ready`, and known to its
    ``LoadedLM`` from then on: that which transformers' ``generate`` takes, or what pads where no
    such token is named."""
    if not has_encoder(lm):
        return None
    generation = lm.generation_config
    named = (generation.decoder_start_token_id,
             getattr(lm.config, "decoder_start_token_id", None),
             generation.bos_token_id, lm.config.pad_token_id)
    return next((token for token in named if token is not None), None)


def state_scale(lm: Any) -> float:
    """By which a model multiplies its final states on their way into the output embedding.

    T5 and its kin scale the decoder's states where the embeddings are tied (Raffel et al. 2020,
    arXiv 1910.10683, from the Mesh TensorFlow implementation).
    """
    config = lm.config
    if config.model_type not in RELATIVE_POSITIONS or config.model_type == "mt5":
        return 1.0  # mT5 was trained with an output embedding of its own, and isn't scaled
    scales = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
    return float(config.d_model) ** -0.5 if scales else 1.0


def state_width(lm: Any) -> int:
    """The size of a model's final states, or a trunk's; OPT may project them to that of its
    embeddings."""
    config = lm.config
    width: int = getattr(config, "word_embed_proj_dim", getattr(
        config, "hidden_size", lm.get_input_embeddings().weight.shape[1]))
    return width


class Decoding(Enum):
    """Ways of decoding, the fastest first."""

    STEPS = "steps"
    """ppocli's own loop feeds each token with the keys and values of those before it"""
    LIBRARY = "library"
    """transformers' ``generate``, which knows what else a model keeps from token to token"""
    UNCACHED = "uncached"
    """the same, each token by a pass over all before it"""


def decoding_of(lm: Any) -> Decoding:
    """How a model decodes; by steps where nobody has said otherwise."""
    return getattr(lm, "ppocli_decoding", Decoding.STEPS)


def set_decoding(lm: Any, decoding: Decoding) -> None:
    """Make a model decode so from now on."""
    lm.ppocli_decoding = decoding


class VirtualTokens(nn.Module):
    """Trained virtual tokens before every prompt of a causal LM, of which they become a part: keys
    and values in the cache (prefix tuning, Li and Liang 2021) or embeddings in front of the words'
    (prompt tuning, Lester et al. 2021).

    As in PEFT (``peft/peft_model.py``, ``PeftModelForCausalLM.forward``) they take the first
    positions, so that a prompt's first token has the position ``count``.

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

    def in_front(self, embeddings: torch.Tensor) -> torch.Tensor:
        """[b, T, D] embeddings of words, with the virtual ones before them: [b, count + T, D]."""
        virtual = peft_internals.prompt(self._peft_model, self.prompt_encoder, len(embeddings))
        return torch.cat([virtual.to(embeddings.dtype), embeddings], dim=1)


def virtual_tokens(lm: Any) -> VirtualTokens | None:
    """The virtual tokens of a causal LM that are switched on; None without any."""
    virtual = getattr(lm, "virtual_tokens", None)
    return virtual if virtual is not None and virtual.enabled else None


def num_virtual_tokens(lm: Any) -> int:
    """How many positions of a causal LM virtual tokens take, switched on or not; also of a model
    that isn't loaded yet (:class:`ppocli.models.loading.model_config.ModelFacts`)."""
    if hasattr(lm, "virtual_tokens"):
        return lm.virtual_tokens.count
    return getattr(lm, "num_virtual_tokens", 0)


def trunk_states(lm: Any, batch: SequenceBatch) -> torch.Tensor:
    """[b, T, D] final hidden states of the trunk for the tokens of a batch without an encoder."""
    tokens, virtual = batch.tokens, virtual_tokens(lm)
    if virtual is None:
        packed: dict[str, Any] = {}
        if batch.packing is not None:
            packed = {"position_ids": batch.positions,
                      "attention_mask": placeholder_mask(tokens.device, batch.packing)}
        elif tokens.device.type != "cpu" and getattr(lm, "ppocli_packs", False):
            packed = {"attention_mask": placeholder_mask(tokens.device)}
        return lm.base_model(input_ids=tokens, use_cache=False, **packed).last_hidden_state
    if virtual.in_cache:
        prefix = {cache_name(lm.base_model): virtual.cache(len(tokens))}
        return lm.base_model(input_ids=tokens, use_cache=True, **prefix).last_hidden_state
    embeddings = virtual.in_front(lm.get_input_embeddings()(tokens))
    states = lm.base_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    return states[:, virtual.count:]


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


# The vocabulary -----------------------------------------------------------------------------------
#
# Many models have more rows than their tokenizer has ids: Qwen2.5-7B 152064 for 151665, T5 32128
# for 32100. The others decode to nothing. The policy is the distribution over the tokenizer's ids
# alone, where it is sampled and where its probabilities are computed.

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
    vocabulary: Vocabulary | None = getattr(lm, "ppocli_vocabulary", None)
    return vocabulary or Vocabulary(rows := output_rows(lm), rows)


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
