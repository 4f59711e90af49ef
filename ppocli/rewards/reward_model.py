"""Built-in reward ``reward_model``: the scalar output of a model trained on preferences; and what
it shares with the classifier, a sequence-classification model run frozen over texts.

    reward.fn=reward_model reward.kwargs.model=/path/to/reward-model
"""

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from ppocli.errors import InputError, RewardError
from ppocli.rewards.records import differences
from ppocli.rewards.resolve import wrong_argument
from ppocli.storage.model_files import find_model, quiet_transformers
from ppocli.text import error_line, pasted, suggestion

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODEL_KEY = "reward.kwargs.model"
SCORE_END, SCORE_MEAN, SCORE_STD = "score_end", "score_mean", "score_std"
SCORE_FRONT = "score_front"
"""in config.json of a model that ``ppocli reward-model`` has trained: the token behind whose texts
scores are read (none where that token also pads), their moments on its training data, and whether
what the tokenizer puts in front of a text stood there in training"""
UNBOUNDED = 1_000_000
"""a tokenizer without a limit reports one far above this"""


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse an argument that is not one of ``choices``.

    Raises:
        RewardError: names the nearest choice.
    """
    if value not in choices:
        raise RewardError(f"{name}={value!r} is unknown. {suggestion(str(value), choices)}"
                          .rstrip(), where=f"reward.kwargs.{name}",
                          fix=f"one of: {', '.join(choices)}")


class SequenceReward:
    """A sequence-classification model with the tokenizer that lies beside it, loaded whole.

    Args:
        model: a folder, a Hub name, or ``builtin:NAME``.
        on: what it reads: the ``sample`` (prompt + response), the ``response`` alone, or the
            ``pair`` of both as two segments.
        batch_size: texts per forward pass.
        max_length: longest input in tokens (None: what the model allows).
        truncation_side: which end of a longer input is cut, ``left`` or ``right``.
        device: ``auto`` (CUDA where there is any), ``cpu``, ``cuda``, ``cuda:1``, ...
        dtype: ``fp32`` or ``bf16``.
        revision: branch, tag or commit of a Hub model.
        trust_remote_code: run Python code that the model's repository ships.

    Raises:
        InputError: missing or broken files, no vocabulary, or weights that the files lack, such as
            a classification head, which transformers would fill with random numbers.
        RewardError: an argument is out of range.
    """

    def __init__(self, model: str, *, on: str = "sample", batch_size: int = 32,
                 max_length: int | None = None, truncation_side: str = "left",
                 device: str = "auto", dtype: str = "fp32", revision: str | None = None,
                 trust_remote_code: bool = False) -> None:
        check_choice("on", on, ("sample", "response", "pair"))
        check_choice("dtype", dtype, tuple(DTYPES))
        check_choice("truncation_side", truncation_side, ("left", "right"))
        for name, value in (("batch_size", batch_size),
                            ("max_length", 1 if max_length is None else max_length)):
            if type(value) is not int or value < 1:
                raise wrong_argument(name, value, "a positive whole number")
        self.name, self.on, self.batch_size = model, on, batch_size
        self.device = _device(device)
        source = find_model(model, key=MODEL_KEY, revision=revision)
        options = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
        quiet_transformers()
        self.tokenizer = _load_tokenizer(model, source, options)
        self.tokenizer.truncation_side = truncation_side
        self.model = _load_model(model, source, DTYPES[dtype], options)
        self.model.to(self.device).eval().requires_grad_(False)
        config, embeddings = self.model.config, self.model.get_input_embeddings()
        if embeddings is not None and len(self.tokenizer) > embeddings.weight.shape[0]:
            raise InputError(f"The tokenizer in {model} knows {len(self.tokenizer)} tokens, "
                             f"but its model has only {embeddings.weight.shape[0]} embeddings.",
                             where=MODEL_KEY, fix="put the model's own tokenizer into its folder")
        self.labels = tuple(str(config.id2label[i]) for i in range(config.num_labels))
        limit = _position_limit(self.model, self.tokenizer)
        if max_length is not None and limit is not None and max_length > limit:
            raise RewardError(
                f"max_length={max_length} is longer than {model} can read ({limit}).",
                where="reward.kwargs.max_length", fix=f"reward.kwargs.max_length={limit}")
        self.max_length = max_length or limit
        self.end: int | None = getattr(config, SCORE_END, None)
        self.front = bool(getattr(config, SCORE_FRONT, True))
        self._said_cut = False
        self.check_outputs()

    def check_outputs(self) -> None:
        """Refuse a model whose outputs are of another kind; here any will do."""

    def logits(self, samples: list[str], prompts: list[str], responses: list[str]) -> torch.Tensor:
        """Raw outputs of the model, independent of how the texts are batched (1e-5 in fp32).

        Texts are sorted by length, so that a batch holds little padding, and the order is restored.

        Returns:
            [N, labels] float32 on CPU. A decoder's score is read at its last attended token.
        """
        encoded = self._encode(*{"sample": (samples, None), "response": (responses, None),
                                 "pair": (prompts, responses)}[self.on])
        ids = encoded["input_ids"]
        order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
        logits = torch.empty(len(ids), len(self.labels), dtype=torch.float32)
        for start in range(0, len(order), self.batch_size):
            rows = order[start:start + self.batch_size]
            batch = self._padded({key: [values[row] for row in rows]
                                  for key, values in encoded.items()})
            with torch.no_grad():
                logits[rows] = self.model(**batch).logits.to("cpu", torch.float32)
        return logits

    def _encode(self, texts: list[str], pairs: list[str] | None) -> dict[str, list[list[int]]]:
        tokenizer, room = self.tokenizer, self.max_length
        if room is not None and self.end is not None:
            room -= 1
        encoded = tokenizer(texts, pairs, truncation=room is not None, max_length=room,
                            return_attention_mask=True, add_special_tokens=self.front)
        # a tokenizer of the fast kind tells which texts it has cut
        num_cut = sum(bool(encoding.overflowing) for encoding in encoded.encodings or ())
        if num_cut and not self._said_cut:
            self._said_cut = True
            log.warning("%s reads at most %d tokens: %d of %d texts were cut on the %s (said once)",
                        self.name, self.max_length, num_cut, len(texts), tokenizer.truncation_side)
        # The model reads at least one token: some tokenizers make none of an empty text.
        filler = next((token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id,
                                           tokenizer.pad_token_id) if token is not None), 0)
        least = {"input_ids": [filler], "attention_mask": [1]}
        found = {key: [row or least.get(key, [0]) for row in rows] for key, rows in encoded.items()}
        bos = tokenizer.bos_token_id
        for i, ids in enumerate(found["input_ids"]):
            if len(ids) > 1 and ids[0] == ids[1] == bos:  # a chat template has written one, too
                for rows in found.values():
                    rows[i] = rows[i][1:]
        if self.end is not None:
            for i, ids in enumerate(found["input_ids"]):
                if ids[-1] != self.end:
                    for key, end in (("input_ids", self.end), ("attention_mask", 1)):
                        found[key][i] = [*found[key][i], end]
            found.pop("token_type_ids", None)  # decoders have no use for it
        return found

    def _padded(self, rows: dict[str, list[list[int]]]) -> dict[str, torch.Tensor]:
        """One batch of tensors [B, T] on the model's device, padded."""
        side, pad = self.tokenizer.padding_side, self.tokenizer.pad_token_id
        if hasattr(self.model, "score"):
            # Decoders with a `score` head find a row's last token by comparing ids with
            # config.pad_token_id (transformers: modeling_layers.GenericForSequenceClassification).
            # With pad == eos, or no pad at all, that misses a final EOS or fails, so these batches
            # are padded with an id that no row has. Its embedding is never attended to.
            present = {token for ids in rows["input_ids"] for token in ids}
            side, pad = "right", next(i for i in range(len(present) + 1) if i not in present)
            self.model.config.get_text_config().pad_token_id = pad
        return {key: pad_sequence(
            [torch.tensor(row) for row in values], batch_first=True, padding_side=side,
            padding_value=(pad or 0) if key == "input_ids" else 0).to(self.device)
            for key, values in rows.items()}


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
                          "devices.", where="reward.kwargs.device", fix="reward.kwargs.device=cpu")
    return target


