"""What ``ppocli eval`` and ``ppocli.evaluate`` were asked for, as words for the configuration; and
the folder that the results go to.

``settings.json`` is written first and says what the samples are of; ``samples.jsonl`` grows chunk
by chunk; ``eval.json`` comes last, so an evaluation is finished exactly if it is there.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ppocli.config.resolved import literal, read_config
from ppocli.config.schema import EvalGenerationConfig, EvalPromptsConfig, ModelConfig, TrainConfig
from ppocli.errors import CheckpointError, ConfigError, DiskError
from ppocli.own_code import TRUST
from ppocli.runs import trust
from ppocli.runs.target import Target, find_target
from ppocli.storage import atomic, run_folder, run_logs
from ppocli.text import Say

EVAL = "eval"
"""folder of a run that holds its evaluations"""
SETTINGS = "settings.json"
"""what the samples are made from: a resumed evaluation must agree with it"""
SAMPLES = "samples.jsonl"
"""one JSON object a sample"""
RESULT = "eval.json"
"""what came out, one JSON object; there only if the evaluation is finished"""
PICTURE = "frontier.svg"
"""the frontier, if it was asked for"""
Row = dict[str, Any]
"""a row of samples.jsonl"""
_REPORT = {"model", "figures", "stderr", "quantiles", "samples", "scored", "against", "win_rate",
           "frontier", "base", "time"}
"""what readers of eval.json count on"""
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
    own_prompts: bool = False
    """a list from Python takes the place of ``prompts``"""
    trust: bool = False
    """code that the configuration of somebody else's run names may run"""
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

    def on_rows(self, trained_on_data: bool) -> bool:
        """Whether rows of a data set are evaluated, and not responses to prompts: where words name
        ``data``, or the target's own evaluation is one on rows and no reward is to judge it.

        Raises:
            ConfigError: what is for responses alone is asked of rows.
        """
        sections = {_key(word).partition(".")[0] for word in self.words}
        judged = (self.reward or self.own_reward or self.prompts or self.own_prompts
                  or sections & {"reward", "prompts"})
        if "data" not in sections and (judged or not trained_on_data):
            return False
        for flag, given in (("--reward", judged), ("--frontier", self.frontier),
                            ("--limit", self.limit), ("--num-samples", self.num_samples),
                            ("--resume", self.resume),
                            ("--min-reward", "--min-reward" in self.printing)):
            if given:
                raise ConfigError(f"{flag} is for the responses of a policy, and here rows of data "
                                  "are evaluated.", where=flag, fix="leave it out; or judge "
                                  "responses: --reward FUNCTION --prompts FILE, without data.*")
        return True

    def row_words(self) -> list[str]:
        """Words for an evaluation on rows."""
        return [*self.words, *([] if self.seed is None else [f"seed={self.seed}"])]

    def overrides(self, target: Target) -> list[str]:
        """Words for :mod:`ppocli.launching.target_config`: flags, then the words given.

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
        given = {_key(word) for word in self.words}
        if self.reward is not None or self.own_reward:
            # the run's rewards and their arguments are taken out
            words += [f"~reward.{part}.{name}" for part in ("kwargs", "fns")
                      for name in getattr(run.reward, part)]
            # a Python function takes this place once the words have been composed
            words.append(f"reward.fn={'length' if self.own_reward else literal(str(self.reward))}")
        words += [f"{key}={value}" for flag, key, value in self._settings()
                  if value is not None and flag not in ("--prompts", "--reward")]
        keys = {_key(word) for word in (*self.words, *words)}
        return [word for word in words if _key(word) not in given] + [
            *self.words, *(word for word in _counting(self.words) if _key(word) not in keys)]

    def find_against(self, target: Target, cfg: TrainConfig, say: Say) -> Target | None:
        """What the policy is compared with.

        Raises:
            ConfigError: a model that came from elsewhere has no base.
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

    def command(self, target: Target, name: str) -> str:
        """The command that goes on with this evaluation."""
        run = self.run or str(target.run_dir)
        flags = {"--against": self.against,
                 **{flag: value for flag, _, value in self._settings()},
                 "--step": self.step, "--output": self.output, "--name": name}
        words = [text for flag, value in flags.items() if value is not None
                 for text in (flag, str(value))]
        words += ["--best"] * self.best + ["--frontier"] * self.frontier + [TRUST] * self.trust
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


