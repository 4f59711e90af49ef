"""ppocli fine-tunes language models with PPO and any Python reward function.

``ppocli.train(words, reward_fn=...)`` trains from Python, ``ppocli.sft(words, data=...)`` and
``ppocli.train_reward_model(words, data=...)`` on data, ``ppocli.load_run(folder)`` opens a
finished run, ``ppocli.evaluate(run)`` scores its policy, ``ppocli.PPOTrainer(words)`` is for a loop
of one's own. They load their parts on first use:
importing ppocli imports neither torch nor hydra.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppocli.version import __version__

if TYPE_CHECKING:
    from ppocli.api import (
        EvalResult,
        TrainedRun,
        evaluate,
        load_run,
        sft,
        train,
        train_reward_model,
    )
    from ppocli.runs.episode import Step
    from ppocli.trainer import Batch, PPOTrainer

__all__ = ["Batch", "EvalResult", "PPOTrainer", "Step", "TrainedRun", "__version__", "evaluate",
           "load_run", "sft", "train", "train_reward_model"]
_HOMES = {"Batch": "trainer", "PPOTrainer": "trainer", "Step": "runs.episode"}
"""modules of what doesn't lie in ``api``"""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ppocli' has no attribute {name!r}")
    return getattr(import_module(f"ppocli.{_HOMES.get(name, 'api')}"), name)
