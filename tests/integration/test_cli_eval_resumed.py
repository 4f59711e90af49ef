"""``ppocli eval`` that is interrupted or begun twice: what is kept, and how it goes on."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from helpers import jsonl, save_lm
from judged import BEGUN, NAME, RUN, result
from runs import run

import ppocli
from ppocli.errors import CheckpointError
from ppocli.storage.run_folder import lock


def test_nothing_is_overwritten_unless_asked_for(place, evaluate):
    few = [RUN, "--limit", "2"]
    assert evaluate(*few, "--name", "x").code == 0
    old = (place / RUN / "eval/x/samples.jsonl").read_bytes()
    done = evaluate(*few, "--name", "x", "--seed", "9", code=5)
    assert done.err == (
        f"Error: {place / RUN / 'eval/x'} holds a finished evaluation already.\n"
        "  where: --name x\n  fix:   --resume goes on with it, --overwrite starts it again; or "
        "choose another --name\n")
    done = evaluate(*few, "--name", "x", "--seed", "9", "--resume", code=5)
    assert "was begun under other settings:\n  seed: 0 -> 9\n" in done.err
    assert (place / RUN / "eval/x/samples.jsonl").read_bytes() == old
    done = evaluate(*few, "--name", "x", "--resume", code=0)
    assert "finished already" in done.err
    assert "KL to the base" in done.out
    assert evaluate(*few, "--name", "x", "--seed", "9", "--overwrite").code == 0
    assert result(place / RUN / "eval/x")["seed"] == 9
    assert (place / RUN / "eval/x/samples.jsonl").read_bytes() != old


def assert_same_result(folder: Path, uninterrupted: Path) -> None:
    assert (folder / "samples.jsonl").read_bytes() == (uninterrupted / "samples.jsonl").read_bytes()
    one, other = result(folder), result(uninterrupted)
    for name in ("figures", "stderr", "quantiles", "win_rate", "seed", "generation", "base"):
        assert one[name] == other[name], name
    assert one["against"]["figures"] == other["against"]["figures"]
    assert {path.name for path in folder.iterdir()} == {"samples.jsonl", "settings.json",
                                                        "eval.json", ".lock"}


def test_a_stopped_evaluation_goes_on_with_the_command_it_names(
        place, evaluate, inject, uninterrupted):
    inject("score.before@6:int")
    done = evaluate(RUN, *BEGUN, code=130)
    folder = place / RUN / "eval/x"
    assert f"21 samples are kept in {folder / 'samples.jsonl'}\n" in done.err
    assert not (folder / "eval.json").exists()
    assert len(jsonl(folder / "samples.jsonl")) == 21
    goes_on = shlex.split(re.search(r"fix:   go on with: ppocli eval (.*)", done.err)[1])
    assert goes_on == [RUN, *BEGUN, "--resume"]
    inject("")
    assert "21 of 32 samples are there" in evaluate(*goes_on, code=0).err
    assert_same_result(folder, uninterrupted)


def test_a_killed_evaluation_goes_on(place, evaluate, uninterrupted):
    run("eval", RUN, *BEGUN, cwd=place, PPOCLI_FAULTS="score.before@5:kill9", code=-9)
    folder = place / RUN / "eval/x"
    assert not (folder / "eval.json").exists()
    assert len(jsonl(folder / "samples.jsonl")) == 16
    with (folder / "samples.jsonl").open("a") as samples:  # half of a chunk, and half of a line
        samples.write('{"model": "against", "number": 0}\n{"model": "aga')
    assert evaluate(RUN, *BEGUN).code == 5
    evaluate(RUN, *BEGUN, "--resume", code=0)
    assert_same_result(folder, uninterrupted)


def test_samples_of_anything_else_are_not_mixed_in(place, evaluate, inject):
    given = [RUN, "--reward", "rewards.py:plain", "--name", "x"]
    inject("score.before@2:term")
    assert evaluate(*given).code == 143
    inject("")
    folder = place / RUN / "eval/x"
    kept = (folder / "samples.jsonl").read_bytes()
    with lock(folder):
        done = evaluate(*given, "--resume")
    assert done.code == 5
    assert "is in use by process" in done.err
    assert "choose another --name" in done.err
    done = evaluate(*given, "--resume", "generation.temperature=0.5", code=5)
    assert done.err.endswith(
        f"Error: {folder} was begun under other settings:\n"
        "  generation.temperature: 1.0 -> 0.5\n"
        f"  where: {folder / 'settings.json'}\n"
        "  fix:   give the settings it was begun with; or start again: --overwrite in place "
        "of --resume; or choose another --name\n")
    with (place / "rewards.py").open("a") as code:
        code.write("# changed\n")
    save_lm(place / "new", seed=9)
    shutil.copy(place / "new/model.safetensors", place / RUN / "model/model.safetensors")
    done = evaluate(*given, "--resume", code=5)
    assert f"\n  code.{place / 'rewards.py'}: " in done.err
    assert "\n  models.policy: " in done.err
    assert (folder / "samples.jsonl").read_bytes() == kept


def test_a_failing_reward_leaves_what_was_scored_or_nothing(place, evaluate):
    (place / "failing.py").write_text(
        "calls = []\n\ndef score(outputs, first=1, **_):\n    calls.append(1)\n"
        "    if len(calls) >= first:\n        raise ValueError('no more')\n"
        "    return [0.0] * len(outputs)\n")
    assert "no more" in evaluate(RUN, "--reward", "failing.py:score", code=7).err
    assert not (place / RUN / "eval").exists()
    done = evaluate(RUN, "--reward", "failing.py:score", "reward.kwargs.first=3", code=7)
    folder = place / RUN / "eval" / NAME
    assert f"5 samples are kept in {folder / 'samples.jsonl'}; to go on: ppocli eval" in done.err
    assert len(jsonl(folder / "samples.jsonl")) == 5
    assert not (folder / "eval.json").exists()


def test_a_damaged_result_is_made_again(place, evaluate):
    given = [RUN, "--limit", "2", "--name", "x"]
    assert evaluate(*given).code == 0
    path = place / RUN / "eval/x/eval.json"
    whole = result(path.parent)
    for damage in ("{}", path.read_text()[:100]):
        path.write_text(damage)
        assert f"{path} is damaged" in evaluate(*given, "--resume", code=0).err
        assert result(path.parent)["figures"] == whole["figures"]


def test_samples_of_another_function_are_not_taken_up(place):
    given = {"limit": 2, "name": "x", "resume": True}
    found, again = (ppocli.evaluate(RUN, reward_fn=lambda outputs: [1.0] * len(outputs), **given)
                    for _ in range(2))
    assert again.report == found.report
    with pytest.raises(CheckpointError, match=r"judges\.reward_fn: .* -> .*"):
        ppocli.evaluate(RUN, reward_fn=lambda outputs: [2.0] * len(outputs), **given)
