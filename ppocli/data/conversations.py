"""Conversations as the chat template writes them, in pieces: what the model says, and the rest."""

import re
from typing import Any

from ppocli.data.examples import Message
from ppocli.data.render import rendered_chat, template_errors
from ppocli.errors import InputError

Piece = tuple[str, bool]
"""text, and whether the model says it"""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


def chat_pieces(messages: list[Message], place: str, tokenizer: Any, *, since: int,
                tools: list[Any] | None = None) -> list[Piece]:
    """A conversation as the template renders it, in pieces that alternate between what others say
    and what the assistant does, through the token that ends its turn.

    A template that marks what is generated (``{% generation %}``, as transformers'
    ``return_assistant_tokens_mask`` reads it) is taken at its word, with the token that ends a turn
    where it stands behind the mark. Of others a turn is what the template adds to the conversation
    before it, with the generation prompt.

    Args:
        messages: with at least one turn of the assistant.
        place: where they came from, for errors.
        since: turns before this one count as what others say.
        tools: as of :func:`ppocli.data.render.rendered_chat`.

    Raises:
        InputError: no chat template, one that refuses the conversation, or one that writes the
            earlier turns differently once others follow, so that turns can't be told apart.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("The tokenizer has no chat template, which conversations need.",
                         where=place, fix="give it one (model.chat_template=FILE), or give texts, "
                         "with data.chat=false")
    spans: list[tuple[int, int]] = []
    if _MARKS.search(str(tokenizer.get_chat_template(tools=tools))):
        whole, marks = _marked(messages, place, tokenizer, tools)
        if any(message["role"] == "assistant" for message in messages[:since]):
            before, theirs = _marked(messages[:since], place, tokenizer, tools)
            marks = ([mark for mark in marks if mark[0] >= len(before)]
                     if whole.startswith(before) else marks[len(theirs):])
        if not marks:
            raise InputError(f"The chat template marks nothing as generated in what {place} is to "
                             "teach.", where="model.tokenizer_path", fix="put what the assistant "
                             "says, and its calls of tools, between {% generation %} and "
                             "{% endgeneration %}")
        for start, end in marks:
            # a turn may have several marks, one behind the other
            begins = spans.pop()[0] if spans and start <= spans[-1][1] else start
            spans.append((begins, end + _closing(whole[start:end], whole[end:], tokenizer)))
    else:
        whole = rendered_chat(messages, place, tokenizer, tools=tools)
        spans = [_turn_span(messages, i, whole, place, tokenizer, tools)
                 for i, message in enumerate(messages)
                 if message["role"] == "assistant" and i >= since]
    pieces: list[Piece] = []
    at = 0
    for start, end in spans:
        pieces += [(whole[at:start], False), (whole[start:end], True)]
        at = end
    return [piece for piece in [*pieces, (whole[at:], False)] if piece[0]]


def _marked(messages: list[Message], place: str, tokenizer: Any, tools: list[Any] | None
            ) -> tuple[str, list[tuple[int, int]]]:
    """The rendered text and the places in it that the template marks as generated."""
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template  # is typed as if it returned a text
    with template_errors(place):
        texts, spans = render([messages], tools, return_assistant_tokens_mask=True,
                              chat_template=tokenizer.get_chat_template(tools=tools),
                              **tokenizer.special_tokens_map)
    return str(texts[0]), [(int(start), int(end)) for start, end in spans[0] if end > start]


def _turn_span(messages: list[Message], turn: int, whole: str, place: str, tokenizer: Any,
               tools: list[Any] | None) -> tuple[int, int]:
    if not turn:
        raise InputError(f"The conversation in {place} begins with the assistant: where that turn "
                         "begins can't be told from the chat template.", where=place,
                         fix="begin it with a turn of the user or the system, or mark what the "
                             "assistant says with {% generation %} and {% endgeneration %} in "
                             "the chat template")
    before = rendered_chat(messages[:turn], place, tokenizer, tools=tools, prompt=True)
    through = rendered_chat(messages[:turn + 1], place, tokenizer, tools=tools)
    start = len(before)
    # the turn ends behind its last special token if only white space follows it
    kept = through[start:].rstrip()
    ended = any(kept.endswith(token) for token in _specials(tokenizer))
    end = start + len(kept) if ended else len(through)
    if not through.startswith(before) or not whole.startswith(through[:end]):
        raise InputError(f"The turns in {place} can't be told apart: the chat template writes turn "
                         f"{turn + 1} or what is before it differently once the conversation goes "
                         "on.", where="model.tokenizer_path", fix="mark what the assistant says "
                         "with {% generation %} and {% endgeneration %} in the chat template, or "
                         "split conversations up so that each has one turn of the assistant")
    return start, end


def _specials(tokenizer: Any) -> list[str]:
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*map(str, tokenizer.all_special_tokens), *added}, key=len, reverse=True)


def _closing(turn: str, text: str, tokenizer: Any) -> int:
    """Characters of ``text``, which follows a marked turn, through the special token that ends it;
    0 where the turn holds that, or none follows."""
    tokens = _specials(tokenizer)
    bare = text.lstrip(" ")
    token = next((token for token in tokens if bare.startswith(token)), "")
    if not token or any(turn.rstrip().endswith(token) for token in tokens):
        return 0
    return len(text) - len(bare) + len(token)
