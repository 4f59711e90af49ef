"""An export on this disk: planned, written beside, verified, then published in one rename."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from ppocli.errors import CheckpointError, InputError
from ppocli.export.card import CARD, CURVE, curve, render_again, render_card
from ppocli.export.facts import Earlier, Facts, Mask, is_encoder_decoder
from ppocli.export.verify import Verified, verification_prompts, verify_model
from ppocli.export.weights import (
    INDEX,
    TORCH_DTYPES,
    StoredTensor,
    compare_weights,
    dtype_of,
    plan_files,
    stored_tensors,
    write_merged,
    write_weights,
)
from ppocli.storage import faults
from ppocli.storage.atomic import (
    disk_refused,
    free_bytes,
    make_dirs,
    publish_folder,
    read_json,
    sha256_file,
)
from ppocli.storage.model_files import (
    ADAPTER_BASE,
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    TOKENIZER_FILES,
    VALUE_HEAD,
    VALUE_TRUNK,
    find_model,
    is_adapter,
    named_base,
)
from ppocli.text import format_bytes
from ppocli.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import StateDictSplit

RECORD = "export.json"
"""what an export is of; also how an export is known from any other folder"""
TRAINING_CONFIG = "training_config.yaml"
EVALUATION = "eval.json"
_GENERATION = "generation_config.json"
_TOKENIZER = (*TOKENIZER_FILES, "merges.txt", "special_tokens_map.json", "added_tokens.json",
              "chat_template.jinja", "chat_template.json")
_OF_TRAINING = ("source", "run", "step", "evaluation", "run_id", "versions")
"""names in the record that are the same for an export of an export"""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What is going to be written. Made from headers and small files; nothing was loaded."""

    name: str
    """how messages call the source: ``runs/quickstart, step 24``"""
    source: Path
    """a plain Hugging Face folder with safetensors, or an adapter's"""
    target: Path
    facts: Facts
    tensors: dict[str, StoredTensor]
    weights: StateDictSplit
    dtype: str | None
    """the floating type that is asked for, None: as stored"""
    max_shard: int
    """bytes of the largest weight file"""
    merge: bool
    """the source is an adapter, to be merged into its base first"""
    value_head: Path | None
    repo_id: str | None
    """where it will be pushed, if that is known; the card names it"""

    @property
    def adapter(self) -> bool:
        """Whether an adapter's own files are written."""
        return not self.merge and is_adapter(self.source)

    @property
    def stored(self) -> str:
        """The floating type of the source's weights."""
        return dtype_of(self.tensors)

    @property
    def written(self) -> str:
        """The floating type of the exported weights."""
        return self.dtype or self.stored

    @property
    def cast(self) -> str | None:
        """The type that weights are converted to, None where they already have it."""
        return None if self.dtype == self.stored else self.dtype

    @property
    def bytes(self) -> int:
        """What the weights will take on the disk."""
        return int(self.weights.metadata["total_size"]) + sum(
            path.stat().st_size for path in self.critic)

    @property
    def critic(self) -> list[Path]:
        """The files of the value function that are wanted."""
        if self.value_head is None:
            return []
        trunk = self.value_head.with_name(VALUE_TRUNK)
        return [self.value_head, *([trunk] if trunk.exists() else [])]

    @property
    def trust_remote_code(self) -> bool:
        """Whether code that the model ships with may run."""
        config = self.facts.config
        return config is not None and config.model.trust_remote_code

    @property
    def prompts(self) -> list[str]:
        """What the export is compared with its source on."""
        return verification_prompts([sample.prompt for sample in self.facts.samples])

    def files(self) -> list[str]:
        """Names of everything that is going to be written."""
        names = {*self.weights.filename_to_tensors, CARD, RECORD,
                 *(() if self.adapter else ("config.json", _GENERATION)),
                 *(path.name for path in (*_copied(self), *self.critic))}
        if self.weights.is_sharded:
            names.add(INDEX)
        if self.facts.run is not None:
            names |= {TRAINING_CONFIG, CURVE} if curve(self.facts.run) else {TRAINING_CONFIG}
        if self.facts.evaluation is not None:
            names.add(EVALUATION)
        if self.facts.earlier is not None:
            names |= {file.name for file in self.facts.earlier.files}
        return sorted(names)


