"""The task of a configuration: PPO, training on examples or pairs, or a task of the user's; its
sections, its length, and the figures that are shown."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppocli.config import schema, schema_training

DATA_TASKS = ("sft", "reward_model")
"""values of ``task.fn`` that train on a data set; each has a section of its name"""
Updates = schema.PPOConfig | schema_training.UpdatesConfig

_SAMPLING = ("reward", "prompts", "ppo", "env", "model.value", "model.reference", "task.kwargs",
             "tracking.log_rollouts", "tracking.rollout_tokens")
_NOT_READ = {"ppo": ("data", "sft", "reward_model"), "own": ("sft", "reward_model"),
             "sft": (*_SAMPLING, "reward_model"),
             "reward_model": (*_SAMPLING, "sft", "generation", "rollout", "data.train_on")}
METRICS = {"ppo": ("reward_mean",), "own": (), "sft": ("loss",),
           "reward_model": ("accuracy", "loss")}
"""by task, values of ``checkpoint.metric``; none: any"""


def task_name(config: schema.TrainConfig) -> str:
    """``ppo``, ``sft``, ``reward_model``, or ``own`` for a task of the user's."""
    fn = config.task.fn
    return "ppo" if fn is None else fn if fn in DATA_TASKS else "own"


def updates_section(config: schema.TrainConfig) -> str:
    """The section of updates (sizes, optimizer, schedule, guards); PPO's for a user's task."""
    name = task_name(config)
    return name if name in DATA_TASKS else "ppo"


def updates_of(config: schema.TrainConfig) -> Updates:
    """The content of :func:`updates_section`."""
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
    """Steps of the whole run, if their number is configured; None if the number of samples is."""
    updates = updates_of(config)
    return updates.num_steps if isinstance(updates, schema.PPOConfig) else updates.num_updates


def planned_samples(config: schema.TrainConfig, examples: int | None = None) -> int | None:
    """Samples of the whole run; None if it depends on the number of ``examples`` (for PPO: of
    prompts) and that isn't given."""
    updates = updates_of(config)
    if isinstance(updates, schema.PPOConfig):
        if updates.epochs is not None:
            return None if examples is None else updates.epochs * examples * updates.n
        return updates.total_episodes or (updates.num_steps or 0) * updates.num_rollouts
    if updates.num_updates is not None:
        return updates.num_updates * updates.mini_batch_size
    return None if examples is None else (updates.epochs or 1) * examples


def planned_steps(config: schema.TrainConfig, examples: int | None = None) -> int | None:
    """Steps of the whole run, the last of which may be smaller; None as for
    :func:`planned_samples`."""
    samples = planned_samples(config, examples)
    return None if samples is None else -(-samples // samples_per_step(config))


def total_steps(config: schema.TrainConfig, step: int, episodes: int,
                examples: int | None = None) -> int:
    """Steps of the whole run, after ``step`` steps with ``episodes`` samples. The remaining ones
    have the configured size, which may differ from that before a resume."""
    if (steps := steps_asked(config)) is not None:
        return max(steps, step)
    left = max((planned_samples(config, examples) or 0) - episodes, 0)
    return step + -(-left // samples_per_step(config))


def is_read(key: str, task: str) -> bool:
    """Whether a task reads a key or a section."""
    return not any(f"{key}.".startswith(f"{part}.") for part in _NOT_READ[task])


def val_share(data: schema_training.DataConfig) -> float | None:
    """The share in ``data.val``; None if it is a path or null."""
    try:
        return None if data.val is None else float(data.val)
    except ValueError:
        return None


def val_source(data: schema_training.DataConfig) -> str | None:
    """The path in ``data.val``; None if it is a share or null."""
    return data.val if val_share(data) is None else None


# Which figures are shown of a run -----------------------------------------------------------------

Named = tuple[tuple[str, str], ...]
"""(label, name of the figure), the most important first"""


@dataclass(frozen=True, slots=True)
class Kind:
    """The names and figures with which runs of a task are shown."""

    doing: str
    """name of the task in texts"""
    evaluations: Named
    """figures of an evaluation, without ``eval/``"""
    lower_is_better: frozenset[str] = frozenset()
    """figures of evaluations that are better if lower"""

    @property
    def names(self) -> list[str]:
        """Names of the figures of evaluations."""
        return [name for _, name in self.evaluations]


KINDS = {
    "ppo": Kind("PPO training", (("reward", "reward_mean"), ("KL", "kl_mean"))),
    "sft": Kind("supervised fine-tuning", (("loss", "loss"), ("perplexity", "perplexity")),
                frozenset({"loss", "perplexity"})),
    "reward_model": Kind("reward-model training", (("accuracy", "accuracy"), ("loss", "loss")),
                         frozenset({"loss"}))}
"""by :func:`ppocli.config.task_name`"""


def kind_of(config: schema.TrainConfig, lower_is_better: frozenset[str] | None = None) -> Kind:
    """The kind of a run; the figure of a task of the user's is ``checkpoint.metric``.

    Args:
        lower_is_better: the figures of such a task that are better if lower.
    """
    metric = config.checkpoint.metric
    return KINDS.get(task_name(config)) or Kind(
        "training", ((metric.rpartition("/")[2], metric),), lower_is_better or frozenset())


def curves_of(row: Mapping[str, Any]) -> Named:
    """The figures of a row of metrics.jsonl that are followed from step to step; empty if the row
    is no step's."""
    if "reward/mean" in row:
        return ("reward", "reward/mean"), ("KL", "objective/kl")
    loss, norm = next((name for name in row if name.startswith("loss/")), None), "policy/grad_norm"
    if loss is None:
        return ()
    return (("loss", loss), ("norm", norm)) if norm in row else (("loss", loss),)


def evaluation_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """(label, name in the row) of the most important figure of an evaluation; None without one."""
    preferred = ("reward_mean", "accuracy", "loss")
    name = next((f"eval/{name}" for name in preferred if f"eval/{name}" in row), None) or next(
        (name for name in row if name.startswith("eval/")), None)
    return None if name is None else (
        "" if name == "eval/reward_mean" else name.rpartition("/")[2], name)
