"""Rollouts of an earlier policy (``ppo.staleness``): samples that wait for their step.

Step s trains on samples of the policy as it was ``ppo.staleness`` steps before: those are drawn
when that policy is the present one, as an asynchronous trainer's samplers would draw them, and wait
as tensors of the training state. No earlier weights are kept, which ZeRO 3 would have in parts, and
a checkpoint holds all that a resume needs. Nothing else is done ahead: reward, reference, values
and the trainer's logprobs are of the step that trains on a sample, and its prompt and its random
numbers are those of its number, stale or not.
"""

from collections.abc import Mapping
from dataclasses import fields, replace

import torch

from ppocli.data.prompt_set import PromptBatch
from ppocli.models.layout import Sequences
from ppocli.parallel.ranks import woven
from ppocli.parallel.stop import StopFlag
from ppocli.ppo.noise import ROLLOUT
from ppocli.sampling.samples import Samples
from ppocli.tasks.ppo.records import Rollout
from ppocli.tasks.ppo.rollout import collect_rollout, sample_policy
from ppocli.tasks.ppo.session import Session
from ppocli.training.clock import PhaseClock

_PREFIX = "waiting/"


def collect_stale(session: Session, tensors: Mapping[str, torch.Tensor], episodes: range,
                  until: int, stop: StopFlag, clock: PhaseClock) -> Rollout:
    """The rollout of a step from samples that wait, once those up to number ``until`` are drawn.

    As many are drawn as are missing: those of several steps at the start of a run, or where a
    resume has made ``ppo.staleness`` larger or lets a run go on from its last steps, and none where
    it has become smaller, until so many are used up.

    Args:
        tensors: what waits, as :func:`tensors_of` gave it.
        episodes: numbers of the step's samples.
    """
    parts, count = [_samples_of(tensors)] if tensors else [], len(episodes)
    first = episodes.start + sum(map(len, parts))
    if first < until:
        parts.append(_draw(session, session.next_prompts(first, until - first), stop))
    waiting = Samples.joined(parts)
    clock.mark("rollout")
    found = collect_rollout(session, session.next_prompts(episodes.start, count), stop, clock,
                            drawn=waiting.rows(slice(count)))
    return replace(found, waiting=tensors_of(waiting.rows(slice(count, None))))


def _draw(session: Session, prompts: PromptBatch, stop: StopFlag) -> Samples:
    """One sample of the present policy per prompt, in their order; the same on all ranks."""
    rows, own = session.backend.ranks.share(range(len(prompts)))
    with session.acting() as acting:
        mine = Samples.joined(list(sample_policy(acting, prompts.rows(rows), session.sampling,
                                                 ROLLOUT, stop)))
    return gathered(session, mine.first(own), len(prompts))


def gathered(session: Session, mine: Samples, count: int) -> Samples:
    """The samples of all ranks in the order of their prompts; the same on all ranks.

    Args:
        mine: this rank's share of them.
        count: how many there are.
    """
    found = session.backend.ranks.gather(mine)
    places = torch.arange(count).split([len(part) for part in found])
    return Samples.joined(found).rows(torch.tensor(woven([part.tolist() for part in places])))


def tensors_of(samples: Samples) -> dict[str, torch.Tensor]:
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
