"""Being told to stop: where it happens, what is said, and that the run goes on exactly. Terminals
that go away, tokens in the environment, sweeps with a job that fails."""


import pytest
from helpers import read_json
from runs import PLANTED, assert_equal_runs, resumed, run, shell, words

CODES = {"term": 143, "int": 130}
PLACES = {"first evaluation": "rollout.token@3", "rollout": "rollout.token@70",
          "after scoring": "score.after@8", "optimize": "optimize.minibatch@6",
          "save": "save.open@20", "after the save": "save.after_rename@2"}
QUICK = {("first evaluation", "int"), ("after scoring", "term")}


@pytest.mark.parametrize(("place", "kind"), [
    pytest.param(place, kind, marks=() if (place, kind) in QUICK else pytest.mark.slow)
    for place in PLACES for kind in CODES])
def test_a_stop_anywhere_saves_says_how_to_go_on_and_goes_on_exactly(
        place, kind, command, inject, reference, world):
    inject(f"{PLACES[place]}:{kind}")
    ended = command(*words("run_name=r", stateful=True), code=CODES[kind])
    folder = world / "runs/r"
    step = read_json(folder / "summary.json")["steps"]
    assert f"stopped by SIG{kind.upper()} at step {step} of 4" in ended.err
    assert f"ppocli resume {folder}" in ended.err
    assert read_json(folder / "summary.json")["status"] == "stopped"
    assert not (folder / "model").exists()
    inject("")
    resumed(folder)
    assert_equal_runs(reference, folder)


@pytest.mark.slow
def test_a_display_that_dies_does_not_end_the_training(world):
    """The terminal knows no UTF-8 and no colours either."""
    line = f"ppocli train {' '.join(words('run_name=r', 'ppo.num_steps=2'))} | head -1"
    done = shell(line, world, LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii",
                 NO_COLOR="1")
    assert "Traceback" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert done.returncode in (0, 141), (done.returncode, done.stderr)
    assert read_json(world / "runs/r/summary.json")["status"] == "finished", done.stderr
    assert (world / "runs/r/model/model.safetensors").is_file()


@pytest.mark.parametrize("word", [
    f"reward.kwargs.token={PLANTED}", "model.path=${oc.env:HF_TOKEN}",
    f"model.path=https://user:{PLANTED}@huggingface.co/x"])
def test_a_token_in_a_word_is_refused_unshown(word, command, world, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    assert PLANTED not in command(*words(word), code=2).said
    assert not (world / "runs").exists()


@pytest.mark.slow
def test_a_sweep_with_an_invalid_job_runs_the_others(world):
    given = words("ppo.num_steps=1", "hydra.sweep.dir=sweep")
    given = [word for word in given if not word.startswith(("reward.fn", "seed"))]
    ended = run("train", "-m", *given, "reward.fn=gone.py:score,rewards.py:plain", cwd=world,
                code=11)
    assert [line.split()[:2] for line in ended.out.splitlines()[1:]] == [
        ["0", "planned"], ["1", "finished"]]
    assert "1 of 2 jobs failed" in ended.err
    assert "gone.py" in ended.err
    assert (world / "sweep/1/model/model.safetensors").is_file()
