"""A policy as a plain Hugging Face folder: loaded, merged, cast and saved by transformers and PEFT,
then loaded again from the new folder alone and compared with its source on one batch; and pushed to
the Hub."""

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from ppocli.config.config_yaml import CONFIG_FILE, read_config, yaml_text
from ppocli.config.text import each_text, first_line, pasted, short_path
from ppocli.errors import CheckpointError, ConfigError, HubError
from ppocli.publish import card
from ppocli.runs import atomic, faults, model_files
from ppocli.runs.checkpoints import find_latest
from ppocli.runs.run_folder import RunFolder, refuse_links
from ppocli.runs.target import Target
from ppocli.runs.trust import check_run
from ppocli.version import __version__

log = logging.getLogger("ppocli")

RECORD = "export.json"
"""what was exported, with the names of all files; tells an export from any other folder"""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_DOWNLOADED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]
_STALE = ["config.json", "model*.safetensors", "model.safetensors.index.json", "eval.json",
          model_files.ADAPTER_CONFIG, model_files.ADAPTER_WEIGHTS, model_files.ADAPTER_BASE,
          model_files.VALUE_HEAD, model_files.VALUE_TRUNK, f"{model_files.VALUE_ADAPTER}/*",
          "additional_chat_templates/*.jinja"]
"""files of an earlier export that this one may not have: transformers would load the wrong weights,
or put an adapter on weights that it was merged into"""
_TOLERANCE = 1e-5
"""largest relative RMS difference of logits between source and export, both in fp32"""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What is going to be written where."""

    target: Target
    source: Path
    """folder of a whole model or an adapter"""
    folder: Path
    """to be written"""
    location: str
    """what the card passes to ``from_pretrained``"""
    merge: bool
    """merge the adapter in ``source`` into its base"""
    dtype: str | None
    """``bf16``; None: as stored, fp32 after a merge"""
    overwrite: bool
    trust_remote_code: bool


def plan_export(target: Target, output: Path | None, repo: str | None, merge: bool | None,
                dtype: str | None, overwrite: bool, trust: bool) -> ExportPlan:
    """Decide what to write where; a Hub model is downloaded.

    Args:
        output, merge, dtype, overwrite, trust: the options, None where they weren't typed.
        repo: repository on the Hub that the export goes to.

    Raises:
        CheckpointError: somebody else's run would run a model's own code without ``trust``.
        ConfigError: options that don't fit the target, or something is in the way.
        InputError: the model can't be downloaded.
    """
    from ppocli.models.loading.model_config import loading

    if target.run_dir is not None:
        settings = read_config(target.run_dir / CONFIG_FILE)
        check_run(target.run_dir, settings, ("model.",), trusts=trust)
        refuse_links(target.run_dir)
        trust, output = settings.model.trust_remote_code, \
            output or target.run_dir / "export" / target.label
    if output is None:
        raise ConfigError(f"{target.name} belongs to no run: where should the export go?",
                          where="--output", fix="--output DIR")
    source, folder = Path(target.model), output.expanduser().absolute()
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        with loading(f"model {target.model}", "RUN", "--trust"):
            source = Path(snapshot_download(target.model, allow_patterns=_DOWNLOADED))
    check_folder(folder, source, overwrite)
    adapter = model_files.is_adapter(source)
    config = atomic.read_json(source / model_files.ADAPTER_CONFIG) or {}
    merges = adapter and merge is not False and "num_virtual_tokens" not in config
    if (merge is not None and not adapter) or (merge and not merges) or (
            dtype and adapter and not merges):
        kind = f"an adapter ({config['peft_type']})" if adapter else "a whole model"
        raise ConfigError(f"{target.name} is {kind}: --merge needs an adapter without virtual "
                          "tokens, --adapter an adapter, --dtype a whole model or --merge.",
                          where="command line", fix="leave the option out")
    return ExportPlan(target, source, folder, repo or folder.name, merges, dtype, overwrite, trust)


def load_model(folder: Path, trust_remote_code: bool) -> Any:
    """The model in a folder, or the adapter there on its base, by transformers and PEFT alone, in
    the type it is stored in.

    Raises:
        InputError: an adapter without a base, or for another type of task.
        ValueError: weights are missing.
    """
    import transformers
    from safetensors import safe_open

    from ppocli.models.loading.load_adapters import load_frozen

    base, revision = model_files.find_whole(str(folder), key="RUN")
    auto: Any = getattr(transformers, f"AutoModel{card.AUTO_CLASSES[card.task_of(folder)]}")
    shapes: dict[str, list[int]] = {}
    if adapter := model_files.is_adapter(folder):
        with safe_open(folder / model_files.ADAPTER_WEIGHTS, framework="pt") as file:
            shapes = {key.removeprefix("base_model.model."): file.get_slice(key).get_shape()
                      for key in file.keys()}  # noqa: SIM118
    labels = [shape[0] for name, shape in shapes.items() if name.endswith(model_files.HEADS)]
    model, info = auto.from_pretrained(
        base, revision=revision, trust_remote_code=trust_remote_code, dtype="auto",
        output_loading_info=True, ignore_mismatched_sizes=adapter,
        **({"num_labels": labels[0]} if labels else {}))
    if missing := set(info["missing_keys"]) - shapes.keys():
        raise ValueError(f"weights are missing: {min(missing)}")
    return (load_frozen(model, folder) if adapter else model).eval()


def save_model(plan: ExportPlan, folder: Path) -> str | None:
    """Write weights, configuration and generation config; return the type of the weights, None of
    an adapter's own folder."""
    import torch

    from ppocli.models.loading.load_adapters import merge

    copied, dtype = ["generation_config.json"], None
    if model_files.is_adapter(plan.source) and not plan.merge:
        copied += [model_files.ADAPTER_CONFIG, model_files.ADAPTER_WEIGHTS,
                   model_files.ADAPTER_BASE]
        if plan.target.run_dir is not None:
            _save_value_adapter(plan.target, folder / model_files.VALUE_ADAPTER)
    else:
        if not torch.cuda.is_available():
            # transformers imports deepspeed when it saves, which would guess and say so on stdout
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        model = load_model(plan.source, plan.trust_remote_code)
        model = merge(model.float()) if plan.merge else model
        model = model.to(getattr(torch, DTYPES[plan.dtype])) if plan.dtype else model
        model.save_pretrained(folder)
        dtype = str(model.dtype).removeprefix("torch.")
    for name in copied:
        if (plan.source / name).is_file():
            shutil.copyfile(plan.source / name, folder / name)
    return {long: short for short, long in DTYPES.items()}.get(dtype or "", dtype)


