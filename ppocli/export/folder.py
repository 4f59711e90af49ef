"""An export on this disk: planned, written beside, verified, then published in one rename."""

import gc
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ppocli.config.resolved import yaml_text
from ppocli.errors import CheckpointError, InputError
from ppocli.export import plain_models, weights
from ppocli.export.card import CARD, CURVE, curve, render_again, render_card
from ppocli.export.facts import Facts, Mask
from ppocli.storage import atomic, faults, model_files
from ppocli.text import Say, format_bytes
from ppocli.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit

RECORD = "export.json"
"""what an export is of; also how an export is known from any other folder"""
TRAINING_CONFIG = "training_config.yaml"
EVALUATION = "eval.json"
TOKENIZER = (*model_files.TOKENIZER_FILES, "*.model", "*.spm", "*.tiktoken", "merges.txt",
              "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
              "chat_template.json", "additional_chat_templates/*.jinja", "emoji.json", "dict.txt",
              "entity_vocab.json", "byte_maps.json", "prophetnet.tokenizer", "*vocab*.json",
              "bpe.codes", "normalizer.json", "word_shape.json", "word_pronunciation.json")
"""patterns of files that tokenizers of transformers consist of"""
_GENERIC = ("Once upon a time", "The film was")
_OF_TRAINING = ("source", "run", "step", "evaluation", "run_id", "versions")
"""names in the record that are the same for an export of an export"""
_TOLD = (TRAINING_CONFIG, CURVE, EVALUATION, model_files.VALUE_HEAD, model_files.VALUE_TRUNK)
"""files of an export that come along with an export of it"""


@dataclass(frozen=True)
class ExportPlan:
    """What is going to be written, told from headers and small files; nothing is loaded.

    Raises:
        InputError: ``dtype`` is given and the weights are quantized; where they are asked for, they
            can't be read, or the base of an adapter isn't there.
    """

    name: str
    """how messages call the source: ``runs/quickstart, step 24``"""
    source: Path
    """a plain Hugging Face folder with safetensors, or an adapter's"""
    target: Path
    facts: Facts
    dtype: str | None
    """the floating type that is asked for"""
    max_shard: int
    """bytes of the largest weight file"""
    merge: bool
    """the source is an adapter, to be merged into its base first"""
    critic: list[Path]
    """the files of the value function that are wanted"""
    repo_id: str | None
    """where it will be pushed, if that is known; the card names it"""
    held: object = None
    """keeps a running run from pruning the source"""
    trusted: bool = False
    """the own code of a model that no run is known of may run"""

    def __post_init__(self) -> None:
        config = atomic.read_json(self.source / "config.json") or {}
        if self.dtype is not None and "quantization_config" in config:
            raise InputError(f"{self.name} is quantized: its weights can't be cast to "
                             f"{self.dtype}.", where="--dtype", fix="leave --dtype out")

    @property
    def adapter(self) -> bool:
        """Whether an adapter's own files are written."""
        return not self.merge and model_files.is_adapter(self.source)

    @cached_property
    def tensors(self) -> dict[str, weights.StoredTensor]:
        """Of the source, or of the base that it is merged into."""
        folder = plain_models.base_of(self.source) if self.merge else self.source
        return weights.stored_tensors(folder)

    @cached_property
    def shards(self) -> "StateDictSplit":
        """The weight files."""
        if self.adapter:  # one file, whatever its size: PEFT knows no shards
            size = sum(tensor.num_bytes for tensor in self.tensors.values())
            return weights.plan_files(self.tensors, None, size, model_files.ADAPTER_WEIGHTS)
        return weights.plan_files(self.tensors, self.cast, self.max_shard)

    @property
    def stored(self) -> str:
        """The floating type of the source's weights."""
        return weights.dtype_of(self.tensors)

    @property
    def written(self) -> str:
        """The floating type of the exported weights; what is merged has fp32 in between."""
        return self.dtype or ("fp32" if self.merge else self.stored)

    @property
    def cast(self) -> str | None:
        """The floating type that weights are converted to, None where they have it already."""
        return None if self.written == self.stored and not self.merge else self.written

    @property
    def bytes(self) -> int:
        """What the weights will take on the disk."""
        return int(self.shards.metadata["total_size"]) + sum(
            path.stat().st_size for path in self.critic)

    @property
    def trust_remote_code(self) -> bool:
        """Whether code that the model ships with may run."""
        config = self.facts.config
        return self.trusted if config is None else config.model.trust_remote_code

    @property
    def prompts(self) -> list[str]:
        """What the export is compared with its source on: two, the run's own where there are any.
        """
        texts = [str(after["prompt"]) for _, after in self.facts.samples]
        return list(dict.fromkeys([*filter(str.strip, texts), *_GENERIC]))[:2]

    def files(self) -> list[str]:
        """Names of everything that is going to be written."""
        return sorted({*self.shards.filename_to_tensors, CARD, RECORD, *_contents(self, Mask({})),
                       *([weights.INDEX] if self.shards.is_sharded else [])})


