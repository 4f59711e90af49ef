"""Examples and pairs as tokens, with masks of the tokens that are trained on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from ppocli.config import tasks
from ppocli.config.schema_training import DataConfig
from ppocli.config.text import counted, printable
from ppocli.data.chat_text import Piece, chat_pieces, note_count, note_tools
from ppocli.data.data_set import Examples, Ids, Mask, Pairs
from ppocli.data.examples import Example, Pair, Read, Wants, read_examples
from ppocli.data.prompt_set import token_ids_of, tokens_around
from ppocli.errors import ConfigError, InputError

SHOWN = 3
"""examples that :func:`facts` shows"""
_CHUNK = 1024
"""texts tokenised at once"""


def load_data(cfg: DataConfig, tokenizer: Any, *, wants: Wants, seed: int, max_tokens: int,
              encoder: bool = False, items: Sequence[Any] | None = None,
              val_items: Sequence[Any] | None = None
              ) -> tuple[Examples | Pairs, Examples | Pairs | None]:
    """The training data, and the data held back for evaluations (``data.val``; None without it).

    Args:
        wants: examples or pairs.
        seed: of the random choice of rows that are held back.
        max_tokens, encoder: as of :func:`encode_examples`.
        items, val_items: rows from Python, in place of ``data.path`` and ``data.val``.

    Raises:
        ConfigError, InputError: as :func:`read_examples` and the functions below.
    """
    share = None if val_items is not None else tasks.val_share(cfg)

    def encoded(key: str, rows: Sequence[Any] | None) -> Examples | Pairs:
        read = read_examples(cfg, wants=wants, items=rows, path_key=key)
        if wants == "pairs":
            return encode_pairs(read, cfg, tokenizer, max_tokens=max_tokens)
        return encode_examples(read, cfg, tokenizer, max_tokens=max_tokens, encoder=encoder)

    train = encoded("data.path", items)
    if share is not None:
        return train.split_off(share, seed)
    held = cfg.val is not None or val_items is not None
    return train, encoded("data.val", val_items) if held else None


# Examples -----------------------------------------------------------------------------------------

def encode_examples(read: Read, cfg: DataConfig, tokenizer: Any, *, max_tokens: int, encoder: bool
                    ) -> Examples:
    """Tokenise examples, mark the tokens to train on, and cut long ones at the end.

    A prompt is tokenised as for PPO (:func:`ppocli.data.prompt_set.encode`): with BOS if the
    tokenizer adds it, without if a chat template rendered the text. Prompt and response are
    tokenised as one text unless that would join them in one token. A response or text is followed
    by the EOS token unless it ends in it; a turn of a conversation ends as its template says.

    Args:
        read: has examples.
        max_tokens: maximum number of tokens that the model reads; ``data.max_length`` may be less.
        encoder: whether an encoder reads the prompt and a decoder produces the response.

    Raises:
        ConfigError: ``data.train_on`` doesn't fit the rows.
        InputError: the chat template is missing or can't be followed, the tokenizer has no EOS
            token or fails on a text, or no example is left.
    """
    _check_template(read, tokenizer)
    longest = min(cfg.max_length or max_tokens, max_tokens)
    every = [(example, _example_pieces(example, cfg, tokenizer, encoder))
             for example in read.examples]
    taught = [(example, pieces) for example, pieces in every
              if any(is_trained for _, is_trained in pieces)]
    examples = Examples([], (), [], [], [], [], [])
    plain = isinstance(read.examples[0].completion, str)
    cut = empty = 0
    for (example, _), line in zip(taught, _lines([pieces for _, pieces in taught], tokenizer,
                                               plain=plain, encoder=encoder), strict=True):
        room = longest - encoder  # a decoder starts from a token of its own
        trained = np.array(line.trained[:room], np.bool_)
        trained[:not encoder] = False  # nothing predicts the first token
        cut += len(line.tokens) > room or (encoder and len(line.prompt_ids) > longest)
        if not trained.any() or (encoder and not line.prompt_ids):
            empty += 1
            continue
        examples.tokens.append(np.array(line.tokens[:room], np.int32))
        examples.trained.append(trained)
        if encoder:
            examples.encoder_tokens.append(np.array(line.prompt_ids[:longest], np.int32))
        # a prompt that was cut itself, after earlier turns, can't be answered
        prompt = line.prompt if len(line.prompt_ids) <= longest else ""
        examples.prompts.append(prompt)
        examples.prompt_lengths.append(len(line.prompt_ids) if prompt and not encoder else 0)
        examples.places.append(example.place)
    note_count(read.notes, len(every) - len(taught), "had no turn to train on: left out", "example")
    note_count(read.notes, cut, f"{{was}} longer than {longest} tokens: cut at the end", "example")
    note_count(read.notes, empty, "had nothing to train on within that: left out", "example")
    if not len(examples):
        raise InputError(f"None of the {len(read.examples)} examples has a token to train on "
                         f"within {longest} tokens.", where="data.max_length",
                         fix=f"{_longer(cfg, max_tokens)}, or another data.train_on")
    note_tools(read.notes, read.conversations, tokenizer)
    return replace(examples, notes=tuple(read.notes), chat=not plain)


def _check_template(read: Read, tokenizer: Any) -> None:
    place, cell, _ = read.conversations[0]
    if isinstance(cell, list) and not getattr(tokenizer, "chat_template", None):
        raise InputError("The tokenizer has no chat template, which conversations need.",
                         where=place, fix="give it one: model.chat_template=FILE, or "
                         "model.tokenizer_path of a chat model; texts with data.chat=false need "
                         "none")


def _longer(cfg: DataConfig, max_tokens: int) -> str:
    """The fix for texts that are too long."""
    if (cfg.max_length or max_tokens) < max_tokens:
        return "a higher data.max_length"
    return f"shorter texts, or a model that reads more than {max_tokens} tokens"


def _example_pieces(example: Example, cfg: DataConfig, tokenizer: Any, encoder: bool
                    ) -> list[Piece]:
    """The example's text in pieces, each with whether it is trained on."""
    prompt: Any = example.prompt
    completion, train_on = example.completion, cfg.train_on
    chat = isinstance(completion, list)
    if train_on == "auto":
        train_on = ("completion" if prompt is not None or encoder else "assistant" if chat
                    else "all")
    wrong = (f"{train_on!r} asks for turns of an assistant, but {example.place} is plain text"
             if train_on == "assistant" and not chat else
             f"{example.place} is one text, without a prompt" if prompt is None and not chat
             and (train_on == "completion" or encoder) else
             "an encoder-decoder is trained on what follows its prompt"
             if encoder and train_on != "completion" else None)
    if wrong:
        raise ConfigError(f"{wrong[0].upper()}{wrong[1:]}.", where=f"data.train_on={train_on}",
                          fix="data.train_on=completion" if encoder else "data.train_on=auto")
    if isinstance(completion, str):
        return [*([(prompt, train_on == "all")] if prompt else []), (completion, True)]
    before = prompt or []
    messages = before + completion
    since = 0 if train_on in ("assistant", "all") else len(before) or max(
        i for i, message in enumerate(messages) if message["role"] == "assistant")
    return chat_pieces(messages, example.place, tokenizer, since=since, tools=example.tools,
                       others=train_on == "all")