def folder_of(request: EvalRequest, target: Target) -> Path:
    """The folder of an evaluation under its own name: below the run, or below the current folder
    for a bare model."""
    root = Path(request.output).expanduser().absolute() if request.output else (
        target.run_dir or Path.cwd()) / EVAL
    return root / (request.name or target.label)


def is_finished(folder: Path) -> bool:
    """Whether the evaluation in a folder went through."""
    return (folder / RESULT).is_file()


def read_result(folder: Path) -> dict[str, Any] | None:
    """The contents of a finished evaluation's eval.json; None if there is none, or a damaged one.
    """
    report = atomic.read_json(folder / RESULT)
    return report if report is not None and report.keys() >= _REPORT else None


def refuse_taken(folder: Path, request: EvalRequest) -> None:
    """Refuse a name that is taken, before anything is loaded.

    Raises:
        CheckpointError: nothing is overwritten unless asked for, and only an evaluation.
    """
    if not os.path.lexists(folder):
        return
    if request.overwrite:
        known = {SETTINGS, SAMPLES, RESULT, PICTURE, run_folder.LOCK}
        foreign = (sorted({path.name for path in folder.iterdir()} - known) if folder.is_dir()
                   else ["a file"])
        if foreign:
            raise CheckpointError(
                f"{folder} holds what is no evaluation ({foreign[0]}); it is not overwritten.",
                where=str(folder), fix="choose another --name or --output")
    elif request.name is not None and not request.resume:
        what = "a finished" if is_finished(folder) else "an unfinished"
        raise CheckpointError(f"{folder} holds {what} evaluation already.",
                              where=f"--name {request.name}", fix="--resume goes on with it, "
                              "--overwrite starts it again; or choose another --name")


@contextmanager
def working_in(folder: Path, overwrite: bool) -> Iterator[None]:
    """Hold the folder for this process; a folder in which nothing came to be is removed again.

    Raises:
        CheckpointError: another process works there.
    """
    run_folder.refuse_links(folder)
    try:
        with naming_output(), run_folder.lock(folder):
            if overwrite:
                for name in (RESULT, SETTINGS, SAMPLES, PICTURE):
                    with atomic.disk_errors(folder / name):
                        (folder / name).unlink(missing_ok=True)
            try:
                yield
            finally:
                if not is_finished(folder) and is_empty(folder / SAMPLES):
                    for name in (SAMPLES, SETTINGS):
                        (folder / name).unlink(missing_ok=True)
    finally:
        with suppress(OSError):  # it may be gone
            if {entry.name for entry in folder.iterdir()} <= {run_folder.LOCK}:
                (folder / run_folder.LOCK).unlink(missing_ok=True)
                folder.rmdir()
                if folder.parent.name == EVAL:
                    folder.parent.rmdir()


@contextmanager
def naming_output() -> Iterator[None]:
    """Name the options of an evaluation in what the disk's errors advise."""
    try:
        yield
    except DiskError as error:
        if error.fix is not None and "output_dir" in error.fix:
            error.fix = "name another folder: --output DIR"
        raise
    except CheckpointError as error:
        if error.fix is not None:
            error.fix = error.fix.replace("run_name", "--name")
        raise


def is_empty(path: Path) -> bool:
    """Whether a file has nothing in it, or isn't there."""
    return not path.is_file() or path.stat().st_size == 0


def take_up(folder: Path, sizes: Mapping[str, int], chunk: int) -> dict[str, list[Row]]:
    """Rows there already, by model; what follows the last whole chunk is cut off the file.

    Args:
        sizes: how many samples each model has, in the order they are evaluated in.
        chunk: samples of one generate call.

    Raises:
        DiskError: the file can't be cut.
    """
    found: dict[str, list[Row]] = {role: [] for role in sizes}
    path = folder / SAMPLES
    if not path.is_file():
        return found
    end = place = 0
    pending: list[Row] = []
    expected = [(role, number) for role, total in sizes.items() for number in range(total)]
    with atomic.disk_errors(path), path.open("r+b") as lines:
        for line, (role, number) in zip(lines, expected, strict=False):
            row = run_logs.read_row(line) if line.endswith(b"\n") else None
            if row is None or (row.get("model"), row.get("number")) != (role, number):
                break
            place += len(line)
            pending.append(row)
            if (number + 1) % chunk == 0 or number + 1 == sizes[role]:
                found[role] += pending
                pending, end = [], place
        lines.truncate(end)
    return found
