"""Rules between keys: tables of keys that go together, and what no table can say."""

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from ppocli.config import import_guard, schema, schema_training, secrets, tasks
from ppocli.config.keys import is_import_path, schema_keys
from ppocli.config.text import cut, did_you_mean, shown
from ppocli.ppo.advantages import CRITERIA, ESTIMATORS, why_no_bound

Rules = Iterator[tuple[object, str, str]]
"""whether a rule is broken, its keys (``a, b``), and the message if it is"""

LENGTHS = {"ppo": ("total_episodes", "epochs", "num_steps"),
           **dict.fromkeys(tasks.DATA_TASKS, ("epochs", "num_updates"))}
"""section -> the keys that set the length of a run, one of which is set"""
SIZES = (("ppo.num_rollouts", "ppo.mini_batch_size"),
         *((f"{section}.mini_batch_size", f"{section}.micro_batch_size") for section in LENGTHS))
"""(size, another one that is cut from it)"""
_CRITICS = tuple(name for name, estimator in ESTIMATORS.items() if estimator.needs_critic)
_GROUPED = tuple(name for name, estimator in ESTIMATORS.items() if estimator.needs_groups)
_IMPORTANCE = ("ppo.importance.level", "ppo.importance.reject")
# ZeRO's optimizer would move the policy in updates of the value function alone
_OF_VALUES_ALONE = ("ppo.value_pretrain_steps", "ppo.critic_epochs", "ppo.critic_warmup_steps")

# a key, values of it, and the keys that go with these alone (no values: with any)
_ONLY_WITH: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...] = (
    ("task.fn", (), ("task.kwargs",)), ("reward.fn", (), ("reward.kwargs",)),
    ("prompts.chat", (), ("prompts.tools",)), ("reward.clip", (), ("reward.clip_first",)),
    ("reward.scale", ("ref",), ("reward.ref_mean", "reward.ref_std")),
    ("reward.scale", ("running", "ref"), ("reward.center",)),
    ("reward.min_response_penalty", (), ("reward.min_response_length",)),
    ("reward.min_response_length", (), ("reward.min_response_penalty",)),
    ("reward.overlong_buffer", (), ("reward.overlong_penalty",)),
    ("tracking.log_rollouts", (), ("tracking.rollout_tokens",)),
    ("model.reference.kind", ("auto", "copy"), ("model.reference.path",)),
    ("model.reference.sync_every", (), ("model.reference.sync_alpha",)),
    ("model.value.kind", ("branch", "model"),
     ("model.value.num_layers_unfrozen", "model.value.freeze_attention")),
    ("ppo.advantage", ("gae",), ("ppo.lam_value", "ppo.lam_alpha", "ppo.group_baseline")),
    ("ppo.advantage", ("grpo",), ("ppo.group_std", "ppo.batch_std")),
    ("ppo.advantage", _GROUPED, ("ppo.dynamic_sampling",)),
    ("ppo.advantage", tuple(name for name in ESTIMATORS if name not in _GROUPED),
     ("ppo.whiten_rewards",)),
    ("ppo.advantage", _CRITICS, (
        "ppo.optimizer.value_lr", "model.value.kind", *_OF_VALUES_ALONE,
        *(key for key in schema_keys() if key.startswith("ppo.value_") and key.count(".") == 2))),
    ("ppo.group_std", (), ("ppo.batch_std",)),
    ("ppo.policy_loss", ("clip", "gspo"), ("ppo.dual_clip",)),
    ("ppo.value_pretrain_steps", (), ("ppo.value_pretrain_until",)),
    ("ppo.logprobs_from", ("auto", "forward"), (*_IMPORTANCE, "ppo.staleness")),
    ("ppo.logprobs_from", ("auto", "decode"), ("ppo.old_logprobs",)),
    ("ppo.kl_estimator", (None, "k1", "abs", "k2", "k3", "k3+"), ("model.reference.device",)),
    ("hardware.zero_stage", (0,), ("hardware.weights", *_OF_VALUES_ALONE)),
    ("hardware.zero_stage", (0, 1, 2), ("model.reference.sync_every", "model.quantization")),
    ("hardware.zero_stage", (1, 2, 3), ("hardware.offload_optimizer", "hardware.deepspeed_config")),
    ("hardware.zero_stage", (3,), ("model.reference.shard", "hardware.offload_param",
                                   "hardware.gather_for_generation")),
    ("model.peft", (), ("model.quantization",)),
    ("hardware.precision", ("bf16",), ("hardware.weights",)),
    ("rollout.engine", ("vllm",), tuple(
        key for key in schema_keys() if key.startswith("rollout.")
        and key not in ("rollout.engine", "rollout.kwargs"))),
    ("rollout.python", (), ("rollout.launch",)), ("hardware.num_nodes", (1,), ("rollout.launch",)),
    ("env.fn", (), ("ppo.gae_unit", *(key for key in schema_keys() if key.startswith("env.")
                                      and key not in ("env.fn", "env.tools")))),
    ("env.fn", ("tools",), ("env.tools",)))
