"""How functions written for other libraries are called, and how their answers are read.

- ``trl``: ``f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric,
  **columns)``; of a chat, prompts and completions are lists of messages
  (``huggingface/trl:trl/trainer/grpo_trainer.py::_calculate_rewards@f2cd577``).
- ``trlx``: ``f(samples, prompts, outputs, tokenizer, **columns)``; an output ends in the EOS text
  where the response ended, and a dense answer has a number for each token of that text
  (``CarperAI/trlx:trlx/trainer/accelerate_base_trainer.py::decode@3340c2f``).
- ``verl``: ``f(data_source, solution_str, ground_truth, extra_info)``, once per sample; answers a
  number or a dict with ``score``
  (``volcengine/verl:verl/workers/reward_manager/naive.py@b178a3c``).
- ``openrlhf``: ``f(queries, prompts, labels)``; answers a tensor or a dict with ``rewards``,
  ``scores`` and ``extra_logs`` (``OpenRLHF/OpenRLHF:openrlhf/utils/agent.py@3c3be62``).
"""

import asyncio
import copy
import inspect
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any

import numpy as np

from ppocli.config.user_code import shorten
from ppocli.errors import RewardError
from ppocli.rewards.reward_records import RewardRequest, on_tokens

Source = Callable[[RewardRequest], Any]

KNOWN_ARGUMENTS: Mapping[str, Source] = {
    "samples": lambda r: [p + q for p, q in zip(r.prompts, r.responses, strict=True)],
    "prompts": lambda r: list(r.prompts),
    **dict.fromkeys(("outputs", "responses", "completions"), lambda r: list(r.responses)),
    **dict.fromkeys(("completion_ids", "response_ids", "output_ids"),
                    lambda r: [list(ids) for ids in r.response_ids]),
    "chats": lambda r: r.conversations and fresh(r.conversations),
    "tokenizer": lambda r: r.tokenizer}
"""What a function may ask for by name. Every call gets fresh lists, which it may change."""

