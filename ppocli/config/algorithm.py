"""Effective values of keys that are null (by the advantage estimator or ZeRO's stage), and rules
between the keys of the algorithm."""

import os
import re
from dataclasses import fields, replace
from typing import Any

from ppocli.config import extras, keys, schema, schema_training, tasks
from ppocli.config.text import did_you_mean, shown
from ppocli.errors import InputError
from ppocli.ppo.advantages import ESTIMATORS, Estimator
from ppocli.ppo.off_policy import CRITERIA, why_no_bound

DECAY_TYPES = ("cosine", "linear", "1-sqrt")
"""values of ``decay_type`` in the schedule warmup_stable_decay"""
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


def algorithm_rules(config: schema.TrainConfig) -> keys.Rules:
    """Rules between the keys of the algorithm."""
    updates, owner = tasks.updates_of(config), tasks.updates_section(config)
    if owner == "ppo":
        yield from _ppo(config)
    yield from _optimizers(config)
    yield from _schedule(f"{owner}.scheduler", updates.scheduler)
    if owner == "ppo" and _set_values(config.ppo.value_scheduler):
        yield from _schedule("ppo.value_scheduler", value_scheduler(config.ppo))


def _ppo(config: schema.TrainConfig) -> keys.Rules:
    if config.ppo.advantage in ESTIMATORS:
        yield from _kl(config)
        yield from _critic(config)
        yield from _groups(config)
        yield from _old_policy(config)
    data = config.ppo.ptx.data
    yield (config.ppo.ptx.coef > 0 and data.path is None, "ppo.ptx.data.path",
           "ppo.ptx.coef mixes examples in, and none are named: give ppo.ptx.data.path=FILE, a "
           "folder or a data set of the Hub")
    yield (data.template is not None and "{" not in data.template, "ppo.ptx.data.template",
           f"{data.template!r} has no placeholder such as {{prompt}}")


def _schedule(where: str, schedule: schema_training.SchedulerConfig) -> keys.Rules:
    name, kwargs = schedule.name, schedule.kwargs
    accepted = schema_training.SCHEDULE_ARGUMENTS.get(name, ())
    for argument, value in kwargs.items():
        wrong = (f"the schedule {name} has {' and '.join(accepted) or 'no arguments'}"
                 + did_you_mean(argument, accepted) if argument not in accepted else
                 f"{value} must be {', '.join(DECAY_TYPES)}"
                 if argument == "decay_type" and value not in DECAY_TYPES else
                 f"{value} must be a number above 0" if argument != "decay_type"
                 and (type(value) not in (int, float) or not value > 0) else "")
        yield (wrong, f"{where}.kwargs.{argument}", wrong)
    yield (name == "warmup_stable_decay" and "num_decay_steps" not in kwargs, f"{where}.kwargs",
           "warmup_stable_decay needs the number of updates at the end in which the rate falls: "
           f"set {where}.kwargs.num_decay_steps=100, say")


def _kl(config: schema.TrainConfig) -> keys.Rules:
    ppo, without_reference = config.ppo, config.model.reference.kind == "none"
    adaptive = ppo.kl_controller == "adaptive"
    yield (adaptive and without_reference, "ppo.kl_controller, model.reference.kind",
           "the adaptive controller steers the KL to a reference, and there is none")
    yield (without_reference and ppo.init_kl_coef > 0, "model.reference.kind, ppo.init_kl_coef",
           f"a KL penalty of {ppo.init_kl_coef:g} needs a reference: set ppo.init_kl_coef=0 or "
           "model.reference.kind=copy")
    yield (adaptive and ppo.init_kl_coef == 0, "ppo.kl_controller, ppo.init_kl_coef",
           "the adaptive controller multiplies the coefficient and can never leave 0: start above "
           "0 or use ppo.kl_controller=fixed")
    yield (full_kl_in_loss(ppo) and config.hardware.zero_stage == 3 and reference_sharded(config),
           "ppo.kl_estimator, hardware.zero_stage", "in the loss the full KL needs the reference's "
           "whole output embedding in every update, and this one lies in parts: use k3+, k2 or k3, "
           "ppo.kl_in=reward, or a copy with model.reference.shard=false")


