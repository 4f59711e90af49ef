"""Lengths drawn per response, sweeps of a sampling setting, the reference's own responses."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from helpers import jsonl, stable_rows, with_node_values
from runs import make_world, resumed, whole_copy, words

from ppocli.cli.output import code_of
from ppocli.cli.runs import report
from ppocli.cli.settings import json_schema
from ppocli.cli.train import run_words
from ppocli.config.problems import find_problems
from ppocli.config.schema import TrainConfig
from ppocli.ppo.policy_evaluation import sampling_sweep
from ppocli.sampling.token_choice import SamplingSpec, lengths


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


SWEEP = ("generation.eval.top_k=[0,1]", "ppo.num_steps=2", "eval.every_steps=2")


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A run that evaluates with two values of top_k, keeps the reference's responses, and its twin
    without either."""
    world = make_world(tmp_path_factory.mktemp("swept"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world)
        for name, more in (("plain", SWEEP[1:]), ("swept", (*SWEEP, "eval.ref_responses=true"))):
            assert code_of(lambda n=name, m=more: run_words(list(words(
                *m, f"run_name={n}", "reward.metric_fn=rewards.py:measure")))) == 0
        yield world / "runs"


@pytest.mark.long
def test_each_value_is_evaluated_and_the_first_one_counts(swept):
    plain = stable_rows(swept / "plain/metrics.jsonl")
    rows = stable_rows(swept / "swept/metrics.jsonl")
    for row, other in zip(rows, plain, strict=True):
        assert {k: v for k, v in row.items() if "@" not in k} == other
        for name in [name for name in other if name.startswith("eval/")]:
            assert row[f"{name}@top_k=0"] == row[name]
            assert f"{name}@top_k=1" in row
    assert rows[0]["eval/reward_mean@top_k=1"] != rows[0]["eval/reward_mean@top_k=0"] or (
        rows[0]["eval/metrics/words@top_k=1"] != rows[0]["eval/metrics/words@top_k=0"])


@pytest.mark.long
def test_samples_of_further_values_are_kept_apart(swept):
    rows = jsonl(swept / "swept/samples.jsonl")
    counted = {(row["step"], row["kind"], row.get("sampling")) for row in rows}
    assert counted == {(0, "eval", None), (0, "eval_sweep", "top_k=1"),
                       (2, "eval", None), (2, "eval_sweep", "top_k=1")}
    greedy = [row["response"] for row in rows if row["kind"] == "eval_sweep" and row["step"] == 0]
    assert len(greedy) == len({row["prompt"] for row in rows}) == 4


@pytest.mark.long
def test_the_reference_answers_beside_the_policy(swept):
    rows = [row for row in jsonl(swept / "swept/samples.jsonl") if row["kind"] == "eval"]
    before, after = ([row for row in rows if row["step"] == step] for step in (0, 2))
    # before training the policy is the reference: same random numbers, same words
    assert [row["ref_response"] for row in before] == [row["response"] for row in before]
    assert [row["ref_response"] for row in after] == [row["response"] for row in before]
    report(str(swept / "swept"), None, None, None, False, False)
    for name in ("report.md", "report.html"):
        assert "reference" in (swept / "swept" / name).read_text()
    assert "\nreference" in (swept / "swept/report.md").read_text()


@pytest.mark.long
def test_an_evaluation_that_is_done_again_on_resume_leaves_no_row_twice(swept, tmp_path):
    run = whole_copy(swept / "swept", tmp_path / "again")
    shutil.rmtree(run / "model")
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints/step-000002")
    resumed(run)
    assert stable_rows(run / "metrics.jsonl") == stable_rows(swept / "swept/metrics.jsonl")
    assert (run / "samples.jsonl").read_bytes() == (swept / "swept/samples.jsonl").read_bytes()


def test_the_values_of_a_sweep():
    cfg = TrainConfig().generation
    first = SamplingSpec(max_new_tokens=8, stop_ids=(1,))
    assert sampling_sweep(cfg, first) == {}
    assert sampling_sweep(replace(cfg, eval=replace(cfg.eval, top_p=[1.0, 0.5])), first) == {
        "top_p=1": first, "top_p=0.5": replace(first, top_p=0.5)}
    assert list(sampling_sweep(replace(cfg, eval=replace(cfg.eval, top_p=[0.9999999, 1.0])), first)
                ) == ["top_p=0.9999999", "top_p=1"]
    assert list(sampling_sweep(replace(cfg, eval=replace(cfg.eval, do_sample=[True, False])), first)
                ) == ["do_sample=true", "do_sample=false"]


def merged(**values):
    return with_node_values({f"generation.{key.replace('__', '.')}": value
                             for key, value in values.items()})


@pytest.mark.parametrize(("values", "said"), [
    ({"eval__top_k": [0, "x"]}, "[0, 'x'] must be a whole number, a list of whole numbers"),
    ({"eval__top_k": [0, True]}, "must be a whole number"),
    ({"eval__top_k": []}, "the list must hold at least one value"),
    ({"eval__top_k": [5, 5]}, "[5, 5] holds a value twice"),
    ({"eval__top_k": [0, -1]}, "-1 must be >= 0"),
    ({"top_k": [0, 50]}, "generation.eval.top_k=[...] evaluates with each"),
    ({"length_sampler": [5, 4]}, "[5, 4] must be [min, max] with min at most max"),
    ({"length_sampler": [0, 4]}, "0 must be >= 1"),
    ({"length_sampler": [4, 33]}, "must lie between min_new_tokens 0 and max_new_tokens"),
    ({"eval__top_k": [0, 5], "eval__top_p": [1, 0.5]}, "only one of the keys")])
def test_wrong_values_are_told_with_their_keys(values, said):
    (config, wrong), key = merged(**values), ", generation.".join(values).replace("__", ".")
    problems = [*wrong, *find_problems(config)]
    assert [p for p in problems if key in p.key and said in p.text], [str(p) for p in problems]


def test_numbers_become_those_of_the_key():
    config, _ = merged(eval__temperature=[1, "0.5"], eval__top_k="7")
    cfg = config.generation.eval
    assert (cfg.temperature, cfg.top_k) == ([1.0, 0.5], 7)
    assert isinstance(cfg.temperature[0], float)
    shape = json_schema("generation.eval.top_k")["anyOf"][0]["anyOf"]
    assert shape[0] == {"type": "integer", "minimum": 0}
    assert (shape[1]["type"], shape[1]["minItems"]) == ("array", 1)
