"""PPO's defaults on a model and a classifier that ppocli has never seen.

    python benchmarks/stranger.py
    python benchmarks/stranger.py --seeds 101 --set ppo.init_kl_coef=0.1

A GPT-2 of 0.7M weights learns sentences about restaurants from a seed, a small BERT tells the good
ones from the bad, both by transformers alone. Then ``ppocli train`` with nothing set but the
learning rate and 5,120 episodes makes the one please the other.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from commands import PPOCLI, environment, run
from machine import provenance
from tables import table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

OPENINGS = ("The soup", "The waiter", "My steak", "Our table", "The bread", "That pasta",
            "The dessert", "The wine list", "Breakfast", "The patio", "Their coffee", "The bill",
            "The chef", "Lunch", "The salad", "The fish", "Dinner for two", "The kitchen",
            "Her omelette", "The terrace", "The music", "His curry", "The menu", "The staff")
HELD_BACK = 6
GOOD = ("delicious", "friendly", "fresh", "cozy", "generous", "perfect", "charming", "superb")
BAD = ("cold", "rude", "stale", "noisy", "overpriced", "bland", "dirty", "greasy")
NEITHER = ("large", "Italian", "crowded", "simple", "new", "local", "spicy", "familiar")
VERBS = ("was", "seemed", "turned out", "felt")
ADVERBS = ("", "really ", "a little ", "quite ", "rather ", "truly ")
ENDS = ("", " tonight", " as always", " for the price", " last Sunday", " in the end")


def sentence(draw: random.Random, opening: str) -> tuple[str, int]:
    """A sentence, and whether it says more good than bad."""
    words = [draw.choice(draw.choice((GOOD, BAD, NEITHER))) for _ in range(draw.randint(1, 3))]
    said = (" and " if draw.random() < 0.6 else ", ").join(
        draw.choice(ADVERBS) + word for word in words)
    score = sum((word in GOOD) - (word in BAD) for word in words) or draw.choice((-1, 1))
    return f"{opening} {draw.choice(VERBS)} {said}{draw.choice(ENDS)}.", int(score > 0)


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 512 tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<pad>", "<eos>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def batches(tokenizer: PreTrainedTokenizerFast, rows: list[tuple[str, int]], passes: int
            ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Minibatches of 64 sentences, and their labels."""
    for _ in range(passes):
        random.Random(0).shuffle(rows)
        for part in (rows[i:i + 64] for i in range(0, len(rows), 64)):
            yield tokenizer([text + "<eos>" for text, _ in part], padding=True,
                            return_tensors="pt", return_token_type_ids=False), torch.tensor(
                                [label for _, label in part])


def make_world(folder: Path) -> None:
    """``lm``, ``judge`` and two files of prompts."""
    draw = random.Random(17)
    rows = [sentence(draw, draw.choice(OPENINGS)) for _ in range(6000)]
    tokenizer = tokenizer_of([text for text, _ in rows])
    torch.manual_seed(17)
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    lm = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=3,
                                    n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **ids))
    judge = BertForSequenceClassification(BertConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=64, pad_token_id=0,
        id2label={0: "BAD", 1: "GOOD"}, label2id={"BAD": 0, "GOOD": 1}))
    for model, passes in ((lm, 4), (judge, 4)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for inputs, labels in batches(tokenizer, rows, passes):
            targets = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
            loss = model(**inputs, labels=targets if model is lm else labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"{type(model).__name__}: loss {loss.item():.2f} at the end", flush=True)
    for name, model in (("lm", lm), ("judge", judge)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, part in (("prompts", OPENINGS[:-HELD_BACK]), ("held-back", OPENINGS[-HELD_BACK:])):
        (folder / f"{name}.json").write_text(json.dumps([{"prompt": f"{opening} {verb}"}
                                                         for opening in part for verb in VERBS]))


def row(folder: Path, seed: int, words: list[str]) -> list[str]:
    """What a seed comes to."""
    took = run([PPOCLI, "train", f"model.path={folder / 'lm'}", "reward.fn=classifier",
                f"reward.kwargs.model={folder / 'judge'}", "reward.kwargs.label=GOOD",
                f"prompts.path={folder / 'prompts.json'}",
                f"prompts.eval.path={folder / 'held-back.json'}", "prompts.eval.repeat=10",
                "generation.max_new_tokens=24", "ppo.total_episodes=5120", "ppo.optimizer.lr=1e-3",
                f"seed={seed}", f"run_name={seed}", f"output_dir={folder / 'runs'}",
                "hardware.num_threads=1", "eval.every_steps=40", *words],
               folder / "log", environment(1))
    rows = [json.loads(line) for line in (
        folder / f"runs/{seed}/metrics.jsonl").read_text().splitlines()]
    first, *_, last = [one for one in rows if "eval/reward_mean" in one]
    return [str(seed), *(f"{one['eval/reward_mean']:.3f}" for one in (first, last)),
            f"{last['eval/kl_mean']:.2f}", f"{took.processor:.0f}"]


def main() -> None:
    """Print a row a seed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[101, 102, 103, 104, 105])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="words")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        make_world(Path(place))
        rows = [row(Path(place), seed, given.words) for seed in given.seeds]
    print(table(["seed", "reward before", "after", "KL, nats", "processor seconds"], rows))
    print(provenance("one thread"))


if __name__ == "__main__":
    main()
