"""Commands whose samples come from servers, which the double of vLLM's routes (``vllm_double``)
stands for: training, evaluation, generation, servers that a run starts."""

import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import played
import pytest
import vllm_double
from helpers import jsonl, save_talker
from runs import assert_equal_runs, free_port, run, spawn, wait_for, words
from vllm_double import dying, engine_of, serving

GENERATE = "/inference/v1/generate"


@pytest.mark.slow
def test_a_run_stops_when_no_server_is_left_and_goes_on(world, command):
    keys = words("rollout.engine=vllm", "run_name=served", "ppo.num_steps=3")
    with serving(engine_of(world), dying(30)) as url:
        ended = command(*keys, f"rollout.urls=[{url}]", code=12)
    assert "could not be reached" in ended.err
    assert "goes on by ppocli resume" in ended.err
    assert "saved step" in ended.err
    with serving(engine_of(world)) as url:
        command(*keys, f"rollout.urls=[{url}]", "resume=auto", code=0)
    rows = jsonl(world / "runs/served/metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(0 <= row["rollout/logprob_gap_max"] < 1e-4 for row in rows[1:])


@pytest.mark.slow
def test_generate_takes_servers_when_told(world, app):
    ask = ["generate", "lm", "-p", "the", "-p", "a film", "-n", "3", "generation.max_new_tokens=6",
           "--json"]
    with serving(engine := engine_of(world)) as url:
        served = ["rollout.engine=vllm", f"rollout.urls=[{url}]"]
        mine, theirs = (app(*ask, "generation.do_sample=false", *more, code=0).out
                        for more in ([], served))
        assert theirs == mine
        assert engine.asked[GENERATE] >= 6
        drawn = [app(*ask, f"seed={seed}", f"ppo.chunk_size={batch}", *served, code=0).out
                 for seed, batch in (("3", "64"), ("3", "2"), ("4", "64"))]
        assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.slow
def test_a_rollout_ahead_is_one_step_off_and_resumes_so(world, command):
    keys = words("rollout.engine=vllm", "run_name=ahead", "rollout.ahead=1",
                 "ppo.optimizer.lr=1e-2")
    engine = engine_of(world)
    with serving(engine) as url:
        command(*keys, f"rollout.urls=[{url}]", "ppo.num_steps=2", code=0)
        asked = engine.asked[GENERATE]
        command(*keys, f"rollout.urls=[{url}]", "ppo.num_steps=4", "resume=auto", code=0)
    steps = jsonl(world / "runs/ahead/metrics.jsonl")[1:]
    gaps = [row["rollout/logprob_gap_mean"] for row in steps]
    # corrected for without being asked
    assert all("rollout/importance_mean" in row for row in steps)
    fresh = [gap < 1e-5 for gap in gaps]
    # what a start begins with is sampled with the weights of the moment
    assert fresh == [True, False, True, False], gaps
    assert asked == 2 * 12 + 4 * 2 + 3  # steps, evaluations of 4 samples, a probe of each version


@pytest.mark.slow
def test_episodes_ahead_go_on_alike_wherever_in_a_step_the_run_was_killed(world, command):
    """From the checkpoint of step 2, whose episodes ahead are played again with its own weights: a
    run that was never killed has played them with those of step 1."""
    shutil.copy(played.__file__, world / "env.py")
    with serving(engine_of(world)) as url:
        for update in 9, 12:  # the first and the last one of step 3
            keys = words("rollout.engine=vllm", f"rollout.urls=[{url}]", "rollout.ahead=1",
                         f"run_name=killed{update}", "env.fn=env.py:Words", "env.max_tokens=40",
                         "env.max_turns=3", "generation.max_new_tokens=5", "ppo.optimizer.lr=1e-2")
            run("train", *keys, cwd=world, PPOCLI_FAULTS=f"optimize.minibatch@{update}:kill9",
                code=-9)
            command(*keys, "resume=auto", code=0)
    assert_equal_runs(world / "runs/killed9", world / "runs/killed12")
    gaps = [row["rollout/logprob_gap_mean"]
            for row in jsonl(world / "runs/killed9/metrics.jsonl")[1:]]
    assert [gap < 1e-5 for gap in gaps] == [True, False, True, False], gaps


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_ask_for_their_own_rows_and_one_updates_the_servers(ahead, world):
    engine = engine_of(world)
    with serving(engine) as url:
        run("train", *words("rollout.engine=vllm", f"rollout.urls=[{url}]", "run_name=ranks",
                            f"rollout.ahead={ahead}", "hardware.num_processes=2"), cwd=world,
            code=0)
    rows = jsonl(world / "runs/ranks/metrics.jsonl")[1:]
    assert [row["rollout/logprob_gap_max"] < 1e-4 for row in rows] == [
        True, *[not ahead] * (len(rows) - 1)]
    assert engine.asked["/update_weight_version"] == 1 + len(rows)


def launched(world: Path) -> list[str]:
    """Words of a run that starts a server, which is the double in vLLM's place."""
    python = world / "python"
    python.write_text(f"""#!/bin/sh
shift 2
PYTHONPATH={Path(vllm_double.__file__).parent} exec {sys.executable} {vllm_double.__file__} "$@"
""")
    python.chmod(0o755)
    return words("rollout.engine=vllm", f"rollout.urls=[http://127.0.0.1:{free_port()}]",
                 "rollout.launch=true", f"rollout.python={python}", "run_name=launched",
                 "eval.at_start=false")


def port_of(keys: list[str]) -> int:
    return int(next(key for key in keys if "urls" in key).rpartition(":")[2].rstrip("]"))


def nobody_listens(keys: list[str]) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port_of(keys))) != 0


