"""Stale, ahead-of-time and dynamically filtered rollouts: of an earlier policy
(``ppo.staleness``), sampled by servers one step ahead (``rollout.ahead=1``), and of prompts that
are sampled until enough of them have responses that score differently (``ppo.dynamic_sampling``).

Step s trains on samples of the policy as it was ``ppo.staleness`` steps before. They are sampled
when that policy is the present one, as by an asynchronous trainer's samplers, and wait as tensors
of the training state. No earlier weights are kept, which ZeRO 3 would have in parts, and a
checkpoint holds all that a resume needs. Nothing else is done ahead: reward, reference, values and
the trainer's logprobs are of the step that trains on a sample, and its prompt and its random
numbers are those of its number, stale or not.

With ``rollout.ahead`` servers sample for the next step with the weights from before this one, while
it is trained on: as with ``ppo.staleness=1``, but for the first step after a start or a resume, for
which what was under way is sampled anew. Episodes are played meanwhile, in a thread.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import cast

import torch

from ppocli.distributed.ranks import interleave
from ppocli.models.layout import Sequences
from ppocli.ppo.policy_samples import sample_policy, share_of_prompts
from ppocli.ppo.rollout import Rollout
from ppocli.ppo.session import Session
from ppocli.ppo.step import collect_rollout
from ppocli.sampling.sampler import AheadSampler, BegunSamples
from ppocli.sampling.samples import ROLLOUT, Samples
from ppocli.training.task import StepContext

log = logging.getLogger("ppocli")

_PREFIX = "waiting/"


def collect_stale(session: Session, context: StepContext, tensors: Mapping[str, torch.Tensor],
                  episodes: range, until: int) -> Rollout:
    """The rollout of a step from samples that wait, once those up to number ``until`` are drawn.

    As many are drawn as are missing: those of several steps at the start of a run, or where a
    resume has made ``ppo.staleness`` larger or lets a run go on from its last steps, and none where
    it has become smaller, until so many are used up.

    Args:
        tensors: what waits, as :attr:`RolloutExtras.waiting` of the step before.
        episodes: numbers of the step's samples.
    """
    parts, count = [_samples_of(tensors)] if tensors else [], len(episodes)
    first = episodes.start + sum(map(len, parts))
    if first < until:
        prompts, num_local = share_of_prompts(session, first, until - first)
        with session.sampler.acting(session.policy) as policy:
            samples = Samples.joined(list(sample_policy(
                session, context, policy, prompts, session.sampling, ROLLOUT)))
        parts.append(_gathered(session, samples.rows(slice(num_local)), until - first))
    waiting = Samples.joined(parts)
    context.clock.mark("rollout")
    local = share_of_prompts(session, episodes.start, count)[0].episodes
    rollout = collect_rollout(session, context, episodes.start, count,
                              waiting.rows(torch.tensor(local) - episodes.start))
    return replace(rollout, extras=replace(
        rollout.extras, waiting=_tensors_of(waiting.rows(slice(count, None)))))


def _gathered(session: Session, share: Samples, count: int) -> Samples:
    """The samples of all ranks in the order of their prompts; the same on all ranks.

    Args:
        share: this rank's part of them.
        count: how many there are.
    """
    shares = session.backend.ranks.gather(share)
    places = torch.arange(count).split([len(part) for part in shares])
    return Samples.joined(shares).rows(torch.tensor(interleave([part.tolist() for part in places])))


def _tensors_of(samples: Samples) -> dict[str, torch.Tensor]:
    """What waits as tensors of the training state; without samples there are none."""
    parts = {f.name: getattr(samples.sequences, f.name) for f in fields(Sequences)} | {
        "logprobs": samples.logprobs, "finished": samples.finished}
    return {_PREFIX + name: part.contiguous() for name, part in parts.items()
            if part is not None} if len(samples) else {}


def _samples_of(tensors: Mapping[str, torch.Tensor]) -> Samples:
    parts = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    logprobs, finished = parts.pop("logprobs"), parts.pop("finished")
    return Samples(Sequences(**parts), logprobs, torch.zeros_like(logprobs), finished)


def response_tokens(tensors: Mapping[str, torch.Tensor]) -> int:
    """How many tokens the responses have that wait."""
    return int(tensors[f"{_PREFIX}mask"].sum()) if tensors else 0


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step's samples under way."""

    episodes: range
    """their numbers"""
    begun: BegunSamples
    """this rank's"""


def collect_ahead(session: Session, context: StepContext, before: Ahead | None, episodes: range,
                  until: int) -> tuple[Rollout, Ahead | None]:
    """The rollout of a step, and what has been begun for the next. All ranks call it in step.

    Args:
        before: what was begun for this step, if anything.
        episodes: numbers of the step's samples.
        until: numbers of samples below this are the next step's.

    Raises:
        SamplerError: a server is lost.
    """
    if before is None or before.episodes != episodes:
        before = _begin(session, episodes)
    begun = before.begun
    samples = session.backend.ranks.all_do(
        lambda: begun.take(slice(None), context.stop.check), "rollout")
    after = _begin(session, range(episodes.stop, until)) if until > episodes.stop else None
    context.clock.mark("rollout")
    return collect_rollout(session, context, episodes.start, len(episodes), samples), after


def _begin(session: Session, episodes: range) -> Ahead:
    prompts, _ = share_of_prompts(session, episodes.start, len(episodes))
    sampler = cast(AheadSampler, session.sampler)  # rollout.ahead needs such an engine
    with session.sampler.acting(session.policy):
        begun = sampler.begin(prompts, session.sampling, ROLLOUT, ahead=True)
    return Ahead(episodes, begun)


def collect_differing(session: Session, context: StepContext, start: int, count: int) -> Rollout:
    """``count`` samples of prompts whose ``ppo.n`` responses don't all score the same: the others
    have the advantage 0 under estimators that compare them (dynamic sampling, Yu et al. 2025, arXiv
    2503.14476, section 3.2).

    Each round draws as many samples as are missing, where DAPO's own code draws whole batches and
    cuts off what is too much (``volcengine/verl:recipe/dapo/dapo_ray_trainer.py@53971be``). Once
    ``ppo.dynamic_sampling`` times ``count`` samples are drawn, prompts that were left out fill up,
    the first drawn first. All ranks call it in step.

    Args:
        start: number of the first sample to draw, a multiple of ``ppo.n``, as is ``count``.

    Returns:
        the samples in the order in which they were drawn.
    """
    n, most = session.cfg.ppo.n, count * (session.cfg.ppo.dynamic_sampling or 1)
    parts, differs = list[Rollout](), list[bool]()
    while (missing := count - n * sum(differs)) > 0 and n * len(differs) < most:
        sampled = n * len(differs)
        part = collect_rollout(session, context, start + sampled, min(missing, most - sampled))
        parts.append(part)
        scores = part.shown_scores  # whether those of a prompt's samples that have one differ
        differs += [len({score for score in scores[i:i + n] if score is not None}) > 1
                    for i in range(0, len(scores), n)]
    if missing > 0:
        log.info("step %d: only %d of %d prompts have responses that score differently; %d of the "
                 "others fill the rollout up (ppo.dynamic_sampling)", context.step + 1,
                 sum(differs), len(differs), missing // n)
    whole = Rollout.joined(parts)
    chosen = sorted(sorted(range(len(differs)), key=lambda i: not differs[i])[:count // n])
    kept = whole.rows([n * i + k for i in chosen for k in range(n)])
    return replace(kept, extras=replace(
        kept.extras, sampled=len(whole), sampled_tokens=int(whole.response_mask.sum()),
        uniform_groups=differs.count(False)))
