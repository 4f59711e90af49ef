"""``ppocli doctor`` and ``ppocli env``: what a person with a failing installation needs to know.

Importing torch or DeepSpeed may crash or hang, so it is tried in a process of its own.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ppocli.cli.options import AsJson
from ppocli.cli.output import complain, print_json, say
from ppocli.config.text import format_bytes
from ppocli.distributed.standard_output import put
from ppocli.errors import PpocliError
from ppocli.runs import atomic
from ppocli.runs.daemon import in_daemon
from ppocli.runs.hub import hub_reachable, offline_variable

SECONDS = 90
"""that a check may take"""
DISK_FAIL, DISK_LOW = 200 * 10**6, 5 * 10**9
"""bytes; a checkpoint takes three times the weights"""
TORCH = """
import json, torch
devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
for device in devices:
    ones = torch.ones(64, 64, device=device)
    assert bool(((ones @ ones) == 64).all()), f"a matrix product on {device} is wrong"
names = [torch.cuda.get_device_name(device) for device in devices[1:]]
build = f"CUDA {torch.version.cuda}" if torch.version.cuda else (
    f"ROCm {torch.version.hip}" if torch.version.hip else "CPU only")
print(json.dumps({"version": torch.__version__, "build": build, "gpus": names}))
"""
DEEPSPEED = 'import deepspeed; print(); print("{}")'


class Check(NamedTuple):
    """What a check came to: ``ok``, ``warning`` or ``fail``, and what to do about it."""

    verdict: str
    text: str
    fix: str | None = None


def ask(code: str) -> dict[str, Any]:
    """The JSON object in the last line that a process of its own prints, or why there is none, as
    ``error``."""
    try:
        done = subprocess.run([sys.executable, "-P", "-c", code], text=True, errors="replace",
                              check=False, stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=SECONDS - 10)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {SECONDS - 10} s"}
    with suppress(ValueError, IndexError):
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    lines = done.stderr.strip().splitlines()
    return {"error": lines[-1] if lines else f"exit code {done.returncode}"}


def packages(_folder: Path) -> Check:
    """Every declared dependency is within the bounds of this ppocli."""
    from packaging.requirements import Requirement

    from ppocli.runs import environment

    try:
        declared = [Requirement(text) for text in metadata.requires("ppocli") or []]
    except metadata.PackageNotFoundError:
        return Check("warning", "ppocli isn't installed as a package: versions can't be compared",
                     "pip install ppocli, or pip install -e . in a checkout")
    installed = {each: environment.installed_version(each.name) for each in declared
                 if each.marker is None}
    if wrong := [each for each, version in installed.items()
                 if version is None or not each.specifier.contains(version, prereleases=True)]:
        return Check("fail", ", ".join(
            f"{each.name} {installed[each] or 'is missing'} (needs {each.specifier})"
            for each in wrong), "pip install " + " ".join(f"'{each}'" for each in wrong))
    return Check("ok", f"Python {platform.python_version()}, {len(installed)} dependencies "
                 "within their bounds")


def torch(_folder: Path) -> Check:
    """torch can be imported, sees the GPUs that there are, and computes on each device."""
    from ppocli.runs import environment

    facts, driver = ask(TORCH), environment.nvidia_driver()
    install = "install another build of torch: https://pytorch.org/get-started/locally"
    if "error" in facts:
        return Check("fail", f"torch can't be imported, or computes wrongly: {facts['error']}",
                     f"look at nvidia-smi, set CUDA_VISIBLE_DEVICES, or {install}")
    text = ", ".join([f"{facts['version']} ({facts['build']})", *facts["gpus"]])
    if driver is not None and not facts["gpus"]:
        return Check("warning", f"{text}: NVIDIA driver {driver}, but torch sees no GPU",
                     f"unset CUDA_VISIBLE_DEVICES, update the driver, or {install}")
    return Check("ok", text)


def deepspeed(_folder: Path) -> Check:
    """DeepSpeed can be imported; transformers does so when it saves a model."""
    from ppocli.runs import environment

    version, answer = environment.installed_version("deepspeed"), ask(DEEPSPEED)
    return Check("ok", str(version)) if "error" not in answer else Check(
        "fail", f"{version} can't be imported: {answer['error']}",
        "pip install --force-reinstall deepspeed, after torch")


def hub(_folder: Path) -> Check:
    """The Hub answers within two seconds, or downloads are forbidden."""
    from ppocli.runs import environment

    if (name := offline_variable()) is not None:
        return Check("ok", f"{name}={os.environ[name]}: nothing is downloaded")
    address = environment.without_credentials(
        os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    return Check("ok", f"{address} can be reached") if hub_reachable() else Check(
        "warning", f"{address} doesn't answer within 2 s: only models and data on this machine can "
        "be used", "HF_HUB_OFFLINE=1, HF_ENDPOINT for a mirror, or HTTPS_PROXY for a proxy")


def output(folder: Path) -> Check:
    """Runs can be written, and locked, where they go."""
    from ppocli.runs import environment, run_folder

    new = [part for part in (folder, *folder.absolute().parents) if not part.exists()]
    try:
        run_folder.probe_writable(folder)
        with run_folder.lock_beside(folder / "probe", "try another folder"):
            return Check("ok", f"{environment.home_shortened(str(folder))}: written and locked")
    except (PpocliError, OSError) as error:
        return Check("fail", getattr(error, "what", str(error)), "output_dir=ANOTHER-FOLDER")
    finally:
        for part in new:
            with suppress(OSError):
                part.rmdir()


def disk(folder: Path) -> Check:
    """Free space where runs and downloads go."""
    from ppocli.runs import environment

    cache = Path(os.environ.get("HF_HUB_CACHE") or environment.hub_home() / "hub").expanduser()
    free = {name: atomic.free_bytes(path) or 0 for name, path in (
        ("runs", folder), ("Hub cache", cache))}
    text = ", ".join(f"{name} {format_bytes(count)}" for name, count in free.items()) + " free"
    least = min(free.values())
    return Check("ok" if least >= DISK_LOW else "warning" if least >= DISK_FAIL else "fail", text,
                 None if least >= DISK_LOW else "free some space, or set output_dir, HF_HOME")


CHECKS = (packages, torch, deepspeed, hub, output, disk)


def doctor(folder: Annotated[Path, typer.Argument(
               metavar="[DIR]", help="The folder that contains, or will contain, the run folders.")
               ] = Path("runs"),
           as_json: AsJson = False) -> None:
    """Check this machine and the installation; each check says how to fix what it finds.

    Exit code 0: nothing failed (warnings don't count), 1: a check failed.

    \b
    Examples:
      ppocli doctor
      ppocli doctor /scratch/runs
      ppocli doctor --json
    """
    results: dict[str, Check] = {}
    for check in CHECKS:
        begun = in_daemon(partial(check, folder), f"doctor-{check.__name__}")
        result = results[check.__name__] = begun.result() if wait([begun], SECONDS).done else Check(
            "fail", f"no answer within {SECONDS} s", "a network file system or a driver hangs")
        for text in [f"{result.verdict:<8} {check.__name__:<10} {result.text}",
                     *([f"{'':<19} fix: {result.fix}"] if result.fix else [])]:
            (say if as_json else put)(text)
    if as_json:
        print_json([{"name": name, **result._asdict()} for name, result in results.items()])
    if failed := [name for name, result in results.items() if result.verdict == "fail"]:
        complain(f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}")
        raise SystemExit(1)


def env(as_json: AsJson = False) -> None:
    """Print versions, hardware and variables, for pasting into an issue.

    Tokens are never shown, only whether they are set.

    \b
    Examples:
      ppocli env
      ppocli env --json
    """
    from ppocli.runs import environment

    facts = environment.describe(places=True)
    if "error" not in facts["torch"]:  # what hardware.gemm=auto and num_threads=null come to here
        from ppocli.config.schema import HardwareConfig
        from ppocli.distributed.onednn import choose_gemm
        from ppocli.distributed.torch_settings import default_threads

        facts |= {environment.PRODUCTS: choose_gemm(HardwareConfig()),
                  environment.THREADS: default_threads()}
    if as_json:
        print_json(facts)
    else:
        put("\n".join(_env_lines(facts)))


def _env_lines(facts: Mapping[Any, Any], section: str = "") -> Iterator[str]:
    for name, value in facts.items():
        inner = dict(enumerate(value or ())) if name == "gpus" else value
        if isinstance(inner, dict) and inner:
            yield from _env_lines(inner, f"{section}{name}.")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            yield f"- {section}{name}: {shown or 'none'}"
