"""What a configuration trains, PPO, a data set's examples or pairs, or a task of the user's own;
which sections belong to that, how long it takes, and which figures are shown of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ppocli.config import keys, schema, schema_training
from ppocli.text import did_you_mean

DATA_TASKS = ("sft", "reward_model")
"""values of ``task.fn`` that train on a data set; each has a section of its name"""
Updates = schema.PPOConfig | schema_training.UpdatesConfig

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
    updates: Updates = getattr(config, updates_section(config))
    return updates


def rows_per_pass(updates: Updates) -> int:
    """Maximum number of samples in a forward and backward pass."""
    return updates.micro_batch_size or updates.mini_batch_size


def updates_of_samples(updates: Updates, samples: int) -> int:
    """Optimizer updates that are made from so many samples of one step."""
    passes = updates.ppo_epochs + (updates.critic_epochs or 0) \
        if isinstance(updates, schema.PPOConfig) else 1
    return passes * -(-samples // updates.mini_batch_size)


def samples_per_step(config: schema.TrainConfig) -> int:
    """Samples of a full step: of a rollout, or of an update on a data set."""
    updates = updates_of(config)
    return updates.num_rollouts if isinstance(updates, schema.PPOConfig) \
        else updates.mini_batch_size


def steps_asked(config: schema.TrainConfig) -> int | None:
    """Steps in the whole run where it is their number that is given; None where it is of samples.
    """
    updates = updates_of(config)
    return updates.num_steps if isinstance(updates, schema.PPOConfig) else updates.num_updates


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


def total_steps(config: schema.TrainConfig, step: int, episodes: int,
                examples: int | None = None) -> int:
    """Steps in the whole run, of which ``step`` have used ``episodes`` samples; those still to come
    are of as many as the configuration says, which may have been another number before a resume."""
    if (steps := steps_asked(config)) is not None:
        return max(steps, step)
    left = max((planned_samples(config, examples) or 0) - episodes, 0)
    return step + -(-left // samples_per_step(config))


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
        metric, metrics = config.checkpoint.metric, _METRICS[task]
        yield (metric not in metrics, "checkpoint.metric", f"{metric} must be "
               f"{' or '.join(metrics)} with task.fn={task}" + did_you_mean(metric, metrics))


def _strangers(config: schema.TrainConfig, task: str) -> keys.Rules:
    command = {"ppo": "ppocli train", "own": f"task.fn={config.task.fn}"}.get(
        task, f"ppocli {task.replace('_', '-')}")
    for name, key in keys.schema_keys().items():
        if not is_read(name, task):
            value = attrgetter(name)(config)
            yield (value != key.default, name,
                   f"{command} has no use for it: leave it out")


def _data(config: schema.TrainConfig, task: str, handed_in: frozenset[str]) -> keys.Rules:
    data, updates = config.data, updates_of(config)
    assert isinstance(updates, schema_training.UpdatesConfig)
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


def val_share(data: schema_training.DataConfig) -> float | None:
    """The share of ``data.val``; None where it is a path, or nothing."""
    try:
        return None if data.val is None else float(data.val)
    except ValueError:
        return None


def val_source(data: schema_training.DataConfig) -> str | None:
    """The path of ``data.val``; None where it is a share, or nothing."""
    return data.val if val_share(data) is None else None


# Which figures are shown of a run -----------------------------------------------------------------

Named = tuple[tuple[str, str], ...]
"""(label, name of the figure), the most telling first"""


@dataclass(frozen=True, slots=True)
class Kind:
    """How the runs that train one thing are shown."""

    doing: str
    """in words"""
    evaluations: Named
    """figures of an evaluation, by their names without ``eval/``"""
    lower_is_better: frozenset[str] = frozenset()
    """figures of evaluations of which less is better"""

    @property
    def names(self) -> list[str]:
        """Names of its evaluations' figures."""
        return [name for _, name in self.evaluations]


KINDS = {
    "ppo": Kind("PPO training", (("reward", "reward_mean"), ("KL", "kl_mean"))),
    "sft": Kind("supervised fine-tuning", (("loss", "loss"), ("perplexity", "perplexity")),
                frozenset({"loss", "perplexity"})),
    "reward_model": Kind("reward-model training", (("accuracy", "accuracy"), ("loss", "loss")),
                         frozenset({"loss"}))}
"""by :func:`ppocli.config.task_name`"""


def kind_of(config: schema.TrainConfig, lower_is_better: frozenset[str] | None = None) -> Kind:
    """The kind of a run; of a task of the user's own, ``checkpoint.metric`` is what counts.

    Args:
        lower_is_better: what such a task says of its figures.
    """
    metric = config.checkpoint.metric
    return KINDS.get(task_name(config)) or Kind(
        "training", ((metric.rpartition("/")[2], metric),), lower_is_better or frozenset())


def curves_of(row: Mapping[str, Any]) -> Named:
    """The figures that are followed from step to step, as a row of metrics.jsonl has them; none if
    it is of no step."""
    if "reward/mean" in row:
        return ("reward", "reward/mean"), ("KL", "objective/kl")
    loss, norm = next((name for name in row if name.startswith("loss/")), None), "policy/grad_norm"
    if loss is None:
        return ()
    return (("loss", loss), ("norm", norm)) if norm in row else (("loss", loss),)


def evaluation_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """(label, name in the row) of the figure that an evaluation is told by; None without one."""
    preferred = ("reward_mean", "accuracy", "loss")
    name = next((f"eval/{name}" for name in preferred if f"eval/{name}" in row), None) or next(
        (name for name in row if name.startswith("eval/")), None)
    return None if name is None else (
        "" if name == "eval/reward_mean" else name.rpartition("/")[2], name)
