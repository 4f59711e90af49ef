"""``ppocli sft`` as a task: its loss, gradient and evaluation against transformers' own."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import save_lm, save_talker
from sessions import backward, data_task_of, grads_of, idle_context, planned

from ppocli.data import data_set
from ppocli.distributed.ranks import StopFlag
from ppocli.supervised.sft_task import SFTTask
from ppocli.training.loop import initial_state
from ppocli.training.optimize import optimize
from ppocli.training.state import RunLength, TrainState

ROWS = [{"prompt": prompt, "completion": completion} for prompt, completion in (
    ("the film was", " very good ."), ("i saw", " a dull film and hated it ."), ("it", " is fine"),
    ("the actor is not", " bad , but the plot was awful !"), ("we liked", " this ."),
    ("you hated that film and", " so was i ."), ("that plot", " was so very very cold ."))]
TALKS = [{"messages": [{"role": "user", "content": "the film"},
                       {"role": "assistant", "content": "very good"},
                       {"role": "user", "content": "the plot is dull"},
                       {"role": "assistant", "content": "i liked it"}]},
         {"messages": [{"role": "user", "content": "the actor"},
                       {"role": "assistant", "content": "was awful and bad"}]}]
TEXTS = [{"text": row["prompt"] + row["completion"]} for row in ROWS]


@contextmanager
def sft_of(folder: Path, kind: str = "gpt2", rows: Any = ROWS, val: Any = None, **keys: Any
           ) -> Iterator[SFTTask]:
    """The task on rows; dots in names of keys as ``__``."""
    lm = folder / kind
    if not lm.exists():
        # T5 does not scale its attention: large weights would make it jump
        save_talker(lm) if kind == "talker" else save_lm(
            lm, kind, gain=1.0 if kind == "t5" else 4.0)
    with data_task_of(lm, rows, val, {
            "task.fn": "sft", "sft.mini_batch_size": 4, "sft.epochs": 2, "sft.optimizer.lr": 1e-3,
            "checkpoint.metric": "loss", "generation.max_new_tokens": 6}, **keys) as task:
        assert isinstance(task, SFTTask)
        yield task


def gradient(task: SFTTask) -> tuple[float, dict[str, Any]]:
    """The loss of the next update, and its gradient by name."""
    _, plan = planned(task)
    return backward(task, plan, plan.groups[0])["total"], grads_of(task.policy)


def own_loss(task: Any, data: Any, places: list[int], lm: Any = None) -> tuple[torch.Tensor, int]:
    """The sum that transformers' model and torch's cross entropy come to, one row at a time, and
    how many tokens it is over."""
    lm, total, count = lm or task.loaded.lm, torch.zeros(()), 0
    for i in places:
        ids, mask = torch.tensor(data.tokens[i]).long(), torch.tensor(data.trained[i])
        labels = ids.masked_fill(~mask, -100)
        if data.encoder_tokens:
            start = torch.tensor([task.loaded.decoder_start])
            logits = lm(input_ids=torch.tensor(data.encoder_tokens[i]).long()[None],
                        decoder_input_ids=torch.cat([start, ids[:-1]])[None]).logits[0]
        else:
            logits, labels = lm(input_ids=ids[None]).logits[0, :-1], labels[1:]
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100,
                                                          reduction="sum")
        count += int((labels != -100).sum())
    return total, count


LORA = {"type": "lora", "r": 4, "target_modules": ["c_attn"], "lora_dropout": 0.0}


@pytest.mark.parametrize(("kind", "rows", "keys"), [
    ("llama", TEXTS, {}), ("talker", TALKS, {"data__train_on": "completion"}), ("t5", ROWS, {}),
    ("gpt2", ROWS, {"model__peft": LORA}),
    pytest.param("gpt2", ROWS, {"data__train_on": "all"}, marks=pytest.mark.slow),
    pytest.param("gpt2", ROWS, {"model__num_layers_unfrozen": 1}, marks=pytest.mark.slow)])
def test_loss_and_gradient_are_transformers_whatever_the_passes(tmp_path, kind, rows, keys):
    """The mean over the tokens of an update, in passes of all rows packed or padded, of two rows,
    of one, and of few tokens."""
    with sft_of(tmp_path, kind, rows, **keys) as task:
        assert task.packs == (kind != "t5")
        batch, _ = planned(task)
        task.trained.clear()
        total, count = own_loss(task, task.train, batch)
        wanted_loss = float(total.detach()) / count
        (total / count).backward()
        wanted = grads_of(task.policy)
        scale = max(float(one.abs().max()) for one in wanted.values())
        for passes in ({}, {"micro_batch_size": 3},
                       {"micro_batch_size": None, "micro_batch_tokens": 17}, {"packing": False}):
            for name, value in passes.items():
                if name == "packing":
                    task.packs = False
                else:
                    setattr(task.cfg.sft, name, value)
            loss, found = gradient(task)
            assert loss == pytest.approx(wanted_loss, rel=1e-6)
            assert found.keys() == wanted.keys()
            assert max(float((found[name] - wanted[name]).abs().max())
                       for name in wanted) < 1e-6 * max(scale, 1)


def test_three_updates_are_those_of_a_loop_written_by_hand(tmp_path):
    """AdamW, the clip and the linear schedule, over an epoch's end."""
    with sft_of(tmp_path, sft__max_grad_norm=0.5, sft__scheduler__name="linear",
                # so much that rounding of gradients that are 0 doesn't count
                sft__optimizer__weight_decay=0.1, sft__optimizer__eps=1e-5) as task:
        lm, state = task.loaded.lm, initial_state(task)
        start = {name: value.clone() for name, value in lm.state_dict().items()}
        orders: list[list[int]] = []
        for step in range(3):
            batch, plan = planned(task, state)
            result = optimize(task, plan, state, StopFlag())
            orders.append(batch)
            state = TrainState(digests={}, judged_by="", step=step + 1, updates=step + 1,
                               episodes=state.episodes + len(batch))
        ours = {name: value.clone() for name, value in lm.state_dict().items()}
        assert sorted([*orders[0], *orders[1]][:7]) == list(range(7))  # an epoch sees each row once
        assert result.lr == pytest.approx(1e-3 * (1 - 2 / 4))
        lm.load_state_dict(start)
        optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.1)
        for update, batch in enumerate(orders):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - update / 4)
            total, count = own_loss(task, task.train, batch)
            optimizer.zero_grad()
            (total / count).backward()
            torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.5)
            optimizer.step()
        theirs = lm.state_dict()
        assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-6
        assert any(not torch.equal(ours[name], start[name]) for name in ours)


