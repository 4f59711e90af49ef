"""The parts of a rollout: samples of the policy in chunks, forward passes over a chunk, and the
chunks of all ranks as one record."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ppocli.config.algorithm import full_kl_in_loss, kl_estimator
from ppocli.data.columns import rows_of
from ppocli.data.prompt_set import PromptBatch
from ppocli.errors import ConfigError, DivergedError
from ppocli.models import passes
from ppocli.models.head import HeadWeights
from ppocli.models.policy import Policy
from ppocli.models.trunk import vocabulary_of
from ppocli.ppo.records import Rollout, RolloutExtras
from ppocli.ppo.session import EvalSession, Session
from ppocli.ppo.shaping import kl_per_token
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
        ConfigError: ratios to the sampler's logprobs are needed, and it computes none.
    """
    whole = of_all_ranks(session, parts)
    if (session.cfg.ppo.old_logprobs == "sampler" and not bool(whole.logprobs.any())) or (
            session.corrects and whole.gap is None):
        raise ConfigError(f"{type(session.sampler).__name__} returns no logprobs of its samples.",
                          where="ppo.old_logprobs, ppo.importance, rollout.engine",
                          fix="let it compute them, or use ppo.old_logprobs=trainer alone")
    if session.backend.ranks.world > 1:
        context.clock.mark("gather")
    return whole


def of_all_ranks(session: Session, parts: Sequence[Rollout]) -> Rollout:
    """As :func:`whole_rollout`, without its check."""
    shares = session.backend.ranks.gather(Rollout.joined(parts) if parts else None)
    if len(shares) == 1 and shares[0] is not None:
        return shares[0]
    whole = Rollout.joined([part for part in shares if part is not None])
    return whole.rows(sorted(range(len(whole)), key=whole.prompts.episodes.__getitem__))


@dataclass(frozen=True, slots=True)
class Chunk:
    """One generated chunk."""

    out: Samples
    """its samples, the last of which may only keep the ranks in step"""
    prompts: PromptBatch
    """of this rank's own samples, as all below"""
    samples: Samples
    responses: list[str]


def generate_chunks(session: Session, context: StepContext, policy: Policy, spec: SamplingSpec,
                    prompts: PromptBatch, num_local: int, samples: Samples | None = None,
                    size: int = 0) -> Iterator[Chunk]:
    """Sample one response to each prompt, the first ``num_local`` of them for this rank: each chunk
    as soon as it is complete, in their order. All ranks call it in step.

    Args:
        policy: as the sampler's ``acting`` yields it.
        samples: of an earlier policy, in place of new ones.
        size: prompts at a time; 0: the session's.
    """
    start, size = 0, size or session.chunk_size
    made = sample_policy(session, context, policy, prompts, spec, ROLLOUT, size) \
        if samples is None else (samples.rows(slice(i, i + size))
                                 for i in range(0, len(prompts), size))
    with closing(made) as parts:
        for out in parts:
            count = min(max(num_local - start, 0), len(out))
            part = prompts.rows(range(start, start + len(out))).first(count)
            start += len(out)
            counted = out.first(count)
            yield Chunk(out, part, counted, response_texts(session, part, counted, spec))


