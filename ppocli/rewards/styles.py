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
from ppocli.rewards.calls import ARGUMENTS, Style, fresh, steps_of
from ppocli.rewards.reward_records import RewardRequest, on_tokens

FOREIGN = {"trl": "TRL", "trlx": "trlX", "verl": "verl", "openrlhf": "OpenRLHF"}
"""style -> the library that functions of it were written for"""
_TRL_NAMES = frozenset({"completions", "completion_ids", "trainer_state", "log_extra",
                        "log_metric"})


def recognised(names: Collection[str]) -> str:
    """The style of a function whose parameters have these names."""
    names = set(names)
    if {"solution_str", "ground_truth"} <= names:
        return "verl"
    if {"queries", "prompts", "labels"} <= names:
        return "openrlhf"
    if names & {"responses", "response_ids", "output_ids"}:
        return "ppocli"
    if names >= {"samples", "prompts", "outputs", "tokenizer"} and not names & _TRL_NAMES:
        return "trlx"
    is_trl = names & _TRL_NAMES and not names & {"samples", "outputs", "tokenizer"}
    return "trl" if is_trl else "ppocli"


def _tokenizer(request: RewardRequest, library: str) -> Any:
    if request.tokenizer is None:
        raise RewardError(f"Functions written for {library} need the policy's tokenizer.",
                          where="reward.style", fix="ppocli serve-reward --tokenizer FOLDER")
    return request.tokenizer


# TRL ----------------------------------------------------------------------------------------------

def _trainer_state(request: RewardRequest) -> SimpleNamespace:
    """The progress fields of transformers' TrainerState, which takes two seconds to import."""
    step, total, epoch = request.progress
    return SimpleNamespace(global_step=int(step), max_steps=int(total), epoch=epoch, log_history=[],
                           num_train_epochs=math.ceil(epoch * total / max(step, 1)),
                           is_world_process_zero=True, is_local_process_zero=True)


# trlX ---------------------------------------------------------------------------------------------

def _ended_outputs(request: RewardRequest) -> list[str]:
    """Responses as trlX passes them: the EOS text follows one that ended, and one that was trimmed
    at a stop sequence has no white space before it."""
    outputs = list(request.responses)
    eos = getattr(request.tokenizer, "eos_token_id", None)
    lasts = [ids[-1] if len(ids) else None for ids in request.response_ids]
    for i, last in enumerate(lasts):
        if (last is not None and last == eos) if request.ended is None else request.ended[i]:
            tokenizer = _tokenizer(request, "trlX")
            at_special = last == eos or last in tokenizer.all_special_ids
            outputs[i] = outputs[i] if at_special else outputs[i].rstrip()
            outputs[i] += tokenizer.eos_token or ""
    return outputs


def _aligned(numbers: list[float], request: RewardRequest, index: int) -> list[float]:
    """Numbers for the tokens of sample ``index``'s output encoded again, as trlX trains on them, as
    numbers of the sampled tokens: each goes where the text of its token ends. Their sum stays.
    Numbers of another count than that text's tokens, or of a transcript, most of which isn't the
    policy's, are returned unchanged.

    Args:
        numbers: [tokens of the output] as the function returned them.
    """
    if request.episodes:
        return numbers
    sampled, tokenizer = list(request.response_ids[index]), _tokenizer(request, "trlX")
    output = _ended_outputs(request)[index]
    whole, again = (list(tokenizer(output, add_special_tokens=special)["input_ids"])
                    for special in (True, False))
    if not sampled or len(numbers) not in (len(whole), len(again)):
        return numbers
    front = 0  # tokens that the tokenizer puts before a text
    if len(numbers) == len(whole):
        front = next((i for i in range(len(whole) - len(again) + 1)
                      if whole[i:i + len(again)] == again), 0)
    same = next((i for i, pair in enumerate(zip(again, sampled, strict=False))
                 if pair[0] != pair[1]), min(len(again), len(sampled)))
    places, last = [*range(same)], len(sampled) - 1
    if len(again) > same:
        ends, again_ends = (_text_ends(tokenizer, ids[same:]) for ids in (sampled, again))
        places += [min(same + bisect_left(ends, end), last) for end in again_ends]
        if again[-1] == tokenizer.eos_token_id:  # what was trimmed comes before it
            places[-1] = last
    places = [0] * front + places + [last] * (len(numbers) - front - len(places))
    return on_tokens(numbers, places, len(sampled))


