"""``ppocli reward-model`` as a task: its loss, its figures, where a score is read, what it saves;
and how a PPO run takes it up."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import save_lm
from sessions import (
    backward,
    data_task_of,
    idle_context,
    planned,
    refused_session,
    rollout_of,
    session_of,
    small_config,
)
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ppocli.distributed.ranks import StopFlag
from ppocli.errors import InputError
from ppocli.models.layout import lay_out
from ppocli.rewards.reward_model import RewardModel
from ppocli.supervised.reward_model_task import RewardModelTask, calibration_error, preference_loss
from ppocli.training.loop import initial_state
from ppocli.training.optimize import optimize

TEXTS = (
    ("the film was", " very good and warm .", " dull ."),
    ("i saw", " it", " a dull film and so it"),
    ("the plot is", " great", " awful"), ("it was", " so fine , we loved it !", " cold"),
    ("you", " liked this", " hated that film and was cold"), ("the actor", " was good", " bad"))
PAIRS = [dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)) for texts in TEXTS]
SWAPPED = [{**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in PAIRS]


@contextmanager
def task_of(folder: Path, kind: str = "gpt2", pairs: Any = PAIRS, val: Any = PAIRS,
            pad: bool = True, **keys: Any) -> Iterator[RewardModelTask]:
    """The task on pairs; dots in names of keys as ``__``."""
    lm = folder / f"{kind}-{pad}"
    if not lm.exists():
        save_lm(lm, kind, pad=pad, gain=1.0 if kind == "t5" else 2.0)
    with data_task_of(lm, pairs, val, {
            "task.fn": "reward_model", "reward_model.mini_batch_size": 6,
            "reward_model.epochs": 30, "reward_model.optimizer.lr": 1e-2,
            "checkpoint.metric": "accuracy"}, **keys) as task:
        assert isinstance(task, RewardModelTask)
        yield task


def train(task: RewardModelTask, updates: int) -> None:
    for _ in range(updates):
        optimize(task, planned(task)[1], initial_state(task), StopFlag())


def saved(task: RewardModelTask, folder: Path) -> Path:
    task.closing()
    task.saved.write(folder)
    return folder


def plain_scores(folder: Path, rows: list[list[int]], side: str) -> list[float]:
    """Scores of one padded batch by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer.padding_side = side
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    places = (batch.attention_mask.cumsum(1) - 1).clamp(min=0)  # GPT-2 doesn't count them itself
    with torch.no_grad():
        return model(**batch, position_ids=places).logits[:, 0].tolist()


@pytest.mark.parametrize("micro", [{}, {"micro_batch_tokens": 20}])
def test_the_loss_is_that_of_transformers_scores_whatever_the_passes(tmp_path, micro):
    pairs = [{**pair, "margin": 0.25 * i} for i, pair in enumerate(PAIRS)]
    keys = {f"reward_model__{name}": value for name, value in micro.items()}
    with task_of(tmp_path, pairs=pairs, reward_model__center_coef=0.1, **keys) as task:
        lm, wanted = task.saved.lm, []
        for chosen, rejected, margin in zip(task.train.chosen, task.train.rejected,
                                            task.train.margins, strict=True):
            r_c, r_r = (lm(input_ids=torch.tensor(ids[None]).long()).logits[0, 0]
                        for ids in (chosen, rejected))
            wanted.append(torch.log1p(torch.exp(r_r - r_c + margin)) + 0.1 * (r_c + r_r) ** 2)
        mean = torch.stack(wanted).mean()
        grads = torch.autograd.grad(mean, [p for p in lm.parameters() if p.requires_grad])
        _, plan = planned(task)
        terms = backward(task, plan, plan.groups[0])
        assert terms["total"] == pytest.approx(mean.item(), abs=1e-6)
        for grad, p in zip(grads, lm.parameters(), strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-6)


def test_the_loss_and_the_calibration_by_hand():
    loss = preference_loss(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([1.0]), 0.5)
    assert loss.tolist() == pytest.approx([0.693147 + 4.5], abs=1e-5)
    # two of four are right where the model says 0.9526, and a tie says 0.5 and counts one half
    margins = torch.tensor([3.0, 3.0, -3.0, -3.0, 0.0])
    assert calibration_error(margins) == pytest.approx(0.8 * (0.952574 - 0.5), abs=1e-5)


def test_swapped_pairs_give_one_less_the_accuracy_and_a_tie_is_one_half(tmp_path, caplog):
    four = 4  # a power of 2, so that shares are exact
    with task_of(tmp_path, val=PAIRS[:four]) as task, caplog.at_level(logging.WARNING):
        found = task.evaluate(idle_context()).figures
        ties = task.evaluation_figures(torch.zeros(four, 2, dtype=torch.float64))
        sure = task.evaluation_figures(torch.tensor([[1.0, 0.0]] * four, dtype=torch.float64))
        assert (ties["accuracy"], ties["accuracy_longer"], sure["accuracy"]) == (0.5, 0.5, 1.0)
        # half of Wilson's interval for four alike, of which one more could have been another
        assert sure["accuracy_stderr"] == ties["accuracy_stderr"] == 0.5 / 5
        assert sure["accuracy_pairs"] == four
        assert caplog.messages[-1].startswith("The accuracy on held-back pairs is 0.500 +- 0.100")
    with task_of(tmp_path, val=SWAPPED[:four]) as task:
        swapped = task.evaluate(idle_context()).figures
    assert swapped["accuracy"] == 1 - found["accuracy"]
    assert swapped["margin_mean"] == pytest.approx(-found["margin_mean"])
    assert swapped["accuracy_shorter"] == 1 - found["accuracy_longer"]