def _critic(config: schema.TrainConfig) -> keys.Rules:
    ppo = config.ppo
    for name in ("lam_value", "lam_alpha"):
        yield (getattr(ppo, name) is not None and ppo.advantage != "gae",
               f"ppo.{name}, ppo.advantage",
               f"{name} belongs to gae; {ppo.advantage} has no lambda")
    yield (ppo.critic_warmup_steps > 0 and ppo.value_pretrain_steps > 0,
           "ppo.critic_warmup_steps, ppo.value_pretrain_steps",
           "both train the value function alone at first: set one of them to 0")
    yield (ppo.value_pretrain_until is not None and ppo.value_pretrain_steps == 0,
           "ppo.value_pretrain_until, ppo.value_pretrain_steps",
           "nothing is pretrained: say in ppo.value_pretrain_steps how many steps at most")
    steady = ppo.optimizer.name == "sgd" and not (ppo.optimizer.momentum
                                                  or ppo.optimizer.weight_decay)
    for name in ("critic_epochs", "critic_warmup_steps", "value_pretrain_steps"):
        yield (bool(getattr(ppo, name)) and config.hardware.zero_stage > 0 and not steady,
               f"ppo.{name}, hardware.zero_stage",
               "ZeRO's optimizer moves the policy, or ages its moments, in updates of the value "
               f"function alone: set ppo.{name}={'null' if name == 'critic_epochs' else 0}, or "
               "hardware.zero_stage=0")
    if estimator_of(ppo).needs_critic:
        return
    for name in ("value_pretrain_steps", "critic_epochs"):
        yield (getattr(ppo, name), f"ppo.{name}, ppo.advantage",
               f"{ppo.advantage} has no value function to train: leave {name} out")
    yield (ppo.critic_warmup_steps > 0, "ppo.critic_warmup_steps, ppo.advantage",
           f"{ppo.advantage} has no critic to warm up: set ppo.critic_warmup_steps=0")
    yield (config.model.value.kind != "head", "model.value.kind, ppo.advantage",
           f"{ppo.advantage} has no value function to build: leave model.value.kind at head")
    yield (ppo.optimizer.value_lr is not None, "ppo.optimizer.value_lr, ppo.advantage",
           f"{ppo.advantage} has no value head to learn: set ppo.optimizer.value_lr=null")
    for node in ("value_optimizer", "value_scheduler"):
        for name in _set_values(getattr(ppo, node)):
            yield (True, f"ppo.{node}.{name}, ppo.advantage",
                   f"{ppo.advantage} has no value function to train: set ppo.{node}.{name}="
                   + ("{}" if name == "kwargs" else "null"))


def _groups(config: schema.TrainConfig) -> keys.Rules:
    ppo = config.ppo
    grouped = estimator_of(ppo).needs_groups
    yield (grouped and ppo.n < 2, "ppo.advantage, ppo.n",
           f"{ppo.advantage} compares samples of the same prompt: set ppo.n to 2 or more: ppo.n=2")
    yield (grouped and not config.generation.do_sample, "ppo.advantage, generation.do_sample",
           f"{ppo.advantage} compares samples of the same prompt, and without sampling they are "
           "all alike")
    yield (not grouped and ppo.dynamic_sampling is not None, "ppo.dynamic_sampling, ppo.advantage",
           f"{ppo.advantage} doesn't compare the samples of a prompt, and learns from equal scores "
           "too: leave dynamic_sampling out, or use grpo or rloo")
    yield (ppo.epochs is not None and ppo.dynamic_sampling is not None,
           "ppo.epochs, ppo.dynamic_sampling",
           "how many prompts a step takes is not known before, so that passes over them can't be "
           "planned: say how long to train with ppo.total_episodes or ppo.num_steps")
    yield (grouped and ppo.whiten_rewards, "ppo.advantage, ppo.whiten_rewards", f"{ppo.advantage} "
           "normalises the rewards of whole responses itself: set ppo.whiten_rewards=false")
    for name, changed in (("group_std", not ppo.group_std), ("batch_std", ppo.batch_std)):
        yield (changed and ppo.advantage != "grpo", f"ppo.{name}, ppo.advantage",
               f"{name} belongs to grpo; {ppo.advantage} does not divide by a deviation")
    yield (ppo.batch_std and not ppo.group_std, "ppo.batch_std, ppo.group_std",
           "batch_std=true divides by a deviation and group_std=false by none: leave one out")
    yield (ppo.dual_clip is not None and ppo.policy_loss in ("cispo", "dis"),
           "ppo.dual_clip, ppo.policy_loss",
           f"{ppo.policy_loss} bounds its weights itself: leave dual_clip out")
    if ppo.n >= 1:
        odd = ppo.num_rollouts % ppo.n
        yield (odd, "ppo.num_rollouts, ppo.n",
               f"num_rollouts {ppo.num_rollouts} must be a multiple of n {ppo.n}: "
               f"ppo.num_rollouts={ppo.num_rollouts + ppo.n - odd}")
        rest = 0 if odd else (tasks.planned_samples(config) or 0) % ppo.n
        yield (rest, "ppo.total_episodes, ppo.n",
               f"total_episodes {ppo.total_episodes} must be a multiple of n {ppo.n}: "
               f"ppo.total_episodes={(ppo.total_episodes or 0) + ppo.n - rest}")


