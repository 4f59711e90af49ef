"""``ppocli eval`` on a finished run: its figures, its files, other prompts and models."""

import gc
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from helpers import jsonl, save_lm, write_prompts
from judged import NAME, RUN, result
from runs import PLANTED, run


def summary(place: Path) -> dict:
    return json.loads((place / RUN / "summary.json").read_text())


def test_defaults_give_the_runs_own_figures(place, uninterrupted):
    done = run("eval", "--json", "--against", "base", cwd=place, HF_TOKEN=PLANTED, code=0)
    folder = place / RUN / "eval" / NAME
    assert done.out == (folder / "eval.json").read_text() + "\n"
    assert done.err.splitlines()[0] == f"using {RUN} (the newest run)"
    assert done.err.splitlines()[-1] == f"results  {folder / 'eval.json'}"
    report = result(folder)
    for figures, name in ((report["figures"], "eval_after"),
                          (report["against"]["figures"], "eval_before")):
        own = summary(place)[name]
        assert len(own) >= 9
        assert {key: figures[key] for key in own} == own
    rows = jsonl(folder / "samples.jsonl")
    assert [(row["model"], row["number"]) for row in rows] == [
        (role, number) for role in ("policy", "against") for number in range(16)]
    assert rows[9] == {**rows[9], "prompt_index": 1, "sample": 1}
    assert set(rows[9]["rewards"]) == {"good", "short"}
    assert set(rows[9]["metrics"]) == {"words"}
    assert [report[name] for name in ("schema", "step", "seed")] == [1, 4, 0]
    assert report["model"]["step"] == 4
    assert (report["prompts"]["count"], report["prompts"]["samples_each"]) == (8, 2)
    assert report["against"]["model"]["digest"] == report["base"]["digest"]
    assert report["model"]["digest"] != report["base"]["digest"]
    assert set(report["stderr"]) == {"reward_mean", "kl_mean", "response_tokens_mean",
                                     "finished_share", "reward/good", "reward/short",
                                     "metrics/words"}
    whole = (uninterrupted / "samples.jsonl").read_bytes()
    assert (folder / "samples.jsonl").read_bytes() == whole, "ppocli.evaluate gives the same"
    assert PLANTED not in done.said + "".join(
        path.read_text() for path in folder.iterdir() if path.is_file())


def test_the_table_shows_what_eval_json_holds(place, evaluate):
    done = evaluate(RUN, "--against", RUN, "--limit", "4", "--show", "1", "--min-reward",
                    "-99", code=0)
    lines = done.out.splitlines()
    report = result(place / RUN / "eval" / NAME)
    assert report["win_rate"] == {
        "compared": 8, "wins": 0, "ties": 8, "losses": 0, "win_rate": 0.5, "stderr": 0.0,
        "difference": 0.0, "difference_stderr": 0.0}
    assert "win rate 0.5 ± 0 of 8: 0 wins, 8 ties, 0 losses; reward higher by 0 ± 0" in lines
    names = [line.split("  ")[0].strip() for line in lines]
    assert names[4:20] == [
        "reward", "reward p5", "reward p25", "reward p50", "reward p75", "reward p95",
        "reward std", "KL to the base", "response tokens", "finished", "distinct-1", "distinct-2",
        "distinct-3", "reward/good", "reward/short", "words"]
    mean, error = report["figures"]["reward_mean"], report["stderr"]["reward_mean"]
    assert re.search(rf"^reward +{mean:.4g} ± {error:.2g} +{mean:.4g} ±", lines[4])
    assert [name for name in names if name == "prompt"] == ["prompt"]


def test_settings_of_generation_count_where_the_run_has_others_for_evaluation(place, evaluate):
    config = place / RUN / "config.yaml"
    head, tail = config.read_text().split("  eval:\n    max_new_tokens: null")
    config.write_text(head + "  eval:\n    max_new_tokens: 7" + tail)
    done = evaluate(RUN, "--limit", "1", "generation.max_new_tokens=2", "--json")
    assert json.loads(done.out)["generation"]["max_new_tokens"] == 2
    assert result(place / RUN / "eval" / NAME)["figures"]["response_tokens_mean"] <= 2


