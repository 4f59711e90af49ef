"""A supervised stream beside the samples of PPO (``ppo.ptx``): texts whose likelihood is a term of
the policy's loss, so that it doesn't forget them ("PPO-ptx" of InstructGPT, Ouyang et al. 2022,
arXiv 2203.02155, eq. 2)."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from ppocli.config.schema import PPOConfig
from ppocli.data.data_set import Examples
from ppocli.data.prompt_set import prompt_indices
from ppocli.ppo.records import POLICY, Experience
from ppocli.ppo.session import Session
from ppocli.supervised import supervised_task
from ppocli.training.task import UpdateGroup


def with_examples(session: Session, experience: Experience, groups: Sequence[UpdateGroup],
                  first: int) -> tuple[Experience, list[UpdateGroup]]:
    """The same updates, each that trains the policy with the next examples of the stream.

    Which those are is a function of the seed and of the updates that were planned before: a resumed
    run goes on with the same, and an update that is skipped uses its own up.

    Args:
        first: place in the stream, counted from its start.

    Returns:
        the experience with the examples of all updates, and the updates: their atoms from
        ``len(experience)`` on are these examples, each trained token of which has the same weight.
    """
    data, ppo, updates = session.examples, session.cfg.ppo, list(groups)
    training = [i for i, group in enumerate(groups) if group.part == POLICY]
    if data is None or not ppo.ptx.coef or not training:
        return experience, updates
    size = _of_an_update(ppo)
    examples = data.rows(prompt_indices(first, size * len(training), n=len(data),
                                    seed=session.cfg.seed, shuffle=ppo.ptx.data.shuffle))
    places = torch.arange(len(examples)) + len(experience)
    columns = zip(*(column.split(size) for column in (
        places, supervised_task.lengths_of(examples), supervised_task.counts_of(examples))),
        strict=True)
    for i, (rows, lengths, counts) in zip(training, columns, strict=True):
        group = groups[i]
        updates[i] = replace(
            group, rows=torch.cat([rows, group.rows]), tokens=torch.cat([lengths, group.tokens]),
            counts=torch.cat([counts, group.counts]),
            weights=torch.cat([torch.full((size,), 1.0 / int(counts.sum())), group.weights]),
            kinds=(torch.arange(size + len(group.rows)) >= size).long())
    return replace(experience, extras=replace(experience.extras, examples=examples)), updates


def examples_of(ppo: PPOConfig, samples: int) -> int:
    """How far a step of so many samples takes the stream on, whichever of its updates are made."""
    return ppo.ppo_epochs * math.ceil(samples / ppo.mini_batch_size) * _of_an_update(ppo)


def _of_an_update(ppo: PPOConfig) -> int:
    return ppo.ptx.mini_batch_size or ppo.mini_batch_size


def examples_loss(session: Session, examples: Examples, rows: torch.Tensor, weights: torch.Tensor
                  ) -> tuple[torch.Tensor, int]:
    """``-sum w log p`` over the trained tokens of some examples at temperature 1, and how many
    tokens were computed.

    Args:
        rows: [a] places of the examples.
        weights: [a] fp32 weight of each of their tokens.
    """
    samples = supervised_task.sequences_of(examples, rows, session.loaded.decoder_start)
    # reducers on several ranks want a gradient of every weight from every pass: ZeRO 3 would add to
    # what is left of the update before
    several = session.backend.ranks.world > 1 or session.backend.zero_stage > 0
    return supervised_task.weighted_nll(
        session.trained.engine, samples, weights, session.backend.device,
        pack=session.packs and session.cfg.ppo.ptx.data.packing, want_values=several)
