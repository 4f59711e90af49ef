"""A reward model as a task: the scores of two answers to a prompt, the better one's above the
other's."""

import logging
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import logsigmoid

from ppocli.config import tasks
from ppocli.config.text import share_error
from ppocli.data.data_set import Ids, Pairs
from ppocli.data.prompt_set import tokens_around
from ppocli.distributed.backend import to_device
from ppocli.distributed.ranks import StopFlag
from ppocli.errors import ConfigError
from ppocli.models import layout, trunk
from ppocli.models.loading import language_model, model_config
from ppocli.models.loading.tokenizer import load_tokenizer
from ppocli.rewards.reward_model import SCORE_MEAN, SCORE_STD
from ppocli.rewards.scorers import SCORE_END, SCORE_FRONT
from ppocli.supervised import supervised_task
from ppocli.training import build_models, checkpoint_writing, task

log = logging.getLogger("ppocli")

SHOWN = 4
"""pairs that an evaluation shows"""
BINS = 10
"""of the calibration error"""


class ScoreModel(nn.Module):
    """A sequence classifier of transformers with one label, whose score is read where a batch's
    predictors are."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, batch: layout.SequenceBatch) -> torch.Tensor:
        """[N] scores, fp32."""
        hidden = trunk.response_hidden(self.lm, batch)
        with torch.autocast(hidden.device.type, enabled=False):
            trained = [p.dtype for p in self.lm.score.parameters() if p.requires_grad]
            return self.lm.score(hidden.to(*trained[:1] or [hidden.dtype])).squeeze(-1).float()


def preference_loss(chosen: torch.Tensor, rejected: torch.Tensor, margins: torch.Tensor,
                    center_coef: float) -> torch.Tensor:
    """[b] ``-log sigmoid(r_c - r_r - margin) + center_coef * (r_c + r_r)^2`` of b pairs of scores.

    The first term is Bradley and Terry's model with the margin of Llama 2 (Touvron et al. 2023,
    arXiv 2307.09288, equation 2), the second holds scores around 0 (Eisenstein et al. 2023, arXiv
    2312.09244); together as TRL's ``RewardTrainer`` has them.
    """
    return -logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected) ** 2


def calibration_error(margins: torch.Tensor) -> float:
    """The expected calibration error of sigmoid(|margin|) as the probability that the answer with
    the higher score is the better one, over ten bins of equal width in [0, 1], five of which it can
    fall into (Guo et al. 2017, arXiv 1706.04599).

    Args:
        margins: [n] chosen less rejected scores.
    """
    right = torch.where(margins == 0, 0.5, (margins > 0).double())
    sure = torch.sigmoid(margins.double().abs())  # from 0.5 on
    bins = (sure * BINS).long().clamp(max=BINS - 1)
    sums = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, right - sure)
    return float(sums.abs().sum() / len(margins))


class RewardModelTask(supervised_task.SupervisedTask):
    """The mean loss of an update's pairs, each with the same weight."""

    terms = ("total", "accuracy", "margin")
    lower_is_better = tasks.KINDS["reward_model"].lower_is_better

    def __init__(self, setup: task.TaskSetup, tokenizer: Any, loaded: language_model.LoadedLM,
                 train: Pairs, val: Pairs | None) -> None:
        build_models.freeze(setup.cfg, loaded.lm)
        scorer = build_models.placed(setup.backend, ScoreModel(loaded.lm))
        super().__init__(setup, tokenizer, scorer, train, val)
        config = loaded.export_config
        config.get_text_config().pad_token_id = config.pad_token_id = tokenizer.pad_token_id
        self.saved = checkpoint_writing.SavedModel(
            loaded.lm, config, None, tokenizer, loaded.adapter, merges=True)

    def sequences(self, texts: list[Ids]) -> layout.Sequences:
        """Texts as a forward pass reads them. What predicts the action of each, a token that isn't
        read, is the last one that doesn't pad: where transformers reads the score."""
        pad = self.tokenizer.pad_token_id
        ends = [int(np.flatnonzero(ids != pad)[-1:].sum()) + 1 for ids in texts]
        tokens = [np.append(ids[:end], 0) for ids, end in zip(texts, ends, strict=True)]
        return layout.Sequences.of_places(tokens, [[end] for end in ends])

    def scores(self, data: Pairs, scorer: Any) -> torch.Tensor:
        """[2, b] scores of the chosen and the rejected answers, on their device.

        Args:
            scorer: what is trained, as a module or as the engine around it.
        """
        samples = self.sequences([*data.chosen, *data.rejected])
        batch = layout.lay_out(samples, pack=self.packs).to(self.backend.device)
        return scorer(batch).reshape(2, -1)

    def shown(self, measured: torch.Tensor, stop: StopFlag) -> list[dict[str, Any]]:
        """As :class:`SupervisedTask`: the first pairs of ``data.val`` and their scores."""
        pairs = self.val.rows(range(min(SHOWN, len(self.val))))
        rows = []
        for scores, start, *ids in zip(measured.tolist(), pairs.prompt_lengths, pairs.chosen,
                                       pairs.rejected, strict=False):
            texts = self.tokenizer.batch_decode(
                [ids[0][:start], *(row[start:] for row in ids)], skip_special_tokens=True)
            rows.append(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))
                        | {"chosen_score": scores[0], "rejected_score": scores[1]})
        return rows

    def closing(self) -> dict[str, Any]:
        """As :class:`Task`: mean and deviation of the scores of both answers to all prompts of the
        training data, which are stored with the model."""
        scores = self.measured(self.train, StopFlag())
        stored = {SCORE_MEAN: float(scores.mean()), SCORE_STD: float(scores.std(unbiased=False))}
        front, _ = tokens_around(self.tokenizer)  # a chat template may leave it out
        self.saved.config.update({**stored, SCORE_FRONT: all(
            ids[:len(front)].tolist() == front for ids in self.train.chosen)})
        ends = {int(ids[-1]) for ids in (*self.train.chosen, *self.train.rejected)}
        if len(ends) == 1 and ends != {self.tokenizer.pad_token_id}:
            setattr(self.saved.config, SCORE_END, ends.pop())
        return stored

    def loss(self, atoms: Pairs, rows: torch.Tensor, weights: torch.Tensor,
             group: task.UpdateGroup) -> task.LossTerms:
        """As :class:`Task`."""
        pairs = atoms.rows(rows.tolist())
        chosen, rejected = self.scores(pairs, self.trained.engine)
        least = to_device(torch.tensor(pairs.margins, dtype=torch.float32), chosen.device)
        weights = to_device(weights, chosen.device)
        loss = preference_loss(chosen, rejected, least, self.cfg.reward_model.center_coef)
        margins = (chosen - rejected).detach()
        terms = torch.stack([loss.detach(), _accuracy(margins), margins]) @ weights
        return task.LossTerms((weights * loss).sum(), terms,
                              int(supervised_task.lengths_of(pairs).sum()))

    def measure(self, data: Pairs, rows: torch.Tensor) -> torch.Tensor:
        """As :class:`SupervisedTask`: the scores of both answers."""
        # the engine of stage 3 puts weights together, in step; others have nothing to add
        scorer = self.trained.engine if self.backend.zero_stage == 3 else self.trained.module
        return self.scores(data.rows(rows.tolist()), scorer).T.double().cpu()

    def evaluation_figures(self, measured: torch.Tensor) -> dict[str, float]:
        """As :class:`SupervisedTask`. The accuracy where the chosen answer is the longer one, and
        where it is the shorter one, shows a liking for length."""
        chosen, rejected = measured.T
        margins = chosen - rejected
        right = _accuracy(margins)
        loss = preference_loss(chosen, rejected, torch.tensor(self.val.margins),
                               self.cfg.reward_model.center_coef)
        accuracy, count = float(right.mean()), len(right)
        stderr = share_error(float(right.std(unbiased=False)) / max(count - 1, 1) ** 0.5, count)
        if abs(accuracy - 0.5) <= 2 * stderr or count < 2:
            log.warning("The accuracy on held-back pairs is %.3f +- %.3f: no better than guessing, "
                        "as far as %d pairs can tell", accuracy, stderr, count)
        longer = torch.tensor([len(one) - len(other) for one, other in zip(
            self.val.chosen, self.val.rejected, strict=True)])
        figures = {"accuracy": accuracy, "accuracy_stderr": stderr, "accuracy_pairs": float(count),
                   "loss": float(loss.mean()), "margin_mean": float(margins.mean()),
                   "ece": calibration_error(margins)}
        for name, part in (("longer", right[longer > 0]), ("shorter", right[longer < 0])):
            if len(part):
                figures[f"accuracy_{name}"] = float(part.mean())
        return figures


def _accuracy(margins: torch.Tensor) -> torch.Tensor:
    """1 where the chosen answer has the higher score, 0 where the other has, 1/2 for a tie."""
    return (margins.sign() + 1) / 2


def build_task(setup: task.TaskSetup) -> RewardModelTask:
    """The task of ``ppocli reward-model``.

    Raises:
        ConfigError, InputError: each naming the key and the fix.
    """
    cfg = setup.cfg
    if setup.objects.model is not None:
        raise ConfigError("A reward model is made from a folder or a Hub name.", where="model",
                          fix="save the model, and give its folder as model.path")
    if cfg.model.quantization is not None:
        raise ConfigError("A reward model is written as a whole, and a quantized base can't be.",
                          where="model.quantization", fix="leave it out")
    tokenizer, unloaded = load_tokenizer(cfg.model), model_config.read_lm(cfg.model)
    tokenizer.padding_side = "right"  # as positions that are counted from the left need it
    loaded, train, val = supervised_task.load(setup, tokenizer, unloaded, scores=True)
    build_models.note_wording(tokenizer, train.chat)
    return RewardModelTask(setup, tokenizer, loaded, train, val)
