"""Which figures are shown of a run: they depend on what it trains."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppocli.config import schema, tasks

Named = tuple[tuple[str, str], ...]
"""(label, name of the figure), the most telling first"""


@dataclass(frozen=True, slots=True)
class Kind:
    """How the runs that train one thing are shown."""

    doing: str
    """in words"""
    steps: Named
    """figures of a step, by their names in metrics.jsonl"""
    evaluations: Named
    """figures of an evaluation, by their names without ``eval/``"""
    lower_is_better: frozenset[str] = frozenset()
    """figures of evaluations of which less is better"""

    @property
    def names(self) -> list[str]:
        """Names of its evaluations' figures."""
        return [name for _, name in self.evaluations]


_UPDATES = ("loss", "loss/total"), ("norm", "policy/grad_norm")
KINDS = {
    "ppo": Kind("PPO training", (("reward", "reward/mean"), ("KL", "objective/kl")),
                (("reward", "reward_mean"), ("KL", "kl_mean"))),
    "sft": Kind("supervised fine-tuning", _UPDATES,
                (("loss", "loss"), ("perplexity", "perplexity")),
                frozenset({"loss", "perplexity"})),
    "reward_model": Kind("reward-model training", _UPDATES,
                         (("accuracy", "accuracy"), ("loss", "loss")), frozenset({"loss"}))}
"""by :func:`ppocli.config.tasks.task_name`"""


def kind_of(config: schema.TrainConfig, lower_is_better: frozenset[str] | None = None) -> Kind:
    """The kind of a run; of a task of the user's own, ``checkpoint.metric`` is what counts.

    Args:
        lower_is_better: what such a task says of its figures.
    """
    metric = config.checkpoint.metric
    return KINDS.get(tasks.task_name(config)) or Kind(
        "training", _UPDATES, ((metric.rpartition("/")[2], metric),),
        lower_is_better or frozenset())


def curves_of(row: Mapping[str, Any]) -> Named:
    """The figures that are followed from step to step, as a row of metrics.jsonl has them; none if
    it is of no step."""
    if "reward/mean" in row:
        return KINDS["ppo"].steps
    loss = next((name for name in row if name.startswith("loss/")), None)
    return () if loss is None else (
        ("loss", loss), *(norm for norm in _UPDATES[1:] if norm[1] in row))


def evaluation_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """(label, name in the row) of the figure that an evaluation is told by; None without one."""
    known = ("reward_mean", "accuracy", "loss")
    name = next((f"eval/{name}" for name in known if f"eval/{name}" in row), None) or next(
        (name for name in row if name.startswith("eval/")), None)
    return None if name is None else (
        "" if name == "eval/reward_mean" else name.rpartition("/")[2], name)
