"""Reward and metric over the ranks: each on its own samples, or on those of all on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ppocli.data.prompt_set import PromptBatch
from ppocli.parallel.ranks import Ranks
from ppocli.rewards.records import RewardRequest, RewardScores
from ppocli.sampling.samples import Samples
from ppocli.storage import faults
from ppocli.tasks.ppo.session import EvalSession

T = TypeVar("T")
Metrics = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Question:
    """What a chunk asks of the reward or the metric, on this rank. Made by :func:`ask`."""

    ranks: Ranks
    request: RewardRequest
    """of all samples where rank 0 is asked for all, else of this rank's"""
    places: list[int] | None
    """where this rank's samples lie among all; None where each rank asks for its own"""

    def answer(self, work: Callable[[], T], dealt: Callable[[T, Sequence[int]], T], phase: str
               ) -> T:
        """What ``work`` makes of the request, for this rank's samples. All ranks call it in step.

        Raises:
            PpocliError: on all ranks, what ``work`` raised on any.
        """
        if self.places is None:
            return self.ranks.all_do(work, phase)
        return dealt(self.ranks.first_does(work), self.places)


def ask(session: EvalSession, prompts: PromptBatch, out: Samples, responses: list[str],
        together: bool) -> Question:
    """One chunk's question; special tokens are left out and stop sequences trimmed. All ranks call
    this in step, each with its share; ``together`` brings the shares to rank 0."""
    request = RewardRequest(prompts=prompts.texts, responses=responses,
                            response_ids=out.action_ids,
                            columns=prompts.columns, tokenizer=session.tokenizer)
    ranks = session.backend.ranks
    if ranks.world == 1 or not together:
        return Question(ranks, request, None)
    # a tokenizer is large, and rank 0 has its own
    shares = ranks.gather(replace(request, tokenizer=None))
    places = woven_places([len(share) for share in shares])[ranks.rank]
    return Question(ranks, joined(shares, session.tokenizer) if ranks.first else request, places)


def score(session: EvalSession, question: Question) -> RewardScores:
    """Hand the question to the reward. Nothing here talks to other ranks.

    Raises:
        RewardError: the reward failed.
    """
    faults.point("score.before")
    scores = session.reward.score(question.request)
    faults.point("score.after")
    return scores


def judge(session: EvalSession, prompts: PromptBatch, out: Samples, responses: list[str],
          phase: str) -> tuple[RewardScores, Metrics]:
    """The scores of this rank's samples, and each metric by sample. All ranks call it in step.

    Raises:
        RewardError: on all ranks, what went wrong on any.
    """
    metric = session.metric
    question = ask(session, prompts, out, responses, session.reward.needs_all_samples)
    scores = question.answer(lambda: score(session, question), dealt_scores, phase)
    if metric is None:
        return scores, {}
    if metric.needs_all_samples != session.reward.needs_all_samples:
        question = ask(session, prompts, out, responses, metric.needs_all_samples)
    return scores, question.answer(lambda: metric.compute(question.request), _dealt_metrics, phase)


def woven_places(sizes: Sequence[int]) -> list[list[int]]:
    """Where each rank's samples lie among all of them, which were dealt in turn
    (:meth:`~ppocli.parallel.ranks.Ranks.share`)."""
    order = sorted((position, rank) for rank, size in enumerate(sizes) for position in range(size))
    places: list[list[int]] = [[] for _ in sizes]
    for place, (_, rank) in enumerate(order):
        places[rank].append(place)
    return places


def joined(shares: Sequence[RewardRequest], tokenizer: Any) -> RewardRequest:
    """The shares of all ranks as one request, in the order of the prompts."""
    order = sorted((i, rank) for rank, share in enumerate(shares) for i in range(len(share)))

    def woven(lists: Sequence[Sequence[Any]]) -> list[Any]:
        return [lists[rank][i] for i, rank in order]

    return RewardRequest(
        prompts=woven([share.prompts for share in shares]),
        responses=woven([share.responses for share in shares]),
        response_ids=woven([share.response_ids for share in shares]),
        columns={name: woven([share.columns[name] for share in shares])
                 for name in shares[0].columns}, tokenizer=tokenizer)


def dealt_scores(scores: RewardScores, places: Sequence[int]) -> RewardScores:
    """The scores at some places."""
    return RewardScores(
        [scores.scores[i] for i in places],
        None if scores.dense is None else [scores.dense[i] for i in places],
        [scores.valid[i] for i in places],
        {name: [values[i] for i in places] for name, values in scores.parts.items()})


def _dealt_metrics(metrics: Metrics, places: Sequence[int]) -> Metrics:
    return {name: [values[i] for i in places] for name, values in metrics.items()}
