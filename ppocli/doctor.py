"""Checks of a machine and an installation, each with a verdict and a way out. They run before
anything else works, so none of them needs torch in this process."""

import os
import platform
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ppocli.config.hub import hub_reachable, offline_variable
from ppocli.doctor_probes import TOLERANCE, Check, Finding, Surroundings, ask
from ppocli.errors import DiskError
from ppocli.parallel.host_memory import host_room
from ppocli.storage import environment, run_folder
from ppocli.storage.atomic import free_bytes
from ppocli.text import counted, format_bytes

HYDRA_PLUGINS = ("hydra-optuna-sweeper", "hydra-joblib-launcher", "hydra-submitit-launcher",
                 "hydra-ray-launcher", "hydra-ax-sweeper", "hydra-nevergrad-sweeper")
MEMORY_FAIL, MEMORY_LOW = 0.5, 2.0
"""GiB; torch and transformers alone take 0.4"""
SHARED_MEMORY_LOW = 256 * 2**20
"""bytes; a container gets 64 MiB unless told otherwise, which NCCL and data loaders exceed"""
DISK_FAIL, DISK_LOW = 200 * 10**6, 5 * 10**9
"""bytes; a checkpoint takes three times the weights"""
_INSTALL_TORCH = "choose the build at https://pytorch.org/get-started/locally"
_NO_TORCH = Finding("fail", "unknown: torch can't be imported", "see the check torch")


# What is installed --------------------------------------------------------------------------------
def python(around: Surroundings) -> Finding:
    """The interpreter's version against the one that ppocli was made for."""
    here = platform.python_version()
    try:
        wanted = metadata.metadata("ppocli").json.get("requires_python")
    except metadata.PackageNotFoundError:
        return Finding("warning", f"{here}; ppocli isn't installed as a package, so nothing says "
                       "which versions it takes", "pip install ppocli")
    if not SpecifierSet(str(wanted)).contains(here, prereleases=True):
        return Finding("fail", f"{here} is outside {wanted}",
                       "make a virtual environment with another Python")
    return Finding("ok", here)


def _version(name: str) -> Version | None:
    with suppress(InvalidVersion):
        return Version(environment.installed_version(name) or "")
    return None


def packages(around: Surroundings) -> Finding:
    """Every declared dependency is there, in a version within our bounds."""
    try:
        declared = [Requirement(text) for text in metadata.requires("ppocli") or []]
    except metadata.PackageNotFoundError:
        return Finding("warning", "ppocli isn't installed as a package: versions can't be compared",
                       "pip install ppocli, or pip install -e . in a checkout")
    missing: list[tuple[Requirement, str]] = []
    optional: list[tuple[Requirement, str]] = []  # asked for by extras
    count = 0
    for requirement in declared:
        extra = "extra" in str(requirement.marker or "")
        if requirement.marker and not extra and not requirement.marker.evaluate():
            continue
        found = _version(requirement.name)
        count += not extra
        if not (extra if found is None else requirement.specifier.contains(found, True)):
            (optional if extra else missing).append((requirement, (
                f"{requirement.name} {found or 'is missing'} (wanted: {requirement.specifier})")))
    if missing or optional:
        return Finding("fail" if missing else "warning", ", ".join(
            text for _, text in missing + optional), "pip install " + " ".join(
            f"'{each.name}{each.specifier}'" for each, _ in missing or optional))
    return Finding("ok", f"{count} dependencies within their bounds")


def transformers(around: Surroundings) -> Finding:
    """Versions of transformers that run code from a model's files without being asked to."""
    found = _version("transformers")
    if found is not None and found >= Version("5.5.0"):
        return Finding("ok", str(found))
    return Finding("fail", "not installed" if found is None else f"{found} can be made to run code "
                   "by a model's files, also with trust_remote_code=false (CVE-2026-4372, "
                   "CVE-2026-5241)", "pip install 'transformers>=5.5.0,<6'")


