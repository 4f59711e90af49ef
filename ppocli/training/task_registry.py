"""What can be trained, and which of it a configuration trains."""

from importlib import import_module

from ppocli.config import algorithm, schema, tasks
from ppocli.config.user_classes import build, check_class
from ppocli.config.user_code import CodeSetting, Kind
from ppocli.errors import ConfigError
from ppocli.training.task import Task, TaskSetup

TASK = Kind("function", ConfigError)
SAMPLER = Kind("class", ConfigError)
_OURS = {"ppo": "ppo.ppo_task", "sft": "supervised.sft_task",
         "reward_model": "supervised.reward_model_task"}
"""task -> its module, which has a function ``build_task``"""


def check_own_classes(cfg: schema.TrainConfig) -> None:
    """Import a task and a sampler of the user's own, before anything else is loaded.

    Raises:
        ConfigError: an import path leads nowhere, or a class lacks methods or has them otherwise
            than they are called.
    """
    if tasks.task_name(cfg) not in _OURS:
        check_class(CodeSetting(str(cfg.task.fn), "task.fn", TASK), Task)
    if cfg.rollout.engine not in algorithm.OUR_ENGINES:
        from ppocli.sampling.sampler import Sampler

        check_class(CodeSetting(cfg.rollout.engine, "rollout.engine", SAMPLER), Sampler)


def build_task(setup: TaskSetup) -> Task:
    """The task: one of ours, or the result of calling ``task.fn`` with the setup and
    ``task.kwargs``.

    Raises:
        ConfigError: the import path doesn't exist, or what it names doesn't return a task.
        PpocliError: the task's own inputs are unusable.
    """
    if (ours := _OURS.get(tasks.task_name(setup.cfg))) is not None:
        return import_module(f"ppocli.{ours}").build_task(setup)
    return build(CodeSetting(str(setup.cfg.task.fn), "task.fn", TASK), Task, setup,
                 key="task.kwargs", kwargs=setup.cfg.task.kwargs)
