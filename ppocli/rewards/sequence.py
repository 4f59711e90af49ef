"""A sequence-classification model with its own tokenizer: loaded whole, run frozen over texts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ppocli.errors import InputError, RewardError
from ppocli.storage.model_files import find_model, quiet_transformers
from ppocli.text import error_line, suggestion

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INPUTS = ("sample", "response", "pair")
MODEL_KEY = "reward.kwargs.model"
UNBOUNDED = 1_000_000
"""a tokenizer without a limit reports one far above this"""


@dataclass(frozen=True, slots=True)
class SequenceModel:
    """Made by :func:`load_sequence_model`, read by :func:`sequence_logits`."""

    name: str
    """as the user wrote it"""
    model: Any
    """``AutoModelForSequenceClassification`` in eval mode, every parameter frozen"""
    tokenizer: Any
    device: torch.device
    max_length: int | None
    """longest input in tokens; None: no limit known"""
    labels: tuple[str, ...]
    """label names by output position, from ``config.id2label``"""
    said: list[str] = field(default_factory=list)
    """what has been logged once already"""


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse an argument that is not one of ``choices``.

    Raises:
        RewardError: names the nearest choice.
    """
    if value not in choices:
        raise RewardError(f"{name}={value!r} is unknown. {suggestion(str(value), choices)}"
                          .rstrip(), where=f"reward.kwargs.{name}",
                          fix=f"one of: {', '.join(choices)}")


