"""``ppocli env``, and what a run keeps of the machine: facts, and nothing that is private."""

from __future__ import annotations

import getpass
import json
import os
import socket
from pathlib import Path

from helpers import ppocli
from runs import PLANTED

from ppocli.storage.environment import describe, without_credentials


def test_env_is_a_block_to_paste(tmp_path):
    done = ppocli("env", cwd=tmp_path, HF_TOKEN=PLANTED, HF_HOME=f"{Path.home()}/hf",
                  HF_ENDPOINT="https://me:pw@mirror.example/",
                  HF_HUB_ETAG_TIMEOUT="7", ACCELERATE_LOG_LEVEL="loud", HF_HUB_CACHE=PLANTED)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert all(line.startswith("- ") for line in lines)
    facts = dict(line[2:].split(": ", 1) for line in lines)
    assert {"ppocli", "python", "platform", "cpu.model", "memory_gib", "torch.version",
            "torch.gpus", "packages.transformers", "packages.deepspeed", "packages.hydra-core",
            "packages.huggingface-hub", "packages.typer", "packages.rich", "extras"} <= set(facts)
    assert {name: value for name, value in facts.items() if name.startswith("variables.HF_")} == {
        "variables.HF_ENDPOINT": "https://mirror.example/", "variables.HF_HOME": "~/hf",
        "variables.HF_HUB_CACHE": "set", "variables.HF_HUB_ETAG_TIMEOUT": "7",
        "variables.HF_HUB_OFFLINE": "1", "variables.HF_TOKEN": "set"}
    assert facts["variables.ACCELERATE_LOG_LEVEL"] == "set"
    assert facts["variables.XDG_CACHE_HOME"] == os.environ["XDG_CACHE_HOME"]
    assert PLANTED not in done.stdout
    assert os.listdir(tmp_path) == []


def test_env_without_a_working_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no libtorch')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = ppocli("env", "--json", cwd=tmp_path, PYTHONPATH=path, code=0)
    facts = json.loads(done.stdout)
    assert facts["torch"] == {"error": "ImportError no libtorch"}
    assert facts["packages"]["torch"]


def test_a_run_keeps_what_it_ran_on(reference):
    text = (reference / "env.json").read_text()
    facts = json.loads(text)
    expected = describe()
    assert {name: facts[name] for name in ("ppocli", "python", "packages", "nvidia_driver")} == {
        name: expected[name] for name in ("ppocli", "python", "packages", "nvidia_driver")}
    assert facts["torch"]["threads"] == 1
    assert facts["variables"]["HF_HUB_OFFLINE"] == "1"
    assert facts["variables"]["HF_TOKEN"] == "set"
    assert facts["started"].endswith("+00:00")
    for private in (PLANTED, socket.gethostname(), str(Path.home()) + "/"):
        assert private not in text
    assert f'"{getpass.getuser()}"' not in text


def test_addresses_lose_what_is_secret():
    assert without_credentials("https://me:pw@host:8080/path?token=x#y") == "https://host:8080/path"
    assert without_credentials("http://host:notaport") == "not a URL"
