"""Whole runs for tests: a small world of files, the command in and out of process, comparisons."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import pytest
from helpers import (
    VOLATILE,
    environment,
    read_json,
    save_lm,
    stable_rows,
    write_jsonl,
    write_prompts,
)
from warm import Process, begin

REWARDS = '''\
import random

import numpy as np
import torch


def score(completions, completion_ids, **columns):
    """Per-token rewards that depend on every global generator a user may draw from."""
    rows = []
    for text, ids in zip(completions, completion_ids):
        noise = 0.1 * (random.random() + np.random.rand() + float(torch.rand(())))
        rows.append([0.1 * noise] * len(ids))
        if ids:
            rows[-1][-1] += text.split().count("good")
    return rows


def plain(outputs, **columns):
    return [float(text.split().count("good")) for text in outputs]


def measure(outputs, **columns):
    return {"words": [float(len(text.split())) for text in outputs]}
'''

PLANTED = "hf_PLANTEDabcdefghijklmnopqrstuvwxyz"
"""a token in the environment of a run; it must turn up nowhere"""
STEPS = 4
WORDS = (
    f"ppo.num_steps={STEPS}", "ppo.num_rollouts=12", "ppo.chunk_size=5", "ppo.mini_batch_size=6",
    "ppo.ppo_epochs=2", "ppo.micro_batch_size=4", "ppo.optimizer.lr=1e-3",
    "ppo.scheduler.name=constant",  # a run of other length trains alike as far as it goes
    "generation.max_new_tokens=8", "prompts.eval.limit=4", "eval.every_steps=2",
    "checkpoint.every_steps=1", "checkpoint.keep_last=100", "hardware.device=cpu",
    "hardware.num_threads=1")
STATEFUL = ("ppo.kl_controller=adaptive", "ppo.target=0.5", "ppo.horizon=50",
            "reward.scale=running", "tracking.log_rollouts=true",
            "ppo.scheduler.name=linear", "reward.fn=rewards.py:score",
            "reward.metric_fn=rewards.py:measure")
"""everything that a resumed run has to remember beside its weights"""


def make_world(folder: Path) -> Path:
    """A folder as a user has it: a model, prompts and a file of rewards."""
    folder.mkdir(parents=True, exist_ok=True)
    save_lm(folder / "lm")
    write_prompts(folder / "prompts.jsonl")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


RM_WORDS = ("model.path=lm", "data.path=pairs.jsonl", "data.val=0.25", "reward_model.epochs=2",
            "reward_model.mini_batch_size=6", "reward_model.micro_batch_size=4",
            "reward_model.optimizer.lr=1e-2", "checkpoint.every_steps=1",
            "checkpoint.keep_last=100", "eval.every_steps=2", "hardware.device=cpu",
            "hardware.num_threads=1")
"""a short training of a reward model on the pairs of :func:`write_pairs`"""


def write_pairs(world: Path) -> Path:
    """The world, with ``pairs.jsonl`` in it."""
    answers = (("very good", "very bad"), ("great and warm", "dull"), ("loved", "hated and cold"))
    rows = [{"prompt": f"the {thing} was", "chosen": f" {good} .", "rejected": f" {bad} ."}
            for thing in ("film", "plot", "actor") for good, bad in answers for _ in range(2)]
    write_jsonl(world / "pairs.jsonl", rows)
    return world


def words(*more: str, stateful: bool = False) -> list[str]:
    """The command line of a short run in a :func:`make_world`; later words win."""
    own = ["model.path=./lm", "prompts.path=prompts.jsonl", "reward.fn=rewards.py:plain", *WORDS,
           *(STATEFUL if stateful else ()), *more]
    keys: dict[str, str] = {}
    for word in own:
        keys[word.split("=", 1)[0]] = word
    return list(keys.values())


@dataclass(frozen=True)
class Ended:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err

    def expected(self, code: int | None) -> Self:
        """Itself; an error that shows what was said unless it ended with this code (None: any), and
        without a traceback unless this is the code of a bug."""
        assert code is None or self.code == code, (self.code, self.said)
        assert code in (None, 1) or "Traceback" not in self.said, self.said
        return self


Command = Callable[..., Ended]


def app_in_process(capsys: pytest.CaptureFixture[str]) -> Command:
    """Any command without the seconds of a fresh interpreter: same parsing, same endings."""
    from ppocli.cli.app import app
    from ppocli.cli.output import code_of

    def command(*given: object, code: int | None = None) -> Ended:
        capsys.readouterr()
        found = code_of(lambda: app([*map(str, given)], prog_name="ppocli"))
        return Ended(found, *capsys.readouterr()).expected(code)

    return command


def spawn(*given: str, cwd: Path, **env: str) -> Process:
    """The command in a process group of its own, its output on pipes."""
    return begin(["-m", "ppocli", *given], cwd=cwd, env=environment(**env))


def run(*given: str, cwd: Path, code: int | None = None, **env: str) -> Ended:
    """The command in a process, which has to end with this code; nothing of it may be left
    running."""
    process = spawn(*given, cwd=cwd, **env)
    try:
        out, err = process.communicate(timeout=240)
    finally:
        assert_no_process_left(process.pid)
    return Ended(process.returncode, out, err).expected(code)


def shell(line: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a line in which ``ppocli`` is the command."""
    line = f"set -o pipefail; ppocli() {{ {sys.executable} -m ppocli \"$@\"; }}; {line}"
    return subprocess.run(["bash", "-c", line], cwd=cwd, text=True, capture_output=True,
                          env=environment(**env), timeout=200, check=False)


