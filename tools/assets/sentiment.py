"""Builds ``builtin:reviews-sentiment``, the embedded classifier that rewards the quickstart."""

import logging
import string
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tools.assets import fitting
from tools.assets.corpus import make_reviews
from tools.assets.examples import labelled_examples

log = logging.getLogger(__name__)

LABELS = ("NEGATIVE", "POSITIVE")


@dataclass(frozen=True, slots=True)
class SentimentSettings:
    """Everything the classifier is a function of."""

    examples: int = 80_000
    corpus_seed: int = 21
    fit_seed: int = 22
    vocab_size: int = 1024
    context: int = 128
    layers: int = 3
    width: int = 96
    heads: int = 6
    epochs: int = 2
    batch_size: int = 64
    lr: float = 2e-3


def sentiment_tokenizer(texts: list[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Lower-casing WordPiece with [CLS] and [SEP], as BERT's.

    The vocabulary is the letters and the commonest words, so unknown words are spelt out. It isn't
    trained with ``WordPieceTrainer``, which numbers the pieces in an order that differs by run.
    """
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.BertPreTokenizer()
    counts = Counter(word for text in texts
                     for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    letters = string.ascii_lowercase + string.digits + string.punctuation
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = sorted(counts, key=lambda word: (-counts[word], word))
    pieces = dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *words])
    vocabulary = {piece: place for place, piece in enumerate(list(pieces)[:vocab_size])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(token, vocabulary[token])
                                                 for token in special[2:]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", model_max_length=context, model_input_names=[
            "input_ids", "attention_mask"])


def build_sentiment(folder: Path, settings: SentimentSettings | None = None) -> float:
    """Fit the classifier and write it to ``folder`` as a plain Hugging Face folder.

    Returns:
        The mean cross-entropy over the last tenth of the steps, against the soft targets.

    Raises:
        DiskError: the folder can't be written.
    """
    settings = settings or SentimentSettings()
    examples = labelled_examples(settings.examples, settings.corpus_seed)
    corpus = [review.text for review in make_reviews(settings.examples, settings.corpus_seed)]
    tokenizer = sentiment_tokenizer(corpus, settings.vocab_size, settings.context)
    rows = tokenizer([text for text, _ in examples], truncation=True)["input_ids"]
    targets = torch.tensor([target for _, target in examples])
    # ModernBERT rather than BERT for its rotary positions: they tell "superb superb" from "superb"
    # in a quarter of the steps that learned positions take
    config = ModernBertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=settings.context,
        num_hidden_layers=settings.layers, num_attention_heads=settings.heads,
        hidden_size=settings.width, intermediate_size=2 * settings.width, local_attention=8,
        layer_types=["sliding_attention" if layer % 2 else "full_attention"
                     for layer in range(settings.layers)], pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id, eos_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id, sep_token_id=tokenizer.sep_token_id,
        id2label=dict(enumerate(LABELS)),
        label2id={label: place for place, label in enumerate(LABELS)})
    with fitting.own_seed(settings.fit_seed):
        model = ModernBertForSequenceClassification(config)
    batches = fitting.length_batches([len(row) for row in rows], settings.batch_size,
                                     settings.epochs, settings.fit_seed)

    def loss_at(step: int) -> torch.Tensor:
        ids = fitting.pad_rows([rows[row] for row in batches[step]], tokenizer.pad_token_id)
        logits = model(input_ids=ids, attention_mask=(ids != tokenizer.pad_token_id).long()).logits
        positive = targets[batches[step]]
        return torch.nn.functional.cross_entropy(
            logits, torch.stack([1 - positive, positive], dim=-1))

    log.debug("fitting the sentiment classifier: %d parameters, %d steps",
             model.num_parameters(), len(batches))
    loss = fitting.fit(model, loss_at, steps=len(batches), lr=settings.lr, name="sentiment")
    fitting.save_folder(model, tokenizer, folder, stored=torch.float16)
    return loss
