"""Prompts are drawn until enough of them have responses that score differently."""

import logging

from ppocli.parallel.stop import StopFlag
from ppocli.tasks.ppo.records import Drawn, Rollout
from ppocli.tasks.ppo.rollout import collect_rollout
from ppocli.tasks.ppo.session import Session
from ppocli.training.clock import PhaseClock

log = logging.getLogger("ppocli")


def collect_differing(session: Session, start: int, count: int, stop: StopFlag, clock: PhaseClock
                      ) -> Rollout:
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
        drawn = n * len(differs)
        part = collect_rollout(session, session.next_prompts(
            start + drawn, min(missing, most - drawn)), stop, clock)
        parts.append(part)
        scores = part.shown_scores  # whether those of a prompt's samples that have one differ
        differs += [len({score for score in scores[i:i + n] if score is not None}) > 1
                    for i in range(0, len(scores), n)]
    if missing > 0:
        log.info("step %d: only %d of %d prompts have responses that score differently; %d of the "
                 "others fill the rollout up (ppo.dynamic_sampling)", session.step + 1,
                 sum(differs), len(differs), missing // n)
    whole = Rollout.joined(parts)
    chosen = sorted(sorted(range(len(differs)), key=lambda i: not differs[i])[:count // n])
    return whole.rows([n * i + k for i in chosen for k in range(n)],
                      Drawn(len(whole), differs.count(False), int(whole.response_mask.sum())))
