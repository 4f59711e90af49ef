"""The interface between a task and what generates samples for it.

A task asks for samples and doesn't know how they are made: by our decode loop, by transformers'
``generate``, or by a sampler of the user's own (``rollout.engine=my_sampler.py:Sampler``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from ppocli.config import schema, tasks
from ppocli.data.data_set import PromptBatch, padded_left
from ppocli.distributed.backend import Backend, PassRows, to_host
from ppocli.distributed.onednn import TORCH
from ppocli.distributed.ranks import StopFlag, is_out_of_memory
from ppocli.errors import ConfigError
from ppocli.models import trunk
from ppocli.models.kernels import packed_weights
from ppocli.models.loading.language_model import DTYPES, LoadedLM
from ppocli.models.policy import Policy
from ppocli.models.sharded_weights import gathered_policy, head_parameters, held, is_sharded
from ppocli.models.transformers_internals import allows_gaps, caches_all_keys
from ppocli.runs import faults
from ppocli.sampling import token_graph
from ppocli.sampling.conversation import Conversation, KeptKeys
from ppocli.sampling.decode_state import CHECK_EVERY, SHRINK_AT, Decoder, DecodeState, LiveRows
from ppocli.sampling.samples import (
    Generation,
    Samples,
    SamplingSpec,
    TokenRows,
    lengths,
    single_turn,
    uniform,
)
from ppocli.sampling.transformers_generate import decode_by_transformers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GenerationModel:
    """The model that is sampled from."""

    lm: Any
    value_head: Any = None
    """computes the values, if the sampler supports it"""
    split: trunk.SplitPoint | None = None
    """the layer whose inputs to keep (:attr:`Samples.frozen_states`), if the sampler supports it"""


class Sampler(Protocol):
    """Makes samples. One is built for a run, and all ranks call it in step."""

    repeatable: bool
    """whether the same requests to the same weights give the same tokens"""
    logprobs_match: bool
    """whether its logprobs equal those of a forward pass over the finished sample; if not, they are
    used as old logprobs only with ``ppo.logprobs_from=decode`` or ``ppo.old_logprobs=sampler``"""

    def acting(self, policy: Policy) -> AbstractContextManager[Policy]:
        """A context with the policy as it runs outside of training; spans generation and scoring.
        Sharded weights are gathered here, and a sampler with its own copy of the weights updates it
        here. All ranks enter and leave in step."""

    def sample(self, prompts: PromptBatch, spec: SamplingSpec, stream: int, model: GenerationModel,
               stop: StopFlag, *, at_once: int, chunk: int) -> Iterator[Samples]:
        """Generate one sample per prompt. Yields them ``chunk`` at a time in the order of the
        prompts, as soon as a chunk is complete.

        Args:
            stream: of :mod:`ppocli.sampling.samples`; with a prompt's number it decides random
            numbers.
            at_once: maximum number of samples generated together.

        Raises:
            StopRequested: between two tokens.
            RuntimeError: torch's, out of memory; samples that were not yielded are requested again
                with a smaller ``at_once``.
        """

    def converse(self, contexts: TokenRows, episodes: Sequence[int], spec: SamplingSpec,
                 stream: int, model: GenerationModel, stop: StopFlag
                 ) -> AbstractContextManager[Conversation]:
        """Contexts that are continued turn by turn (:mod:`ppocli.sampling.episode_sampler`).

        Args:
            contexts: [N] ids to begin with, behind which more may follow in the first turn.
            episodes: [N] numbers of the samples.

        Raises:
            ConfigError: it can't continue contexts.
        """


class BegunSamples(Protocol):
    """Samples under way."""

    def take(self, rows: slice, poll: Callable[[], None]) -> Samples:
        """Those of these rows, once they are complete.

        Args:
            poll: called every now and then; may raise to stop.

        Raises:
            SamplerError: nothing is left to make them.
        """


    def settle(self) -> None:
        """Wait until nothing works on them; raises as :meth:`take`."""


class AheadSampler(Sampler, Protocol):
    """One that samples elsewhere, so that the samples of the next step can be begun."""

    ahead: BegunSamples | None
    """what the next weights wait for"""

    def begin(self, prompts: PromptBatch, spec: SamplingSpec, stream: int, *, ahead: bool = False
              ) -> BegunSamples:
        """Have one sample per prompt made with the present weights.

        Args:
            ahead: they are taken later: the next weights wait for them.
        """

    def turns(self, episodes: Sequence[int], spec: SamplingSpec, stream: int,
              poll: Callable[[], None]) -> Conversation:
        """What is said in the turns of these samples, in any thread, as long as the next weights
        wait for it.

        Args:
            poll: called every now and then; may raise to stop.
        """


@dataclass(frozen=True, slots=True)
class SamplerSetup:
    """What a sampler is built from: ``engine(setup, **rollout.kwargs)``."""

    cfg: schema.TrainConfig
    backend: Backend
    tokenizer: Any
    loaded: LoadedLM
    """the policy's model as it was loaded"""