def hydra(around: Surroundings) -> Finding:
    """Hydra, OmegaConf and Hydra's plugins: pairs that are known not to work together."""
    core, omegaconf = _version("hydra-core"), _version("omegaconf")
    if core is None or omegaconf is None:
        return Finding("fail", "hydra-core or omegaconf isn't installed",
                       "pip install 'hydra-core>=1.3.8,<1.5'")
    plugins = {name: found for name in HYDRA_PLUGINS if (found := _version(name)) is not None}
    text = ", ".join([f"hydra-core {core}", f"omegaconf {omegaconf}",
                      *(f"{name} {found}" for name, found in plugins.items())])
    old, newer = core < Version("1.4.0rc0"), "pip install 'hydra-optuna-sweeper>=1.4.0rc3,<1.5'"
    sweeper = plugins.get("hydra-optuna-sweeper")
    problems = [(old and omegaconf >= Version("2.4"), "this Hydra was made for omegaconf below 2.4",
                 "pip install 'omegaconf>=2.3,<2.4'")]
    if sweeper is not None:
        problems += [
            (sweeper < Version("1.3"), "this sweeper is years older than the others; pip goes back "
             "to it when another package asks for a newer optuna", newer),
            (sweeper < Version("1.4.0rc0"), "this sweeper pins optuna below 3, whose storage in a "
             "database fails with today's SQLAlchemy; sweeps in memory work",
             f"leave hydra.sweeper.storage unset, or {newer}"),
            (old, "this sweeper wants hydra-core 1.4", "pip install 'hydra-core>=1.4.0rc3,<1.5'")]
    for applies, problem, fix in problems:
        if applies:
            return Finding("warning", f"{text}: {problem}", fix)
    return Finding("ok", text + (" (a pre-release)" if core.is_prerelease else ""))


def accelerate(around: Surroundings) -> Finding:
    """Settings of accelerate that a run would take over without a word: a default configuration
    file (``accelerate launch`` reads it), and variables (every process does)."""
    file = environment.hub_home() / "accelerate/default_config.yaml"
    set_here = sorted(name for name in os.environ if name.startswith("ACCELERATE_"))
    ranks = os.environ.get("WORLD_SIZE", "1")
    if set_here:
        return Finding("warning", f"{', '.join(set_here)} change what accelerate does",
                       "unset them, unless a launcher set them for this process")
    if ranks != "1":
        return Finding("warning", f"WORLD_SIZE is set to {ranks[:20]!a}: this shell looks like a "
                       "rank of a launcher", "unset WORLD_SIZE RANK LOCAL_RANK")
    if file.is_file():
        return Finding("warning", "`accelerate launch` takes settings from "
                       f"{environment.home_shortened(str(file))}",
                       "give it --config_file, or move that file away")
    return Finding("ok", "no default configuration file, no variables")


def deepspeed(around: Surroundings) -> Finding:
    """Whether DeepSpeed can be imported: transformers does so when it saves a model."""
    if (found := environment.installed_version("deepspeed")) is None:
        return Finding("warning", "not installed", "pip install 'deepspeed>=0.17,<1'")
    answer = ask("import", "deepspeed", seconds=60)
    if "error" in answer:
        return Finding("fail", f"{found} can't be imported: {answer['error']}",
                       "pip install --force-reinstall deepspeed, after torch")
    return Finding("ok", found)


# The machine --------------------------------------------------------------------------------------
def memory(around: Surroundings) -> Finding:
    """What may still be taken of the machine's memory, and of the control group's."""
    if (room := host_room(around.root)) is None:
        return Finding("ok", "the system doesn't tell")
    free = room / 2**30
    text = f"{free:.1f} GiB free"
    if free < MEMORY_FAIL:
        return Finding("fail", text, "end other programs, or give the container more memory")
    if free < MEMORY_LOW:
        return Finding("warning", text, "enough for tiny models only")
    return Finding("ok", text)


def shm(around: Surroundings) -> Finding:
    """The size of /dev/shm, over which processes of one machine talk."""
    try:
        found = os.statvfs(around.root / "dev/shm")
    except OSError:
        return Finding("warning", "there is no /dev/shm", "runs with several processes need it: "
                       "docker run --ipc=host")
    size = found.f_blocks * found.f_frsize
    text = f"/dev/shm has {size / 2**20:.0f} MiB"
    if size < SHARED_MEMORY_LOW:
        return Finding("warning", text, "for runs with several processes: docker run "
                       "--shm-size=1g, or --ipc=host")
    return Finding("ok", text)


