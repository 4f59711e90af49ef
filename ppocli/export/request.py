"""What ``ppocli export`` was asked for, checked and turned into a plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ppocli.config.hub import go_offline, offline_variable
from ppocli.config.schema import TrainConfig
from ppocli.errors import CheckpointError, ConfigError, InputError
from ppocli.export.adapter import merges, plan_adapter
from ppocli.export.curve import CURVE
from ppocli.export.facts import Earlier, Facts, gather
from ppocli.export.folder import (
    TRAINING_CONFIG,
    ExportPlan,
    check_whole,
    earlier_export,
    foreign_files,
    plan_export,
    read_record,
)
from ppocli.export.hub import Push, check_repo_id, repo_name
from ppocli.export.weights import StoredTensor, WeightFiles, parse_size
from ppocli.runs.record import is_run
from ppocli.runs.target import Target, find_target
from ppocli.storage.adapter_files import is_adapter
from ppocli.storage.model_files import VALUE_HEAD
from ppocli.text import first_line

DEFAULT_SHARD = "5GB"
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py", "README.md",
             TRAINING_CONFIG, CURVE]
"""of a Hub repository, what an export reads"""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """An export as it was asked for; what wasn't given is None or false."""

    run: str | None = None
    output: Path | None = None
    best: bool = False
    step: int | None = None
    dtype: str | None = None
    max_shard_size: str | None = None
    """None: ``DEFAULT_SHARD``"""
    include_value_head: bool = False
    merge: bool | None = None
    """of an adapter: merge it into its base, or write its own folder; None: merge where possible"""
    overwrite: bool = False
    dry_run: bool = False
    to_hub: bool = False
    repo_id: str | None = None
    private: bool | None = None
    create_pr: bool = False
    revision: str | None = None

    def check(self) -> None:
        """Refuse what can't be meant.

        Raises:
            ConfigError: says which options don't go together, or what is no name.
        """
        parse_size(self.max_shard_size or DEFAULT_SHARD)
        if not self.to_hub:
            given = {"--repo-id": self.repo_id is not None, "--create-pr": self.create_pr,
                     "--private": self.private is True, "--public": self.private is False,
                     "--revision": self.revision is not None}
            for option in (option for option, there in given.items() if there):
                raise ConfigError(f"{option} is about the Hub, and nothing is to be pushed there.",
                                  where=option, fix="add --to-hub")
        if self.create_pr and self.revision is not None:
            raise ConfigError("--create-pr and --revision exclude each other: a pull request has "
                              "a branch of its own.", where="command line", fix="give one of them")
        check_repo_id(self.repo_id)

    def push(self, run_name: str) -> Push:
        """Where to push; ``run_name`` names the repository where nothing else does."""
        return Push(self.repo_id, repo_name(run_name), self.private, self.create_pr, self.revision)

    @property
    def writing(self) -> list[str]:
        """The options given that are about what is written, not where it is pushed."""
        given = {"--output": self.output is not None, "--best": self.best,
                 "--step": self.step is not None, "--dtype": self.dtype is not None,
                 "--max-shard-size": self.max_shard_size is not None,
                 "--include-value-head": self.include_value_head,
                 "--merge": self.merge is True, "--adapter": self.merge is False,
                 "--overwrite": self.overwrite}
        return [option for option, there in given.items() if there]

    @property
    def writes_nothing_new(self) -> bool:
        """Whether nothing is asked of the export itself."""
        return not self.writing


@dataclass(frozen=True, slots=True)
class Existing:
    """An export that is there already and only has to be pushed."""

    folder: Path
    run_name: str


def resolve(request: ExportRequest, say: Callable[[str], None],
            command: Callable[[TrainConfig], str]) -> ExportPlan | Existing:
    """Find the policy and decide what to write where.

    Args:
        say: told what was chosen where the user left it open.
        command: makes the command line that trains with a configuration, for the card.

    Raises:
        ConfigError: options that don't fit the target; a destination that is in the way.
        CheckpointError, InputError: no such policy, or it can't be read.
    """
    request.check()
    network = not request.dry_run
    if not network:
        _forbid_network()
    existing = _existing(request)
    if existing is not None:
        return existing
    target = find_target(request.run, say=say, step=request.step, best=request.best)
    value_head = None
    if request.include_value_head:
        target, value_head = _with_value_head(target)
    destination = _destination(request, target)
    source = _local(target.model)
    check_destination(request, destination, source)
    merge = merges(source, request.merge, target.name, say)
    facts = gather(target, network=network, command=command)
    if facts.run is None and (earlier := earlier_export(source, say)) is not None:
        facts = _told_by(earlier, facts)
    max_shard = parse_size(request.max_shard_size or DEFAULT_SHARD)
    if is_adapter(source):
        return plan_adapter(
            partial(_adapter_plan, target.name, source, destination, facts, value_head,
                    request.repo_id),
            source, merge=merge, dtype=request.dtype, max_shard=max_shard, given=request.writing)
    return plan_export(target.name, source, destination, facts, dtype=request.dtype,
                       max_shard=max_shard, value_head=value_head,
                       repo_id=request.repo_id)


