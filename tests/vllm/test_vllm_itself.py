"""Against vLLM itself (``make test-vllm``): what ``vllm_double`` is believed to do like it."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
import torch
from helpers import environment, jsonl, make_lm, make_tokenizer, refused, write_prompts
from runs import free_port, run, spawn, wait_for, words
from sessions import idle_context, rollout_of, session_of, small_config
from vllm_double import LORA, assert_same, disturb, drawn, move_adapter, ours

from ppocli.errors import SamplerError
from ppocli.ppo.ppo_task import PPOTask
from ppocli.sampling.vllm.server import WeightsFolder
from ppocli.training.loop import initial_state

PYTHON = os.environ.get("VLLM_PYTHON")
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
          "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
EAGER = "rollout.server_args=[--enforce-eager]"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800),
              pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no Python with vLLM")]


def make_world(folder: Path, kind: str, **over: Any) -> Path:
    """A folder with a model whose heads have a size that vLLM knows on a CPU, and prompts."""
    sizes = {"n_embd": 64} if kind == "gpt2" else {"hidden_size": 64, "head_dim": 32}
    make_lm(kind, **sizes, **over).save_pretrained(folder / "lm")
    make_tokenizer().save_pretrained(folder / "lm")
    write_prompts(folder / "prompts.jsonl")
    (folder / "rewards.py").write_text(
        "def plain(outputs, **columns):\n"
        "    return [float(text.split().count('good')) for text in outputs]\n")
    return folder


@contextmanager
def server(folder: Path, *more: str, tied: bool = False
           ) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """vLLM as ``ppocli vllm-command`` starts it; ``tied`` without what we say about embeddings."""
    url = f"http://127.0.0.1:{free_port()}"
    line = subprocess.run(
        [sys.executable, "-m", "ppocli", "vllm-command", "model.path=lm", f"rollout.urls=[{url}]",
         "rollout.engine=vllm", EAGER, *more], cwd=folder, env=environment(), capture_output=True,
        text=True, check=True).stdout
    given = shlex.split(line)
    variables = dict(one.split("=", 1) for one in given[:given.index("python")])
    del given[:len(variables) + 1]
    if tied:
        place = given.index("--hf-overrides")
        del given[place:place + 2]
    with (folder / "vllm.log").open("wb") as log, subprocess.Popen(
            [str(PYTHON), *given], stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, **ON_CPU, **variables}) as process:
        try:
            wait_until_there(url, process, folder / "vllm.log")
            yield url, process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_there(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 900
    while True:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline
        try:
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(1)


def config(folder: Path, url: str, **keys: Any) -> Any:
    return small_config(folder, rollout__engine="vllm", rollout__urls=[url], **keys)


@pytest.mark.parametrize(("kind", "tied"), [("gpt2", True), ("llama", True), ("llama", False)])
def test_greedy_samples_and_stop_rules_equal_ours_after_updates(kind, tied, tmp_path):
    make_world(tmp_path, kind, tie_word_embeddings=tied)
    with server(tmp_path) as (url, _), session_of(config(tmp_path, url)) as session:
        for _ in range(3):
            assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
            disturb(session)
        for spec in ({"stop_ids": (7, 9, 11)}, {"stop_ids": (1, 9, 13), "min_new_tokens": 4},
                     {"stop_sequences": ("good", "film")}, {"length_range": (2, 5)},
                     {"repetition_penalty": 1.5}):
            found, wanted = (sample(session, 12, do_sample=False, **spec)
                             for sample in (drawn, ours))
            # logprobs are of what is left to draw from
            assert found.action_ids == wanted.action_ids, spec
            assert found.finished.tolist() == wanted.finished.tolist(), spec
        gap = rollout_of(session).gap
        assert 0 < float(gap.abs().max()) < 1e-4


def test_an_adapter_is_sent_by_itself(tmp_path):
    make_world(tmp_path, "llama", tie_word_embeddings=True)
    words = [f"model.peft.{name}={value}" for name, value in LORA.items()]
    with server(tmp_path, *words) as (url, _), session_of(
            config(tmp_path, url, model__peft=LORA)) as session:
        for version in range(3):
            assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
            assert session.sampler.version.endswith(f"-{version + 1}")
            assert adapters_at(url) == [session.sampler.version]
            move_adapter(session)
        gap = rollout_of(session).gap
        assert 0 < float(gap.abs().max()) < 1e-4
        session.sampler._weights.write(lambda folder: None, "x")
        with refused(SamplerError, "can't read the weights"):
            session.sampler._weights.load_adapter(session.sampler.servers[0])
        assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))


@pytest.mark.parametrize("peft", [{}, LORA])
def test_a_server_on_a_cpu_takes_the_routes_of_sleep(peft, tmp_path, caplog):
    """Of level 1 and 2: it says that it sleeps, and has kept its memory."""
    make_world(tmp_path, "llama")
    words = ["rollout.sleep=true", *(f"model.peft.{name}={value}" for name, value in peft.items())]
    with server(tmp_path, *words) as (url, process), session_of(
            config(tmp_path, url, model__peft=peft, rollout__sleep=True)) as session:
        before = resident(process.pid)
        for _ in range(2):
            found = drawn(session, do_sample=False)
            assert httpx2.get(f"{url}/is_sleeping", trust_env=False).json()["is_sleeping"]
            assert resident(process.pid) > 0.95 * before
            assert_same(found, ours(session, do_sample=False))
            (move_adapter if peft else disturb)(session)
    assert caplog.text.count("vLLM on a CPU says that it sleeps") == 1


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_quantized_policy_learns_from_servers_of_its_base(tmp_path):
    make_world(tmp_path, "llama")
    lora = [f"model.peft.{name}={value}" for name, value in LORA.items()]
    url = f"http://127.0.0.1:{free_port()}"
    run("train", *served(tmp_path, url, "rollout.launch=true", f"rollout.python={PYTHON}", EAGER,
                         "model.quantization=4bit", "ppo.num_steps=12", *lora),
        cwd=tmp_path, code=0, **ON_CPU)
    rows = jsonl(tmp_path / "runs/served/metrics.jsonl")
    assert all(0.001 < row["rollout/logprob_gap_mean"] < 1 for row in rows[1:])
    assert all("rollout/importance_mean" in row for row in rows[1:])
    assert rows[-1]["eval/reward_mean"] - rows[0]["eval/reward_mean"] > 1


def test_episodes_are_played_one_step_ahead_with_an_adapter(tmp_path):
    make_world(tmp_path, "llama")
    keys = {"env__fn": "played:Slow", "env__max_tokens": 40, "generation__max_new_tokens": 5,
            "ppo__num_rollouts": 8, "ppo__num_steps": 3}
    with (server(tmp_path, *(f"model.peft.{name}={value}" for name, value in LORA.items())
                 ) as (url, _),
          session_of(config(tmp_path, url, model__peft=LORA, rollout__ahead=1, **keys)) as session):
        task, gaps = PPOTask(session), []
        state = initial_state(task)
        for step in range(3):
            found = task.collect(replace(state, step=step, episodes=8 * step), idle_context())
            gaps.append(float(found.gap.abs().mean()))
            move_adapter(session)
    assert gaps[0] < 1e-4
    assert min(gaps[1:]) > 0.01


def resident(pid: int) -> int:
    """Bytes of a process and all that it has started."""
    return sum(psutil.Process(one).memory_info().rss for one in (pid, *descendants(pid)))


def adapters_at(url: str) -> list[str]:
    models = httpx2.get(f"{url}/v1/models", trust_env=False).json()["data"]
    return [model["id"] for model in models if model["parent"]]


def test_each_worker_of_a_server_takes_its_part_of_the_weights(tmp_path):
    make_world(tmp_path, "llama", tie_word_embeddings=True)
    with (server(tmp_path, "rollout.server_args=[--enforce-eager,--tensor-parallel-size,'2']"
                 ) as (url, _), session_of(config(tmp_path, url)) as session):
        for _ in range(3):
            assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
            disturb(session)


def test_samples_come_from_the_policys_distribution(tmp_path):
    make_world(tmp_path, "gpt2")
    with (server(tmp_path) as (url, _),
          session_of(config(tmp_path, url, generation__temperature=0.7)) as session):
        prompts = [0] * 400
        firsts = torch.zeros(2, 37)
        for which, sample in enumerate((drawn, ours)):
            for ids in sample(session, len(prompts), max_new_tokens=1).action_ids:
                firsts[which, ids[0]] += 1
        expected = firsts.sum(0) / 2
        chi = ((firsts - expected).square() / expected.clamp(min=1)).sum()
        assert float(chi) < 90  # at most 36 degrees of freedom
        gap = rollout_of(session).gap
        assert float(gap.abs().max()) < 1e-4
        once, again = (drawn(session, 32).action_ids for _ in range(2))
        assert once == again


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_server_with_shared_output_embeddings_is_right_or_found_out(kind, tmp_path):
    make_world(tmp_path, kind, tie_word_embeddings=True)
    with server(tmp_path, tied=True) as (url, _), session_of(config(tmp_path, url)) as session:
        disturb(session)
        said, found = "", None
        try:
            found = drawn(session, do_sample=False)
        except SamplerError as error:
            said = str(error)
        if found is None:
            assert "says other tokens" in said
        else:
            assert_same(found, ours(session, do_sample=False))


def test_a_reload_from_nowhere_ends_the_engine_and_is_not_begun(tmp_path):
    make_world(tmp_path, "gpt2")
    with server(tmp_path) as (url, _), session_of(config(tmp_path, url)) as session:
        weights = WeightsFolder(str(tmp_path))
        weights.write(session.policy.lm.save_pretrained, "x")
        shutil.rmtree(weights.path)
        with refused(SamplerError, "can't read the weights"):
            weights.check_readable(session.sampler.servers[0])
        assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))


def served(folder: Path, url: str, *more: str) -> list[str]:
    return words("rollout.engine=vllm", f"rollout.urls=[{url}]", "run_name=served",
                 "ppo.num_rollouts=64", "ppo.mini_batch_size=32", "ppo.micro_batch_size=32",
                 "ppo.chunk_size=64", "ppo.optimizer.lr=3e-3", *more)


def test_a_policy_learns_as_with_our_loop(tmp_path):
    make_world(tmp_path, "gpt2")
    last: dict[str, list[float]] = {"vllm": [], "decode": []}
    with server(tmp_path) as (url, _):
        for seed in (1, 2, 3):
            for engine, gained in last.items():
                own = [] if engine == "vllm" else ["rollout.engine=decode", "rollout.urls=[]"]
                run("train", *served(tmp_path, url, f"seed={seed}", f"run_name={engine}{seed}",
                                     "ppo.num_steps=12", *own), cwd=tmp_path, code=0)
                rows = jsonl(tmp_path / f"runs/{engine}{seed}/metrics.jsonl")
                gained.append(rows[-1]["eval/reward_mean"] - rows[0]["eval/reward_mean"])
    assert min(last["vllm"]) > 6, last
    assert abs(sum(last["vllm"]) - sum(last["decode"])) / 3 < 0.5, last


def test_a_server_killed_in_a_rollout_and_what_goes_on(tmp_path):
    make_world(tmp_path, "gpt2")
    metrics = tmp_path / "runs/served/metrics.jsonl"
    with server(tmp_path) as (url, process):
        going = spawn("train", *served(tmp_path, url, "ppo.num_steps=400"), cwd=tmp_path)
        wait_for(lambda: metrics.is_file() and len(jsonl(metrics)) > 3, going, seconds=600)
        os.killpg(process.pid, signal.SIGKILL)
        _, err = going.communicate(timeout=600)
    assert going.returncode == 12, err
    assert "could not be reached" in err
    assert "ppocli resume" in err
    done = len(jsonl(metrics))
    with server(tmp_path) as (url, _):
        run("resume", "runs/served", f"rollout.urls=[{url}]", f"ppo.num_steps={done + 2}",
            cwd=tmp_path, code=0)
    assert [row["step"] for row in jsonl(metrics)] == list(range(done + 3))


def test_a_server_launched_beside_a_run(tmp_path):
    make_world(tmp_path, "llama")
    url = f"http://127.0.0.1:{free_port()}"
    run("train", *served(tmp_path, url, "rollout.launch=true", f"rollout.python={PYTHON}", EAGER,
                         "rollout.ahead=1"),
        cwd=tmp_path, code=0, **ON_CPU)
    gaps = [row["rollout/logprob_gap_max"]
            for row in jsonl(tmp_path / "runs/served/metrics.jsonl")[1:]]
    assert gaps[0] < 1e-4 < min(gaps[1:])
    with refused(httpx2.ConnectError):
        httpx2.get(f"{url}/health", trust_env=False)


def descendants(process: int) -> dict[int, str]:
    """Process id -> command line of what a process has started, and of what that has."""
    rows = [row.split(maxsplit=2) for row in subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True,
        check=True).stdout.splitlines()[1:]]
    found, parents = dict[int, str](), {process}
    while parents:
        children = {int(pid): args for pid, parent, args in rows if int(parent) in parents}
        found.update(children)
        parents = set(children)
    return found


def test_a_launched_server_and_its_engine_end_with_a_killed_run(tmp_path):
    make_world(tmp_path, "gpt2")
    metrics, url = tmp_path / "runs/served/metrics.jsonl", f"http://127.0.0.1:{free_port()}"
    going = spawn("train", *served(tmp_path, url, "rollout.launch=true", f"rollout.python={PYTHON}",
                                   EAGER, "ppo.num_steps=400"), cwd=tmp_path, **ON_CPU)
    try:
        wait_for(lambda: metrics.is_file() and len(jsonl(metrics)) > 2, going, seconds=900)
        members = descendants(going.pid)
    finally:
        going.kill()
        going.communicate(timeout=60)
    assert any("EngineCore" in args for args in members.values()), members
    deadline = time.monotonic() + 60
    while alive := [pid for pid in members if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.5)