def _save_value_adapter(target: Target, folder: Path) -> None:
    """Write a run's value function, if that is an adapter, beside the policy's: the adapter as PEFT
    has it, and its head."""
    from safetensors.torch import load_file, save_file

    from ppocli.models.loading.load_adapters import peft_names

    run = RunFolder(cast(Path, target.run_dir))
    if read_config(run.config).model.value.kind != "adapter":
        return
    newest = None if target.checkpoint else find_latest(run.checkpoints, run_id=None).checkpoint
    source = newest.path if newest and newest.step == target.step else target.checkpoint
    if source is None or not (source / model_files.VALUE_TRUNK).is_file():
        log.warning("the value function isn't exported: step %s has no checkpoint with one",
                    target.step)
        return
    folder.mkdir()
    save_file(peft_names(load_file(source / model_files.VALUE_TRUNK)),
              folder / model_files.ADAPTER_WEIGHTS, {"format": "pt"})
    shutil.copyfile(source / model_files.VALUE_HEAD, folder / model_files.VALUE_HEAD)
    for name in (model_files.ADAPTER_CONFIG, model_files.ADAPTER_BASE):
        shutil.copyfile(Path(target.model) / name, folder / name)


def verify(plan: ExportPlan, folder: Path, ids: list[int]) -> float:
    """Load ``folder`` with transformers (and PEFT) alone and compare logits of the token ids of a
    prompt with the source's, both in fp32; an encoder-decoder gets the same ids on both sides.
    Returned is the relative RMS difference.

    Raises:
        CheckpointError: it is more than rounding.
    """
    import torch

    def logits_of(place: Path) -> Any:
        model = load_model(place, plan.trust_remote_code).float()
        names = ["input_ids"] + ["decoder_input_ids"] * (card.task_of(place) == "SEQ_2_SEQ_LM")
        with torch.inference_mode():
            return model(**dict.fromkeys(names, torch.tensor([ids]))).logits

    expected, actual = logits_of(plan.source), logits_of(folder)
    difference = float((actual - expected).norm() / expected.norm()) \
        if actual.shape == expected.shape else float("inf")
    rounding = 16 * torch.finfo(getattr(torch, DTYPES[plan.dtype])).eps if plan.dtype else 0.0
    if not difference <= max(_TOLERANCE, rounding):
        raise CheckpointError(
            f"The export differs from its source: logits are off by {difference:.3g} (relative "
            "RMS). Nothing was published.", fix="--dtype bf16 has the range of fp32"
            if plan.dtype == "fp16" else "export again; if it happens again, please report this "
            "with the model's config.json")
    return difference