def _adapter_plan(name: str, source: Path, destination: Path, facts: Facts,
                  value_head: Path | None, repo_id: str | None, tensors: dict[str, StoredTensor],
                  weights: WeightFiles, dtype: str | None, merge_shards: int | None = None
                  ) -> ExportPlan:
    return ExportPlan(name, source, destination, facts, tensors, weights, dtype, value_head,
                      repo_id, merge_shards)


def _told_by(earlier: Earlier, facts: Facts) -> Facts:
    """What an export tells of itself, in the place of what a run would."""
    name, step = earlier.record.get("run"), earlier.record.get("step")
    return replace(facts, name=str(name or facts.name), earlier=earlier,
                   step=step if isinstance(step, int) else None)


def _forbid_network() -> None:
    """A dry run asks nobody: what isn't in the local cache isn't there."""
    if offline_variable() is None:
        os.environ["HF_HUB_OFFLINE"] = "1"
    go_offline()


def _existing(request: ExportRequest) -> Existing | None:
    """The export that RUN names, if it is to be pushed as it is."""
    if not (request.to_hub and request.run is not None and request.writes_nothing_new):
        return None
    folder = Path(request.run).expanduser()
    record = read_record(folder)
    if record is None:
        return None
    check_whole(folder)
    return Existing(folder.absolute(), str(record.get("run") or folder.name))


def _with_value_head(target: Target) -> tuple[Target, Path]:
    """The checkpoint of exactly the target's step, and the value head in it; an export may hold
    one itself."""
    record = read_record(Path(target.model)) if target.run_dir is None else None
    if record is not None and VALUE_HEAD in record["files"]:
        return target, Path(target.model) / VALUE_HEAD
    if target.run_dir is None or target.step is None:
        raise InputError(f"{target.name} has no value head: only the checkpoints of a run have "
                         "one.", where="--include-value-head",
                         fix="name a run or one of its checkpoints, or leave the option out")
    if target.checkpoint is None:
        try:
            found = find_target(str(target.run_dir), say=lambda text: None, step=target.step,
                                checkpoint=True)
        except CheckpointError as error:
            raise InputError(f"The value head of {target.name} is gone: its checkpoint is not "
                             f"there any more ({error.what.rstrip('.')}).",
                             where="--include-value-head",
                             fix=error.fix or "leave the option out") from error
        target = replace(found, name=target.name)
    assert target.checkpoint is not None
    head = target.checkpoint / VALUE_HEAD
    if not head.is_file():
        raise InputError(f"{target.name} has no value head: it was trained without a critic.",
                         where="--include-value-head", fix="leave the option out")
    return target, head


def _destination(request: ExportRequest, target: Target) -> Path:
    if request.output is not None:
        return request.output.expanduser().absolute()
    if target.run_dir is None:
        fix = "--output DIR"
        if request.to_hub and request.writing and read_record(Path(target.model)) is not None:
            fix += f"; or push it as it is: leave out {', '.join(request.writing)}"
        raise ConfigError(f"{target.name} belongs to no run: where should the export go?",
                          where="--output", fix=fix)
    return target.run_dir / "export" / target.label


def check_destination(request: ExportRequest, destination: Path, source: Path) -> None:
    """Nothing is overwritten without being asked, and never anything but an export.

    Raises:
        ConfigError: something lies there.
    """
    if not os.path.lexists(destination):
        return
    shown = os.path.relpath(destination) if destination.is_relative_to(Path.cwd()) else destination
    if not destination.is_dir() or destination.is_symlink():
        raise ConfigError(f"{shown} is a {'link' if destination.is_symlink() else 'file'}.",
                          where="--output", fix="name another folder: --output DIR")
    names = os.listdir(destination)
    if not names:
        return
    foreign = foreign_files(destination)
    if is_run(destination) or source.is_relative_to(destination.resolve()) or (
            foreign and read_record(destination) is None):
        raise ConfigError(f"{shown} holds something that is no export ({foreign[0]}).",
                          where="--output", fix="name another folder: --output DIR")
    if not request.overwrite:
        again = request.push(destination.name).command(destination)
        raise ConfigError(f"{shown} holds an export already.", where="--output",
                          fix="add --overwrite, or name another folder: --output DIR"
                          + (f"; to push the one that is there: {again}" if request.to_hub else ""))
    if foreign:
        raise ConfigError(f"{shown} holds files that are not the export's and would be lost "
                          f"({', '.join(foreign[:3])}).", where="--overwrite",
                          fix="move them away, or name another folder: --output DIR")


def _local(model: str) -> Path:
    """The model as a folder on this disk; a Hub model is downloaded.

    Raises:
        InputError: it can't be.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_PATTERNS))
    except Exception as error:  # whatever the Hub or the way there answers
        raise InputError(f"{model} can't be downloaded: {first_line(error)}",
                         where="RUN", fix=f"hf download {model}") from error
