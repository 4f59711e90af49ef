"""Phase 1: prompts to scored samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch

from ppocli.config.algorithm import kl_estimator
from ppocli.data.batch import PromptBatch
from ppocli.errors import ConfigError, DivergedError
from ppocli.models.decoding_method import Decoding, decoding_of
from ppocli.models.fast.gemm import weights_for_decoding
from ppocli.models.head import HeadWeights
from ppocli.models.passes import (
    PolicyPass,
    ReferencePass,
    decoded_states,
    lay_out_rows,
    score_policy,
    score_reference,
    spread,
    states_of_samples,
)
from ppocli.parallel.stop import StopFlag
from ppocli.ppo.kl import kl_per_token
from ppocli.ppo.noise import ROLLOUT, lengths, uniform
from ppocli.rewards.records import RewardScores
from ppocli.sampling.decode_loop import Generation, generate
from ppocli.sampling.response_text import decode_responses, response_ids
from ppocli.sampling.token_choice import SamplingSpec
from ppocli.storage import faults
from ppocli.tasks.ppo.background_reward import begin
from ppocli.tasks.ppo.records import Rollout
from ppocli.tasks.ppo.rewards_over_ranks import Question, ask, dealt_scores, score
from ppocli.tasks.ppo.rows import in_order, merge_rollouts, take_prompts, take_rows
from ppocli.tasks.ppo.session import EvalSession, Session
from ppocli.train.clock import PhaseClock
from ppocli.zero.oom_retry import fitting
from ppocli.zero.sharded_weights import is_sharded

T = TypeVar("T")
Ready = Callable[[Generation, int], None]
"""is handed responses, and the place of the first among all"""


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Per-token figures of B samples from forward passes; CPU fp32 [B, R]."""

    logprobs: torch.Tensor | None
    values: torch.Tensor | None
    ref_logprobs: torch.Tensor
    kl: torch.Tensor
    frozen_states: list[torch.Tensor | None]
    """[n, D] of each sample, where it was kept: what entered the policy's lowest layer that trains
    """


def sample_responses(session: EvalSession, prompts: PromptBatch, spec: SamplingSpec, stream: int,
                     stop: StopFlag, ready: Ready = lambda *_: None) -> Generation:
    """Generate one response per prompt with the policy. All ranks call it in step.

    Args:
        ready: as of :func:`draw`.

    Raises:
        DivergedError: the policy's probabilities are no longer finite.
        OutOfMemoryError: there is no room for one response.
    """
    session.policy.eval()
    head = session.policy.value_head if session.policy.values_while_decoding else None

    def check(out: Generation) -> None:
        if not bool(torch.isfinite(out.logprobs).all()):
            raise DivergedError("The policy became non-finite: its token probabilities are NaN.",
                                fix="lower ppo.optimizer.lr, raise ppo.init_kl_coef, or use "
                                "hardware.precision=fp32")

    def take(out: Generation, first: int) -> None:
        check(out)
        ready(out, first)

    # in fp32 they are what a forward pass gives; half of the room is for those without padding
    exact = session.from_decode and session.backend.precision == "fp32"
    room = session.frozen_states_bytes // 2 if stream == ROLLOUT and exact else 0
    return draw(session, session.policy.lm, prompts, spec, stream, stop, value_head=head,
                ready=take, most_frozen_bytes=room)


