"""What trainings on a data set share: the order in which its rows are used, one update per step,
and evaluations that all ranks share."""

import hashlib
import json
import logging
import math
import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from ppocli.config import schema, schema_training, tasks
from ppocli.data import encoding
from ppocli.data.data_set import Examples, Pairs, prompt_indices
from ppocli.distributed.backend import PassRows, to_device
from ppocli.distributed.ranks import StopFlag
from ppocli.errors import PpocliError
from ppocli.models import kernels, layout, trunk
from ppocli.models.loading import language_model, model_config
from ppocli.runs import faults
from ppocli.training import build_models, optimize, task
from ppocli.training.optimizers import build_optimizer
from ppocli.training.state import TrainState

log = logging.getLogger("ppocli")

_DATA_KEYS = re.compile(
    rf"(?<![\w./=-])data\.(?=({'|'.join(vars(schema_training.ExamplesConfig()))}|items)\b)")
"""where a text names a key of ``data``"""


def read_rows(cfg: schema.TrainConfig, tokenizer: Any, unloaded: Any,
              objects: task.PythonObjects | None = None) -> tuple[Any, Any]:
    """What to train on, and what evaluations are made on or None: pairs for a reward model, else
    examples.

    Args:
        unloaded: the model before its weights are read.

    Raises:
        ConfigError, InputError: as :func:`ppocli.data.encoding.load_data`.
    """
    objects = objects or task.PythonObjects()
    return encoding.load_data(
        cfg.data, tokenizer, seed=cfg.seed, encoder=trunk.has_encoder(unloaded),
        wants="pairs" if tasks.task_name(cfg) == "reward_model" else "completions",
        max_tokens=model_config.max_positions(unloaded) or 2**31,
        items=objects.data, val_items=objects.val_data)


def read_mixed_in(cfg: schema.TrainConfig, tokenizer: Any, unloaded: Any) -> Examples | None:
    """The examples of ``ppo.ptx.data``, read as ``ppocli sft`` reads its own; None where none are
    named.

    Args:
        unloaded: the model before its weights are read.

    Raises:
        ConfigError, InputError: as :func:`read_rows`, by the keys that they have here.
    """
    if cfg.ppo.ptx.data.path is None:
        return None
    data = schema_training.DataConfig(**vars(cfg.ppo.ptx.data))
    try:
        return read_rows(replace(cfg, data=data), tokenizer, unloaded)[0]
    except PpocliError as error:
        raise error.reworded(**{part: text and _DATA_KEYS.sub("ppo.ptx.data.", text)
                                for part in ("what", "where", "fix")
                                for text in [getattr(error, part)]}) from error


