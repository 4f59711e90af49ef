"""``ppocli doctor`` on machines that are broken for real, one thing at a time; ``ppocli env``."""

import getpass
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers import environment, ppocli
from hub_double import HubDouble
from runs import PLANTED

from ppocli import doctor, doctor_probes
from ppocli.doctor_probes import Finding, Surroundings, ask, run_checks
from ppocli.storage.environment import describe, without_credentials


@pytest.fixture(scope="session")
def torch_facts() -> dict:
    """What the real torch of this machine says."""
    facts = ask("torch", seconds=120)
    assert "error" not in facts, facts
    return facts


@pytest.fixture
def around(tmp_path: Path, torch_facts: dict) -> Surroundings:
    """An empty machine under ``tmp_path/root`` with the real torch."""
    surroundings = Surroundings(tmp_path / "runs", tmp_path / "root")
    vars(surroundings)["torch"] = torch_facts  # asked once: it takes seconds
    return surroundings


def plant(around: Surroundings, name: str, text: str) -> None:
    """A file of the machine's /proc, /sys or /dev."""
    path = around.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def install(folder: Path, name: str, version: str) -> None:
    """A distribution as pip leaves it, metadata only."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


# The doctor itself --------------------------------------------------------------------------------

def test_a_check_that_hangs_or_breaks_keeps_no_other_back(around, monkeypatch):
    never = threading.Event()

    def hang(_: Surroundings) -> Finding:
        never.wait()
        raise AssertionError

    def broken(_: Surroundings) -> Finding:
        raise OSError("bad machine")

    def good(_: Surroundings) -> Finding:
        return Finding("ok", "fine")

    begun: list[str] = []
    monkeypatch.setattr(doctor_probes, "SECONDS", {"hang": 0.2})
    results = list(run_checks((hang, broken, good), around, begin=begun.append))
    never.set()
    assert begun == ["hang", "broken", "good"]
    assert [name for name, _, _ in results] == begun
    assert [found.verdict for _, found, _ in results] == ["fail", "fail", "ok"]
    assert results[0][1].text == "no answer within 0.2 s"
    assert results[1][1].text == "the check broke: OSError: bad machine"


def test_the_whole_doctor_on_this_machine(tmp_path):
    done = ppocli("doctor", "--json", "new/runs", cwd=tmp_path, HF_TOKEN=PLANTED,
                  XDG_CACHE_HOME=str(tmp_path / "cache"))
    rows = {row.pop("name"): row for row in json.loads(done.stdout)}
    assert list(rows) == [check.__name__ for check in doctor.CHECKS]
    assert [name for name, row in rows.items() if row["verdict"] == "fail"] == [], rows
    assert done.returncode == 0
    assert all(row["fix"] for row in rows.values() if row["verdict"] != "ok")
    assert rows["token"]["text"] == "set (HF_TOKEN), not tried"
    assert rows["hub"]["text"] == "HF_HUB_OFFLINE=1: nothing is downloaded"
    assert rows["gloo"]["text"] == "two processes added up a number over gloo"
    assert PLANTED not in done.stdout + done.stderr
    assert "ok       python" in done.stderr  # a line for each check as it is done
    assert os.listdir(tmp_path) == []


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
    assert lines[position + 1].strip() == "fix: choose another folder: output_dir=FOLDER"
    assert "torch can't be imported: ImportError: libcudart.so.9: cannot open" in done.stdout
    assert "checks failed: output, torch, devices, bf16, " in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    facts = json.loads(ppocli("env", "--json", cwd=tmp_path, PYTHONPATH=path, code=0).stdout)
    assert facts["torch"] == {"error": "ImportError libcudart.so.9: cannot open"}
    assert facts["packages"]["torch"]


# Probes -------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("code", "said"), [
    ("import os\nos.abort()", "the process was ended by SIGABRT"),
    ("import sys\nsys.exit(3)", "exit code 3"),
    ("import threading\nthreading.Event().wait()", "no answer within 2 s"),
])
def test_an_import_may_crash_or_hang(code, said, tmp_path, monkeypatch):
    (tmp_path / "wild.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert ask("import", "wild", seconds=2) == {"error": said}


# Machine ------------------------------------------------------------------------------------------

def test_memory_is_what_is_left_of_the_tightest_group(around):
    plant(around, "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    assert doctor.memory(around) == Finding("ok", "8.0 GiB free")
    for name, size in (("max", 2 * 2**30), ("current", 2**30), ("stat", "anon 1")):
        plant(around, f"sys/fs/cgroup/memory.{name}", f"{size}\n")
    found = doctor.memory(around)
    assert (found.verdict, found.text) == ("warning", "1.0 GiB free")
    plant(around, "sys/fs/cgroup/memory.current", f"{2 * 2**30 - 1000}\n")
    assert doctor.memory(around).verdict == "fail"


def test_threads_beyond_the_cores(around, torch_facts, monkeypatch):
    assert doctor.threads(around).verdict == "ok"
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert "OMP_NUM_THREADS='many'" in doctor.threads(around).text
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    plant(around, "sys/fs/cgroup/cpu.max", "100000 100000")
    vars(around)["torch"] = {**torch_facts, "threads": 8}
    found = doctor.threads(around)
    assert found.verdict == "warning"
    assert found.text.startswith("8 threads on 1 usable core: ")
    assert "hardware.num_threads=1" in (found.fix or "")


# torch and devices --------------------------------------------------------------------------------

def test_torch_and_the_driver(around, torch_facts, monkeypatch):
    assert doctor.torch(around).verdict == "ok"
    plant(around, "proc/driver/nvidia/version",
          "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 2024\n")
    cpu = {**torch_facts, "cuda": None, "hip": None, "available": False}
    vars(around)["torch"] = cpu
    found = doctor.torch(around)
    assert found.verdict == "warning"
    assert "NVIDIA driver 535.183.01: this build of torch can't use the GPU" in found.text
    vars(around)["torch"] = {**cpu, "cuda": "13.0", "reason": "driver is too old"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = doctor.torch(around)
    assert (found.verdict, "no usable GPU: driver is too old" in found.text) == ("fail", True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.torch(around).verdict == "warning"
    vars(around)["torch"] = {**cpu, "cuda": "13.0", "available": True}
    assert doctor.torch(around).verdict == "ok"


def test_devices_that_compute_wrongly(around, torch_facts):
    assert doctor.devices(around).text.endswith("products are right")
    cpu = torch_facts["devices"][0]
    for wrong, said in (({"product_error": 0.5}, "wrong by 0.5"),
                        ({"product_error": float("nan")}, "wrong by nan"),
                        ({"error": "CUDA error: out of memory"}, "out of memory")):
        vars(around)["torch"] = {"devices": [cpu, {
            "device": "cuda:0", "name": "X", "free_gib": 1.0, "total_gib": 2.0, "bf16": False,
            **wrong}]}
        found = doctor.devices(around)
        assert (found.verdict, said in found.text) == ("fail", True)
        assert doctor.bf16(around).verdict == "warning"
    for gain, said in ((2.0, "2.0 times as fast as in fp32"), (0.2, "5.0 times as fast in fp32: ")):
        vars(around)["torch"] = {"devices": [{**cpu, "bf16_gain": gain}]}
        assert said in doctor.bf16(around).text


def test_a_network_that_keeps_ranks_apart(around, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchif0")
    found = doctor.gloo(around)
    assert (found.verdict, "nosuchif0" in found.text) == ("fail", True), found
    assert "GLOO_SOCKET_IFNAME" in (found.fix or "")


# Libraries ----------------------------------------------------------------------------------------

def test_versions_outside_our_bounds(around, tmp_path, monkeypatch):
    assert doctor.packages(around).verdict == "ok"
    install(tmp_path / "site", "typer", "0.99.0")
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = doctor.packages(around)
    assert (found.verdict, found.fix) == ("fail", "pip install 'typer<0.31,>=0.26'")
    assert "typer 0.99.0 (wanted: <0.31,>=0.26)" in found.text
    assert doctor.transformers(around).verdict == "ok"
    install(tmp_path / "vulnerable", "transformers", "5.2.0")
    monkeypatch.syspath_prepend(tmp_path / "vulnerable")
    found = doctor.transformers(around)
    assert (found.verdict, "CVE-2026-4372" in found.text) == ("fail", True)


@pytest.mark.parametrize(("plugins", "verdict", "said"), [
    ({}, "ok", "hydra-core 1.3.8, omegaconf 2.3.1"),
    ({"hydra-optuna-sweeper": "1.3.0"}, "warning", "storage in a database fails"),
    ({"hydra-optuna-sweeper": "1.1.2"}, "warning", "goes back to it"),
    ({"hydra-optuna-sweeper": "1.4.0rc3"}, "warning", "wants hydra-core 1.4"),
    ({"hydra-optuna-sweeper": "1.4.0rc3", "hydra-core": "1.4.0rc3", "omegaconf": "2.4.1rc1"},
     "ok", "(a pre-release)"),
    ({"omegaconf": "2.4.0"}, "warning", "made for omegaconf below 2.4"),
    ({"hydra-joblib-launcher": "1.2.0"}, "ok", "hydra-joblib-launcher 1.2.0"),
])
def test_hydra_and_its_plugins(plugins, verdict, said, around, tmp_path, monkeypatch):
    for name, version in {"hydra-core": "1.3.8", "omegaconf": "2.3.1", **plugins}.items():
        install(tmp_path / "site", name, version)
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = doctor.hydra(around)
    assert (found.verdict, said in found.text) == (verdict, True), found
    assert (found.fix is None) == (verdict == "ok")


def test_settings_of_accelerate(around, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    assert doctor.accelerate(around).verdict == "ok"
    (tmp_path / "hf/accelerate").mkdir(parents=True)
    (tmp_path / "hf/accelerate/default_config.yaml").write_text("num_processes: 2\n")
    found = doctor.accelerate(around)
    assert (found.verdict, "hf/accelerate/default_config.yaml" in found.text) == ("warning", True)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "rank of a launcher" in doctor.accelerate(around).text
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert "ACCELERATE_MIXED_PRECISION" in doctor.accelerate(around).text


# Folders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "disk", "output"), [
    ("size=300k", "verdict='fail'", "verdict='ok'"),
    ("size=300k,ro", "verdict='fail'", "Read-only disk"),
])
def test_small_and_read_only_disks(options, disk, output, tmp_path):
    code = ("from pathlib import Path; from ppocli import doctor as d; "
            "from ppocli.doctor_probes import Surroundings as S; s = S(Path('disk/runs')); "
            "print(d.disk(s)); print(d.output(s))")
    script = f'mkdir disk && mount -t tmpfs -o {options} none disk && {sys.executable} -c "{code}"'
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], cwd=tmp_path, text=True,
                          capture_output=True, timeout=60, check=False, env=environment())
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this machine gives no name spaces to users")
    found = done.stdout.splitlines()
    assert disk in found[0]
    assert output in found[1]


# The Hub ------------------------------------------------------------------------------------------

@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubDouble]:
    """A small Hub of this machine, which the environment names."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTP_PROXY", "http_proxy",
                 "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with HubDouble() as double:
        monkeypatch.setenv("HF_ENDPOINT", double.url)
        yield double