# a key, and those that it excludes
_EXCLUDE = (
    ("prompts.path", ("prompts.items", "prompts.mix")), ("prompts.mix", ("prompts.items",)),
    ("prompts.eval.path", ("prompts.eval.items",)),
    # it would cut off the end of the chat template
    ("prompts.length_sampler", ("prompts.chat", "prompts.eval.chat")),
    ("prompts.eval.length_sampler", ("prompts.eval.chat",)),
    ("reward.fn", ("reward.fns",)), ("reward.step_separator", ("reward.step_fn",)),
    ("env.fn", ("ppo.staleness", "reward.step_separator", "reward.step_fn",
                "generation.length_sampler", "prompts.tools", "prompts.eval.tools")),
    ("rollout.ahead", ("ppo.staleness", "rollout.sleep")),
    # which prompts a step takes is known from scores only
    ("ppo.dynamic_sampling", ("rollout.ahead", "ppo.staleness", "ppo.epochs")),
    ("ppo.critic_warmup_steps", ("ppo.value_pretrain_steps",)),
    ("ppo.old_logprobs", _IMPORTANCE),
    ("model.peft", ("hardware.weights", "model.num_layers_unfrozen", "model.reference.sync_every")),
    ("model.reference.path", ("model.reference.sync_every",)),
    ("model.reference.device", ("model.reference.shard",)))


def rules(config: schema.TrainConfig, handed_in: frozenset[str]) -> Rules:
    """All rules that apply to a configuration's task; ``handed_in`` as for
    :func:`ppocli.config.problems.find_problems`."""
    task = tasks.task_name(config)
    yield from _tables(config, task, handed_in)
    yield from _data(config, task, handed_in)
    if task == "ppo":
        yield from _reward(config, handed_in)
        yield from _value_and_reference(config)
    if task in ("ppo", "own") and config.ppo.advantage in ESTIMATORS:
        yield from _algorithm(config)
    yield from _engine(config)
    yield from _optimizers(config)
    yield from _schedules(config)
    yield from _adapter(config)
    yield from _run(config)


def _is_off(value: Any) -> bool:
    """Whether a value means nothing: null, false, 0 or empty, but not 0.0."""
    return not value and not isinstance(value, float)


