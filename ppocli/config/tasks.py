"""What settings come to: the task, its length and sections, and the figures that are shown;
effective values of keys that are null (by the advantage estimator or ZeRO's stage), the adapter,
the reference, and optimizers."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ppocli.builtin.names import shipped_table
from ppocli.config import import_guard, schema, schema_training
from ppocli.ppo.advantages import ESTIMATORS

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

OUR_ENGINES = ("decode", "vllm")
"""values of ``rollout.engine`` other than import paths"""
_TYPE_KEYS = ("type", "peft_type")
UNSHARDED_OPTIMIZERS = ("adamw_8bit", "adafactor")
"""their state depends on a weight's whole shape, which ZeRO's flat partitions don't have"""


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
    fn = config.task.fn
    updates: Updates = getattr(config, fn if fn in DATA_TASKS else "ppo")
    return updates


def rows_per_pass(updates: Updates) -> int:
    """Maximum number of samples in a forward and backward pass."""
    return updates.micro_batch_size or updates.mini_batch_size


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


def needs_critic(config: schema.TrainConfig) -> bool:
    """Whether a value function is trained."""
    return task_name(config) not in DATA_TASKS and ESTIMATORS[config.ppo.advantage].needs_critic


def steers_rate(ppo: schema.PPOConfig) -> bool:
    """Whether the learning rate follows ``ppo.step_kl``: the first update of a step measures
    nothing yet, so that there must be two."""
    return ppo.step_kl is not None and (
        ppo.ppo_epochs > 1 or ppo.num_rollouts > ppo.mini_batch_size)


def kl_term(ppo: schema.PPOConfig) -> tuple[str, str]:
    """Where the KL is charged, ``reward`` or ``loss``, and the name of its estimate. With a critic,
    estimates whose gradient is no KL's (k1, abs), or that need the whole reference in the loss
    (full), go into the reward. The default is k1 there; in the loss, where k1 has no gradient on
    average, it is k3+, whose gradient is the KL's, or k3, GRPO's, without a critic."""
    advantage = ESTIMATORS[ppo.advantage]
    in_reward = advantage.needs_critic and ppo.kl_estimator in ("k1", "abs", "full")
    place = ppo.kl_in or ("reward" if in_reward else advantage.kl_in)
    in_loss = "k3+" if advantage.needs_critic else "k3"
    return place, ppo.kl_estimator or ("k1" if place == "reward" else in_loss)


def kl_coef(ppo: schema.PPOConfig) -> float:
    """The KL coefficient at the start. As a term of the loss it stands beside advantages, which
    have a deviation of 1 where they are whitened; otherwise it is nats against units of reward."""
    if ppo.init_kl_coef is not None:
        return ppo.init_kl_coef
    return 0.2 if kl_term(ppo)[0] == "loss" and whitens_advantages(ppo) else 0.05


def whitens_advantages(ppo: schema.PPOConfig) -> bool:
    """Whether advantages are centred and scaled over the whole rollout."""
    chosen = ppo.whiten_advantages
    return ESTIMATORS[ppo.advantage].whitened if chosen is None else chosen


def decoding_scores(config: schema.TrainConfig) -> bool:
    """Whether old logprobs and values come from the decoding pass: the effective
    ``ppo.logprobs_from``. They can't if the samples come from an earlier policy or are corrected
    for the sampling policy."""
    choice = config.ppo.logprobs_from
    if config.ppo.staleness or corrects(config):
        return False
    return exact_when_decoded(config) if choice == "auto" else choice == "decode"


def importance_level(config: schema.TrainConfig) -> str | None:
    """The effective ``ppo.importance.level``; None without weights."""
    level = config.ppo.importance.level or (
        "token" if config.rollout.engine == "vllm" and config.ppo.old_logprobs == "trainer"
        else "none")
    return None if level == "none" else level


def corrects(config: schema.TrainConfig) -> bool:
    """Whether the sampling policy and the trained one are compared, token by token."""
    return importance_level(config) is not None or bool(config.ppo.importance.reject)


def allows_gap(config: schema.TrainConfig) -> bool:
    """Whether samples may come from another policy than the trained one: weights correct for that,
    or ratios are to the policy that sampled."""
    return corrects(config) or config.ppo.old_logprobs == "sampler"


