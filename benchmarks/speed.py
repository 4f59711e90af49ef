"""How fast ppocli trains, alone and against TRL and trlX doing the same work.

    python benchmarks/speed.py list
    python benchmarks/speed.py ours --workload tiny
    python benchmarks/speed.py peers --workload gpt2 --threads 1 --rounds 3
    python benchmarks/speed.py peers --workload gpt2 --only classic,trlx,ours
    python benchmarks/speed.py growth | memory | floor | quickstart
    python benchmarks/speed.py write --out benchmarks/RESULTS.md

Every run is a process of its own, ours a whole ``ppocli train``, in turn with the others. An
iteration is the time between two calls of the reward function, which all systems share. Processor
seconds with one thread are what to trust on a machine that does other work too. Each measurement is
kept as JSON and takes the place of the last one like it; ``write`` makes the section of a Markdown
file out of all of them.
"""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import alone
from commands import CommandFailedError
from compare import in_turn
from machine import gpu, hardware, other_work, versions
from report import Comparison, Section, comparison, describe, keep, section
from systems import SYSTEMS, Places, Process, measure, versions_of
from tables import marks, write_between
from workloads import WORKLOADS, Workload

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
CPU = [name for name, work in WORKLOADS.items() if work.device == "cpu"]


def places(args: argparse.Namespace) -> Places:
    """Where the arguments say that things lie."""
    build: Path = args.build.resolve()
    source = os.environ.get("TRLX_SRC") or str(build / "peers/trlx-src")
    return Places(build / "bench", Path(source).resolve(), dict(args.python))


def compare(args: argparse.Namespace, names: Sequence[str] | None = None) -> bool:
    """Measure workloads, print and keep their tables; returns whether ours ran. A peer that failed
    is a line of the table.

    Args:
        names: of the systems, in place of those that the arguments name; then nothing is kept.
    """
    good = True
    for name in args.workload:
        work = adjusted(WORKLOADS[name], args)
        found = compared(name, work, args, names or args.only or work.systems)
        print(f"{work.title}. {describe(work, args.threads)}\n\n{comparison(found)}\n", flush=True)
        good &= not ("ours" in found.outcomes and found.outcomes["ours"].failed)
        if names is None and work == replace(WORKLOADS[name], warmup=work.warmup,
                                             iterations=work.iterations):
            keep(places(args).results, f"{name}-{args.threads}", found)
    return good


def compared(name: str, work: Workload, args: argparse.Namespace, systems: Sequence[str]
             ) -> Comparison:
    """The systems in turn on one workload."""
    made, where = made_on(work.device), places(args)
    known: dict[str, str] = {}
    failed: dict[str, CommandFailedError] = {}
    for one in systems:
        try:
            known[one] = versions_of(one, where)
        except CommandFailedError as error:
            failed[one] = error

    def once(system: str, number: int) -> Process:
        if system in failed:
            raise failed[system]
        return measure(system, work, where, threads=args.threads, seed=args.seed + number,
                       words=args.words)

    return Comparison(name, args.threads, made, command_line(), known,
                      in_turn(systems, args.rounds, once))


def adjusted(work: Workload, args: argparse.Namespace) -> Workload:
    """A workload as the arguments want it.

    Raises:
        SystemExit: it needs a GPU that isn't there.
    """
    changes = {key: getattr(args, key) for key in ("warmup", "iterations", "device", "precision")
               if getattr(args, key) is not None}
    work = replace(work, **changes)
    need_gpu(work)
    return work


def need_gpu(work: Workload) -> None:
    """Check that a GPU is there if a workload wants one.

    Raises:
        SystemExit: it is not.
    """
    if work.device == "cuda" and gpu() is None:
        raise SystemExit(f"there is no GPU here (nvidia-smi finds none), which {work.title!r} "
                         "needs; the commands ours and peers rehearse it with --device cpu")


def made_on(device: str = "cpu") -> str:
    """When, on what, beside what other work."""
    card = f" {gpu()}." if device == "cuda" else ""
    return f"{date.today()}. {hardware()}.{card} {other_work(os.getloadavg()[0])}"


def command_line() -> str:
    """What was typed, without where it was."""
    words = [word for word in sys.argv[1:] if not word.startswith(("--build", "--python"))]
    return shlex.join(["python", "benchmarks/speed.py", *words])


def by_ours(args: argparse.Namespace) -> bool:
    """``ours``: the workloads without the peers."""
    return compare(args, ["ours"])


def by_peers(args: argparse.Namespace) -> bool:
    """``peers``: all systems."""
    unknown = set(args.only or ()) - set(SYSTEMS)
    if unknown:
        raise SystemExit(f"no such system: {', '.join(sorted(unknown))}; there are "
                         f"{', '.join(SYSTEMS)}")
    return compare(args)


