"""Rewards that misbehave, end to end: one message, exit code 7, the last good step kept."""

import signal
from pathlib import Path

import pytest
from helpers import jsonl, read_json
from runs import PLANTED, assert_equal_runs, spawn, wait_for, words

from ppocli.cli.output import code_of
from ppocli.cli.runs import report, watch

MODULE = '''\
import time

calls = 0


def score(outputs, **columns):
    global calls
    calls += 1
    good = [float(len(text)) for text in outputs]
    if calls < {late}:
        return good
    {body}
'''

BAD = {
    "raises": ("raise KeyError('nothing there')", "raised KeyError: 'nothing there'"),
    "slow": ("time.sleep(30)", "still running after 0."),
}


def write_reward(folder: Path, body: str, late: int = 1) -> str:
    (folder / "bad.py").write_text(MODULE.format(body=body, late=late))
    return "reward.fn=bad.py:score"


@pytest.mark.parametrize(("kind", "overlap"), [("raises", "never"), ("slow", "always")])
def test_a_bad_reward_stops_the_run_and_the_steps_before_it_are_kept(kind, overlap, command, world):
    """The calls of the first step are good."""
    body, said = BAD[kind]
    more = ["reward.timeout=0.3"] if kind == "slow" else []
    ended = command(*words(write_reward(world, body, late=5), "run_name=r", "eval.at_start=false",
                           "eval.every_steps=null", f"reward.overlap={overlap}", *more), code=7)
    assert said in ended.err, ended.err
    if kind != "slow":
        assert "bad.py" in ended.err
    assert [row["step"] for row in jsonl(world / "runs/r/metrics.jsonl")] == [1]
    assert (world / "runs/r/checkpoints/step-000001/MANIFEST.json").is_file()
    summary = read_json(world / "runs/r/summary.json")
    assert summary["status"] == "failed"
    assert said in summary["error"]


def test_scoring_beside_generation_changes_no_number(command, world, reference):
    """Rewards that draw random numbers, scores that are scaled by all before them."""
    command(*words("run_name=r", "reward.overlap=always", stateful=True), code=0)
    assert_equal_runs(reference, world / "runs/r")


WAITS = """\
import os
import threading


def score(outputs):
    with open("threads", "a") as file:
        print(len(outputs), threading.current_thread() is threading.main_thread(), file=file)
    return [float(len(text)) for text in outputs]


score.waits = True
"""


def test_a_reward_that_says_it_waits_is_called_beside_generation(command, world):
    """Chunks of 5, 5 and 2 in their order and the evaluation's 4, outside the main thread, which
    hears a stop meanwhile."""
    (world / "bad.py").write_text(WAITS)
    command(*words("reward.fn=bad.py:score", "run_name=r", "ppo.num_steps=1",
                           "eval.at_start=false"), code=0)
    assert (world / "threads").read_text().splitlines() == [
        "5 False", "5 False", "2 False", "4 False"]


def test_a_stop_does_not_wait_for_a_reward_that_waits(world):
    (world / "bad.py").write_text("import time\n\n\ndef score(outputs):\n    open('asked', 'w')\n"
                                  "    time.sleep(100)\n")
    run = spawn("train", *words("reward.fn=bad.py:score", "run_name=r", "eval.at_start=false",
                                "reward.overlap=always"), cwd=world)
    wait_for((world / "asked").exists, run)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert "stopped by SIGINT at step 0" in err


def test_a_reward_that_fails_once_a_stop_was_asked_for_is_a_stop(command, world):
    fn = write_reward(world, "import os, signal\n    os.kill(os.getpid(), signal.SIGTERM)\n"
                      "    raise ValueError('its own bug')", late=5)
    command(*words(fn, "run_name=r", "eval.at_start=false", "reward.overlap=never"), code=143)
    assert "its own bug" in (world / "runs/r/ppocli.log").read_text()
    assert read_json(world / "runs/r/summary.json")["status"] == "stopped"


def test_rare_invalid_scores_are_dropped_and_counted(command, world):
    fn = write_reward(world, "if calls % 3 == 2: good[0] = None\n    return good")
    command(*words(fn, "reward.on_invalid=skip", "run_name=r", "ppo.num_steps=1"), code=0)
    rows = jsonl(world / "runs/r/metrics.jsonl")
    assert {row["reward/invalid"] for row in rows[1:]} == {1.0}


def test_equal_rewards_are_warned_of_and_stay_finite(command, world):
    fn = write_reward(world, "return [1.0] * len(good)")
    ended = command(*words(fn, "run_name=r", "ppo.num_steps=1"), code=0)
    assert ended.err.count("All rewards are equal (1) in the first rollout: ") == 1
    assert "rollouts in a row" not in ended.err
    for row in jsonl(world / "runs/r/metrics.jsonl"):
        # of returns that are all the same there is no variance to explain
        assert {name for name, value in row.items() if value is None} <= {"val/var_explained"}, row


TELLING = """\
import os


def score(outputs):
    raise ValueError(f"boom \\x1b[31m {os.environ['HF_TOKEN']} {os.environ['MY_API_KEY']} "
                     "http://me:hunter2@host")
"""


def test_what_a_reward_tells_of_secrets_and_terminals_stays_in_the_process(
        command, world, monkeypatch, capsys):
    """Every file of the run, and whatever shows it, has neither tokens nor raw escapes."""
    secrets = (PLANTED, "not shaped like a token", "hunter2")
    for name, value in zip(("HF_TOKEN", "MY_API_KEY"), secrets, strict=False):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PPOCLI_DEBUG", "1")
    (world / "telling.py").write_text(TELLING)
    ended = command(*words("reward.fn=telling.py:score", "run_name=r"))
    assert ended.code == 7
    assert code_of(lambda: watch("runs/r", interval=0.1, from_start=True, plain=True,
                                 as_json=False)) == 0
    code_of(lambda: report("runs/r", None, None, False, False))
    said = [ended.said, *capsys.readouterr()]
    assert "Traceback" in ended.err
    assert sum(r"boom \x1b[31m *** *** http://me:***@host" in text for text in said) == 2
    left = [path.read_bytes().decode(errors="replace") for path in (world / "runs").rglob("*")
            if path.is_file()]
    assert sum("boom" in text for text in left) >= 3  # log, summary, report.html
    for text in (*said, *left):
        assert not [secret for secret in secrets if secret in text]
    for text in (*said, (world / "runs/r/ppocli.log").read_text()):
        assert "\x1b" not in text