def draw(session: EvalSession, lm: Any, prompts: PromptBatch, spec: SamplingSpec, stream: int,
         stop: StopFlag, value_head: Any = None, ready: Ready = lambda *_: None,
         most_frozen_bytes: int = 0) -> Generation:
    """One response per prompt by a causal LM, with the random numbers of the stream. All ranks call
    it in step.

    Args:
        ready: handed the responses to the next ``chunk_size`` prompts, and the place of the first,
            as soon as these have all ended, once for each. Nothing in it may talk to other ranks.
        most_frozen_bytes: bytes that may be kept of what enters the policy's lowest layer that
            trains, of a whole rollout.

    Raises:
        OutOfMemoryError: there is no room for one response.
        ConfigError: the model is in parts, and decodes whole only.
    """
    tokens = prompts.tokens.shape[1] + spec.max_new_tokens
    width = lm.get_input_embeddings().weight.shape[-1]
    needed = 4 * session.cfg.ppo.num_rollouts * tokens * width
    split = session.policy.split if needed <= most_frozen_bytes else None
    phase = "rollout" if stream == ROLLOUT else "evaluation"
    noise = uniform(session.cfg.seed, stream, prompts.episodes, spec.max_new_tokens)
    limits = None
    if spec.length_range is not None:
        limits = lengths(session.cfg.seed, prompts.episodes, *spec.length_range)

    in_parts = is_sharded(lm)
    if in_parts and decoding_of(lm) is not Decoding.STEPS:
        # such models read weights past the layers that would gather them
        raise ConfigError(f"{type(lm).__name__} is decoded by transformers' generate, which can't "
                          "put weights together layer by layer.",
                          where="hardware.gather_for_generation",
                          fix="set hardware.gather_for_generation=true")
    asked, parts, done = min(session.chunk_size, len(prompts)), [], 0

    def take(out: Generation) -> None:
        nonlocal done
        ready(out, done)
        parts.append(out)
        done += len(out.tokens)

    def work() -> None:
        if done == len(prompts):  # it is begun anew for another rank's sake
            return
        size, rest = session.fits.rows(phase, asked), slice(done, None)

        def poll() -> None:
            faults.point("rollout.token", size)
            stop.check()

        with session.backend.autocast(), weights_for_decoding(session.backend, lm,
                                                                in_parts=in_parts):
            generate(lm, prompts.tokens[rest], prompts.mask[rest], spec, noise[rest],
                     tokenizer=session.tokenizer, start=session.loaded.decoder_start,
                     value_head=value_head, limits=None if limits is None else limits[rest],
                     poll=poll, split=split, at_once=size, chunk=session.chunk_size, ready=take,
                     all_alive=session.backend.ranks.most if in_parts else int)

    fitting(session, phase, asked, tokens, work, in_step=in_parts)
    return Generation.joined(parts)


def decode(session: EvalSession, prompts: PromptBatch, out: Generation) -> list[str]:
    """The responses as text."""
    rows = zip(prompts.tokens, prompts.mask, strict=True)
    # what a decoder says stands alone; what a causal model says continues its prompt
    alone = session.loaded.decoder_start is not None
    prompt_ids = [[] if alone else row[mask].tolist() for row, mask in rows]
    return decode_responses(session.tokenizer, prompt_ids, response_ids(out.tokens, out.mask),
                            session.sampling.stop_sequences)


def score_tokens(session: EvalSession, prompts: PromptBatch, out: Generation, *, phase: str,
                 want_policy: bool, want_values: bool, estimator: str, temperature: float,
                 stop: StopFlag, most_frozen_bytes: int = 0) -> ScoredTokens:
    """Forward passes over B samples: reference logprobs, KL, and the policy's own on demand. All
    ranks call it in step.

    Args:
        phase: of :data:`ppocli.zero.oom_retry.ROWS_OF`.
        want_policy: also compute the policy's logprobs (else the decoded ones serve).
        want_values: also compute the values of the states before each token.
        estimator: of :mod:`ppocli.ppo.kl`, or ``full`` for the KL over the whole vocabulary.
        most_frozen_bytes: bytes that may be kept of what enters the policy's lowest layer that
            trains.

    Raises:
        OutOfMemoryError: there is no room for one sample.
    """
    asked = min(session.forward_rows, len(prompts))
    longest = int((prompts.mask.sum(1) + out.mask.sum(1)).max())
    return fitting(session, phase, asked, longest, lambda: _score_tokens(
        session, prompts, out, session.fits.rows(phase, asked), want_policy, want_values, estimator,
        temperature, stop, most_frozen_bytes), in_step=session.scores_in_step)


