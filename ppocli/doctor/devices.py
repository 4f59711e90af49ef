"""Checks of torch and of what it computes on. torch is asked in a process of its own."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ppocli.doctor.checking import Finding, Surroundings
from ppocli.doctor.processes import ask_all
from ppocli.doctor.torch_probe import TOLERANCE
from ppocli.storage.environment import nvidia_driver

_UNKNOWN = Finding("fail", "unknown: torch can't be imported", "see the check torch")
_INSTALL = "choose the build at https://pytorch.org/get-started/locally"


def torch(around: Surroundings) -> Finding:
    """Whether torch can be imported, and fits the NVIDIA driver, if there is one."""
    facts, driver = around.torch.facts, nvidia_driver(around.root)
    if facts is None:
        return Finding("fail", f"torch can't be imported: {around.torch.error}",
                       f"install it again; {_INSTALL}")
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else (
        f"ROCm {facts['hip']}" if facts["hip"] else "CPU only")
    text = f"{facts['version']} ({build})"
    if driver is None:
        return Finding("ok", f"{text}, no NVIDIA driver" if facts["cuda"] else text)
    text = f"{text}, NVIDIA driver {driver}"
    if facts["cuda"] is None and facts["hip"] is None:
        return Finding("warning", f"{text}: this build of torch can't use the GPU",
                       f"install a build with CUDA; {_INSTALL}")
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
    facts = around.torch.facts
    if facts is None:
        return _UNKNOWN
    texts, wrong = [], []
    for device in facts["devices"]:
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
    facts = around.torch.facts
    if facts is None:
        return _UNKNOWN
    gpus = [device for device in facts["devices"] if device["device"] != "cpu"]
    without = [device["device"] for device in gpus if not device.get("bf16")]
    if without:
        return Finding("warning", f"{', '.join(without)} can't compute in bf16",
                       "hardware.precision=fp32")
    if gpus:
        return Finding("ok", "every GPU computes in bf16")
    try:
        flags = (around.root / "proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    fast = "avx512_bf16" in flags or "amx_bf16" in flags
    return Finding("ok", "the processor has bf16 instructions" if fast
                   else "CPU without bf16 instructions: fp32 is faster")


def collectives(around: Surroundings) -> Finding:
    """Two processes that add up a number over gloo, as several ranks of a run would."""
    if around.torch.facts is None:
        return _UNKNOWN
    with tempfile.TemporaryDirectory(prefix="ppocli-doctor-") as folder:
        meeting = str(Path(folder) / "meeting")
        answers = ask_all("gloo_probe", [[meeting, str(rank), "2"] for rank in range(2)],
                          seconds=30)
    errors = [answer.error for answer in answers if answer.facts is None]
    if errors:
        return Finding("fail", f"two processes can't add up a number: {errors[0]}",
                       "runs with one process work; for more check GLOO_SOCKET_IFNAME, firewall "
                       "and the machine's name in /etc/hosts")
    sums = [answer.facts["sum"] for answer in answers if answer.facts]
    if sums != [3.0, 3.0]:
        return Finding("fail", f"two processes added 1 and 2 and got {sums}",
                       "install torch again")
    return Finding("ok", "two processes added up a number over gloo")
