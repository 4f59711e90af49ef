"""Samples as inputs of a sequence classifier: conversations rendered by its own chat template,
other texts unchanged, with the token at the end whose output is the score."""

import logging
from collections.abc import Sequence
from typing import Any

from ppocli.config.text import error_line, suggestion
from ppocli.config.user_code import shorten
from ppocli.data.shapes import render
from ppocli.errors import InputError, RewardError
from ppocli.rewards.resolve import wrong_argument
from ppocli.runs.model_files import WITH_TEMPLATE

log = logging.getLogger(__name__)

SCORE_END, SCORE_FRONT = "score_end", "score_front"
"""in config.json of a model that ``ppocli reward-model`` has trained: the id of the token at the
end of texts, where scores are read (missing if it is also the pad token), and whether training
texts began with the tokens that the tokenizer adds in front"""
OPENRLHF = "normalize_reward"
"""in config.json of a reward model trained by OpenRLHF"""
Columns = dict[str, list[list[int]]]
"""input_ids and the tokenizer's other columns, one list per text"""


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
        self.trained_on_chat: bool | None = tokenizer.init_kwargs.get(WITH_TEMPLATE)
        self.front = bool(getattr(config, SCORE_FRONT, True))
        self.openrlhf = end is None and hasattr(config, OPENRLHF) and bool(tokenizer.eos_token)
        stored = getattr(config, SCORE_END, None)
        self.end: list[int] = []
        if end is not None:
            self.end = list(tokenizer(end, add_special_tokens=False)["input_ids"]) if end else []
        elif stored is not None or self.openrlhf:
            self.end = [tokenizer.eos_token_id if stored is None else stored]
        self.end_text = end or (tokenizer.decode(self.end) if self.end else "")
        # transformers' decoders read the last token that doesn't pad, in training as well
        pad = config.get_text_config().pad_token_id
        self.unread = pad if decoder and not self.end and end is None else None
        self._noted = self._noted_cut = False

    def read(self, samples: list[str], prompts: list[str], responses: list[str],
             chats: Sequence[list[dict[str, Any]]] | None) -> Columns:
        """Token ids of N samples.

        Args:
            chats: the same samples as conversations, if the prompts are conversations.

        Raises:
            RewardError: the chat template refuses a conversation.
        """
        renders = self.on == "sample" and (self.chat is True or (
            self.chat == "auto" and self.has_template and chats is not None
            and self.trained_on_chat is not False))
        if renders:
            chats = chats or [[{"role": "user", "content": prompt},
                               {"role": "assistant", "content": response}]
                              for prompt, response in zip(prompts, responses, strict=True)]
            samples = [self._rendered(chat) for chat in chats]
        texts, pairs = {"sample": (samples, None), "response": (responses, None),
                        "pair": (prompts, responses)}[self.on]
        if self.end and (renders or self.openrlhf):
            texts = [self._ended(text) for text in texts]
        columns = self._encoded(texts, pairs, special=self.front and not renders
                                and not self.openrlhf)
        if texts and not self._noted:
            self._noted = True
            self._note(columns["input_ids"][0], renders, chats is not None)
        return columns

    def _rendered(self, chat: list[dict[str, Any]]) -> str:
        try:
            return render(chat, lambda messages: str(self.tokenizer.apply_chat_template(
                messages, tokenize=False)))
        except Exception as error:  # templates are programs: jinja's errors and any Python error
            raise RewardError(
                f"The chat template of {self.name} refuses a conversation ({error_line(error)}): "
                f"{shorten(str(chat))}", where="reward.kwargs.model",
                fix="reward.kwargs.on=response shows it the response alone, "
                    "reward.kwargs.chat=false the policy's own text") from error

    def _ended(self, text: str) -> str:
        """A text without the line break that a template adds after its end; for models of OpenRLHF,
        a text without an end gets a space in front of it, as there."""
        if (bare := text.rstrip()).endswith(self.end_text):
            return bare
        return text.rstrip("\n") + " " if self.openrlhf else text

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

    def _encoded(self, texts: list[str], pairs: list[str] | None, *, special: bool) -> Columns:
        tokenizer, room = self.tokenizer, self.max_length
        if room is not None:
            room = max(room - len(self.end), 1)
        encoded = tokenizer(texts, pairs, truncation=room is not None, max_length=room,
                            return_attention_mask=True, add_special_tokens=special)
        # fast tokenizers report the texts that they have cut
        num_cut = sum(bool(encoding.overflowing) for encoding in encoded.encodings or ())
        if num_cut and not self._noted_cut:
            self._noted_cut = True
            log.warning("%s reads at most %d tokens: %d of %d texts were cut on the %s (said once)",
                        self.name, self.max_length, num_cut, len(texts), tokenizer.truncation_side)
        # the model needs at least one token: some tokenizers return none for an empty text
        filler = next((token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id,
                                           tokenizer.pad_token_id) if token is not None), 0)
        least = {"input_ids": [filler], "attention_mask": [1]}
        columns = {key: [row or least.get(key, [0]) for row in rows]
                   for key, rows in encoded.items()}
        for i, ids in enumerate(columns["input_ids"]):
            # a second BOS, written by a chat template
            start = int(len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id)
            stop = len(ids)
            while self.unread is not None and stop > start + 1 and ids[stop - 1] == self.unread:
                stop -= 1
            for rows in columns.values():
                rows[i] = rows[i][start:stop]
        if self.end:
            for i, ids in enumerate(columns["input_ids"]):
                if ids[-len(self.end):] != self.end:
                    columns["input_ids"][i] = [*ids, *self.end]
                    columns["attention_mask"][i] = [*columns["attention_mask"][i],
                                                    *[1] * len(self.end)]
            columns.pop("token_type_ids", None)  # decoders have no use for it
        return columns
