"""Observations of environments as token ids, appended to a context. Nothing is tokenised again: the
policy's turns keep the ids that it sampled."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppocli.config.text import each_text
from ppocli.config.user_code import shorten
from ppocli.data.chat_text import rendered_chat
from ppocli.errors import InputError, RewardError

log = logging.getLogger("ppocli")

_QUESTION = [{"role": "user", "content": "a question"}]
_ANSWER = [{"role": "assistant", "content": "<think>\nwords\n</think>\n\nan answer"}]
_FOLLOW_UP = [{"role": "user", "content": "more"}]


@dataclass(frozen=True, slots=True)
class RenderedText:
    """Text of an environment in a context."""

    ids: list[int]
    text: str = ""
    messages: tuple[Any, ...] = ()
    """the text's messages, if a chat template rendered them; of an opening also the prompt's"""


class PlainWords:
    """Observations as plain text, without a chat template."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def opening(self, prompt: list[int], messages: Any, observation: Any
                ) -> tuple[list[int], RenderedText]:
        """The prompt's ids and what ``reset`` adds to them."""
        return prompt, self.between(observation)

    def between(self, observation: Any, *, ended: bool = True, last: int | None = None
                ) -> RenderedText:
        """An observation as token ids.

        Args:
            ended: whether a stop token ended the turn before.
            last: id of the last token of that turn.

        Raises:
            RewardError: the observation is no text.
        """
        if observation is None:
            return RenderedText([])
        if not isinstance(observation, str):
            raise RewardError(f"An observation is of type {type(observation).__name__}; without a "
                              "chat template it must be text.", where="env.fn",
                              fix="return a text, or set prompts.chat=true")
        ids = self.tokenizer(observation, add_special_tokens=False)["input_ids"]
        return RenderedText(list(ids), observation)


@dataclass
class ChatWords:
    """Observations as messages, rendered by the tokenizer's chat template.

    Raises:
        InputError: the template changes earlier messages when one is added, so that training and
            the next turn would read different texts; or it refuses a message.
    """

    tokenizer: Any
    tools: Sequence[Any] = ()

    def __post_init__(self) -> None:
        first = self._render(_QUESTION, ask=True)
        second = self._render([*_QUESTION, *_ANSWER, *_FOLLOW_UP], ask=True)
        third = self._render([*_QUESTION, *_ANSWER, *_FOLLOW_UP, *_ANSWER], ask=False)
        if not second.startswith(first + _ANSWER[0]["content"]) or not third.startswith(second):
            raise InputError(
                "The tokenizer's chat template changes earlier turns when a message is added (it "
                "may drop their thoughts), so that training and the next turn would read different "
                "texts.", where="prompts.chat, env.fn",
                fix="give the tokenizer a template that leaves the history as it is")
        if self.tools and self._render(_QUESTION, ask=True, tools=()) == first:
            log.warning("The tokenizer's chat template leaves out tools: the policy knows only "
                        "what the prompts say about them.")

    def _render(self, messages: Sequence[Any], *, ask: bool, tools: Sequence[Any] | None = None
                ) -> str:
        return rendered_chat(list(messages), "the messages of an episode", self.tokenizer,
                             tools=list(self.tools if tools is None else tools) or None, prompt=ask,
                             where="prompts.chat, env.fn")

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def opening(self, prompt: list[int], messages: Any, observation: Any
                ) -> tuple[list[int], RenderedText]:
        """The prompt's ids, rendered again with the result of ``reset``: a text goes to the end of
        the last message, messages follow it.

        Raises:
            RewardError: ``reset`` returned a text, and the last message has none.
            InputError: the prompt was cut, so that its messages don't stand for it.
        """
        if observation is None and not self.tools:
            return prompt, RenderedText([])
        # other differences are the template's, which may contain the date
        whole, count = self._ids(self._render(messages, ask=True, tools=())), len(prompt)
        if count < len(whole) and (whole[:count] == prompt or whole[1 - count:] == prompt[1:]):
            raise InputError("A prompt was cut, so that the text of reset, or descriptions of "
                             "tools, can't be added to its conversation.",
                             where="prompts.max_length, env.fn", fix="leave such prompts out "
                             "(prompts.overlong=drop), or allow longer ones (prompts.max_length, "
                             "prompts.length_sampler)")
        if not isinstance(observation, str):
            added = list(observation or ())
            whole_messages = (*messages, *added)
            return (self._ids(self._render(whole_messages, ask=True)),
                    RenderedText([], text_of(added), whole_messages))
        *before, last = messages
        if not isinstance(last["content"], str):
            raise RewardError("reset returned a text, which can't go behind a message that holds "
                              f"{shorten(repr(last['content']))}.", where="env.fn",
                              fix="return a list of {role, content} messages")
        extended = {**last, "content": f"{last['content']}{observation}"}
        return (self._ids(self._render([*before, extended], ask=True)),
                RenderedText([], observation, (*before, extended)))

    def between(self, observation: Any, *, ended: bool, last: int) -> RenderedText:
        """As :meth:`PlainWords.between`: the end of the policy's message, unless its turn contains
        it, the observation, and the beginning of the policy's next message."""
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        messages = list(observation or ())
        whole = self._render([*_QUESTION, *_ANSWER, *messages], ask=True)
        before = self._render(_QUESTION, ask=True) + _ANSWER[0]["content"]
        rest = whole[len(before):]
        last_text = self.tokenizer.decode([last]) if ended else ""
        return RenderedText(self._ids(rest.removeprefix(last_text)), text_of(messages),
                            tuple(messages))


def is_observation(value: Any) -> bool:
    """Whether a value can be an observation: a text, messages, or None."""
    return value is None or isinstance(value, str) or (
        isinstance(value, (list, tuple))
        and all(isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in value))


def escape_surrogates(value: Any) -> Any:
    """An observation with halves of UTF-16 pairs, which tokenizers refuse, as ``\\ud800``: a tool
    may repeat one that the policy wrote."""
    return each_text(value, lambda text: text.encode(errors="backslashreplace").decode())


def text_of(messages: Sequence[Any]) -> str:
    """Messages as text, in the form of samples."""
    return "".join(f"\n[{one.get('role', 'user')}] {one.get('content', '')}\n" for one in messages)

