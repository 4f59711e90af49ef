"""Builds ``builtin:reviews``, the embedded language model of short film reviews."""

import logging
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tools.assets import fitting
from tools.assets.corpus import make_reviews

log = logging.getLogger(__name__)

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


@dataclass(frozen=True, slots=True)
class ReviewsSettings:
    """Everything the language model is a function of."""

    reviews: int = 64_000
    corpus_seed: int = 11
    fit_seed: int = 12
    vocab_size: int = 1408
    context: int = 128
    layers: int = 4
    width: int = 96
    heads: int = 4
    epochs: int = 2
    batch_size: int = 64
    lr: float = 4e-3


def reviews_tokenizer(texts: list[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with distinct pad, BOS and EOS tokens; lossless on any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, BOS, EOS], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS,
        padding_side="left", model_max_length=context, clean_up_tokenization_spaces=False)


def build_reviews(folder: Path, settings: ReviewsSettings | None = None) -> float:
    """Fit the language model and write it to ``folder`` as a plain Hugging Face folder.

    Reviews end with EOS. Half of them are seen with a leading BOS and half without, so the model
    goes on from bare prompts as well as from BOS alone.

    Returns:
        The mean loss over the last tenth of the steps, in nats per token.

    Raises:
        DiskError: the folder can't be written.
    """
    settings = settings or ReviewsSettings()
    texts = [review.text for review in make_reviews(settings.reviews, settings.corpus_seed)]
    tokenizer = reviews_tokenizer(texts, settings.vocab_size, settings.context)
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    rng = random.Random(settings.fit_seed)
    rows = [([bos] if rng.random() < 0.5 else []) + ids + [eos]
            for ids in tokenizer(texts)["input_ids"]]
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=settings.context, n_embd=settings.width,
        n_layer=settings.layers, n_head=settings.heads, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    with fitting.own_seed(settings.fit_seed):
        model = GPT2LMHeadModel(config)
    batches = fitting.length_batches([len(row) for row in rows], settings.batch_size,
                                     settings.epochs, settings.fit_seed)

    def loss_at(step: int) -> torch.Tensor:
        chosen = [rows[row] for row in batches[step]]
        labels = fitting.pad_rows(chosen, fitting.IGNORED)
        ids = labels.masked_fill(labels == fitting.IGNORED, pad)
        loss: torch.Tensor = model(input_ids=ids, labels=labels, use_cache=False).loss
        return loss

    log.debug("fitting the reviews language model: %d parameters, %d steps",
             model.num_parameters(), len(batches))
    loss = fitting.fit(model, loss_at, steps=len(batches), lr=settings.lr, name="reviews")
    fitting.save_folder(model, tokenizer, folder, stored=torch.float16)
    return loss