@dataclass(frozen=True, slots=True)
class _Line:
    """One text as tokens, through the last one that is trained on; later ones would change nothing.
    """

    tokens: list[int]
    trained: list[bool]
    prompt: str
    """the text before the last piece that is trained on"""
    prompt_ids: list[int]
    """its tokens"""


def _lines(texts: list[list[Piece]], tokenizer: Any, *, plain: bool, encoder: bool = False
           ) -> Iterator[_Line]:
    """Each text as tokens. Plain texts get the tokens that the tokenizer adds in front (and, for an
    encoder, behind), and the EOS token at the end.

    Args:
        encoder: whether ``tokens`` are those of the last piece alone, the decoder's.
    """
    front, behind = tokens_around(tokenizer) if plain else ([], [])
    eos = tokenizer.eos_token_id
    if plain and eos is None:
        raise InputError("The tokenizer has no EOS token to end the training texts with.",
                         where="model.tokenizer_path", fix="a tokenizer that has one")
    anchors = {} if encoder else _anchors(tokenizer)
    for parts, ids in zip(texts, _tokenised(texts, tokenizer, anchors), strict=True):
        last = max(i for i, (_, is_trained) in enumerate(parts) if is_trained)
        before = [token for piece in ids[:last] for token in piece]
        tokens, trained = [*before, *ids[last]], [
            is_trained for (_, is_trained), piece in zip(parts, ids, strict=False) for _ in piece
            ][:len(before) + len(ids[last])]
        if plain and tokens[-1:] != [eos]:
            tokens, trained = [*tokens, eos], [*trained, True]
        prompt = "".join(text for text, _ in parts[:last])
        if encoder:
            yield _Line(tokens[len(before):], trained[len(before):], prompt,
                        [*front, *before, *behind] if before else [])
        else:
            yield _Line(front + tokens, [False] * len(front) + trained, prompt, front + before)


