"""Rewards of steps, by the command: in a run, at an evaluation, and refused."""

import json

import pytest
from helpers import jsonl, read_json
from runs import words

STEPS = '''\
def words(responses, steps):
    """0.5 for each step, which here is a word."""
    assert all("".join(own) == text for own, text in zip(steps, responses))
    return [[0.5] * len(own) for own in steps]


def count(steps):
    return {"steps": [len(own) for own in steps]}
'''
KEYS = ("ppo.num_steps=1", "reward.step_separator=' '", "tracking.log_rollouts=true",
        "tracking.rollout_tokens=true", "generation.stop_sequences=[film]")


@pytest.mark.slow
def test_each_word_is_scored_where_it_ends(command, app, world):
    (world / "steps.py").write_text(STEPS)
    given = words("reward.fn=steps.py:words", "reward.metric_fn=steps.py:count", *KEYS)
    command(*given, "run_name=here", code=0)
    rows = jsonl(world / "runs/here/samples.jsonl")
    assert {row["kind"] for row in rows} == {"rollout", "eval"}
    for row in rows:
        count = len(row["response"].split())
        assert row["score"] == 0.5 * count
        if row["kind"] == "rollout":
            # a token is a word with the space before it; <pad>, <eos> and <unk> are no text
            places = [i for i, token in enumerate(row["response_ids"]) if token not in (0, 1, 3)]
            wanted = [0.0] * len(row["response_ids"])
            for i in range(count):
                wanted[places[i + (i < count - 1 or row["response"].endswith(" "))]] += 0.5
            assert row["token_rewards"] == wanted
    assert any(0 < row["score"] < 0.5 * row["response_tokens"] for row in rows)
    figures = read_json(world / "runs/here/summary.json")["eval_after"]
    assert figures["metrics/steps"] == 2 * figures["reward_mean"]
    # the judge of single responses
    found = json.loads(app("generate", world / "runs/here", "--prompt", "the film was", "--score",
                           "--json", code=0).out)
    assert found["score"] == 0.5 * len(found["response"].split())


def test_steps_without_ends_are_refused_before_a_model_is_loaded(command, validate, world):
    (world / "steps.py").write_text(STEPS)
    ended = command(*words("reward.fn=steps.py:words", "run_name=r"), code=7)
    assert "takes the steps of responses, and nothing defines them" in ended.err
    assert "reward.step_separator or reward.step_fn" in ended.err
    ended = validate(*words("reward.fn=steps.py:words", "reward.step_fn=steps.py:gone"), code=7)
    assert "steps.py" in ended.err
    assert "gone" in ended.err
