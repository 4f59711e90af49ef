"""The parts of a rollout: samples of the policy in chunks, forward passes over a chunk, and the
chunks of all ranks as one record."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from ppocli.config.algorithm import corrects, full_kl_in_loss, kl_estimator
from ppocli.data.columns import rows_of
from ppocli.data.prompt_set import PromptBatch
from ppocli.errors import ConfigError, DivergedError
from ppocli.models import passes
from ppocli.models.head import HeadWeights
from ppocli.models.trunk import vocabulary_of
from ppocli.ppo.kl import kl_per_token
from ppocli.ppo.records import Rollout
from ppocli.ppo.session import EvalSession, Session
from ppocli.rewards.reward_records import RewardScores
from ppocli.runs import faults
from ppocli.runs.episode import without_environments
from ppocli.sampling.sampler import GenerationModel, sample_chunks
from ppocli.sampling.samples import Samples, decode_responses
from ppocli.sampling.token_choice import ROLLOUT, SamplingSpec
from ppocli.training.task import StepContext


def whole_rollout(session: Session, context: StepContext, parts: Sequence[Rollout]) -> Rollout:
    """The samples of all ranks, from this rank's, of which there may be none, in the order of their
    episodes. All ranks call it in step.

    Raises:
        ConfigError: ratios to the sampler's logprobs are asked for, and it computes none.
    """
    whole = of_all_ranks(session, parts)
    if (session.cfg.ppo.old_logprobs == "sampler" and not bool(whole.logprobs.any())) or (
            corrects(session.cfg) and whole.gap is None):
        raise ConfigError(f"{type(session.sampler).__name__} says no logprobs of what it samples.",
                          where="ppo.old_logprobs, ppo.importance, rollout.engine",
                          fix="let it compute them, or use ppo.old_logprobs=trainer alone")
    if session.backend.ranks.world > 1:
        context.clock.mark("gather")
    return whole


def of_all_ranks(session: Session, parts: Sequence[Rollout]) -> Rollout:
    """As :func:`whole_rollout`, without its check."""
    shares = session.backend.ranks.gather(Rollout.joined(parts) if parts else None)
    whole = Rollout.joined([part for part in shares if part is not None])
    return whole if len(shares) == 1 else whole.rows(
        sorted(range(len(whole)), key=lambda i: whole.prompts.episodes[i]))


@dataclass(frozen=True, slots=True)
class Chunk:
    """One generated chunk."""

    out: Samples
    """its samples, the last of which may only keep the ranks in step"""
    prompts: PromptBatch
    """of this rank's own samples, as all below"""
    samples: Samples
    responses: list[str]

    def __len__(self) -> int:
        return len(self.responses)


def generate_chunks(session: Session, context: StepContext, prompts: PromptBatch, num_local: int,
                    samples: Samples | None = None) -> Iterator[Chunk]:
    """Sample one response to each prompt, the first ``num_local`` of them for this rank: each chunk
    as soon as it is complete, in their order. All ranks call it in step.

    Args:
        samples: as of :func:`ppocli.ppo.step.collect_rollout`, this rank's.
    """
    start = 0
    made = sample_policy(
        session, context, prompts, session.sampling, ROLLOUT) if samples is None else (
        samples.rows(slice(i, i + session.chunk_size))
        for i in range(0, len(prompts), session.chunk_size))
    with closing(made) as parts:
        for out in parts:
            count = min(max(num_local - start, 0), len(out))
            part = prompts.rows(range(start, start + len(out))).first(count)
            counted = out.first(count)
            yield Chunk(out, part, counted, response_texts(session, part, counted,
                                                           session.sampling))
            start += len(out)


def sample_policy(session: EvalSession, context: StepContext, prompts: PromptBatch,
                  spec: SamplingSpec, stream: int) -> Generator[Samples]:
    """One sample of the policy per prompt, ``chunk_size`` at a time. All ranks call it in step.

    Raises:
        DivergedError: the policy's probabilities are no longer finite.
        OutOfMemoryError: there is no room for one response.
        ConfigError: a sampler of the user's own chose an id without a token.
    """
    policy = session.policy.eval()
    vocabulary = vocabulary_of(policy.lm)
    head = policy.value_head if policy.values_while_decoding else None
    model = GenerationModel(policy.lm, head)
    # in fp32 they are what a forward pass gives; half of the room is for those without padding
    exact = session.from_decode and session.backend.precision == "fp32"
    if stream == ROLLOUT and exact and policy.split is not None:
        tokens = prompts.tokens.shape[1] + spec.max_new_tokens
        width = policy.lm.get_input_embeddings().weight.shape[-1]
        if 4 * session.cfg.ppo.num_rollouts * tokens * width <= session.frozen_states_bytes // 2:
            model = GenerationModel(policy.lm, head, policy.split)
    for out in _chunks(session, context, prompts, spec, stream, model):
        if not bool(torch.isfinite(out.logprobs).all()):
            raise DivergedError("The policy became non-finite: its token probabilities are NaN.",
                                fix="lower ppo.optimizer.lr, raise ppo.init_kl_coef, or use "
                                "hardware.precision=fp32")
        ids = out.sequences.action_tokens[out.mask]
        if bool((absent := vocabulary.lacks(ids)).any()):
            raise ConfigError(f"{type(session.sampler).__name__} sampled id "
                              f"{int(ids[absent][0])}, for which the tokenizer has no token.",
                              where="rollout.engine", fix="sample from the tokenizer's ids alone: "
                              "a model may have more rows than those")
        yield out