def sample_policy(session: EvalSession, context: StepContext, policy: Policy, prompts: PromptBatch,
                  spec: SamplingSpec, stream: int, size: int = 0) -> Generator[Samples]:
    """One sample of the policy per prompt, ``size`` (by default ``chunk_size``) at a time. All
    ranks call it in step.

    Raises:
        DivergedError: the policy's probabilities are no longer finite.
        OutOfMemoryError: there is no room for one response.
        ConfigError: a sampler of the user's own chose an id without a token.
    """
    lm, vocabulary = policy.eval().lm, vocabulary_of(policy.lm)
    head = policy.value_head if policy.values_while_decoding else None
    model = GenerationModel(lm, head)
    # in fp32 they are what a forward pass gives; half of the room is for those without padding
    exact = session.from_decode and session.backend.precision == "fp32"
    if stream == ROLLOUT and exact and policy.split is not None:
        tokens = prompts.tokens.shape[1] + spec.max_new_tokens
        width = lm.get_input_embeddings().weight.shape[-1]
        if 4 * session.cfg.ppo.num_rollouts * tokens * width <= session.frozen_states_bytes // 2:
            model = GenerationModel(lm, head, policy.split)
    for out in sample_chunks(session.sampler, session.passes, prompts, spec, stream, model,
                             context.stop, phase="rollout" if stream == ROLLOUT else "evaluation",
                             chunk=size or session.chunk_size):
        if not bool(torch.isfinite(out.logprobs).all()):
            raise DivergedError("The policy became non-finite: its token probabilities are NaN.",
                                fix="lower ppo.optimizer.lr, raise ppo.init_kl_coef, or use "
                                "hardware.precision=fp32")
        ids = out.sequences.action_tokens[out.sequences.mask]
        if bool((absent := vocabulary.lacks(ids)).any()):
            raise ConfigError(f"{type(session.sampler).__name__} sampled id "
                              f"{int(ids[absent][0])}, for which the tokenizer has no token.",
                              where="rollout.engine", fix="sample from the tokenizer's ids alone: "
                              "a model may have more rows than those")
        yield out


def response_texts(session: EvalSession, prompts: PromptBatch, out: Samples, spec: SamplingSpec
                   ) -> list[str]:
    """The responses as text, trimmed as ``spec`` has it; of episodes the transcripts."""
    if out.episodes is not None:
        return [episode.transcript for episode in out.episodes]
    return decode_responses(session.tokenizer, session.read_before(prompts), out.action_ids, spec)


def measure(session: EvalSession, context: StepContext, policy: Policy, out: Samples, *,
            phase: str, **options: Any) -> dict[str, Any]:
    """Forward passes over B samples as :func:`_measure` makes them. All ranks call it in step.

    Args:
        policy: as the sampler's ``acting`` yields it.
        phase: of :data:`ppocli.training.task.PASSES`.
        options: further arguments of :func:`_measure`.

    Raises:
        OutOfMemoryError: there is no room for one sample.
    """
    rows = min(session.forward_rows, len(out))

    def work() -> dict[str, Any]:
        return _measure(session, context, policy, out, session.passes.limit(phase, rows), **options)

    return session.passes.retry(phase, rows, int(out.sequences.spans.max()), work,
                                in_step=session.scores_in_step)