def test_a_hub_that_answers(around, hub, tmp_path, monkeypatch):
    assert doctor.hub(around) == Finding("ok", f"{hub.url} can be reached")
    assert doctor.token(around).text.startswith("none")
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    assert doctor.token(around) == Finding("ok", "set (HF_TOKEN), role write")
    hub.fail("GET /api/whoami-v2", 401, message="Invalid credentials in Authorization header")
    found = doctor.token(around)
    assert (found.verdict, found.text) == ("warning", "set (HF_TOKEN), but the Hub refuses it")
    # one of hf auth login
    monkeypatch.delenv("HF_TOKEN")
    hub.failures.clear()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/token").write_text(PLANTED)
    hub.fail("GET /api/whoami-v2", 404, message=PLANTED)
    found = doctor.token(around)
    assert found.verdict == "warning"
    assert found.text.startswith("set (hf auth login), but the Hub didn't say what it may do: ")
    assert PLANTED not in str(found)


def test_a_hub_out_of_reach_and_an_address_that_is_none(around, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with closing(socket.socket()) as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://me:{PLANTED}@127.0.0.1:{taken.getsockname()[1]}")
        found = doctor.hub(around)
    assert (found.verdict, "doesn't answer within 2 s" in found.text) == ("warning", True)
    assert PLANTED not in str(found)
    monkeypatch.setenv("HF_ENDPOINT", "huggingface.co")
    assert doctor.hub(around).verdict == "fail"


def test_env_is_a_block_to_paste(tmp_path):
    done = ppocli("env", cwd=tmp_path, HF_TOKEN=PLANTED, HF_HOME=f"{Path.home()}/hf",
                  HF_ENDPOINT="https://me:pw@mirror.example/",
                  HF_HUB_ETAG_TIMEOUT="7", ACCELERATE_LOG_LEVEL="loud", HF_HUB_CACHE=PLANTED,
                  code=0)
    assert done.stderr == ""
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


def test_addresses_lose_what_is_secret():
    assert without_credentials("https://me:pw@host:8080/path?token=x#y") == "https://host:8080/path"
    assert without_credentials("http://host:notaport") == "not a URL"
