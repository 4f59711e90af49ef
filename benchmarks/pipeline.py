"""The whole road offline: SFT, a reward model, PPO; then SFT, PPO and best-of-n side by side.

    python benchmarks/pipeline.py                        # one seed, runs/pipeline-1 and its tables
    python benchmarks/pipeline.py --seeds 1 2 3 4 5 --out docs/pipeline.md

The three recipes are run as users run them, each in a process of its own. PPO is run a second time
without a KL term (``free``), to be over-optimised. The tables say what each policy scores under the
learned reward, which it was trained on, and under the true one, which labelled the pairs, beside
best-of-n of the SFT model at the same KL, chosen by the learned reward. The exit code is 1 if a
promise doesn't hold.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

ACCURACY, GAIN = 0.80, 0.25
BEST_OF = (1, 2, 4, 8, 16, 32, 64)
FREE = ["ppo.init_kl_coef=0", "ppo.optimizer.lr=2e-3", "ppo.scheduler.name=constant"]
HEAD = ("policy", "KL", "learned", "true", "best-of-n learned", "best-of-n true")


def ppocli(words: list[str], folder: Path) -> None:
    """Run one command in ``folder``; it says on stderr how far it is."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "ppocli", "-q", *words], cwd=folder, env=env,
                          stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"ppocli {' '.join(words)} failed ({done.returncode})")


def walk(seed: int, folder: Path, words: list[str]) -> float:
    """Make the four runs of one seed in ``folder``, and the samples of best-of-n. Returns CPU
    seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    common = [f"seed={seed}", "hardware.device=cpu", *words]
    for name, command in (("pipeline-sft", ["sft", "+recipe=pipeline_sft"]),
                          ("pipeline-reward", ["reward-model", "+recipe=pipeline_reward"]),
                          ("pipeline-ppo", ["train", "+recipe=pipeline_ppo"]),
                          ("free", ["train", "+recipe=pipeline_ppo", *FREE, "run_name=free"])):
        if not (folder / "runs" / name / "summary.json").exists():
            print(f"seed {seed}: {name}", file=sys.stderr, flush=True)
            ppocli([*command, *common], folder)
    if not (folder / "best-of-n/eval.json").exists():
        print(f"seed {seed}: best-of-n", file=sys.stderr, flush=True)
        ppocli(["eval", "runs/pipeline-ppo", "--step", "0", "--num-samples", str(BEST_OF[-1]),
                "--name", "best-of-n", "--output", "."], folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
