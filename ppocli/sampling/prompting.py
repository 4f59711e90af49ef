"""Texts in, texts out: generation outside of training."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ppocli.config.text import counted
from ppocli.data.data_set import padded_left
from ppocli.data.prompt_set import token_ids_of, tokens_around
from ppocli.errors import ConfigError, DivergedError
from ppocli.models.loading.model_config import max_positions
from ppocli.models.trunk import has_encoder
from ppocli.sampling.decode_state import Decoder
from ppocli.sampling.sampler import decode
from ppocli.sampling.samples import USER, SamplingSpec, TokenRows, decode_responses, uniform

BATCH = 64
"""samples decoded together"""
SAMPLES_APART = 2**32
"""sample k of prompt i has the number ``i + k * SAMPLES_APART`` in the stream of random numbers: it
depends neither on how many prompts nor on how many samples are asked for"""
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled response. Made by :func:`answer_prompts`, read by whoever shows or scores it."""

    prompt: int
    """number of its prompt, from 0"""
    sample: int
    """number among the responses to that prompt, from 0"""
    text: str
    """without special tokens, trimmed at a stop sequence"""
    ids: list[int]
    """the sampled ids, through the one that ended the response"""
    finished: bool
    """whether a stop token or stop sequence ended it"""


class TextStream:
    """Turns a growing response into pieces of text that never have to be taken back.

    Held back, until more tokens or the end decide: a character of which only some bytes are there,
    what may become a stop sequence, and spaces at the end, which some tokenizers take off again
    before punctuation. The pieces together are the response's text.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], spec: SamplingSpec) -> None:
        self._tokenizer, self._prompt_ids, self._spec = tokenizer, prompt_ids, spec
        self.shown = ""
        """all that was handed out"""

    def push(self, ids: Sequence[int]) -> str:
        """What is certain to follow, given the response's first ``ids``."""
        text, = decode_responses(self._tokenizer, [self._prompt_ids], [ids], self._spec)
        return self._hand_out(_certain(text, self._spec.stop_sequences))

    def close(self, text: str) -> str:
        """The rest, given the whole text. Where the tokenizer has changed its mind about what was
        handed out already, the whole text on a line of its own."""
        if not text.startswith(self.shown):
            self.shown = text
            return "\n" + text
        return self._hand_out(text)

    def _hand_out(self, text: str) -> str:
        if not text.startswith(self.shown):
            return ""
        piece, self.shown = text[len(self.shown):], text
        return piece


def _certain(text: str, stops: Sequence[str]) -> str:
    text = text.rstrip(_UNKNOWN)
    held = max((length for stop in stops for length in range(1, len(stop))
                if text.endswith(stop[:length])), default=0)
    return text[:len(text) - held].rstrip()


def prompt_ids(tokenizer: Any, texts: Sequence[str], *, rendered: bool = False, whole: bool = False
               ) -> list[list[int]]:
    """The tokens of each prompt, ready to be continued or, if ``whole``, for an encoder.

    Args:
        rendered: the texts are a chat template's output, which has all its special tokens written
            out; else the tokenizer adds those that stand in front of a text (BOS).

    Raises:
        ConfigError: a prompt without any token.
        InputError: the tokenizer fails on a text.
    """
    rows = []
    front, behind = ([], []) if rendered else tokens_around(tokenizer)
    for text, body in zip(texts, token_ids_of(list(texts), tokenizer), strict=True):
        # some tokenizers close a text with EOS; a prompt is to be continued
        ids = [*front, *body, *(behind if whole else [])]
        if not ids:
            raise ConfigError(f"The prompt {text!r} has no tokens.", fix="give some text")
        rows.append(ids)
    return rows


def check_lengths(lm: Any, prompts: TokenRows, spec: SamplingSpec) -> None:
    """Refuse prompts that leave no room for a whole response.

    Raises:
        ConfigError: names the first of them.
    """
    limit = max_positions(lm)
    for number, ids in enumerate(prompts, start=1):
        lengths = len(ids), spec.max_new_tokens
        # prompt and response have positions of their own beside an encoder
        positions = max(lengths) if has_encoder(lm) else sum(lengths)
        if limit is not None and positions > limit:
            prompt = "The prompt" if len(prompts) == 1 else f"Prompt {number}"
            raise ConfigError(f"{prompt} has {counted(len(ids), 'token')}; with "
                              f"{spec.max_new_tokens} new ones they exceed the model's {limit} "
                              "positions.", fix="shorten the prompt or lower max_new_tokens")


def _show_piece(stream: TextStream, show: Callable[[str], None], tokens: torch.Tensor,
                mask: torch.Tensor) -> None:
    """As :attr:`Decoder.watch`: show what is certain of the first response."""
    if piece := stream.push(tokens[0][mask[0]].tolist()):
        show(piece)


def answer_prompts(decoder: Decoder, prompts: TokenRows, *, seed: int, num_samples: int = 1,
                   first: int = 0, batch: int = BATCH, show: Callable[[str], None] | None = None,
                   servers: Any = None) -> Iterator[list[Answer]]:
    """Sample responses, a batch at a time, all those to one prompt before those to the next.

    Args:
        decoder: with a tokenizer.
        prompts: P lists of token ids, checked by :func:`check_lengths`.
        num_samples: responses to each prompt.
        first: number of the first prompt, for the random numbers.
        batch: samples decoded together.
        show: handed the text of a single response piece by piece, as it is certain; as a whole
            where servers sample it.
        servers: the :class:`ppocli.sampling.vllm.vllm_sampler.VllmSampler` that samples in place of
            our own loop, while it acts.

    Raises:
        DivergedError: the model's probabilities are not finite.
        SamplerError: a server is lost.
    """
    tokenizer, spec, total = decoder.tokenizer, decoder.spec, len(prompts) * num_samples
    for done in range(0, total, batch):
        places = [divmod(n, num_samples) for n in range(done, min(done + batch, total))]
        rows = [list(prompts[i]) for i, _ in places]
        tokens, mask = padded_left(rows, tokenizer.pad_token_id)
        numbers = [first + i + k * SAMPLES_APART for i, k in places]
        before = rows if decoder.start is None else [[]] * len(rows)
        stream, watch = TextStream(tokenizer, before[0], spec), None
        if show is not None:
            watch = partial(_show_piece, stream, show)

        if servers is not None:
            out = servers.answer(rows, spec, seed, USER, numbers, decoder.poll)
        else:
            out, = decode(replace(decoder, watch=watch), tokens, mask,
                          uniform(seed, USER, numbers, spec.max_new_tokens))
        if not bool(torch.isfinite(out.logprobs).all()):
            raise DivergedError("The model's token probabilities are not finite.",
                                fix="its weights are damaged, or diverged in training: choose "
                                "another checkpoint")
        texts = decode_responses(tokenizer, before, out.ids, spec)
        if show is not None:
            show(stream.close(texts[0]))
        yield [Answer(i, k, text, ids, ended) for (i, k), text, ids, ended in
               zip(places, texts, out.ids, out.finished.tolist(), strict=True)]
