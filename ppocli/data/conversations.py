"""Conversations rendered by the chat template, in pieces: the model's turns, and the rest."""

import re
from typing import Any

from ppocli.data.chat_text import rendered_chat, template_errors
from ppocli.data.shapes import Message, is_masked
from ppocli.data.tool_calls import with_arguments
from ppocli.errors import InputError

Piece = tuple[str, bool]
"""a text, and whether it is trained on"""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def chat_pieces(messages: list[Message], place: str, tokenizer: Any, *, since: int,
                tools: list[Any] | None = None, others: bool = False) -> list[Piece]:
    """A conversation as the template renders it, in pieces that are trained on (turns of the
    assistant, each through the token that ends it) and pieces that aren't.

    If the template marks generated text (``{% generation %}``, as read by transformers'
    ``return_assistant_tokens_mask``), its marks decide, extended to the token that ends a turn.
    Otherwise a turn is the text that the template adds to the conversation before it and the
    generation prompt. Turns that the data marks as not trained on
    (:func:`ppocli.data.shapes.is_masked`) aren't.

    Args:
        messages: with at least one turn of the assistant.
        place: where they came from, for errors.
        since: turns before this one aren't trained on.
        tools: as of :func:`ppocli.data.chat_text.rendered_chat`.
        others: train on all text but the masked turns.

    Raises:
        InputError: the chat template refuses the conversation, or writes earlier turns differently
            once others follow, so that turns can't be told apart.
    """
    masked = [i for i, message in enumerate(messages) if is_masked(message)]
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    if others or not _MARKS.search(str(tokenizer.get_chat_template(tools=tools))):
        whole = rendered_chat(messages, place, tokenizer, tools=tools)
        places = masked if others else [
            i for i, message in enumerate(messages)
            if message["role"] == "assistant" and i >= since and i not in masked]
        spans = [_turn_span(messages, i, whole, place, tokenizer, tools,
                            alone=not since and i < last and not others) for i in places]
    else:
        whole, spans = _marked_spans(messages, place, tokenizer, tools, since, masked)
    pieces: list[Piece] = []
    at = 0
    for start, end in spans:
        pieces += [(whole[at:start], others), (whole[start:end], not others)]
        at = end
    return [piece for piece in [*pieces, (whole[at:], others)] if piece[0]]


def _marked_spans(messages: list[Message], place: str, tokenizer: Any, tools: list[Any] | None,
                  since: int, masked: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """The rendered text, and the spans (start, end) in it that are trained on by the template's
    marks."""
    whole, marks = _marked(messages, place, tokenizer, tools)

    def marks_before(turn: int) -> int:
        if turn == len(messages):
            return len(marks)
        if not any(message["role"] == "assistant" for message in messages[:turn]):
            return 0
        before, theirs = _marked(messages[:turn], place, tokenizer, tools)
        return (sum(start < len(before) for start, _ in marks) if whole.startswith(before)
                else len(theirs))
    kept = range(marks_before(since), len(marks))
    if not kept:
        raise InputError(f"The chat template marks nothing as generated in what {place} is to "
                         "teach.", where="model.tokenizer_path", fix="put what the assistant "
                         "says, and its calls of tools, between {% generation %} and "
                         "{% endgeneration %}")
    without = {mark for turn in masked if messages[turn]["role"] == "assistant" and turn >= since
               for mark in range(marks_before(turn), marks_before(turn + 1))}
    spans: list[tuple[int, int]] = []
    for mark in kept:
        if mark in without:
            continue
        start, end = marks[mark]
        # a turn may have several adjacent marks
        begins = spans.pop()[0] if spans and start <= spans[-1][1] else start
        spans.append((begins, end + _closing(whole[start:end], whole[end:], tokenizer)))
    return whole, spans


def _marked(messages: list[Message], place: str, tokenizer: Any, tools: list[Any] | None
            ) -> tuple[str, list[tuple[int, int]]]:
    """The rendered text, and the spans (start, end) in it that the template marks as generated."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template  # its annotation says that it returns a text

    def marked(conversation: list[Message]) -> Any:
        texts, spans = render([conversation], tools, return_assistant_tokens_mask=True,
                              chat_template=tokenizer.get_chat_template(tools=tools),
                              **tokenizer.special_tokens_map)
        return str(texts[0]), spans[0]
    with template_errors(place):
        text, spans = with_arguments(messages, marked, lambda result: str(result[0]))
    return text, [(int(start), int(end)) for start, end in spans if end > start]


def _turn_span(messages: list[Message], turn: int, whole: str, place: str, tokenizer: Any,
               tools: list[Any] | None, *, alone: bool) -> tuple[int, int]:
    """The span (start, end) of a turn in the rendered text, without the generation prompt.

    Args:
        alone: whether the error may suggest to train on the last answer alone.
    """
    assistant = messages[turn]["role"] == "assistant"
    if not turn and assistant:
        raise InputError(f"The conversation in {place} begins with the assistant: the chat "
                         "template doesn't show where that turn begins.", where=place,
                         fix="begin it with a turn of the user or the system, or mark what the "
                             "assistant says with {% generation %} and {% endgeneration %} in "
                             "the chat template")
    before = "" if not turn else rendered_chat(messages[:turn], place, tokenizer, tools=tools,
                                               prompt=assistant)
    through = rendered_chat(messages[:turn + 1], place, tokenizer, tools=tools)
    start = len(before)
    # the turn ends after its last special token if only white space follows
    kept = through[start:].rstrip()
    ended = any(kept.endswith(token) for token in _specials(tokenizer))
    end = start + len(kept) if ended else len(through)
    if not through.startswith(before) or not whole.startswith(through[:end]):
        raise InputError(f"The turns in {place} can't be told apart: the chat template writes turn "
                         f"{turn + 1} or what is before it differently once the conversation goes "
                         "on.", where="model.tokenizer_path",
                         fix="data.train_on=completion trains on the last answer alone; or "
                         * alone + "mark what the assistant says with {% generation %} and "
                         "{% endgeneration %} in the chat template, or split conversations up so "
                         "that each has one turn of the assistant")
    return start, end


def _specials(tokenizer: Any) -> list[str]:
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*map(str, tokenizer.all_special_tokens), *added}, key=len, reverse=True)


def _closing(turn: str, text: str, tokenizer: Any) -> int:
    """The number of characters of ``text``, which follows a marked turn, through the special token
    that ends the turn; 0 if the turn contains that token, or none follows."""
    tokens = _specials(tokenizer)
    bare = text.lstrip(" ")
    token = next((token for token in tokens if bare.startswith(token)), "")
    if not token or any(turn.rstrip().endswith(token) for token in tokens):
        return 0
    return len(text) - len(bare) + len(token)