def check_stop(stop: StopFlag, rows: int) -> None:
    """Called before every token of so many rows; raises where a stop was requested."""
    faults.point("rollout.token", rows)
    stop.check()


class DecodeSampler:
    """Our own decode loop, or transformers' for models that our loop can't decode. Random numbers
    come from :func:`ppocli.sampling.samples.uniform`, so that a sample doesn't depend on the
    chunk size, the number of ranks or the order in which rows end."""

    repeatable = True

    def __init__(self, setup: SamplerSetup) -> None:
        self.setup = setup
        # what a model keeps by itself was tried on short rows, and may be wrong for longer ones:
        # the indexer's cache of DeepSeek-V4 mixes rows up once it has more than it may look at
        self.logprobs_match = (tasks.exact_when_decoded(setup.cfg) and trunk.decoding_of(
            setup.loaded.lm) is not trunk.Decoding.LIBRARY)
        # a reward that computes in a thread meanwhile would break the recording of CUDA graphs: it
        # may wait for the device, or draw random numbers there
        self.records = (setup.backend.device.type in token_graph.DEVICES
                        and setup.cfg.hardware.cuda_graphs and setup.cfg.reward.overlap != "always")

    def acting(self, policy: Policy) -> AbstractContextManager[Policy]:
        """As :class:`Sampler`."""
        return nullcontext(policy) if self.setup.backend.zero_stage < 3 else self._gathered(policy)

    @contextmanager
    def _gathered(self, policy: Policy) -> Iterator[Policy]:
        """As :meth:`acting`, under ZeRO 3: all weights are put together; or, without
        ``hardware.gather_for_generation``, those of the heads, and passes gather the layers one by
        one."""
        if tasks.whole_while_acting(self.setup.cfg):
            with gathered_policy(policy) as whole:
                yield whole
            return
        head = policy.value_head
        with held(head_parameters(policy.lm) + list(head.parameters() if head else [])):
            yield policy

    def sample(self, prompts: PromptBatch, spec: SamplingSpec, stream: int, model: GenerationModel,
               stop: StopFlag, *, at_once: int, chunk: int) -> Iterator[Samples]:
        """As :class:`Sampler`. A ConfigError for a model in parts that decodes whole only."""
        setup, lm, limits = self.setup, model.lm, None
        seed, backend, start = setup.cfg.seed, setup.backend, setup.loaded.decoder_start
        in_parts = backend.zero_stage == 3 and is_sharded(lm)
        if in_parts:
            _check_parts(lm)
        if spec.length_range is not None:
            limits = lengths(seed, prompts.episodes, *spec.length_range)
        decoder = Decoder(lm, spec, setup.tokenizer, start, model.value_head, model.split,
                          partial(check_stop, stop, at_once), records=self.records,
                          all_alive=backend.ranks.most if in_parts else int)
        noise = uniform(seed, stream, prompts.episodes, spec.max_new_tokens)
        parts = decode(decoder, prompts.tokens, prompts.mask, noise, limits=limits,
                       at_once=at_once, chunk=chunk)
        with nullcontext() if in_parts or backend.products == TORCH else packed_weights(
                lm, DTYPES[backend.precision]):
            done = 0
            for out in stepped(parts, backend.autocast):
                rows = slice(done, done + len(out.tokens))
                yield single_turn(prompts.tokens[rows], prompts.mask[rows], out, start)
                done = rows.stop

    @contextmanager
    def converse(self, contexts: TokenRows, episodes: Sequence[int], spec: SamplingSpec,
                 stream: int, model: GenerationModel, stop: StopFlag) -> Iterator[Conversation]:
        """As :class:`Sampler`."""
        setup, lm = self.setup, model.lm
        decoder = Decoder(lm, spec, setup.tokenizer, None, model.value_head,
                          poll=partial(check_stop, stop, len(contexts)), records=self.records)
        noise = uniform(setup.cfg.seed, stream, episodes, setup.cfg.env.max_tokens)
        with packed_weights(lm, DTYPES[setup.backend.precision]):
            keeps = (trunk.decoding_of(lm) is trunk.Decoding.STEPS and allows_gaps(lm)
                     and not spec.looks_back)
            yield (KeptKeys(decoder, contexts, noise, setup.backend.autocast).speak if keeps else
                   decoded_turns(decoder, noise, setup.backend.autocast))


