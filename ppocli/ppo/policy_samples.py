"""Samples of the policy: generated in chunks; scored by the reward and the metric, on each rank for
its own or on rank 0 for all, and in a thread where a reward that waits for others need not keep
generation waiting; and evaluated on fixed prompts with fixed random numbers. All ranks call what is
here in step."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch

from ppocli.config.schema import SOURCE
from ppocli.data.data_set import PromptBatch, rows_of
from ppocli.distributed.backend import without_autocast_cache
from ppocli.distributed.ranks import Ranks, interleave
from ppocli.errors import ConfigError, DivergedError
from ppocli.models.head import vocabulary_of
from ppocli.models.policy import Policy
from ppocli.ppo import step_metrics
from ppocli.ppo.rollout import Chunk, PassOptions, measure
from ppocli.ppo.session import EvalSession, Session
from ppocli.rewards.reward_records import RewardRequest, RewardScores, step_texts
from ppocli.rewards.scoring import Reward
from ppocli.runs import faults
from ppocli.runs.daemon import in_daemon, outcome_of
from ppocli.runs.episode import DONE, Episode, without_environments
from ppocli.sampling.sampler import GenerationModel, sample_chunks
from ppocli.sampling.samples import (
    EVALUATION,
    ROLLOUT,
    Samples,
    SamplingSpec,
    decode_responses,
    places_of_ends,
)
from ppocli.training.task import Evaluation, StepContext

T = TypeVar("T")


def contexts_of(session: EvalSession, prompts: PromptBatch) -> list[list[int]]:
    """The ids that each prompt's response is decoded behind: none for a decoder beside an encoder,
    the prompt for a causal model, whose response continues it."""
    if session.loaded.decoder_start is not None:
        return [[]] * len(prompts.tokens)
    starts = (~prompts.mask).sum(1).tolist()
    return [row[start:] for row, start in zip(prompts.tokens.tolist(), starts, strict=True)]


def chunk_of(session: EvalSession, prompts: PromptBatch, out: Samples, num_local: int,
             spec: SamplingSpec) -> Chunk:
    """Samples with their responses as text, trimmed as ``spec`` has it, or of episodes the
    transcripts; the first ``num_local`` are this rank's own."""
    prompts, samples = rows_of(prompts, slice(num_local)), out.rows(slice(num_local))
    texts = [episode.transcript for episode in samples.episodes] if samples.episodes is not None \
        else decode_responses(session.tokenizer, contexts_of(session, prompts), samples.action_ids,
                              spec)
    return Chunk(out, prompts, samples, texts)


