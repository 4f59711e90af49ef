"""Dynamic sampling and a reference that follows the policy: what a step is made of, against a walk
through the prompts one by one, and what a checkpoint of it goes on with."""

import copy
import json
import logging

import pytest
import torch
from helpers import stable_rows
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


def test_samples_that_have_no_score_make_no_difference(tmp_path):
    """Of two samples one is invalid: what is left is all alike."""
    def half(outputs, **_):
        return [None if i % 2 else float(i) for i in range(len(outputs))]

    cfg = small_config(tmp_path, ppo__advantage="rloo", ppo__n=2, ppo__dynamic_sampling=3,
                       reward__on_invalid="skip")
    with session_of(cfg, half) as session:
        assert collected(session, PPOTask(session)).extras.uniform_groups == 3 * 8


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
def test_a_run_goes_on_with_its_prompts_and_its_reference(command, inject, world):
    """Four steps straight, and stopped between the second and the move of its reference: in the
    evaluation after it."""
    command(*words(
        "run_name=whole", "ppo.advantage=grpo", "ppo.n=3", "ppo.dynamic_sampling=3",
        "ppo.kl_estimator=full", "model.reference.sync_every=2", "model.reference.sync_alpha=0.5",
        "ppo.init_kl_coef=0.5", "prompts.eval.limit=8", "tracking.log_rollouts=true",
        "ppo.chunk_size=4"), code=0)
    whole = world / "runs/whole"
    first, second, third = (load_file(
        whole / f"checkpoints/step-{step:06d}/reference.safetensors") for step in (1, 2, 3))
    assert not torch.equal(first["transformer.wte.weight"], second["transformer.wte.weight"])
    assert all(torch.equal(third[name], weight) for name, weight in second.items())
    rows = {row["step"]: row for row in stable_rows(whole / "metrics.jsonl")}
    assert abs(rows[1]["objective/kl"]) < 1e-4
    for row in (rows[1], rows[2]):
        assert row["rollout/drawn"] > 12
        assert row["rollout/uniform_groups"] >= row["rollout/drawn"] / 3 - 4
    assert [rows[step]["episode"] for step in (1, 2, 3, 4)] == [12, 24, 36, 48]
    cut = copied(whole, world / "cut/whole", last_step=1)
    inject(f"score.before@{round(rows[2]['rollout/drawn']) // 4 + 1}:term")
    command(f"resume={cut}", code=143)
    inject("")
    state = json.loads((last_checkpoint(cut) / "state.json").read_text())
    assert (state["step"], state["pending"]["step"]) == (2, 2)
    resumed(cut)
    assert_equal_runs(whole, cut)
