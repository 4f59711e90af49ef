"""What a reward is asked and what it answers; and the same as JSON, for a reward that is served
elsewhere.

``POST URL`` with ``{"prompts": [N texts], "responses": [N texts], "response_ids": [N lists of ids],
"columns": {name: [N values]}}`` is answered by ``{"scores": [N scores]}``, a score being a number,
a list with one number a response token, or null. Failures have another status than 200 and
``{"error": text}``.

Where they are known the request also has ``"ended": [N booleans]``, ``"messages": [N lists]``,
``"chats": [N lists]`` (of episodes),
``"progress": [steps done, steps in all, passes over the prompts]``, and ``"steps"`` with
``"step_ends"``: N lists as in :class:`RewardRequest`. The answer may also have ``"logs"``, N
objects as in :attr:`RewardScores.logs`, and ``"per_step": true``: its lists have one number a step.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ppocli.config.text import first_line
from ppocli.config.user_code import shorten
from ppocli.errors import RewardError
from ppocli.runs.episode import Episode

Score = float | list[float] | None
"""of one sample: a number, one number a response token, or None; NaN is still in it"""


class StepScores(list[Any]):
    """Scores that a function returned, of which lists have one number a step."""


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

    def take(self, logs: Sequence[Mapping[str, Any]]) -> None:
        """Add what functions elsewhere logged of N samples, as in :attr:`RewardScores.logs`."""
        for name in dict.fromkeys(name for log in logs for name in log.get("extra", {})):
            self.extra(name, [log.get("extra", {}).get(name) for log in logs])
        for log in logs:
            for name, value in log.get("logged", {}).items():
                if value is not None:
                    self.metric(name, value)

    def by_sample(self, count: int, label: str) -> list[dict[str, dict[str, Any]]]:
        """As in :attr:`RewardScores.logs`; ``label`` names the function.

        Raises:
            RewardError: a column hasn't one value a sample.
        """
        for name, values in self.columns.items():
            if len(values) != count:
                raise RewardError(f"{label} logged {len(values)} values for {count} samples as "
                                  f"column {name!r}.", fix="log one value a sample")
        extra = {name: [_shown(value) for value in values] for name, values in self.columns.items()}
        logged = {name: _plain(math.fsum(values) / len(values))
                  for name, values in self.figures.items()}
        return [{"extra": {name: values[i] for name, values in extra.items()}, "logged": logged}
                for i in range(count)]


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

    @property
    def conversations(self) -> list[list[dict[str, Any]]] | None:
        """[N] prompts and responses as conversations; None where prompts were plain text."""
        if self.chats or not self.messages:
            return [list(chat) for chat in self.chats] or None
        return [[*messages, {"role": "assistant", "content": response}]
                for messages, response in zip(self.messages, self.responses, strict=True)]


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
    for end in [*(found.end() for found in re.finditer(re.escape(separator), text)), len(text)]:
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


_SENT = ("prompts", "responses", "response_ids")
_LISTS = {"prompts": str, "responses": str, "response_ids": list, "ended": bool, "messages": list,
          "chats": list, "progress": object, "steps": list, "step_ends": list}
"""what lists of a request's body hold; those that are sent are always there"""


class WireError(ValueError):
    """A body that does not keep to the contract; the text says how."""


