"""Rewards that want the samples of all ranks in one call, on rank 0."""

from pathlib import Path

import pytest
from helpers import jsonl, read_json, write_jsonl
from ranks import largest_difference, odd_config, run_job
from runs import run, words
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from ppocli.config.config_yaml import read_config

ELSEWHERE = Path(__file__).parents[1] / "fixtures/elsewhere_rewards.py"
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
def test_a_stored_scale_reaches_ranks_that_have_not_built_the_reward_model(world):
    AutoTokenizer.from_pretrained(world / "lm").save_pretrained(world / "rm")
    config = AutoConfig.from_pretrained(world / "lm", num_labels=1)
    config.score_mean, config.score_std = 0.5, 2.0
    AutoModelForSequenceClassification.from_config(config).save_pretrained(world / "rm")
    run("train", *words("run_name=two", "hardware=ddp", *KEYS[:-1], "reward.fn=reward_model",
                        "reward.kwargs.model=rm", "reward.scale=ref", "reward.center=true",
                        "reward.ranks=first"), cwd=world, code=0)
    reward = read_config(world / "runs/two/config.yaml").reward
    assert (reward.ref_mean, reward.ref_std) == (0.5, 2.0)


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


@pytest.mark.slow
def test_steps_are_the_same_on_several_ranks(world):
    (world / "steps.py").write_text(
        "def score(steps):\n    return [[float(len(step)) for step in own] for own in steps]\n\n\n"
        "def cut(responses):\n    return [[text[:4], text[4:]] if text[4:] else [text] * bool(text)"
        "\n            for text in responses]\n\n\n"
        "def measure(steps):\n    return {'steps': [len(own) for own in steps]}\n")
    given = ["reward.fn=steps.py:score", "reward.step_fn=steps.py:cut", *KEYS, "ppo.chunk_size=8",
             "tracking.log_rollouts=true", "tracking.rollout_tokens=true",
             "reward.metric_fn=steps.py:measure"]
    found = []
    for name, more in WAYS.items():
        run("train", *words(f"run_name={name}", *given, *more), cwd=world, code=0)
        summary = read_json(world / f"runs/{name}/summary.json")
        found.append(([(row["score"], row["token_rewards"])
                       for row in jsonl(world / f"runs/{name}/samples.jsonl")
                       if row["kind"] == "rollout"], summary["eval_after"]["metrics/steps"]))
    assert found[0] == found[1] == found[2]
    assert any(len([value for value in rewards if value]) == 2 for _, rewards in found[0][0])


@pytest.mark.slow
def test_functions_of_other_libraries_are_called_alike_on_several_ranks(world):
    """The messages of a chat, the state and the logs of TRL, the EOS text and the lists of trlX."""
    rows = jsonl(world / "prompts.jsonl")
    write_jsonl(world / "prompts.jsonl", (
        {**row, "ground_truth": "x", "data_source": "d"} for row in rows))
    (world / "elsewhere.py").write_text(ELSEWHERE.read_text())
    fns = {"dense": "dense_reward_fn", "log": "logging_reward", "one": "my_reward_fn"}
    given = ["tracking.log_rollouts=true", *KEYS, "ppo.chunk_size=8", "ppo.num_steps=2",
             *(f"reward.fns.{name}.fn=elsewhere.py:{fn}" for name, fn in fns.items())]
    found = {}
    for name, more in WAYS.items():
        told = [word for word in words(f"run_name={name}", *given, *more)
                if not word.startswith(("reward.fn=", "reward.metric_fn="))]
        run("train", *told, cwd=world, code=0)
        config = read_config(world / f"runs/{name}/config.yaml")
        samples = jsonl(world / f"runs/{name}/samples.jsonl")
        metrics = jsonl(world / f"runs/{name}/metrics.jsonl")
        first = [row for row in samples if row["kind"] == "rollout" and row["step"] == 1]
        found[name] = ([entry.get("style") for entry in config.reward.fns.values()],
                       [(row["rewards"], row["extra"]) for row in first],
                       [row["extra"]["at"] for row in samples],
                       [row.get("logged/accuracy") for row in metrics])
    assert found["one"][0] == ["trlx", "trl", "verl"]
    assert found["first"] == found["all"] == found["one"]


@pytest.mark.slow
def test_one_update_is_the_same_wherever_the_reward_runs(tmp_path):
    one, *others = (run_job(tmp_path, f"job{i}", odd_config(tmp_path, **{"reward.ranks": ranks}),
                            world=world)
                    for i, (world, ranks) in enumerate([(1, "all"), (4, "first"), (4, "all")]))
    for other in others:
        assert largest_difference(one, other, "experience/") < 1e-5