def sample_reference(session: EvalSession, context: StepContext, view: Any, prompts: PromptBatch,
                     spec: SamplingSpec, stream: int) -> Samples:
    """One sample of the reference per prompt, with the random numbers of the policy's. All ranks
    call it in step.

    Args:
        view: the reference as a model.
    """
    model = GenerationModel(view, reference=True)
    return Samples.joined(list(_chunks(session, context, prompts, spec, stream, model)))


def _chunks(session: EvalSession, context: StepContext, prompts: PromptBatch, spec: SamplingSpec,
            stream: int, model: GenerationModel) -> Iterator[Samples]:
    return sample_chunks(session.sampler, session.passes, prompts, spec, stream, model,
                         context.stop, phase="rollout" if stream == ROLLOUT else "evaluation",
                         chunk=session.chunk_size)


def response_texts(session: EvalSession, prompts: PromptBatch, out: Samples, spec: SamplingSpec
                   ) -> list[str]:
    """The responses as text, which ``spec`` says where to trim; of episodes the transcripts."""
    if out.episodes is not None:
        return [episode.transcript for episode in out.episodes]
    return decode_responses(session.tokenizer, session.read_before(prompts), out.action_ids, spec)


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of B samples' actions from forward passes; CPU fp32 [B, R]."""

    logprobs: torch.Tensor | None
    values: torch.Tensor | None
    ref_logprobs: torch.Tensor
    kl: torch.Tensor
    frozen_states: list[torch.Tensor | None]
    """[n, D] of each sample, where it was kept: what entered the policy's lowest layer that trains
    """
    ref_states: list[torch.Tensor]
    """as of :class:`Rollout`"""


def measure(session: EvalSession, context: StepContext, out: Samples, *, phase: str,
            **options: Any) -> Measured:
    """Forward passes over B samples as :func:`_measure` makes them. All ranks call it in step.

    Args:
        phase: of :data:`ppocli.training.task.PASSES`.
        options: further arguments of :func:`_measure`.

    Raises:
        OutOfMemoryError: there is no room for one sample.
    """
    rows = min(session.forward_rows, len(out))
    return session.passes.retry(phase, rows, int(out.sequences.spans.max()), lambda: _measure(
        session, context, out, session.passes.limit(phase, rows), **options),
        in_step=session.scores_in_step)


