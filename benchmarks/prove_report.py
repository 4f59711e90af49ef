"""The table of ``prove_gpu.py``: its parts, what one has found, in a line each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tables import marks, table, write_between
from workloads import WORKLOADS

MARK = "prove-gpu"
PARTS = {
    "tests": ("tests/gpu", 0.27), "quickstart-fp32": ("quickstart in fp32", 0.1),
    "quickstart-bf16": ("quickstart in bf16", 0.1), "gsm8k": ("PPO shaped like GSM8K", 0.24),
    "resume": ("kill -9, then resume", 0.11), "trl": ("GPT-2 124M beside TRL classic", 0.17)}
"""title, and share of the time"""
FLOPS = (
    "Floating-point operations: products with weights and causal attention, in one pass for "
    "sampling, one of the reference, one of the critic, and three per epoch of policy and critic; "
    "the output layer counts where response tokens are predicted. What is computed twice, such as "
    "logprobs that are measured anew before an update, counts once.")


@dataclass(slots=True)
class Result:
    """One part."""

    status: str
    """done, failed, out of time, not here"""
    seconds: float = 0.0
    limit: float = 0.0
    command: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    """also of a part that failed or was cut off, as far as it came"""
    why: str = ""


def summary(name: str, result: Result) -> str:
    """What came out, in a line."""
    found = result.figures
    text = ""
    if name == "tests" and found:
        kinds = ("passed", "failed", "error", "skipped")
        text = ", ".join(f"{found[kind]} {kind}" for kind in kinds
                         if found[kind] or kind == "passed")
    elif name.startswith("quickstart") and found:
        text = (f"reward {found['reward before']:.3f} to {found['reward after']:.3f}, KL "
                f"{found['KL, nats a sample']:.2f} nats, training "
                f"{found['seconds of training']:.1f} s")
    elif name == "gsm8k" and found:
        text = (f"{found['tokens/s']:.0f} tokens/s, {found['seconds a step']:.1f} s a step ("
                + ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in
                            found["seconds by phase"].items() if seconds >= 0.05)
                + f"), peak {found['peak MiB']:.0f} MiB, " + mfu_text(found))
    elif name == "resume" and found:
        text = (f"{found['rows']} rows, killed after step {found['killed after step']}: "
                + ("all figures equal" if found["equal"] else "figures differ"))
    elif name == "trl" and found:
        text = "; ".join(f"{label} {one['seconds an iteration']:.2f} s an iteration, "
                         f"{one['peak GPU MiB']:.0f} MiB" for label, one in found.items()
                         if isinstance(one, dict))
        if "TRL over ppocli" in found:
            text += f"; TRL takes {found['TRL over ppocli']:.2f} times as long"
    if result.status != "done":
        first, *others = result.why.strip().splitlines() or [""]
        error = [line for line in others if line.startswith(("Error", "E "))] or others[-1:]
        text = f"{result.status}: {' '.join([first, *error[:1]])}" + (f" ({text})" if text else "")
    return text.replace("|", "/")


def mfu_text(found: Mapping[str, Any]) -> str:
    """MFU, or what is missing for it."""
    if found["MFU"] is None:
        rate = found["TFLOP/s"]["step"]
        return f"{rate:.3g} TFLOP/s; no MFU: the card's peak in bf16 is not known (--peak-tflops)"
    return (f"MFU {found['MFU']['step']:.1%} of {found['peak TFLOP/s']:.0f} TFLOP/s in a step, "
            f"{found['MFU']['optimize']:.1%} in its updates")


def report(kept: Mapping[str, Any]) -> str:
    """The section of RESULTS.md."""
    rows = []
    for name, told in kept["parts"].items():
        result, work = Result(**told), WORKLOADS[kept["workload"]]
        rows.append([PARTS[name][0], summary(name, result),
                     f"{result.seconds:.0f}"])
        if name == "gsm8k" and (log := work.published) is not None:
            rows.append([f"beside it {log.label}",
                         f"{log.tokens_per_second:.0f} tokens/s, "
                         f"{log.step_seconds:.1f} s a step: {log.note}", "-"])
    return "\n\n".join([
        table(["part", "what came out", "s"], rows), FLOPS,
        f"{kept['date']}. {kept['card']}. {kept['hardware']}. {kept['versions']}, ppocli at "
        f"{kept['code']}."])


def write_report(path: Path, text: str) -> None:
    """Put the section between its marks in a Markdown file, at its end if there are none yet."""
    begin, end = marks(MARK)
    if begin not in path.read_text(encoding="utf-8"):
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\n## Proved on a GPU\n\n    make prove-gpu\n\n{begin}\n{end}\n")
    write_between(path, MARK, text)
