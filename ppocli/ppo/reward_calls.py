"""Calls of the reward and the metric: on each rank for its own samples, or on rank 0 for those of
all; and in a thread, where a reward that waits for others need not keep generation waiting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from ppocli.data.columns import rows_of
from ppocli.data.prompt_set import PromptBatch
from ppocli.distributed.backend import without_autocast_cache
from ppocli.distributed.ranks import Ranks, interleave
from ppocli.ppo.rollout import Chunk
from ppocli.ppo.session import EvalSession
from ppocli.rewards.reward_records import RewardRequest, RewardScores, step_texts
from ppocli.rewards.scoring import Reward
from ppocli.runs import faults
from ppocli.runs.daemon import in_daemon, outcome_of
from ppocli.runs.episode import without_environments
from ppocli.sampling.samples import Samples, places_of_ends
from ppocli.training.task import StepContext

T = TypeVar("T")
Metrics = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class PendingScores:
    """The scores of a chunk, which may be under way in a thread."""

    ranks: Ranks
    whole: bool
    """whether rank 0 scores the samples of all; else each rank scores its own"""
    work: Callable[[], Any]

    def wait(self, phase: str) -> Any:
        """The scores [b] of this rank's samples. All ranks call it in step.

        Raises:
            PpocliError: on all ranks, what the reward raised on any.
        """
        if not self.whole:
            return self.ranks.all_do(self.work, phase)
        return rows_of(self.ranks.first_does(self.work),
                       slice(self.ranks.rank, None, self.ranks.world))


def request_of(session: EvalSession, context: StepContext, prompts: PromptBatch, out: Samples,
               responses: list[str]) -> RewardRequest:
    """Samples as a reward or a metric gets them; special tokens are left out and stop sequences
    trimmed."""
    before = session.read_before(prompts) if session.reward.has_steps else ()
    episodes = out.episodes or ()
    return RewardRequest(
        prompts=prompts.texts, responses=responses, response_ids=out.action_ids,
        columns=prompts.columns, tokenizer=session.tokenizer, ended=out.finished.tolist(),
        messages=prompts.messages, prompt_ids=before, episodes=episodes,
        chats=[one.conversation(prompt) for one, prompt in zip(
            episodes, prompts.messages, strict=True)] if episodes and prompts.messages else (),
        progress=context.progress)


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
    """Hand a chunk to the reward. All ranks call it in step.

    A reward that waits for others (``reward.overlap``) scores it while the next chunk is generated;
    it gets one chunk at a time and in their order, either way. Where it is not to overlap, but
    waits, or may take no longer than ``reward.timeout``, it runs in a thread all the same, so that
    this one gets a stop.

    Args:
        previous: the chunk before, if any.
    """
    reward, cfg, ranks = session.reward, session.cfg.reward, session.backend.ranks
    request = request_of(session, context, chunk.prompts, chunk.samples, chunk.responses)
    whole = reward.needs_all_samples and ranks.world > 1
    if whole:
        request = whole_request(session, request)

    def score() -> RewardScores:
        faults.point("score.before")
        scores = reward.score(in_steps(reward, request))
        faults.point("score.after")
        return scores

    overlaps = cfg.overlap == "always" or (cfg.overlap == "auto" and reward.waits)
    if overlaps and (ranks.first or not whole):
        return PendingScores(ranks, whole, begin(session, context, score,
                                                 None if previous is None else previous.work))
    waits = (reward.waits and cfg.overlap != "never") or cfg.timeout is not None
    return PendingScores(ranks, whole, partial(_in_thread, session, context, score) if waits
                         else score)


def _in_thread(session: EvalSession, context: StepContext, work: Callable[[], T]) -> T:
    """What ``work`` returns, while this thread gets a stop."""
    return begin(session, context, work, None)()


def judge(session: EvalSession, context: StepContext, chunk: Chunk, phase: str
          ) -> tuple[RewardScores, Metrics]:
    """The scores of this rank's samples, and each metric by sample. All ranks call it in step.

    Raises:
        RewardError: on all ranks, what went wrong on any.
    """
    metric, ranks = session.metric, session.backend.ranks
    scores = start(session, context, chunk).wait(phase)
    if metric is None:
        return scores, {}
    request = request_of(session, context, chunk.prompts, chunk.samples, chunk.responses)
    whole = metric.needs_all_samples and ranks.world > 1
    if whole:
        request = whole_request(session, request)
    return scores, PendingScores(ranks, whole, lambda: metric.compute(
        in_steps(session.reward, request))).wait(phase)


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