def _tables(config: schema.TrainConfig, task: str, handed_in: frozenset[str]) -> Rules:
    """The rules of the tables, and keys that the task doesn't read."""
    command = {"ppo": "ppocli train", "own": f"task.fn={config.task.fn}"}.get(
        task, f"ppocli {task.replace('_', '-')}")
    values = {key: attrgetter(key)(config) for key in schema_keys()}
    # a task of the user's reads rewards and environments in its own way
    set_keys = {name for name, key in schema_keys().items() if values[name] != key.default and not (
        _is_off(values[name]) and _is_off(key.default)) and tasks.is_read(name, task) and not (
        task == "own" and name.startswith(("reward.", "env.")))}
    for key in schema_keys():
        yield (not tasks.is_read(key, task) and values[key] != schema_keys()[key].default, key,
               f"{command} has no use for it: leave it out")
    for other, fitting, keys in _ONLY_WITH:
        fits = values[other] in fitting if fitting else not _is_off(values[other])
        for key in keys:
            yield (key in set_keys and not fits and other not in handed_in, f"{key}, {other}",
                   f"goes with {other}={' or '.join(map(shown, fitting))}, not "
                   f"{shown(values[other])}: leave {key} out" if fitting else
                   f"needs {other}, which is not given")
    for other, keys in _EXCLUDE:
        for key in keys:
            yield ({key, other} <= set_keys, f"{other}, {key}",
                   "these exclude each other: leave one of them out")
    longest = "generation.max_new_tokens" if config.env.fn is None else "env.max_tokens"
    for most, key in (*SIZES, ("generation.max_new_tokens", "generation.min_new_tokens"),
                      (longest, "reward.min_response_length"), (longest, "reward.overlong_buffer"),
                      (longest, "generation.max_new_tokens")):
        yield (tasks.is_read(key, task) and (values[key] or 0) > values[most], f"{key}, {most}",
               f"{key.rpartition('.')[2]} {values[key]} must be at most "
               f"{most.rpartition('.')[2]} {values[most]}: {key}={values[most]}")


def _data(config: schema.TrainConfig, task: str, handed_in: frozenset[str]) -> Rules:
    """Rules on the length of a run, its data, and what evaluations measure."""
    section, data, generation = tasks.updates_section(config), config.data, config.generation
    lengths = {name: value for name in LENGTHS[section]
               if (value := getattr(tasks.updates_of(config), name)) is not None}
    counts = [f"{value} {name.rpartition('_')[2]}" for name, value in lengths.items()]
    yield (section == "ppo" and not lengths, "ppo.total_episodes, ppo.num_steps",
           "say how long to train: give one of them, or ppo.epochs")
    yield (len(lengths) > 1, ", ".join(f"{section}.{name}" for name in lengths),
           f"{' and '.join(counts)} contradict each other: leave one "
           f"out, or set it to null: {section}.{next(iter(lengths), '')}=null")
    for name in ("prompts", "prompts.eval", "data", "ppo.ptx.data"):
        template = attrgetter(name)(config).template
        yield (template is not None and "{" not in template, f"{name}.template",
               f"{shown(template)} has no placeholder such as {{prompt}}")
    for name in ("prompts", "prompts.eval", "generation"):
        bounds = attrgetter(name)(config).length_sampler
        yield (bounds is not None and (len(bounds) != 2 or bounds[0] > bounds[1]),
               f"{name}.length_sampler", f"{shown(bounds)} must be [min, max] with min at most max")
    yield (max(generation.length_sampler or [0]) > generation.max_new_tokens,
           "generation.length_sampler, generation.max_new_tokens",
           f"{shown(generation.length_sampler)} must be at most max_new_tokens: "
           "generation.length_sampler=null draws no lengths")
    yield ("" in generation.stop_sequences, "generation.stop_sequences",
           "must not hold an empty text")
    on_data, metric, share = task in tasks.DATA_TASKS, config.checkpoint.metric, tasks.val_share(
        data)
    of_function, metrics = task == "ppo" and metric.startswith("metrics/"), tasks.METRICS[task]
    yield (of_function and config.reward.metric_fn is None and "reward.metric_fn" not in handed_in,
           "checkpoint.metric, reward.metric_fn",
           f"{metric} comes from reward.metric_fn, which is not given")
    yield (metrics and not of_function and metric not in metrics, "checkpoint.metric",
           f"{shown(metric)} must be {' or '.join(metrics)}" + " or metrics/NAME" * (task == "ppo")
           + did_you_mean(metric, metrics))
    yield (on_data and data.path is None and "data.path" not in handed_in, "data.path",
           "missing; it must be given: data.path=FILE|FOLDER|HUB-NAME")
    yield (share is not None and not 0 < share < 1, "data.val",
           f"{data.val} must be a path, or a share between 0 and 1")


