"""What every runner of a peer shares: the job that it was given, prompts, and when it is done.

A runner is started in its peer's environment as ``python run_NAME.py JOB.json``; what the job holds
says ``workloads.Job``. It trains until the reward has been asked often enough, and prints nothing
that matters: the reward function keeps the times.
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from reward import score


class Enough(Exception):
    """Raised out of the reward function once all iterations have been measured."""


def run(train: Callable[[Any], None]) -> None:
    """Hand the job to a peer's ``train`` and let :class:`Enough` end it."""
    warnings.filterwarnings("ignore")
    job = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    import torch

    torch.set_num_threads(job.threads)
    torch.set_float32_matmul_precision(job.matmul)
    torch.manual_seed(job.seed)
    try:
        train(job)
    except Enough:
        return
    raise SystemExit(f"only some of {job.rollouts} rollouts were scored")


def reward_of(job: Any) -> Callable[[list[str]], list[float]]:
    """The job's reward of response texts."""
    asked = 0

    def reward(texts: list[str]) -> list[float]:
        nonlocal asked
        scores = score(texts, job.stamps, job.new_tokens)
        asked += 1
        if asked == job.rollouts:
            raise Enough
        return scores

    return reward


def prompt_texts(job: Any) -> list[str]:
    """The prompts: one batch, for every iteration."""
    lines = Path(job.prompts).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


def on_gpu(job: Any) -> bool:
    """Whether the job computes on a GPU."""
    return bool(job.device == "cuda")
