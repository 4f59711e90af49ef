"""Where a model or an adapter lies, checked before transformers sees it.

For a missing folder transformers explains repository names, for a missing tokenizer it returns one
without a vocabulary, and a dead network takes it most of a minute. So files are checked here first,
and the Hub is asked only if it can be reached.
"""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ppocli.builtin.names import BUILTIN_PREFIX, resolve_builtin
from ppocli.config import import_guard, resume_policy
from ppocli.config.text import pasted
from ppocli.errors import InputError, PpocliError
from ppocli.runs import atomic

Needs = Literal["model and tokenizer", "model", "tokenizer"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json",
                   "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
TOKENIZER_CONFIG = "tokenizer_config.json"
SAFETENSORS = "model.safetensors"
WEIGHTS = (SAFETENSORS, "pytorch_model.bin")
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
HEADS = ("score.weight", "classifier.weight", "classifier.out_proj.weight",
         "classification_head.out_proj.weight")
"""ends of names of the weight that makes a classifier's outputs, one row a label"""
ADAPTER_BASE = "base_model.json"
"""which model an adapter belongs to, beside the files that PEFT knows"""
MODEL = "model"
"""folder of a run that holds what it has trained, a plain Hugging Face folder"""
POLICY = "policy"
"""folder of a checkpoint that holds the policy as a plain Hugging Face folder"""
WITH_TEMPLATE = "trained_with_chat_template"
"""in tokenizer_config.json: whether what ppocli trained the model on was rendered with the chat
template that lies beside it; transformers keeps the entry"""
VALUE_HEAD = "value_head.safetensors"
VALUE_TRUNK = "value_trunk.safetensors"
VALUE_ADAPTER = "value"
"""folder in an export: a value function that is an adapter, and its head"""
"""beside the head where the value function has layers of its own"""


def quiet_transformers() -> None:
    """Silence transformers except for errors, progress bars included: we check loaded models
    ourselves."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def find_model(model: str, *, key: str, revision: str | None = None,
               needs: Needs = "model and tokenizer", adapters: bool = False) -> str:
    """Where to load ``model`` from.

    Args:
        model: a folder, a run's folder, which stands for its ``model/``, a Hub name, or
            ``builtin:NAME``.
        key: the configuration key, argument (RUN) or option it was given by, for messages.
        revision: branch, tag or commit of a Hub model.
        needs: what has to be there.
        adapters: whether a folder with an adapter will do.

    Returns:
        a checked folder, or a Hub name when the Hub can be asked for it.

    Raises:
        InputError: the folder is missing or broken, or the Hub can't be reached and the model is
            not in the local cache.
    """
    if not isinstance(model, str) or not model.strip():
        raise InputError(f"{model!r} is not a folder or a Hub name.",
                         where=key, fix=_folder_fix(key))
    if model.startswith(BUILTIN_PREFIX):
        return str(resolve_builtin(model))
    path = Path(model).expanduser()
    if (path / resume_policy.RUN_FILE).is_file() and not (path / "config.json").exists():
        path = (path / MODEL).absolute()  # there once the run has ended
        model = str(path)
    if path.is_dir():
        check_folder(path, key=key, needs=needs, adapters=adapters)
        return str(path)
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise InputError(f"{model} is a file, not a model folder." if path.exists() else
                         f"Folder {model} does not exist (looked in {os.getcwd()}).",
                         where=key, fix=_folder_fix(key), code="no-such-model")
    return _from_hub(model, revision, key, needs, adapters)


def trained_with_template(model: str, revision: str | None = None) -> bool | None:
    """Whether ppocli trained ``model`` on what its chat template rendered; None where that isn't
    known, as of models from elsewhere."""
    with suppress(Exception):  # loading it reports what is wrong
        source = find_model(model, key="", revision=revision, needs="tokenizer", adapters=True)
        file = Path(source) / TOKENIZER_CONFIG
        if not Path(source).is_dir():
            from huggingface_hub import hf_hub_download

            file = Path(hf_hub_download(source, TOKENIZER_CONFIG, revision=revision))
        recorded = json.loads(file.read_bytes()).get(WITH_TEMPLATE)
        return recorded if isinstance(recorded, bool) else None
    return None


def _is_setting(key: str) -> bool:
    """Whether ``key`` is one of a configuration, not an argument or an option of a command."""
    return not (key.isupper() or key.startswith("--"))


def _folder_fix(key: str) -> str:
    if _is_setting(key):
        return f"{key}=/path/to/model"
    return f"give the folder of a run or a model as {key}"


def check_folder(folder: Path, *, key: str, needs: Needs = "model and tokenizer",
                 adapters: bool = False) -> None:
    """Check that ``folder`` holds a model and a tokenizer that can be read.

    Args:
        adapters: whether an adapter will do in place of a model.

    Raises:
        InputError: names the missing or broken file and what belongs there.
    """
    adapter = is_adapter(folder)
    if needs != "tokenizer":
        if adapter and adapters:
            import_guard.require("peft", f"The adapter in {folder}", key)
        elif adapter:
            raise InputError(f"{folder} holds only an adapter (adapter_config.json).", where=key,
                             fix="merge it into its base: ppocli export "
                             f"{pasted(folder)} --merge -o FOLDER, and give that")
        elif not (folder / "config.json").is_file():
            raise InputError(f"There is no config.json in {folder}.", where=key,
                             fix="give a folder written by save_pretrained()")
        _check_weights(folder, key, (ADAPTER_WEIGHTS,) if adapter else WEIGHTS)
    for name in ("config.json", ADAPTER_CONFIG, "tokenizer_config.json", "tokenizer.json"):
        if (folder / name).is_file():
            _checked_json(folder / name, key)
    # an adapter without a tokenizer is used with that of its base
    if needs != "model" and not (adapter and adapters) and not has_tokenizer(folder):
        raise InputError(
            f"No tokenizer in {folder} (expected tokenizer.json, or a vocabulary file).", where=key,
            fix=f"save the model's own tokenizer there: tokenizer.save_pretrained({str(folder)!r})")


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder holds a tokenizer's files."""
    return any((Path(folder) / name).is_file() for name in TOKENIZER_FILES)


def _checked_json(path: Path, key: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        return content
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}", where=key,
                         fix="copy or download the file again") from error