def exact_when_decoded(config: schema.TrainConfig) -> bool:
    """Whether decoding and a forward pass give a token the same logprob, up to the last digits of
    fp32."""
    return (config.hardware.precision == "fp32" and config.model.quantization is None
            and not (config.model.peft and config.model.dtype == "bf16"))


def reference_sharded(cfg: schema.TrainConfig) -> bool:
    """Whether each process of a training holds only its part of the reference."""
    reference = cfg.model.reference
    if reference.shard is None:
        return cfg.hardware.zero_stage == 3 and reference.device is None
    return reference.shard


def whole_while_acting(cfg: schema.TrainConfig) -> bool:
    """Whether each process holds all weights of the policy during rollouts and evaluations."""
    return cfg.hardware.zero_stage < 3 or cfg.hardware.gather_for_generation


def require_optimizer(optimizer: schema_training.OptimizerConfig, section: str = "ppo") -> None:
    """Raise an error if the package of an optimizer isn't installed.

    Raises:
        InputError: bitsandbytes is missing.
    """
    if optimizer.name == "adamw_8bit":
        import_guard.require("bitsandbytes", "The 8-bit AdamW",
                             f"{section}.optimizer.name=adamw_8bit")


def value_optimizer(ppo: schema.PPOConfig) -> schema_training.PPOOptimizerConfig:
    """The value function's optimizer: the policy's, with its own settings on top."""
    lr = ppo.optimizer.lr if ppo.optimizer.value_lr is None else ppo.optimizer.value_lr
    return replace(ppo.optimizer, lr=lr, value_lr=None, **_set_values(ppo.value_optimizer))


def value_scheduler(ppo: schema.PPOConfig) -> schema_training.SchedulerConfig:
    """The value function's schedule: the policy's, with its own settings on top."""
    overrides = _set_values(ppo.value_scheduler)
    same = overrides.get("name", ppo.scheduler.name) == ppo.scheduler.name
    kwargs = {**(ppo.scheduler.kwargs if same else {}), **overrides.pop("kwargs", {})}
    return replace(ppo.scheduler, **overrides, kwargs=kwargs)


def _set_values(section: Any) -> dict[str, Any]:
    return {f.name: value for f in fields(section)
            if (value := getattr(section, f.name)) not in (None, {})}


def optimizers_of(updates: Updates) -> list[schema_training.OptimizerConfig]:
    """The optimizers of a section: the policy's, and for PPO the value function's."""
    return [updates.optimizer] if isinstance(updates, schema_training.UpdatesConfig) \
        else [updates.optimizer, value_optimizer(updates)]


def longest_rollout(config: schema.TrainConfig) -> int:
    """Maximum number of tokens after a prompt in rollouts: of a response, or of an episode."""
    return config.generation.max_new_tokens if config.env.fn is None else config.env.max_tokens


def longest_response(config: schema.TrainConfig) -> int:
    """As :func:`longest_rollout`, for evaluations too."""
    evaluated = 0 if config.env.fn else config.generation.eval.max_new_tokens or 0
    return max(longest_rollout(config), evaluated)


def adapter_kind(model: schema.ModelConfig) -> str | None:
    """``lora``; None without an adapter, or for an unknown kind."""
    names = [str(model.peft[key]).lower() for key in _TYPE_KEYS
             if model.peft and model.peft.get(key) is not None]
    return "lora" if names[:1] == ["lora"] else None


def adapter_settings(model: schema.ModelConfig) -> dict[str, Any]:
    """The fields for PEFT's configuration, without its class."""
    return {name: value for name, value in (model.peft or {}).items()
            if name not in (*_TYPE_KEYS, "task_type")}


def peft_fields() -> list[str]:
    """Fields of PEFT's ``LoraConfig`` that a user may set."""
    fields: list[str] = shipped_table("library_keys.yaml")["peft"]["lora"]
    return fields


def reference_kind(model: schema.ModelConfig) -> str:
    """``copy``, ``shared``, ``adapter`` or ``none``: what ``model.reference.kind`` comes to."""
    if model.reference.kind != "auto":
        return model.reference.kind
    if model.reference.path is not None:
        return "copy"
    if model.peft:
        return "adapter"
    return "shared" if model.num_layers_unfrozen >= 0 else "copy"


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
"""by :func:`task_name`"""


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