def imported_by(code: str, cwd: Path) -> set[str]:
    """The packages that are loaded once this code has run in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print('MODULES', *sys.modules)"], cwd=cwd,
        text=True, capture_output=True, env=environment(), timeout=60, check=True)
    return {name.split(".")[0] for name in done.stdout.rpartition("MODULES")[2].split()}


def assert_no_process_left(group: int) -> None:
    """No process of the group lives on (it is ended if it does)."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(group, signal.SIGKILL)
    raise AssertionError(f"processes of group {group} were left running")


def wait_for(condition: Callable[[], object], process: Process | None = None,
             seconds: float = 120) -> None:
    """Wait until something has happened, while the process lives."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def whole_copy(source: Path, target: Path) -> Path:
    """A run's folder elsewhere, as if it had been made there."""
    from ppocli.config.config_yaml import read_config
    from ppocli.runs.run_folder import write_config

    shutil.copytree(source, target, symlinks=True)
    config = read_config(target / "config.yaml")
    write_config(replace(config, run_name=target.name, output_dir=str(target.parent)),
                 target / "config.yaml")
    return signed_again(target)


def signed_again(run_dir: Path) -> Path:
    """A run whose configuration a test has changed, as if the run had been started with it."""
    from ppocli.runs import atomic, trust

    told = atomic.read_json(run_dir / "run.json")
    if told is not None:
        if "config" in told:
            told["config"] = (run_dir / "config.yaml").read_text(encoding="utf-8")
        atomic.write_json_atomic(run_dir / "run.json",
                                 trust.sign_run(told, run_dir / "config.yaml"))
    return run_dir


def rewrite(run_dir: Path, changes: Mapping[str, str]) -> Path:
    """The run, as if it had been started with a configuration that reads otherwise."""
    config = run_dir / "config.yaml"
    text = config.read_text(encoding="utf-8")
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    config.write_text(text, encoding="utf-8")
    return signed_again(run_dir)


def copied(source: Path, target: Path, last_step: int) -> Path:
    """A run as it would lie there had it been killed after the checkpoint of ``last_step``, with
    rows of later steps already written."""
    whole_copy(source, target)
    for folder in (target / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > last_step:
            shutil.rmtree(folder)
    for name in ("model", "summary.json"):
        path = target / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    with (target / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    return target


def last_checkpoint(run_dir: Path) -> Path:
    """The newest step folder."""
    return max((run_dir / "checkpoints").glob("step-*"))


def scalars(run_dir: Path) -> list[tuple[str, int, float]]:
    """(tag, step, value) of every stable TensorBoard scalar, in the order written."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    found = []
    for path in sorted((run_dir / "events").iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if not value.tag.startswith(VOLATILE):
                    found.append((value.tag, event.step, float(value.tensor.float_val[0])))
    return found


def assert_equal_runs(one: Path, other: Path) -> None:
    """Two finished runs came to the same, bit for bit, apart from clocks and run ids."""
    import torch
    from safetensors.torch import load_file

    from ppocli.config.config_yaml import read_config
    from ppocli.config.tasks import needs_critic

    a, b = last_checkpoint(one), last_checkpoint(other)
    assert a.name == b.name
    names = sorted(str(p.relative_to(a)) for p in a.rglob("*.safetensors"))
    assert names == sorted(str(p.relative_to(b)) for p in b.rglob("*.safetensors"))
    critic = needs_critic(read_config(one / "config.yaml"))
    assert {"optimizer", "rng", *["value_head"] * critic} <= {
        re.split(r"[-./]", name)[0] for name in names}, names
    pairs = [(a / name, b / name) for name in names]
    weights = sorted((one / "model").glob("*.safetensors"))
    assert weights
    pairs += [(path, other / "model" / path.name) for path in weights]
    for left, right in pairs:
        x, y = load_file(left), load_file(right)
        assert set(x) == set(y)
        assert all(x[k].dtype == y[k].dtype and torch.equal(x[k], y[k]) for k in x), left.name
    assert (a / "rng.json").read_bytes() == (b / "rng.json").read_bytes()
    assert _state(a) == _state(b)
    assert stable_rows(one / "metrics.jsonl") == stable_rows(other / "metrics.jsonl")
    assert (one / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    left_scalars, right_scalars = scalars(one), scalars(other)
    shown = [(tag, step) for tag, step, _ in right_scalars]
    assert len(shown) == len(set(shown)), "TensorBoard shows a step twice"
    assert sorted(left_scalars) == sorted(right_scalars)
    left_summary, right_summary = (read_json(r / "summary.json") for r in (one, other))
    for name in ("status", "steps", "episodes", "updates", "eval_before", "eval_after", "kl_coef"):
        assert left_summary.get(name) == right_summary.get(name), name
    assert_tidy(other)


def _state(checkpoint: Path) -> dict:
    state = read_json(checkpoint / "state.json")
    del state["seconds"], state["cpu_seconds"]
    del state["judged_by"]  # of the reward's path, which lies elsewhere in each test
    return state


def assert_tidy(run_dir: Path) -> None:
    """Nothing unfinished is left in a run folder that was started once more."""
    left = [str(path.relative_to(run_dir)) for path in run_dir.rglob("*")
            if path.name.startswith((".staging", ".replaced", ".discarded", ".tmp"))]
    assert left == []


def resumed(run_dir: Path) -> None:
    """Go on with a run in this process, to its end."""
    from ppocli.launch.local_ranks import Start
    from ppocli.launch.worker import run_worker

    run_worker(Start.of_folder(run_dir, resume=True))

