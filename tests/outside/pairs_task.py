"""A task that ppocli knows nothing of: a scalar head learns which of two texts is better.

As a user's file: it uses what the seams offer, and is found by ``task.fn=pairs_task.py:Pairs``.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ppocli.distributed.backend import PassRows
from ppocli.models.loading.language_model import load_lm
from ppocli.models.loading.tokenizer import load_tokenizer
from ppocli.training.checkpoint_writing import SavedModel
from ppocli.training.optimize import prepare
from ppocli.training.optimizers import build_optimizer
from ppocli.training.task import (
    PASSES,
    Evaluation,
    Finished,
    LossTerms,
    Plan,
    Task,
    TaskSetup,
    UpdateGroup,
)


class Scorer(nn.Module):
    """One number per text, from the state of its last token."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self.head = nn.Linear(lm.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[b, T] tokens, padded on the right, to [b]."""
        states = self.lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        last = states[torch.arange(len(tokens)), lengths - 1]
        return self.head(last).squeeze(-1)


class Pairs(Task):
    """Bradley-Terry on pairs; those it has got wrong lately weigh more."""

    terms = ("total", "right", "margin")
    maxima = frozenset({"margin"})

    def __init__(self, setup: TaskSetup, *, path: str, memory: float = 0.5) -> None:
        cfg, backend = setup.cfg, setup.backend
        self.cfg, self.backend, self.memory = cfg, backend, memory
        loaded, tokenizer = load_lm(cfg.model), load_tokenizer(cfg.model)
        torch.manual_seed(cfg.seed)
        module = Scorer(loaded.lm).to(backend.device)
        self.trained = prepare(backend, module, build_optimizer(module, cfg.ppo),
                               cfg.ppo.max_grad_norm)
        self.saved = SavedModel(loaded.lm, loaded.export_config, loaded.generation_config,
                                tokenizer)
        self.passes = PassRows(backend, PASSES)
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        texts = [[tokenizer(row[name])["input_ids"] for name in ("chosen", "rejected")]
                 for row in rows]
        self.pairs, self.held_back = texts[:-4], texts[-4:]

    def initial(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return {"seen": 0}, {"weights": torch.ones(len(self.pairs))}

    def collect(self, state, context) -> list[int]:
        count = min(self.length.samples_per_step, self.length.total_samples - state.episodes)
        order = torch.randperm(len(self.pairs), generator=torch.Generator().manual_seed(state.step))
        context.clock.mark("other")
        return [int(order[i % len(order)]) for i in range(count)]

    def plan(self, state, batch) -> Plan:
        rows = torch.tensor(batch)
        lengths = torch.tensor([max(map(len, pair)) for pair in self.pairs])
        groups = []
        for epoch in range(self.cfg.ppo.ppo_epochs):
            for some in rows.split(self.cfg.ppo.mini_batch_size):
                weights = state.tensors["weights"][some]
                groups.append(UpdateGroup(some, 2 * lengths[some], torch.ones_like(some),
                                          weights / weights.sum(), epoch))
        return Plan(None, groups)

    def _margins(self, run: Any, pairs: list[Any]) -> tuple[torch.Tensor, int]:
        texts = [text for pair in pairs for text in pair]
        lengths = torch.tensor([len(text) for text in texts])
        tokens = nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        scores = run(tokens.to(self.backend.device), lengths.to(self.backend.device))
        return scores[0::2] - scores[1::2], tokens.numel()

    def loss(self, atoms, rows, weights, group) -> LossTerms:
        margins, tokens = self._margins(self.trained.engine, [self.pairs[i] for i in rows.tolist()])
        weights = weights.to(margins.device)
        total = -(weights * nn.functional.logsigmoid(margins)).sum()
        right = (weights * (margins > 0)).sum()
        return LossTerms(total, torch.stack([total, right, margins.max()]).detach(), tokens)

    def finish(self, state, batch, plan, result) -> Finished:
        weights = state.tensors["weights"].clone()
        margins = self._measured([self.pairs[i] for i in batch])
        weights[batch] = self.memory * weights[batch] + (1 - self.memory) * torch.sigmoid(-margins)
        row = {f"loss/{name}": value for name, value in result.terms.items()}
        return Finished({**row, "pairs/weight_mean": float(weights.mean())},
                        {"seen": state.task["seen"] + len(batch)}, {"weights": weights})

    @torch.no_grad()
    def _measured(self, pairs: list[Any]) -> torch.Tensor:
        return self._margins(self.trained.module, pairs)[0].cpu()

    def evaluate(self, context) -> Evaluation:
        margins = self._measured(self.held_back)
        figures = {"accuracy": float((margins > 0).float().mean()),
                   "margin_mean": float(margins.mean())}
        return Evaluation(figures, [{"margin": float(value)} for value in margins])

    def modules(self) -> dict[str, nn.Module]:
        return {"head": self.trained.module.head}

    def summary(self, state) -> dict[str, Any]:
        return dict(state.task)
