"""``ppo.micro_batch_tokens``: passes of like size, whatever the samples' lengths."""

from itertools import pairwise

import pytest
import torch
from sessions import fresh_state, optimize, rollout_of, session_of, small_config

from ppocli.models.layout import in_groups
from ppocli.models.transformers_internals import cache_name
from ppocli.ppo.step import to_experience


@pytest.mark.parametrize(("rows", "tokens"), [(4, None), (4, 30), (100, 30), (100, 5), (1, 30)])
def test_groups_hold_every_row_once_and_stay_in_the_budget(rows, tokens):
    lengths = torch.tensor([3, 12, 7, 7, 1, 30, 2, 9, 31, 4])
    groups = in_groups(lengths, rows, tokens)
    assert sorted(torch.cat(groups).tolist()) == list(range(len(lengths)))
    assert all(len(group) <= rows for group in groups)
    sizes = [len(group) * int(lengths[group].max()) for group in groups]
    if tokens is not None:
        assert all(size <= tokens or len(group) == 1
                   for size, group in zip(sizes, groups, strict=True))
        # none could have taken the next row as well
        for group, after in pairwise(groups):
            assert len(group) == rows or (len(group) + 1) * int(lengths[group].max()) > tokens
            assert lengths[group].min() >= lengths[after].max()


def test_every_pass_of_a_step_keeps_to_it(tmp_path):
    budget, seen = 40, []
    cfg = small_config(tmp_path, ppo__micro_batch_tokens=budget, ppo__num_rollouts=16,
                       ppo__mini_batch_size=16, ppo__logprobs_from="forward",
                       generation__stop_token_ids=[5, 9, 14, 20, 27, 33],
                       generation__max_new_tokens=20)
    with session_of(cfg) as session:
        def note(module, _args, kwargs):
            if kwargs.get(cache_name(module)) is None:
                seen.append(kwargs["input_ids"].numel())

        handle = session.policy.lm.base_model.register_forward_pre_hook(note, with_kwargs=True)
        rollout = rollout_of(session)
        experience = to_experience(rollout, fresh_state(session), cfg)
        scored = len(seen)
        optimize(session, experience)
        handle.remove()
        spans = experience.sequences.lengths
    assert int(spans.max()) <= budget
    assert int(spans.sum()) > 2 * budget
    assert 2 < scored < 16
    assert max(seen) <= budget + 16  # packed rows are filled up
    assert len(seen) > scored