def _load_tokenizer(name: str, source: str, options: dict[str, Any]) -> Any:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:  # transformers raises many kinds here, all about the files
        raise InputError(f"The tokenizer of {name} can't be loaded: {error_line(error)}",
                         where=MODEL_KEY, fix="save the model's own tokenizer into its folder"
                         ) from error
    if len(tokenizer) == 0 or tokenizer.vocab_size == 0:
        raise InputError(f"No tokenizer in {name} (expected tokenizer.json, or a vocabulary file).",
                         where=MODEL_KEY, fix="save the model's own tokenizer into its folder")
    return tokenizer


def _load_model(name: str, source: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    try:
        model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
            source, dtype=dtype, output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **options)
    except Exception as error:  # as above
        raise InputError(f"The model in {name} can't be loaded: {error_line(error)}",
                         where=MODEL_KEY, fix="give a folder or Hub name of a "
                                              "sequence-classification model") from error
    mismatched = [key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]]
    if absent := sorted({*info["missing_keys"], *mismatched}):
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


class RewardModel(SequenceReward):
    """Score of the text under an ``AutoModelForSequenceClassification`` with a single output.

    The reward model keeps its own tokenizer and sees text, so it may come from another family than
    the policy. A decoder's score is read at the last token of the text. Behind the text of a model
    that ``ppocli reward-model`` has trained stands the token that ended every answer in its
    training, whether the response ended in it or was cut off.

    Args:
        model: folder, Hub name or ``builtin:NAME``.
        on: what is scored: the ``sample`` (prompt + response), the ``response`` alone, or the
            ``pair`` of both.
        batch_size: texts per forward pass.
        max_length: longest input in tokens (default: what the model allows).
        truncation_side: which end of a longer text is cut; ``left`` keeps the response.
        device: ``auto`` (CUDA where there is any), ``cpu``, ``cuda``, ``cuda:N``.
        dtype: ``fp32`` or ``bf16``.
        revision: branch, tag or commit of a Hub model.
        trust_remote_code: run Python code that the model's repository ships.

    Raises:
        InputError: the model is missing, broken, or its scoring head was never trained.
        RewardError: the model has several outputs, or an argument is out of range.
    """

    def check_outputs(self) -> None:
        """As :class:`SequenceReward`: there is one.

        Raises:
            RewardError: there are several.
        """
        if len(self.labels) != 1:
            raise RewardError(
                f"{self.name} has {len(self.labels)} outputs ({', '.join(self.labels)}); a reward "
                "model has one.", where=MODEL_KEY,
                fix=f"reward.fn=classifier {pasted(f'reward.kwargs.label={self.labels[-1]}')}")

    @property
    def stored_scale(self) -> tuple[float, float] | None:
        """Mean and deviation of the scores on the model's training data, where they lie with it.
        """
        mean, std = (getattr(self.model.config, name, None) for name in (SCORE_MEAN, SCORE_STD))
        return (mean, std) if isinstance(mean, float) and isinstance(std, float) and std > 0 \
            else None

    def __call__(self, samples: list[str], prompts: list[str], responses: list[str]) -> list[float]:
        """[N] raw scores."""
        return self.logits(samples, prompts, responses)[:, 0].tolist()


