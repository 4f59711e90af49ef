"""The configuration under which a run, a checkpoint or a bare model is evaluated or sampled; and
which code that a configuration names may run."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ppocli.config import compose, config_yaml, schema, tasks
from ppocli.config.command_words import ACCEPT_CHANGES, read_words
from ppocli.config.import_guard import TRUST, limit
from ppocli.config.text import Say, short_path
from ppocli.errors import ConfigError
from ppocli.runs import trust
from ppocli.runs.model_files import is_adapter, is_scorer, named_base
from ppocli.runs.record import first_start
from ppocli.runs.target import Target

log = logging.getLogger("ppocli")

JUDGED = ("model.", "reward.", "env.")
"""prefixes of the keys whose code runs when a policy is evaluated"""


def allow_code(composed: compose.Composed, parts: tuple[str, ...] = ("",)) -> tuple[str, ...]:
    """Decide which code may run in this process: code that was typed; all code of a run that this
    user has started or trusts; otherwise what :mod:`ppocli.config.import_guard` lets a
    configuration name.

    Args:
        parts: prefixes of the keys whose code is going to run.

    Returns:
        import paths limited in the last way, for further processes.

    Raises:
        CheckpointError: the run is somebody else's and names code.
    """
    limited: tuple[str, ...] = ()
    if composed.resume_from is not None:
        trust.check_run(composed.resume_from, composed.config, parts, trusts=composed.trusts,
                        typed=composed.typed)
    else:
        limited = trust.named_by_files(composed.config, composed.typed)
    limit(limited)
    return limited


def target_config(target: Target, words: Sequence[str] = (), *, needs_reward: bool,
                  needs_prompts: bool, trusts: bool = False, say: Say = log.info
                  ) -> schema.TrainConfig:
    """The run's configuration, or for a bare model the defaults, with ``words`` applied.

    The starting model (``model.path``), which KL is measured against, stays the run's; a bare model
    is its own. A run that was trained on a data set has neither reward nor prompts. Our own loop
    samples, unless ``words`` say otherwise.

    Args:
        words: overrides, KEY=VALUE.
        needs_reward, needs_prompts: whether the command needs them. Without them, a bare model gets
            a reward that is never called, or starts from the BOS token.
        trusts: code that the run's configuration names may run, whoever made the run.
        say: prints how the words were read.

    Raises:
        CheckpointError: the run is somebody else's and names code.
        ConfigError: wrong words; or neither target nor ``words`` have a reward or prompts; or the
            target is a reward model.
    """
    if is_scorer(target.model):
        raise ConfigError(f"{target.name} is a reward model: it scores responses and writes none.",
                          where="RUN", fix="name a policy; to score its responses with this model: "
                          "--reward reward_model reward.kwargs.model="
                          f"{short_path(str(target.run_dir or target.model))}")
    typed_keys = {word.lstrip("+~").partition("=")[0] for word in words}
    run = _trained_on_data(target)
    if target.run_dir is not None and run is None:
        base = _going_on(target.run_dir, trusts)
    else:
        base = ["ppo.num_steps=1", *(_start_of(target.model) if run is None else _model_words(run)),
                *["reward.fn=length"] * (not needs_reward)]
        for needed, what, keys, fix in (
                (needs_reward, "reward", ("reward.fn", "env.fn"), "--reward module:function, or a "
                 "built-in such as --reward length (arguments: reward.kwargs.NAME=VALUE)"),
                (needs_prompts, "prompts", ("prompts.path", "prompts.items", "prompts.mix",
                                            "prompts.eval.path", "prompts.eval.items"),
                 "--prompts FILE, a folder or a Hub data set (column: prompts.column=NAME)")):
            if needed and not any(name.startswith(keys) for name in typed_keys):
                raise ConfigError(f"{target.name} is a model and brings no {what} of its own.",
                                  where=f"--{what}", fix=fix)
    config = _allowed([*base, *words], target, JUDGED if needs_reward else ("model.",), run, words,
                      trusts, say)
    _refuse_objects(config, target, needs_reward, needs_prompts)
    # the run's servers may be gone, or belong to another run now
    sets_rollout = any(name.startswith("rollout.") for name in typed_keys)
    rollout = config.rollout if sets_rollout else schema.RolloutConfig()
    return replace(config, resume="never", rollout=rollout, model=dated(config.model, target))


def trained_on_data(target: Target) -> bool:
    """Whether a target is evaluated on rows of a data set."""
    return _trained_on_data(target) is not None or is_scorer(target.model)


def data_config(target: Target, words: Sequence[str], *, trusts: bool = False,
                say: Say = log.info) -> schema.TrainConfig:
    """The configuration under which a target is evaluated on rows of a data set: the run's with
    ``words`` if it was trained on one, else that of the task that its model is for. The rows are
    the share ``data.val`` of ``data.path``, or without it all of ``data.path``.

    Raises:
        CheckpointError, ConfigError: as :func:`target_config`.
    """
    if (run := _trained_on_data(target)) is not None and target.run_dir is not None:
        base = _going_on(target.run_dir, trusts)
    else:
        base = [f"task={'reward_model' if is_scorer(target.model) else 'sft'}"]
        if target.run_dir is not None:
            run = config_yaml.read_config(target.run_dir / config_yaml.CONFIG_FILE)
        base += _start_of(target.model) if run is None else _model_words(run)
    config = _allowed([*base, *words], target, ("model.",), run, words, trusts, say,
                      frozenset({"data.path"}))
    typed_keys, data = {word.lstrip("+~").partition("=")[0] for word in words}, config.data
    whole = "data.path" in typed_keys and "data.val" not in typed_keys
    source = data.path if whole or tasks.val_share(data) is not None else data.val
    if source in (None, config_yaml.PYTHON_OBJECT):
        why = "was started from Python, and its folder doesn't hold the data" if source else \
            "comes without data that was held back"
        raise ConfigError(f"{target.name} {why}.", where="data.val",
                          fix="data.val=FILE, or data.path=FILE for all of it")
    if source == data.val:
        data = replace(data, path=source, limit=None)
    if source == data.val or whole:
        data = replace(data, val=None)
    return replace(config, resume="never", data=data, model=dated(config.model, target))


def dated(model: schema.ModelConfig, target: Target) -> schema.ModelConfig:
    """``model`` with the date that chat templates used in a run; for runs of earlier versions,
    which didn't record it, the date of the first start."""
    if model.chat_template_date is None and target.run_dir is not None:
        return replace(model, chat_template_date=first_start(target.run_dir))
    return model