FOREIGN = {"trl": "TRL", "trlx": "trlX", "verl": "verl", "openrlhf": "OpenRLHF"}
"""what the functions of each style were written for"""
WHOLE_REQUEST = "request"
"""the style of our own client, which sends all that is known of the samples: an attribute
``reward_style`` of a class names it"""
MADE_OF_COLUMN = frozenset({"extra_info"})
"""what a function gets in place of the column of that name, with the column's own in it"""
_OF_TRL = frozenset({"completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})


def fresh(cells: Sequence[Any]) -> list[Any]:
    """Cells of a column in a list of their own: what can be changed in place is copied, for the
    samples of a prompt share its cell."""
    return [copy.deepcopy(cell) if isinstance(cell, (list, dict)) else cell for cell in cells]


def recognised(names: Collection[str]) -> str:
    """The style of a function whose parameters have these names."""
    given = set(names)
    if {"solution_str", "ground_truth"} <= given:
        return "verl"
    if {"queries", "prompts", "labels"} <= given:
        return "openrlhf"
    if given & {"responses", "response_ids", "output_ids"}:
        return "ppocli"
    if given >= {"samples", "prompts", "outputs", "tokenizer"} and not given & _OF_TRL:
        return "trlx"
    of_trl = given & _OF_TRL and not given & {"samples", "outputs", "tokenizer"}
    return "trl" if of_trl else "ppocli"


def known(style: str, columns: Collection[str], *, steps: bool = False) -> Mapping[str, Source]:
    """What a function of a style gets by name beside these columns of the prompts.

    Args:
        steps: whether something says what the steps of a response are.
    """
    if style == WHOLE_REQUEST:
        return {"request": lambda r: r}
    found = _known(style, columns)
    return {**found, "steps": lambda r: [list(one) for one in r.steps or ()]} if steps else found


def _known(style: str, columns: Collection[str]) -> Mapping[str, Source]:
    if style == "verl":
        return {"solution_str": lambda r: list(r.responses), "extra_info": _extra_info,
                **({} if "ground_truth" in columns or "reward_model" not in columns else {
                    "ground_truth": lambda r: [cell.get("ground_truth")
                                               for cell in _mappings(r, "reward_model")]})}
    if style == "openrlhf":
        found = {"queries": _queries, "prompts": KNOWN_ARGUMENTS["prompts"]}
        # OpenRLHF's data.label_key names a column, or none
        if not columns:
            found["labels"] = lambda r: [""] * len(r)
        elif "labels" not in columns and ("label" in columns or len(columns) == 1):
            label = "label" if "label" in columns else next(iter(columns))
            found["labels"] = lambda r: fresh(r.columns[label])
        return found
    if style == "trlx":
        return {**KNOWN_ARGUMENTS, "outputs": ended_outputs, "samples": lambda r: [
            p + q for p, q in zip(r.prompts, ended_outputs(r), strict=True)]}
    if style == "trl":
        return {**KNOWN_ARGUMENTS, "prompts": lambda r: fresh(r.messages or r.prompts),
                "environments": lambda r: [one.environment for one in r.episodes],
                "completions": lambda r: [[{"role": "assistant", "content": text}]
                                          if r.messages else text for text in r.responses],
                "trainer_state": _trainer_state, "log_extra": lambda r: r.logs.extra,
                "log_metric": lambda r: r.logs.metric}
    return KNOWN_ARGUMENTS


def _extra_info(request: RewardRequest) -> list[dict[str, Any]]:
    """verl adds these two itself, the first for agents, the second for environments that score."""
    cells = _mappings(request, "extra_info")
    return [{**cell, "num_turns": None, "rollout_reward_scores": {}} for cell in cells]


def _mappings(request: RewardRequest, column: str) -> list[Any]:
    """The cells of a column of verl's, empty ones where it has none."""
    cells = fresh(request.columns.get(column) or [None] * len(request))
    if odd := [cell for cell in cells if cell and not isinstance(cell, Mapping)]:
        raise RewardError(f"{shorten(str(odd[0]))} is no mapping, as verl's are.",
                          where=f"prompts, column {column}", fix="write it as an object, not as a "
                          "text with JSON in it")
    return [cell or {} for cell in cells]


def _trainer_state(request: RewardRequest) -> SimpleNamespace:
    """What transformers' TrainerState tells of progress; to load that takes two seconds."""
    step, total, epoch = request.progress
    return SimpleNamespace(global_step=int(step), max_steps=int(total), epoch=epoch, log_history=[],
                           num_train_epochs=math.ceil(epoch * total / max(step, 1)),
                           is_world_process_zero=True, is_local_process_zero=True)


def _tokenizer(request: RewardRequest, style: str) -> Any:
    if request.tokenizer is None:
        raise RewardError(f"To call a function as {style} does takes the policy's tokenizer.",
                          where="reward.style", fix="ppocli serve-reward --tokenizer FOLDER")
    return request.tokenizer


def _queries(request: RewardRequest) -> list[str]:
    """Prompts and responses with special tokens; of an episode the transcript, which has none. A
    tokenizer that marks words by a leading space loses that of a response decoded alone."""
    if request.episodes:
        return KNOWN_ARGUMENTS["samples"](request)
    tokenizer = _tokenizer(request, "OpenRLHF")
    return [prompt + text[:len(text) - len(text.lstrip())]
            + tokenizer.decode(list(ids), skip_special_tokens=False).lstrip()
            for prompt, text, ids in zip(request.prompts, request.responses, request.response_ids,
                                         strict=True)]


def ended_outputs(request: RewardRequest) -> list[str]:
    """Responses as trlX hands them over: behind one that ended stands the EOS text, and one that
    was trimmed at a stop sequence has no white space before it."""
    found = list(request.responses)
    eos = getattr(request.tokenizer, "eos_token_id", None)
    lasts = [ids[-1] if len(ids) else None for ids in request.response_ids]
    for i, last in enumerate(lasts):
        if (last is not None and last == eos) if request.ended is None else request.ended[i]:
            tokenizer = _tokenizer(request, "trlX")
            at_special = last == eos or last in tokenizer.all_special_ids
            found[i] = found[i] if at_special else found[i].rstrip()
            found[i] += tokenizer.eos_token or ""
    return found


def aligned(numbers: list[float], request: RewardRequest, index: int) -> list[float]:
    """Numbers for the tokens of sample ``index``'s output encoded anew, as trlX trains on them, on
    our tokens: each goes where the text of its token ends. Their sum stays. Of another length than
    that text's tokens, or of a transcript, most of which isn't ours, they are returned as they are.

    Args:
        numbers: [tokens of the output] as the function gave them.
    """
    if request.episodes:
        return numbers
    own, tokenizer = list(request.response_ids[index]), _tokenizer(request, "trlX")
    output = ended_outputs(request)[index]
    whole, again = (list(tokenizer(output, add_special_tokens=special)["input_ids"])
                    for special in (True, False))
    if not own or len(numbers) not in (len(whole), len(again)):
        return numbers
    front = 0  # tokens that the tokenizer puts before a text
    if len(numbers) == len(whole):
        front = next((i for i in range(len(whole) - len(again) + 1)
                      if whole[i:i + len(again)] == again), 0)
    same = next((i for i, pair in enumerate(zip(again, own, strict=False)) if pair[0] != pair[1]),
                min(len(again), len(own)))
    places = [*range(same)]
    if len(again) > same:
        ends, theirs = (_text_ends(tokenizer, ids[same:]) for ids in (own, again))
        places += [min(same + bisect_left(ends, end), len(own) - 1) for end in theirs]
        if again[-1] == tokenizer.eos_token_id:  # what was trimmed stands before it
            places[-1] = len(own) - 1
    places = [0] * front + places + [len(own) - 1] * (len(numbers) - front - len(places))
    return on_tokens(numbers, places, len(own))


def _text_ends(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Where the text of each token ends, in characters."""
    return [len(tokenizer.decode(ids[:count])) for count in range(1, len(ids) + 1)]


def per_sample(call: Callable[..., Any], named: Mapping[str, Any], constant: Collection[str],
               count: int) -> Any:
    """Call a function once for each of ``count`` samples with its own value of each argument; the
    ``constant`` ones are the same for all. The answers, or what awaits them."""
    answers = [call(**{name: value if name in constant else value[i]
                       for name, value in named.items()}) for i in range(count)]
    if not any(map(inspect.isawaitable, answers)):
        return answers

    async def gather() -> list[Any]:
        return list(await asyncio.gather(*answers))

    return gather()


def scores_in(answer: Any, style: str, request: RewardRequest, refuse: Callable[[str], RewardError]
              ) -> Any:
    """The scores in a function's answer; what it holds beside them is logged.

    Args:
        refuse: makes the error for an answer that lacks what it should hold, from what it is.
    """
    if style == "verl" and isinstance(answer, list):
        rows = [row if isinstance(row, Mapping) else {"score": row} for row in answer]
        if any("score" not in row for row in rows):
            raise refuse("a dict without 'score'")
        for name in dict.fromkeys(name for row in rows for name in row if name != "score"):
            cells = [row.get(name) for row in rows]
            request.logs.extra(name, cells)
            numbers = [float(cell) for cell in cells if isinstance(cell, Real)]
            if len(numbers) == len(cells):
                request.logs.metric(name, sum(numbers) / len(numbers))
        return [row["score"] for row in rows]
    if style == "openrlhf" and isinstance(answer, Mapping):
        scores = answer.get("rewards")
        if scores is None and (scores := answer.get("scores")) is None:
            raise refuse("a dict without 'rewards'")
        for name, values in (answer.get("extra_logs") or {}).items():
            plain = values.tolist() if hasattr(values, "tolist") else values
            try:
                request.logs.metric(name, float(np.mean(plain)))
            except (TypeError, ValueError):
                error = refuse(f"{shorten(repr(plain))[1:-1]} as {name!r} of extra_logs")
                error.fix = "log numbers there, or lists of numbers"
                raise error from None
        return scores
    return answer