def _reward(config: schema.TrainConfig, handed_in: frozenset[str]) -> Rules:
    """Rules on what is rewarded, by functions or an environment."""
    reward, env = config.reward, config.env
    has_reward = reward.fn or reward.fns or "reward.fn" in handed_in
    by_tools = env.fn == "tools" or env.adapter == "trl"
    yield (not has_reward and (env.fn is None or by_tools), "reward.fn",
           "missing; give an import path (reward.fn=my_rewards:score), a built-in's name, or a "
           "config group (reward=...)")
    for name in reward.fns:
        yield (schema.is_own_figure(name) or (name == "env" and env.fn), f"reward.fns.{name}",
               f"reward/{name} is a figure of ppocli's; give this one another name")
    yield (env.fn == "tools" and not env.tools, "env.tools", "env.fn=tools plays these functions, "
           "and there are none: env.tools=[my_tools.py:search]")
    yield (by_tools and not config.prompts.chat, "prompts.chat, env.fn",
           "tools are called in the syntax of the chat template: set prompts.chat=true")
    yield (env.on_error == "drop" and reward.on_invalid != "skip",
           "env.on_error, reward.on_invalid",
           "dropped episodes have no score: set reward.on_invalid=skip")


def _algorithm(config: schema.TrainConfig) -> Rules:
    ppo = config.ppo
    yield (config.model.reference.kind == "none" and tasks.kl_coef(ppo) > 0,
           "model.reference.kind, ppo.init_kl_coef", "a KL penalty needs a reference: set "
           "ppo.init_kl_coef=0 or model.reference.kind=copy")
    yield (tasks.kl_term(ppo) == ("loss", "full") and tasks.reference_sharded(config),
           "ppo.kl_estimator, hardware.zero_stage",
           "in the loss it needs a whole reference: use k3+, or model.reference.shard=false")
    yield (ppo.advantage in _GROUPED and ppo.n < 2, "ppo.advantage, ppo.n",
           f"{ppo.advantage} compares samples of the same prompt: set ppo.n to 2 or more: ppo.n=2")
    for name, size in (("num_rollouts", ppo.num_rollouts), (
            "total_episodes", tasks.planned_samples(config) or 0)):
        rest = size % max(ppo.n, 1)
        yield (rest, f"ppo.{name}, ppo.n", f"{name} {size} must be a multiple of n {ppo.n}: "
               f"ppo.{name}={size + ppo.n - rest}")
        if rest:
            break
    yield (ppo.ptx.coef > 0 and ppo.ptx.data.path is None, "ppo.ptx.data.path",
           "ppo.ptx.coef mixes examples in: give ppo.ptx.data.path=FILE, a folder or a Hub name")
    for name, bound in ppo.importance.reject.items():
        wrong = why_no_bound(name, bound)
        yield (wrong, f"ppo.importance.reject.{name}",
               f"{wrong}{'' if name in CRITERIA else did_you_mean(name, CRITERIA)}")


def _value_and_reference(config: schema.TrainConfig) -> Rules:
    value, reference = config.model.value, config.model.reference
    kind, peft = tasks.reference_kind(config.model), bool(config.model.peft)
    yield (value.path is not None and value.kind != "model" and not Path(value.path).is_dir(),
           "model.value.path, model.value.kind",
           f"a value function of kind {value.kind} is made from the policy, or starts as another "
           "PPO run's: name a run's folder, set model.value.kind=model, or leave the path out")
    yield (value.kind == "adapter" and not peft, "model.value.kind, model.peft",
           "the value function would be a second adapter, and there is no first: give model.peft "
           "(model.peft.type=lora), or set model.value.kind=model")
    yield (value.kind == "branch" and value.num_layers_unfrozen < 1,
           "model.value.num_layers_unfrozen, model.value.kind",
           "a branch needs layers of its own: set model.value.num_layers_unfrozen=2, say")
    for name in ("device", "sync_every"):
        yield (getattr(reference, name) is not None and kind != "copy"
               and not (peft and name == "sync_every"),
               f"model.reference.{name}, model.reference.kind", f"a reference of kind {kind} is "
               f"no copy: set model.reference.kind=copy, or leave {name} out")