def check_positive_int(name: str, value: Any) -> None:
    """Refuse an argument that is not a positive whole number.

    Raises:
        RewardError: names the argument and its value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RewardError(f"{name}={value!r} is not a positive whole number.",
                          where=f"reward.kwargs.{name}", fix=f"reward.kwargs.{name}=32")


def load_sequence_model(name: str, *, device: str, dtype: str, max_length: int | None,
                        truncation_side: str, revision: str | None,
                        trust_remote_code: bool) -> SequenceModel:
    """Load a classifier or reward model with the tokenizer that lies beside it.

    Args:
        name: a folder, a Hub name, or ``builtin:NAME``.
        device: ``auto`` (CUDA where there is any), ``cpu``, ``cuda``, ``cuda:1``, ...
        dtype: ``fp32`` or ``bf16``.
        max_length: longest input in tokens (None: what the model allows).
        truncation_side: which end of a longer input is cut, ``left`` or ``right``.
        revision: branch, tag or commit of a Hub model.
        trust_remote_code: run Python code that the model's repository ships.

    Raises:
        InputError: missing or broken files, no vocabulary, or weights that the files lack, such as
            a classification head, which transformers would fill with random numbers.
        RewardError: an argument is out of range.
    """
    check_choice("dtype", dtype, tuple(DTYPES))
    check_choice("truncation_side", truncation_side, ("left", "right"))
    if max_length is not None:
        check_positive_int("max_length", max_length)
    target = _device(device)
    source, is_folder = find_model(name, key=MODEL_KEY, revision=revision)
    options = {"revision": None if is_folder else revision, "trust_remote_code": trust_remote_code}
    options = {key: value for key, value in options.items() if value}
    quiet_transformers()
    tokenizer = _load_tokenizer(name, source, options)
    model = _load_model(name, source, DTYPES[dtype], options)
    tokenizer.truncation_side = truncation_side
    embeddings = model.get_input_embeddings()
    if embeddings is not None and len(tokenizer) > embeddings.weight.shape[0]:
        raise InputError(
            f"The tokenizer in {name} knows {len(tokenizer)} tokens, but its model has only "
            f"{embeddings.weight.shape[0]} embeddings.", where=MODEL_KEY,
            fix="put the model's own tokenizer into its folder")
    labels = tuple(str(model.config.id2label[i]) for i in range(model.config.num_labels))
    limit = _position_limit(model, tokenizer)
    if max_length is not None and limit is not None and max_length > limit:
        raise RewardError(f"max_length={max_length} is longer than {name} can read ({limit}).",
                          where="reward.kwargs.max_length", fix=f"reward.kwargs.max_length={limit}")
    model.to(target).eval().requires_grad_(False)
    return SequenceModel(name, model, tokenizer, target, max_length or limit, labels)


def _device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise RewardError(f"device={device!r} is not a device: {error_line(error)}",
                          where="reward.kwargs.device", fix="auto, cpu, cuda or cuda:N") from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise RewardError(f"device={device!r}: this machine has {torch.cuda.device_count()} CUDA "
                          "devices.", where="reward.kwargs.device",
                          fix="reward.kwargs.device=cpu")
    return target


def _load_tokenizer(name: str, source: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # transformers raises many kinds here, all about the files
        raise InputError(f"The tokenizer of {name} can't be loaded: {error_line(error)}",
                         where=MODEL_KEY, fix="save the model's own tokenizer into its folder"
                         ) from error
    if len(tokenizer) == 0 or tokenizer.vocab_size == 0:
        raise InputError(f"No tokenizer in {name} (expected tokenizer.json, or a vocabulary file).",
                         where=MODEL_KEY, fix="save the model's own tokenizer into its folder")
    return tokenizer


def _load_model(name: str, source: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    from transformers import AutoModelForSequenceClassification

    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            source, dtype=dtype, output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **options)
    except Exception as error:  # as above
        raise InputError(f"The model in {name} can't be loaded: {error_line(error)}",
                         where=MODEL_KEY, fix="give a folder or Hub name of a "
                                              "sequence-classification model") from error
    mismatched = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    absent = sorted({*info["missing_keys"], *mismatched})
    if absent:
        shown = ", ".join(absent[:5]) + (", ..." if len(absent) > 5 else "")
        raise InputError(
            f"{name} has no fitting weights for {shown}; they would be random numbers.",
            where=MODEL_KEY, fix="give a model trained for sequence classification, not its base")
    return model


def _position_limit(model: Any, tokenizer: Any) -> int | None:
    """Longest input that both tokenizer and position embeddings allow; None when neither says."""
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < UNBOUNDED else []
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        for name, module in model.named_modules():
            # RoBERTa counts positions from padding_idx + 1 and so loses that many
            if name.endswith("position_embeddings") and getattr(
                    module, "padding_idx", None) is not None:
                positions -= module.padding_idx + 1
        limits.append(positions)
    return min(limits) if limits else None


def sequence_logits(loaded: SequenceModel, texts: Sequence[str],
                    pairs: Sequence[str] | None = None, *, batch_size: int) -> torch.Tensor:
    """Raw outputs of the model, independent of how the texts are batched (1e-5 in fp32).

    Texts are sorted by length, so that a batch holds little padding, and the order is restored.

    Args:
        texts: [N] what the model reads.
        pairs: [N] second segment of each text, for models trained on pairs.
        batch_size: texts per forward pass.

    Returns:
        [N, labels] float32 on CPU. A decoder's score is read at its last attended token.
    """
    encoded = _encode(loaded, texts, pairs)
    lengths = [len(ids) for ids in encoded["input_ids"]]
    order = sorted(range(len(texts)), key=lambda row: lengths[row])
    logits = torch.empty(len(texts), len(loaded.labels), dtype=torch.float32)
    for start in range(0, len(order), batch_size):
        rows = order[start:start + batch_size]
        batch = _padded(loaded, {key: [values[row] for row in rows]
                                 for key, values in encoded.items()})
        with torch.no_grad():
            logits[rows] = loaded.model(**batch).logits.to("cpu", torch.float32)
    return logits


def _encode(loaded: SequenceModel, texts: Sequence[str],
            pairs: Sequence[str] | None) -> dict[str, list[list[int]]]:
    tokenizer = loaded.tokenizer
    encoded = tokenizer(list(texts), list(pairs) if pairs is not None else None,
                        truncation=loaded.max_length is not None, max_length=loaded.max_length,
                        return_attention_mask=True)
    _say_truncation(loaded, encoded)
    # The model reads at least one token: some tokenizers make none of an empty text.
    filler = next((token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id,
                                       tokenizer.pad_token_id) if token is not None), 0)
    for row, ids in enumerate(encoded["input_ids"]):
        if not ids:
            encoded["input_ids"][row] = [filler]
            encoded["attention_mask"][row] = [1]
            if "token_type_ids" in encoded:
                encoded["token_type_ids"][row] = [0]
    return dict(encoded)


def _say_truncation(loaded: SequenceModel, encoded: Any) -> None:
    """Log once that texts are cut, when a tokenizer of the fast kind tells."""
    num_cut = sum(bool(encoding.overflowing) for encoding in encoded.encodings or ())
    if num_cut and not loaded.said:
        loaded.said.append("truncation")
        log.warning("%s reads at most %d tokens: %d of %d texts were cut on the %s (said once)",
                    loaded.name, loaded.max_length, num_cut, len(encoded["input_ids"]),
                    loaded.tokenizer.truncation_side)


def _padded(loaded: SequenceModel, rows: dict[str, list[list[int]]]) -> dict[str, torch.Tensor]:
    """One batch of tensors [B, T] on the model's device, padded."""
    tokenizer, model = loaded.tokenizer, loaded.model
    side, pad = tokenizer.padding_side, tokenizer.pad_token_id
    if hasattr(model, "score"):
        # Decoders with a `score` head find a row's last token by comparing ids with
        # config.pad_token_id (transformers: modeling_layers.GenericForSequenceClassification).
        # With pad == eos, or no pad at all, that misses a final EOS or fails, so these batches are
        # padded with an id that no row has. Its embedding is never attended to.
        present = {token for ids in rows["input_ids"] for token in ids}
        side, pad = "right", next(i for i in range(len(present) + 1) if i not in present)
        model.config.get_text_config().pad_token_id = pad
    elif pad is None:
        pad = 0
    width = max(len(ids) for ids in rows["input_ids"])
    batch = {}
    for key, values in rows.items():
        fill = pad if key == "input_ids" else 0
        padded = [ids + [fill] * (width - len(ids)) if side == "right"
                  else [fill] * (width - len(ids)) + ids for ids in values]
        batch[key] = torch.tensor(padded, device=loaded.device)
    return batch
