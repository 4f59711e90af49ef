"""What can be trained, and which of it a configuration trains."""

from importlib import import_module

from ppocli.config import tasks
from ppocli.errors import ConfigError
from ppocli.training.task import Task, TaskSetup
from ppocli.user_code import Kind, Wanted, build

TASK = Kind("function", ConfigError)
_OURS = {"ppo": "ppo.task", "sft": "sft", "reward_model": "reward_model"}
"""modules of this room; each has a function ``build_task``"""


def build_task(setup: TaskSetup) -> Task:
    """The task: one of ours, or the result of calling ``task.fn`` with the setup and
    ``task.kwargs``.

    Raises:
        ConfigError: the import path doesn't exist, or what it names doesn't return a task.
        PpocliError: the task's own inputs are unusable.
    """
    if (ours := _OURS.get(tasks.task_name(setup.cfg))) is not None:
        return import_module(f"ppocli.tasks.{ours}").build_task(setup)
    fn = setup.cfg.task.fn
    assert fn is not None
    made = build(Wanted(fn, "task.fn", TASK), setup, key="task.kwargs",
                 kwargs=setup.cfg.task.kwargs)
    if not isinstance(made, Task):
        raise ConfigError(f"{fn} has returned {type(made).__name__}, which is no "
                          "ppocli.training.task.Task.", where="task.fn",
                          fix="return an instance of a subclass")
    return made