def _engine(config: schema.TrainConfig) -> Rules:
    rollout, engine, engines = config.rollout, config.rollout.engine, tasks.OUR_ENGINES
    yield (engine not in engines and not is_import_path(engine), "rollout.engine",
           f"{shown(engine)} must be one of {', '.join(engines)}, or the import path of a "
           f"sampler of your own (my_sampler.py:Sampler){did_you_mean(engine, engines)}")
    yield ((engine == "vllm" or config.env.fn) and not tasks.whole_while_acting(config),
           "hardware.gather_for_generation", "servers and environments need whole weights: set "
           "hardware.gather_for_generation=true")
    if engine != "vllm":
        return
    urls = [url.rstrip("/") for url in rollout.urls]
    yield (not urls or len({*urls}) < len(urls), "rollout.urls", "give each server once: "
           "rollout.urls=[http://127.0.0.1:8000]; start it as `ppocli vllm-command` prints it")
    for url in urls:
        wrong = secrets.why_no_url(url)
        yield (wrong, "rollout.urls", "an address holds a secret (not shown): give the token by "
               "rollout.token_env=VARIABLE" if wrong == "a secret" else
               f"{cut(url, 80)} must be an address such as http://127.0.0.1:8000")
    yield (rollout.token_env is not None and not secrets.VARIABLE.fullmatch(rollout.token_env),
           "rollout.token_env", "must be the name of an environment variable (not shown)")
    yield (config.model.quantization and not tasks.allows_gap(config),
           "ppo.importance.level, model.quantization", "servers sample with the base as it is, not "
           "quantized, which has to be corrected for: leave ppo.importance.level at token")
    yield (config.ppo.logprobs_from == "decode", "rollout.engine, ppo.logprobs_from",
           "servers compute no values: set ppo.logprobs_from=auto, or ppo.old_logprobs=sampler")


def _optimizers(config: schema.TrainConfig) -> Rules:
    """Rules on optimizers, by their effective settings."""
    zero, owner = config.hardware.zero_stage > 0, tasks.updates_section(config)
    section = tasks.updates_of(config)
    kinds = [optimizer.name for optimizer in tasks.optimizers_of(section)]
    for node, kind in zip(("optimizer", "value_optimizer"), kinds, strict=False):
        settings, where = getattr(section, node), f"{owner}.{node}"
        yield (settings.betas is not None and len(settings.betas) != 2, f"{where}.betas",
               f"{settings.betas} must be two numbers, e.g. [0.9,0.999]")
        for name in ("betas", "eps", "momentum"):
            default = schema_keys()[f"{where}.{name}"].default
            yield (name not in schema_training.OPTIMIZER_KEYS.get(kind, (name,))
                   and getattr(settings, name) != default, f"{where}.{name}, {where}.name",
                   f"{kind} has no {name}: leave it at {shown(default)}")
        yield (zero and settings.name in tasks.UNSHARDED_OPTIMIZERS,
               f"{where}.name, hardware.zero_stage", f"{settings.name} needs whole weights, "
               f"and ZeRO shards its state: use {where}.name=adamw or hardware.zero_stage=0")
    yield (zero and not import_guard.installed("deepspeed"), "hardware.zero_stage",
           f"ZeRO needs DeepSpeed: {import_guard.pip_line('deepspeed')}, or set "
           "hardware.zero_stage=0")
    yield (zero and kinds[-1] != kinds[0], "ppo.value_optimizer.name, hardware.zero_stage",
           "DeepSpeed drives one optimizer: leave ppo.value_optimizer.name at null, or use "
           "hardware.zero_stage=0")
    yield (config.hardware.weights == "bf16" and "adamw_8bit" in kinds,
           "hardware.weights, ppo.optimizer.name",
           "adamw_8bit keeps no master copies: take another optimizer, or weights=fp32")


