"""Terminals that go away, tokens in the environment, sweeps with a job that fails."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import environment
from runs import PLANTED, run, spawn, wait_for, words


def shell(line: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a line in which ``ppocli`` is the command."""
    line = f"set -o pipefail; ppocli() {{ {sys.executable} -m ppocli \"$@\"; }}; {line}"
    return subprocess.run(["bash", "-c", line], cwd=cwd, text=True, capture_output=True,
                          env=environment(**env), timeout=200, check=False)


LINES = {
    "a reader that left": "ppocli train {words} | head -1",
    "closed stderr": "ppocli train {words} 2>&-",
    "closed stdout": "ppocli train {words} >&-",
    "full stdout": "ppocli train {words} > /dev/full",
    "full stderr": "ppocli train {words} 2> /dev/full",
}


@pytest.mark.parametrize("case", [
    "a reader that left", *(pytest.param(case, marks=pytest.mark.slow) for case in LINES
                            if case != "a reader that left")])
def test_a_display_that_dies_does_not_end_the_training(case, world):
    """The terminal knows no UTF-8 and no colours either; stderr is closed as well."""
    line = LINES[case].format(words=" ".join(words("run_name=r", "ppo.num_steps=2")))
    done = shell(line, world, LANG="C", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii",
                 NO_COLOR="1")
    assert "Traceback" not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert done.returncode in (0, 141), (done.returncode, done.stderr)
    summary = json.loads((world / "runs/r/summary.json").read_text())
    assert summary["status"] == "finished", done.stderr
    assert (world / "runs/r/model/model.safetensors").is_file()


def test_a_token_in_the_environment_is_in_no_file_and_not_printed(reference, shared_world):
    """The reference run was made with it; everything the run left is read."""
    files = [path for path in shared_world.rglob("*") if path.is_file()]
    assert shared_world / "stdout" in files
    assert reference / "config.yaml" in files
    assert [path for path in files if PLANTED.encode() in path.read_bytes()] == []


@pytest.mark.parametrize("word", [
    f"+hub_token={PLANTED}", f"reward.kwargs.token={PLANTED}", f"run_name={PLANTED}",
    "model.path=${oc.env:HF_TOKEN}", f"model.path=https://user:{PLANTED}@huggingface.co/x"])
def test_a_token_in_a_word_is_refused_unshown(word, command, world, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    ended = command(*words(word), code=2)
    assert PLANTED not in ended.said
    assert not (world / "runs").exists()


def test_a_sweep_with_a_failing_and_an_invalid_job_runs_the_others(world):
    (world / "bad.py").write_text("def score(outputs):\n    raise ValueError('nothing')\n")
    given = words("ppo.num_steps=1", "hydra.sweep.dir=sweep")
    given = [word for word in given if not word.startswith(("reward.fn", "seed"))]
    ended = run("train", "-m", *given, "reward.fn=bad.py:score,rewards.py:plain",
                "ppo.cliprange=0.2,5", cwd=world, code=11)
    jobs = json.loads((world / "sweep/sweep.json").read_text())["jobs"]
    assert [(job["status"], job["exit_code"]) for job in jobs] == [
        ("failed", 7), ("failed", 2), ("finished", 0), ("failed", 2)]
    table = [line.split() for line in ended.out.splitlines()]
    assert table[0][:3] == ["job", "status", "exit"]
    assert [row[1:3] for row in table[1:]] == [["failed", "7"], ["failed", "2"],
                                               ["finished", "0"], ["failed", "2"]]
    assert Path(jobs[2]["folder"], "model/model.safetensors").is_file()
    assert jobs[2]["reward_mean"] is not None


@pytest.mark.slow
def test_a_stopped_sweep_stops_its_job_cleanly_and_goes_on_with_the_same_words(world):
    given = ["train", "-m", *words("ppo.num_steps=3", "hydra.sweep.dir=sweep"), "seed=1,2"]
    process = spawn(*given, cwd=world, PPOCLI_FAULTS="score.before@8:sleep=3")
    wait_for((world / "sweep/0/checkpoints/step-000001").exists, process)
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "stopped by SIGTERM" in err
    assert "Traceback" not in err
    assert json.loads((world / "sweep/0/summary.json").read_text())["status"] == "stopped"
    assert not (world / "sweep/1/model").exists()
    assert "stopped" in out
    run(*given, "resume=auto", cwd=world, code=0)
    assert all((world / f"sweep/{job}/model/config.json").is_file() for job in (0, 1))


@pytest.mark.slow
def test_a_job_that_is_killed_does_not_stop_the_sweep(world):
    given = ["train", "-m", *words("ppo.num_steps=1", "hydra.sweep.dir=sweep"), "seed=1,2"]
    process = spawn(*given, cwd=world, PPOCLI_FAULTS="score.before@3:sleep=5")
    lock = world / "sweep/0/.lock"
    wait_for(lambda: lock.exists() and lock.stat().st_size > 0
             and (world / "sweep/0/metrics.jsonl").exists(), process)
    os.kill(json.loads(lock.read_text())["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 11, err
    assert [line.split()[1:3] for line in out.splitlines()[1:]] == [["failed", "137"],
                                                                   ["finished", "0"]]
