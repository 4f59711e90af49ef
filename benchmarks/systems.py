"""Ours and the peers: how each is started on a workload, and what one process of it took."""

import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commands import PPOCLI, CommandFailedError, environment, run
from fixtures import model_folder, prompt_file
from machine import versions
from workloads import Job, Workload, job_of

PEERS = Path(__file__).with_name("peers")


@dataclass(frozen=True, slots=True)
class System:
    """One of those that are compared."""

    label: str
    environment: str = ""
    """of the peer, a folder of virtual environments holds it"""
    runner: str = ""
    """file in ``peers``; ours has none"""
    options: dict[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    real: bool = True
    """whether anybody could train with it"""


_TRL = ("trl", "torch", "transformers", "accelerate")
SYSTEMS = {
    "ours": System("ppocli"),
    "classic": System("TRL classic", "classic", "run_trl_classic.py", packages=_TRL),
    "experimental": System("TRL experimental", "experimental", "run_trl_experimental.py",
                           packages=_TRL),
    "experimental-free": System(
        "TRL experimental, its value model free of cost", "experimental",
        "run_trl_experimental.py", {"value": "free"}, packages=_TRL, real=False),
    "trlx": System("trlX", "trlx", "run_trlx.py", packages=_TRL[1:]),
}


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie."""

    build: Path
    """ignored by git: fixtures, results, scratch"""
    trlx_source: Path
    pythons: Mapping[str, str]
    """of the peers' environments, by name"""

    @property
    def fixtures(self) -> Path:
        """Models and prompts."""
        return self.build / "fixtures"

    @property
    def results(self) -> Path:
        """One JSON file a measurement."""
        return self.build / "results"


@dataclass(frozen=True, slots=True)
class Process:
    """What one process took: lists are by counted iteration."""

    wall: list[float]
    """seconds"""
    processor: list[float]
    """seconds of all threads"""
    resident: list[float]
    """MiB after each rollout, the uncounted ones too"""
    tokens: float
    """mean of a response"""
    peak_mib: float
    gpu_mib: float | None
    seconds: float
    """of the whole process, from its start to its end"""
    phases: dict[str, list[float]]
    """ours alone: ``time/PHASE`` and ``cpu/PHASE`` of the counted steps, as in ``metrics.jsonl``"""


def measure(name: str, work: Workload, places: Places, *, threads: int, seed: int,
            words: Sequence[str] = (), limit: float | None = None) -> Process:
    """Run a system once.

    Args:
        words: more words for ``ppocli train``; the peers don't hear of them.
        limit: seconds after which it is killed.

    Raises:
        CommandFailedError: it could not be started, failed, or did less than it was asked to.
    """
    system = SYSTEMS[name]
    model = model_folder(work.shape, places.fixtures)
    prompts = prompt_file(work, places.fixtures)
    places.build.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=places.build, prefix="run-") as folder:
        scratch = Path(folder)
        job = job_of(work, model=model, prompts=prompts, stamps=scratch / "stamps.jsonl",
                     threads=threads, seed=seed, options=system.options)
        more = {"TMPDIR": str(scratch)}
        if system.runner:
            told = scratch / "job.json"
            told.write_text(json.dumps(job.to_json()), encoding="utf-8")
            command = [python_of(system, places), str(PEERS / system.runner), str(told)]
            more |= {"TRLX_SRC": str(places.trlx_source), "PYTHONWARNINGS": "ignore"}
        else:
            command = [PPOCLI, "train", *ours(job, work.chunk), *work.words, *words, "run_name=run",
                       f"output_dir={scratch}"]
        took = run(command, scratch / "log", environment(threads, more), limit=limit)
        stamps = rollouts(_rows(scratch / "stamps.jsonl"), work.batch)
        if len(stamps) != work.rollouts:
            raise CommandFailedError(f"{len(stamps)} rollouts were scored, not {work.rollouts}")
        phases = {} if system.runner else by_phase(_rows(scratch / "run/metrics.jsonl"), work)
    counted = stamps[work.warmup:]
    return Process(
        wall=steps(counted, "wall"), processor=steps(counted, "processor"),
        resident=[stamp["mib"] for stamp in stamps],
        tokens=sum(stamp["tokens"] for stamp in stamps) / (work.batch * len(stamps)),
        peak_mib=took.peak_mib, gpu_mib=stamps[-1]["gpu_mib"], seconds=took.wall, phases=phases)