@pytest.mark.slow
def test_a_launched_server_ends_with_the_run_however_that_ends(world):
    keys = launched(world)
    run("train", *keys, cwd=world, code=0)
    assert nobody_listens(keys)
    assert (world / "runs/launched/vllm-0.log").is_file()
    process = spawn("train", *keys, "resume=auto", "ppo.num_steps=500", cwd=world)
    wait_for(lambda: len(jsonl(world / "runs/launched/metrics.jsonl")) > 6, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: nobody_listens(keys), seconds=30)


def test_a_server_that_ends_is_told(world, command):
    keys = launched(world)
    (world / "python").write_text("#!/bin/sh\necho no room\nexit 3\n")
    told = command(*keys, code=12).err
    assert "has ended" in told
    assert "vllm-0.log" in told
    assert (world / "runs/launched/vllm-0.log").read_text().endswith("no room\n")


def test_an_address_that_somebody_answers_at_is_not_taken(world, command, tmp_path):
    keys = launched(world)
    with serving(engine_of(tmp_path / "other"), port=port_of(keys)):
        assert "answers at" in command(*keys, code=12).err
    assert not (world / "runs/launched/vllm-0.log").exists()


def test_a_recipe_can_not_name_a_program(world, command):
    (world / "recipes").mkdir()
    (world / "recipes/theirs.yaml").write_text(
        "# @package _global_\nrollout:\n  engine: vllm\n  urls: ['http://127.0.0.1:1']\n"
        "  launch: true\n  python: ./python\n")
    told = command(*words("+recipe=theirs", "run_name=named"), code=2).err
    assert "type it: rollout.python=./python" in told
    told = command(*words("+recipe=theirs", "run_name=named", "rollout.python=./python"),
                   code=12).err
    assert "has ended" in told


def test_the_command_that_starts_a_server(world, app):
    save_talker(world / "lm", max_position_embeddings=48)
    ended = app(
        "vllm-command", "model.path=lm", "rollout.engine=vllm", "prompts.max_length=10",
        "generation.max_new_tokens=7", "rollout.urls=[http://10.0.0.2:81,http://h]", code=0)
    first, second = ended.out.splitlines()
    assert first.startswith("VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server")
    assert "--host 10.0.0.2 --port 81 --dtype float32 --max-model-len 17" in first
    assert f"--model {world / 'lm'}" in first
    assert "--host h --port 8000" in second
    assert json.dumps({"tie_word_embeddings": False}) in first
    bounded = app("vllm-command", "model.path=lm", "rollout.engine=vllm", "prompts.max_length=45",
                  "rollout.urls=[http://h]", code=0)
    assert "--max-model-len 48 " in bounded.out  # no more than the model has positions
