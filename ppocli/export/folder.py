"""An export on this disk: planned, written beside, verified, then published in one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ppocli.errors import CheckpointError, DiskError, InputError
from ppocli.export.card import CARD, CardInputs, render_again, render_card
from ppocli.export.curve import CURVE, curve
from ppocli.export.facts import Earlier, Facts, settings
from ppocli.export.masking import Mask
from ppocli.export.own_evaluation import EVALUATION
from ppocli.export.trained_card import is_encoder_decoder
from ppocli.export.verify import Verified, verification_prompts, verify_model
from ppocli.export.weights import (
    StoredTensor,
    WeightFiles,
    compare_weights,
    dtype_of,
    plan_files,
    stored_tensors,
    write_weights,
)
from ppocli.storage import faults
from ppocli.storage.adapter_files import BASE, CONFIG, is_adapter
from ppocli.storage.atomic import disk_fix, disk_sentence, free_bytes, read_json, sha256_file
from ppocli.storage.model_files import TOKENIZER_FILES, VALUE_HEAD, VALUE_TRUNK
from ppocli.storage.publishing import publish_folder
from ppocli.text import format_bytes
from ppocli.version import __version__

RECORD = "export.json"
"""what an export is of; also how an export is known from any other folder"""
TRAINING_CONFIG = "training_config.yaml"
_TOKENIZER = (*TOKENIZER_FILES, "merges.txt", "special_tokens_map.json", "added_tokens.json",
              "chat_template.jinja", "chat_template.json")
_OF_TRAINING = ("source", "run", "step", "evaluation", "run_id", "versions")
"""names in the record that are the same for an export of an export"""
ADAPTER_CONFIGS = (CONFIG, BASE)
_TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class ExportPlan:
    """What is going to be written. Made from headers and small files; nothing was loaded."""

    name: str
    """how messages call the source: ``runs/quickstart, step 24``"""
    source: Path
    """a plain Hugging Face folder with safetensors"""
    target: Path
    facts: Facts
    tensors: dict[str, StoredTensor]
    weights: WeightFiles
    dtype: str | None
    """the floating type that is asked for, None: as stored"""
    value_head: Path | None
    repo_id: str | None
    """where it will be pushed, if that is known; the card names it"""
    merge_shards: int | None = None
    """bytes of the largest file of an adapter that has to be merged into its base first"""

    @property
    def adapter(self) -> bool:
        """Whether an adapter's own files are written."""
        return self.merge_shards is None and is_adapter(self.source)

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
        return None if self.dtype in (None, self.stored) else self.dtype

    @property
    def bytes(self) -> int:
        """What the weights will take on the disk."""
        return self.weights.total + sum(path.stat().st_size for path in self.critic)

    @property
    def critic(self) -> list[Path]:
        """The files of the value function that are wanted."""
        if self.value_head is None:
            return []
        trunk = self.value_head.with_name(VALUE_TRUNK)
        return [self.value_head, *([trunk] if trunk.exists() else [])]

    def files(self) -> list[str]:
        """Names of everything that is going to be written."""
        configs = ADAPTER_CONFIGS if self.adapter else ("config.json",)
        names = [*self.weights.files, *configs, "generation_config.json",
                 *(file.name for file in _copied(self.source)), CARD, RECORD]
        if len(self.weights.files) > 1:
            names.append("model.safetensors.index.json")
        names += [path.name for path in self.critic]
        if self.facts.run is not None:
            names.append(TRAINING_CONFIG)
            names += [CURVE] if curve(self.facts.run) is not None else []
        if self.facts.evaluation is not None:
            names.append(EVALUATION)
        if self.facts.earlier is not None:
            names += [file.name for file in self.facts.earlier.files]
        return sorted(set(names))


