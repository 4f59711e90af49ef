"""What asks the reward and the metric: on each rank for its own samples, or on rank 0 for those of
all; and beside the main thread, where a reward that waits for others need not keep generation
waiting."""

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
class Question:
    """What a chunk asks of the reward or the metric, on this rank. Made by :func:`ask`."""

    ranks: Ranks
    request: RewardRequest
    """of this rank's samples; of all on the rank that is asked for all"""
    together: bool
    """whether rank 0 is asked for the samples of all; else each rank asks for its own"""

    def answer(self, work: Callable[[], T], phase: str) -> T:
        """What ``work`` makes of the request, for this rank's samples. All ranks call it in step.

        Raises:
            PpocliError: on all ranks, what ``work`` raised on any.
        """
        if not self.together:
            return self.ranks.all_do(work, phase)
        return rows_of(self.ranks.first_does(work), slice(self.ranks.rank, None, self.ranks.world))


def request_of(session: EvalSession, context: StepContext, prompts: PromptBatch, out: Samples,
               responses: list[str]) -> RewardRequest:
    """Samples as a reward or a metric gets them."""
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
    """The request with the steps of its responses, where the configuration says what those are.

    Raises:
        RewardError: ``reward.step_fn`` failed.
    """
    if not reward.has_steps:
        return request
    ends = reward.step_ends(request)
    return replace(
        request, steps=[step_texts(*one) for one in zip(request.responses, ends, strict=True)],
        step_ends=places_of_ends(request.tokenizer, request.prompt_ids, request.response_ids, ends))


def ask(session: EvalSession, context: StepContext, prompts: PromptBatch, out: Samples,
        responses: list[str], together: bool) -> Question:
    """One chunk's question; special tokens are left out and stop sequences trimmed. All ranks call
    this in step, each with its share; ``together`` brings the shares to rank 0."""
    request = request_of(session, context, prompts, out, responses)
    ranks = session.backend.ranks
    together = together and ranks.world > 1
    if together:
        # a tokenizer is large, and rank 0 has its own
        shares = ranks.gather(replace(request, tokenizer=None,
                                      episodes=without_environments(request.episodes)))
        request = joined(shares, session.tokenizer) if ranks.first else request
    return Question(ranks, request, together)


def score(session: EvalSession, question: Question) -> RewardScores:
    """Hand the question to the reward. Nothing here talks to other ranks.

    Raises:
        RewardError: the reward failed.
    """
    faults.point("score.before")
    scores = session.reward.score(in_steps(session.reward, question.request))
    faults.point("score.after")
    return scores


def asking(session: EvalSession, context: StepContext, question: Question
           ) -> Callable[[], RewardScores]:
    """:func:`score`, to be called. A reward that waits, for others (unless ``reward.overlap``
    keeps it here) or for so long as ``reward.timeout`` lets it, does so beside this thread, which
    hears a stop meanwhile."""
    work = partial(score, session, question)

    def heard() -> RewardScores:
        return begin(session, context, work, None)()

    cfg = session.cfg.reward
    waits = session.reward.waits and cfg.overlap != "never"
    return heard if waits or cfg.timeout is not None else work


@dataclass(frozen=True, slots=True)
class PendingScores:
    """The scores of a chunk, which may be under way in a thread."""

    question: Question
    work: Callable[[], RewardScores]

    def wait(self, phase: str) -> RewardScores:
        """The scores [b] of this rank's samples. All ranks call it in step.

        Raises:
            PpocliError: on all ranks, what the reward raised on any.
        """
        return self.question.answer(self.work, phase)


def start(session: EvalSession, context: StepContext, chunk: Chunk, previous: PendingScores | None
          ) -> PendingScores:
    """Hand a chunk to the reward. A reward that waits for others (``reward.overlap``) scores it
    while the next chunk is generated; it gets one chunk at a time and in their order, either way.

    Args:
        previous: the chunk before, if any.
    """
    question = ask(session, context, chunk.prompts, chunk.samples, chunk.responses,
                   session.reward.needs_all_samples)
    overlaps = {"always": True, "never": False}.get(session.cfg.reward.overlap,
                                                    session.reward.waits)
    if not overlaps or (question.together and not session.backend.ranks.first):
        return PendingScores(question, asking(session, context, question))
    return PendingScores(question, begin(session, context, partial(score, session, question),
                                         None if previous is None else previous.work))


def judge(session: EvalSession, context: StepContext, prompts: PromptBatch, out: Samples,
          responses: list[str], phase: str) -> tuple[RewardScores, Metrics]:
    """The scores of this rank's samples, and each metric by sample. All ranks call it in step.

    Raises:
        RewardError: on all ranks, what went wrong on any.
    """
    metric = session.metric
    question = ask(session, context, prompts, out, responses, session.reward.needs_all_samples)
    scores = question.answer(asking(session, context, question), phase)
    if metric is None:
        return scores, {}
    if metric.needs_all_samples != session.reward.needs_all_samples:
        question = ask(session, context, prompts, out, responses, metric.needs_all_samples)
    return scores, question.answer(
        lambda: metric.compute(in_steps(session.reward, question.request)), phase)


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
