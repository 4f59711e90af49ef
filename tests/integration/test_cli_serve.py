"""``ppocli serve-reward`` and trainings that ask it, each a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from helpers import stable_rows
from runs import spawn, wait_for, words
from warm import Process

from ppocli.cli.output import code_of
from ppocli.cli.serve import serve_reward

QUICK = ("+recipe=quickstart", "ppo.total_episodes=null", "ppo.num_steps=2",
         "ppo.num_rollouts=24", "ppo.chunk_size=10", "ppo.mini_batch_size=12",
         "prompts.eval.limit=8", "prompts.eval.repeat=1", "hardware.device=cpu")

LENGTH = ["reward.fn=length", "reward.kwargs.target=3"]


@contextmanager
def server(*given: str, cwd: Path, **env: str) -> Iterator[tuple[Process, str]]:
    """A server and its address, once it listens."""
    process = spawn("serve-reward", *given, cwd=cwd, **env)
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), process.communicate()
        yield process, address
    finally:
        process.kill()
        process.communicate()


def test_the_quickstart_learns_the_same_from_a_reward_in_another_process(
        command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command(*QUICK, "run_name=here", code=0)
    with server("+recipe=quickstart", "--port", "0", cwd=tmp_path) as (process, address):
        asks = ("reward.fn=http", f"reward.kwargs.url={address}/score")
        command(*QUICK, "~reward", *asks, "run_name=there", code=0)
        with urlopen(f"{address}/health", timeout=20) as health:
            assert json.load(health)["samples"] == 2 * 24 + 2 * 8
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
    assert "64 samples scored in" in err
    assert f"in training: reward.fn=http reward.kwargs.url={address}/score" in err
    rows = stable_rows(tmp_path / "runs/there/metrics.jsonl")
    assert rows == stable_rows(tmp_path / "runs/here/metrics.jsonl")
    assert len(rows) == 3


def test_a_server_that_dies_ends_the_run_which_goes_on_with_another(command, world):
    """The run after it is the same as one that nothing happened to."""
    (world / "slow.py").write_text("import time\n\n\ndef score(outputs):\n    time.sleep(0.3)\n"
                                   "    return [float(len(text)) for text in outputs]\n")
    fn, more = "reward.fn=slow.py:score", ("ppo.num_steps=3", "eval.every_steps=null")
    command(*words(fn, *more, "run_name=plain"), code=0)
    rows = world / "runs/r/metrics.jsonl"
    with server(fn, "--port", "0", cwd=world) as (process, address):
        run = spawn("train", *words(
            "reward.fn=http", f"reward.kwargs.url={address}/score", "reward.kwargs.retries=1",
            *more, "run_name=r"), cwd=world)
        wait_for(lambda: rows.is_file() and rows.read_text().count("\n") >= 2, run)
        process.kill()
        _, err = run.communicate(timeout=120)
    assert run.returncode == 7, err
    assert f"{address}/score could not be reached" in err
    assert "2 times in a row" in err
    assert "Traceback" not in err
    with server(fn, "--port", "0", cwd=world) as (process, address):
        command("resume=runs/r", f"reward.kwargs.url={address}/score", code=0)
    assert stable_rows(rows) == stable_rows(world / "runs/plain/metrics.jsonl")


def test_ctrl_c_while_scoring_answers_what_is_under_way(world):
    (world / "slow.py").write_text(
        "import time\n\n\ndef score(outputs):\n    open('begun', 'w').close()\n    time.sleep(1)\n"
        "    return [2.0 for text in outputs]\n")
    body = json.dumps({"prompts": ["p"], "responses": ["r"], "response_ids": [[1]]})
    with server("reward.fn=slow.py:score", "--port", "0", cwd=world) as (process, address):
        asking = subprocess.Popen(
            [sys.executable, "-c", "import sys, urllib.request as u; print(u.urlopen("
             "sys.argv[1], sys.argv[2].encode(), timeout=20).read().decode())",
             f"{address}/score", body], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "no_proxy": "*"})
        for _ in range(600):
            if (world / "begun").exists():
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        answer, _ = asking.communicate(timeout=30)
        _, err = process.communicate(timeout=30)
    assert json.loads(answer) == {"scores": [2.0]}
    assert process.returncode == 0
    assert "Traceback" not in err


@pytest.mark.parametrize(("given", "options", "code", "said"), [
    ([], {}, 2, "reward.fn: missing"), (["reward.fn=nowhere:score"], {}, 7, "nowhere"),
    (["reward.fn=http", "reward.kwargs.url=http://localhost:1/"], {}, 2, "only pass it on"),
    (LENGTH, {"token_env": "NOT_SET_1"}, 2, "NOT_SET_1"),
    (LENGTH, {"host": "192.0.2.7"}, 2, "can't be listened"),
    (LENGTH, {"host": "no.such.host.invalid"}, 2, "not an address of this machine"),
    (["reward.fn=length", "reward.kwargs.target=x"], {}, 7, "target"),
    (LENGTH, {"tokenizer": "./nowhere"}, 3, "--tokenizer"),
    (["rewards.fn=length"], {}, 2, "unknown key")])
def test_what_is_wrong_is_told_before_anything_listens(given, options, code, said, capsys):
    settings = {"host": "127.0.0.1", "port": 0, "token_env": None, "tokenizer": None,
                "max_body_mib": 1, **options}
    assert code_of(lambda: serve_reward(given, **settings)) == code
    out, err = capsys.readouterr()
    assert said in err
    assert out == ""


def test_an_open_server_is_warned_of_and_a_taken_port_is_told(tmp_path, capsys):
    env = {"MY_REWARD_VALUE": "abc"}
    with server(*LENGTH, "--host", "0.0.0.0", "--port", "0", "--token-env", "MY_REWARD_VALUE",
                cwd=tmp_path, **env) as (process, address):
        port = address.rpartition(":")[2]
        assert code_of(lambda: serve_reward(LENGTH, host="0.0.0.0", port=int(port), token_env=None,
                                            tokenizer=None, max_body_mib=1)) == 2
        assert f"0.0.0.0:{port} can't be listened on: Address already in use" in \
            capsys.readouterr().err
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert "warning: 0.0.0.0 can be reached from other machines: whoever has the token" in err
    assert "reward.kwargs.token_env=MY_REWARD_VALUE" in err
