"""Rewards that want the samples of all ranks in one call, on rank 0."""


import pytest
from helpers import jsonl, read_json, write_jsonl
from runs import run, words

STATEFUL = '''\
import json
import os


class Counting:
    """Scores by its own count of samples and calls, and writes down what it saw."""

    needs_all_samples = True

    def __init__(self):
        self.calls = self.samples = 0
        self.rank = os.environ.get("RANK", "0")
        with open("built.txt", "a") as file:
            file.write(self.rank + "\\n")

    def __call__(self, prompts, outputs, tokenizer, number):
        self.calls += 1
        self.samples += len(prompts)
        with open("seen.jsonl", "a") as file:
            json.dump({"rank": self.rank, "call": self.calls, "prompts": prompts,
                       "number": number, "eos": tokenizer.eos_token}, file)
            file.write("\\n")
        return [self.samples + 0.25 * i + len(out) for i, out in enumerate(outputs)]


def ranked(outputs, **columns):
    """By place in the whole chunk: other numbers for a share of it."""
    order = sorted(range(len(outputs)), key=lambda i: (outputs[i], i))
    return [float(order.index(i)) for i in range(len(outputs))]


def measure(outputs, **columns):
    return {"place": [float(i) for i in range(len(outputs))]}
'''
KEYS = ("ppo.num_steps=1", "ppo.num_rollouts=7", "ppo.chunk_size=4", "prompts.eval.limit=5",
        "prompts.shuffle=false", "eval.every_steps=1", "eval.at_start=false",
        "reward.metric_fn=odd.py:measure")
pytestmark = pytest.mark.timeout(300)
WAYS = {"one": [], "first": ["hardware=ddp", "reward.ranks=first"],
        "all": ["hardware=ddp", "reward.ranks=all"]}
"""in one process, and on two that ask for all samples on one of them or each for its own"""


@pytest.mark.slow
def test_a_stateful_reward_sees_whole_chunks_on_one_rank(world):
    (world / "odd.py").write_text(STATEFUL)
    rows = jsonl(world / "prompts.jsonl")
    write_jsonl(world / "prompts.jsonl", ({**row, "number": i} for i, row in enumerate(rows)))
    run("train", *words("run_name=two", "hardware=ddp", "reward.fn=odd.py:Counting",
                        "reward.ranks=auto", "tracking.log_rollouts=true", *KEYS,
                        "prompts.eval.limit=1"), cwd=world, code=0)
    assert (world / "built.txt").read_text() == "0\n"
    seen = jsonl(world / "seen.jsonl")
    # 7 samples: 4 and 3 on the ranks, one chunk of both; then 1 for the evaluation, none on rank 1
    assert [(row["rank"], row["call"], len(row["prompts"]), row["eos"]) for row in seen] == [
        ("0", 1, 7, "<eos>"), ("0", 2, 1, "<eos>")]
    assert seen[0]["number"] == [0, 1, 2, 3, 4, 5, 6]
    assert all(row["prompts"] == [rows[i]["prompt"] for i in row["number"]] for row in seen)
    samples = jsonl(world / "runs/two/samples.jsonl")
    for kind, base in (("rollout", 7), ("eval", 8)):
        mine = [row for row in samples if row["kind"] == kind]
        assert [row["prompt"] for row in mine] == seen[kind == "eval"]["prompts"]
        assert [row["score"] for row in mine] == pytest.approx(
            [base + 0.25 * i + len(row["response"]) for i, row in enumerate(mine)])


@pytest.mark.slow
def test_the_key_says_it_for_any_function(world):
    (world / "odd.py").write_text(STATEFUL)
    given = ["reward.fn=odd.py:ranked", "tracking.log_rollouts=true", *KEYS, "ppo.chunk_size=8"]
    found = {}
    for name, more in {**WAYS, "first": ["hardware=zero2", "reward.ranks=first"]}.items():
        run("train", *words(f"run_name={name}", *given, *more), cwd=world, code=0)
        rows = jsonl(world / f"runs/{name}/samples.jsonl")
        summary = read_json(world / f"runs/{name}/summary.json")
        found[name] = ([row["score"] for row in rows if row["kind"] == "rollout"],
                       summary["eval_after"]["metrics/place"])
    assert found["first"] == found["one"]
    assert found["one"][1] == 2.0  # 0 to 4
    assert found["all"] != found["one"]