def _tokenised(pieces: list[list[Piece]], tokenizer: Any, anchors: dict[str, list[int]]
               ) -> Iterator[list[list[int]]]:
    """The ids of each text's pieces. The text before a piece keeps the ids that it has alone. A
    piece gets the ids that it has after that text or, if the tokenizer would join the two, those of
    :func:`_ids_alone`."""
    encode = partial(token_ids_of, tokenizer=tokenizer)
    for start in range(0, len(pieces), _CHUNK):
        chunk = pieces[start:start + _CHUNK]
        done: list[list[int]] = [[] for _ in chunk]
        piece_ids: list[list[list[int]]] = [[] for _ in chunk]
        for level in range(max(map(len, chunk))):
            rows = [i for i, parts in enumerate(chunk) if len(parts) > level]
            texts = ["".join(text for text, _ in chunk[i][:level + 1]) for i in rows]
            for i, ids in zip(rows, encode(texts), strict=True):
                fits = ids[:len(done[i])] == done[i]
                piece_ids[i].append(ids[len(done[i]):] if fits else
                                    _ids_alone(chunk[i][level][0], encode, anchors))
                done[i] = done[i] + piece_ids[i][-1]
        yield from piece_ids


def _ids_alone(text: str, encode: Callable[[list[str]], Iterator[list[int]]],
               anchors: dict[str, list[int]]) -> list[int]:
    alone, *behind = encode([text, *(anchor + text for anchor in anchors)])
    return next((ids[len(front):] for front, ids in zip(anchors.values(), behind, strict=True)
                 if ids[:len(front)] == front != ids), alone)


def _anchors(tokenizer: Any) -> dict[str, list[int]]:
    """Short texts, with their ids, after which a text is tokenised without the space that some
    tokenizers, such as Llama's, add in front of any text; none for other tokenizers."""
    anchors: dict[str, list[int]] = {}
    for anchor in "\n:.(":
        try:
            front, letter, behind, spaced = token_ids_of([anchor, "a", f"{anchor}a", f"{anchor} a"],
                                                         tokenizer)
        except InputError:  # a closed vocabulary
            continue
        if (tokenizer.unk_token_id not in front and behind[:len(front)] == front
                and spaced == front + letter != behind):
            anchors[anchor] = front
    return anchors


# Pairs --------------------------------------------------------------------------------------------

