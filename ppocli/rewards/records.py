"""What a reward is asked and what it answers; and the same as JSON, for a reward that is served
elsewhere.

``POST URL`` with ``{"prompts": [N texts], "responses": [N texts], "response_ids": [N lists of ids],
"columns": {name: [N values]}}`` is answered by ``{"scores": [N scores]}``, a score being a number,
a list with one number a response token, or null. Failures have another status than 200 and
``{"error": text}``.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ppocli.errors import RewardError
from ppocli.text import first_line
from ppocli.user_code import shorten

Score = float | list[float] | None
"""of one sample: a number, one number a response token, or None; NaN is still in it"""


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """N samples to be scored. Made by the engine, one per generated chunk."""

    prompts: Sequence[str]
    responses: Sequence[str]
    """decoded responses: special tokens left out, trimmed at a stop sequence"""
    response_ids: Sequence[Sequence[int]]
    """the sampled ids, through the end-of-sequence token"""
    columns: Mapping[str, Sequence[Any]]
    """metadata columns of the prompts, each of length N"""
    tokenizer: Any
    """the policy's tokenizer"""

    def __len__(self) -> int:
        return len(self.responses)


@dataclass(frozen=True, slots=True)
class RewardScores:
    """Checked scores of N samples."""

    scores: list[float]
    """[N] weighted sum of all rewards; a dense reward's sum over its tokens; 0.0 where invalid"""
    dense: list[list[float]] | None
    """[N][response tokens] per-token rewards, or None when every reward is one number a sample.
    With mixed rewards the per-sample ones have been added to the last token."""
    valid: list[bool]
    """[N] false where every reward was None/NaN and ``on_invalid=skip`` drops the sample"""
    parts: dict[str, list[float | None]]
    """reward name -> [N] unweighted scores (None: does not apply), for logging"""


class WireError(ValueError):
    """A body that does not keep to the contract; the text says how."""


def encode_request(prompts: Sequence[str], responses: Sequence[str],
                   response_ids: Sequence[Sequence[int]], columns: Mapping[str, Sequence[Any]]
                   ) -> bytes:
    """The body of a request for N scores. NaN, which JSON has not, becomes null.

    Raises:
        RewardError: a column holds something else than texts, numbers, lists and mappings.
    """
    plain: dict[str, list[Any]] = {}
    for name, values in columns.items():
        try:
            plain[name] = [_plain(value) for value in values]
        except WireError as problem:
            raise RewardError(f"Prompt column {name!r} holds {problem}, which can't be sent.",
                              where="prompts.columns",
                              fix="name the columns that the reward needs: prompts.columns=[a,b]"
                              ) from None
    # escaped, so that halves of a character that a response was cut in survive
    return json.dumps({"prompts": list(prompts), "responses": list(responses),
                       "response_ids": [list(ids) for ids in response_ids],
                       "columns": plain}, allow_nan=False).encode("ascii")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return None if isinstance(value, float) and not math.isfinite(value) else value
    raise WireError(f"a {type(value).__name__} ({shorten(str(value))})")


def decode_request(body: bytes, tokenizer: Any = None) -> RewardRequest:
    """The samples in a request's body.

    Raises:
        WireError: it is no JSON, or not of the form above.
    """
    said = _json(body)
    if not isinstance(said, dict):
        raise WireError("the body must be a JSON object")
    unknown = sorted(set(said) - {"prompts", "responses", "response_ids", "columns"})
    if unknown:
        raise WireError(f"unknown key {unknown[0]!r}")
    samples = {name: _list_of(kind, said, name) for name, kind in (
        ("prompts", str), ("responses", str), ("response_ids", list))}
    if any(type(token) is not int for row in samples["response_ids"] for token in row):
        raise WireError("'response_ids' must hold lists of whole numbers")
    columns = said.get("columns", {})
    if not isinstance(columns, dict):
        raise WireError("'columns' must be an object of lists")
    lists = {f"columns.{name}": _list_of(object, columns, name) for name in columns}
    count = len(samples["responses"])
    for name, values in {**samples, **lists}.items():
        if len(values) != count:
            raise WireError(f"{name!r} has {len(values)} values for {count} responses")
    return RewardRequest(**samples, columns=columns, tokenizer=tokenizer)


def _list_of(kind: type, said: Mapping[str, Any], name: str) -> list[Any]:
    if name not in said:
        raise WireError(f"{name!r} is missing")
    values = said[name]
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        what = " of texts" if kind is str else " of lists" if kind is list else ""
        raise WireError(f"{name!r} must be a list{what}")
    return values


def encode_scores(scores: Sequence[Score]) -> bytes:
    """The body of an answer. Every digit of a float arrives."""
    return json.dumps({"scores": scores}, allow_nan=False).encode("ascii")


def decode_scores(body: bytes) -> list[Any]:
    """The scores in an answer, ``{"scores": [...]}`` or the bare list, not yet checked.

    Raises:
        WireError: it is no JSON, or something else.
    """
    said = _json(body)
    if isinstance(said, dict):
        if "scores" not in said:
            raise WireError("a JSON object without 'scores'")
        said = said["scores"]
    if not isinstance(said, list):
        raise WireError(f"{shorten(json.dumps(said))} in place of a list of scores")
    return said


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise WireError(f"no JSON: {shorten(opening(body))}") from None


def opening(body: bytes) -> str:
    """The first line of a body, or of the error text in it, for messages."""
    text = body.decode("utf-8", errors="replace")
    with suppress(ValueError, RecursionError, KeyError, TypeError):
        text = str(json.loads(text)["error"])
    return first_line(text).rstrip() if text.strip() else "(no text)"