def threads(around: Surroundings) -> Finding:
    """Threads that torch computes with against cores that it may use."""
    cores = environment.usable_cores(around.root)
    given = os.environ.get("OMP_NUM_THREADS")
    fix = f"export OMP_NUM_THREADS={cores}, or hardware.num_threads={cores}"
    if given and not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", given):
        return Finding("warning", f"OMP_NUM_THREADS={given[:40]!a} is no number of threads", fix)
    count = int(around.torch.get("threads") or (given or str(cores)).split(",")[0])
    text = f"{counted(count, 'thread')} on {counted(cores, 'usable core')}"
    if count > cores:
        return Finding("warning", f"{text}: they wait for each other", fix)
    return Finding("ok", text)


# Where runs and downloads go ----------------------------------------------------------------------
def disk(around: Surroundings) -> Finding:
    """Free space where runs and downloads go."""
    hub_cache = Path(os.environ.get("HF_HUB_CACHE") or environment.hub_home() / "hub").expanduser()
    places = {"runs": around.folder, "Hub cache": hub_cache}
    free = {name: count for name, path in places.items() if (count := free_bytes(path)) is not None}
    text = ", ".join(f"{name} {format_bytes(count)}" for name, count in free.items()) + " free"
    fix = "free some space, or move: output_dir=FOLDER, HF_HOME"
    least = min(free.values(), default=DISK_LOW)
    if least < DISK_LOW:
        return Finding("fail" if least < DISK_FAIL else "warning", text, fix)
    return Finding("ok", text)


def output(around: Surroundings) -> Finding:
    """Write, sync, rename and delete in the output folder, as a run does."""
    folder = around.folder.absolute()
    new = [part for part in (folder, *folder.parents) if not os.path.lexists(part)]
    try:
        run_folder.probe_writable(around.folder)
    except DiskError as error:
        return Finding("fail", error.what, "choose another folder: output_dir=FOLDER")
    finally:
        for part in new:  # folders that had to be made for it
            with suppress(OSError):
                part.rmdir()
    return Finding("ok", f"{environment.home_shortened(str(around.folder))}: files can be "
                   "written, synced and renamed")


# The Hub ------------------------------------------------------------------------------------------
def hub(around: Surroundings) -> Finding:
    """Whether the Hub answers within two seconds, or downloads are forbidden."""
    if (name := offline_variable()) is not None:
        return Finding("ok", f"{name}={os.environ[name]}: nothing is downloaded")
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if urlsplit(endpoint).scheme not in ("http", "https"):
        return Finding("fail", "HF_ENDPOINT is no http or https address",
                       "unset it, or give an address such as https://huggingface.co")
    shown = environment.without_credentials(endpoint)
    if hub_reachable():
        return Finding("ok", f"{shown} can be reached")
    return Finding("warning", f"{shown} doesn't answer within 2 s: only models and data on this "
                   "machine can be used", "HF_HUB_OFFLINE=1 says so to every library; a mirror is "
                   "set with HF_ENDPOINT, a proxy with HTTPS_PROXY")


def token(around: Surroundings) -> Finding:
    """Whether there is a token for the Hub, and what it may do. It is never shown."""
    if (place := _token_place()) is None:
        return Finding("ok", "none (public models need none; `hf auth login` sets one)")
    if offline_variable() is not None or not hub_reachable():
        return Finding("ok", f"set ({place}), not tried")
    answer = ask("token", seconds=15)
    if "error" in answer:
        return Finding("warning", f"set ({place}), but the Hub didn't say what it may do: "
                       f"{answer['error']}", "try again later")
    if answer.get("refused"):
        return Finding("warning", f"set ({place}), but the Hub refuses it",
                       "hf auth login, or unset HF_TOKEN")
    return Finding("ok", f"set ({place}), role {answer.get('role') or 'unknown'}")


