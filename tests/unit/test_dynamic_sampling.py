"""Dynamic sampling and a reference that follows the policy: what a step is made of, against a walk
through the prompts one by one, and what a checkpoint of it goes on with."""

import copy
import json
import logging

import pytest
import torch
from runs import assert_equal_runs, copied, last_checkpoint, resumed, words
from safetensors.torch import load_file
from sessions import idle_context, rollout_of, session_of, small_config

from ppocli.models.policy import follow
from ppocli.ppo.ppo_task import PPOTask
from ppocli.training.state import TrainState


def says_good(outputs, **_):
    return [float("good" in output.split()) for output in outputs]


def collected(session, task, episodes=0):
    state = TrainState(digests={}, judged_by="", episodes=episodes, task=task.initial()[0])
    return task.collect(state, idle_context())


@pytest.mark.parametrize(("most", "fills"), [(20, False), (2, True)])
def test_a_step_takes_the_next_prompts_whose_scores_differ(tmp_path, caplog, most, fills):
    caplog.set_level(logging.INFO, "ppocli")
    cfg = small_config(tmp_path, ppo__advantage="rloo", ppo__n=2, ppo__dynamic_sampling=most,
                       ppo__num_rollouts=12, ppo__num_steps=3)
    with session_of(cfg, says_good) as session:
        found = collected(session, PPOTask(session), episodes=12)
        everything = rollout_of(session, 12, 12 * most)
    chosen, others, drawn = [], [], 0
    while drawn < 12 * most and len(chosen) < 12:
        rows = [drawn, drawn + 1]
        different = everything.scores[rows[0]] != everything.scores[rows[1]]
        (chosen if different else others).extend(rows)
        drawn += 2
    assert len(others) >= 4
    assert (len(chosen) < 12) == fills == ("fill the rollout up" in caplog.text)
    wanted = sorted([*chosen, *others[:12 - len(chosen)]])
    assert found.prompts.episodes == [12 + row for row in wanted]
    assert found.responses == [everything.responses[row] for row in wanted]
    assert found.scores == [everything.scores[row] for row in wanted]
    for row, place in enumerate(wanted):
        length = int(found.response_mask[row].sum())
        torch.testing.assert_close(found.logprobs[row, :length],
                                   everything.logprobs[place, :length], rtol=0, atol=2e-5)
    assert (found.extras.sampled, found.extras.uniform_groups) == (drawn, len(others) // 2)
    assert found.extras.sampled_tokens == int(everything.response_mask[:drawn].sum())


def test_a_reference_moves_by_its_share_of_the_way(tmp_path):
    with session_of(small_config(tmp_path)) as session:
        policy, reference = session.policy.lm, session.reference
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn_like(parameter))
        before = copy.deepcopy(reference.lm)
        follow(reference, policy, 0.25)
        for name, now in reference.lm.named_parameters():
            there, here = (lm.get_parameter(name).double() for lm in (policy, before))
            torch.testing.assert_close(now.double(), 0.25 * there + 0.75 * here, rtol=0, atol=1e-6)
        follow(reference, policy, 1.0)
        assert all(torch.equal(now, policy.get_parameter(name))
                   for name, now in reference.lm.named_parameters())


@pytest.mark.long
def test_a_stop_between_a_step_and_the_move_of_its_reference_loses_neither(command, inject, world):
    """In the evaluation after step 2, behind the five passes of that step."""
    command(*words("model.reference.sync_every=2", "model.reference.sync_alpha=0.5",
                   "ppo.num_steps=3", "run_name=whole"), code=0)
    whole = world / "runs/whole"
    first, second, third = (load_file(
        whole / f"checkpoints/step-{step:06d}/reference.safetensors") for step in (1, 2, 3))
    assert not torch.equal(first["transformer.wte.weight"], second["transformer.wte.weight"])
    assert all(torch.equal(third[name], weight) for name, weight in second.items())
    cut = copied(whole, world / "cut/whole", last_step=1)
    inject("scoring.forward@6:term")
    command(f"resume={cut}", code=143)
    inject("")
    state = json.loads((last_checkpoint(cut) / "state.json").read_text())
    assert (state["step"], state["pending"]["step"]) == (2, 2)
    resumed(cut)
    assert_equal_runs(whole, cut)