def pass_tokens(cfg: schema.TrainConfig, data: Any, ranks: int) -> tuple[int, int]:
    """Tokens that a row of the fullest pass has before the first that is trained on, and from there
    on: on average where rows are packed, else those of the longest. Of pairs only the last state
    counts."""
    settings = tasks.updates_of(cfg)
    rows = min(tasks.rows_per_pass(settings), -(-settings.mini_batch_size // ranks))
    pair = isinstance(data, Pairs)
    texts = [*data.chosen, *data.rejected] if pair else data.tokens
    order = np.argsort([-len(ids) for ids in texts], kind="stable")[:rows * (1 + pair)]
    packs = cfg.data.packing and cfg.sft.neftune is None

    def size(lengths: list[int]) -> int:
        return math.ceil(float(np.mean(lengths) if packs else max(lengths)))

    whole = size([len(texts[i]) for i in order])
    if pair:
        return whole, 1
    if data.encoder_tokens:
        return max(map(len, data.encoder_tokens)), max(map(len, texts))
    trained_tokens = size([int(data.trained[i].sum()) for i in order])
    return max(whole + 1 - trained_tokens, 1), trained_tokens


def load(setup: task.TaskSetup, tokenizer: Any, unloaded: Any, *, scores: bool = False
         ) -> tuple[language_model.LoadedLM, Any, Any]:
    """The model that training starts from, what to train on and what evaluations are made on, None
    without ``data.val``; what there is to say of them is logged.

    Args:
        unloaded: as of :func:`read_rows`.
        scores: as of :func:`ppocli.training.build_models.load_start`.

    Raises:
        ConfigError, InputError: as :func:`ppocli.data.encoding.load_data`.
        PpocliError: as :func:`ppocli.training.build_models.load_start`.
    """
    train, val = read_rows(setup.cfg, tokenizer, unloaded, setup.objects)
    for name, data in (("data", train), ("data.val", val)):
        for note in () if data is None else data.notes:
            log.info("%s: %s", name, note)
    prompt, new = pass_tokens(setup.cfg, train, setup.backend.ranks.world)
    build_models.check_memory(setup.cfg, setup.backend, unloaded.config, prompt_tokens=prompt,
                          new_tokens=new)
    if val is None and setup.cfg.checkpoint.keep_best:
        log.info("data.val is not given: nothing is evaluated, and no checkpoint is the best")
    loaded = build_models.load_start(setup.cfg, setup.backend, setup.objects.model, scores=scores)
    language_model.fit_vocabulary(tokenizer, loaded.lm, setup.cfg.model)
    return loaded, train, val


@dataclass(frozen=True, slots=True)
class DataResume(task.Resume):
    """What must not change in a training on a data set."""

    task: "SupervisedTask"

    def digests(self) -> dict[str, str]:
        """As :class:`Resume`: of the data."""
        sets = {"data": self.task.train, "validation data": self.task.val}
        return {name: data.digest() for name, data in sets.items() if data is not None}

    def eval_fingerprint(self) -> str:
        """As :class:`Resume`; the digests tell of other data."""
        judge = [self.task.cfg.task.fn, self.task.cfg.checkpoint.metric]
        return hashlib.sha256(json.dumps(judge).encode()).hexdigest()


class SupervisedTask(task.Task):
    """A training on a data set. Subclasses say what the loss of some of its rows is, and what an
    evaluation measures of them.

    Sample number i of a run is the (i mod n)-th of the data set's n rows in the order that its
    epoch, i div n, has by the seed. A step is one update.
    """

    def __init__(self, setup: task.TaskSetup, tokenizer: Any, module: Any, train: Any, val: Any
                 ) -> None:
        self.cfg, self.backend, self.tokenizer = setup.cfg, setup.backend, tokenizer
        self.train, self.val = train, val
        self.examples = len(train)
        section = tasks.updates_section(self.cfg)
        self.passes = PassRows(self.backend, dict.fromkeys(
            task.PASSES, f"{section}.micro_batch_size"), shorter="data.max_length")
        self.resume = DataResume(self)
        self.trained = optimize.prepare(self.backend, module,
                                        build_optimizer(module, self.update_settings),
                                        self.update_settings.max_grad_norm)
        self.packs = (self.cfg.data.packing and self.cfg.sft.neftune is None
                      and kernels.takes_packed(module.lm))

    @abstractmethod
    def measure(self, data: Any, rows: torch.Tensor) -> torch.Tensor:
        """[b, K] fp64 figures of some rows of a data set, b of them; no gradient."""

    @abstractmethod
    def evaluation_figures(self, measured: torch.Tensor) -> dict[str, float]:
        """The figures of an evaluation.

        Args:
            measured: [n, K] of all rows of ``val``.
        """

    def collect(self, state: TrainState, context: task.StepContext) -> list[int]:
        """As :class:`Task`: the places of the next rows."""
        count = min(self.length.samples_per_step, self.length.total_samples - state.episodes)
        context.clock.mark("other")
        return prompt_indices(state.episodes, count, n=len(self.train), seed=self.cfg.seed,
                              shuffle=self.cfg.data.shuffle)

    def plan(self, state: TrainState, batch: list[int]) -> task.Plan:
        """As :class:`Task`: one update of the batch's rows, each term with the same weight."""
        data = self.train.rows(batch)
        counts = counts_of(data)
        weights = torch.full((len(batch),), 1.0 / max(int(counts.sum()), 1))
        return task.Plan(data, [task.UpdateGroup(
            torch.arange(len(batch)), lengths_of(data), counts, weights,
            state.episodes // len(self.train))])

    def finish(self, state: TrainState, batch: list[int], plan: task.Plan,
               result: task.OptimizeResult) -> task.Finished:
        """As :class:`Task`."""
        terms = dict(result.terms)
        return task.Finished(
            {"policy/grad_norm": terms.pop("grad_norm", float("nan")),
             **{f"loss/{name}": value for name, value in terms.items()},
             "lr": result.lr, "updates_skipped": float(result.skipped),
             "data/epoch": (state.episodes + len(batch)) / len(self.train),
             "data/tokens": float(plan.groups[0].tokens.sum())}, state.task, state.tensors)

    def evaluate(self, context: task.StepContext) -> task.Evaluation:
        """As :class:`Task`; without ``data.val`` it finds nothing."""
        if self.val is None:
            return task.Evaluation({})
        whole = self.measured(self.val, context.stop)
        shown = self.shown(whole, context.stop)
        figures = self.evaluation_figures(whole)
        if generated := [row for row in shown if "finished" in row]:
            figures |= {figure: float(np.mean([row[name] for row in generated])) for figure, name in
                        (("response_tokens_mean", "response_tokens"),
                         ("finished_share", "finished"))}
        return task.Evaluation(figures, shown, sum(row["response_tokens"] for row in generated))

    def measured(self, data: Any, stop: StopFlag) -> torch.Tensor:
        """[n, K] what :meth:`measure` finds of all rows, dealt over the ranks."""
        ranks, lengths = self.backend.ranks, lengths_of(data)
        stop.meet()

        @torch.no_grad()
        def measure_share() -> list[tuple[torch.Tensor, torch.Tensor]]:
            """This rank's places in the data, and [n, K] what was measured of them."""
            parts = []
            for part in optimize.shard_by_length(self, lengths, "evaluation"):
                stop.check()
                faults.point("evaluation.forward", len(part))
                # a rank without rows left measures one for nothing, to stay in step with the others
                rows = part if len(part) else lengths.argmin().reshape(1)
                with self.backend.autocast():
                    parts.append((part, self.measure(data, rows)[:len(part)]))
            return parts

        parts = ranks.gather(self.passes.retry(
            "evaluation", min(self.rows_per_pass, -(-len(data) // ranks.world)),
            int(lengths.max()), measure_share, in_step=self.backend.zero_stage == 3))
        places, measured = map(torch.cat, zip(*chain.from_iterable(parts), strict=True))
        return measured[places.argsort()]

    def shown(self, measured: torch.Tensor, stop: StopFlag) -> list[dict[str, Any]]:
        """Rows for samples.jsonl; none by default.

        Args:
            measured: as of :meth:`evaluation_figures`.
        """
        return []

    def summary(self, state: TrainState) -> dict[str, Any]:
        """As :class:`Task`."""
        return {"examples": self.examples}


def lengths_of(data: Examples | Pairs) -> torch.Tensor:
    """[n] int64 tokens that a pass over each row reads: of both answers, or an encoder's too."""
    columns = ([data.chosen, data.rejected] if isinstance(data, Pairs) else
               [data.tokens, data.encoder_tokens] if data.encoder_tokens else [data.tokens])
    return torch.tensor([sum(map(len, row)) for row in zip(*columns, strict=True)])


def counts_of(data: Examples | Pairs) -> torch.Tensor:
    """[n] int64 terms that each row adds to the loss: an example its trained tokens, a pair one."""
    return torch.tensor([1] * len(data) if isinstance(data, Pairs) else
                        [int(mask.sum()) for mask in data.trained])


def sequences_of(data: Examples, rows: torch.Tensor, start: int | None) -> layout.Sequences:
    """Some examples as a forward pass reads them; what is trained on are their actions.

    Args:
        start: the token that a decoder beside an encoder starts from; None for a causal model.
    """
    examples = data.rows(rows.tolist())
    before = [] if start is None else [start]
    places = [np.flatnonzero(mask) + len(before) for mask in examples.trained]
    tokens = [np.concatenate([np.array(before, np.int32), ids]) for ids in examples.tokens]
    encoder: tuple[Any, ...] = ()
    if examples.encoder_tokens:
        encoder = layout.padded(examples.encoder_tokens), layout.padded(
            [np.ones(len(ids)) for ids in examples.encoder_tokens], torch.bool)
    return layout.Sequences.of_places(tokens, places, *encoder)


def weighted_nll(engine: Any, samples: layout.Sequences, weights: torch.Tensor,
                 device: torch.device, *, pack: bool, **how: bool) -> tuple[torch.Tensor, int]:
    """``-sum w log p`` over the actions of some samples at temperature 1, and how many tokens were
    computed, padding included. Values that the pass has computed are in it with weight 0.

    Args:
        engine: the policy, as it is prepared for training.
        weights: [b] fp32 weight of each action of a sample.
        pack: as of :func:`ppocli.models.layout.lay_out`.
        how: further arguments of the policy's pass.
    """
    batch = layout.lay_out(samples, pack=pack).to(device)
    out = engine(batch, temperature=1.0, **how)
    each = to_device(weights.repeat_interleave(samples.mask.sum(1)), out.logprobs.device)
    total = -(each * out.logprobs).sum()
    if out.values is not None:
        total = total + 0.0 * out.values.sum()
    return total, batch.tokens.numel()
