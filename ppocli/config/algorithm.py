"""What settings come to: effective values of keys that are null (by the advantage estimator or
ZeRO's stage), the adapter, the reference, lengths and optimizers."""

from dataclasses import fields, replace
from typing import Any

from ppocli.builtin.names import shipped_table
from ppocli.config import extras, schema, schema_training, tasks
from ppocli.errors import InputError
from ppocli.ppo.advantages import ESTIMATORS, Estimator

OUR_ENGINES = ("decode", "vllm")
"""values of ``rollout.engine`` other than import paths"""
_TYPE_KEYS = ("type", "peft_type")
UNSHARDED_OPTIMIZERS = ("adamw_8bit", "adafactor")
"""their state depends on a weight's whole shape, which ZeRO's flat partitions don't have"""


def estimator_of(ppo: schema.PPOConfig) -> Estimator:
    """The advantage estimator's entry in the table of estimators."""
    return ESTIMATORS[ppo.advantage]


def needs_critic(config: schema.TrainConfig) -> bool:
    """Whether a value function is trained."""
    return tasks.task_name(config) not in tasks.DATA_TASKS and estimator_of(config.ppo).needs_critic


def steers_rate(ppo: schema.PPOConfig) -> bool:
    """Whether the learning rate follows ``ppo.step_kl``: the first update of a step measures
    nothing yet, so that there must be two."""
    return ppo.step_kl is not None and (
        ppo.ppo_epochs > 1 or ppo.num_rollouts > ppo.mini_batch_size)


def kl_in(ppo: schema.PPOConfig) -> str:
    """``reward`` or ``loss``."""
    return ppo.kl_in or estimator_of(ppo).kl_in


def kl_estimator(ppo: schema.PPOConfig) -> str:
    """The name of the KL estimate. In the reward: k1. In the loss: k3+, whose gradient is that of
    the KL, or k3, GRPO's, for estimators without a critic; k1 would have no gradient on average."""
    in_loss = "k3+" if estimator_of(ppo).needs_critic else "k3"
    return ppo.kl_estimator or ("k1" if kl_in(ppo) == "reward" else in_loss)


def full_kl_in_loss(ppo: schema.PPOConfig) -> bool:
    """Whether the KL over the whole vocabulary is a term of the loss."""
    return kl_in(ppo) == "loss" and kl_estimator(ppo) == "full"


def wants_entropy(ppo: schema.PPOConfig) -> bool:
    """Whether the policy's entropy is a term of the loss, now or later in the run."""
    return max(ppo.ent_coef, ppo.ent_coef_end or 0.0) > 0


def whitens_advantages(ppo: schema.PPOConfig) -> bool:
    """Whether advantages are centred and scaled over the whole rollout."""
    return estimator_of(ppo).whitened if ppo.whiten_advantages is None else ppo.whiten_advantages


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
    if optimizer.name == "adamw_8bit" and not extras.installed("bitsandbytes"):
        raise InputError("The 8-bit AdamW comes from bitsandbytes, which is not installed.",
                         where=f"{section}.optimizer.name=adamw_8bit",
                         fix=f"{extras.pip_line('bitsandbytes')}, or use adamw",
                         code="not-installed")


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


def optimizers_of(updates: tasks.Updates) -> list[schema_training.OptimizerConfig]:
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
