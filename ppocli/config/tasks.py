"""What a configuration trains, PPO, a data set's examples or pairs, or a task of the user's own;
which sections belong to that, and how long it takes."""

from operator import attrgetter

from ppocli.config import keys, schema, schema_tasks
from ppocli.text import did_you_mean

DATA_TASKS = ("sft", "reward_model")
"""values of ``task.fn`` that train on a data set; each has a section of its name"""
Updates = schema.PPOConfig | schema_tasks.UpdatesConfig

_SAMPLING = ("reward", "prompts", "ppo", "env", "model.value", "model.reference", "task.kwargs",
             "eval.ref_responses", "tracking.log_rollouts", "tracking.rollout_tokens")
_NOT_READ = {"ppo": ("data", "sft", "reward_model"), "own": ("sft", "reward_model"),
             "sft": (*_SAMPLING, "reward_model"),
             "reward_model": (*_SAMPLING, "sft", "generation", "rollout", "data.train_on")}
_METRICS = {"sft": ("loss",), "reward_model": ("accuracy", "loss")}
"""what ``checkpoint.metric`` may be"""


def task_name(config: schema.TrainConfig) -> str:
    """``ppo``, ``sft``, ``reward_model``, or ``own``: a task of the user's."""
    fn = config.task.fn
    return "ppo" if fn is None else fn if fn in DATA_TASKS else "own"


def updates_section(config: schema.TrainConfig) -> str:
    """The section that says how updates are made: sizes, optimizer, schedule, guards. A task of the
    user's own has PPO's."""
    name = task_name(config)
    return name if name in DATA_TASKS else "ppo"


def updates_of(config: schema.TrainConfig) -> Updates:
    """What stands in that section."""
    found: Updates = getattr(config, updates_section(config))
    return found


def samples_per_step(config: schema.TrainConfig) -> int:
    """Samples of a full step: of a rollout, or of an update on a data set."""
    updates = updates_of(config)
    return updates.num_rollouts if isinstance(updates, schema.PPOConfig) \
        else updates.mini_batch_size


def planned_samples(config: schema.TrainConfig, examples: int | None = None) -> int | None:
    """Samples in the whole run; None where that depends on the number of ``examples``, of PPO:
    prompts, and they aren't given."""
    updates = updates_of(config)
    if isinstance(updates, schema.PPOConfig):
        if updates.epochs is not None:
            return None if examples is None else updates.epochs * examples * updates.n
        return updates.total_episodes or (updates.num_steps or 0) * updates.num_rollouts
    if updates.num_updates is not None:
        return updates.num_updates * updates.mini_batch_size
    return None if examples is None else (updates.epochs or 1) * examples


def planned_steps(config: schema.TrainConfig, examples: int | None = None) -> int | None:
    """Steps in the whole run, the last of which may be smaller; None as above."""
    samples = planned_samples(config, examples)
    return None if samples is None else -(-samples // samples_per_step(config))


def is_read(key: str, task: str) -> bool:
    """Whether a task has any use for a key or a section."""
    return not any(f"{key}.".startswith(f"{part}.") for part in _NOT_READ[task])


def task_rules(config: schema.TrainConfig, handed_in: frozenset[str]) -> keys.Rules:
    """Rules on what belongs to other tasks, and on those that train on a data set."""
    task = task_name(config)
    yield from _strangers(config, task)
    if task in DATA_TASKS:
        yield from _data(config, task, handed_in)
        for name, values in vars(config.generation.eval).items():
            yield (len(keys.several(values)) > 1, f"generation.eval.{name}",
                   f"{values} are several values, which ppocli train alone compares: give one")
        metric, known = config.checkpoint.metric, _METRICS[task]
        yield (metric not in known, "checkpoint.metric", f"{metric} must be {' or '.join(known)} "
               f"with task.fn={task}" + did_you_mean(metric, known))


def _strangers(config: schema.TrainConfig, task: str) -> keys.Rules:
    own = {"ppo": "ppocli train", "own": f"task.fn={config.task.fn}"}.get(task, f"ppocli {task}")
    for name, key in keys.schema_keys().items():
        if not is_read(name, task):
            value = attrgetter(name)(config)
            yield (value != key.default, name,
                   f"{own.replace('_', '-')} has no use for it: leave it out")


def _data(config: schema.TrainConfig, task: str, handed_in: frozenset[str]) -> keys.Rules:
    data, updates = config.data, updates_of(config)
    assert isinstance(updates, schema_tasks.UpdatesConfig)
    yield (data.path is None and "data.path" not in handed_in, "data.path",
           "missing; it must be given: data.path=FILE|FOLDER|HUB-NAME")
    yield (updates.epochs is not None and updates.num_updates is not None,
           f"{task}.epochs, {task}.num_updates", f"{updates.epochs} epochs and "
           f"{updates.num_updates} updates contradict each other, give one of them: "
           f"{task}.epochs=null")
    yield (val_share(data) is not None and not 0 < (val_share(data) or 0) < 1, "data.val",
           f"{data.val} must be a path, or a share between 0 and 1")
    yield (data.val is not None and data.val == data.path, "data.val, data.path", "evaluations "
           "would be made on the training data itself: use data.val=0.05, or another source")
    yield (data.template is not None and "{" not in data.template, "data.template",
           f"{data.template!r} has no placeholder such as {{prompt}}")
    size, limit = updates.micro_batch_size, updates.mini_batch_size
    yield (size is not None and size > limit, f"{task}.micro_batch_size, {task}.mini_batch_size",
           f"micro_batch_size {size} must be at most mini_batch_size {limit}")


def val_share(data: schema_tasks.DataConfig) -> float | None:
    """The share of ``data.val``; None where it is a path, or nothing."""
    try:
        return None if data.val is None else float(data.val)
    except ValueError:
        return None


def val_source(data: schema_tasks.DataConfig) -> str | None:
    """The path of ``data.val``; None where it is a share, or nothing."""
    return data.val if val_share(data) is None else None