def _check_weights(folder: Path, key: str, names: tuple[str, ...]) -> None:
    """Check that all files of weights are there, and not cut off: the header of a safetensors file
    says how long the file has to be."""
    from safetensors import SafetensorError, safe_open

    indices = [path for name in names if (path := folder / f"{name}.index.json").is_file()]
    files = [folder / name for name in names if (folder / name).is_file()][:1] or [
        folder / shard for index in indices[:1] for shard in sorted(
            set(_checked_json(index, key).get("weight_map", {}).values()))]
    if not files:
        raise InputError(f"There are no weights in {folder} (expected {names[0]}).",
                         where=key, fix="give a folder written by save_pretrained()")
    for path in files:
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="numpy"):
                    continue
            path.stat()
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} can't be read: {error}", where=key,
                             fix="copy or download it again: it is missing or damaged") from error


@cache
def _is_hub_adapter(name: str, revision: str | None) -> bool:
    from huggingface_hub import file_exists

    try:
        config, whole = (file_exists(name, file, revision=revision)
                         for file in (ADAPTER_CONFIG, "config.json"))
    except Exception:  # whoever loads it says what is wrong
        return False
    return config and not whole


def _from_hub(name: str, revision: str | None, key: str, needs: Needs, adapters: bool) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    from ppocli.runs.hub import go_offline, hub_reachable, offline_hint

    if hub_reachable():
        if adapters and _is_hub_adapter(name, revision):
            return snapshot_download(name, revision=revision)
        return name
    go_offline()
    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        check_folder(folder, key=key, needs=needs, adapters=adapters)
        return str(folder)
    except HFValidationError as error:
        raise InputError(f"{name!r} is neither a folder nor a Hub name: {error}", where=key,
                         fix=_folder_fix(key)) from error
    except PpocliError:
        raise
    except Exception as error:
        raise InputError(
            f"Model {name!r} is not on this machine and {offline_hint()}.",
            where=f"{key}={name}" if _is_setting(key) else key,
            fix=(f"give a folder: {key}=/path" if _is_setting(key) else _folder_fix(key))
            + f", or run once with network: hf download {name}") from error


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """The frozen model under an adapter."""

    path: str
    """as it was configured: a folder, a Hub name or a built-in"""
    revision: str | None
    storage: str
    """the type its weights were held in; the digest is of these"""
    digest: str


