"""How the models of ``worlds.py`` are made: tokenizers, small language models and classifiers, by
transformers alone, from a seed."""

import json
import math
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

SEED = 17
Rows = list[tuple[str, int]]
"""texts and whether they are of the kind that is rewarded"""


def tokenizer_of(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of ``size`` tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<pad>", "<eos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def batches(tokenizer: PreTrainedTokenizerFast, rows: Rows, passes: int,
            longest: int = 64) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Minibatches of 64 texts of at most ``longest`` tokens, and their labels."""
    order = random.Random(SEED)
    for _ in range(passes):
        rows = order.sample(rows, len(rows))
        for part in (rows[i:i + 64] for i in range(0, len(rows), 64)):
            yield tokenizer([text + "<eos>" for text, _ in part], padding=True, truncation=True,
                            max_length=longest, return_tensors="pt", return_token_type_ids=False
                            ), torch.tensor([label for _, label in part])


def fit(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, rows: Rows, *, passes: int,
        lr: float, longest: int = 64) -> float:
    """Train with AdamW and a rate that falls linearly; returns the mean loss of the last pass."""
    torch.manual_seed(SEED)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    updates = passes * math.ceil(len(rows) / 64)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / updates)
    losses = []
    for inputs, labels in batches(tokenizer, rows, passes, longest):
        targets = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        loss = model(**inputs, labels=targets if isinstance(model, GPT2LMHeadModel) else labels
                     ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    last = losses[-updates // passes:]
    return sum(last) / len(last)


def gpt2(vocabulary: int, width: int, layers: int, positions: int = 64) -> GPT2LMHeadModel:
    torch.manual_seed(SEED)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=vocabulary, n_positions=positions, n_embd=width, n_layer=layers, n_head=4,
        pad_token_id=0, eos_token_id=1, bos_token_id=1))


def bert(vocabulary: int, width: int, layers: int) -> BertForSequenceClassification:
    """A classifier of two labels, BAD and GOOD."""
    torch.manual_seed(SEED)
    return BertForSequenceClassification(BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2,
        intermediate_size=2 * width, max_position_embeddings=64, pad_token_id=0,
        id2label={0: "BAD", 1: "GOOD"}, label2id={"BAD": 0, "GOOD": 1}))


@torch.no_grad()
def right(judge: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, rows: Rows
          ) -> float:
    """Share of the labels that a classifier gets right."""
    hits = sum(int((judge(**inputs).logits.argmax(1) == labels).sum())
               for inputs, labels in batches(tokenizer, rows, 1))
    return hits / len(rows)


class Truth(torch.nn.Module):
    """Logistic regression on a text's words, pairs of words, and a lexicon's valence of each."""

    def __init__(self, lexicon: dict[str, float], size: int = 1 << 17) -> None:
        super().__init__()
        self.lexicon, self.size = lexicon, size
        self.weights = torch.nn.EmbeddingBag(size, 1, mode="sum")
        self.valence = torch.nn.Linear(3, 1)
        torch.nn.init.zeros_(self.weights.weight)

    def features(self, text: str) -> tuple[list[int], float, list[float]]:
        """The places of its words and pairs of words, their scale, and sums of valences."""
        words = re.findall(r"[a-z']+|[!?]", text.lower()) or [""]
        grams = [*words, *map(" ".join, pairwise(words))]
        valences = [self.lexicon.get(word, 0.0) for word in words]
        return ([zlib.crc32(gram.encode()) % self.size for gram in grams], len(grams) ** -0.5,
                [sum(valences), sum(max(v, 0.0) for v in valences),
                 sum(map(abs, valences)) / len(words)])

    def logits(self, rows: Sequence[tuple[list[int], float, list[float]]]) -> torch.Tensor:
        """[rows] log-odds of GOOD from features."""
        places, scales, valences = zip(*rows, strict=True)
        starts = torch.tensor([0, *map(len, places)][:-1]).cumsum(0)
        bag = self.weights(torch.tensor(list(chain(*places))), starts).squeeze(1)
        return bag * torch.tensor(scales) + self.valence(torch.tensor(valences)).squeeze(1)

    def forward(self, texts: Sequence[str]) -> torch.Tensor:
        """[texts] log-odds of GOOD."""
        return self.logits(list(map(self.features, texts)))

    def fit(self, rows: Rows, passes: int = 6) -> None:
        """Train with weight decay on all rows."""
        order = random.Random(SEED)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.05)
        known = [(self.features(text), float(label)) for text, label in rows]
        for _ in range(passes):
            known = order.sample(known, len(known))
            for part in (known[i:i + 256] for i in range(0, len(known), 256)):
                features, labels = zip(*part, strict=True)
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    self.logits(features), torch.tensor(labels))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @torch.no_grad()
    def mean(self, texts: Sequence[str]) -> float:
        """Mean probability of GOOD."""
        return torch.sigmoid(self(texts)).mean().item()

    @torch.no_grad()
    def right(self, rows: Rows) -> float:
        """Share of the labels that it gets right."""
        good = self([text for text, _ in rows]) > 0
        return (good == torch.tensor([bool(label) for _, label in rows])).float().mean().item()


def prompts_of(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"prompt": text} for text in texts]


def beginnings(rows: Rows, words: int, tokens: PreTrainedTokenizerFast, limit: int) -> list[str]:
    """The first words of texts that have more, each once."""
    found = dict.fromkeys(" ".join(text.split()[:words]) for text, _ in rows
                          if len(text.split()) > words + 3)
    return [text for text in found if len(tokens(text)["input_ids"]) <= 12][:limit]


def write(folder: Path, lm: GPT2LMHeadModel, judge: BertForSequenceClassification | None,
          tokenizer: PreTrainedTokenizerFast, prompts: list[dict[str, str]],
          held_back: list[dict[str, str]], facts: dict[str, float]) -> None:
    for name, model in (("lm", lm), ("judge", judge)):
        if model is not None:
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
    for name, part in (("prompts", prompts), ("held-back", held_back)):
        (folder / f"{name}.json").write_text(json.dumps(part))
    (folder / "facts.json").write_text(json.dumps(facts))


def world_of(folder: Path, rows: Rows, truth_rows: Rows, lexicon: dict[str, float], *,
             vocabulary: int, width: int, layers: int, passes: int, judge_rows: int,
             wrong: float = 0.0) -> None:
    """A world of real texts of two kinds; a tenth is held back to measure the classifiers on. The
    judge learns a share ``wrong`` of its rows with the other label."""
    rows = random.Random(SEED).sample(rows, len(rows))
    held, rows = rows[:len(rows) // 10], rows[len(rows) // 10:]
    tokenizer = tokenizer_of([text for text, _ in rows], vocabulary)
    judge = bert(vocabulary, 64, 1)
    noise = random.Random(SEED)
    fit(judge, tokenizer, [(text, label ^ (noise.random() < wrong))
                           for text, label in rows[:judge_rows]], passes=4, lr=1e-3)
    facts = {"judge is right": right(judge, tokenizer, held)}
    truth = Truth(lexicon)
    truth.fit(rows + truth_rows)
    facts["truth is right"] = truth.right(held)
    torch.save({"lexicon": lexicon, "state": truth.state_dict()}, folder / "truth.pt")
    print(facts, flush=True)
    lm = gpt2(vocabulary, width, layers)
    facts["parameters"] = sum(p.numel() for p in lm.parameters())
    facts["loss"] = fit(lm, tokenizer, rows, passes=passes, lr=2e-3)
    prompts = beginnings(rows, 3, tokenizer, 4096)
    seen = set(prompts)
    held_back = [text for text in beginnings(held, 3, tokenizer, 1024) if text not in seen][:256]
    write(folder, lm, judge, tokenizer, prompts_of(prompts), prompts_of(held_back), facts)


def load_truth(folder: Path) -> Truth | None:
    """The classifier that judges a world's texts in earnest."""
    if not (folder / "truth.pt").is_file():
        return None
    saved = torch.load(folder / "truth.pt", weights_only=True)
    truth = Truth(saved["lexicon"])
    truth.load_state_dict(saved["state"])
    return truth