@pytest.mark.parametrize(("kind", "pad", "lora"), [
    ("gpt2", False, False), ("llama", True, True)])
def test_what_it_saves_scores_as_it_did_for_transformers_and_for_the_reward(
        tmp_path, kind, pad, lora):
    """Padded on either side, and for texts without the token that ended them in training."""
    keys = {"model__peft": {"type": "lora", "r": 4}} if lora else {}
    with task_of(tmp_path, kind, pad=pad, **keys) as task:
        train(task, 12)
        row = task.evaluate(idle_context())
        assert row.figures["accuracy"] == 1.0
        assert row.samples[0]["prompt"] == "the film was"
        scores = task.measured(task.train, StopFlag())
        folder = saved(task, tmp_path / "rm")
        rows = [ids.tolist() for ids in task.train.chosen]
    for side in ("right", "left"):
        assert plain_scores(folder, rows, side) == pytest.approx(scores[:, 0].tolist(), abs=1e-5)
    reward = RewardModel(str(folder))
    for i, name in enumerate(("chosen", "rejected")):
        texts = [pair["prompt"] + pair[name] for pair in PAIRS]
        found = reward(texts, [pair["prompt"] for pair in PAIRS], [pair[name] for pair in PAIRS])
        assert found == pytest.approx(scores[:, i].tolist(), abs=1e-5)
    assert reward.stored_scale == pytest.approx((float(scores.mean()),
                                                 float(scores.std(unbiased=False))))
    assert not (folder / "generation_config.json").exists()


def test_a_reward_model_keeps_its_head_and_a_new_one_comes_of_the_seed(tmp_path):
    heads = []
    for seed in (0, 1):
        with task_of(tmp_path, seed=seed) as task:
            heads.append(task.saved.lm.score.weight.detach().clone())
    assert not torch.equal(*heads)
    assert 0.05 < float(heads[0].norm()) < 0.2  # 0.1 / sqrt(D) each
    with task_of(tmp_path) as task:
        assert torch.equal(task.saved.lm.score.weight, heads[0])
        train(task, 2)
        folder, own = saved(task, tmp_path / "rm"), task.saved.lm.score.weight.detach().clone()
    with task_of(tmp_path, model__path=str(folder), seed=5) as task:
        assert torch.equal(task.saved.lm.score.weight, own)


@pytest.fixture
def run_of(tmp_path: Path) -> Path:
    """A run's folder with a trained reward model in it."""
    with task_of(tmp_path) as task:
        train(task, 5)
        saved(task, tmp_path / "run/model")
    (tmp_path / "run/run.json").write_text("{}")
    return tmp_path / "run"


def test_ppo_starts_from_the_run_its_values_and_its_scale(tmp_path, run_of):
    """The first values are the reward model's scores of what was said so far."""
    cfg = small_config(
        tmp_path, model__path=str(tmp_path / "gpt2-True"), model__value__kind="model",
        model__value__path=str(run_of), reward__fn="reward_model",
        reward__kwargs={"model": str(run_of)}, reward__scale="ref", reward__center=True)
    stored = json.loads((run_of / "model/config.json").read_text())
    with session_of(cfg, reward=None) as session:
        rollout = rollout_of(session)
        assert (session.cfg.reward.ref_mean, session.cfg.reward.ref_std) == (
            stored["score_mean"], stored["score_std"])
        batch = lay_out(rollout.sequences)
        model = AutoModelForSequenceClassification.from_pretrained(run_of / "model").eval()
        with torch.no_grad():
            hidden = model.base_model(input_ids=batch.tokens).last_hidden_state
            wanted = model.score(hidden).flatten()[batch.predictors]
        found = rollout.values[rollout.response_mask]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_a_head_that_would_be_random_is_refused_and_so_is_a_mean_nobody_knows(tmp_path, run_of):
    model = AutoModelForSequenceClassification.from_pretrained(run_of / "model")
    del model.config.score_mean
    model.save_pretrained(tmp_path / "known")
    AutoTokenizer.from_pretrained(run_of / "model").save_pretrained(tmp_path / "known")
    rest = {name: tensor for name, tensor in model.state_dict().items() if "score" not in name}
    model.save_pretrained(run_of / "model", state_dict=rest)
    scored = {"reward__fn": "reward_model", "reward__kwargs": {"model": str(run_of)}}
    valued = {"model__value__kind": "model", "model__value__path": str(run_of)}
    centred = {"reward__fn": "reward_model", "reward__kwargs": {"model": str(tmp_path / "known")},
               "reward__scale": "ref", "reward__center": True}
    for keys, said in ((scored, "random"), (valued, "random"), (centred, "No mean")):
        cfg = small_config(tmp_path, model__path=str(tmp_path / "gpt2-True"), **keys)
        reward: Any = None if "reward__fn" in keys else lambda samples: [0.0] * len(samples)
        refused_session(cfg, InputError, said, reward=reward)
