"""Sequence classifiers as scorers: their files, an adapter merged into its base; and samples as
their inputs, conversations rendered by the model's own chat template and other texts unchanged,
with the token at the end whose output is the score. Models with missing weights are refused."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from ppocli.config.text import error_line, suggestion
from ppocli.config.user_code import shorten
from ppocli.data.chat_text import described_tools
from ppocli.data.files import Row
from ppocli.data.shapes import render
from ppocli.errors import InputError, RewardError
from ppocli.rewards.resolve import wrong_argument
from ppocli.runs import atomic, model_files

log = logging.getLogger(__name__)

SCORE_END, SCORE_FRONT = "score_end", "score_front"
"""in config.json of a model that ``ppocli reward-model`` has trained: the id of the token at the
end of texts, where scores are read (missing if it is also the pad token), and whether training
texts began with the tokens that the tokenizer adds in front"""
MODEL_KEY = "reward.kwargs.model"
UNBOUNDED = 1_000_000
"""a tokenizer without a limit reports one far above this"""
Chats = Sequence[list[dict[str, Any]]] | None
Tools = Sequence[Any] | None
"""cells of the prompts' column of that name"""
Columns = dict[str, list[list[int]]]
"""input_ids and the tokenizer's other columns, one list per text"""


# Files --------------------------------------------------------------------------------------------

@contextmanager
def _file_errors(what: str, fix: str) -> Iterator[None]:
    """Turn what transformers, PEFT and safetensors raise, of many kinds, into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what} can't be loaded: {error_line(error)}", where=MODEL_KEY, fix=fix
                         ) from error


def load_scorer(name: str, dtype: torch.dtype, *, revision: str | None, trust_remote_code: bool
                ) -> tuple[Any, Any, int | None]:
    """The model that ``reward.kwargs.model`` names, its tokenizer, and the maximum tokens of its
    input (None: without limit).

    Raises:
        InputError: missing or broken files, no vocabulary, a tokenizer that doesn't fit, or weights
            that the files lack.
    """
    model_files.quiet_transformers()
    needs: dict[str, Any] = {"key": MODEL_KEY, "revision": revision}
    source = model_files.find_model(name, adapters=True, **needs)
    hub = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    if model_files.is_adapter(source):
        base, base_revision = model_files.find_whole(
            name, needs="model and tokenizer", **needs)
        place = source if model_files.has_tokenizer(source) else base
        tokenizer = _load_tokenizer(name, place, hub)
        model = _load_adapter(name, Path(source), base, dtype,
                              {**hub, "revision": base_revision or "main"})
    else:
        tokenizer = _load_tokenizer(name, source, hub)
        model, info = _from_files(name, source, dtype, hub)
        _refuse_absent(name, info, set())
    embeddings = model.get_input_embeddings()
    if embeddings is not None and len(tokenizer) > embeddings.weight.shape[0]:
        raise InputError(f"The tokenizer in {name} knows {len(tokenizer)} tokens, "
                         f"but its model has only {embeddings.weight.shape[0]} embeddings.",
                         where=MODEL_KEY, fix="put the model's own tokenizer into its folder")
    return model, tokenizer, _position_limit(model, tokenizer)


def _load_tokenizer(name: str, source: str, options: dict[str, Any]) -> Any:
    fix = "save the model's own tokenizer into its folder"
    with _file_errors(f"The tokenizer of {name}", fix):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    if len(tokenizer) == 0 or tokenizer.vocab_size == 0:
        raise InputError(f"No tokenizer in {name} (expected tokenizer.json, or a vocabulary file).",
                         where=MODEL_KEY, fix=fix)
    return tokenizer


def _from_files(name: str, source: str, dtype: torch.dtype, options: dict[str, Any]
                ) -> tuple[Any, dict[str, Any]]:
    with _file_errors(f"The model in {name}",
                      "give a folder or Hub name of a sequence-classification model"):
        return transformers.AutoModelForSequenceClassification.from_pretrained(
            source, dtype=dtype, output_loading_info=True,
            ignore_mismatched_sizes=True,  # the caller refuses them, with names and sizes
            **options)


def _refuse_absent(name: str, info: dict[str, Any], new: set[str]) -> None:
    """Refuse a model with random weights: the files lack them or have them in another size.

    Args:
        new: names of weights that come from other files.
    """
    sizes = {key: f"{key} ({list(stored)} in the files, {list(here)} by config.json)"
             for key, stored, here in info["mismatched_keys"] if key not in new}
    if absent := sorted((set(info["missing_keys"]) - new) | sizes.keys()):
        shown = ", ".join(sizes.get(key, key) for key in absent[:5])
        raise InputError(
            f"{name} has no fitting weights for {shown}{', ...' * (len(absent) > 5)}; they would "
            "be random numbers.", where=MODEL_KEY, fix="correct the sizes in config.json, or copy "
            "the weights that belong to it" if absent[0] in sizes else
            "give a model trained for sequence classification, not its base")


def _load_adapter(name: str, folder: Path, base: str, dtype: torch.dtype, options: dict[str, Any]
                  ) -> Any:
    """The base with the adapter merged into it, computed in fp32."""
    import peft
    from safetensors.torch import load_file

    kind = (atomic.read_json(folder / model_files.ADAPTER_CONFIG) or {}).get("task_type") or ""
    if kind not in ("SEQ_CLS", ""):
        raise InputError(f"{name} is an adapter for {kind}, not for the scores or labels of texts "
                         "(SEQ_CLS).", where=MODEL_KEY, fix="give an adapter of a reward model or "
                         "of a classifier")
    with _file_errors(f"The adapter in {name}", "copy the folder again, or merge it where it was "
                      "made"):
        tensors = load_file(folder / model_files.ADAPTER_WEIGHTS)
        heads = {key: tensor for key, tensor in tensors.items() if key.endswith(model_files.HEADS)}
        labels = {"num_labels": len(next(iter(heads.values())))} if heads else {}
        model, info = _from_files(name, base, torch.float32, {**options, **labels})
        stored = {key.removeprefix("base_model.model.") for key in tensors}
        _refuse_absent(name, info, {key for key in (
            *info["missing_keys"], *(one[0] for one in info["mismatched_keys"])) if key in stored})
        with warnings.catch_warnings():
            # warnings about old names in transformers, and about layers that PEFT adjusts itself
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=UserWarning, module="peft")
            on_base = peft.PeftModel.from_pretrained(model, str(folder))
            if getattr(on_base.active_peft_config, "is_prompt_learning", False):
                raise InputError(f"{name} has virtual tokens, which a reward can't use.",
                                 where=MODEL_KEY, fix="give a LoRA adapter or a whole model")
            return on_base.merge_and_unload().to(dtype)


def _position_limit(model: Any, tokenizer: Any) -> int | None:
    """Maximum tokens that tokenizer and position embeddings allow; None without a limit."""
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


# Inputs -------------------------------------------------------------------------------------------

def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse an argument that is not one of ``choices``.

    Raises:
        RewardError: names the nearest choice.
    """
    if value not in choices:
        listed = [str(choice).lower() for choice in choices]
        raise RewardError(f"{name}={value!r} is unknown. {suggestion(str(value), listed)}"
                          .rstrip(), where=f"reward.kwargs.{name}",
                          fix=f"one of: {', '.join(listed)}")