def python_of(system: System, places: Places) -> str:
    """The Python of a peer's environment."""
    return places.pythons.get(system.environment) or str(
        places.build.parent / "peers" / system.environment / "bin/python")


def ours(job: Job, chunk: int | None) -> list[str]:
    """The job in words for ``ppocli train``: as little besides the work as the peers have."""
    return [
        f"model.path={job.model}", f"model.tokenizer_path={job.tokenizer}",
        f"model.num_layers_unfrozen={job.layers_unfrozen}",
        f"prompts.path={job.prompts}", "prompts.eval.limit=1",
        f"reward.fn={PEERS / 'reward.py'}:score", f"reward.kwargs.stamps={job.stamps}",
        f"reward.kwargs.new_tokens={job.new_tokens}",
        f"generation.max_new_tokens={job.new_tokens}",
        f"generation.min_new_tokens={job.min_new_tokens}",
        "generation.eval.max_new_tokens=1", "generation.eval.min_new_tokens=0",
        f"ppo.num_steps={job.rollouts}", f"ppo.num_rollouts={job.batch}",
        f"ppo.chunk_size={chunk or job.batch}", f"ppo.mini_batch_size={job.mini_batch}",
        f"ppo.ppo_epochs={job.epochs}", f"ppo.init_kl_coef={job.kl_coef}",
        "ppo.kl_controller=fixed", "ppo.kl_in=reward", "ppo.step_kl=null",
        f"ppo.gamma={job.gamma}", f"ppo.lam={job.lam}",
        f"ppo.cliprange={job.clip}", f"ppo.cliprange_value={job.clip_value}",
        f"ppo.vf_coef={job.vf_coef}", "ppo.max_grad_norm=null", f"ppo.optimizer.lr={job.lr}",
        "ppo.optimizer.weight_decay=0", "ppo.scheduler.name=constant",
        "eval.at_start=false", "eval.every_steps=null", "checkpoint.every_steps=null",
        "tracking.trackers=[]", f"seed={job.seed}", f"hardware.device={job.device}",
        f"hardware.precision={job.precision}", f"hardware.num_threads={job.threads}"]


def rollouts(stamps: Sequence[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """The stamp that ended each rollout, with the tokens of all of it.

    A rollout may be scored in several calls. What follows the last whole one is left out: our
    evaluation at the end.
    """
    found, samples, tokens = [], 0, 0
    for stamp in stamps:
        samples += stamp["samples"]
        tokens += stamp["tokens"]
        if samples == batch:
            found.append({**stamp, "tokens": tokens})
            samples = tokens = 0
    return found


def steps(stamps: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """Differences between neighbours."""
    return [after[name] - before[name]
            for before, after in itertools.pairwise(stamps)]


def by_phase(rows: Sequence[Mapping[str, float]], work: Workload) -> dict[str, list[float]]:
    """Seconds of each phase in the counted steps, of wall and of processor time."""
    counted = [row for row in rows if row["step"] > work.warmup]
    names = [name for name in counted[0] if name.startswith(("time/", "cpu/"))
             and not name.endswith("/eval")]
    return {name: [row[name] for row in counted] for name in names}


def versions_of(name: str, places: Places) -> str:
    """A system's versions, in words.

    Raises:
        CommandFailedError: its environment is not there.
    """
    system = SYSTEMS[name]
    if not system.runner:
        return versions()
    python = python_of(system, places)
    ask = ("import platform\nfrom importlib.metadata import version\n"
           "print(', '.join(['Python ' + platform.python_version()] + "
           f"[f'{{name}} {{version(name)}}' for name in {system.packages!r}]))")
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CommandFailedError(f"there is no environment at {python}; make bench-peers-setup "
                                 "makes it") from error
    said = done.stdout.strip()
    return f"{said}, trlX {_commit(places.trlx_source)}" if system.environment == "trlx" else said


def _commit(checkout: Path) -> str:
    done = subprocess.run(["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"],
                          capture_output=True, text=True, check=False,
                          env={**os.environ, "GIT_CEILING_DIRECTORIES": str(checkout.parent)})
    if done.returncode:
        raise CommandFailedError(f"there is no checkout of trlX at {checkout}; "
                                 "make bench-peers-setup makes one")
    return done.stdout.strip()


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
