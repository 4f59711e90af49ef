"""What ``ppocli export`` was asked for, checked and turned into a plan."""

import os
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from ppocli.config.resolved import CONFIG_FILE, read_config
from ppocli.errors import CheckpointError, ConfigError, InputError
from ppocli.export import folder as exports
from ppocli.export.card import CARD, CURVE
from ppocli.export.facts import gather
from ppocli.runs import pictures, trust
from ppocli.runs.record import is_run
from ppocli.runs.target import Target, find_target
from ppocli.storage import atomic, model_files, run_folder
from ppocli.text import Say, first_line, short_path

DEFAULT_SHARD = "5GB"
_LONGEST_NAME = 96
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_VIRTUAL = ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING",
            "ADAPTION_PROMPT", "CPT", "CARTRIDGE")
"""PEFT's kinds of adapters that no weight takes in"""
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.py", *exports.TOKENIZER, CARD,
             exports.TRAINING_CONFIG, CURVE]
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
    trust: bool = False
    """the model's own code may run, though the run is somebody else's"""
    dry_run: bool = False
    to_hub: bool = False
    repo_id: str | None = None
    """None: the token's user and the run's name"""
    private: bool | None = None
    """None: private, and nothing was said about a repository that is there already"""
    create_pr: bool = False
    revision: str | None = None

    def check(self) -> None:
        """Refuse what can't be meant.

        Raises:
            ConfigError: says which options don't go together, or what is no name.
        """
        parse_size(self.max_shard_size or DEFAULT_SHARD)
        if self.pushing and not self.to_hub:
            option = self.pushing[0]
            raise ConfigError(f"{option} is about the Hub, and nothing is to be pushed there.",
                              where=option, fix="add --to-hub")
        if self.create_pr and self.revision is not None:
            raise ConfigError("--create-pr and --revision exclude each other: a pull request has "
                              "a branch of its own.", where="command line", fix="give one of them")
        if self.repo_id is not None:
            check_repo_id(self.repo_id)

    def push_command(self, folder: Path) -> str:
        """The command that pushes ``folder`` to where this request does."""
        return shlex.join(["ppocli", "export", shown(folder), "--to-hub", *self.pushing])

    @property
    def pushing(self) -> list[str]:
        """The options given that are about the Hub, as they are typed."""
        words = ["--repo-id", self.repo_id] if self.repo_id is not None else []
        if self.private is not None:
            words.append("--private" if self.private else "--public")
        words += ["--create-pr"] if self.create_pr else []
        words += ["--revision", self.revision] if self.revision is not None else []
        return words

    @property
    def writing(self) -> list[str]:
        """The options given that are about what is written, not where it is pushed."""
        given = {"--output": self.output is not None, "--best": self.best,
                 "--step": self.step is not None, "--dtype": self.dtype is not None,
                 "--max-shard-size": self.max_shard_size is not None,
                 "--include-value-head": self.include_value_head, "--merge": self.merge is True,
                 "--adapter": self.merge is False, "--overwrite": self.overwrite}
        return [option for option, there in given.items() if there]


def parse_size(text: str) -> int:
    """``5GB`` in bytes (decimal units, as disks are sold).

    Raises:
        ConfigError: it is no positive size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|TB)", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise ConfigError(f"--max-shard-size {text} is no size.", where="--max-shard-size",
                          fix="a number with KB, MB, GB or TB: --max-shard-size 5GB")
    return size


def check_repo_id(repo_id: str) -> None:
    """Refuse what is a path or no name of a repository.

    Raises:
        ConfigError: says why.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        if repo_id.startswith((".", "/", "~")) or os.path.lexists(repo_id):
            raise HFValidationError("it is a path.")
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"--repo-id {repo_id} is no name of a repository: {first_line(error)}",
                          where="--repo-id", fix="--repo-id USER/NAME names a repository on the "
                          "Hub; --output DIR a folder") from error


def repo_name(name: str) -> str:
    """A run's name as the Hub takes names: letters, digits, ``-_.``, no more than 96."""
    plain = re.sub(r"-{2,}", "-", re.sub(r"\.{2,}", ".", re.sub(r"[^A-Za-z0-9_.-]+", "-", name)))
    plain = plain.removesuffix(".git")[:_LONGEST_NAME].strip("-.")
    return plain or "ppocli-model"


def shown(folder: Path) -> str:
    """A folder as the user would type it."""
    path = short_path(str(folder.absolute()))
    return path if "/" in path else f"./{path}"


def existing(request: ExportRequest) -> tuple[Path, str] | None:
    """The export that RUN names, and the name of its run, if it is there already and only has to be
    pushed.

    Raises:
        InputError: a file of it is missing, damaged or changed.
    """
    folder = Path(request.run or "").expanduser()
    asked = request.to_hub and request.run is not None and not request.writing
    if not asked or exports.read_record(folder) is None:
        return None
    record = exports.check_whole(folder)
    return folder.absolute(), str(record.get("run") or folder.name)