@torch.no_grad()
def _measure(session: EvalSession, context: StepContext, policy: Policy, out: Samples, size: int,
             *, want_policy: bool, want_values: bool, estimator: str, temperature: float,
             most_frozen_bytes: int = 0, want_ref_states: bool = False) -> dict[str, Any]:
    """Reference logprobs, KL, and the policy's own on demand, ``size`` rows per pass, on this rank.

    Args:
        want_policy: also compute the policy's logprobs (else the decoded ones serve).
        want_values: also compute the values of the states before each action.
        estimator: of :mod:`ppocli.ppo.shaping`, or ``full`` for the KL over the whole vocabulary.
        most_frozen_bytes: bytes that may be kept of what enters the policy's lowest layer that
            trains.
        want_ref_states: also keep the reference's final states.

    Returns:
        by the names of :class:`Rollout`, CPU fp32 [B, R]: ``logprobs`` and ``values`` or None,
        ``ref_logprobs``, ``kl``; and ``frozen_states`` and ``ref_states`` as of
        :class:`RolloutExtras`.
    """
    limit, mask = session.cfg.ppo.micro_batch_tokens, out.sequences.mask
    if limit is not None and session.scores_in_step:  # then all ranks make equally many passes
        longest = int(out.sequences.spans.max())
        size = max(1, min(size, limit // session.backend.ranks.most(longest)))
        limit = None
    batches = passes.lay_out_rows(out.sequences, size, session.backend.device, pack=session.packs,
                                  tokens=limit)
    reference, whole = session.reference, estimator == "full"
    frozen: list[torch.Tensor | None] = [None] * len(batches)
    kept_at = policy.split if most_frozen_bytes else None
    if kept_at is not None:
        # all passes hold what enters the first layer that trains until the reference is run
        width = policy.lm.get_input_embeddings().weight.shape[-1]
        needed = 4 * width * sum(one.batch.tokens.numel() for one in batches)
        kept_at = kept_at if needed <= most_frozen_bytes else None
    if kept_at is not None and out.frozen_states is not None:
        frozen = [passes.known_states(out.frozen_states, one.rows, one.batch) for one in batches]
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

    def spread(scores: list[passes.Scored], name: str) -> torch.Tensor:
        return passes.spread(batches, [getattr(one, name) for one in scores], shape=mask.shape)

    logprobs = spread(policy_scores, "logprobs") if want_policy else None
    sampled = out.logprobs if logprobs is None else logprobs
    ref_logprobs = sampled if reference is None else spread(reference_scores, "logprobs")
    kl = kl_per_token(sampled, ref_logprobs, estimator) if not whole else (
        torch.zeros(mask.shape) if reference is None else spread(reference_scores, "full_kl"))
    return {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "kl": kl * mask,
            "values": spread(policy_scores, "values") if want_values else None,
            "frozen_states": passes.states_of_samples(
                batches, frozen, len(mask), 0 if kept_at is None else most_frozen_bytes),
            "ref_states": passes.states_by_sample(
                batches, [one.states for one in reference_scores], mask.sum(1))
            if want_ref_states and reference_scores else []}


def measure_chunk(session: Session, context: StepContext, policy: Policy, chunk: Chunk, *,
                  forward: bool) -> dict[str, Any]:
    """The forward passes over a chunk's samples, as of :func:`measure`. All ranks call it in step.

    Args:
        forward: also for values, and for logprobs unless ratios are to be to the sampler's own, in
            place of those of the sampler.
    """
    ppo = session.cfg.ppo
    in_loss = full_kl_in_loss(ppo)
    return measure(
        session, context, policy, chunk.out, phase="scoring",
        want_policy=forward and ppo.old_logprobs == "trainer",
        want_values=policy.value_head is not None and (
            forward or not policy.values_while_decoding),
        want_ref_states=in_loss, estimator="k1" if in_loss else kl_estimator(ppo),
        temperature=session.sampling.temperature,
        most_frozen_bytes=session.frozen_states_bytes * len(chunk.out) // ppo.num_rollouts)


def rollout_of(session: Session, chunk: Chunk, scores: RewardScores, measured: dict[str, Any]
               ) -> Rollout:
    """A scored and measured chunk as a rollout, of this rank's own samples."""
    samples, columns = chunk.samples, rows_of(measured, slice(len(chunk.responses)))
    logprobs, dense = columns["logprobs"], None
    if scores.dense is not None:
        dense = torch.zeros(samples.mask.shape)
        dense[samples.mask] = torch.tensor(list(chain.from_iterable(scores.dense)),
                                           dtype=torch.float32)
    return Rollout(
        prompts=chunk.prompts, sequences=samples.sequences,
        logprobs=samples.logprobs if logprobs is None else logprobs,
        ref_logprobs=columns["ref_logprobs"],
        values=samples.values if columns["values"] is None else columns["values"],
        kl=columns["kl"], scores=scores.scores, valid=torch.tensor(scores.valid),
        finished=samples.finished, has_reference=session.reference is not None,
        responses=chunk.responses, parts=scores.parts, logs=scores.logs, extras=RolloutExtras(
            dense=dense, frozen_states=columns["frozen_states"], ref_states=columns["ref_states"],
            sampler_logprobs=None if logprobs is None else samples.logprobs,
            episodes=without_environments(samples.episodes) if samples.episodes else []))
