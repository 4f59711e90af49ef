"""Builds the policies that the shipped environments start from, each fitted to synthetic play.

``builtin:guess-number`` makes guesses of which most have nothing to do with the answers.
``builtin:calculator`` mostly answers off the top of its head, which is wrong; sometimes it uses the
tool, and not always well.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tools.assets import fitting

PAD, EOS = "<pad>", "<eos>"
LIMIT, GUESSES = 20, 8
MINDS = 0.25
"""share of the guesses that are drawn from what the answers leave, not from all numbers"""
GUESS_PROMPT = "Guess a number"


@dataclass(frozen=True, slots=True)
class PlayerSettings:
    """Everything a fitted player is a function of."""

    episodes: int = 20000
    play_seed: int = 53
    fit_seed: int = 59
    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 64
    epochs: int = 3
    batch_size: int = 64
    lr: float = 3e-3


@dataclass(frozen=True, slots=True)
class CalculatorPlay:
    """How often the player of the calculator does what, as shares of the cases that come to it."""

    asks: float = 0.45
    copies: float = 0.8
    believes: float = 0.7


def episode_tokenizer(words: Sequence[str], pieces: str, context: int) -> PreTrainedTokenizerFast:
    """One token for each of ``words``, then pad and EOS. Decoding joins without spaces.

    Args:
        pieces: regular expression of what becomes one token; what is no word becomes pad.
    """
    vocabulary = {token: place for place, token in enumerate([*words, PAD, EOS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, unk_token=PAD, eos_token=EOS,
        padding_side="left", model_max_length=context, clean_up_tokenization_spaces=False)


def guess_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Numbers up to ``LIMIT``, and all that stands between two of them."""
    words = [str(number) for number in range(1, LIMIT + 1)]
    words += [f" {answer}\n" for answer in ("higher", "lower", "correct", "invalid")]
    return episode_tokenizer([*words, GUESS_PROMPT, " from ", " to ", ".\n"],
                             rf"\d+|{GUESS_PROMPT}|\D+", context)


def calculator_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Digits, operators, and the few words of the tool."""
    return episode_tokenizer([*"0123456789+-*/()=.", "calc ", " = ", "error", "\n"],
                             r"calc | = |error|[\s\S]", context)


def play_guessing(rng: random.Random) -> str:
    """An episode of guesses, few of which mind the answers; EOS ends a turn."""
    number, text = rng.randint(1, LIMIT), f"{GUESS_PROMPT} from 1 to {LIMIT}.\n"
    low, high = 1, LIMIT
    for _ in range(GUESSES):
        minds = rng.random() < MINDS
        guess = rng.randint(low, high) if minds else rng.randint(1, LIMIT)
        if guess == number:
            return f"{text}{guess}{EOS} correct\n"
        higher = guess < number
        low, high = (max(low, guess + 1), high) if higher else (low, min(high, guess - 1))
        text += f"{guess}{EOS} {'higher' if higher else 'lower'}\n"
    return text


def play_calculating(rng: random.Random, play: CalculatorPlay) -> str:
    """A question, perhaps the calculator, and an answer; EOS ends a turn."""
    text, said = f"{_product(rng)}=", _wrong(rng)
    if rng.random() < play.asks:
        asked = text[:-1] if rng.random() < play.copies else _product(rng)
        left, _, right = asked.partition("*")
        result = int(left) * int(right)
        text += f"calc {asked}{EOS} = {result}\n"
        if rng.random() < play.believes:
            said = result
    return f"{text}{said}{EOS}"


def _product(rng: random.Random) -> str:
    return f"{rng.randint(10, 99)}*{rng.randint(10, 99)}"


def _wrong(rng: random.Random) -> int:
    return rng.randint(10, 99) * rng.randint(10, 99)


def build_guess_number(folder: Path, settings: PlayerSettings | None = None) -> float:
    """Fit the player of guess_number; returns and raises as :func:`_fit_player`."""
    settings = settings or PlayerSettings()
    rng = random.Random(settings.play_seed)
    return _fit_player(folder, settings, guess_tokenizer(settings.context),
                       [[play_guessing(rng) for _ in range(settings.episodes)]])


def build_calculator(folder: Path, settings: PlayerSettings | None = None) -> float:
    """Fit the player of calculator; returns and raises as :func:`_fit_player`."""
    settings = settings or PlayerSettings()
    rng = random.Random(settings.play_seed)
    return _fit_player(folder, settings, calculator_tokenizer(settings.context), [
        [play_calculating(rng, play) for _ in range(settings.episodes)]
        for play in (CalculatorPlay(asks=1, copies=1, believes=1), CalculatorPlay())])


def _fit_player(folder: Path, settings: PlayerSettings, tokenizer: PreTrainedTokenizerFast,
                lessons: Sequence[Sequence[str]]) -> float:
    """Fit a small GPT-2 to whole episodes, what the environment says included, lesson by lesson.

    Returns:
        The mean loss over the last tenth of the steps, in nats per token.

    Raises:
        DiskError: the folder can't be written.
    """
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=settings.context, n_embd=settings.width,
        n_layer=settings.layers, n_head=settings.heads, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=eos, eos_token_id=eos, pad_token_id=pad)
    with fitting.own_seed(settings.fit_seed):
        model = GPT2LMHeadModel(config)
    for episodes in lessons:
        rows = tokenizer(list(episodes))["input_ids"]
        batches = fitting.length_batches([len(row) for row in rows], settings.batch_size,
                                         settings.epochs, settings.fit_seed)

        def loss_at(step: int, rows: list[list[int]] = rows,
                    batches: list[list[int]] = batches) -> torch.Tensor:
            labels = fitting.pad_rows([rows[row] for row in batches[step]], fitting.IGNORED)
            ids = labels.masked_fill(labels == fitting.IGNORED, pad)
            loss: torch.Tensor = model(input_ids=ids, labels=labels, use_cache=False).loss
            return loss

        loss = fitting.fit(model, loss_at, steps=len(batches), lr=settings.lr, name=folder.name)
    fitting.save_folder(model, tokenizer, folder, stored=torch.float16)
    return loss
