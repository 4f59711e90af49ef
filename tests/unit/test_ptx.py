"""Supervised examples in the loss of PPO (``ppo.ptx``), against a loss written by hand."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import save_lm
from sessions import backward, experience_of, grads_of, session_of, small_config
from test_sft_task import ROWS, own_loss

from ppocli.ppo.ppo_task import PPOTask, with_examples
from ppocli.ppo.step import plan_updates
from ppocli.training.task import Plan

COEF = 0.7


def mixed(folder: Path, kind: str = "gpt2", **keys: Any) -> Any:
    """A configuration whose updates mix examples in."""
    if not (folder / "lm").exists():
        save_lm(folder / "lm", kind, gain=1.0 if kind == "t5" else 4.0)
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return small_config(folder, **{
        "ppo__ptx__coef": COEF, "ppo__ptx__data__path": str(path), "ppo__ptx__mini_batch_size": 5,
        "ppo__ptx__data__shuffle": False, "generation__temperature": 0.7, "ppo__ppo_epochs": 2,
        "hardware__gemm": "default", **keys})


def plan_of(session: Any, experience: Any, step: int = 0, first: int = 0) -> Plan:
    """The updates with the examples of the stream from ``first`` on."""
    return with_examples(session, plan_updates(session, experience, step), first)


@pytest.mark.parametrize(("kind", "keys"), [
    ("gpt2", {}), pytest.param("t5", {}, marks=pytest.mark.slow),
    ("gpt2", {"model__value__kind": "model", "ppo__ptx__data__packing": False})])
def test_the_gradient_is_that_of_both_losses_in_whatever_passes(tmp_path, kind, keys):
    with session_of(mixed(tmp_path, kind, **keys)) as session:
        experience = experience_of(session)
        plan = plan_of(session, experience)
        group = plan.groups[1]  # examples 5 to 9 of 7 rows, in their own order
        places = [5, 6, 0, 1, 2]
        exact = copy.deepcopy(session.policy).double()
        total, count = own_loss(session, session.examples, places, exact.lm)
        nll = total / count
        (COEF * nll).backward()
        wanted = grads_of(exact)
        for size in (3, None):
            session.cfg.ppo.micro_batch_size = size
            terms = backward(PPOTask(session), plan, group)
            found = grads_of(session.policy)
            # what PPO itself adds is what is there without examples
            session.cfg.ppo.ptx.coef = 0.0
            alone = plan_of(session, experience)
            backward(PPOTask(session), alone, alone.groups[1])
            own = grads_of(session.policy)
            session.cfg.ppo.ptx.coef = COEF
            found = {name: found[name] - own[name] for name in found if name in wanted}
            scale = max(float(one.abs().max()) for one in wanted.values())
            assert found.keys() == wanted.keys()
            assert max(float((found[name] - wanted[name]).abs().max())
                       for name in wanted) < 2e-6 * max(scale, 1.0)
            assert terms["ptx"] == pytest.approx(float(nll.detach()), rel=1e-6)
            assert terms["total"] == pytest.approx(
                terms["policy"] + session.cfg.ppo.vf_coef * terms["value"]
                + COEF * terms["ptx"], rel=1e-5)
            # a mean over the tokens of responses, as without examples
            assert terms["ratio"] == pytest.approx(1.0, abs=1e-5)


def test_the_stream_goes_on_with_the_updates_that_are_planned(tmp_path):
    """16 samples in minibatches of 8, twice: 4 updates of the policy a step, with 5 examples each;
    the 2 of the value function alone before them have none."""
    cfg = mixed(tmp_path, ppo__critic_epochs=1, ppo__ptx__data__shuffle=True)
    with session_of(cfg) as session:
        experience = experience_of(session)

        def texts(step: int) -> list[int]:
            plan = plan_of(session, experience, step, 20 * step)
            assert [group.kinds is None for group in plan.groups] == [True] * 2 + [False] * 4
            rows = [int(i) - 16 for group in plan.groups[2:] for i in group.rows[:5]]
            assert rows == list(range(20))
            places = plan.atoms.extras.examples.places
            return [session.examples.places.index(places[i]) for i in rows]

        orders = [np.random.default_rng([0, epoch]).permutation(7).tolist() for epoch in range(6)]
        endless = [place for order in orders for place in order]
        assert texts(0) == endless[:20]
        assert texts(1) == endless[20:40]
        # switched off, the updates are those of a run without examples
        cfg.ppo.ptx.coef = 0.0
        off = plan_of(session, experience)
        assert off.atoms.extras.examples is None
        assert all(group.kinds is None for group in off.groups)