def write_export(plan: ExportPlan, mask: Mask, check: Callable[[], None]) -> dict[str, Any]:
    """Write, verify and publish; on any failure ``plan.target`` is as it was before. Returned is
    what was compared: the number of ``tensors``, and what :func:`.weights.verify_model` tells.

    Args:
        mask: every text that is written passes it.
        check: called at every point where stopping is safe; may raise to stop.

    Raises:
        CheckpointError: the result isn't what the source is.
        DiskError: the disk refused.
        InputError: the source can't be loaded.
    """
    free = atomic.free_bytes(plan.target.parent)
    if free is not None and free < plan.bytes:
        raise atomic.disk_refused("Disk full", plan.target, format_bytes(plan.bytes))
    if not plan.merge:
        return _publish(plan, mask, check)
    atomic.make_dirs(plan.target.parent)
    with TemporaryDirectory(dir=plan.target.parent, prefix=".merged-") as place:
        plain_models.write_merged(plan.source, Path(place), plan.prompts, plan.trust_remote_code,
                                  check)
        gc.collect()
        return _publish(replace(plan, source=Path(place), merge=False, dtype=plan.written), mask,
                        check)


def _publish(plan: ExportPlan, mask: Mask, check: Callable[[], None]) -> dict[str, Any]:
    previous = _read_text(plan.target / CARD) if (plan.target / CARD).is_file() else None
    verified: dict[str, Any] = {"tensors": len(plan.tensors)}

    def write(folder: Path) -> None:
        _write_files(plan, folder, previous, mask, check)
        faults.point("export.before_verify")
        check()
        weights.compare_weights(plan.source, plan.tensors, plan.cast, folder, check)
        verified.update(weights.verify_model(
            plan.source, folder, plan.prompts, cast=plan.cast,
            trust_remote_code=plan.trust_remote_code, check=check))
        _write_record(plan, folder, verified, mask)
        check()

    try:
        atomic.publish_folder(write, plan.target)
    except FileNotFoundError as error:
        if plan.source.is_dir():
            raise
        raise CheckpointError(f"{plan.name} was deleted while it was exported: {error.filename}.",
                              where=str(plan.source), fix="export again; --best names a checkpoint "
                              "that stays longer") from error
    return verified


def _write_files(plan: ExportPlan, folder: Path, previous: str | None, mask: Mask,
                 check: Callable[[], None]) -> None:
    weights.write_weights(plan.source, plan.tensors, plan.shards, plan.cast, folder, check)
    contents, facts = _contents(plan, mask), plan.facts
    for name, content in contents.items():
        if isinstance(content, Path):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_text(content, encoding="utf-8")
    location = plan.repo_id or plan.target.name
    if facts.earlier is not None:
        card = render_again(_read_text(facts.earlier / CARD), location, plan.written, previous,
                            mask)
    else:
        card = render_card(facts, plan.source, previous, mask, dtype=plan.written,
                           location=location, value_head=[path.name for path in plan.critic],
                           curve=CURVE in contents)
    (folder / CARD).write_text(card, encoding="utf-8")


def _contents(plan: ExportPlan, mask: Mask) -> dict[str, Path | str]:
    """Name -> text, or the file that is copied as it is, of all but weights, card and record."""
    facts, source = plan.facts, plan.source
    found: dict[str, Path | str] = {**_copied(plan), **{file.name: file for file in plan.critic}}
    if not plan.adapter:
        found["config.json"] = _json(_model_config(plan))
        if plain_models.GENERATION not in found:
            found[plain_models.GENERATION] = _derived_generation_config(plan)
    tokenizer = atomic.read_json(source / "tokenizer_config.json") or {}
    if tokenizer.pop("name_or_path", None) is not None:  # the folder that it was once loaded from
        found["tokenizer_config.json"] = _json(tokenizer)
    if facts.run is not None:
        found[TRAINING_CONFIG] = yaml_text(mask.tree(asdict(facts.run.config)))
        if (drawn := curve(facts.run)) is not None:
            found[CURVE] = mask(drawn)
    if facts.evaluation is not None:
        found[EVALUATION] = _json(mask.tree(facts.evaluation))
    return found