def plan_export(name: str, source: Path, target: Path, facts: Facts, *, dtype: str | None,
                max_shard: int, merge: bool, value_head: Path | None, repo_id: str | None
                ) -> ExportPlan:
    """Find out what an export will consist of.

    Raises:
        InputError: the weights can't be read, or are quantized and ``dtype`` is given; the base of
            an adapter isn't there.
    """
    stored, dtype = source, (dtype or "fp32") if merge else dtype
    if merge:
        stored = Path(find_model(named_base(source)[0], key=str(source), needs="model")[0])
    if dtype is not None and "quantization_config" in (read_json(source / "config.json") or {}):
        raise InputError(f"{name} is quantized: its weights can't be cast to {dtype}.",
                         where="--dtype", fix="leave --dtype out")
    tensors = stored_tensors(stored)
    weights = plan_files(tensors, dtype, max_shard)
    if is_adapter(stored):  # one file, whatever its size: PEFT knows no shards
        weights = plan_files(tensors, None, weights.metadata["total_size"], ADAPTER_WEIGHTS)
    return ExportPlan(name, source, target, facts, tensors, weights, dtype, max_shard, merge,
                      value_head, repo_id)


def write_export(plan: ExportPlan, mask: Mask, check: Callable[[], None]) -> Verified:
    """Write, verify and publish; on any failure ``plan.target`` is as it was before.

    Args:
        mask: every text that is written passes it.
        check: called at every point where stopping is safe; may raise to stop.

    Raises:
        CheckpointError: the result isn't what the source is.
        DiskError: the disk refused.
        InputError: the source can't be loaded.
    """
    free = free_bytes(plan.target.parent)
    if free is not None and free < plan.bytes:
        raise disk_refused("Disk full", plan.target, format_bytes(plan.bytes))
    if not plan.merge:
        return _publish(plan, mask, check)
    make_dirs(plan.target.parent)
    with TemporaryDirectory(dir=plan.target.parent, prefix=".merged-") as place:
        write_merged(plan.source, Path(place), plan.prompts, plan.trust_remote_code, check)
        gc.collect()
        return _publish(plan_export(
            plan.name, Path(place), plan.target, plan.facts, merge=False,
            dtype=None if plan.dtype == "fp32" else plan.dtype, max_shard=plan.max_shard,
            value_head=plan.value_head, repo_id=plan.repo_id), mask, check)


def _publish(plan: ExportPlan, mask: Mask, check: Callable[[], None]) -> Verified:
    card = plan.target / CARD
    previous = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else None
    verified: list[Verified] = []

    def write(folder: Path) -> None:
        _write_files(plan, folder, previous, mask, check)
        faults.point("export.before_verify")
        check()
        compare_weights(plan.source, plan.tensors, plan.dtype, folder, check)
        verified.append(verify_model(
            plan.source, folder, plan.prompts, cast=plan.cast, num_tensors=len(plan.tensors),
            trust_remote_code=plan.trust_remote_code, check=check))
        _write_record(plan, folder, verified[0], mask)
        check()

    try:
        publish_folder(write, plan.target)
    except FileNotFoundError as error:
        if plan.source.is_dir():
            raise
        raise CheckpointError(f"{plan.name} was deleted while it was exported: {error.filename}.",
                              where=str(plan.source),
                              fix="export again; --best names a checkpoint that stays longer"
                              ) from error
    return verified[0]


def _write_files(plan: ExportPlan, folder: Path, previous: str | None, mask: Mask,
                 check: Callable[[], None]) -> None:
    write_weights(plan.source, plan.tensors, plan.weights, plan.dtype, folder, check)
    facts, drawn = plan.facts, None
    told = facts.earlier.files if facts.earlier is not None else ()
    for file in (*_copied(plan), *plan.critic, *told):
        shutil.copyfile(file, folder / file.name)
    if not plan.adapter:
        _write_json(folder / "config.json", _model_config(plan))
        if not (folder / _GENERATION).is_file():
            _derive_generation_config(plan.source, folder)
    _forget_origin(folder / "tokenizer_config.json")
    if facts.run is not None:
        _write_text(folder / TRAINING_CONFIG, yaml.safe_dump(
            mask.tree(asdict(facts.run.config)), sort_keys=False, allow_unicode=True, width=100))
        drawn = curve(facts.run)
    if drawn is not None:
        _write_text(folder / CURVE, mask(drawn))
    if facts.evaluation is not None:
        _write_json(folder / EVALUATION, mask.tree(facts.evaluation))
    location = plan.repo_id or plan.target.name
    if facts.earlier is not None:
        card = render_again(facts.earlier.card, location, plan.written, previous, mask)
    else:
        card = render_card(facts, previous, mask, dtype=plan.written, location=location,
                           chat=_has_chat_template(folder), pair=is_encoder_decoder(plan.source),
                           value_head=[path.name for path in plan.critic], curve=drawn is not None,
                           adapter=plan.adapter)
    _write_text(folder / CARD, card)