def _token_place() -> str | None:
    """Where huggingface_hub takes a token from."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name, "").strip():
            return name
    file = Path(os.environ.get("HF_TOKEN_PATH") or environment.hub_home() / "token").expanduser()
    with suppress(OSError):
        return "hf auth login" if file.read_text(errors="replace").strip() else None
    return None


# torch, and what it computes on -------------------------------------------------------------------
def torch(around: Surroundings) -> Finding:
    """Whether torch can be imported, and fits the NVIDIA driver, if there is one."""
    facts, driver = around.torch, environment.nvidia_driver(around.root)
    if "error" in facts:
        return Finding("fail", f"torch can't be imported: {facts['error']}",
                       f"install it again; {_INSTALL_TORCH}")
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else (
        f"ROCm {facts['hip']}" if facts["hip"] else "CPU only")
    text = f"{facts['version']} ({build})"
    if driver is None:
        return Finding("ok", f"{text}, no NVIDIA driver" if facts["cuda"] else text)
    text = f"{text}, NVIDIA driver {driver}"
    if facts["cuda"] is None and facts["hip"] is None:
        return Finding("warning", f"{text}: this build of torch can't use the GPU",
                       f"install a build with CUDA; {_INSTALL_TORCH}")
    if facts["available"]:
        return Finding("ok", text)
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Finding("warning", f"{text}; CUDA_VISIBLE_DEVICES hides every GPU",
                       "unset CUDA_VISIBLE_DEVICES")
    reason = f": {facts['reason']}" if facts["reason"] else ""
    return Finding("fail", f"{text}: torch finds no usable GPU{reason}",
                   "update the driver, or install a build of torch for an older CUDA")


def devices(around: Surroundings) -> Finding:
    """A matrix product on every visible device against the same product in float64."""
    if "error" in around.torch:
        return _NO_TORCH
    texts, wrong = [], []
    for device in around.torch["devices"]:
        name = device["device"]
        if "error" in device:
            wrong.append(f"{name}: {device['error']}")
        elif not device["product_error"] <= TOLERANCE:
            wrong.append(f"{name}: a matrix product is wrong by {device['product_error']:.2g}")
        elif name == "cpu":
            texts.append("cpu")
        else:
            texts.append(f"{name} {device['name']} ({device['free_gib']:.1f} of "
                         f"{device['total_gib']:.1f} GiB free)")
    if wrong:
        return Finding("fail", "; ".join(wrong), "leave that device out with CUDA_VISIBLE_DEVICES "
                       "or hardware.device=cpu; look at nvidia-smi and the kernel's log")
    return Finding("ok", f"{', '.join(texts)}: products are right")


def bf16(around: Surroundings) -> Finding:
    """Whether hardware.precision=bf16 is computed by the device itself."""
    if "error" in around.torch:
        return _NO_TORCH
    gpus = [device for device in around.torch["devices"] if device["device"] != "cpu"]
    if without := [device["device"] for device in gpus if not device.get("bf16")]:
        return Finding("warning", f"{', '.join(without)} can't compute in bf16",
                       "hardware.precision=fp32")
    if gpus:
        return Finding("ok", "every GPU computes in bf16")
    gain = around.torch["devices"][0]["bf16_gain"]
    return Finding("ok", f"the CPU multiplies {gain:.1f} times as fast as in fp32" if gain >= 1
                   else f"the CPU multiplies {1 / gain:.1f} times as fast in fp32: "
                        "hardware.precision=fp32 is faster")


def gloo(around: Surroundings) -> Finding:
    """Two processes that add up a number over gloo, as several ranks of a run would."""
    if "error" in around.torch:
        return _NO_TORCH
    with tempfile.TemporaryDirectory(prefix="ppocli-doctor-") as folder, \
            ThreadPoolExecutor(2) as both:
        answers = list(both.map(lambda rank: ask("gloo", f"{folder}/meeting", rank, "2",
                                                 seconds=30), ("0", "1")))
    if errors := [answer["error"] for answer in answers if "error" in answer]:
        return Finding("fail", f"two processes can't add up a number: {errors[0]}",
                       "runs with one process work; for more check GLOO_SOCKET_IFNAME, firewall "
                       "and the machine's name in /etc/hosts")
    sums = [answer["sum"] for answer in answers]
    if sums != [3.0, 3.0]:
        return Finding("fail", f"two processes added 1 and 2 and got {sums}", "install torch again")
    return Finding("ok", "two processes added up a number over gloo")


CHECKS: Sequence[Check] = (python, packages, transformers, hydra, memory, shm, disk, output, hub,
                           token, accelerate, torch, devices, bf16, threads, deepspeed, gloo)
"""in the order in which they are asked: the quick ones first"""