@torch.no_grad()
def decode(decoder: Decoder, prompt_tokens: torch.Tensor, prompt_mask: torch.Tensor, uniform: Any,
           *, limits: Any = None, at_once: int | None = None, chunk: int | None = None
           ) -> Iterator[Generation]:
    """Sample one response per prompt from arguments as of :class:`DecodeState`, by our own loop or
    transformers', whichever is right for the model (:func:`ppocli.sampling.decoding.try_decoding`);
    at most ``at_once`` rows are decoded together. Yields the responses to the next ``chunk``
    prompts (default: all), each R = its longest (at least 1), as soon as these have all ended,
    while later ones are still decoded. Our loop drops rows that have ended, and the next prompts
    take their places where the model can do that."""
    lm, count = decoder.lm, len(prompt_tokens)
    at_once, chunk = min(at_once or count, count), chunk or count
    if (method := trunk.decoding_of(lm)) is not trunk.Decoding.STEPS:
        yield from decode_by_transformers(
            decoder, prompt_tokens, prompt_mask, uniform, limits=limits, at_once=at_once,
            chunk=chunk, cached=method is trunk.Decoding.LIBRARY)
        return
    state = DecodeState(decoder, prompt_tokens, prompt_mask, uniform, limits)
    # keys and values of rows under way are moved to the right then, behind padding: not with an
    # encoder, nor where a layer keeps something else
    refills = (at_once < count and decoder.all_alive is int and decoder.start is None
               and caches_all_keys(lm))
    check_every = 1 if lm.base_model.device.type == "cpu" else CHECK_EVERY
    graphs = token_graph.Feeding(state) if decoder.records else None
    live: LiveRows | None = None
    started = passes = handed = 0

    while live is not None or started < count:
        if live is None or (refills and started < count and len(live.rows) < at_once):
            if graphs is not None:
                graphs.settle()
            free = at_once if live is None else at_once - len(live.rows)
            fresh = state.first_rows(range(started, min(started + free, count)), prompt_tokens,
                                     prompt_mask)
            started += len(fresh.rows)
            state.token(fresh)
            live = fresh if live is None else live.take_in(fresh)
        elif graphs is not None:
            graphs.token(live, state.steps - live.youngest)
        else:
            state.token(live)
        passes += 1
        if passes % check_every and live.youngest < state.steps:
            continue
        rows, at, done = to_host(live.rows, live.at, live.done)
        remaining = int((~done).sum())
        ended = int(rows[~done].min()) if count > chunk and remaining else 0
        drops = remaining <= SHRINK_AT * len(rows) and len(rows) > 1
        if decoder.all_alive(remaining) == 0:
            live, ended = None, started
        if graphs is not None and (live is None or drops or min(handed + chunk, count) <= ended):
            graphs.settle()  # whoever takes a chunk leaves the autocast context meanwhile
        if live is not None and drops:
            live.drop_done(done, at)
        while handed < count and (end := min(handed + chunk, count)) <= ended:
            yield state.generation(slice(handed, end))
            handed = end