class SampleReader:
    """Converts samples to token ids, in the form that the model was trained on.

    Args:
        name: of the model, for messages.
        config: the model's configuration, unchanged.
        on: ``sample``, ``response`` or ``pair``.
        chat: whether the tokenizer's own template renders conversations. ``auto``: if it has one
            and prompts are conversations, unless the model was trained on plain text.
        end: text after each sample, "" for none; None: the token that ended the texts in training,
            if the model's configuration has it.
        max_length: longest input in tokens (None: any).
        decoder: whether the score is read at the last token that isn't padding.

    Raises:
        RewardError: an argument that isn't one of these.
        InputError: ``chat`` is true, and the tokenizer has no chat template.
    """

    def __init__(self, name: str, tokenizer: Any, config: Any, *, on: str, chat: bool | str,
                 end: str | None, max_length: int | None, decoder: bool) -> None:
        check_choice("chat", chat, ("auto", True, False))
        if not isinstance(end, str | None):
            raise wrong_argument("end", end, "a text")
        self.name, self.tokenizer, self.on, self.max_length = name, tokenizer, on, max_length
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat is True and on != "sample":
            raise RewardError(f"chat=true renders whole conversations, and on={on} reads something "
                              "else.", where="reward.kwargs.chat", fix="reward.kwargs.on=sample, "
                              "or leave reward.kwargs.chat out")
        if chat is True and not self.has_template:
            raise InputError(f"The tokenizer of {name} has no chat template.",
                             where="reward.kwargs.chat=true", fix="reward.kwargs.chat=false, or "
                             "put a template into its folder (chat_template.jinja)")
        self.chat = chat
        self.trained_on_chat: bool | None = tokenizer.init_kwargs.get(model_files.WITH_TEMPLATE)
        self.front = bool(getattr(config, SCORE_FRONT, True))
        stored = getattr(config, SCORE_END, None)
        self.end: list[int] = []
        if end is not None:
            self.end = list(tokenizer(end, add_special_tokens=False)["input_ids"]) if end else []
        elif stored is not None:
            self.end = [stored]
        self.room = None if max_length is None else max(max_length - len(self.end), 1)
        self.end_text = end or (tokenizer.decode(self.end) if self.end else "")
        # transformers' decoders read the last token that doesn't pad, in training as well
        pad = config.get_text_config().pad_token_id
        self.unread = pad if decoder and not self.end and end is None else None
        self._noted = self._noted_cut = False

    def read(self, samples: list[str], prompts: list[str], responses: list[str],
             chats: Chats, tools: Tools = None) -> Columns:
        """Token ids of N samples, with ``chats`` and ``tools`` if the prompts are conversations."""
        texts, pairs = {"sample": (samples, None), "response": (responses, None),
                        "pair": (prompts, responses)}[self.on]
        renders = self.on == "sample" and (self.chat is True or (
            self.chat == "auto" and self.has_template and chats is not None
            and self.trained_on_chat is not False))
        if renders:
            texts = self._conversations(prompts, responses, chats, tools)
        columns = self._encoded(texts, pairs, special=self.front and not renders)
        if texts and not self._noted:
            self._noted = True
            self._note(columns["input_ids"][0], renders, chats is not None)
        return columns

    def _conversations(self, prompts: list[str], responses: list[str],
                       chats: Chats, tools: Tools) -> list[str]:
        """The samples as the chat template renders them."""
        chats = chats or [[{"role": "user", "content": prompt},
                           {"role": "assistant", "content": response}]
                          for prompt, response in zip(prompts, responses, strict=True)]
        texts = [self._rendered(chat, described_tools(
            Row("the prompts", {"tools": cell}), "tools", "prompts.columns", "prompts.columns=[]"))
            for chat, cell in zip(chats, tools or [None] * len(chats), strict=True)]
        # without the line break that a template adds after its end
        return [bare if self.end and (bare := text.rstrip()).endswith(self.end_text) else text
                for text in texts]

    def _rendered(self, chat: list[dict[str, Any]], tools: list[Any] | None) -> str:
        try:
            return render(chat, lambda messages: str(self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False)))
        except Exception as error:  # templates are programs: jinja's errors and any Python error
            raise RewardError(
                f"The chat template of {self.name} refuses a conversation ({error_line(error)}): "
                f"{shorten(str(chat))}", where="reward.kwargs.model",
                fix="reward.kwargs.on=response shows it the response alone, "
                    "reward.kwargs.chat=false the policy's own text") from error

    def _note(self, ids: list[int], renders: bool, chat: bool) -> None:
        """Log once how samples are read, with the first of them."""
        how = "conversations through its own chat template" if renders else {
            "sample": "prompt and response as plain text", "response": "the response alone",
            "pair": "prompt and response as two segments"}[self.on]
        behind = f", {self.end_text!r} behind each" if self.end_text else ""
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        log.info("%s reads %s%s: %s", self.name, how, behind, shorten(text))
        if chat and not renders and self.on == "sample" and self.chat == "auto":
            why = ("was trained on plain text" if self.has_template else "has no chat template")
            log.warning("%s %s: it reads conversations as the policy's template writes them "
                        "(reward.kwargs.on=response shows it the response alone; "
                        "reward.kwargs.chat=false says that this is meant)", self.name, why)

    def _with_fillers(self, columns: Columns) -> Columns:
        """The columns, in which texts without a token have one."""
        tokens = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id,
                  self.tokenizer.pad_token_id)
        fillers = {"input_ids": next((token for token in tokens if token is not None), 0),
                   "attention_mask": 1}
        return {name: [row or [fillers.get(name, 0)] for row in rows]
                for name, rows in columns.items()}

    def _encoded(self, texts: list[str], pairs: list[str] | None, *, special: bool) -> Columns:
        encoded = self.tokenizer(texts, pairs, truncation=self.room is not None,
                                 max_length=self.room, return_attention_mask=True,
                                 add_special_tokens=special)
        # fast tokenizers report the texts that they have cut
        cut = [encoding for encoding in encoded.encodings or () if encoding.overflowing]
        if cut and not self._noted_cut:
            self._note_cut(len(cut), len(texts))
        columns: Columns = dict(encoded)
        if not all(columns["input_ids"]):
            # the model needs at least one token: some tokenizers return none for an empty text
            columns = self._with_fillers(columns)
        if self.tokenizer.bos_token_id is not None or self.unread is not None:
            self._trim(columns)
        return self._ended(columns) if self.end else columns

    def _note_cut(self, count: int, total: int) -> None:
        self._noted_cut = True
        log.warning("%s reads at most %d tokens: %d of %d texts were cut on the %s (said once)",
                    self.name, self.max_length, count, total, self.tokenizer.truncation_side)

    def _trim(self, columns: Columns) -> None:
        """Leave out a second BOS, written by a chat template, and tokens at the end that aren't
        read."""
        for i, ids in enumerate(columns["input_ids"]):
            start = int(len(ids) > 1 and ids[0] == ids[1] == self.tokenizer.bos_token_id)
            stop = len(ids)
            while self.unread is not None and stop > start + 1 and ids[stop - 1] == self.unread:
                stop -= 1
            for rows in columns.values():
                rows[i] = rows[i][start:stop]

    def _ended(self, columns: Columns) -> Columns:
        """The texts with the tokens that end each."""
        for i, ids in enumerate(columns["input_ids"]):
            if ids[-len(self.end):] != self.end:
                columns["input_ids"][i] = [*ids, *self.end]
                columns["attention_mask"][i] = [*columns["attention_mask"][i],
                                                *[1] * len(self.end)]
        columns.pop("token_type_ids", None)  # decoders have no use for it
        return columns
