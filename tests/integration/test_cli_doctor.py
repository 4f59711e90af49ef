"""``ppocli doctor`` on machines that are broken for real, one thing at a time; ``ppocli env``."""

import getpass
import json
import os
import socket
from pathlib import Path

import pytest
from helpers import ppocli
from hub_double import HubDouble
from runs import PLANTED

from ppocli.cli import about
from ppocli.runs.environment import describe


def install(folder: Path, name: str, version: str) -> None:
    """A distribution as pip leaves it, metadata only."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_failed_check_is_1_and_says_what_to_do_and_env_goes_without_torch(tmp_path):
    (tmp_path / "runs").write_text("")
    broken = tmp_path / "broken/torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.9: cannot open')\n")
    path = os.pathsep.join([str(broken.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = ppocli("doctor", cwd=tmp_path, PYTHONPATH=path, code=1)
    lines = done.stdout.splitlines()
    position = next(i for i, line in enumerate(lines) if line.split()[:2] == ["fail", "output"])
    assert lines[position].endswith("runs can't be a folder: runs is a file.")
    assert lines[position + 1].strip() == "fix: output_dir=ANOTHER-FOLDER"
    assert "ImportError: libcudart.so.9: cannot open" in done.stdout
    assert "3 of 6 checks failed: torch, deepspeed, output" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    facts = json.loads(ppocli("env", "--json", cwd=tmp_path, PYTHONPATH=path, code=0).stdout)
    assert facts["torch"] == {"error": "ImportError libcudart.so.9: cannot open"}
    assert facts["packages"]["torch"]


def test_an_import_may_crash():
    assert about.ask("import os; os.abort()") == {"error": "exit code -6"}


def test_versions_outside_our_bounds(tmp_path, monkeypatch):
    assert about.packages(tmp_path).verdict == "ok"
    install(tmp_path / "site", "typer", "0.99.0")
    monkeypatch.syspath_prepend(tmp_path / "site")
    check = about.packages(tmp_path)
    assert (check.verdict, check.fix) == ("fail", "pip install 'typer<0.31,>=0.26'")
    assert "typer 0.99.0 (needs <0.31,>=0.26)" in check.text


def test_a_hub_that_answers_and_one_out_of_reach(tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTP_PROXY", "http_proxy",
                 "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with HubDouble() as double:
        monkeypatch.setenv("HF_ENDPOINT", double.url)
        assert about.hub(tmp_path) == about.Check("ok", f"{double.url} can be reached")
    with socket.socket() as bound:  # not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://me:{PLANTED}@127.0.0.1:{bound.getsockname()[1]}")
        check = about.hub(tmp_path)
    assert (check.verdict, "doesn't answer within 2 s" in check.text) == ("warning", True)
    assert PLANTED not in str(check)


@pytest.mark.slow
def test_env_is_a_block_to_paste(tmp_path):
    done = ppocli("env", cwd=tmp_path, HF_TOKEN=PLANTED, HF_HOME=f"{Path.home()}/hf",
                  HF_ENDPOINT="https://me:pw@mirror.example/",
                  HF_HUB_ETAG_TIMEOUT="7", ACCELERATE_LOG_LEVEL="loud", HF_HUB_CACHE=PLANTED,
                  code=0)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines)
    assert {"ppocli", "python", "platform", "cpu.model", "memory_gib", "torch.version",
            "torch.gpus", "packages.transformers", "packages.deepspeed", "packages.hydra-core",
            "packages.huggingface-hub", "packages.typer", "packages.rich"} <= set(facts)
    assert {name: value for name, value in facts.items() if name.startswith("variables.HF_")} == {
        "variables.HF_ENDPOINT": "set", "variables.HF_HOME": "set",
        "variables.HF_HUB_CACHE": "set", "variables.HF_HUB_ETAG_TIMEOUT": "7",
        "variables.HF_HUB_OFFLINE": "1", "variables.HF_TOKEN": "set"}
    assert facts["variables.ACCELERATE_LOG_LEVEL"] == "set"
    assert PLANTED not in done.stdout
    assert os.listdir(tmp_path) == []


def test_a_run_keeps_what_it_ran_on(reference):
    text = (reference / "env.json").read_text()
    facts = json.loads(text)
    expected = describe()
    for name in ("ppocli", "python", "packages", "nvidia_driver"):
        assert facts[name] == expected[name]
    assert facts["torch"]["threads"] == 1
    assert facts["variables"]["HF_HUB_OFFLINE"] == "1"
    assert facts["variables"]["HF_TOKEN"] == "set"
    assert facts["started"].endswith("+00:00")
    for private in (PLANTED, socket.gethostname(), str(Path.home()) + "/"):
        assert private not in text
    assert f'"{getpass.getuser()}"' not in text
