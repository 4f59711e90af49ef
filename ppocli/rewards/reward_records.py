"""What a reward is asked and what it answers; and the same as JSON, for a reward that is served
elsewhere.

``POST URL`` with ``{"prompts": [N texts], "responses": [N texts], "response_ids": [N lists of ids],
"columns": {name: [N values]}}`` is answered by ``{"scores": [N scores]}``, a score being a number,
a list with one number a response token, or null. Failures have another status than 200 and
``{"error": text}``.

Where they are known the request also has ``"ended": [N booleans]``, ``"messages": [N lists]``,
``"chats": [N lists]`` (of episodes),
``"progress": [steps done, steps in all, passes over the prompts]``, and ``"steps"`` with
``"step_ends"``: N lists as in :class:`RewardRequest`.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ppocli.config.text import counted, first_line
from ppocli.config.user_code import shorten
from ppocli.errors import RewardError
from ppocli.runs.episode import Episode

Score = float | list[float] | None
"""of one sample: a number, one number a response token, or None; NaN is still in it"""


@dataclass(frozen=True, slots=True)
class RewardLogs:
    """What a function logs while it scores N samples: TRL's ``log_extra`` and ``log_metric``."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    """name -> [N] values, for samples.jsonl"""
    figures: dict[str, list[float]] = field(default_factory=dict)
    """name -> numbers whose mean is logged, for metrics.jsonl"""

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Add values of a column, of which there must be N in the end."""
        self.columns.setdefault(str(column), []).extend(values)

    def metric(self, name: str, value: float) -> None:
        """Add a number to those of a metric."""
        self.figures.setdefault(str(name), []).append(float(value))

    def add_to(self, logs: Sequence[dict[str, dict[str, Any]]], label: str) -> None:
        """Add all to ``logs``, N objects as in :attr:`RewardScores.logs`; a name that is there
        already is replaced. ``label`` names the function.

        Raises:
            RewardError: a column hasn't one value per sample.
        """
        for name, values in self.columns.items():
            if len(values) != len(logs):
                raise RewardError(f"{label} logged {len(values)} values for {len(logs)} samples as "
                                  f"column {name!r}.", fix="log one value per sample")
            for log, value in zip(logs, values, strict=True):
                log.setdefault("extra", {})[name] = _shown(value)
        for name, numbers in self.figures.items():
            mean = _plain(math.fsum(numbers) / len(numbers))
            for log in logs:
                log.setdefault("logged", {})[name] = mean


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
    ended: Sequence[bool] | None = None
    """whether a stop token or stop sequence ended each response; None where nobody knows"""
    messages: Sequence[list[dict[str, Any]]] = ()
    """prompts as conversations, where ``prompts.chat`` rendered them; else none"""
    chats: Sequence[list[dict[str, Any]]] = ()
    """prompts and responses as conversations, of episodes whose messages are known; else none"""
    progress: Sequence[float] = (0.0, 0.0, 0.0)
    """steps done, steps of the whole run and passes over the prompts; zeros outside of a run"""
    logs: RewardLogs = field(default_factory=RewardLogs)
    prompt_ids: Sequence[Sequence[int]] = ()
    """what each response was decoded behind, where there may be steps"""
    steps: Sequence[Sequence[str]] | None = None
    """the steps of each response, its beginning one after another; None: nothing says what steps
    are"""
    step_ends: Sequence[Sequence[int]] = ()
    """for each of them the place in ``response_ids`` of the token with which it is complete"""
    episodes: Sequence[Episode] = ()
    """what happened in each, where an environment answered; a response is then the transcript, and
    its ids are those that the policy said"""

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
    logs: list[dict[str, dict[str, Any]]] = field(default_factory=list)
    """[N] what the functions logged: ``extra`` by column, and ``logged`` by metric, whose numbers
    are the means over the call; what there is nothing of is left out"""


def ends_of_steps(text: str, separator: str) -> list[int]:
    """Where the steps of a text end, in characters: behind each separator, and with the text. What
    holds nothing but separators and white space is no step: it belongs to the one before it, at the
    beginning of the text to the first."""
    ends, start = list[int](), 0
    for end in [*(match.end() for match in re.finditer(re.escape(separator), text)), len(text)]:
        if text[start:end].replace(separator, "").strip():
            ends.append(end)
        elif ends:
            ends[-1] = end
        start = ends[-1] if ends else 0
    return ends or [len(text)] * bool(text)


def step_texts(text: str, ends: list[int]) -> list[str]:
    """The steps themselves."""
    return [text[start:end] for start, end in pairwise([0, *ends])]


def differences(scores: Sequence[float]) -> list[float]:
    """What each of the scores of longer and longer beginnings adds to the one before it: shaping by
    a potential (Ng, Harada and Russell 1999), whose sum is the last score."""
    return [now - before for before, now in pairwise([0.0, *scores])]


def on_tokens(numbers: Sequence[float], places: Sequence[int], count: int) -> list[float]:
    """``count`` tokens, each with the sum of those numbers whose place it is."""
    tokens = [0.0] * count
    for place, number in zip(places, numbers, strict=True):
        tokens[place] += number
    return tokens


_LISTS = {"prompts": str, "responses": str, "response_ids": list, "ended": bool, "messages": list,
          "chats": list, "steps": list, "step_ends": list}
"""lists of a request's body, the first three required, and the type of their items"""
_KINDS = {str: "texts", list: "lists", bool: "booleans", object: "values"}


