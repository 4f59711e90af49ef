"""``ppocli eval`` on a finished run: its figures, its files, other prompts and models."""

import json
import shutil

import pytest
from helpers import jsonl, read_json, save_lm, write_prompts
from judged import BEGUN, NAME, RUN, result
from runs import PLANTED, run

import ppocli
from ppocli.cli import eval as command
from ppocli.runs.run_folder import lock


def test_defaults_give_the_runs_own_figures(place, uninterrupted):
    done = run("eval", "--json", "--against", "base", cwd=place, HF_TOKEN=PLANTED, code=0)
    folder = place / RUN / "eval" / NAME
    assert done.out == (folder / "eval.json").read_text() + "\n"
    assert done.err.splitlines()[0] == f"using {RUN} (the newest run)"
    assert done.err.splitlines()[-1] == f"results  {folder / 'eval.json'}"
    report = result(folder)
    for figures, name in ((report["figures"], "eval_after"),
                          (report["against"]["figures"], "eval_before")):
        own = read_json(place / RUN / "summary.json")[name]
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


def test_other_prompts_with_their_own_columns(place, evaluate, monkeypatch):
    """The folder has an apostrophe in its name, and the file a dollar."""
    place = place.rename(place.with_name("o'b"))
    monkeypatch.chdir(place)
    write_prompts(place / "pr, =${y}.jsonl", ["the plot", "it was"], wanted=["good", "bad"])
    (place / "wanted.py").write_text("def score(outputs, wanted, **_):\n"
                                    "    return [float(w in o) for o, w in zip(outputs, wanted)]\n")
    shutil.move(place / "prompts.jsonl", place / "gone.jsonl")
    done = evaluate(RUN, "--prompts", "pr, =${y}.jsonl", "--reward", "wanted.py:score", "--json",
                    "--num-samples", "3", "--seed", 2**63 - 1, code=0)
    report = json.loads(done.out)
    rows = jsonl(place / RUN / "eval" / NAME / "samples.jsonl")
    assert [row["prompt"] for row in rows] == ["the plot", "it was"] * 3
    assert {row["score"] for row in rows} <= {0.0, 1.0}
    assert report["seed"] == 2**63 - 1


def test_a_model_brings_neither_reward_nor_prompts(place, evaluate):
    assert "brings no reward of its own" in evaluate("./lm", code=2).err
    assert "brings no prompts of its own" in evaluate("./lm", "--reward", "length", code=2).err
    both = ["./lm", "--reward", "length", "--prompts", "prompts.jsonl", "--limit", "2"]
    done = evaluate(*both, "reward.kwargs.target=3", code=0)
    assert "no KL: the base of this model is not known; to name it: model.path=FOLDER" in done.err
    report = result(place / "eval/lm")
    assert [report["run"], report["base"], report["model"]["step"],
            report["figures"]["kl_mean"]] == [None] * 4
    assert "KL to the base" in done.out
    assert "its base is not known" in evaluate(*both, "--against", "base", code=2).err


def test_another_tokenizer_has_no_kl_but_wins_or_loses(place, evaluate):
    other = save_lm(place / "other", seed=3)
    inner = read_json(other / "tokenizer.json")
    vocabulary = inner["model"]["vocab"]
    vocabulary["good"], vocabulary["bad"] = vocabulary["bad"], vocabulary["good"]
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


def test_nothing_is_overwritten_unless_asked_for(place, evaluate):
    few = [RUN, "--limit", "2", "--name", "x"]
    assert evaluate(*few).code == 0
    folder = place / RUN / "eval/x"
    old = (folder / "samples.jsonl").read_bytes()
    done = evaluate(*few, "--seed", "9", code=5)
    assert f"{folder} holds a finished evaluation already." in done.err
    assert (folder / "samples.jsonl").read_bytes() == old
    assert evaluate(*few, "--seed", "9", "--overwrite").code == 0
    assert result(folder)["seed"] == 9
    assert (folder / "samples.jsonl").read_bytes() != old


def test_a_stopped_evaluation_keeps_its_samples_and_is_run_again(
        place, evaluate, inject, uninterrupted):
    inject("score.before@6:int")
    done = evaluate(RUN, *BEGUN, code=130)
    folder = place / RUN / "eval/x"
    whole = (uninterrupted / "samples.jsonl").read_bytes()
    assert done.err.endswith(
        f"21 samples stay in {folder / 'samples.jsonl'}\n"
        "  fix:   run it again, with --overwrite: the same seed gives the same samples\n")
    assert (folder / "samples.jsonl").read_bytes() == b"".join(whole.splitlines(True)[:21])
    assert not (folder / "eval.json").exists()
    inject("")
    with lock(folder):
        done = evaluate(RUN, *BEGUN, "--overwrite", code=5)
    assert "is in use by process" in done.err
    assert "choose another name" in done.err
    assert evaluate(RUN, *BEGUN, "--overwrite").code == 0
    assert (folder / "samples.jsonl").read_bytes() == whole


def test_the_frontier_says_what_it_found(place, evaluate):
    given = [RUN, "--frontier", "--limit", "2", "--name", "x"]
    done = evaluate(*given, code=0)
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


def test_python_objects_take_the_place_of_words(place):
    def score(completions, factor=1.0, **_):
        return [factor * len(text.split()) for text in completions]

    found = ppocli.evaluate(RUN, ["reward.kwargs.factor=2"], reward_fn=score, num_samples=1,
                            prompts=["the film", "it"], name="mine")
    rows = jsonl(found.samples)
    assert [row["prompt"] for row in rows] == ["the film", "it"]
    assert all(row["score"] == 2.0 * len(row["response"].split()) for row in rows)
    assert found.report["settings"]["reward"]["fn"] == "<python object>"


def test_samples_reach_the_terminal_without_control_characters(tmp_path):
    path = tmp_path / "samples.jsonl"
    row = {"model": "policy", "prompt_index": 0, "sample": 0, "prompt": "a\x1b[31mb", "score": None,
           "response": "c\nd\x07" + "e" * 400}
    path.write_text(json.dumps(row) + "\n")
    lines = list(command._sample_lines(path, 3))
    assert lines[1] == "prompt   a?[31mb"
    assert lines[2].startswith("policy   [-] c ⏎ d?eee")
    assert lines[2].endswith("e...")
    assert list(command._sample_lines(path, 0)) == []
