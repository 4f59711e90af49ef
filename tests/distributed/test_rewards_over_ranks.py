"""Rewards that want the samples of all ranks in one call, on rank 0."""

import json

import pytest
from ranks import run_job
from runs import run, words
from sessions import small_config

from ppocli.rewards.records import RewardRequest
from ppocli.tasks.ppo.reward_calls import joined, woven

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


def fails(outputs, **columns):
    raise ValueError(f"{len(outputs)} at once")
'''
KEYS = ("ppo.num_steps=1", "ppo.num_rollouts=7", "ppo.chunk_size=4", "prompts.eval.limit=5",
        "prompts.shuffle=false", "eval.every_steps=1", "eval.at_start=false",
        "reward.metric_fn=odd.py:measure")
pytestmark = pytest.mark.timeout(300)


def test_shares_are_joined_in_the_order_they_were_dealt():
    """Seven samples over three ranks: 0 3 6, 1 4, 2 5."""
    shares = [RewardRequest([f"p{i}" for i in rows], [f"r{i}" for i in rows], [[i] for i in rows],
                            {"n": list(rows)}, None) for rows in ([0, 3, 6], [1, 4], [2, 5])]
    whole = joined(shares, "t")
    assert list(whole.prompts) == [f"p{i}" for i in range(7)]
    assert list(whole.responses) == [f"r{i}" for i in range(7)]
    assert list(whole.response_ids) == [[i] for i in range(7)]
    assert (whole.columns, whole.tokenizer) == ({"n": list(range(7))}, "t")
    assert woven([[0], []]) == [0]


def test_a_stateful_reward_sees_whole_chunks_on_one_rank(world):
    (world / "odd.py").write_text(STATEFUL)
    rows = [json.loads(line) for line in (world / "prompts.jsonl").read_text().splitlines()]
    (world / "prompts.jsonl").write_text("".join(
        json.dumps({**row, "number": i}) + "\n" for i, row in enumerate(rows)))
    done = run("train", *words("run_name=two", "hardware=ddp", "reward.fn=odd.py:Counting",
                               "reward.ranks=auto", "tracking.log_rollouts=true", *KEYS), cwd=world)
    assert done.code == 0, done.err
    assert (world / "built.txt").read_text() == "0\n"
    seen = [json.loads(line) for line in (world / "seen.jsonl").read_text().splitlines()]
    # 7 samples: 4 and 3 on the ranks, one chunk of both; then 5 for the evaluation
    assert [(row["rank"], row["call"], len(row["prompts"]), row["eos"]) for row in seen] == [
        ("0", 1, 7, "<eos>"), ("0", 2, 5, "<eos>")]
    assert seen[0]["number"] == [0, 1, 2, 3, 4, 5, 6]
    assert all(row["prompts"] == [rows[i]["prompt"] for i in row["number"]] for row in seen)
    samples = [json.loads(line)
               for line in (world / "runs/two/samples.jsonl").read_text().splitlines()]
    for kind, base in (("rollout", 7), ("eval", 12)):
        mine = [row for row in samples if row["kind"] == kind]
        assert [row["prompt"] for row in mine] == seen[kind == "eval"]["prompts"]
        assert [row["score"] for row in mine] == pytest.approx(
            [base + 0.25 * i + len(row["response"]) for i, row in enumerate(mine)])


@pytest.mark.slow
def test_the_key_says_it_for_any_function(world):
    (world / "odd.py").write_text(STATEFUL)
    given = ["reward.fn=odd.py:ranked", "tracking.log_rollouts=true", *KEYS, "ppo.chunk_size=8"]
    found = {}
    for name, more in (("one", []), ("first", ["hardware=zero2", "reward.ranks=first"]),
                       ("all", ["hardware=ddp", "reward.ranks=all"])):
        run("train", *words(f"run_name={name}", *given, *more), cwd=world, code=0)
        rows = [json.loads(line)
                for line in (world / f"runs/{name}/samples.jsonl").read_text().splitlines()]
        summary = json.loads((world / f"runs/{name}/summary.json").read_text())
        found[name] = ([row["score"] for row in rows if row["kind"] == "rollout"],
                       summary["eval_after"]["metrics/place"])
    assert found["first"] == found["one"]
    assert found["one"][1] == 2.0  # 0 to 4
    assert found["all"] != found["one"]


@pytest.mark.slow
def test_one_update_is_the_same_wherever_the_reward_runs(tmp_path):
    small_config(tmp_path)
    config = {"model.path": str(tmp_path / "lm"), "prompts.path": str(tmp_path / "prompts.jsonl"),
              "ppo.num_steps": 3, "ppo.num_rollouts": 13, "ppo.mini_batch_size": 7,
              "ppo.chunk_size": 3, "hardware.device": "cpu", "hardware.num_threads": 1}
    found = [run_job(tmp_path, f"job{i}", {**config, "reward.ranks": ranks}, world=world)
             for i, (world, ranks) in enumerate([(1, "all"), (4, "first"), (4, "all")])]
    for other in found[1:]:
        scores = [name for name in other if name.startswith("experience/")]
        assert scores
        for name in scores:
            assert float((other[name].float() - found[0][name].float()).abs().max()) < 1e-5, name