class StepRewardModel(RewardModel):
    """Score of each step of a response (``reward.step_separator``, ``reward.step_fn``): of the text
    up to its end, under an ``AutoModelForSequenceClassification`` with a single output.

    Args:
        model: folder, Hub name or ``builtin:NAME``.
        difference: give each step after the first what it adds to the score of the text before it,
            so that the sum over the steps is the score of the last.
        on, batch_size, max_length, truncation_side, device, dtype, revision, trust_remote_code: as
            of :class:`RewardModel`.

    Raises:
        InputError, RewardError: as :class:`RewardModel`.
    """

    def __init__(self, model: str, *, difference: bool = False, on: str = "sample",
                 batch_size: int = 32, max_length: int | None = None,
                 truncation_side: str = "left", device: str = "auto", dtype: str = "fp32",
                 revision: str | None = None, trust_remote_code: bool = False) -> None:
        super().__init__(model, on=on, batch_size=batch_size, max_length=max_length,
                         truncation_side=truncation_side, device=device, dtype=dtype,
                         revision=revision, trust_remote_code=trust_remote_code)
        self.difference = difference

    def __call__(self, samples: list[str], prompts: list[str],  # type: ignore[override]
                 responses: list[str], steps: list[list[str]]) -> list[list[float]]:
        """[N] lists of one number a step."""
        before = [prompt for prompt, own in zip(prompts, steps, strict=True) for _ in own]
        if not (until := [text for own in steps for text in accumulate(own)]):
            return [[] for _ in steps]
        whole = [prompt + text for prompt, text in zip(before, until, strict=True)]
        flat = self.logits(whole, before, until)[:, 0]
        found = [scores.tolist() for scores in flat.split([len(own) for own in steps])]
        return [differences(scores) for scores in found] if self.difference else found