def _schedules(config: schema.TrainConfig) -> Rules:
    section = tasks.updates_of(config)
    schedules = {"scheduler": section.scheduler}
    if isinstance(section, schema.PPOConfig) and section.value_scheduler != \
            schema_training.ValueSchedulerConfig():
        schedules["value_scheduler"] = tasks.value_scheduler(section)
    for node, schedule in schedules.items():
        accepted = schema_training.SCHEDULE_ARGUMENTS.get(schedule.name, ())
        where = f"{tasks.updates_section(config)}.{node}.kwargs"
        for argument in schedule.kwargs:
            yield (argument not in accepted, f"{where}.{argument}", f"the schedule {schedule.name} "
                   f"has {' and '.join(accepted) or 'no arguments'}"
                   + did_you_mean(argument, accepted))
        yield (schedule.name == "warmup_stable_decay" and "num_decay_steps" not in schedule.kwargs,
               where, "warmup_stable_decay needs the number of updates at the end in which the "
               f"rate falls: set {where}.num_decay_steps=100, say")


def _adapter(config: schema.TrainConfig) -> Rules:
    """Rules on ``model.peft``. Its fields are checked against a table, since importing PEFT loads
    torch, which takes seconds."""
    model, kind = config.model, tasks.adapter_kind(config.model)
    reference = tasks.reference_kind(model)
    yield (reference == "adapter" and not model.peft, "model.reference.kind, model.peft",
           "the reference is an adapter switched off, and there is none: give model.peft or "
           "another kind")
    yield model.peft and kind is None, "model.peft", "its type must be lora: model.peft.type=lora"
    if kind is None:
        return
    for key, library in (("model.quantization", "bitsandbytes"), ("model.peft", "peft")):
        yield (attrgetter(key)(config) and not import_guard.installed(library), key,
               f"needs {library}: {import_guard.pip_line(library)}")
    settings, accepted = tasks.adapter_settings(model), tasks.peft_fields()
    for name in settings:
        yield (name not in accepted, f"model.peft.{name}", "unknown key, or filled in by ppocli: "
               f"PEFT's {kind} takes {', '.join(accepted[:3])}, ..."
               + did_you_mean(name, accepted))
    initial = settings.get("init_lora_weights", True)
    yield (initial not in (True, False, "gaussian", "orthogonal"), "model.peft.init_lora_weights",
           f"{initial} must be true, false, gaussian or orthogonal: others change the base")
    yield (settings.get("bias", "none") != "none" and reference == "adapter",
           "model.peft.bias, model.reference.kind", "biases of the base, which the reference has "
           "too, would train: leave bias out or set model.reference.kind=copy")
    yield (model.value.kind == "branch", "model.value.kind, model.peft", "a branch would copy and "
           "train layers of the frozen base: set model.value.kind=adapter, =head or =model")
    yield (model.value.kind == "adapter" and settings.get("bias", "none") != "none",
           "model.peft.bias, model.value.kind", "both adapters would train the same biases of the "
           "base: leave bias out or set model.value.kind=model")
    yield (reference == "shared", "model.reference.kind, model.peft", "with an adapter the "
           "reference is the policy with the adapter switched off: model.reference.kind=auto")


def _run(config: schema.TrainConfig) -> Rules:
    name, resume, date = config.run_name, config.resume, config.model.chat_template_date
    yield config.sweep != schema.SweepConfig(), "sweep", "this is said of several jobs: add -m"
    yield (name is not None and (name[:1] in ("", ".") or "/" in name), "run_name",
           f"{shown(name)} must be a plain folder name that doesn't begin with a dot; "
           "the folder above it is output_dir")
    yield (resume == "auto" and name is None, "resume, run_name",
           "resume=auto needs run_name, the name of the run folder")
    yield (resume not in ("never", "auto"), "resume",
           f"{shown(resume)}: a run folder goes on the command line only: resume={resume}")
    yield (date and not _is_local_date(date), "model.chat_template_date",
           f"{shown(date)} must be a local date, such as 2026-01-31 or 2026-01-31T12:00:00")


def _is_local_date(text: str) -> bool:
    with suppress(ValueError):
        datetime.fromisoformat(text)
        return re.fullmatch(r"\d{4}-\d\d-\d\d(T\d\d:\d\d(:\d\d)?)?", text) is not None
    return False
