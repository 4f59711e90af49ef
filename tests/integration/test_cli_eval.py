"""``ppocli eval`` on a finished run: its figures, its files, and what an interruption leaves."""

from __future__ import annotations

import gc
import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import jsonl, save_lm, write_prompts
from runs import PLANTED, Ended, run, whole_copy, words

RUN = "runs/trained"
NAME = "step-000004"
BEGUN = ["--against", "base", "--name", "x"]
"""an evaluation of two models: 16 samples each, in chunks of 5"""


@pytest.fixture(scope="module")
def trained(shared_world: Path) -> Path:
    """The folder of a finished run with two rewards and a metric, apart from a Hub and a GPU."""
    from ppocli.cli.output import code_of
    from ppocli.cli.train import run_words

    given = [word for word in words() if not word.startswith("reward.fn=")]
    given = [f"{word.partition('=')[0]}={shared_world / word.partition('=')[2]}"
             if word.startswith(("model.path", "prompts.path")) else word for word in given]
    rewards = shared_world / "rewards.py"
    code = code_of(lambda: run_words([
        *given, f"reward.fns.good.fn={rewards}:plain", "reward.fns.short.fn=length",
        "reward.fns.short.kwargs.target=4", "reward.fns.short.weight=0.5",
        f"reward.metric_fn={rewards}:measure", "prompts.eval.limit=8", "prompts.eval.repeat=2",
        "run_name=trained", f"output_dir={shared_world / 'made'}"]))
    assert code == 0
    return shared_world / "made/trained"


@pytest.fixture
def here(trained: Path, world: Path) -> Path:
    """The current folder, with a copy of the run in it."""
    (world / "runs").mkdir()
    whole_copy(trained, world / RUN)
    return world


