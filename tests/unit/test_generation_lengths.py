"""Lengths drawn per response."""

import numpy as np
import pytest
from helpers import jsonl, with_node_values
from runs import words

from ppocli.config.problems import find_problems
from ppocli.sampling.samples import lengths


def test_drawn_lengths_are_even_and_belong_to_the_sample():
    drawn = lengths(7, range(4000), 2, 5)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [2, 3, 4, 5]  # both ends are reached
    assert all(abs(count - 1000) < 110 for count in counts)  # four standard deviations
    assert lengths(7, [3999, 17], 2, 5).tolist() == [drawn[3999], drawn[17]]
    assert lengths(8, range(4000), 2, 5).tolist() != drawn.tolist()
    assert set(lengths(7, range(100), 4, 4)) == {4}


LENGTHS = ("generation.length_sampler=[3,6]", "ppo.num_steps=2", "tracking.log_rollouts=true",
           "eval.at_start=false", "eval.every_steps=null")


@pytest.mark.long
def test_responses_keep_to_their_length(command, world):
    command(*words(*LENGTHS, "run_name=a"), code=0)
    samples = jsonl(world / "runs/a/samples.jsonl")
    rows = [row for row in samples if row["kind"] == "rollout"]
    allowed = lengths(0, range(24), 3, 6)
    assert [row["episode"] for row in rows] == list(range(24))
    for row, most in zip(rows, allowed, strict=True):
        assert row["response_tokens"] == most or (row["finished"] and row["response_tokens"] < most)
    assert any(not row["finished"] for row in rows)
    # at evaluation: max_new_tokens
    assert max(row["response_tokens"] for row in samples if row["kind"] == "eval") > 6


def merged(**values):
    return with_node_values({f"generation.{key.replace('__', '.')}": value
                             for key, value in values.items()})


@pytest.mark.parametrize(("values", "said"), [
    ({"length_sampler": [5, 4]}, "[5, 4] must be [min, max] with min at most max"),
    ({"length_sampler": [0, 4]}, "0 must be >= 1"),
    ({"length_sampler": [4, 33]}, "must be at most max_new_tokens")])
def test_wrong_values_are_told_with_their_keys(values, said):
    (config, wrong), key = merged(**values), ", generation.".join(values).replace("__", ".")
    problems = [*wrong, *find_problems(config)]
    assert [p for p in problems if key in p.key and said in p.text], [str(p) for p in problems]