def encode_request(request: RewardRequest, part: slice) -> bytes:
    """The body of a request for the scores of some samples. NaN, which JSON has not, becomes null.

    Raises:
        RewardError: a column holds something else than texts, numbers, lists and mappings.
    """
    plain: dict[str, list[Any]] = {}
    for name, values in request.columns.items():
        try:
            plain[name] = [_plain(value) for value in values[part]]
        except WireError as problem:
            raise RewardError(f"Prompt column {name!r} holds {problem}, which can't be sent.",
                              where="prompts.columns", fix="name the columns that the reward "
                              "needs: prompts.columns=[a,b]") from None
    rows = {name: values[part] for name in _LISTS if name != "progress"
            and (values := getattr(request, name))}
    progress = {"progress": list(map(float, request.progress))} if request.progress[1] else {}
    # escaped, so that halves of a character that a response was cut in survive
    return json.dumps({**rows, "columns": plain, **progress}, allow_nan=False).encode("ascii")


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
    if not isinstance(said := _json(body), dict):
        raise WireError("the body must be a JSON object")
    if unknown := sorted(set(said) - {*_LISTS, "columns"}):
        raise WireError(f"unknown key {unknown[0]!r}")
    known: dict[str, Any] = {name: _list_of(kind, said, name) for name, kind in _LISTS.items()
                             if name in _SENT or name in said}
    if any(type(token) is not int for row in known["response_ids"] for token in row):
        raise WireError("'response_ids' must hold lists of whole numbers")
    columns = said.get("columns", {})
    if not isinstance(columns, dict):
        raise WireError("'columns' must be an object of lists")
    lists = {f"columns.{name}": _list_of(object, columns, name) for name in columns}
    # whole numbers too: JavaScript writes 1.0 as 1
    if [type(value) in (int, float) for value in known.get("progress", (0, 0, 0))] != [True] * 3:
        raise WireError("'progress' must hold three numbers")
    count = len(known["responses"])
    for name, values in {**known, **lists}.items():
        if len(values) != count and name != "progress":
            raise WireError(f"{name!r} has {len(values)} values for {count} responses")
    rows = zip(known.get("steps", []), known.get("step_ends", []), known["response_ids"],
               strict=False)
    if ("steps" in known) != ("step_ends" in known) or any(
            len(steps) != len(ends) or not all(isinstance(step, str) for step in steps)
            or any(type(end) is not int or not 0 <= end < len(ids) for end in ends)
            for steps, ends, ids in rows):
        raise WireError("'steps' must hold lists of texts, and 'step_ends' for each of them the "
                        "place of a token in 'response_ids'")
    return RewardRequest(**known, columns=columns, tokenizer=tokenizer)


def _list_of(kind: type, said: Mapping[str, Any], name: str) -> list[Any]:
    if name not in said:
        raise WireError(f"{name!r} is missing")
    values = said[name]
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        what = {str: " of texts", list: " of lists", bool: " of booleans", dict: " of objects"
                }.get(kind, "")
        raise WireError(f"{name!r} must be a list{what}")
    return values


def encode_scores(scores: Sequence[Score], logs: Sequence[Mapping[str, Any]] = ()) -> bytes:
    """The body of an answer. Every digit of a float arrives."""
    told = {"logs": list(logs)} if any(logs) else {}
    return json.dumps({"scores": scores, **told}, allow_nan=False).encode("ascii")


def decode_scores(body: bytes) -> tuple[list[Any], list[Any]]:
    """The scores in an answer, ``{"scores": [...]}`` or the bare list, not yet checked; and what
    was logged, one mapping a sample, or nothing. They are :class:`StepScores` where it says so.

    Raises:
        WireError: it is no JSON, or something else.
    """
    said, logs = _json(body), []
    if isinstance(said, dict):
        if "scores" not in said:
            raise WireError("a JSON object without 'scores'")
        logs = _list_of(dict, said, "logs") if "logs" in said else []
        kind = StepScores if said.get("per_step") is True else list
        said = said["scores"]
        said = kind(said) if isinstance(said, list) else said
    if not isinstance(said, list):
        raise WireError(f"{shorten(json.dumps(said))} in place of a list of scores")
    if logs and len(logs) != len(said):
        raise WireError(f"{len(logs)} 'logs' for {len(said)} scores")
    for log in logs:
        extra, logged = log.get("extra", {}), log.get("logged", {})
        if not isinstance(extra, dict):
            raise WireError(f"{shorten(json.dumps(extra))} as 'extra', which is no object")
        if not isinstance(logged, dict) or not all(map(_is_number, logged.values())):
            raise WireError(f"{shorten(json.dumps(logged))} as 'logged', which is no object of "
                            "numbers")
    return said, logs


def _is_number(value: Any) -> bool:
    """Or null; no integer of hundreds of digits, which JSON may hold."""
    if isinstance(value, int):
        return value.bit_length() < sys.float_info.max_exp
    return value is None or isinstance(value, float)


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
