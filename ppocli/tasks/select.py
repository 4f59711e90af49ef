"""Which task a configuration trains."""

from ppocli.errors import ConfigError
from ppocli.training.task import Task, TaskSetup
from ppocli.user_code import Kind, Wanted, build

TASK = Kind("function", ConfigError)


def build_task(setup: TaskSetup) -> Task:
    """The task: PPO, or the result of calling ``task.fn`` with the setup and ``task.kwargs``.

    Raises:
        ConfigError: the import path doesn't exist, or what it names doesn't return a task.
        PpocliError: the task's own inputs are unusable.
    """
    if setup.cfg.task.fn is None:
        from ppocli.tasks.ppo.task import build_ppo

        return build_ppo(setup)
    found = build(Wanted(setup.cfg.task.fn, "task.fn", TASK), setup, key="task.kwargs",
                  kwargs=setup.cfg.task.kwargs)
    if not isinstance(found, Task):
        raise ConfigError(f"{setup.cfg.task.fn} has returned {type(found).__name__}, which is no "
                          "ppocli.training.task.Task.", where="task.fn",
                          fix="return an instance of a subclass")
    return found