def _text_ends(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Where the text of each token ends, in characters."""
    return [len(tokenizer.decode(ids[:count])) for count in range(1, len(ids) + 1)]


# verl ---------------------------------------------------------------------------------------------

def _mappings(request: RewardRequest, column: str) -> list[Any]:
    """The cells of one of verl's columns, empty ones where there is none."""
    cells = fresh(request.columns.get(column) or [None] * len(request))
    if odd := [cell for cell in cells if cell and not isinstance(cell, Mapping)]:
        raise RewardError(f"{shorten(str(odd[0]))} is no mapping, as verl's are.",
                          where=f"prompts, column {column}", fix="write it as an object, not as a "
                          "text with JSON in it")
    return [cell or {} for cell in cells]


def _extra_info(request: RewardRequest) -> list[dict[str, Any]]:
    """verl adds these two itself, the first for agents, the second for environments that score."""
    cells = _mappings(request, "extra_info")
    return [{**cell, "num_turns": None, "rollout_reward_scores": {}} for cell in cells]


def _ground_truth(request: RewardRequest) -> list[Any]:
    if "ground_truth" in request.columns or "reward_model" not in request.columns:
        return fresh(request.columns["ground_truth"])
    return [cell.get("ground_truth") for cell in _mappings(request, "reward_model")]


def _once_per_sample(call: Callable[..., Any], arguments: Mapping[str, Any],
                     constants: Collection[str], count: int) -> Any:
    """Call a function for each of ``count`` samples with its value of each argument; the
    ``constants`` are the same for all. Returns the answers, or what awaits them."""
    answers = [call(**{name: value if name in constants else value[i]
                       for name, value in arguments.items()}) for i in range(count)]
    if not any(map(inspect.isawaitable, answers)):
        return answers

    async def gather() -> list[Any]:
        return list(await asyncio.gather(*answers))

    return gather()


def _verl_scores(answer: Any, request: RewardRequest) -> Any:
    if not isinstance(answer, list):
        return answer
    rows = [row if isinstance(row, Mapping) else {"score": row} for row in answer]
    if any("score" not in row for row in rows):
        raise ValueError("a dict without 'score'")
    for name in dict.fromkeys(name for row in rows for name in row if name != "score"):
        cells = [row.get(name) for row in rows]
        request.logs.extra(name, cells)
        numbers = [float(cell) for cell in cells if isinstance(cell, Real)]
        if len(numbers) == len(cells):
            request.logs.metric(name, sum(numbers) / len(numbers))
    return [row["score"] for row in rows]


# OpenRLHF -----------------------------------------------------------------------------------------

def _queries(request: RewardRequest) -> list[str]:
    """Prompts and responses with special tokens; of an episode the transcript, which has none. A
    tokenizer that marks words by a leading space loses that of a response decoded alone."""
    if request.episodes or not len(request):
        return ARGUMENTS["samples"](request)
    tokenizer = _tokenizer(request, "OpenRLHF")
    return [prompt + text[:len(text) - len(text.lstrip())]
            + tokenizer.decode(list(ids), skip_special_tokens=False).lstrip()
            for prompt, text, ids in zip(request.prompts, request.responses, request.response_ids,
                                         strict=True)]


def _labels(request: RewardRequest) -> list[Any]:
    """OpenRLHF's data.label_key names a column, or none."""
    columns = request.columns
    if not columns:
        return [""] * len(request)
    only = next(iter(columns)) if len(columns) == 1 else "label"
    return fresh(columns[next((one for one in ("labels", "label") if one in columns), only)])


def _openrlhf_scores(answer: Any, request: RewardRequest) -> Any:
    if not isinstance(answer, Mapping):
        return answer
    scores = answer.get("rewards")
    if scores is None and (scores := answer.get("scores")) is None:
        raise ValueError("a dict without 'rewards'")
    for name, values in (answer.get("extra_logs") or {}).items():
        plain = values.tolist() if hasattr(values, "tolist") else values
        try:
            request.logs.metric(name, float(np.mean(plain)))
        except (TypeError, ValueError):
            raise ValueError(f"{shorten(repr(plain))[1:-1]} as {name!r} of extra_logs, where only "
                             "numbers and lists of numbers can be logged") from None
    return scores


STYLES = {style.name: style for style in (
    Style("ppocli", ARGUMENTS),
    Style("trl", {
        **ARGUMENTS,
        "prompts": lambda r: fresh(r.messages or r.prompts),
        "completions": lambda r: [[{"role": "assistant", "content": text}] if r.messages else text
                                  for text in r.responses],
        "environments": lambda r: [one.environment for one in r.episodes],
        "trainer_state": _trainer_state}),
    Style("trlx", {
        **ARGUMENTS, "outputs": _ended_outputs,
        "samples": lambda r: [p + q for p, q in zip(r.prompts, _ended_outputs(r), strict=True)]},
        align=_aligned),
    Style("verl", {
        "solution_str": ARGUMENTS["responses"], "ground_truth": _ground_truth,
        "extra_info": _extra_info, "steps": steps_of},
        invoke=_once_per_sample, scores=_verl_scores),
    Style("openrlhf", {
        "queries": _queries, "prompts": ARGUMENTS["prompts"], "labels": _labels,
        "steps": steps_of}, scores=_openrlhf_scores),
    Style("request", {"request": lambda r: r}),
)}
"""``request`` is that of rewards of this package that need all of a request; they name it by an
attribute ``reward_style``"""