def resolve(request: ExportRequest, say: Say) -> exports.ExportPlan:
    """Find the policy and decide what to write where.

    Args:
        say: told what was chosen where the user left it open.

    Raises:
        ConfigError: options that don't fit the target; a destination that is in the way.
        CheckpointError, InputError: no such policy, or it can't be read.
    """
    target = find_target(request.run, say=say, step=request.step, best=request.best)
    if target.run_dir is not None:
        trust.check_run(target.run_dir, read_config(target.run_dir / CONFIG_FILE), ("model.",),
                        trusts=request.trust)
    target, critic = _with_critic(target) if request.include_value_head else (target, [])
    destination = _destination(request, target)
    source = _local(target.model)
    check_destination(request, destination, source)
    merge = _merges(request, source, target.name, say)
    facts = gather(target, network=not request.dry_run)
    if facts.run is None and (earlier := exports.earlier_export(source, say)) is not None:
        facts = replace(facts, name=earlier["run"] or facts.name, step=earlier["step"],
                        earlier=source)
    if facts.run is not None and not pictures.installed():
        say(f"no {CURVE}: {pictures.MISSING}")
    return exports.ExportPlan(
        target.name, source, destination, facts, request.dtype,
        parse_size(request.max_shard_size or DEFAULT_SHARD), merge, critic, request.repo_id,
        target.held, request.trust)


def _merges(request: ExportRequest, source: Path, name: str, say: Say) -> bool:
    """Whether an adapter is merged into its base: as asked, else where it can be.

    Raises:
        ConfigError: --merge or --adapter of what is no adapter, --merge of one that can't be
            merged, or options that an adapter's own folder hasn't.
    """
    if not model_files.is_adapter(source):
        if request.merge is not None:
            option = "--merge" if request.merge else "--adapter"
            raise ConfigError(f"{name} is no adapter but a whole model.", where=option,
                              fix=f"leave {option} out")
        return False
    kind = (atomic.read_json(source / model_files.ADAPTER_CONFIG) or {}).get("peft_type")
    if kind not in _VIRTUAL and request.merge is not False:
        return True
    if request.merge:
        raise ConfigError(f"{name} has virtual tokens ({kind}), which no weights of the base can "
                          "take in.", where="--merge", fix="leave --merge out: the adapter's own "
                          "folder is written, for PEFT")
    if request.merge is None:
        say(f"{kind} can't be merged into the base: writing the adapter's own folder, for PEFT")
    for option in ("--dtype", "--max-shard-size"):
        if option in request.writing:
            raise ConfigError(f"{option} is about a whole model, and an adapter's own folder is "
                              "written.", where=option, fix=f"leave {option} out, or --merge")
    return False


def _with_critic(target: Target) -> tuple[Target, list[Path]]:
    """The checkpoint of exactly the target's step, and the files of the value function in it; an
    export may hold them itself."""
    record = exports.read_record(Path(target.model)) or {}
    if target.run_dir is None and model_files.VALUE_HEAD in record.get("files", ()):
        return target, _critic(Path(target.model))
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
    if not (critic := _critic(target.checkpoint)):
        raise InputError(f"{target.name} has no value head: it was trained without a critic.",
                         where="--include-value-head", fix="leave the option out")
    return target, critic


def _critic(folder: Path) -> list[Path]:
    names = (model_files.VALUE_HEAD, model_files.VALUE_TRUNK)
    return [folder / name for name in names if (folder / name).is_file()]


def _destination(request: ExportRequest, target: Target) -> Path:
    if request.output is not None:
        return request.output.expanduser().absolute()
    if target.run_dir is None:
        fix = "--output DIR"
        if request.to_hub and request.writing and exports.read_record(Path(target.model)):
            fix += f"; or push it as it is: leave out {', '.join(request.writing)}"
        raise ConfigError(f"{target.name} belongs to no run: where should the export go?",
                          where="--output", fix=fix)
    run_folder.refuse_links(target.run_dir)
    return target.run_dir / "export" / target.label


def check_destination(request: ExportRequest, destination: Path, source: Path) -> None:
    """Nothing is overwritten without being asked, and never anything but an export.

    Raises:
        ConfigError: something lies there.
    """
    if not os.path.lexists(destination):
        return
    name = os.path.relpath(destination) if destination.is_relative_to(Path.cwd()) else destination
    if not destination.is_dir() or destination.is_symlink():
        raise ConfigError(f"{name} is a {'link' if destination.is_symlink() else 'file'}.",
                          where="--output", fix="name another folder: --output DIR")
    if not os.listdir(destination):
        return
    foreign = exports.foreign_files(destination)
    if is_run(destination) or source.is_relative_to(destination.resolve()) or (
            foreign and exports.read_record(destination) is None):
        raise ConfigError(f"{name} holds something that is no export ({foreign[0]}).",
                          where="--output", fix="name another folder: --output DIR")
    if not request.overwrite:
        again = request.push_command(destination)
        raise ConfigError(f"{name} holds an export already.", where="--output",
                          fix="add --overwrite, or name another folder: --output DIR"
                          + (f"; to push the one that is there: {again}" if request.to_hub else ""))
    if foreign:
        raise ConfigError(f"{name} holds files that are not the export's and would be lost "
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
        folder = Path(snapshot_download(model, allow_patterns=_PATTERNS))
    except Exception as error:  # whatever the Hub or the way there answers
        raise InputError(f"{model} can't be downloaded: {first_line(error)}",
                         where="RUN", fix=f"hf download {model}") from error
    model_files.check_folder(folder, key="RUN", adapters=True)
    return folder