def by_alone(args: argparse.Namespace) -> bool:
    """``growth``, ``memory``, ``floor``, ``quickstart``: measured, printed and kept."""
    where, words = places(args), args.words
    work = WORKLOADS[args.workload] if "workload" in args else None
    if work is not None:
        need_gpu(work)
    made = made_on(work.device if work else "cpu")
    if args.command == "growth":
        title, text = "Cost against size", alone.growth(
            args.workload, where, threads=args.threads, rounds=args.rounds, words=words)
    elif args.command == "memory":
        title, text = "Memory over a long run", alone.memory(where, threads=args.threads,
                                                             words=words)
    elif args.command == "floor":
        title, text = "Against the machine", alone.floor(
            args.workload, where, threads=args.threads, rounds=args.rounds, words=words)
    else:
        title, text = "The quickstart", alone.quickstart(where, rounds=args.rounds, words=words)
    print(f"{title}\n\n{text}\n")
    of = [args.workload] if work is not None else []
    keep(where.results, "-".join([args.command, *of, str(args.threads)]),
         Section(title, f"{made} {versions()}.", command_line(), text))
    return " NO |" not in text


def by_write(args: argparse.Namespace) -> bool:
    """``write``: the section of a Markdown file."""
    text = section(places(args).results)
    if args.out is None:
        print(text)
    else:
        write_between(args.out, "speed", text)
    return True


def by_list(_: argparse.Namespace) -> bool:
    """``list``: workloads and systems."""
    for name, work in WORKLOADS.items():
        print(f"{name:14} {work.title}: {', '.join(work.systems)}")
    print()
    for name, system in SYSTEMS.items():
        print(f"{name:18} {system.label}")
    return True


def pair(text: str) -> tuple[str, str]:
    """NAME=PATH."""
    name, found, path = text.partition("=")
    if not found or name not in {system.environment for system in SYSTEMS.values()} - {""}:
        raise argparse.ArgumentTypeError(f"{text}: classic=PATH, experimental=PATH or trlx=PATH")
    return name, path


def parser() -> argparse.ArgumentParser:
    """Commands and options."""
    top = argparse.ArgumentParser(description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, does: Callable[[argparse.Namespace], bool], summary: str
                ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=summary, description=f"{summary}.")
        made.set_defaults(does=does, python=[], words=[])
        made.add_argument("--build", type=Path, default=BUILD,
                          help="folder of fixtures, environments and results (%(default)s)")
        return made

    for name, does, summary in (("ours", by_ours, "time ppocli alone; nothing is kept"),
                                ("peers", by_peers, "time all systems in turn")):
        made = command(name, does, summary)
        made.add_argument("--workload", nargs="+", choices=WORKLOADS, metavar="NAME", default=CPU,
                          help="of `list` (all that need no GPU)")
        made.add_argument("--device", choices=["cpu", "cuda"], help="another than the workload's; "
                          "then, and with --precision, nothing is kept")
        made.add_argument("--precision", choices=["fp32", "bf16"], help="another")
        made.add_argument("--warmup", type=int, help="uncounted iterations of a process")
        made.add_argument("--iterations", type=int, help="counted iterations of a process")
        if name == "peers":
            made.add_argument("--only", type=lambda text: text.split(","), metavar="NAME,...",
                              help="systems of `list` (those of the workload)")
            made.add_argument("--python", type=pair, action="append", metavar="NAME=PATH",
                              default=[], help="the Python of a peer's environment (build/peers)")
        _add_common(made)
    for name, workload, summary in (
            ("growth", "tiny", "cost of twice the batch, twice the tokens, ten times the steps"),
            ("memory", None, "memory after 50 and after 500 steps"),
            ("floor", "gpt2", "an iteration against the least that this machine needs"),
            ("quickstart", None, "seconds of the quickstart")):
        made = command(name, by_alone, summary)
        if workload:
            made.add_argument("--workload", choices=WORKLOADS, metavar="NAME", default=workload,
                              help="of `list` (%(default)s)")
        _add_common(made)
    written = command("write", by_write, "make the section of what was measured")
    written.add_argument("--out", type=Path, help="write it between this file's lines "
                         f"{' and '.join(marks('speed'))}, else print it")
    command("list", by_list, "name workloads and systems")
    return top


def _add_common(made: argparse.ArgumentParser) -> None:
    made.add_argument("--threads", type=int, default=1, help="of each system (%(default)s)")
    made.add_argument("--rounds", type=int, default=3, help="of all systems (%(default)s)")
    made.add_argument("--seed", type=int, default=0, help="of the first round (%(default)s)")
    made.add_argument("--set", nargs="*", default=[], dest="words", metavar="KEY=VALUE",
                      help="more words for ppocli train")


def main() -> int:
    args = parser().parse_args()
    try:
        return 0 if args.does(args) else 1
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{shlex.join(error.cmd)} ended with code {error.returncode}") from error


if __name__ == "__main__":
    sys.exit(main())