class WireError(ValueError):
    """A body that does not keep to the contract; the text says how."""


def encode_request(request: RewardRequest, part: slice) -> bytes:
    """The body of a request for the scores of some samples. NaN, which JSON has not, becomes null.

    Raises:
        RewardError: a column holds something else than texts, numbers, lists and mappings.
    """
    columns: dict[str, list[Any]] = {}
    for name, values in request.columns.items():
        try:
            columns[name] = [_plain(value) for value in values[part]]
        except WireError as problem:
            raise RewardError(f"Prompt column {name!r} holds {problem}, which can't be sent.",
                              where="prompts.columns", fix="name the columns that the reward "
                              "needs: prompts.columns=[a,b]") from None
    body = {name: values[part] for name in _LISTS if (values := getattr(request, name))}
    body["columns"] = columns
    if request.progress[1]:
        body["progress"] = list(map(float, request.progress))
    # escaped, so that halves of a character that a response was cut in survive
    return json.dumps(body, allow_nan=False).encode("ascii")


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


def _shown(value: Any) -> Any:
    """What JSON can hold of a value that was logged, else its text."""
    try:
        return _plain(value)
    except WireError:
        return str(value)


def decode_request(body: bytes, tokenizer: Any = None) -> RewardRequest:
    """The samples in a request's body.

    Raises:
        WireError: it is no JSON, or not of the form above.
    """
    content = _json(body)
    if not isinstance(content, dict):
        raise WireError("the body must be a JSON object")
    fields: dict[str, Any] = {"columns": {}, "progress": [0, 0, 0]} | content
    if unknown := sorted({*fields} - {*_LISTS, "columns", "progress"}):
        raise WireError(f"unknown key {unknown[0]!r}")
    _check_list("responses", fields.get("responses"), str)
    count = len(fields["responses"])
    for name, kind in _LISTS.items():
        if name in fields or name in ("prompts", "response_ids"):
            _check_list(name, fields.get(name), kind, count)
    if not isinstance(fields["columns"], dict):
        raise WireError("'columns' must be an object of lists")
    for name, values in fields["columns"].items():
        _check_list(f"columns.{name}", values, object, count)
    _check_list("progress", fields["progress"], int | float, 3)
    if ("steps" in fields) != ("step_ends" in fields) or any(
            len(steps) != len(ends) for steps, ends in zip(
                fields.get("steps", ()), fields.get("step_ends", ()), strict=False)):
        raise WireError("'steps' must come with 'step_ends', one place for each of them")
    return RewardRequest(**fields, tokenizer=tokenizer)


def _check_list(name: str, values: Any, kind: Any, count: int | None = None) -> None:
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise WireError(f"{name!r} must be a list of {_KINDS.get(kind, 'numbers')}")
    if count is not None and len(values) != count:
        raise WireError(f"{name!r} has {len(values)} values in place of {count}")


def encode_scores(scores: Sequence[Score]) -> bytes:
    """The body of an answer. Every digit of a float arrives."""
    return json.dumps({"scores": scores}, allow_nan=False).encode("ascii")


def decode_scores(body: bytes, count: int) -> list[Any]:
    """The scores of ``count`` samples in an answer, ``{"scores": [...]}`` or the bare list, not yet
    checked.

    Raises:
        WireError: it is no JSON, or something else.
    """
    answer = _json(body)
    scores = answer.get("scores") if isinstance(answer, dict) else answer
    if not isinstance(scores, list):
        raise WireError(f"{shorten(json.dumps(answer))} in place of a list of scores")
    if len(scores) != count:
        raise WireError(f"{counted(len(scores), 'score')} for {count} samples")
    return scores


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