def encode_pairs(read: Read, cfg: DataConfig, tokenizer: Any, *, max_tokens: int) -> Pairs:
    """Tokenise pairs as :func:`encode_examples` does. Pairs with a text that is too long, or whose
    answers have the same tokens, are left out.

    Args:
        read: has pairs.
        max_tokens: as of :func:`encode_examples`.

    Raises:
        InputError: as :func:`encode_examples`.
    """
    _check_template(read, tokenizer)
    longest = min(cfg.max_length or max_tokens, max_tokens)
    both = [_pair_pieces(pair, answer, tokenizer)
            for pair in read.pairs for answer in (pair.chosen, pair.rejected)]
    plain = isinstance(read.pairs[0].chosen, str)
    lines = _lines(both, tokenizer, plain=plain)
    pairs = Pairs([], (), [], [], [], [])
    overlong, identical = 0, read.identical
    for pair, chosen, rejected in zip(read.pairs, lines, lines, strict=True):
        if max(len(chosen.tokens), len(rejected.tokens)) > longest:
            overlong += 1
        elif chosen.tokens == rejected.tokens:
            identical += 1
        else:
            pairs.chosen.append(np.array(chosen.tokens, np.int32))
            pairs.rejected.append(np.array(rejected.tokens, np.int32))
            pairs.margins.append(pair.margin)
            pairs.prompt_lengths.append(len(chosen.prompt_ids))
            pairs.places.append(pair.place)
    note_count(read.notes, identical, "{was} identical: left out", "pair")
    note_count(read.notes, overlong, f"{{was}} longer than {longest} tokens: left out", "pair")
    if not len(pairs):
        raise InputError(f"None of the {overlong + identical} pairs is left: {overlong} are longer "
                         f"than {longest} tokens, {identical} hold the same answer twice.",
                         where="data.max_length" if overlong else "data.path",
                         fix=_longer(cfg, max_tokens) if overlong else
                         "give pairs whose answers differ")
    note_tools(read.notes, read.conversations, tokenizer)
    return replace(pairs, notes=tuple(read.notes), chat=not plain)


def _pair_pieces(pair: Pair, answer: Any, tokenizer: Any) -> list[Piece]:
    prompt: Any = pair.prompt
    if isinstance(answer, str):
        return [*([(prompt, False)] if prompt else []), (answer, True)]
    return chat_pieces(prompt + answer, pair.place, tokenizer, since=len(prompt + answer) - 1,
                       tools=pair.tools)


# For people ---------------------------------------------------------------------------------------

def rendered(tokens: Ids, trained: Mask, tokenizer: Any) -> str:
    """The text of an example. Trained parts are in brackets, control characters are escaped."""
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
    parts: list[str] = []
    for start, end in pairwise(edges):
        text = printable(str(tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=False,
                                              clean_up_tokenization_spaces=False)))
        parts.append(f"[{text}]" if end > start and trained[start] else text)
    return "".join(parts)


def facts(data: Examples | Pairs, tokenizer: Any) -> Iterator[str]:
    """Lines about the data: the first rows as the model sees them, the number of rows that were
    left out or cut, and the size."""
    show = partial(rendered, tokenizer=tokenizer)
    for i, place in enumerate(data.places[:SHOWN]):
        yield f"{place}:"
        if isinstance(data, Examples):
            if data.encoder_tokens:
                ids = data.encoder_tokens[i]
                yield f"  reads: {show(ids, np.zeros(len(ids), np.bool_))}"
            yield f"  {show(data.tokens[i], data.trained[i])}"
            continue
        for name, ids in (("chosen", data.chosen[i]), ("rejected", data.rejected[i])):
            yield f"  {name + ':':<10}{show(ids, np.arange(len(ids)) >= data.prompt_lengths[i])}"
        if data.margins[i]:
            yield f"  margin:   {data.margins[i]:g}"
    yield from data.notes
    if isinstance(data, Examples):
        yield (f"{counted(len(data), 'example')}, {counted(sum(map(len, data.tokens)), 'token')}, "
               f"{sum(int(mask.sum()) for mask in data.trained)} of them trained on")
    else:
        yield counted(len(data), "pair")
