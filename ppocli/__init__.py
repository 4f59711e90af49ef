"""ppocli fine-tunes language models with PPO and any Python reward function."""

__version__ = "0.1.0"