@pytest.fixture(scope="module")
def uninterrupted(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of :data:`BEGUN`."""
    import ppocli

    return ppocli.evaluate(trained, against="base", name="x",
                           output=tmp_path_factory.mktemp("whole")).folder


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str], command: object) -> Callable[..., Ended]:
    """``ppocli eval`` in this process: same parsing, same endings."""
    from ppocli.cli.app import app
    from ppocli.cli.output import code_of

    def evaluate(*given: str) -> Ended:
        capsys.readouterr()
        code = code_of(lambda: app(["eval", *given], prog_name="ppocli"))
        out, err = capsys.readouterr()
        return Ended(code, out, err)

    return evaluate


def result(folder: Path) -> dict:
    return json.loads((folder / "eval.json").read_text())


def summary(here: Path) -> dict:
    return json.loads((here / RUN / "summary.json").read_text())


def test_defaults_give_the_runs_own_figures(here, uninterrupted):
    done = run("eval", "--json", "--against", "base", cwd=here, HF_TOKEN=PLANTED)
    assert done.code == 0, done.err
    folder = here / RUN / "eval" / NAME
    assert done.out == (folder / "eval.json").read_text() + "\n"
    assert done.err.splitlines()[0] == f"using {RUN} (the newest run)"
    assert done.err.splitlines()[-1] == f"results  {folder / 'eval.json'}"
    report = result(folder)
    for figures, name in ((report["figures"], "eval_after"),
                          (report["against"]["figures"], "eval_before")):
        own = summary(here)[name]
        assert len(own) >= 9
        assert {key: figures[key] for key in own} == own
    rows = jsonl(folder / "samples.jsonl")
    assert [(row["model"], row["number"]) for row in rows] == [
        (role, number) for role in ("policy", "against") for number in range(16)]
    assert rows[9] == {**rows[9], "prompt_index": 1, "sample": 1}
    assert set(rows[9]["rewards"]) == {"good", "short"}
    assert set(rows[9]["metrics"]) == {"words"}
    assert report["schema"] == 1
    assert report["step"] == 4
    assert report["model"]["step"] == 4
    assert report["seed"] == 0
    assert report["prompts"]["count"] == 8
    assert report["prompts"]["samples_each"] == 2
    assert report["against"]["model"]["digest"] == report["base"]["digest"]
    assert report["model"]["digest"] != report["base"]["digest"]
    assert set(report["stderr"]) == {"reward_mean", "kl_mean", "response_tokens_mean",
                                     "finished_share", "reward/good", "reward/short",
                                     "metrics/words"}
    whole = (uninterrupted / "samples.jsonl").read_bytes()
    assert (folder / "samples.jsonl").read_bytes() == whole, "ppocli.evaluate gives the same"
    assert PLANTED not in done.said + "".join(
        path.read_text() for path in folder.iterdir() if path.is_file())


def test_the_table_shows_what_eval_json_holds(here, evaluate):
    done = evaluate(RUN, "--against", RUN, "--limit", "4", "--show", "1", "--min-reward",
                    "-99")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    report = result(here / RUN / "eval" / NAME)
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


def test_the_best_reward_wins(here, evaluate):
    wide = ["--against", "base", "--num-samples", "1", "--reward", "./rewards.py:plain"]
    done = evaluate(RUN, *wide, "--json", "generation.temperature=0.5")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    rows = jsonl(here / RUN / "eval" / NAME / "samples.jsonl")
    pairs = list(zip(rows[:8], rows[8:], strict=True))
    assert all(a["prompt"] == b["prompt"] for a, b in pairs)
    wins = sum(a["score"] > b["score"] for a, b in pairs)
    ties = sum(a["score"] == b["score"] for a, b in pairs)
    assert report["win_rate"]["wins"] == wins
    assert report["win_rate"]["ties"] == ties
    assert report["win_rate"]["win_rate"] == (wins + ties / 2) / 8
    assert report["generation"]["temperature"] == 0.5
    assert report["settings"]["reward"]["fns"] == {}
    assert "reward/good" not in report["figures"]
    code = report["settings"]["code"]
    assert str(here / "rewards.py") in code


def test_settings_of_generation_count_where_the_run_has_others_for_evaluation(here, evaluate):
    config = here / RUN / "config.yaml"
    head, tail = config.read_text().split("  eval:\n    max_new_tokens: null")
    config.write_text(head + "  eval:\n    max_new_tokens: 7" + tail)
    done = evaluate(RUN, "--limit", "1", "generation.max_new_tokens=2", "--json")
    assert json.loads(done.out)["generation"]["max_new_tokens"] == 2
    assert result(here / RUN / "eval" / NAME)["figures"]["response_tokens_mean"] <= 2


def test_other_prompts_with_their_own_columns(here, evaluate):
    write_prompts(here / "mine.jsonl", ["the plot", "it was"], wanted=["good", "bad"])
    (here / "wanted.py").write_text("def score(outputs, wanted, **_):\n"
                                    "    return [float(w in o) for o, w in zip(outputs, wanted)]\n")
    shutil.move(here / "prompts.jsonl", here / "gone.jsonl")
    done = evaluate(RUN, "--prompts", "mine.jsonl", "--reward", "wanted.py:score", "--json",
                    "--num-samples", "3", "--seed", "5")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    rows = jsonl(here / RUN / "eval" / NAME / "samples.jsonl")
    assert [row["prompt"] for row in rows] == ["the plot", "it was"] * 3
    assert {row["score"] for row in rows} <= {0.0, 1.0}
    assert report["seed"] == 5


def test_a_model_brings_neither_reward_nor_prompts(here, evaluate):
    done = evaluate("./lm")
    assert done.code == 2
    assert done.err == (
        "Error: ./lm is a model and brings no reward of its own.\n  where: --reward\n"
        "  fix:   --reward module:function, or a built-in such as --reward length (arguments: "
        "reward.kwargs.NAME=VALUE)\n")
    done = evaluate("./lm", "--reward", "length")
    assert done.code == 2
    assert "brings no prompts of its own" in done.err
    done = evaluate("./lm", "--reward", "length", "--prompts", "prompts.jsonl", "--limit", "2",
                    "reward.kwargs.target=3")
    assert done.code == 0, done.err
    assert "no KL: the base of this model is not known; to name it: model.path=FOLDER" in done.err
    report = result(here / "eval/lm")
    assert report["run"] is None
    assert report["base"] is None
    assert report["model"]["step"] is None
    assert report["figures"]["kl_mean"] is None
    assert "KL to the base" in done.out
    done = evaluate("./lm", "--reward", "length", "--prompts", "prompts.jsonl", "--limit", "2",
                    "--frontier")
    assert done.code == 2
    assert "there is no reference" in done.err
    done = evaluate("./lm", "--reward", "length", "--prompts", "prompts.jsonl", "--against", "base")
    assert done.code == 2
    assert "its base is not known" in done.err


def test_without_a_reference_the_way_to_a_kl_is_said(here, evaluate):
    config = here / RUN / "config.yaml"
    config.write_text(config.read_text().replace("kind: auto", "kind: none").replace(
        "init_kl_coef: 0.05", "init_kl_coef: 0"))
    done = evaluate(RUN, "--limit", "2", "--name", "none")
    assert done.code == 0
    assert ("the run has no reference, so there is no KL; to measure it: "
                               "model.reference.kind=copy") in done.err
    assert evaluate(RUN, "--limit", "2", "--name", "copy", "model.reference.kind=copy").code == 0
    folder = here / RUN / "eval"
    assert result(folder / "none")["figures"]["kl_mean"] is None
    assert math.isfinite(result(folder / "copy")["figures"]["kl_mean"])


def test_another_tokenizer_has_no_kl_but_wins_or_loses(here, evaluate):
    from tokenizers import Tokenizer

    other = save_lm(here / "other", seed=3)
    inner = json.loads((other / "tokenizer.json").read_text())
    vocabulary = inner["model"]["vocab"]
    vocabulary["good"], vocabulary["bad"] = vocabulary["bad"], vocabulary["good"]
    assert Tokenizer.from_str(json.dumps(inner)).get_vocab_size() == len(vocabulary)
    (other / "tokenizer.json").write_text(json.dumps(inner))
    done = evaluate(RUN, "--against", "./other", "--limit", "3")
    assert done.code == 0, done.err
    assert "no KL of ./other: its tokenizer is not that of" in done.err
    report = result(here / RUN / "eval" / NAME)
    assert report["against"]["figures"]["kl_mean"] is None
    assert report["figures"]["kl_mean"] is not None
    assert report["win_rate"]["compared"] == 6


def test_a_reward_below_the_threshold_is_exit_10_after_all_is_written(here, evaluate):
    done = evaluate(RUN, "--limit", "2", "--min-reward", "99", "--json")
    assert done.code == 10
    report = json.loads(done.out)
    assert report == result(here / RUN / "eval" / NAME)
    mean = report["figures"]["reward_mean"]
    assert done.err.endswith(
        f"Error: The mean reward is {mean:.4g}, below the 99 asked for.\n"
        f"  where: {here / RUN / 'eval' / NAME / 'eval.json'}\n")


def test_nothing_is_overwritten_unless_asked_for(here, evaluate):
    few = [RUN, "--limit", "2"]
    assert evaluate(*few, "--name", "x").code == 0
    old = (here / RUN / "eval/x/samples.jsonl").read_bytes()
    done = evaluate(*few, "--name", "x", "--seed", "9")
    assert done.code == 5
    assert done.err == (
        f"Error: {here / RUN / 'eval/x'} holds a finished evaluation already.\n"
        "  where: --name x\n  fix:   --resume goes on with it, --overwrite starts it again; or "
        "choose another --name\n")
    done = evaluate(*few, "--name", "x", "--seed", "9", "--resume")
    assert done.code == 5
    assert "was begun under other settings:\n  seed: 0 -> 9\n" in done.err
    assert (here / RUN / "eval/x/samples.jsonl").read_bytes() == old
    done = evaluate(*few, "--name", "x", "--resume")
    assert done.code == 0
    assert "finished already" in done.err
    assert "KL to the base" in done.out
    assert evaluate(*few, "--name", "x", "--seed", "9", "--overwrite").code == 0
    assert result(here / RUN / "eval/x")["seed"] == 9
    assert (here / RUN / "eval/x/samples.jsonl").read_bytes() != old


def assert_same_result(folder: Path, uninterrupted: Path) -> None:
    assert (folder / "samples.jsonl").read_bytes() == (uninterrupted / "samples.jsonl").read_bytes()
    one, other = result(folder), result(uninterrupted)
    for name in ("figures", "stderr", "quantiles", "win_rate", "seed", "generation", "base"):
        assert one[name] == other[name], name
    assert one["against"]["figures"] == other["against"]["figures"]
    assert {path.name for path in folder.iterdir()} == {"samples.jsonl", "settings.json",
                                                        "eval.json", ".lock"}


@pytest.mark.parametrize(("action", "code", "kept"), [("int@2", 130, 5), ("term@6", 143, 21)])
def test_a_stopped_evaluation_goes_on_with_the_command_it_names(
        here, evaluate, inject, uninterrupted, action, code, kept):
    signal, nth = action.split("@")
    inject(f"score.before@{nth}:{signal}")
    done = evaluate(RUN, *BEGUN)
    assert done.code == code, done.err
    folder = here / RUN / "eval/x"
    assert f"{kept} samples are kept in {folder / 'samples.jsonl'}\n" in done.err
    assert not (folder / "eval.json").exists()
    assert len(jsonl(folder / "samples.jsonl")) == kept
    goes_on = shlex.split(re.search(r"fix:   go on with: ppocli eval (.*)", done.err)[1])
    assert goes_on == [RUN, *BEGUN, "--resume"]
    inject("")
    done = evaluate(*goes_on)
    assert done.code == 0
    assert f"{kept} of 32 samples are there" in done.err
    assert_same_result(folder, uninterrupted)


def test_a_killed_evaluation_goes_on(here, evaluate, uninterrupted):
    done = run("eval", RUN, *BEGUN, cwd=here, PPOCLI_FAULTS="score.before@5:kill9")
    assert done.code == -9
    folder = here / RUN / "eval/x"
    assert not (folder / "eval.json").exists()
    assert len(jsonl(folder / "samples.jsonl")) == 16
    with (folder / "samples.jsonl").open("a") as samples:  # half of a chunk, and half of a line
        samples.write('{"model": "against", "number": 0}\n{"model": "aga')
    assert evaluate(RUN, *BEGUN).code == 5
    done = evaluate(RUN, *BEGUN, "--resume")
    assert done.code == 0, done.err
    assert_same_result(folder, uninterrupted)


def test_samples_of_anything_else_are_not_mixed_in(here, evaluate, inject):
    from ppocli.engine.run_folder import lock

    given = [RUN, "--reward", "rewards.py:plain", "--name", "x"]
    inject("score.before@2:term")
    assert evaluate(*given).code == 143
    inject("")
    folder = here / RUN / "eval/x"
    kept = (folder / "samples.jsonl").read_bytes()
    with lock(folder):
        done = evaluate(*given, "--resume")
    assert done.code == 5
    assert "is in use by process" in done.err
    assert "choose another --name" in done.err
    done = evaluate(*given, "--resume", "generation.temperature=0.5")
    assert done.code == 5
    assert done.err.endswith(
        f"Error: {folder} was begun under other settings:\n"
        "  generation.temperature: 1.0 -> 0.5\n"
        f"  where: {folder / 'settings.json'}\n"
        "  fix:   give the settings it was begun with; or start again: --overwrite in place "
        "of --resume; or choose another --name\n")
    with (here / "rewards.py").open("a") as code:
        code.write("# changed\n")
    save_lm(here / "new", seed=9)
    shutil.copy(here / "new/model.safetensors", here / RUN / "model/model.safetensors")
    done = evaluate(*given, "--resume")
    assert done.code == 5
    assert f"\n  code.{here / 'rewards.py'}: " in done.err
    assert "\n  models.policy: " in done.err
    assert (folder / "samples.jsonl").read_bytes() == kept


def test_a_failing_reward_leaves_what_was_scored_or_nothing(here, evaluate):
    (here / "failing.py").write_text(
        "calls = []\n\ndef score(outputs, first=1, **_):\n    calls.append(1)\n"
        "    if len(calls) >= first:\n        raise ValueError('no more')\n"
        "    return [0.0] * len(outputs)\n")
    done = evaluate(RUN, "--reward", "failing.py:score")
    assert done.code == 7
    assert "no more" in done.err
    assert not (here / RUN / "eval").exists()
    done = evaluate(RUN, "--reward", "failing.py:score", "reward.kwargs.first=3")
    assert done.code == 7
    folder = here / RUN / "eval" / NAME
    assert f"5 samples are kept in {folder / 'samples.jsonl'}; to go on: ppocli eval" in done.err
    assert len(jsonl(folder / "samples.jsonl")) == 5
    assert not (folder / "eval.json").exists()


def test_a_run_that_cannot_be_written_to_is_evaluated_elsewhere(here, evaluate):
    (here / RUN / "eval").write_text("a file")
    done = evaluate(RUN, "--limit", "1")
    assert done.code == 6, done.err
    assert done.err.endswith("  fix:   name another folder: --output DIR\n")
    assert evaluate(RUN, "--limit", "1", "--output", "results").code == 0
    assert (here / "results" / NAME / "eval.json").is_file()


def test_the_frontier_says_its_price_and_what_it_found(here, evaluate, inject):
    given = [RUN, "--frontier", "--limit", "2", "--name", "x"]
    inject("score.before@4:term")
    assert evaluate(*given).code == 143
    inject("")
    done = evaluate(*given, "--resume")
    assert done.code == 0, done.err
    assert re.search(r"--frontier costs 22 more responses \(16 of .*/lm \(base\) to each prompt\)",
                     done.err)
    folder = here / RUN / "eval/x"
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


def test_one_policy_is_in_memory_at_a_time(here):
    import ppocli

    def alive(outputs, **_):
        gc.collect()
        models = sum(type(thing).__name__ == "GPT2LMHeadModel" for thing in gc.get_objects())
        return [float(models)] * len(outputs)

    found = ppocli.evaluate(RUN, ["ppo.chunk_size=32"], reward_fn=alive, against="base", limit=2,
                            frontier=True)
    rows = jsonl(found.samples)
    assert {row["model"]: row["score"] for row in rows} == {"policy": 2, "against": 2, "base": 1}


def test_python_objects_take_the_place_of_words(here):
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
    assert bare.folder == here / "eval/bare"
    assert bare.report["prompts"]["count"] == 1
