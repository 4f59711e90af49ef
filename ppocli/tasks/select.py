"""Which task a configuration trains."""

from __future__ import annotations

from ppocli.errors import ConfigError
from ppocli.train.task import Task, TaskSetup


def build_task(setup: TaskSetup) -> Task:
    """PPO, or what ``task.fn`` names: called with the setup and ``task.kwargs``.

    Raises:
        RewardError: the import path leads nowhere.
        ConfigError: what it returned is no task.
        PpocliError: whatever the task's own inputs lack.
    """
    if setup.cfg.task.fn is None:
        from ppocli.tasks.ppo.task import build_ppo

        return build_ppo(setup)
    from ppocli.rewards.locate import locate

    found = locate(setup.cfg.task.fn, key="task.fn").target(setup, **setup.cfg.task.kwargs)
    if not isinstance(found, Task):
        raise ConfigError(f"{setup.cfg.task.fn} has returned {type(found).__name__}, which is no "
                          "ppocli.train.task.Task.", where="task.fn",
                          fix="return an instance of a subclass")
    return found
