"""Rollouts one step off (``rollout.ahead=1``): while a step is trained on, servers sample for the
next one with the weights from before it.

Step s + 1 trains on samples of the policy as it was before step s, as with ``ppo.staleness=1``, but
for the first step after a start or a resume: what was under way then is sampled anew.
"""

from dataclasses import dataclass

from ppocli.parallel.stop import StopFlag
from ppocli.ppo.noise import ROLLOUT
from ppocli.sampling.vllm.sampler import Begun, VllmSampler
from ppocli.tasks.ppo import records, stale
from ppocli.tasks.ppo.rollout import collect_rollout
from ppocli.tasks.ppo.session import Session
from ppocli.training.clock import PhaseClock


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step's samples under way."""

    episodes: range
    """their numbers"""
    begun: Begun
    """this rank's"""
    own: int
    """how many of these count"""


def collect_ahead(session: Session, before: Ahead | None, episodes: range, until: int,
                  stop: StopFlag, clock: PhaseClock) -> tuple[records.Rollout, Ahead | None]:
    """The rollout of a step, and what has been begun for the next. All ranks call it in step.

    Args:
        before: what was begun for this step, if anything.
        episodes: numbers of the step's samples.
        until: numbers of samples below this are the next step's.

    Raises:
        SamplerError: no server is left.
    """
    if before is None or before.episodes != episodes:
        before = _begin(session, episodes)
    begun = before.begun
    mine = session.backend.ranks.all_do(lambda: begun.take(slice(None), stop.check), "rollout")
    drawn = stale.gathered(session, mine.first(before.own), len(episodes))
    after = _begin(session, range(episodes.stop, until)) if until > episodes.stop else None
    clock.mark("rollout")
    prompts = session.next_prompts(episodes.start, len(episodes))
    return collect_rollout(session, prompts, stop, clock, drawn=drawn), after


def _begin(session: Session, episodes: range) -> Ahead:
    prompts = session.next_prompts(episodes.start, len(episodes))
    rows, own = session.backend.ranks.share(range(len(prompts)))
    sampler = session.sampler
    assert isinstance(sampler, VllmSampler)
    with session.acting():
        begun = sampler.begin(prompts.rows(rows), session.sampling, ROLLOUT, ahead=True)
    return Ahead(episodes, begun, own)
