"""ppocli fine-tunes language models with PPO and any Python reward function.

``ppocli.train(words, reward_fn=...)`` trains from Python; ``ppocli.load_run(folder)`` opens a
finished run. Both load their parts on first use: importing ppocli imports neither torch nor hydra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ppocli.version import __version__

if TYPE_CHECKING:
    from ppocli.api import TrainedRun, load_run, train

__all__ = ["TrainedRun", "__version__", "load_run", "train"]


def __getattr__(name: str) -> Any:
    if name in ("TrainedRun", "load_run", "train"):
        from ppocli import api

        return getattr(api, name)
    raise AttributeError(f"module 'ppocli' has no attribute {name!r}")
