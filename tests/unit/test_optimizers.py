"""Each optimizer by a first step worked out by hand, and resumed bit for bit."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from helpers import save_lm
from sessions import (
    experience_of,
    fresh_state,
    load_session,
    optimize,
    rollout_of,
    save_session,
    session_of,
    small_config,
    weights_of,
)

from ppocli.config.schema_training import PPOConfig, PPOOptimizerConfig, ValueOptimizerConfig
from ppocli.errors import CheckpointError, InputError
from ppocli.launch.input_checks import missing_inputs
from ppocli.ppo.step import to_experience
from ppocli.training.optimizers import build_optimizer, joined

HAS_8BIT = importlib.util.find_spec("bitsandbytes") is not None
needs_8bit = pytest.mark.skipif(not HAS_8BIT, reason="bitsandbytes is not installed")


def step_of(cfg: PPOOptimizerConfig, weight: list[list[float]], *grads: list[list[float]]):
    """The weight after a step with each of these gradients, flat."""
    module = torch.nn.Linear(len(weight[0]), len(weight), bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(weight))
    optimizer = build_optimizer(module, PPOConfig(optimizer=cfg))
    for grad in grads:
        module.weight.grad = torch.tensor(grad)
        optimizer.step()
    return module.weight.detach().flatten().tolist()


@pytest.mark.parametrize(("keys", "weight", "grads", "wanted"), [
    # buffer 1, then 0.5 * 1 + 2 = 2.5
    ({"name": "sgd", "momentum": 0.5}, 3.0, [1.0, 2.0], 3.0 - 0.1 * 1 - 0.1 * 2.5),
    # first step of Adam: the sign of the gradient; adamw shrinks by lr * decay besides
    ({"name": "adamw", "weight_decay": 0.5}, 2.0, [3.0], 2.0 * 0.95 - 0.1),
    # in adam and sgd the decay is added: -3 + 0.5 * 2 < 0
    ({"name": "adam", "weight_decay": 0.5}, 2.0, [-3.0], 2.1),
    ({"name": "sgd", "weight_decay": 0.5}, 2.0, [3.0], 2.0 - 0.1 * 4.0),
    # both moments corrected by 1 - 0.25: (0.25 * 1 + 0.5 * 2) / 0.75, (0.25 * 1 + 0.5 * 4) / 0.75
    ({"name": "adam", "betas": [0.5, 0.5], "eps": 0.5}, 0.0, [1.0, 2.0],
     -0.1 * 1 / (1 + 0.5) - 0.1 * (1.25 / 0.75) / (math.sqrt(2.25 / 0.75) + 0.5))])
def test_momentum_decay_betas_and_eps_by_hand(keys, weight, grads, wanted):
    found = step_of(PPOOptimizerConfig(lr=0.1, **keys), [[weight]], *([[grad]] for grad in grads))
    assert found == pytest.approx([wanted])


def test_adafactor_by_hand():
    # step 1: beta2 is 0; the squared gradient's means are 5 and 25 by row, 13 and 17 by column; the
    # estimate is row * column / mean of rows; the gradient over its root, clipped to RMS 1, goes
    # times min(lr, 1) * RMS of the weight (before its decay)
    weight, grad = [[1.0, 2.0], [3.0, 4.0]], [[1.0, 3.0], [5.0, 5.0]]
    rows = [5.0, 25.0]
    columns = [13.0, 17.0]
    update = [[grad[i][j] / math.sqrt(rows[i] * columns[j] / 15.0) for j in range(2)]
              for i in range(2)]
    size = math.sqrt(sum(u * u for row in update for u in row) / 4)
    scale = 0.1 * math.sqrt((1 + 4 + 9 + 16) / 4) / max(1.0, size)
    expected = [weight[i][j] * (1 - 0.1 * 0.5) - scale * update[i][j] for i in range(2)
                for j in range(2)]
    cfg = PPOOptimizerConfig(name="adafactor", lr=0.1, weight_decay=0.5)
    assert step_of(cfg, weight, grad) == pytest.approx(expected, rel=1e-5)


def two_steps(cfg, save: Path | None = None, load: Path | None = None):
    """Weights and optimizer state after steps 0 and 1, or after step 1 from a checkpoint."""
    with session_of(cfg) as session:
        steps = range(2)
        if load is not None:
            load_session(session, load)
            steps = range(1, 2)
        for step in steps:
            state = fresh_state(session)
            rollout = rollout_of(session, start=16 * step)
            optimize(session, to_experience(rollout, state, cfg), step=step, updates=8 * step)
            if save is not None and step == 0:
                save.mkdir()
                save_session(session, save)
        state = session.trained.optimizer.state
        slots = [{k: torch.as_tensor(v).clone() for k, v in state[p].items()
                  if v is not None} for p in session.policy.parameters()]
        return weights_of(session), slots


@pytest.mark.parametrize(("name", "weights"), [
    ("sgd", "fp32"), ("adafactor", "bf16"),
    *(pytest.param(name, "fp32", marks=pytest.mark.slow) for name in ("adamw", "adam")),
    pytest.param("adamw_8bit", "fp32", marks=needs_8bit)])
def test_an_optimizer_resumes_bit_for_bit(tmp_path, name, weights):
    # bitsandbytes keeps weights of less than 4096 numbers in 32 bits
    save_lm(tmp_path / "lm", n_embd=64)
    cfg = small_config(tmp_path, ppo__optimizer__name=name, ppo__optimizer__lr=1e-2,
                       ppo__scheduler__name="linear", ppo__scheduler__warmup_updates=3,
                       hardware__precision=weights, hardware__weights=weights)
    if name == "sgd":
        cfg.ppo.optimizer.momentum = 0.9
    weights, slots = two_steps(cfg, save=tmp_path / "saved")
    if name == "adamw_8bit":
        assert any(slot.dtype == torch.uint8 for state in slots for slot in state.values())
    again, slots_again = two_steps(cfg, load=tmp_path / "saved")
    for key, tensor in weights.items():
        assert torch.equal(tensor, again[key]), key
    assert any(slots)
    for old, new in zip(slots, slots_again, strict=True):
        assert set(old) == set(new)
        assert all(torch.equal(old[k], new[k]) for k in old)


@pytest.mark.parametrize(("name", "value_optimizer"), [("adamw", None), ("sgd", "adafactor")])
def test_bf16_weights_move_as_their_fp32_copies_do(name, value_optimizer):
    """300 steps that are each far below what bf16 can add to a weight of 1: the two halves are
    what the optimizer makes of fp32 weights, to the last bit."""
    wanted = PPOOptimizerConfig(name=name, lr=1e-5)
    ppo = PPOConfig(optimizer=wanted, value_optimizer=ValueOptimizerConfig(name=value_optimizer))

    def module(dtype: torch.dtype) -> torch.nn.Module:
        found = torch.nn.ModuleDict({"lm": torch.nn.Linear(5, 3),
                                     "value_head": torch.nn.Linear(3, 1)})
        torch.nn.init.constant_(found["lm"].weight, 1.0)
        torch.nn.init.constant_(found["lm"].bias, -1.0)
        torch.nn.init.constant_(found["value_head"].weight, 0.5)
        torch.nn.init.constant_(found["value_head"].bias, 0.5)
        found["lm"].to(dtype)
        return found

    whole, halves = module(torch.float32), module(torch.bfloat16)
    optimizers = [build_optimizer(one, ppo) for one in (whole, halves)]
    torch.manual_seed(0)
    for _ in range(300):
        for one, other in zip(whole.parameters(), halves.parameters(), strict=True):
            other.grad = (1.0 + torch.randn(one.shape)).to(torch.bfloat16).to(other.dtype)
            one.grad = other.grad.float()
        for optimizer in optimizers:
            optimizer.step()
    state = optimizers[1].state
    for one, other in zip(whole.parameters(), halves.parameters(), strict=True):
        found = joined(other, state[other]["low"]) if other.dtype != torch.float32 else other
        assert torch.equal(found, one)
        assert other.dtype == torch.float32 or torch.equal(other, one.to(torch.bfloat16))
    assert 1e-4 < float((whole["lm"].weight.detach() - 1.0).abs().min()) < 1.0


def test_state_of_other_parameters_is_refused(tmp_path):
    cfg = small_config(tmp_path)
    with session_of(cfg) as session:
        optimize(session, experience_of(session))
        (tmp_path / "saved").mkdir()
        save_session(session, tmp_path / "saved")
    cfg.model.num_layers_unfrozen = 1
    with session_of(cfg) as session, pytest.raises(CheckpointError, match="optimizer state"):
        load_session(session, tmp_path / "saved")


def test_without_bitsandbytes_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    cfg = small_config(tmp_path, ppo__optimizer__name="adamw_8bit")
    (problem,) = missing_inputs(cfg)
    assert "pip install 'ppocli[8bit]'" in problem.fix
    with pytest.raises(InputError, match="bitsandbytes"):
        build_optimizer(torch.nn.Linear(1, 1), cfg.ppo)
