"""``ppocli env`` and ``ppocli doctor``: what this machine is like, and whether it will do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ppocli.cli.options import AsJson
from ppocli.cli.output import complain, print_json, say
from ppocli.text import counted


def env(as_json: AsJson = False) -> None:
    """Print versions, hardware and variables, for pasting into an issue.

    Tokens are never shown, only whether they are set.

    \b
    Examples:
      ppocli env
      ppocli env --json
    """
    from ppocli.storage.environment import describe

    facts = describe(places=True)
    if as_json:
        print_json(facts)
    else:
        print("\n".join(f"- {name}: {value}" for name, value in _env_lines(facts)))


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
    from ppocli.doctor import CHECKS
    from ppocli.doctor_probes import Surroundings, run_checks

    width = max(len(check.__name__) for check in CHECKS)
    erasable = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def begin(name: str) -> None:
        if erasable:
            print(f"\r\x1b[Kchecking {name} ...", end="", file=sys.stderr, flush=True)

    results: list[dict[str, Any]] = []
    for name, found, seconds in run_checks(CHECKS, Surroundings(folder), begin=begin):
        if erasable:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        results.append({"name": name, **asdict(found), "seconds": seconds})
        lines = [f"{found.verdict:<8} {name:<{width}}  {found.text}"]
        if found.fix is not None and found.verdict != "ok":
            lines.append(f"{'':<8} {'':<{width}}  fix: {found.fix}")
        for line in lines:
            if as_json:
                say(line)
            else:
                print(line, flush=True)
    if as_json:
        print_json(results)
    failed = [result["name"] for result in results if result["verdict"] == "fail"]
    if failed:
        complain(f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}")
        raise SystemExit(1)


def _env_lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    cpu, torch = facts["cpu"], facts["torch"]
    yield "ppocli", facts["ppocli"]
    yield "python", facts["python"]
    yield "platform", facts["platform"]
    yield "cpu", f"{cpu['model']}, {cpu['cores']} cores ({cpu['usable_cores']} usable)"
    yield "memory", f"{facts['memory_gib']} GiB"
    if "error" in torch:
        yield "torch", f"can't be imported: {torch['error']}"
    else:
        build = f"CUDA {torch['cuda']}" if torch["cuda"] else (
            f"ROCm {torch['hip']}" if torch["hip"] else "CPU only")
        yield "torch", f"{torch['version']} ({build}), {counted(torch['threads'], 'thread')}"
        gpus = [f"{gpu['name']} ({gpu['memory_gib']} GiB, capability {gpu['capability']})"
                for gpu in torch["gpus"]]
        yield "gpus", "; ".join(gpus) or "none"
    yield "nvidia driver", facts["nvidia_driver"] or "none"
    for name, version in facts["packages"].items():
        if name != "torch" or "error" in torch:
            yield name, version or "not installed"
    yield "extras", ", ".join(facts["extras"]) or "none"
    yield "variables", " ".join(f"{name}={value}" for name, value in facts["variables"].items()
                                ) or "none"