def _write_record(plan: ExportPlan, folder: Path, verified: dict[str, Any], mask: Mask) -> None:
    facts = plan.facts
    summary = (facts.run and facts.run.summary) or {}
    record: dict[str, Any] = {
        "ppocli": __version__, "source": facts.name, "run": facts.name if facts.run else None,
        "step": facts.step, "dtype": plan.written, "tensors": len(plan.tensors),
        "verified": verified,
        "evaluation": {"before": facts.before, "after": facts.after} if facts.run else None,
        "run_id": summary.get("run_id"), "versions": facts.versions}
    if facts.earlier is not None:
        told = read_record(facts.earlier) or {}
        record |= {name: told.get(name) for name in _OF_TRAINING}
    record = mask.tree(record)
    written = (file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != CARD)
    record["files"] = {file.relative_to(folder).as_posix(): atomic.sha256_file(file)
                       for file in written}
    (folder / RECORD).write_text(_json(record), encoding="utf-8")


def _copied(plan: ExportPlan) -> dict[str, Path]:
    """Files that are copied as they are: the tokenizer's, how to sample, what PEFT reads of an
    adapter, what an earlier export tells, and code that the model ships with."""
    ours = (model_files.ADAPTER_CONFIG, model_files.ADAPTER_BASE) if plan.adapter else ()
    told = _TOLD if plan.facts.earlier is not None else ()
    names = [*TOKENIZER, plain_models.GENERATION, *ours, *told]
    if any("auto_map" in (atomic.read_json(plan.source / name) or {})
           for name in ("config.json", "tokenizer_config.json")):
        names.append("*.py")
    return {path.relative_to(plan.source).as_posix(): path for name in names
            for path in sorted(plan.source.glob(name)) if path.is_file()}


def _model_config(plan: ExportPlan) -> dict[str, Any]:
    """The source's config.json, saying the type of the exported weights and no path."""
    config = atomic.read_json(plan.source / "config.json") or {}
    config.pop("_name_or_path", None)
    parts = [part for part in config.values()  # of a model made of several, e.g. text_config
             if isinstance(part, dict) and {"dtype", "torch_dtype"} & part.keys()]
    for part in [config, *parts] if plan.written in weights.TORCH_DTYPES else []:
        part.pop("torch_dtype", None)
        part["dtype"] = weights.TORCH_DTYPES[plan.written]
    return config


def _derived_generation_config(plan: ExportPlan) -> str:
    """What transformers would take for generation where the source says nothing."""
    from transformers import AutoConfig, GenerationConfig

    from ppocli.models.loading.model_config import loading

    with loading(f"configuration of {plan.name}", "RUN", "--trust"):
        config = AutoConfig.from_pretrained(str(plan.source), local_files_only=True,
                                            trust_remote_code=plan.trust_remote_code)
    return str(GenerationConfig.from_model_config(config).to_json_string())


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def read_record(folder: Path) -> dict[str, Any] | None:
    """What an exported folder says of itself; None for a folder that is no export."""
    record = atomic.read_json(folder / RECORD)
    return record if record is not None and isinstance(record.get("files"), dict) else None


def foreign_files(folder: Path) -> list[str]:
    """What lies in ``folder`` that no export put there."""
    if (record := read_record(folder)) is None:
        return sorted(os.listdir(folder))
    known = {CARD, RECORD, *record["files"]}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*")
             if path.is_symlink() or not path.is_dir() or not any(path.iterdir())}
    return sorted(there - known)


def earlier_export(source: Path, say: Say) -> dict[str, Any] | None:
    """The record of the export in ``source``; None for any other folder, and for an export with
    files that were changed: it tells of other weights."""
    if read_record(source) is None or not (source / CARD).is_file():
        return None
    try:
        return check_whole(source, links=True)  # a snapshot of a Hub repository is made of them
    except InputError as changed:
        say(f"{changed.what} What it tells of its training is left behind.")
        return None


def check_whole(folder: Path, *, links: bool = False) -> dict[str, Any]:
    """The record of an export whose files are all as they were written; only the card may differ.

    Args:
        folder: the export.
        links: whether links to such files do.

    Raises:
        InputError: it is no export, or a file of it is missing, damaged or changed.
    """
    if (record := read_record(folder)) is None:
        raise InputError(f"{folder} was not made by ppocli export (no {RECORD}).",
                         where=str(folder), fix="export it first, with --output NEW")
    for name, digest in record["files"].items():
        path = folder / name
        if (not path.is_file() or (path.is_symlink() and not links)
                or atomic.sha256_file(path) != digest):
            raise InputError(f"{name} in {folder} is not as it was exported.", where=str(path),
                             fix="export again, with --overwrite")
    return record
