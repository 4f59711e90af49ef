"""The arguments of ``ppocli eval`` and ``ppocli.evaluate``, as words for the configuration; and the
folder of the results.

``samples.jsonl`` grows chunk by chunk; ``eval.json`` is written last, so an evaluation is finished
exactly if that file exists.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ppocli.config.config_yaml import literal, read_config
from ppocli.config.schema import EvalGenerationConfig, EvalPromptsConfig, ModelConfig, TrainConfig
from ppocli.config.text import Say
from ppocli.errors import CheckpointError, ConfigError
from ppocli.runs import atomic, run_folder, trust
from ppocli.runs.target import Target, find_target

EVAL = "eval"
"""folder of a run that holds its evaluations"""
SAMPLES = "samples.jsonl"
"""one JSON object per sample"""
RESULT = "eval.json"
"""the results, one JSON object; exists only if the evaluation is finished"""
PICTURE = "frontier.svg"
"""the frontier, with ``--frontier``"""
_FILES = (RESULT, SAMPLES, PICTURE, "settings.json")
"""all files of an evaluation; the last is of earlier versions"""
Row = dict[str, Any]
"""a row of samples.jsonl"""
_REPORT = {"model", "figures", "stderr", "quantiles", "samples", "scored", "against", "win_rate",
           "frontier", "base", "time"}
"""keys of eval.json that its readers need"""
BASE = "base"
"""as ``--against``: the model that the run started from"""
_SECTIONS = {"generation": EvalGenerationConfig, "prompts": EvalPromptsConfig}
_SOURCES = ("path", "items")


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """The arguments of an evaluation; flags that weren't set are None or false."""

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
    min_reward: float | None = None
    """of the mean reward; below it the command fails"""
    own_reward: bool = False
    """a Python function takes the place of ``reward``"""
    own_prompts: bool = False
    """a list from Python takes the place of ``prompts``"""
    trust: bool = False
    """code that the configuration of somebody else's run names may run"""

    def sets(self, key: str) -> bool:
        """Whether a word sets this key, or the same one for evaluation."""
        section, _, name = key.partition(".")
        return bool({_key(word) for word in self.words} & {key, f"{section}.eval.{name}"})

    def on_rows(self, trained_on_data: bool) -> bool:
        """Whether rows of a data set are evaluated, and not responses to prompts: where words name
        ``data``, or the target was trained on data and neither reward nor prompts are set.

        Raises:
            ConfigError: a flag that only applies to responses.
        """
        sections = {_key(word).partition(".")[0] for word in self.words}
        judged = (self.reward or self.own_reward or self.prompts or self.own_prompts
                  or sections & {"reward", "prompts"})
        if "data" not in sections and (judged or not trained_on_data):
            return False
        for flag, value in (("--reward", judged), ("--frontier", self.frontier),
                            ("--limit", self.limit), ("--num-samples", self.num_samples),
                            ("--min-reward", self.min_reward is not None)):
            if value:
                raise ConfigError(f"{flag} is for the responses of a policy, and here rows of data "
                                  "are evaluated.", where=flag, fix="leave it out; or judge "
                                  "responses: --reward FUNCTION --prompts FILE, without data.*")
        return True

    def row_words(self) -> list[str]:
        """Words for an evaluation on rows."""
        return [*self.words, *([] if self.seed is None else [f"seed={self.seed}"])]

    def overrides(self, target: Target) -> list[str]:
        """Words for :mod:`ppocli.launch.target_config`: flags, then ``words``, which win.

        A word for ``generation`` or ``prompts`` counts at evaluation, also where the run sets
        something else for evaluation alone.
        """
        run = (TrainConfig() if target.run_dir is None
               else read_config(target.run_dir / "config.yaml"))
        words: list[str] = []
        if self.prompts is not None:
            # name and split belong to the source that is replaced
            words += [f"prompts.eval.path={literal(self.prompts)}", "prompts.eval.items=null",
                      "prompts.eval.name=null", "prompts.eval.split=null", "prompts.name=null",
                      "prompts.split=train"]
        typed_keys = {_key(word) for word in self.words}
        if self.reward is not None or self.own_reward:
            # without the run's rewards and their arguments
            words += [f"~reward.{part}.{name}" for part in ("kwargs", "fns")
                      for name in getattr(run.reward, part)]
            # a Python function takes this place once the words have been composed
            words.append(f"reward.fn={'length' if self.own_reward else literal(str(self.reward))}")
        flags = {"prompts.eval.limit": self.limit, "prompts.eval.repeat": self.num_samples,
                 "seed": self.seed}
        words += [f"{key}={value}" for key, value in flags.items() if value is not None]
        keys = {_key(word) for word in (*self.words, *words)}
        return [word for word in words if _key(word) not in typed_keys] + [
            *self.words, *(word for word in _counting(self.words) if _key(word) not in keys)]

    def find_against(self, target: Target, cfg: TrainConfig, say: Say) -> Target | None:
        """The model of ``--against``.

        Raises:
            ConfigError: a model without a run has no base.
            CheckpointError, InputError: as :func:`ppocli.runs.target.find_target`.
        """
        if self.against is None:
            return None
        if self.against != BASE:
            other = find_target(self.against, say=say, asked_by="--against", also=(BASE,))
            if other.run_dir is not None:  # its model is loaded as ours is
                trust.check_run(other.run_dir, cfg, ("model.",), trusts=self.trust)
            return other
        return base_target(target, cfg.model, "--against base")