def _old_policy(config: schema.TrainConfig) -> keys.Rules:
    ppo = config.ppo
    decode, forward = (ppo.logprobs_from == name for name in ("decode", "forward"))
    for name, on in (("level", ppo.importance.level not in (None, "none")),
                     ("reject", ppo.importance.reject)):
        where = f"ppo.importance.{name}"
        yield (on and ppo.old_logprobs == "sampler", f"{where}, ppo.old_logprobs",
               "ratios to the policy that sampled need no correction: leave it out, or set "
               "ppo.old_logprobs=trainer")
        yield (on and decode, f"{where}, ppo.logprobs_from", "what the decoding pass says would be "
               "compared with itself: set ppo.logprobs_from=auto")
    usual = schema_training.ImportanceConfig().cap
    yield (importance_level(config) is None and ppo.importance.cap != usual,
           "ppo.importance.cap, ppo.importance.level",
           "there are no weights to cap: set ppo.importance.level=token or =sequence")
    for name, bound in ppo.importance.reject.items():
        wrong = why_no_bound(name, bound)
        yield (wrong, f"ppo.importance.reject.{name}",
               f"{wrong}{'' if name in CRITERIA else did_you_mean(name, CRITERIA)}")
    yield (decode and ppo.staleness > 0, "ppo.logprobs_from, ppo.staleness",
           "the decoding pass was an earlier policy's: set ppo.logprobs_from=auto; for ratios to "
           "that policy there is ppo.old_logprobs=sampler")
    yield (ppo.staleness > 0 and ppo.dynamic_sampling is not None,
           "ppo.staleness, ppo.dynamic_sampling", "samples wait unscored, "
           "and which prompts to draw more of is known from scores: set one of them to its default")
    yield (forward and ppo.old_logprobs == "sampler", "ppo.logprobs_from, ppo.old_logprobs",
           "a forward pass is the trained policy's: set ppo.logprobs_from=auto or "
           "ppo.old_logprobs=trainer")