def _write_record(plan: ExportPlan, folder: Path, verified: Verified, mask: Mask) -> None:
    facts = plan.facts
    summary = facts.run.summary if facts.run is not None else None
    record: dict[str, Any] = {
        "ppocli": __version__, "source": facts.name, "run": facts.name if facts.run else None,
        "step": facts.step, "dtype": plan.written, "tensors": len(plan.tensors),
        "verified": asdict(verified),
        "evaluation": {"before": facts.before, "after": facts.after} if facts.run else None,
        "run_id": (summary or {}).get("run_id"), "versions": facts.versions}
    if facts.earlier is not None:
        record |= {name: facts.earlier.record.get(name) for name in _OF_TRAINING}
    record = mask.tree(record)
    record["files"] = {file.name: sha256_file(file) for file in sorted(folder.iterdir())
                       if file.name != CARD}
    _write_json(folder / RECORD, record)


def _copied(plan: ExportPlan) -> list[Path]:
    """Files that are copied as they are: the tokenizer's, how to sample, what PEFT reads of an
    adapter, and code that the model ships with."""
    names = [*_TOKENIZER, _GENERATION, *((ADAPTER_CONFIG, ADAPTER_BASE) if plan.adapter else ())]
    found = [plan.source / name for name in names if (plan.source / name).is_file()]
    if "auto_map" in (read_json(plan.source / "config.json") or {}):
        found += sorted(plan.source.glob("*.py"))
    return found


def _model_config(plan: ExportPlan) -> dict[str, Any]:
    """The source's config.json, saying the type of the exported weights and no path."""
    config = read_json(plan.source / "config.json") or {}
    config.pop("_name_or_path", None)
    old = config.pop("torch_dtype", None)
    if plan.written in TORCH_DTYPES:
        config["dtype"] = TORCH_DTYPES[plan.written]
        for part in config.values():  # of a model made of several, e.g. text_config
            if isinstance(part, dict) and {"dtype", "torch_dtype"} & part.keys():
                part.pop("torch_dtype", None)
                part["dtype"] = config["dtype"]
    elif old is not None:
        config.setdefault("dtype", old)
    return config


def _derive_generation_config(source: Path, folder: Path) -> None:
    """What transformers would take for generation where the source says nothing."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(str(source), local_files_only=True)
    GenerationConfig.from_model_config(config).save_pretrained(str(folder))


def _forget_origin(path: Path) -> None:
    """Take the folder that a tokenizer was once loaded from out of its configuration."""
    config = read_json(path) or {}
    if config.pop("name_or_path", None) is not None:
        _write_json(path, config)


def _has_chat_template(folder: Path) -> bool:
    return ((folder / "chat_template.jinja").is_file()
            or bool((read_json(folder / "tokenizer_config.json") or {}).get("chat_template")))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """What an exported folder says of itself; None for a folder that is no export."""
    record = read_json(folder / RECORD)
    return record if record is not None and isinstance(record.get("files"), dict) else None


def foreign_files(folder: Path) -> list[str]:
    """What lies in ``folder`` that no export put there."""
    record = read_record(folder)
    known = set() if record is None else {CARD, RECORD, *record["files"]}
    return sorted(name for name in os.listdir(folder) if name not in known)


def earlier_export(source: Path, say: Callable[[str], None]) -> Earlier | None:
    """What the export in ``source`` tells of its training; None for any other folder, and for an
    export with files that were changed: it tells of other weights."""
    record, card = read_record(source), source / CARD
    if record is None or not card.is_file():
        return None
    try:
        check_whole(source, links=True)  # a snapshot of a Hub repository is made of them
    except InputError as changed:
        say(f"{changed.what} What it tells of its training is left behind.")
        return None
    files = tuple(source / name for name in (TRAINING_CONFIG, CURVE, EVALUATION, VALUE_HEAD,
                                             VALUE_TRUNK) if name in record["files"])
    return Earlier(record, card.read_text(encoding="utf-8", errors="replace"), files)


def check_whole(folder: Path, *, links: bool = False) -> dict[str, Any]:
    """The record of an export whose files are all as they were written; only the card may differ.

    Args:
        folder: the export.
        links: whether links to such files do.

    Raises:
        InputError: it is no export, or a file of it is missing, damaged or changed.
    """
    record = read_record(folder)
    if record is None:
        raise InputError(f"{folder} was not made by ppocli export (no {RECORD}).",
                         where=str(folder), fix="export it first, with --output NEW")
    for name, digest in record["files"].items():
        path = folder / name
        if (not path.is_file() or (path.is_symlink() and not links)
                or sha256_file(path) != digest):
            raise InputError(f"{name} in {folder} is not as it was exported.", where=str(path),
                             fix="export again, with --overwrite")
    return record