def base_target(target: Target, model: ModelConfig, asked_by: str) -> Target:
    """The model that ``target`` was trained from.

    Raises:
        ConfigError: ``target`` has no run, so its base is unknown.
    """
    if target.run_dir is None and model.path == target.model:
        raise ConfigError(f"{target.name} is a model that no run here has trained; its base is not "
                          "known.", where=asked_by, fix="name it: model.path=FOLDER or a Hub name")
    return Target(f"{model.path} (base)", model.path)


def _key(word: str) -> str:
    return word.lstrip("+~").partition("=")[0]


def _counting(words: tuple[str, ...]) -> list[str]:
    """``generation.eval.KEY=null`` for each ``generation.KEY=...``; ``prompts`` likewise. The limit
    of the evaluation prompts, which has no such null, takes the number itself."""
    resets = []
    for word in words:
        section, _, name = _key(word).partition(".")
        value = word.partition("=")[2]
        if (section, name) == ("prompts", "limit") and value.strip().isdecimal():
            resets.append(f"prompts.eval.limit={value}")
        if section in _SECTIONS and name in {f.name for f in fields(_SECTIONS[section])
                                             if f.default is None}:
            names = (*_SOURCES, "name", "split") if name in _SOURCES else (name,)
            resets += [f"{section}.eval.{each}=null" for each in names]
    return list(dict.fromkeys(resets))


def folder_of(request: EvalRequest, target: Target) -> Path:
    """The folder of an evaluation under its own name: below the run, or below the current folder
    for a bare model."""
    root = Path(request.output).expanduser().absolute() if request.output else (
        target.run_dir or Path.cwd()) / EVAL
    return root / (request.name or target.label)


def read_result(folder: Path) -> dict[str, Any] | None:
    """The contents of a finished evaluation's eval.json; None if there is none, or a damaged one.
    """
    report = atomic.read_json(folder / RESULT)
    return report if report is not None and report.keys() >= _REPORT else None


def refuse_existing(folder: Path, request: EvalRequest) -> None:
    """Refuse a name that exists, before anything is loaded.

    Raises:
        CheckpointError: only ``--overwrite`` overwrites, and only an evaluation.
    """
    if not os.path.lexists(folder):
        return
    if request.overwrite:
        foreign = (sorted({path.name for path in folder.iterdir()} - {*_FILES, run_folder.LOCK})
                   if folder.is_dir() else ["a file"])
        if foreign:
            raise CheckpointError(
                f"{folder} holds what is no evaluation ({foreign[0]}); it is not overwritten.",
                where=str(folder), fix="choose another --name or --output")
    elif request.name is not None:
        kind = "a finished" if (folder / RESULT).is_file() else "an unfinished"
        raise CheckpointError(f"{folder} holds {kind} evaluation already.",
                              where=f"--name {request.name}",
                              fix="--overwrite replaces it; or choose another --name")


def new_folder(default: Path, request: EvalRequest) -> Path:
    """Make the folder of an evaluation: ``default``, or one with a number after its name where that
    exists.

    Raises:
        DiskError: the folder can't be made.
    """
    run_folder.probe_writable(default.parent)
    if request.overwrite:
        atomic.make_dirs(default)
        return default
    return run_folder.new_folder(default.parent, default.name)


@contextmanager
def working_in(folder: Path, overwrite: bool) -> Iterator[None]:
    """Lock the folder for this process; remove it at the end if it holds no sample.

    Raises:
        CheckpointError: another process works there.
    """
    run_folder.refuse_links(folder)
    try:
        with run_folder.lock(folder):
            if overwrite:
                for name in _FILES:
                    with atomic.disk_errors(folder / name):
                        (folder / name).unlink(missing_ok=True)
            try:
                yield
            finally:
                path = folder / SAMPLES
                if path.is_file() and path.stat().st_size == 0:
                    path.unlink()
    finally:
        with suppress(OSError):  # the folder may not exist any more
            if {entry.name for entry in folder.iterdir()} <= {run_folder.LOCK}:
                (folder / run_folder.LOCK).unlink(missing_ok=True)
                folder.rmdir()
                if folder.parent.name == EVAL:
                    folder.parent.rmdir()