def plan_export(name: str, source: Path, target: Path, facts: Facts, *, dtype: str | None,
                max_shard: int, value_head: Path | None, repo_id: str | None) -> ExportPlan:
    """Find out what an export will consist of.

    Raises:
        InputError: the source's weights can't be read, or are quantized and ``dtype`` is given.
    """
    tensors = stored_tensors(source)
    if dtype is not None and "quantization_config" in _json(source / "config.json"):
        raise InputError(f"{name} is quantized: its weights can't be cast to {dtype}.",
                         where="--dtype", fix="leave --dtype out")
    return ExportPlan(name, source, target, facts, tensors, plan_files(tensors, dtype, max_shard),
                      dtype, value_head, repo_id)


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
        raise DiskError(disk_sentence("Disk full", str(plan.target), plan.target.parent,
                                      format_bytes(plan.bytes)),
                        where=str(plan.target), fix=disk_fix("Disk full"))
    card = plan.target / CARD
    previous = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else None
    verified: list[Verified] = []

    def write(folder: Path) -> None:
        _write_files(plan, folder, previous, mask, check)
        verified.append(_verify(plan, folder, check))
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
    _write_configs(plan, folder)
    for file in _copied(plan.source):
        shutil.copyfile(file, folder / file.name)
    _forget_origin(folder / "tokenizer_config.json")
    for path in plan.critic:
        shutil.copyfile(path, folder / path.name)
    facts, drawn = plan.facts, None
    if facts.run is not None:
        _write_text(folder / TRAINING_CONFIG, yaml.safe_dump(
            mask.tree(settings(facts.run.config)), sort_keys=False, allow_unicode=True, width=100))
        drawn = curve(facts.run)
    if drawn is not None:
        _write_text(folder / CURVE, mask(drawn))
    if facts.evaluation is not None:
        _write_json(folder / EVALUATION, mask.tree(facts.evaluation))
    location = plan.repo_id or plan.target.name
    if facts.earlier is not None:
        for file in facts.earlier.files:
            shutil.copyfile(file, folder / file.name)
        card = render_again(facts.earlier.card, location, plan.written, previous, mask)
    else:
        card = render_card(
            CardInputs(facts, plan.written, location, chat=_has_chat_template(folder),
                       pair=is_encoder_decoder(plan.source), adapter=plan.adapter,
                       value_head=[path.name for path in plan.critic], curve=drawn is not None),
            previous, mask)
    _write_text(folder / CARD, card)
    faults.point("export.before_verify")
    check()


def _write_configs(plan: ExportPlan, folder: Path) -> None:
    """What says how the weights are to be loaded, and how to sample."""
    names = ["generation_config.json", *(ADAPTER_CONFIGS if plan.adapter else ())]
    for path in (plan.source / name for name in names):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    if plan.adapter:
        return
    _write_json(folder / "config.json", _model_config(plan))
    if not (plan.source / "generation_config.json").is_file():
        _derive_generation_config(plan.source, folder)


def _verify(plan: ExportPlan, folder: Path, check: Callable[[], None]) -> Verified:
    compare_weights(plan.source, plan.tensors, plan.dtype, folder, check)
    config = plan.facts.config
    return verify_model(
        plan.source, folder,
        verification_prompts([sample.prompt for sample in plan.facts.samples]), cast=plan.cast,
        num_tensors=len(plan.tensors), check=check,
        trust_remote_code=config.model.trust_remote_code if config is not None else False)


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


def _copied(source: Path) -> list[Path]:
    """Files that are copied as they are: the tokenizer's, and code that the model ships with."""
    found = [source / name for name in _TOKENIZER if (source / name).is_file()]
    if "auto_map" in _json(source / "config.json"):
        found += sorted(source.glob("*.py"))
    return found


def _model_config(plan: ExportPlan) -> dict[str, Any]:
    """The source's config.json, saying the type of the exported weights and no path."""
    config = _json(plan.source / "config.json")
    config.pop("_name_or_path", None)
    old = config.pop("torch_dtype", None)
    if plan.written in _TORCH_NAMES:
        config["dtype"] = _TORCH_NAMES[plan.written]
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
    if path.is_file():
        config = _json(path)
        if config.pop("name_or_path", None) is not None:
            _write_json(path, config)


def _has_chat_template(folder: Path) -> bool:
    return ((folder / "chat_template.jinja").is_file()
            or bool(_json(folder / "tokenizer_config.json").get("chat_template")))


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}", where=str(path),
                         fix="copy or download the file again") from error
    return value if isinstance(value, dict) else {}


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
                                               VALUE_TRUNK)
                  if name in record["files"])
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