def _check_parts(lm: Any) -> None:
    """Refuse a model in parts that is not decoded by our loop: it reads weights past the layers
    that would gather them."""
    if trunk.decoding_of(lm) is not trunk.Decoding.STEPS:
        raise ConfigError(f"{type(lm).__name__} is decoded by transformers' generate, which "
                          "can't put weights together layer by layer.",
                          where="hardware.gather_for_generation",
                          fix="set hardware.gather_for_generation=true")


def decoded_turns(decoder: Decoder, noise: np.ndarray,
                  context: Callable[[], AbstractContextManager[Any]]) -> Conversation:
    """Reads each context anew in every turn, by any loop.

    Args:
        noise: [N, most tokens] as :func:`decode`; those of a sample are
            used one after another, whichever turn a token is of.
        context: in which a turn is computed.
    """
    token_counts = [0] * len(noise)

    def answer(rows: Sequence[int], contexts: TokenRows, limits: Sequence[int]) -> Generation:
        tokens, mask = padded_left(contexts)
        turn_noise = np.full((len(rows), max(limits)), 0.5)
        for i, row in enumerate(rows):
            row_noise = noise[row, token_counts[row]:][:limits[i]]
            turn_noise[i, :len(row_noise)] = row_noise
        with context():
            out, = decode(decoder, tokens, mask, turn_noise, limits=list(limits))
        for row, ids in zip(rows, out.ids, strict=True):
            token_counts[row] += len(ids)
        return out

    return answer


def stepped(parts: Iterator[T], context: Callable[[], AbstractContextManager[Any]]) -> Iterator[T]:
    """The items of ``parts``, each computed within the context, and used outside of it."""
    while True:
        with context():
            part = next(parts, None)
        if part is None:
            return
        yield part


def _chunk_by_chunk(sampler: Sampler, passes: PassRows, prompts: PromptBatch, spec: SamplingSpec,
                    stream: int, model: GenerationModel, stop: StopFlag, *, phase: str, chunk: int
                    ) -> Iterator[Samples]:
    """As :func:`sample_chunks`, of several ranks."""
    in_step, tokens = is_sharded(model.lm), prompts.tokens.shape[1] + spec.max_new_tokens
    for start in range(0, len(prompts), chunk):
        stop.meet()
        part = prompts.rows(range(start, min(start + chunk, len(prompts))))

        def work(part: PromptBatch = part) -> Samples:
            made, = sampler.sample(part, spec, stream, model, stop, chunk=len(part),
                                   at_once=passes.limit(phase, len(part)))
            return made

        yield passes.retry(phase, len(part), tokens, work, in_step=in_step)


def sample_chunks(sampler: Sampler, passes: PassRows, prompts: PromptBatch, spec: SamplingSpec,
                  stream: int, model: GenerationModel, stop: StopFlag, *, phase: str, chunk: int
                  ) -> Iterator[Samples]:
    """One sample per prompt, ``chunk`` at a time and in their order. Where memory runs out in the
    phase, what isn't complete is begun anew with half the rows; an OutOfMemoryError where that is
    one. In one process the prompts of later chunks take the places of responses that have ended;
    several generate chunk by chunk: whoever takes one may talk to the others."""
    if passes.backend.ranks.world > 1:
        yield from _chunk_by_chunk(sampler, passes, prompts, spec, stream, model, stop, phase=phase,
                                   chunk=chunk)
        return
    most, tokens, done = min(chunk, len(prompts)), prompts.tokens.shape[1] + spec.max_new_tokens, 0
    stop.meet()
    while done < len(prompts):
        rest = prompts if done == 0 else prompts.rows(range(done, len(prompts)))
        rows = passes.limit(phase, most)
        try:
            for samples in sampler.sample(rest, spec, stream, model, stop, at_once=rows,
                                          chunk=chunk):
                yield samples
                done += len(samples)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        if done < len(prompts):  # out of the handler: the exception would keep a pass's tensors
            passes.shrink(phase, rows, tokens)
