"""Training on several sources of prompts, from words to figures."""

from collections import Counter

import pytest
from helpers import checked, jsonl, read_json, write_jsonl
from runs import WORDS

import ppocli
from ppocli.errors import CheckpointError


def reward(responses, source, level, **_):
    """A score by source alone, and a column that one of them has."""
    assert {name for name, value in zip(source, level, strict=True) if value} <= {"films"}
    return [{"films": 1.0, "people": 3.0}[name] for name in source]


def test_a_mix_is_trained_on(shared_world, tmp_path):
    films = write_jsonl(tmp_path / "films.jsonl", [
        {"text": f"the film {word}", "level": 2} for word in ("was", "is", "and", "so", "not")])
    people = write_jsonl(tmp_path / "people.jsonl", [{"prompt": "i was"}, {"prompt": "you hated"}])
    words = [f"model.path={shared_world / 'lm'}", *WORDS, f"output_dir={tmp_path}", "run_name=mix",
             "ppo.num_rollouts=16", "ppo.mini_batch_size=8", "prompts.eval.limit=4",
             f"prompts.mix={{films: {{path: {films}, column: text}}}}",
             "prompts.mix.films.weight=3", f"+prompts.mix.people.path={people}",
             "tracking.log_rollouts=true", "ppo.ppo_epochs=1", "eval.every_steps=null"]
    run = ppocli.train([*words, "ppo.num_steps=1"], reward_fn=reward).run_dir
    ppocli.train([f"resume={run}", "ppo.num_steps=2"], reward_fn=reward)

    rows = jsonl(run / "metrics.jsonl")[1:]
    assert [row["reward/mean/films"] for row in rows] == [1.0] * 2
    assert [row["reward/mean/people"] for row in rows] == [3.0] * 2
    assert {row["reward/mean"] for row in rows} == {1.5}
    after = read_json(run / "summary.json")["eval_after"]
    assert (after["reward_mean/films"], after["reward_mean/people"]) == (1.0, 3.0)
    samples = [row for row in jsonl(run / "samples.jsonl") if row["kind"] == "rollout"]
    assert Counter((row["step"], row["source"]) for row in samples) == {
        (step, name): count for step in (1, 2) for name, count in (("films", 12), ("people", 4))}
    seen = [row["prompt"] for row in sorted(samples, key=lambda row: row["episode"])
            if row["source"] == "films"]
    assert all(len(set(seen[start:start + 5])) == 5 for start in range(0, 20, 5))
    with pytest.raises(CheckpointError, match=r"prompts\.mix\.films: "):
        ppocli.train([f"resume={run}", "prompts.mix.films.weight=2"], reward_fn=reward)


def test_what_is_typed_replaces_other_sources():
    recipe = ("+recipe=quickstart",)
    mix = checked(*recipe, "prompts.mix.a.path=builtin:reviews-prompts").config.prompts
    assert (mix.path, mix.mix) == (None, {"a": {"path": "builtin:reviews-prompts"}})