def write_export(plan: ExportPlan, check: Callable[[], None]) -> dict[str, Any]:
    """Write, verify and publish; return the record. On any failure ``plan.folder`` is as before.

    Args:
        check: called where stopping is safe; may raise to stop.

    Raises:
        CheckpointError: the result isn't what the source is.
        ConfigError: something is in the way.
        DiskError: the disk refused.
        InputError: the source can't be loaded.
    """
    from transformers import AutoTokenizer

    from ppocli.models.loading.model_config import loading

    check_folder(plan.folder, plan.source, plan.overwrite)  # another export may have ended there
    record, facts = dict[str, Any](), card.provenance_of(plan.target)
    prompt = str(facts.samples[0][1]["prompt"] if facts.samples else "Once upon a time")
    place = plan.source if model_files.has_tokenizer(plan.source) else model_files.find_whole(
        str(plan.source), key="RUN", needs="model and tokenizer")[0]

    def write(folder: Path) -> None:
        with loading(f"model in {plan.source}", "RUN", "--trust"):
            tokenizer = AutoTokenizer.from_pretrained(
                place, trust_remote_code=plan.trust_remote_code)
            tokenizer.save_pretrained(folder)
            dtype = save_model(plan, folder)
            faults.point("export.before_verify")
            check()
            difference = verify(plan, folder, tokenizer(prompt).input_ids or [0])
            check()
        if facts.run is not None:
            (folder / "training_config.yaml").write_text(yaml_text(each_text(
                asdict(facts.run.config), card.masked)), encoding="utf-8")
        text = card.render_card(folder, facts, location=plan.location, dtype=dtype)
        (folder / card.CARD).write_text(text, encoding="utf-8")
        record.update(each_text({
            "ppocli": __version__, "run": facts.name if facts.run else None, "step": facts.step,
            "dtype": dtype, "logits_difference": difference, "before": facts.before,
            "after": facts.after}, card.masked))
        record["files"] = _files(folder)
        atomic.write_json_atomic(folder / RECORD, record)

    atomic.publish_folder(write, plan.folder)
    return record


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")
                  if path.is_symlink() or not path.is_dir())


def read_record(folder: Path) -> dict[str, Any] | None:
    """What an exported folder says of itself; None for a folder that is no export."""
    record = atomic.read_json(folder / RECORD)
    return None if record is None or "files" not in record else record


def check_folder(folder: Path, source: Path, overwrite: bool) -> None:
    """Refuse to replace an export without ``overwrite``, and anything else in any case.

    Raises:
        ConfigError: something is in the way.
    """
    if not os.path.lexists(folder) or (folder.is_dir() and not os.listdir(folder)):
        return
    record, option, fix = read_record(folder), "--output", "name another folder: --output DIR"
    if record is None or folder.is_symlink() or source.is_relative_to(folder.resolve()):
        what = "is no export, or holds what is exported"
    elif not overwrite:
        what, fix = "holds an export already", f"add --overwrite, or {fix}"
    elif foreign := sorted({*_files(folder)} - {*record["files"], RECORD}):
        what = f"holds files that are not the export's ({', '.join(foreign[:3])})"
    else:
        return
    raise ConfigError(f"{short_path(str(folder))} {what}.", where=option, fix=fix)


def push(folder: Path, repo: str, *, public: bool) -> str:
    """Push an export; return the address of the repository. Every failure leaves the folder
    complete on this machine.

    Args:
        repo: ``USER/NAME``; a plain ``NAME`` belongs to the token's user. Created if missing.
        public: the visibility that the repository has, or gets.

    Raises:
        HubError: the Hub can't be reached or refuses, or the repository has another visibility.
    """
    from huggingface_hub import HfApi

    api, place = HfApi(), pasted(short_path(str(folder)))
    files = [*(read_record(folder) or {"files": [card.CARD]})["files"], RECORD]
    fix = f"ppocli export {place} --to-hub {repo}" + " --public" * public
    try:
        repo = api.create_repo(repo, private=not public, exist_ok=True).repo_id
        if bool(api.repo_info(repo).private) == public:
            fix = f"add --{'private' if public else 'public'}, or change the repository's settings"
            raise ValueError(f"the repository is {'private' if public else 'public'}")
        text = (folder / card.CARD).read_text(encoding="utf-8")
        atomic.write_atomic(folder / card.CARD, card.masked(card.with_location(text, repo)))
        api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=files,
                          delete_patterns=_STALE,
                          commit_message="Upload a model exported by ppocli")
    except Exception as error:  # whatever the client, the connection or the Hub raises
        status = getattr(getattr(error, "response", None), "status_code", None)
        cause = card.masked(getattr(error, "server_message", None) or first_line(error)).rstrip(".")
        if status in (401, 403):
            fix = f"log in with a token that may write (hf auth login, or HF_TOKEN), then: {fix}"
        raise HubError(f"The push to {repo} did not go through: "
                       f"{cause}{f' (HTTP {status})' if status else ''}. Your export is complete "
                       f"in {place}.", where=api.endpoint, fix=fix) from error
    return f"{api.endpoint}/{repo}"
