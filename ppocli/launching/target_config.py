"""The configuration under which a run, a checkpoint or a bare model is judged or asked; and what of
the code that a configuration names may run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ppocli.config import resolved, schema
from ppocli.errors import ConfigError
from ppocli.own_code import TRUST, limit
from ppocli.runs import trust
from ppocli.runs.target import Target
from ppocli.storage.model_files import is_adapter, named_base

if TYPE_CHECKING:
    from ppocli.config.compose import Checked, Composed

JUDGED = ("model.", "reward.")
"""beginnings of the keys whose code runs where a policy is judged"""


def allow_code(found: Checked | Composed, parts: tuple[str, ...] = ("",)) -> tuple[str, ...]:
    """Settle which code may run in this process: what was typed; of a run that this user has
    started, or trusts, all of it; else what :mod:`ppocli.own_code` lets a configuration name.

    Args:
        parts: beginnings of the keys whose code is going to run.

    Returns:
        import paths that the last applies to, for further processes.

    Raises:
        CheckpointError: the run is somebody else's and names code.
    """
    limited: tuple[str, ...] = ()
    if found.typed is None:
        pass
    elif found.resume_from is not None:
        trust.check_run(found.resume_from, found.config, parts, trusts=found.trusts,
                        typed=found.typed)
    else:
        limited = trust.named_by_files(
            found.config, resolved.with_absolute_paths(found.config, Path.cwd()), found.typed)
    limit(limited)
    return limited


def target_config(target: Target, words: Sequence[str] = (), *, needs_reward: bool,
                  needs_prompts: bool, trusts: bool = False) -> schema.TrainConfig:
    """What ``words`` make of the run's own configuration, or of the defaults for a bare model.

    The model to start from (``model.path``), which KL is measured against, stays the run's; a bare
    model is its own.

    Args:
        words: overrides, KEY=VALUE.
        needs_reward, needs_prompts: whether the command can do without. A bare model then gets a
            reward that is never called, or starts from the BOS token.
        trusts: what the run's configuration names may run, whoever made it.

    Raises:
        CheckpointError: the run is somebody else's and names code.
        ConfigError: wrong words; or the target brings no reward or prompts and ``words`` don't
            either.
    """
    from ppocli.config.compose import check, compose
    from ppocli.config.words import ACCEPT_CHANGES, read_words

    given = {word.lstrip("+~").partition("=")[0] for word in words}
    if target.run_dir is not None:
        # judged is what config.yaml says now, be it changed by hand
        base = [f"resume={resolved.quoted(str(target.run_dir))}", ACCEPT_CHANGES,
                *[TRUST] * trusts]
    else:
        base = ["ppo.num_steps=1", *_start_of(target.model)]
        if needs_reward and not given & {"reward.fn", "reward.fns"} and not any(
                name.startswith("reward.fns.") for name in given):
            raise ConfigError(f"{target.name} is a model and brings no reward of its own.",
                              where="--reward", fix="--reward module:function, or a built-in such "
                              "as --reward length (arguments: reward.kwargs.NAME=VALUE)")
        if needs_prompts and not given & {"prompts.path", "prompts.items", "prompts.eval.path",
                                          "prompts.eval.items"}:
            raise ConfigError(f"{target.name} is a model and brings no prompts of its own.",
                              where="--prompts",
                              fix="--prompts FILE (json, jsonl, csv, parquet or txt), a folder or "
                              "a Hub data set (column: prompts.column=NAME)")
        if not needs_reward:
            base.append("reward.fn=length")
    checked = check(compose(read_words([*base, *words])))
    allow_code(checked, JUDGED if needs_reward else ("model.",))
    config = checked.config
    _refuse_objects(config, target, needs_reward, needs_prompts)
    return replace(config, resume="never")


def _start_of(model: str) -> list[str]:
    """The words that name what a bare model started from: itself, but for an adapter its base."""
    if not is_adapter(model):
        return [f"model.path={resolved.literal(model)}"]
    path, revision, _ = named_base(Path(model))
    words = [f"model.path={resolved.literal(path)}"]
    return words if revision is None else [*words, f"model.revision={resolved.literal(revision)}"]


def _refuse_objects(config: schema.TrainConfig, target: Target, needs_reward: bool,
                    needs_prompts: bool) -> None:
    """A run started from Python may lack what its folder can't hold."""
    lacking = []
    if needs_reward and config.reward.fn == resolved.PYTHON_OBJECT:
        lacking.append("--reward module:function")
    if needs_prompts and resolved.PYTHON_OBJECT in (
            config.prompts.eval.path, config.prompts.eval.path or config.prompts.path):
        lacking.append("--prompts FILE")
    if lacking:
        raise ConfigError(f"{target.name} was started from Python with objects that its folder "
                          "can't hold.", where=str(target.run_dir),
                          fix="give " + " and ".join(lacking))