def _trained_on_data(target: Target) -> schema.TrainConfig | None:
    """The configuration of the target's run, if that trained on a data set."""
    if target.run_dir is None:
        return None
    run = config_yaml.read_config(target.run_dir / config_yaml.CONFIG_FILE)
    return run if tasks.task_name(run) in tasks.DATA_TASKS else None


def _model_words(run: schema.TrainConfig) -> list[str]:
    """The model, seed, hardware and, for SFT, generation settings of a run, as words."""
    default = schema.TrainConfig()
    model = replace(run.model, value=default.model.value, reference=default.model.reference)
    generation = run.generation if tasks.task_name(run) == "sft" else default.generation
    return config_yaml.words_for(replace(default, model=model, seed=run.seed, hardware=run.hardware,
                                      generation=generation))


def _going_on(run_dir: Path, trusts: bool) -> list[str]:
    # config.yaml counts as it is now, even if it was changed by hand
    return [f"resume={config_yaml.quoted(str(run_dir))}", ACCEPT_CHANGES, *[TRUST] * trusts]


def _allowed(whole: Sequence[str], target: Target, parts: tuple[str, ...],
             run: schema.TrainConfig | None, typed: Sequence[str], trusts: bool, say: Say,
             handed_in: frozenset[str] = frozenset()) -> schema.TrainConfig:
    """Compose words, and decide which code may run: words that repeat the settings of a ``run``
    don't count as typed."""
    checked = compose.check(compose.compose(read_words(whole)), handed_in)
    keys = tuple(word.lstrip("+").partition("=")[0] for word in typed)
    for note in checked.notes:
        if note.startswith(keys):
            say(note)
    if run is not None and target.run_dir is not None:
        trust.check_run(target.run_dir, checked.config, ("model.",), trusts=trusts,
                        typed=frozenset(word.partition("=")[0] for word in typed))
    allow_code(checked, parts)
    return checked.config


def _start_of(model: str) -> list[str]:
    """Words for the starting model of a bare model: itself, or for an adapter its base."""
    path, revision, _ = named_base(Path(model)) if is_adapter(model) else (model, None, None)
    return [f"{key}={config_yaml.literal(value)}" for key, value in
            (("model.path", path), ("model.revision", revision)) if value is not None]


def _refuse_objects(config: schema.TrainConfig, target: Target, needs_reward: bool,
                    needs_prompts: bool) -> None:
    """Refuse a run that was started with Python objects that its folder doesn't hold."""
    lacking = []
    if needs_reward and config.reward.fn == config_yaml.PYTHON_OBJECT:
        lacking.append("--reward module:function")
    if needs_prompts and config_yaml.PYTHON_OBJECT in (
            config.prompts.eval.path, config.prompts.eval.path or config.prompts.path):
        lacking.append("--prompts FILE")
    if lacking:
        raise ConfigError(f"{target.name} was started from Python with objects that its folder "
                          "can't hold.", where=str(target.run_dir),
                          fix="give " + " and ".join(lacking))