def test_other_prompts_with_their_own_columns(place, evaluate):
    write_prompts(place / "mine.jsonl", ["the plot", "it was"], wanted=["good", "bad"])
    (place / "wanted.py").write_text("def score(outputs, wanted, **_):\n"
                                    "    return [float(w in o) for o, w in zip(outputs, wanted)]\n")
    shutil.move(place / "prompts.jsonl", place / "gone.jsonl")
    done = evaluate(RUN, "--prompts", "mine.jsonl", "--reward", "wanted.py:score", "--json",
                    "--num-samples", "3", "--seed", "5", code=0)
    report = json.loads(done.out)
    rows = jsonl(place / RUN / "eval" / NAME / "samples.jsonl")
    assert [row["prompt"] for row in rows] == ["the plot", "it was"] * 3
    assert {row["score"] for row in rows} <= {0.0, 1.0}
    assert report["seed"] == 5


def test_a_model_brings_neither_reward_nor_prompts(place, evaluate):
    done = evaluate("./lm", code=2)
    assert done.err == (
        "Error: ./lm is a model and brings no reward of its own.\n  where: --reward\n"
        "  fix:   --reward module:function, or a built-in such as --reward length (arguments: "
        "reward.kwargs.NAME=VALUE)\n")
    done = evaluate("./lm", "--reward", "length", code=2)
    assert "brings no prompts of its own" in done.err
    both = ["./lm", "--reward", "length", "--prompts", "prompts.jsonl", "--limit", "2"]
    done = evaluate(*both, "reward.kwargs.target=3", code=0)
    assert "no KL: the base of this model is not known; to name it: model.path=FOLDER" in done.err
    report = result(place / "eval/lm")
    assert [report["run"], report["base"], report["model"]["step"],
            report["figures"]["kl_mean"]] == [None] * 4
    assert "KL to the base" in done.out
    for words, said in ((["--frontier"], "there is no reference"),
                        (["--against", "base"], "its base is not known")):
        done = evaluate(*both, *words, code=2)
        assert said in done.err


def test_without_a_reference_the_way_to_a_kl_is_said(place, evaluate):
    config = place / RUN / "config.yaml"
    config.write_text(config.read_text().replace("kind: auto", "kind: none").replace(
        "init_kl_coef: 0.05", "init_kl_coef: 0"))
    done = evaluate(RUN, "--limit", "2", "--name", "none", code=0)
    assert ("the run has no reference, so there is no KL; to measure it: "
                               "model.reference.kind=copy") in done.err
    assert evaluate(RUN, "--limit", "2", "--name", "copy", "model.reference.kind=copy").code == 0
    folder = place / RUN / "eval"
    assert result(folder / "none")["figures"]["kl_mean"] is None
    assert math.isfinite(result(folder / "copy")["figures"]["kl_mean"])


def test_another_tokenizer_has_no_kl_but_wins_or_loses(place, evaluate):
    from tokenizers import Tokenizer

    other = save_lm(place / "other", seed=3)
    inner = json.loads((other / "tokenizer.json").read_text())
    vocabulary = inner["model"]["vocab"]
    vocabulary["good"], vocabulary["bad"] = vocabulary["bad"], vocabulary["good"]
    assert Tokenizer.from_str(json.dumps(inner)).get_vocab_size() == len(vocabulary)
    (other / "tokenizer.json").write_text(json.dumps(inner))
    done = evaluate(RUN, "--against", "./other", "--limit", "3", code=0)
    assert "no KL of ./other: its tokenizer is not that of" in done.err
    report = result(place / RUN / "eval" / NAME)
    assert report["against"]["figures"]["kl_mean"] is None
    assert report["figures"]["kl_mean"] is not None
    assert report["win_rate"]["compared"] == 6


