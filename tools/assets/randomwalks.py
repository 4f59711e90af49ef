"""Builds ``builtin:randomwalks``: a small GPT-2 fitted to walks on the graph of trlX's benchmark.

:mod:`ppocli.rewards.randomwalks` holds the graph that is drawn here, and says what a walk is.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from ppocli.rewards.randomwalks import GOAL, MAX_LENGTH
from tools.assets import fitting

log = logging.getLogger(__name__)

PAD, EOS = "<pad>", "<eos>"


@dataclass(frozen=True, slots=True)
class WalkSettings:
    """Everything the graph and its walks are a function of."""

    letters: str = "abcdefghijklmnopqrstu"
    """the nodes; the first is the goal"""
    walks: int = 1000
    p_edge: float = 0.1
    seed: int = 1000


@dataclass(frozen=True, slots=True)
class WalkModelSettings:
    """Everything the fitted model is a function of. Size as in trlX's benchmark."""

    walks: WalkSettings = field(default_factory=WalkSettings)
    fit_seed: int = 31
    layers: int = 6
    width: int = 144
    heads: int = 12
    context: int = 32
    epochs: int = 5
    batch_size: int = 50
    lr: float = 2.5e-3


def draw_walks(settings: WalkSettings) -> tuple[dict[str, str], list[str]]:
    """The graph (the successors of each node) and walks on it, all from one seeded stream.

    Every ordered pair of nodes gets an edge with probability ``p_edge``; a graph in which some
    node has no way out is drawn again. A walk starts anywhere but at the goal, takes uniformly
    drawn edges, and ends at the goal or after ``MAX_LENGTH`` nodes.
    """
    letters = settings.letters
    # numpy's legacy generator: its stream is frozen, and it is the one trlX's graph comes from
    stream = np.random.RandomState(settings.seed)
    while True:
        edges = stream.rand(len(letters), len(letters)) > 1 - settings.p_edge
        np.fill_diagonal(edges, False)
        if edges.any(axis=1).all():
            break
    successors = {node: "".join(letters[at] for at in np.flatnonzero(row))
                  for node, row in zip(letters, edges, strict=True)} | {GOAL: GOAL}
    return successors, [_walk(successors, stream) for _ in range(settings.walks)]


def _walk(successors: dict[str, str], stream: np.random.RandomState) -> str:
    letters = "".join(successors)
    walk = GOAL
    while walk == GOAL:
        walk = letters[stream.randint(len(letters))]
    while walk[-1] != GOAL and len(walk) < MAX_LENGTH:
        walk += str(stream.choice(list(successors[walk[-1]])))
    return walk


def walk_tokenizer(letters: str, context: int) -> PreTrainedTokenizerFast:
    """One token a letter, then pad, then EOS (also BOS). Decoding joins without spaces.

    A letter that is no node becomes pad, so a walk that starts there scores 0.
    """
    vocabulary = {token: place for place, token in enumerate([*letters, PAD, EOS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=PAD, bos_token=EOS, eos_token=EOS,
        padding_side="left", model_max_length=context, clean_up_tokenization_spaces=False)


def build_randomwalks(folder: Path, settings: WalkModelSettings | None = None) -> float:
    """Fit the model to the sampled walks and write it to ``folder``.

    Walks end with EOS, at the goal as well as at full length.

    Returns:
        The mean loss over the last tenth of the steps, in nats per token.

    Raises:
        DiskError: the folder can't be written.
    """
    settings = settings or WalkModelSettings()
    graph, walks = draw_walks(settings.walks)
    tokenizer = walk_tokenizer("".join(graph), settings.context)
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    rows = [[*ids, eos] for ids in tokenizer(walks)["input_ids"]]
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=settings.context, n_embd=settings.width,
        n_layer=settings.layers, n_head=settings.heads, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=eos, eos_token_id=eos, pad_token_id=pad)
    with fitting.own_seed(settings.fit_seed):
        model = GPT2LMHeadModel(config)
    batches = fitting.length_batches([len(row) for row in rows], settings.batch_size,
                                     settings.epochs, settings.fit_seed)

    def loss_at(step: int) -> torch.Tensor:
        labels = fitting.pad_rows([rows[row] for row in batches[step]], fitting.IGNORED)
        ids = labels.masked_fill(labels == fitting.IGNORED, pad)
        loss: torch.Tensor = model(input_ids=ids, labels=labels, use_cache=False).loss
        return loss

    log.debug("fitting the random-walk model: %d parameters, %d steps",
             model.num_parameters(), len(batches))
    loss = fitting.fit(model, loss_at, steps=len(batches), lr=settings.lr, name="randomwalks")
    fitting.save_folder(model, tokenizer, folder)
    return loss