def test_evaluation_is_the_oracles_whatever_the_passes(tmp_path):
    with sft_of(tmp_path, rows=ROWS[:2], val=ROWS[2:], sft__eval_samples=2) as task:
        with torch.no_grad():
            total, count = own_loss(task, task.val, list(range(5)))
        for size in (None, 3):
            task.cfg.sft.micro_batch_size = size
            found = task.evaluate(idle_context())
            assert found.figures["loss"] == pytest.approx(float(total) / count, abs=1e-6)
            assert found.figures["perplexity"] == pytest.approx(math.exp(float(total) / count))
            assert found.figures["tokens"] == count
            assert [row["prompt"] for row in found.samples] == ["it", "the actor is not"]
            assert {"response", "response_tokens", "finished"} <= found.samples[0].keys()
        task.cfg.sft.neftune = 5.0  # noise is for training alone
        assert task.evaluate(idle_context()).figures["loss"] == found.figures["loss"]


def test_noise_is_of_the_seed_the_example_and_the_epoch_alone(tmp_path):
    """Within the bounds of NEFTune, like a uniform distribution's, whatever the passes; another
    epoch's is other noise."""
    with sft_of(tmp_path, sft__neftune=5.0) as task:
        loss, whole = gradient(task)
        task.cfg.sft.micro_batch_size = 1
        again, parts = gradient(task)
        assert again == pytest.approx(loss, abs=1e-6)
        assert max(float((whole[name] - parts[name]).abs().max()) for name in whole) < 2e-6
        samples = task.sequences(task.train, torch.arange(7))
        table = task.loaded.lm.get_input_embeddings()

        def noisy(first: int) -> torch.Tensor:
            with torch.no_grad(), task._noise(samples, first + torch.arange(7)):
                return table(samples.tokens) - table.weight[samples.tokens]

        one, next_epoch = noisy(0), noisy(7)
        assert torch.equal(one, noisy(0))
        assert not torch.equal(one, next_epoch)
        for row, length in zip(one, samples.lengths.tolist(), strict=True):
            most, own = 5.0 / math.sqrt(length * 32), row[:length]
            assert float(row[length:].abs().sum()) == 0
            assert 0.95 * most < float(own.abs().max()) <= most * (1 + 1e-4)
            assert float(own.mean()) == pytest.approx(0, abs=0.15 * most)
            assert float(own.std()) == pytest.approx(most / math.sqrt(3), rel=0.15)


def test_the_order_is_drawn_once_an_epoch(tmp_path, monkeypatch):
    with sft_of(tmp_path) as task:
        def places(samples: range) -> list[int]:
            task.cfg.sft.mini_batch_size = len(samples)
            task.length = RunLength.of(task.cfg, task.examples)
            state = replace(initial_state(task), episodes=samples.start)
            return task.collect(state, idle_context())

        first = [places(range(i, i + 2)) for i in (0, 2, 4, 6, 8)]
        assert [place for some in first for place in some] == places(range(10))
        assert sorted(places(range(7))) == sorted(places(range(7, 14)))
        assert places(range(7)) != places(range(7, 14))
        drawn = data_set._order.cache_info().misses
        places(range(8, 10))
        assert data_set._order.cache_info().misses == drawn
        task.cfg.data.shuffle = False
        assert places(range(5, 9)) == [5, 6, 0, 1]