def value_function_rules(config: schema.TrainConfig) -> keys.Rules:
    """Rules between the keys of the value function and the reference."""
    value, reference = config.model.value, config.model.reference
    yield (value.path is not None and value.kind != "model"
           and not os.path.isdir(value.path), "model.value.path, model.value.kind",
           f"a value function of kind {value.kind} is made from the policy, or starts as another "
           "PPO run's: name a run's folder, set model.value.kind=model, or leave the path out")
    layers = "model.value.num_layers_unfrozen, model.value.kind"
    yield (value.kind == "branch" and value.num_layers_unfrozen < 1, layers,
           "a branch needs layers of its own: set model.value.num_layers_unfrozen=2, say")
    yield (value.kind == "head" and value.num_layers_unfrozen >= 0, layers,
           "a head has no layers of its own: set model.value.kind=branch or =model")
    yield (value.kind == "head" and value.freeze_attention,
           "model.value.freeze_attention, model.value.kind",
           "a head has no attention of its own: set model.value.kind=branch or =model")
    kind = schema.reference_kind(config.model)
    if reference.device is not None:
        yield (not re.fullmatch(r"cpu|cuda(:\d+)?", reference.device), "model.reference.device",
               f"{reference.device} must be cpu, cuda or cuda:N")
        yield (kind != "copy", "model.reference.device, model.reference.kind",
               f"a reference of kind {kind} lies with the policy: set model.reference.kind=copy, "
               "or leave the device out")
        yield (kl_estimator(config.ppo) == "full", "model.reference.device, ppo.kl_estimator",
               "the full KL compares whole distributions, which must lie on one device: leave the "
               "device out, or use ppo.kl_estimator=k1")
    if reference.sync_every is not None:
        where = "model.reference.sync_every, model."
        yield (kind in ("shared", "adapter") and not config.model.peft, f"{where}reference.kind",
               f"a reference of kind {kind} has no weights of its own that could follow the "
               "policy: set model.reference.kind=copy")
        yield (kind == "none", f"{where}reference.kind", "there is no reference to follow")
        yield (kind != "none" and bool(config.model.peft), f"{where}peft",
               "a copy has no adapter, in which alone such a policy moves: train without "
               "model.peft, or leave sync_every out")
        yield (reference.path is not None, f"{where}reference.path",
               "a reference of another model's weights can't take the policy's: leave one out")
        yield (config.hardware.zero_stage == 3, "model.reference.sync_every, hardware.zero_stage",
               "the policy's weights lie in parts: use zero_stage 2 or less, or leave it out")
    yield (reference.sync_alpha != 1.0 and reference.sync_every is None,
           "model.reference.sync_alpha, model.reference.sync_every",
           "sync_alpha says how far the reference moves every sync_every steps, which is not set")
    yield (reference.path is not None and reference.kind not in ("auto", "copy"),
           "model.reference.path, model.reference.kind", f"a reference of kind {reference.kind} is "
           "made from the policy: set model.reference.kind=copy, or leave the path out")


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


def _optimizers(config: schema.TrainConfig) -> keys.Rules:
    """Rules on optimizers, by their effective settings."""
    zero, owner = config.hardware.zero_stage > 0, tasks.updates_section(config)
    section = tasks.updates_of(config)
    kinds = [optimizer.name for optimizer in optimizers_of(section)]
    for node, kind in zip(("optimizer", "value_optimizer"), kinds, strict=False):
        settings = getattr(section, node)
        yield (settings.betas is not None and len(settings.betas) != 2, f"{owner}.{node}.betas",
               f"{settings.betas} must be two numbers, e.g. [0.9,0.999]")
        for name in ("betas", "eps", "momentum"):
            default = keys.schema_keys()[f"{owner}.{node}.{name}"].default
            elsewhere = (f" (for the value function's {kinds[-1]}: {owner}.value_optimizer.{name})"
                         if len(kinds) > 1 and node == "optimizer"
                         and name in schema_training.OPTIMIZER_KEYS.get(kinds[-1], ()) else "")
            yield (name not in schema_training.OPTIMIZER_KEYS.get(kind, (name,))
                   and getattr(settings, name) != default,
                   f"{owner}.{node}.{name}, {owner}.{node}.name",
                   f"{kind} has no {name}: leave it at {shown(default)}{elsewhere}")
        yield (zero and settings.name in UNSHARDED_OPTIMIZERS,
               f"{owner}.{node}.name, hardware.zero_stage", f"{settings.name} needs whole weights, "
               f"and ZeRO shards its state: use {owner}.{node}.name=adamw or hardware.zero_stage=0")
    yield (zero and kinds[-1] != kinds[0], "ppo.value_optimizer.name, hardware.zero_stage",
           "DeepSpeed drives one optimizer: leave ppo.value_optimizer.name at null, or use "
           "hardware.zero_stage=0")


def optimizers_of(updates: tasks.Updates) -> list[schema_training.OptimizerConfig]:
    """The optimizers of a section: the policy's, and for PPO the value function's."""
    return [updates.optimizer] if isinstance(updates, schema_training.UpdatesConfig) \
        else [updates.optimizer, value_optimizer(updates)]
