"""What ``ppocli eval`` and ``ppocli.evaluate`` were asked for, as words for the configuration."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ppocli.config.resolved import literal, read_config
from ppocli.config.schema import (
    EvalGenerationConfig,
    EvalPromptsConfig,
    ModelConfig,
    RewardConfig,
    TrainConfig,
)
from ppocli.errors import ConfigError
from ppocli.runs.target import Target, find_target

if TYPE_CHECKING:
    pass

BASE = "base"
"""as ``--against``: the model that the run started from"""
_SECTIONS = {"generation": EvalGenerationConfig, "prompts": EvalPromptsConfig}
_SOURCES = ("path", "items")


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """An evaluation as it was asked for; flags that weren't given are None or false."""

    run: str | None = None
    words: tuple[str, ...] = ()
    """KEY=VALUE"""
    against: str | None = None
    """a target, or the word ``base``"""
    prompts: str | None = None
    reward: str | None = None
    limit: int | None = None
    num_samples: int | None = None
    seed: int | None = None
    step: int | None = None
    best: bool = False
    frontier: bool = False
    output: str | None = None
    name: str | None = None
    overwrite: bool = False
    resume: bool = False
    own_reward: bool = False
    """a Python function takes the place of ``reward``"""
    printing: tuple[str, ...] = ()
    """options of the command line that change no result"""

    def check(self) -> None:
        """Refuse what can't be meant.

        Raises:
            ConfigError: flags that exclude each other, a name that is none.
        """
        if self.resume and self.overwrite:
            raise ConfigError("--resume goes on with an evaluation and --overwrite throws it away.",
                              fix="give one of them")
        name = self.name
        if name is not None and (name != Path(name).name or name.startswith(".")):
            raise ConfigError(f"--name {name}: a name is no path.", where="--name",
                              fix="--output DIR says where, --name NAME how it is called there")
        if self.reward is not None and self.own_reward:
            raise ConfigError("reward and reward_fn set the same thing.", where="ppocli.evaluate",
                              fix="give one of them")
        given = {_key(word) for word in self.words}
        for flag, key, value in self._settings():
            if value is not None and key in given:
                raise ConfigError(f"{flag} and {key} set the same thing.", where="command line",
                                  fix="give one of them")

    def sets(self, key: str) -> bool:
        """Whether a word sets this key, or the same one for evaluation."""
        section, _, name = key.partition(".")
        return bool({_key(word) for word in self.words} & {key, f"{section}.eval.{name}"})

    def overrides(self, target: Target) -> list[str]:
        """Words for :mod:`ppocli.launching.target_config`: flags, then the words given.

        A word for ``generation`` or ``prompts`` counts at evaluation, also where the run sets
        something else for evaluation alone.
        """
        run = None if target.run_dir is None else read_config(target.run_dir / "config.yaml")
        words: list[str] = []
        if self.prompts is not None:
            # name and split belong to the source that is replaced
            words += [f"prompts.eval.path={literal(self.prompts)}", "prompts.eval.items=null",
                      "prompts.eval.name=null", "prompts.eval.split=null", "prompts.name=null",
                      "prompts.split=train"]
        given = {_key(word) for word in self.words}
        if self.reward is not None or self.own_reward:
            words += _without_rewards(run.reward if run else RewardConfig())
            # a Python function takes this place once the words have been composed
            words.append(f"reward.fn={'length' if self.own_reward else literal(str(self.reward))}")
        words += [f"{key}={value}" for flag, key, value in self._settings()
                  if value is not None and flag not in ("--prompts", "--reward")]
        keys = {_key(word) for word in (*self.words, *words)}
        return [word for word in words if _key(word) not in given] + [
            *self.words, *(word for word in _counting(self.words) if _key(word) not in keys)]

    def find_against(self, target: Target, cfg: TrainConfig, say: Callable[[str], None]
                     ) -> Target | None:
        """What the policy is compared with.

        Raises:
            ConfigError: a model that came from elsewhere has no base.
            CheckpointError, InputError: as :func:`ppocli.runs.target.find_target`.
        """
        if self.against is None:
            return None
        if self.against != BASE:
            return find_target(self.against, say=say, asked_by="--against")
        return base_target(target, cfg.model, "--against base")

    def command(self, target: Target, name: str) -> str:
        """The command that goes on with this evaluation."""
        run = self.run or str(target.run_dir)
        flags = [("--against", self.against), ("--prompts", self.prompts),
                 ("--reward", self.reward), ("--limit", self.limit),
                 ("--num-samples", self.num_samples), ("--seed", self.seed),
                 ("--step", self.step), ("--output", self.output), ("--name", name)]
        words = [text for flag, value in flags if value is not None for text in (flag, str(value))]
        words += ["--best"] * self.best + ["--frontier"] * self.frontier
        words += [*self.printing, "--resume"]
        return shlex.join(["ppocli", "eval", run, *self.words, *words])

    def _settings(self) -> list[tuple[str, str, str | int | None]]:
        return [("--prompts", "prompts.eval.path", self.prompts),
                ("--prompts", "prompts.path", self.prompts), ("--reward", "reward.fn", self.reward),
                ("--limit", "prompts.eval.limit", self.limit),
                ("--num-samples", "prompts.eval.repeat", self.num_samples),
                ("--seed", "seed", self.seed)]


def base_target(target: Target, model: ModelConfig, asked_by: str) -> Target:
    """The model that ``target`` was trained from.

    Raises:
        ConfigError: ``target`` came from elsewhere and has none.
    """
    if target.run_dir is None and model.path == target.model:
        raise ConfigError(f"{target.name} is a model that no run here has trained; its base is not "
                          "known.", where=asked_by, fix="name it: model.path=FOLDER or a Hub name")
    return Target(f"{model.path} (base)", model.path)


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _without_rewards(reward: RewardConfig) -> list[str]:
    """Words that take the run's rewards and their arguments out."""
    return [f"~reward.{part}.{name}" for part in ("kwargs", "fns")
            for name in getattr(reward, part)]


def _counting(words: tuple[str, ...]) -> list[str]:
    """``generation.eval.KEY=null`` for each ``generation.KEY=...``; ``prompts`` likewise. The limit
    of the evaluation prompts, which has no such null, takes the number itself."""
    found = []
    for word in words:
        section, _, name = _key(word).partition(".")
        value = word.partition("=")[2]
        if (section, name) == ("prompts", "limit") and value.strip().isdecimal():
            found.append(f"prompts.eval.limit={value}")
        if section in _SECTIONS and name in {f.name for f in fields(_SECTIONS[section])
                                             if f.default is None}:
            names = (*_SOURCES, "name", "split") if name in _SOURCES else (name,)
            found += [f"{section}.eval.{each}=null" for each in names]
    return list(dict.fromkeys(found))
