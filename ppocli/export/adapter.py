"""What an export makes of an adapter: the adapter's own files, or the base with it merged in."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppocli.config.schema import ModelConfig
from ppocli.errors import CheckpointError, ConfigError
from ppocli.export.folder import ExportPlan, plan_export
from ppocli.export.verify import difference, verification_prompts
from ppocli.export.weights import WeightFiles, plan_files, stored_tensors
from ppocli.storage.adapter_files import BASE, CONFIG, WEIGHTS, is_adapter, named_base
from ppocli.storage.model_files import find_model

MERGED_TOLERANCE = 1e-5
"""how far logits may be from those of base and adapter apart (relative RMS, in fp32)"""


def merges(source: Path, asked: bool | None, name: str, say: Callable[[str], None]) -> bool:
    """Whether an adapter is merged into its base: as asked, else where it can be.

    Args:
        asked: --merge or --adapter; None where neither was given.
        say: told where an adapter that can't be merged is written as it is.

    Raises:
        ConfigError: asked of what is no adapter, or of one that can't be merged.
    """
    option = "--merge" if asked else "--adapter"
    if not is_adapter(source):
        if asked is not None:
            raise ConfigError(f"{name} is no adapter but a whole model.", where=option,
                              fix=f"leave {option} out")
        return False
    if asked is False:
        return False
    kind = adapter_type(source)
    if kind == "LORA":
        return True
    if asked:
        raise ConfigError(f"{name} has virtual tokens ({kind}), which no weights of the base can "
                          "take in.", where="--merge", fix="leave --merge out: the adapter's own "
                          "folder is written, for PEFT")
    say(f"{kind} can't be merged into the base: writing the adapter's own folder, for PEFT")
    return False


def adapter_type(source: Path) -> str:
    """LORA, PREFIX_TUNING or PROMPT_TUNING, as the adapter's folder says."""
    return str(json.loads((source / CONFIG).read_text(encoding="utf-8")).get("peft_type"))


def plan_adapter(plan_of: Callable[..., ExportPlan], source: Path, *, merge: bool,
                 dtype: str | None, max_shard: int, given: list[str]) -> ExportPlan:
    """An export of an adapter.

    Args:
        plan_of: makes a plan from tensors, weights and dtype.
        given: options about what is written.

    Raises:
        ConfigError: options that an adapter's own folder hasn't.
        InputError: the base isn't there.
    """
    if merge:
        base = Path(find_model(named_base(source)[0], key=str(source), needs="model")[0])
        tensors, wanted = stored_tensors(base), dtype or "fp32"
        return plan_of(tensors, plan_files(tensors, wanted, max_shard), wanted,
                       merge_shards=max_shard)
    for option in ("--dtype", "--max-shard-size"):
        if option in given:
            raise ConfigError(f"{option} is about a whole model, and an adapter's own folder is "
                              "written.", where=option, fix=f"leave {option} out, or --merge")
    tensors = stored_tensors(source)
    size = sum(tensor.num_bytes for tensor in tensors.values())
    return plan_of(tensors, WeightFiles({WEIGHTS: list(tensors)}, {WEIGHTS: size}), None)


def merged(plan: ExportPlan, place: Path, check: Callable[[], None]) -> ExportPlan:
    """The plan of a whole model: the adapter merged into its base, in fp32, written to ``place``.

    Raises:
        CheckpointError: the merged model says something else than base and adapter.
    """
    import torch

    from ppocli.models.loading.language_model import load_lm, load_tokenizer

    assert plan.merge_shards is not None
    if not torch.cuda.is_available():
        # transformers imports deepspeed when it saves, which would guess and say so on stdout
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    config = plan.facts.config
    cfg = ModelConfig(path=str(plan.source), trust_remote_code=bool(
        config is not None and config.model.trust_remote_code))
    loaded, tokenizer = load_lm(cfg), load_tokenizer(cfg)
    assert loaded.adapter is not None
    prompts = verification_prompts([sample.prompt for sample in plan.facts.samples])
    ids = [list(tokenizer(prompt)["input_ids"]) or [0] for prompt in prompts]
    expected = _logits(loaded.lm, loaded.decoder_start, ids)
    check()
    lm = loaded.adapter.model.merge_and_unload()
    found = _logits(lm, loaded.decoder_start, ids)
    worst = max(difference(a, b) for a, b in zip(expected, found, strict=True))
    if not worst <= MERGED_TOLERANCE:
        raise CheckpointError(
            f"The merged model's logits are off by {worst:.3g} (relative RMS; allowed: "
            f"{MERGED_TOLERANCE:g}). Nothing was published.",
            fix="write the adapter's own folder: --adapter")
    check()
    lm.save_pretrained(place, safe_serialization=True)
    export_config = loaded.export_config
    export_config.architectures, export_config.dtype = [type(lm).__name__], "float32"
    export_config.save_pretrained(place)
    if not (plan.source / "generation_config.json").is_file():
        loaded.generation_config.save_pretrained(place)
    for file in plan.source.iterdir():
        if file.is_file() and file.name not in (CONFIG, BASE, WEIGHTS, "README.md"):
            shutil.copyfile(file, place / file.name)
    del loaded, lm
    gc.collect()
    dtype = None if plan.dtype == "fp32" else plan.dtype
    return plan_export(plan.name, place, plan.target, plan.facts, dtype=dtype,
                       max_shard=plan.merge_shards, value_head=plan.value_head,
                       repo_id=plan.repo_id)


def _logits(lm: Any, start: int | None, ids: list[list[int]]) -> list[Any]:
    """Logits [T, V] of each prompt, fp32 on the CPU, virtual tokens left out."""
    import torch

    found = []
    with torch.inference_mode():
        for row in ids:
            given = {"input_ids": torch.tensor([row])}
            if start is not None:
                given["decoder_input_ids"] = torch.tensor([[start, *row[:-1]]])
            found.append(lm(**given).logits[0].float().clone())
    return found
