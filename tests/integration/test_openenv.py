"""``env.fn=openenv``: episodes on a real server of OpenEnv."""

import json
import subprocess
import sys
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import jsonl, refused
from runs import free_port, run, wait_for

from ppocli.config.import_guard import installed
from ppocli.config.schema import EnvConfig
from ppocli.environments.env_calls import Called, Calls
from ppocli.environments.registry import resolve
from ppocli.errors import InputError, RewardError

SERVER = Path(__file__).parents[1] / "outside" / "openenv_server.py"


@pytest.mark.skipif(installed("openenv"), reason="openenv is installed")
def test_without_the_package():
    with refused(InputError, "env.fn=openenv needs openenv, which is not installed") as caught:
        resolve(EnvConfig(fn="openenv", kwargs={"url": "http://127.0.0.1:8000"}), None)
    assert caught.value.code == "not-installed"
    assert caught.value.fix == "pip install 'ppocli[openenv]'"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server with 16 sessions, and the file of what its episodes began with."""
    pytest.importorskip("openenv")
    output, url = tmp_path_factory.mktemp("server") / "output", f"http://127.0.0.1:{free_port()}"
    with open(output, "w") as stream:
        process = subprocess.Popen([sys.executable, SERVER, url.rpartition(":")[2], "16"],
                                   stdout=stream, stderr=subprocess.STDOUT)

    def answers():
        assert process.poll() is None, output.read_text()
        with suppress(OSError):
            return urllib.request.urlopen(f"{url}/health").status == 200

    try:
        wait_for(answers)
        yield url, output
    finally:
        process.kill()
        process.wait()


def calls_of(url: str, **kwargs) -> Calls:
    config = EnvConfig(fn="openenv", kwargs={"url": url, "action": "guess", **kwargs})
    return Calls(resolve(config, ["answer"]), config, seed=0)


def begun(calls: Calls, count: int) -> list:
    return calls.answers([Called(None, number, 0, {"prompt": "Guess", "messages": None})
                          for number in range(count)], 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_policy_learns_on_a_server(server, tmp_path):
    url, output = server
    run("train", "+recipe=guess_number", "env.fn=openenv", f"env.kwargs.url={url}",
        "env.kwargs.action=guess", "env.kwargs.observation=text", "ppo.num_steps=2",
        "ppo.num_rollouts=32", "ppo.mini_batch_size=16", "ppo.chunk_size=16", "run_name=served",
        "prompts.eval.repeat=16", "tracking.log_rollouts=true", cwd=tmp_path, code=0)
    first = jsonl(tmp_path / "runs/served/metrics.jsonl")[1]
    samples = [row for row in jsonl(tmp_path / "runs/served/samples.jsonl")
               if row["kind"] == "rollout"]
    assert first["env/errors"] == 0
    assert len(samples) == 64
    for row in samples:  # as the game that ships would have answered
        last = row["turns"][-1]
        assert row["ended"] == ("done" if last["observation"] == " correct\n" else "turns")
        assert last["reward"] == pytest.approx(
            1 - len(row["turns"]) / 10 if row["ended"] == "done" else 0)
    starts = list(map(json.loads, output.read_text().splitlines()))
    assert len(Counter(seed for seed, _ in starts)) > 60
    assert {prompt for _, prompt in starts} == {"Guess a number"}


@pytest.mark.slow
def test_sessions_and_errors(server):
    url, _ = server
    calls = calls_of(url, observation="text")
    for _ in range(2):  # the sessions of dropped episodes are taken again
        assert [one.result for one in begun(calls, 16)] == [" from 1 to 20.\n"] * 16
    [whole] = begun(calls_of(url), 1)
    assert json.loads(whole.result) == {"text": " from 1 to 20.\n", "turns": 0}
    [played] = calls_of(url).answers([Called(whole.environment, 0, 1, {"response": "99"})], 0)
    assert json.loads(played.result.observation) == {"text": " invalid\n", "turns": 1}
    del whole, played

    with refused(RewardError, "CAPACITY_REACHED", "max_concurrent_envs"):
        begun(calls, 17)
    with refused(RewardError, "no field 'words'", "it has text, turns"):
        begun(calls_of(url, observation="words"), 1)
    [episode] = begun(calls, 1)
    with refused(RewardError, "no such move"):
        calls.answers([Called(episode.environment, 0, 1, {"response": "error"})], 0)
    with refused(RewardError, "Failed to connect to ws://127.0.0.1:9/ws"):
        begun(calls_of("http://127.0.0.1:9"), 1)
    with refused(RewardError, "env.kwargs.url is no address of a server"):
        begun(calls_of("localhost"), 1)