def share_of_prompts(session: Session, start: int, count: int) -> tuple[PromptBatch, int]:
    """This rank's prompts of the episodes ``start`` to ``start + count``, each ``ppo.n`` times in a
    row, in an order by seed and position alone; and how many are its own (:meth:`Ranks.share`)."""
    n, first, stop = session.cfg.ppo.n, start // session.cfg.ppo.n, start + count
    indices = session.prompts.indices(first, -(-stop // n) - first, seed=session.cfg.seed,
                                      shuffle=session.cfg.prompts.shuffle)
    episodes, num_local = session.backend.ranks.share(range(start, stop))
    places = np.array(indices)[np.array(episodes, dtype=int) // n - first].tolist()
    return session.prompts.batch(places, episodes, session.tokenizer.pad_token_id), num_local


def generate_chunks(session: Session, context: StepContext, policy: Policy, spec: SamplingSpec,
                    prompts: PromptBatch, num_local: int, samples: Samples | None = None,
                    size: int = 0) -> Iterator[Chunk]:
    """Sample one response to each prompt, the first ``num_local`` for this rank, or take
    ``samples`` of an earlier policy: chunks of ``size`` (by default the session's) as soon as they
    are complete, in their order."""
    start, size = 0, size or session.chunk_size
    made = sample_policy(session, context, policy, prompts, spec, ROLLOUT, size) \
        if samples is None else (samples.rows(slice(i, i + size))
                                 for i in range(0, len(prompts), size))
    with closing(made) as parts:
        for out in parts:
            stop = start + len(out)
            yield chunk_of(session, prompts.rows(range(start, stop)), out,
                           min(max(num_local - start, 0), len(out)), spec)
            start = stop


def sample_policy(session: EvalSession, context: StepContext, policy: Policy, prompts: PromptBatch,
                  spec: SamplingSpec, stream: int, size: int = 0) -> Generator[Samples]:
    """One sample of the policy, as the sampler's ``acting`` yields it, per prompt, ``size``
    (default: ``chunk_size``) at a time. A DivergedError where its probabilities aren't finite, an
    OutOfMemoryError where one response is too much, a ConfigError for an id without a token."""
    vocabulary, split = vocabulary_of(policy.eval().lm), policy.split
    keeps = split is not None and stream == ROLLOUT and _keeps_states(session, prompts, spec)
    model = GenerationModel(policy.lm, policy.value_head if policy.values_while_decoding else None,
                            split if keeps else None)
    for out in sample_chunks(session.sampler, session.passes, prompts, spec, stream, model,
                             context.stop, phase="rollout" if stream == ROLLOUT else "evaluation",
                             chunk=size or session.chunk_size):
        ids = out.sequences.action_tokens[out.sequences.mask]
        if not bool(torch.isfinite(out.logprobs).all()) or bool(vocabulary.lacks(ids).any()):
            raise _unusable(session, out.logprobs, ids[vocabulary.lacks(ids)])
        yield out


def _keeps_states(session: EvalSession, prompts: PromptBatch, spec: SamplingSpec) -> bool:
    """Whether decoding keeps what enters the policy's lowest layer that trains."""
    # in fp32 they are what a forward pass gives; half of the room is for those without padding
    if not session.from_decode or session.backend.precision != "fp32":
        return False
    tokens = prompts.tokens.shape[1] + spec.max_new_tokens
    width = session.policy.lm.get_input_embeddings().weight.shape[-1]
    return bool(4 * session.cfg.ppo.num_rollouts * tokens * width
                <= session.frozen_states_bytes // 2)


def _unusable(session: EvalSession, logprobs: torch.Tensor, absent: torch.Tensor
              ) -> DivergedError | ConfigError:
    """The error for samples whose logprobs are not finite, or for ids without a token [n]."""
    if not bool(torch.isfinite(logprobs).all()):
        return DivergedError("The policy became non-finite: its token probabilities are NaN.",
                             fix="lower ppo.optimizer.lr, raise ppo.init_kl_coef, or use "
                             "hardware.precision=fp32")
    return ConfigError(f"{type(session.sampler).__name__} sampled id {int(absent[0])}, for which "
                       "the tokenizer has no token.", where="rollout.engine",
                       fix="sample from the tokenizer's ids alone: a model may have more rows than "
                       "those")


# Scores -------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class PendingScores:
    """The scores of a chunk, which may be under way in a thread."""

    ranks: Ranks
    whole: bool
    """whether rank 0 scores the samples of all; else each rank scores its own"""
    work: Callable[[], Any]

    def wait(self, phase: str) -> Any:
        """The scores [b] of this rank's samples; all ranks raise what the reward raised on any."""
        if not self.whole:
            return self.ranks.all_do(self.work, phase)
        return rows_of(self.ranks.first_does(self.work),
                       slice(self.ranks.rank, None, self.ranks.world))


def request_of(session: EvalSession, context: StepContext, prompts: PromptBatch, out: Samples,
               responses: list[str]) -> RewardRequest:
    """Samples as a reward or a metric gets them: no special tokens, stop sequences trimmed."""
    request = RewardRequest(
        prompts.texts, responses, out.action_ids, prompts.columns, session.tokenizer,
        ended=out.finished.tolist(), messages=prompts.messages, progress=context.progress,
        prompt_ids=contexts_of(session, prompts) if session.reward.has_steps else ())
    return _with_episodes(request, out.episodes) if out.episodes else request


def _with_episodes(request: RewardRequest, episodes: list[Episode]) -> RewardRequest:
    chats = [one.conversation(prompt) for one, prompt in zip(
        episodes, request.messages, strict=True)] if request.messages else ()
    return replace(request, episodes=episodes, chats=chats)


def in_steps(reward: Reward, request: RewardRequest) -> RewardRequest:
    """The request with the steps of its responses, where the configuration defines some.

    Raises:
        RewardError: ``reward.step_fn`` failed.
    """
    if not reward.has_steps:
        return request
    ends = reward.step_ends(request)
    return replace(
        request, steps=[step_texts(*one) for one in zip(request.responses, ends, strict=True)],
        step_ends=places_of_ends(request.tokenizer, request.prompt_ids, request.response_ids, ends))


def whole_request(session: EvalSession, request: RewardRequest) -> RewardRequest:
    """On rank 0 the requests of all ranks as one, in the order of the prompts; on the others their
    own. All ranks call it in step."""
    # a tokenizer is large, and rank 0 has its own
    shares = session.backend.ranks.gather(replace(
        request, tokenizer=None, episodes=without_environments(request.episodes)))
    return joined(shares, session.tokenizer) if session.backend.ranks.first else request


def start(session: EvalSession, context: StepContext, chunk: Chunk,
          previous: PendingScores | None = None) -> PendingScores:
    """Hand a chunk to the reward, behind the ``previous`` one."""
    reward, cfg, ranks = session.reward, session.cfg.reward, session.backend.ranks
    request = request_of(session, context, chunk.prompts, chunk.samples, chunk.responses)
    whole = reward.needs_all_samples and ranks.world > 1
    if whole:
        request = whole_request(session, request)
    work: Callable[[], RewardScores] = partial(_scores, reward, request)
    if reward.waits or cfg.overlap == "always" or cfg.timeout is not None:
        work = _in_thread(session, context, work, whole, previous)
    return PendingScores(ranks, whole, work)


def _scores(reward: Reward, request: RewardRequest) -> RewardScores:
    faults.point("score.before")
    scores = reward.score(in_steps(reward, request) if reward.has_steps else request)
    faults.point("score.after")
    return scores


def _in_thread(session: EvalSession, context: StepContext, work: Callable[[], T], whole: bool,
               previous: PendingScores | None) -> Callable[[], T]:
    """What returns the scores of a reward that waits for others, or has a time limit.

    With ``reward.overlap`` it scores a chunk while the next one is generated; it gets one chunk at
    a time and in their order, either way. Where it is not to overlap, it runs in a thread all the
    same, so that this one gets a stop.
    """
    reward, cfg = session.reward, session.cfg.reward
    overlaps = cfg.overlap == "always" or (cfg.overlap == "auto" and reward.waits)
    if overlaps and (session.backend.ranks.first or not whole):
        return begin(session, context, work, None if previous is None else previous.work)
    if cfg.overlap == "never" and cfg.timeout is None:
        return work

    def wait() -> T:
        return begin(session, context, work, None)()

    return wait


def _metrics(session: EvalSession, context: StepContext, chunk: Chunk) -> Any:
    """Each metric of this rank's samples. All ranks call it in step."""
    request = request_of(session, context, chunk.prompts, chunk.samples, chunk.responses)
    whole = session.metric.needs_all_samples and session.backend.ranks.world > 1
    if whole:
        request = whole_request(session, request)
    return PendingScores(session.backend.ranks, whole, lambda: session.metric.compute(
        in_steps(session.reward, request))).wait("reward at evaluation")


def joined(shares: Sequence[RewardRequest], tokenizer: Any) -> RewardRequest:
    """The shares of all ranks as one request, in the order of the prompts."""
    whole: dict[str, Any] = {name: interleave([getattr(share, name) or [] for share in shares])
                             for name in ("prompts", "responses", "response_ids", "ended",
                                          "messages", "chats", "episodes", "prompt_ids")}
    return replace(shares[0], **whole, tokenizer=tokenizer, columns={
        name: interleave([share.columns[name] for share in shares]) for name in shares[0].columns})


def begin(session: EvalSession, context: StepContext, work: Callable[[], T],
          before: Callable[[], T] | None) -> Callable[[], T]:
    """Start ``work`` in a thread; the function returned waits for it.

    Nothing in it may talk to other ranks: collectives belong to the main thread. The thread is a
    daemon: work that hangs must not keep a process that wants to end.

    Args:
        before: waited for first; if it fails, ``work`` is not begun.

    Returns:
        a function that returns what ``work`` returned, or raises what it raised.
    """
    device = session.backend.device

    def body() -> T:
        if device.type != "cpu":
            torch.get_device_module(device).set_device(device)  # which is a thread's own
        if before is not None:
            before()
        return without_autocast_cache(work)

    return partial(outcome_of, in_daemon(body, "reward"), context.stop.check)


# Evaluation ---------------------------------------------------------------------------------------

def distinct(texts: list[str], n: int) -> float:
    """Different word n-grams over all word n-grams of the texts together; 0 without any."""
    grams = [tuple(words[i:i + n]) for words in (t.split() for t in texts)
             for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def evaluation_size(session: EvalSession) -> int:
    """How many samples a whole evaluation has."""
    return len(session.eval_prompts) * session.cfg.prompts.eval.repeat


def evaluate_chunks(session: EvalSession, context: StepContext, policy: Policy
                    ) -> Iterator[list[dict[str, Any]]]:
    """Sample and score the evaluation prompts, one generate call at a time: rows as `ppocli eval`
    has them in samples.jsonl, the i-th of which answers prompt ``i % len(eval_prompts)``.

    A sample is a function of seed, prompt and number alone.

    Args:
        policy: as the sampler's ``acting`` yields it.

    Raises:
        RewardError, DivergedError, StopRequested.
    """
    spec, ranks, all_prompts = session.eval_sampling, session.backend.ranks, session.eval_prompts
    # in fp32 the decoding pass has computed the policy's logprobs already
    decoded = session.from_decode and spec.temperature == 1.0
    episodes, size = range(evaluation_size(session)), session.chunk_size * ranks.world
    for first in range(0, len(episodes), size):
        context.stop.meet()
        share, num_local = ranks.share(episodes[first:first + size])
        prompts = all_prompts.batch([episode % len(all_prompts) for episode in share], share,
                                    session.tokenizer.pad_token_id)
        whole = Samples.joined(list(sample_policy(session, context, policy, prompts, spec,
                                                  EVALUATION)))
        columns = measure(session, context, policy, whole, PassOptions(
            "scoring of the evaluation", "k1", temperature=1.0, want_logprobs=not decoded,
            want_values=False))
        chunk = chunk_of(session, prompts, whole, num_local, spec)
        scores = start(session, context, chunk).wait("reward at evaluation")
        metrics = {} if session.metric is None else _metrics(session, context, chunk)
        context.stop.meet()
        kl = [None] * num_local if session.reference is None else (
            columns["kl"].sum(1).tolist()[:num_local])
        shown = [score if valid else None
                 for score, valid in zip(scores.scores, scores.valid, strict=True)]
        rows = step_metrics.sample_rows(
            {"prompt": chunk.prompts.texts, "response": chunk.responses, "score": shown, "kl": kl,
             "response_tokens": chunk.samples.mask.sum(1).tolist(),
             "finished": chunk.samples.finished.tolist(),
             **step_metrics.source_column(chunk.prompts.columns, session.cfg)},
            {"rewards": scores.parts, "metrics": metrics}, scores.logs,
            chunk.samples.episodes or ())
        yield interleave(ranks.gather(rows))


def row_of_run(sample: dict[str, Any]) -> dict[str, Any]:
    """A row as runs have it in their samples.jsonl: without metrics, and without rewards where
    there is one alone."""
    return {name: value for name, value in sample.items()
            if name != "metrics" and (name != "rewards" or len(value) > 1)}


def evaluate(session: EvalSession, context: StepContext) -> Evaluation:
    """Sample ``prompts.eval.repeat`` responses to each evaluation prompt and score them.

    ``kl_mean`` is the k1 estimate summed over each response and averaged over samples, in nats, of
    the distributions at temperature 1 without top-k or top-p, whatever the sampling was.

    Raises:
        RewardError, DivergedError, StopRequested.
    """
    with session.sampler.acting(session.policy) as policy:
        samples = list(chain.from_iterable(evaluate_chunks(session, context, policy)))
    return Evaluation(evaluation_figures(samples), list(map(row_of_run, samples)),
                      sum(s["response_tokens"] for s in samples))


def evaluation_figures(samples: Sequence[dict[str, Any]], grams: Sequence[int] = (2,)
                       ) -> dict[str, float]:
    """The figures of an evaluation from the rows of all its chunks, as summary.json and
    metrics.jsonl have them; ``grams`` are the lengths n of ``distinct_n``."""
    texts = [s["response"] for s in samples]
    score, std = step_metrics.mean_std([s["score"] for s in samples if s["score"] is not None])
    values = {
        "reward_mean": score, "reward_std": std,
        "kl_mean": step_metrics.mean([s["kl"] for s in samples if s["kl"] is not None]),
        "response_tokens_mean": step_metrics.mean([s["response_tokens"] for s in samples]),
        "finished_share": step_metrics.mean([float(s["finished"]) for s in samples]),
        **{f"distinct_{n}": distinct(texts, n) for n in grams}}
    if samples and SOURCE in samples[0]:
        values |= step_metrics.means_of([{"by": {s[SOURCE]: s["score"]}} for s in samples], "by",
                                        "reward_mean")
    values |= step_metrics.means_of(samples, "logged")
    if samples and "turns" in samples[0]:
        values["turns_mean"] = step_metrics.mean([float(len(s["turns"])) for s in samples])
        values["done_share"] = step_metrics.mean([float(s["ended"] == DONE) for s in samples])
    rewards = step_metrics.means_of(samples, "rewards", "reward")
    return values | (rewards if len(rewards) > 1 else {}) | step_metrics.means_of(samples,
                                                                                  "metrics")