@torch.no_grad()
def _measure(session: EvalSession, context: StepContext, out: Samples, size: int, *,
             want_policy: bool, want_values: bool, estimator: str, temperature: float,
             most_frozen_bytes: int = 0, want_ref_states: bool = False) -> Measured:
    """Reference logprobs, KL, and the policy's own on demand, ``size`` rows per pass, on this rank.

    Args:
        want_policy: also compute the policy's logprobs (else the decoded ones serve).
        want_values: also compute the values of the states before each action.
        estimator: of :mod:`ppocli.ppo.kl`, or ``full`` for the KL over the whole vocabulary.
        most_frozen_bytes: bytes that may be kept of what enters the policy's lowest layer that
            trains.
        want_ref_states: also keep the reference's final states.
    """
    limit = session.cfg.ppo.micro_batch_tokens
    if limit is not None and session.scores_in_step:  # then all ranks make equally many passes
        longest = int(out.sequences.spans.max())
        size = max(1, min(size, limit // session.backend.ranks.most(longest)))
        limit = None
    batches = passes.lay_out_rows(out.sequences, size, session.backend.device, pack=session.packs,
                                  tokens=limit)
    policy, reference, whole = session.policy, session.reference, estimator == "full"
    # all passes hold what enters the first layer that trains until the reference is run
    width = policy.lm.get_input_embeddings().weight.shape[-1]
    needed = 4 * width * sum(one.batch.tokens.numel() for one in batches)
    kept_at = policy.split if 0 < needed <= most_frozen_bytes else None
    frozen = [None if kept_at is None or out.frozen_states is None else
              passes.known_states(out.frozen_states, one.rows, one.batch) for one in batches]
    policy_scores: list[passes.Scored] = []
    reference_scores: list[passes.Scored] = []
    with session.backend.autocast():
        if want_policy or want_values or whole:
            split = kept_at if reference is None else reference.split or kept_at
            for i, one in enumerate(batches):
                context.stop.check()
                faults.point("scoring.forward", size)
                policy_scores.append(passes.score_policy(
                    policy, one, temperature=temperature, split=split, want_logprobs=want_policy,
                    want_values=want_values, keep_hidden=whole))
                if policy_scores[i].frozen_states is not None:
                    frozen[i] = policy_scores[i].frozen_states
        if reference is not None:
            head = HeadWeights.of(policy.lm).as_now()
            with reference.view(policy.lm) as view:
                for i, one in enumerate(batches):
                    context.stop.check()
                    faults.point("scoring.forward", size)
                    reference_scores.append(passes.score_reference(
                        reference, view, one, head, temperature=temperature,
                        hidden=policy_scores[i].states if whole else None, frozen_states=frozen[i],
                        split=kept_at if view is policy.lm else None))
                    frozen[i] = reference_scores[i].frozen_states
    shape = out.mask.shape
    spread = partial(passes.spread, batches, shape=shape)
    logprobs = spread([one.logprobs for one in policy_scores]) if want_policy else None
    values = spread([one.values for one in policy_scores]) if want_values else None
    sampled = out.logprobs if logprobs is None else logprobs
    ref_logprobs = sampled if reference is None else spread(
        [one.logprobs for one in reference_scores])
    kl = (spread([one.full_kl for one in reference_scores]) if whole and reference_scores else
          torch.zeros(shape) if whole else kl_per_token(sampled, ref_logprobs, estimator))
    return Measured(logprobs, values, ref_logprobs, kl * out.mask, passes.states_of_samples(
        batches, frozen, len(out.mask), 0 if kept_at is None else most_frozen_bytes),
        passes.states_by_sample(batches, [one.states for one in reference_scores], out.mask.sum(1))
        if want_ref_states and reference_scores else [])


def measure_chunk(session: Session, context: StepContext, chunk: Chunk, *, forward: bool
                  ) -> Measured:
    """The forward passes over a chunk's samples. All ranks call it in step.

    Args:
        forward: also for values, and for logprobs unless ratios are to be to the sampler's own, in
            place of those of the sampler.
    """
    policy, in_loss = session.policy, full_kl_in_loss(session.cfg.ppo)
    want_values = policy.value_head is not None and (forward or not policy.values_while_decoding)
    want_policy = forward and session.cfg.ppo.old_logprobs == "trainer"
    return measure(session, context, chunk.out, phase="scoring", want_policy=want_policy,
                   want_values=want_values, want_ref_states=in_loss,
                   estimator="k1" if in_loss else kl_estimator(session.cfg.ppo),
                   temperature=session.sampling.temperature,
                   most_frozen_bytes=session.frozen_states_bytes * len(chunk.out)
                   // session.cfg.ppo.num_rollouts)


def rollout_of(session: Session, chunk: Chunk, scores: RewardScores, measured: Measured) -> Rollout:
    """A scored and measured chunk as a rollout, of this rank's own samples."""
    samples, figures = chunk.samples, rows_of(measured, slice(len(chunk)))
    return Rollout(prompts=chunk.prompts, sequences=samples.sequences,
                   logprobs=samples.logprobs if figures.logprobs is None else figures.logprobs,
                   ref_logprobs=figures.ref_logprobs,
                   values=samples.values if figures.values is None else figures.values,
                   kl=figures.kl,
                   scores=scores.scores, dense=_dense_rewards(scores, samples.mask),
                   valid=torch.tensor(scores.valid), finished=samples.finished,
                   has_reference=session.reference is not None,
                   responses=chunk.responses, parts=scores.parts, logs=scores.logs,
                   frozen_states=figures.frozen_states, ref_states=figures.ref_states,
                   sampler_logprobs=None if figures.logprobs is None else samples.logprobs,
                   episodes=without_environments(samples.episodes) if samples.episodes else [])


def _dense_rewards(scores: RewardScores, mask: torch.Tensor) -> torch.Tensor | None:
    if scores.dense is None:
        return None
    dense = torch.zeros(mask.shape)
    dense[mask] = torch.tensor(list(chain.from_iterable(scores.dense)), dtype=torch.float32)
    return dense
