"""Evaluation on fixed prompts with fixed random numbers, the same before and after training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ppocli.parallel.deepspeed_internals import local_part
from ppocli.parallel.stop import StopFlag
from ppocli.ppo.noise import EVALUATION
from ppocli.tasks.ppo.rewards_over_ranks import judge
from ppocli.tasks.ppo.rollout import (
    decode,
    draw,
    sample_responses,
    score_tokens,
)
from ppocli.tasks.ppo.rows import take_rows
from ppocli.tasks.ppo.session import EvalSession, Session, sampling_sweep


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures of one evaluation and its samples."""

    figures: dict[str, float]
    """reward_mean, reward_std, kl_mean, response_tokens_mean, ... and metrics/NAME"""
    samples: list[dict[str, Any]]
    """prompt, response, score, kl, response_tokens, finished of each prompt"""
    tokens: int
    """response tokens generated"""
    swept: dict[str, dict[str, float]] = field(default_factory=dict)
    """``top_k=50`` -> its figures, for every value of a key of ``generation.eval`` that is a list,
    the first one's being :attr:`figures`"""
    swept_samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """the same for the samples of the further values"""


def distinct(texts: list[str], n: int) -> float:
    """Different word n-grams over all word n-grams of the texts together; 0 without any."""
    grams = [tuple(words[i:i + n]) for words in (t.split() for t in texts)
             for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


@dataclass(frozen=True, slots=True)
class EvalChunk:
    """One generate call's samples of an evaluation."""

    start: int
    """number of the first sample; sample i answers prompt ``i % len(eval_prompts)``"""
    samples: list[dict[str, Any]]
    """as in :class:`Evaluation`"""
    metrics: dict[str, list[float]]
    """each metric by sample"""
    parts: dict[str, list[float | None]]
    """scores of each reward by sample"""


def evaluation_size(session: EvalSession) -> int:
    """How many samples a whole evaluation has."""
    return len(session.eval_prompts) * session.cfg.prompts.eval.repeat


def evaluate_chunks(session: EvalSession, stop: StopFlag, *, skip: int = 0) -> Iterator[EvalChunk]:
    """Sample and score the evaluation prompts, one generate call at a time.

    A sample is a function of seed, prompt and number alone, and chunks always begin at multiples of
    ``chunk_size`` times the number of ranks; so an evaluation that goes on after ``skip`` samples
    gives the very same ones.

    Args:
        skip: how many samples are there already; a multiple of ``session.chunk_size``, with
            one rank.

    Raises:
        RewardError, DivergedError, StopRequested.
    """
    chunk = session.chunk_size * session.backend.ranks.world
    total = evaluation_size(session)
    for start in range(skip, total, chunk):
        stop.meet()
        episodes = list(range(start, min(start + chunk, total)))
        mine, own = session.backend.ranks.share(episodes)
        found = session.backend.ranks.gather(_one_share(session, mine, own, stop))
        yield _joined(start, len(episodes), found)


def _one_share(session: EvalSession, episodes: list[int], own: int, stop: StopFlag) -> EvalChunk:
    """This rank's samples; those after the first ``own`` only keep the ranks in step."""
    # in fp32 the decoding pass has computed the policy's logprobs already
    decoded = session.from_decode and session.eval_sampling.temperature == 1.0
    prompts = session.eval_prompts
    index = [episode % len(prompts) for episode in episodes]
    batch = prompts.batch(index, episodes, session.tokenizer.pad_token_id)
    out = sample_responses(session, batch, session.eval_sampling, EVALUATION, stop)
    tokens = score_tokens(session, batch, out, phase="scoring of the evaluation",
                          want_policy=not decoded, want_values=False, estimator="k1",
                          temperature=1.0, stop=stop)
    if own < len(episodes):
        batch, out = take_rows(batch, own), out.first(own)
    responses = decode(session, batch, out)
    scores, metrics = judge(session, batch, out, responses, "reward at evaluation")
    stop.meet()
    kl = tokens.kl.sum(1)
    samples: list[dict[str, Any]] = [{
        "prompt": batch.texts[i], "response": responses[i],
        "score": scores.scores[i] if scores.valid[i] else None,
        "kl": float(kl[i]) if session.reference is not None else None,
        "response_tokens": int(out.mask[i].sum()), "finished": bool(out.finished[i])}
        for i in range(own)]
    if len(scores.parts) > 1:
        for i, sample in enumerate(samples):
            sample["rewards"] = {name: values[i] for name, values in scores.parts.items()}
    return EvalChunk(episodes[0], samples, metrics, dict(scores.parts))


def _joined(start: int, count: int, shares: list[EvalChunk]) -> EvalChunk:
    """The ranks' shares, dealt in turn, as one chunk in the order of its samples."""
    if len(shares) == 1:
        return shares[0]

    def woven(lists: list[list[Any]]) -> list[Any]:
        return [lists[i % len(lists)][i // len(lists)] for i in range(count)]

    filled = [share for share in shares if share.samples]
    return EvalChunk(
        start, woven([share.samples for share in shares]),
        {name: woven([share.metrics.get(name, []) for share in shares])
         for name in filled[0].metrics},
        {name: woven([share.parts[name] for share in shares]) for name in filled[0].parts})


def evaluate(session: EvalSession, stop: StopFlag) -> Evaluation:
    """Sample ``prompts.eval.repeat`` responses to each evaluation prompt and score them.

    ``kl_mean`` is the k1 estimate summed over each response and averaged over samples, in nats, of
    the distributions at temperature 1 without top-k or top-p, whatever the sampling was.

    Where a key of ``generation.eval`` is a list, this is done once for each of its values (trlX's
    sweep of a generation argument, ``trlx/trainer/accelerate_base_trainer.py::evaluate``).

    Raises:
        RewardError, DivergedError, StopRequested.
    """
    found = _evaluate_once(session, stop)
    swept: dict[str, dict[str, float]] = {}
    samples: dict[str, list[dict[str, Any]]] = {}
    tokens = found.tokens
    for name, spec in sampling_sweep(session.cfg.generation, session.eval_sampling).items():
        if not swept:
            swept[name] = found.figures
            continue
        other = _evaluate_once(replace(session, eval_sampling=spec), stop)
        swept[name], samples[name] = other.figures, other.samples
        tokens += other.tokens
    return replace(found, tokens=tokens, swept=swept, swept_samples=samples)


def _evaluate_once(session: EvalSession, stop: StopFlag) -> Evaluation:
    samples: list[dict[str, Any]] = []
    metrics: dict[str, list[float]] = {}
    parts: dict[str, list[float]] = {}
    with session.acting() as acting:
        for chunk in evaluate_chunks(acting, stop):
            samples += chunk.samples
            for name, values in chunk.metrics.items():
                metrics.setdefault(name, []).extend(values)
            for name, part in chunk.parts.items():
                parts.setdefault(name, []).extend(v for v in part if v is not None)
    return Evaluation(evaluation_figures(samples, metrics, parts), samples,
                      sum(s["response_tokens"] for s in samples))


def reference_responses(session: EvalSession, stop: StopFlag) -> list[str]:
    """The reference's response to each prompt of an evaluation, drawn with the random numbers of
    the policy's; empty without a reference.

    Raises:
        StopRequested.
    """
    if session.reference is None:
        return []
    ranks, prompts = session.backend.ranks, session.eval_prompts
    total, chunk = evaluation_size(session), session.chunk_size * ranks.world
    texts: list[str] = []
    with session.acting() as acting, session.reference.view(acting.policy.lm) as lm:
        for start in range(0, total, chunk):
            stop.meet()
            episodes = list(range(start, min(start + chunk, total)))
            mine, own = ranks.share(episodes)
            batch = prompts.batch([episode % len(prompts) for episode in mine], mine,
                                  session.tokenizer.pad_token_id)
            out = draw(session, lm, batch, session.eval_sampling, EVALUATION, stop)
            shares = ranks.gather(decode(session, batch, out)[:own])
            texts += [shares[i % len(shares)][i // len(shares)] for i in range(len(episodes))]
    return texts


def evaluation_figures(samples: list[dict[str, Any]], metrics: dict[str, list[float]],
                       parts: dict[str, list[float]]) -> dict[str, float]:
    """The figures of an evaluation from all its samples, as summary.json and metrics.jsonl have
    them."""
    scores = [s["score"] for s in samples if s["score"] is not None]
    mean = _mean(scores)
    figures = {
        "reward_mean": mean,
        "reward_std": math.sqrt(_mean([(s - mean) ** 2 for s in scores])) if scores else math.nan,
        "kl_mean": _mean([s["kl"] for s in samples if s["kl"] is not None]),
        "response_tokens_mean": _mean([s["response_tokens"] for s in samples]),
        "finished_share": _mean([float(s["finished"]) for s in samples]),
        "distinct_2": distinct([s["response"] for s in samples], 2),
    }
    if len(parts) > 1:
        figures.update({f"reward/{name}": _mean(values) for name, values in parts.items()})
    figures.update({f"metrics/{name}": _mean(values) for name, values in metrics.items()})
    return figures


def better(figure: float | None, best: float | None) -> bool:
    """Whether a finite figure exceeds the best so far."""
    return figure is not None and math.isfinite(figure) and (best is None or figure > best)


def policy_is_finite(session: Session) -> bool:
    """Whether every trainable weight is finite; asked before anything is saved."""
    # under ZeRO 3 this rank's part of each
    flags = [torch.isfinite(local_part(p).detach()).all()
             for p in session.policy.parameters() if p.requires_grad]
    finite = bool(torch.stack(flags).all()) if flags else True
    return not session.backend.ranks.any(not finite)