def scores(config: Any) -> bool:
    """Whether a model of this configuration classifies or scores texts."""
    return any("ForSequenceClassification" in name for name in config.architectures or [])


def states_labels(source: str, revision: str | None) -> bool:
    """Whether a model's config.json itself states its labels; transformers assumes two."""
    from transformers import PretrainedConfig

    with suppress(Exception):
        stated, _ = PretrainedConfig.get_config_dict(source, revision=revision)
        return not {"id2label", "num_labels"}.isdisjoint(stated)
    return True


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter instead of a model."""
    folder = Path(folder)
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def is_scorer(folder: str | Path) -> bool:
    """Whether a folder holds a reward model, or an adapter that makes one of its base."""
    adapter = atomic.read_json(Path(folder) / ADAPTER_CONFIG) or {}
    names = (atomic.read_json(Path(folder) / "config.json") or {}).get("architectures") or []
    return adapter.get("task_type") == "SEQ_CLS" or any(
        str(name).endswith("ForSequenceClassification") for name in names)


def task_type(folder: str | Path, config: Any) -> str:
    """What a whole model or an adapter is for, as PEFT calls it: CAUSAL_LM, SEQ_2_SEQ_LM, SEQ_CLS
    or TOKEN_CLS.

    Args:
        config: of the model, or of the adapter's base.

    Raises:
        InputError: an adapter for something else.
    """
    adapter = atomic.read_json(Path(folder) / ADAPTER_CONFIG) or {} if is_adapter(folder) else {}
    kinds = ("CAUSAL_LM", "SEQ_2_SEQ_LM", "SEQ_CLS", "TOKEN_CLS")
    if (kind := adapter.get("task_type")) in kinds:
        return str(kind)
    if kind is not None:
        raise InputError(f"The adapter in {folder} is for {kind}; those for {', '.join(kinds)} can "
                         "be merged and checked.", where=str(Path(folder) / ADAPTER_CONFIG),
                         fix="merge it with PEFT itself: merge_and_unload()")
    names = " ".join(config.architectures or [])
    return ("SEQ_CLS" if "ForSequenceClassification" in names else
            "TOKEN_CLS" if "ForTokenClassification" in names else
            "SEQ_2_SEQ_LM" if getattr(config, "is_encoder_decoder", False) else "CAUSAL_LM")


def named_base(folder: Path) -> tuple[str, str | None, BaseIdentity | None]:
    """Path and revision of the base that an adapter's folder names, and the base's identity where
    ppocli recorded it.

    Raises:
        InputError: it names none.
    """
    file = folder / ADAPTER_BASE
    try:
        if file.is_file():
            identity = BaseIdentity(**json.loads(file.read_bytes()))
            return identity.path, identity.revision, identity
        file = folder / ADAPTER_CONFIG
        fields = json.loads(file.read_bytes())
        path, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{file} can't be read: {error}", where=str(file),
                         fix="copy the folder again") from error
    if not isinstance(path, str) or not path:
        raise InputError(f"The adapter in {folder} does not name its base.",
                         where=str(file),
                         fix='give "base_model_name_or_path" there a folder or a Hub name')
    return path, revision, None


def adapter_at(model: str, *, key: str, revision: str | None = None) -> Path | None:
    """The folder of the adapter that ``model`` names; None where it names a whole model.

    Raises:
        InputError: as :func:`find_model`.
    """
    source = find_model(model, key=key, revision=revision, needs="model", adapters=True)
    return Path(source) if is_adapter(source) else None


def find_whole(model: str, *, key: str, revision: str | None = None, needs: Needs = "model"
               ) -> tuple[str, str | None]:
    """Where to load ``model`` from, and in which revision: itself, but for an adapter its base.

    Raises:
        InputError: as :func:`find_model`; or the base isn't there.
    """
    source = find_model(model, key=key, revision=revision, needs=needs, adapters=True)
    if not is_adapter(source):
        return source, revision
    path, revision, identity = named_base(Path(source))
    place = Path(source) / (ADAPTER_BASE if identity else ADAPTER_CONFIG)
    if has_tokenizer(source):
        needs = "model"
    try:
        return find_model(path, key=key, revision=revision, needs=needs), revision
    except InputError as error:
        raise error.reworded(
            what=f"The base of the adapter in {source} can't be used: {error.what}",
            where=f"{key}, {place}",
            fix=f"name the base in {place.name} as it is called now, or put it there") from error
