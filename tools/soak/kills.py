"""kill -9 of any process of a run at any moment, over all kinds of runs: each finished run equals
the run that was left alone, bit for bit."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path

import helpers
import runs

from tools.soak.cases import ROOT  # first: it makes the tests' helpers importable

KINDS: dict[str, tuple[str, ...]] = {
    "stateful": ("checkpoint.keep_last=100",),
    "kept last": ("checkpoint.keep_last=1", "eval.every_steps=1"),
    "plain": ("reward.fn=rewards.py:plain", "checkpoint.keep_last=2"),
    "lora": ("model.peft={type:lora,r:4}",),
    "shared trunk": ("model.path=./llama", "model.num_layers_unfrozen=1"),
    "branch": ("model.path=./llama", "model.num_layers_unfrozen=1", "model.value.kind=branch",
               "model.value.num_layers_unfrozen=1", "ppo.kl_estimator=full"),
    "own critic": ("model.value.kind=model",),
    "encoder-decoder": ("model.path=./t5",),
    "grpo": ("ppo.advantage=grpo", "ppo.n=3", "reward.fn=rewards.py:plain"),
    "bf16": ("model.path=./llama", "hardware.precision=bf16", "ppo.critic_warmup_steps=1"),
    "ddp": ("hardware=ddp",), "zero2": ("hardware=zero2",), "zero3": ("hardware=zero3",)}
SHARES = {"ddp": 0.3, "zero2": 0.3, "zero3": 0.3}
"""how often a kind is drawn where it is not once: runs of several processes take ten times as
long"""
MOST_KILLS = 8
"""of one run"""


@cache
def world() -> Path:
    """Models, prompts and rewards, and the straight run of each kind that was asked for."""
    folder = ROOT / "build/soak/world"
    shutil.rmtree(folder, ignore_errors=True)
    runs.make_world(folder)
    helpers.save_lm(folder / "llama", "llama")
    helpers.save_lm(folder / "t5", "t5")
    return folder


@cache
def straight(kind: str) -> tuple[Path, float]:
    """The run of a kind that nobody disturbs, and its seconds."""
    name = kind.replace(" ", "-")
    began = time.monotonic()
    runs.run("train", *_words(kind, f"run_name={name}"), cwd=world(), code=0)
    return world() / "runs" / name, time.monotonic() - began


def _words(kind: str, *more: str) -> list[str]:
    return runs.words("tracking.log_rollouts=true", *KINDS[kind], *more, stateful=kind != "grpo")


def one_run(draw: random.Random, folder: Path, outcomes: Counter[str]) -> None:
    """A run that is killed some times at random moments, then left alone to its end.

    Raises:
        AssertionError: an attempt ended otherwise than by a kill, or the run is not the straight
            one.
    """
    kind = draw.choices(list(KINDS), [SHARES.get(kind, 1.0) for kind in KINDS])[0]
    expected, seconds = straight(kind)
    for name in ("lm", "llama", "t5", "rewards.py", "prompts.jsonl"):
        (folder / name).symlink_to(world() / name)
    command = ["train", *_words(kind, "run_name=r", "resume=auto")]
    for _ in range(draw.randint(1, MOST_KILLS)):
        if not _killed(draw, command, folder, draw.uniform(0, 0.8 * seconds), kind):
            break
        outcomes["kills"] += 1
        outcomes[f"kills: {kind}"] += 1
    try:
        runs.run(*command, cwd=folder, code=0)
        same(expected, folder / "runs/r")
    except AssertionError as error:
        raise AssertionError(f"{kind}: {error}") from error
    outcomes["runs"] += 1


def _killed(draw: random.Random, command: list[str], folder: Path, after: float, kind: str) -> bool:
    """Start an attempt and kill one of its processes, or all at once; whether it still ran."""
    process = runs.spawn(*command, cwd=folder)
    end = time.monotonic() + after
    while process.poll() is None and time.monotonic() < end:
        time.sleep(min(0.01, max(0.0, end - time.monotonic())))
    ran = process.poll() is None
    if ran:
        alive = [process.pid, *children(process.pid)]
        victims = alive if draw.random() < 0.3 else [draw.choice(alive)]
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    runs.assert_no_process_left(process.pid)
    if not ran:
        assert process.returncode == 0, (kind, process.returncode, said[-2000:])
    # of several processes, one that is killed ends the run with an error; a helper, with none
    assert "a bug in ppocli" not in said, (kind, said[-2000:])
    return ran


def children(pid: int) -> list[int]:
    """All processes below one."""
    found = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *children(child)]
    except OSError:
        pass
    return found


def same(expected: Path, run_dir: Path) -> None:
    """Equal as the tests have it, and beyond that in what is kept and where links lead."""
    runs.assert_equal_runs(expected, run_dir)
    assert _listing(run_dir) == _listing(expected), set(_listing(run_dir)) ^ set(_listing(expected))


def _listing(run_dir: Path) -> list[str]:
    """All files with where links lead, but for what ranks save at step 0 when their launcher
    dies."""
    return sorted(f"{path.relative_to(run_dir)} -> {os.readlink(path)}"
                  if path.is_symlink() else str(path.relative_to(run_dir))
                  for path in run_dir.rglob("*")
                  if path.parent.name != "events" and "step-000000" not in path.parts)
