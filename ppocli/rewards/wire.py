"""What a reward that is served elsewhere is asked and what it answers: JSON over HTTP.

``POST URL`` with ``{"prompts": [N texts], "responses": [N texts], "response_ids": [N lists of ids],
"columns": {name: [N values]}}`` is answered by ``{"scores": [N scores]}``, a score being a number,
a list with one number a response token, or null. Failures have another status than 200 and
``{"error": text}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ppocli.errors import RewardError
from ppocli.rewards.check import Score
from ppocli.rewards.records import RewardRequest, shorten


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
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
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
    texts = {name: _list_of(str, said, name) for name in ("prompts", "responses")}
    ids = _list_of(list, said, "response_ids")
    if any(type(token) is not int for row in ids for token in row):
        raise WireError("'response_ids' must hold lists of whole numbers")
    columns = said.get("columns", {})
    if not isinstance(columns, dict):
        raise WireError("'columns' must be an object of lists")
    lists = {**texts, "response_ids": ids,
             **{f"columns.{name}": _list_of(object, columns, name) for name in columns}}
    count = len(texts["responses"])
    for name, values in lists.items():
        if len(values) != count:
            raise WireError(f"{name!r} has {len(values)} values for {count} responses")
    return RewardRequest(texts["prompts"], texts["responses"], ids, columns, tokenizer)


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
    try:
        said = json.loads(text)
        if isinstance(said, dict) and isinstance(said.get("error"), str):
            text = said["error"]
    except (ValueError, RecursionError):
        pass
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0].strip() if lines else "(no text)"