@torch.no_grad()
def _score_tokens(session: EvalSession, prompts: PromptBatch, out: Generation, size: int,
                  want_policy: bool, want_values: bool, estimator: str, temperature: float,
                  stop: StopFlag, most_frozen_bytes: int) -> ScoredTokens:
    """As :func:`score_tokens`, ``size`` rows a pass, on this rank."""
    limit = session.cfg.ppo.micro_batch_tokens
    if limit is not None and session.scores_in_step:  # then all ranks make equally many passes
        longest = int((prompts.mask.sum(1) + out.mask.sum(1)).max())
        size = max(1, min(size, limit // session.backend.ranks.most(longest)))
        limit = None
    passes = lay_out_rows(prompts.tokens, prompts.mask, out.tokens, out.mask, size,
                          session.backend.device, session.loaded.decoder_start, pack=session.packs,
                          tokens=limit)
    policy, reference, whole = session.policy, session.reference, estimator == "full"
    # all passes hold what enters the first layer that trains until the reference is run
    width = policy.lm.get_input_embeddings().weight.shape[-1]
    needed = 4 * width * sum(one.batch.tokens.numel() for one in passes)
    kept_at = policy.split if 0 < needed <= most_frozen_bytes else None
    frozen = [None if kept_at is None or out.frozen_states is None else
              decoded_states(out.frozen_states, prompts.mask, one) for one in passes]
    said: list[PolicyPass] = []
    compared: list[ReferencePass] = []
    with session.backend.autocast():
        if want_policy or want_values or whole:
            split = kept_at if reference is None else reference.split or kept_at
            for i, one in enumerate(passes):
                stop.check()
                faults.point("scoring.forward", size)
                said.append(score_policy(policy, one, temperature=temperature, split=split,
                                         want_logprobs=want_policy, want_values=want_values,
                                         keep_hidden=whole))
                frozen[i] = frozen[i] if said[i].frozen_states is None else said[i].frozen_states
        if reference is not None:
            head = HeadWeights.of(policy.lm).as_now()
            with reference.view(policy.lm) as view:
                for i, one in enumerate(passes):
                    stop.check()
                    faults.point("scoring.forward", size)
                    compared.append(score_reference(
                        reference, view, one, head, temperature=temperature,
                        hidden=said[i].hidden if whole else None, frozen_states=frozen[i],
                        split=kept_at if view is policy.lm else None))
                    frozen[i] = compared[i].frozen_states
    shape = out.mask.shape
    logprobs = spread(passes, [one.logprobs for one in said], shape) if want_policy else None
    values = spread(passes, [one.values for one in said], shape) if want_values else None
    sampled = out.logprobs if logprobs is None else logprobs
    ref_logprobs = sampled if reference is None else spread(
        passes, [one.logprobs for one in compared], shape)
    kl = (spread(passes, [one.full_kl for one in compared], shape) if whole and compared else
          torch.zeros(shape) if whole else kl_per_token(sampled, ref_logprobs, estimator))
    return ScoredTokens(logprobs, values, ref_logprobs, kl * out.mask, states_of_samples(
        passes, frozen, len(out.mask), 0 if kept_at is None else most_frozen_bytes))


def _dense_rewards(scores: RewardScores, mask: torch.Tensor) -> torch.Tensor | None:
    if scores.dense is None:
        return None
    dense = torch.zeros(mask.shape)
    dense[mask] = torch.tensor(list(chain.from_iterable(scores.dense)), dtype=torch.float32)
    return dense


@dataclass(frozen=True, slots=True)
class Chunk:
    """One generated chunk; its rows after the first ``own`` only keep the ranks in step."""

    prompts: PromptBatch
    out: Generation
    own: int
    kept: PromptBatch
    """the own rows of ``prompts``"""
    mine: Generation
    """the own rows of ``out``"""
    responses: list[str]


def generate_chunks(session: Session, prompts: PromptBatch, own: int, stream: int, stop: StopFlag,
                    ready: Callable[[Chunk], None] = lambda _: None) -> list[Chunk]:
    """Sample one response to each prompt, the first ``own`` of them for this rank. All ranks call
    it in step.

    In one process the prompts of later chunks take the places of responses that have ended. Several
    ranks generate chunk by chunk: ``ready`` may talk to the others.

    Args:
        ready: shown each chunk as soon as it is there, in their order.
    """
    alone = session.backend.ranks.world == 1
    apart = max(len(prompts), 1) if alone else session.chunk_size
    found: list[Chunk] = []
    for start in range(0, len(prompts), apart):
        stop.meet()
        part = take_prompts(prompts, range(start, min(start + apart, len(prompts))))

        def take(out: Generation, first: int, *, part: PromptBatch = part, start: int = start
                 ) -> None:
            some = take_prompts(part, range(first, first + len(out.tokens)))
            out = out.behind(some.tokens.shape[1])
            count = min(max(own - start - first, 0), len(some))
            kept = some if count == len(some) else take_rows(some, count)
            mine = out if count == len(some) else out.first(count)
            found.append(Chunk(some, out, count, kept, mine, decode(session, kept, mine)))
            if alone:
                ready(found[-1])

        sample_responses(session, part, session.sampling, stream, stop, take)
        if not alone:
            ready(found[-1])
    return found


def measure_chunk(session: Session, chunk: Chunk, stop: StopFlag, *, forward: bool) -> ScoredTokens:
    """The forward passes over a chunk's samples. All ranks call it in step.

    Args:
        forward: also for logprobs and values, in place of those of the decoding pass.
    """
    policy = session.policy
    want_values = policy.value_head is not None and (forward or not policy.values_while_decoding)
    return score_tokens(session, chunk.prompts, chunk.out, phase="scoring", want_policy=forward,
                        want_values=want_values, stop=stop,
                        estimator=kl_estimator(session.cfg.ppo),
                        temperature=session.sampling.temperature,
                        most_frozen_bytes=session.frozen_states_bytes * len(chunk.prompts)
                        // session.cfg.ppo.num_rollouts)


def rollout_of(session: Session, chunk: Chunk, scores: RewardScores, tokens: ScoredTokens
               ) -> Rollout | None:
    """The own rows of a scored and measured chunk; None where it has none."""
    own, mine = chunk.own, chunk.mine
    if own == 0:
        return None
    return Rollout(
        prompts=chunk.kept, response_tokens=mine.tokens, response_mask=mine.mask,
        logprobs=mine.logprobs if tokens.logprobs is None else tokens.logprobs[:own],
        ref_logprobs=tokens.ref_logprobs[:own],
        values=mine.values if tokens.values is None else tokens.values[:own],
        kl=tokens.kl[:own], scores=scores.scores, dense=_dense_rewards(scores, mine.mask),
        valid=torch.tensor(scores.valid), finished=mine.finished,
        has_reference=session.reference is not None, responses=chunk.responses, parts=scores.parts,
        frozen_states=tokens.frozen_states[:own])


def _collect_chunks(session: Session, prompts: PromptBatch, rows: Sequence[int], own: int,
                    stream: int, stop: StopFlag, clock: PhaseClock) -> Iterator[Rollout | None]:
    """A rollout for each chunk of ``rows``, the first ``own`` of which are this rank's.

    A reward that waits for others (``reward.overlap``) scores a chunk while the next one is
    generated. It is asked for one chunk at a time and in their order, either way.
    """
    device, ranks = session.backend.device, session.backend.ranks
    together = session.reward.needs_all_samples
    asides = {"always": True, "never": False}.get(session.cfg.reward.overlap, session.reward.waits)
    if together:  # rank 0 alone has built the reward
        asides = ranks.broadcast(asides)
    asked: list[tuple[Chunk, Question, Callable[[], RewardScores]]] = []

    def ready(chunk: Chunk) -> None:
        question = ask(session, chunk.kept, chunk.mine, chunk.responses, together)
        work: Callable[[], RewardScores] = partial(score, session, question)
        if asides and (question.places is None or ranks.first):
            work = begin(partial(_after, asked[-1][2] if asked else None, work), device, stop.check)
        asked.append((chunk, question, work))

    generate_chunks(session, take_prompts(prompts, rows), own, stream, stop, ready)
    for chunk, question, work in asked:
        clock.mark("rollout")
        tokens = measure_chunk(session, chunk, stop, forward=not session.from_decode) \
            if asides else None
        if tokens is not None:
            clock.mark("scoring")
        scores = question.answer(work, dealt_scores, "reward")
        stop.meet()
        clock.mark("reward")
        if tokens is None:
            tokens = measure_chunk(session, chunk, stop, forward=not session.from_decode)
            clock.mark("scoring")
        yield rollout_of(session, chunk, scores, tokens)


def _after(before: Callable[[], Any] | None, work: Callable[[], T]) -> T:
    """What ``work`` returns, begun once that before it has ended; not at all if that has failed."""
    if before is not None:
        before()
    return work()


def collect_rollout(session: Session, prompts: PromptBatch, stream: int, stop: StopFlag,
                    clock: PhaseClock) -> Rollout:
    """Generate, score and measure all prompts, ``chunk_size`` at a time on every rank.

    Each rank takes its share; the result, the same on all ranks, is the whole rollout in the order
    of the prompts.
    """
    rows, own = session.backend.ranks.share(range(len(prompts)))
    with session.acting() as acting:
        parts = list(_collect_chunks(acting, prompts, rows, own, stream, stop, clock))
    mine = [part for part in parts if part is not None]
    found = session.backend.ranks.gather(merge_rollouts(mine) if mine else None)
    whole = merge_rollouts([part for part in found if part is not None])
    if len(found) == 1:
        return whole
    clock.mark("gather")
    return in_order(whole)