def test_a_reward_below_the_threshold_is_exit_10_after_all_is_written(place, evaluate):
    done = evaluate(RUN, "--limit", "2", "--min-reward", "99", "--json", code=10)
    report = json.loads(done.out)
    assert report == result(place / RUN / "eval" / NAME)
    mean = report["figures"]["reward_mean"]
    assert done.err.endswith(
        f"Error: The mean reward is {mean}, below the 99.0 asked for.\n"
        f"  where: {place / RUN / 'eval' / NAME / 'eval.json'}\n")


def test_a_run_that_cannot_be_written_to_is_evaluated_elsewhere(place, evaluate):
    (place / RUN / "eval").write_text("a file")
    done = evaluate(RUN, "--limit", "1", code=6)
    assert done.err.endswith("  fix:   name another folder: --output DIR\n")
    assert evaluate(RUN, "--limit", "1", "--output", "results").code == 0
    assert (place / "results" / NAME / "eval.json").is_file()


def test_the_frontier_says_its_price_and_what_it_found(place, evaluate, inject):
    given = [RUN, "--frontier", "--limit", "2", "--name", "x"]
    inject("score.before@4:term")
    assert evaluate(*given).code == 143
    inject("")
    done = evaluate(*given, "--resume", code=0)
    assert re.search(r"--frontier costs 22 more responses \(16 of .*/lm \(base\) to each prompt\)",
                     done.err)
    folder = place / RUN / "eval/x"
    found = result(folder)["frontier"]
    base = [row["score"] for row in jsonl(folder / "samples.jsonl") if row["model"] == "base"]
    assert len(base) == 32
    best = [max(base[0::2]), max(base[1::2])]
    assert found["points"][-1]["reward"] == pytest.approx(sum(best) / 2)
    assert found["points"][0]["reward"] == pytest.approx(sum(base) / 32)
    assert found["policy"]["reward"] == pytest.approx(result(folder)["figures"]["reward_mean"])
    assert found["policy"]["kl"] == pytest.approx(result(folder)["figures"]["kl_mean"])
    rewards = [point["reward"] for point in found["points"]]
    assert rewards == sorted(rewards)
    assert [line.split("  ")[0] for line in done.out.splitlines() if "best of" in line][:5] == [
        "best of 1", "best of 2", "best of 4", "best of 8", "best of 16"]
    assert (folder / "frontier.svg").read_text().startswith("<svg")
    hot = evaluate(*given, "--output", "hot", "generation.temperature=0.5")
    assert re.search(r"--frontier will take about \d+ s more", hot.err)
    assert "The policy can't be placed" in hot.out


def test_one_policy_is_in_memory_at_a_time(place):
    import ppocli

    def alive(outputs, **_):
        gc.collect()
        models = sum(type(thing).__name__ == "GPT2LMHeadModel" for thing in gc.get_objects())
        return [float(models)] * len(outputs)

    found = ppocli.evaluate(RUN, ["ppo.chunk_size=32"], reward_fn=alive, against="base", limit=2,
                            frontier=True)
    rows = jsonl(found.samples)
    assert {row["model"]: row["score"] for row in rows} == {"policy": 2, "against": 2, "base": 1}


def test_python_objects_take_the_place_of_words(place):
    import ppocli

    def score(completions, factor=1.0, **_):
        return [factor * len(text.split()) for text in completions]

    found = ppocli.evaluate(RUN, ["reward.kwargs.factor=2"], reward_fn=score, num_samples=1,
                            prompts=["the film", "it"], name="mine")
    rows = jsonl(found.samples)
    assert [row["prompt"] for row in rows] == ["the film", "it"]
    assert all(row["score"] == 2.0 * len(row["response"].split()) for row in rows)
    assert found.report["settings"]["reward"]["fn"] == "<python object>"
    bare = ppocli.evaluate("./lm", reward_fn={"words": score}, prompts=["it"], name="bare")
    assert bare.folder == place / "eval/bare"
    assert bare.report["prompts"]["count"] == 1
