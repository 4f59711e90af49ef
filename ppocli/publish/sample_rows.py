"""The policy's responses to the same prompts at each evaluation, and their scores."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ppocli.config.text import BLOCKS, finite_number, printable, share_error
from ppocli.runs.episode import transcript_turns
from ppocli.runs.record import RunRecord, eval_samples, first_of_each_prompt, sample_text

SHOWN, HIDDEN = 8, 40
"""pairs of a report that are visible at once, and that are folded"""
_BINS = 20
_MOST_STEPS = 24
"""evaluations whose samples a report shows"""
LONGEST = 1500
"""characters of a response that a report shows"""


def spreads(samples: dict[str, Any]) -> list[dict[str, Any]]:
    """Distribution of the scores before and after, as figures and characters. ``shares`` are shares
    of the scores in equal ranges, the same ranges for both, and ``blocks`` draws them."""
    groups = {name: scores for name in ("before", "after") if (scores := samples[f"scores_{name}"])}
    everything = [score for scores in groups.values() for score in scores]
    shares = [_shares(scores, min(everything), max(everything)) for scores in groups.values()]
    top = max((share for row in shares for share in row), default=1.0)
    summaries = []
    for (name, scores), row in zip(groups.items(), shares, strict=True):
        lower, median, upper = statistics.quantiles(  # it takes two values or more
            scores if len(scores) > 1 else 2 * scores, method="inclusive")
        summaries.append({"name": name, "responses": len(scores), "lowest": min(scores),
                          "lower": lower, "median": median, "upper": upper,
                          "highest": max(scores), "shares": row, "blocks": bars(row, top)})
    return summaries


def _shares(scores: list[float], low: float, high: float) -> list[float]:
    """Share of the scores in each of the equal ranges; all in the middle one if there is only one
    value."""
    counts = [0] * _BINS
    span = high / 2 - low / 2  # halved, so that no difference overflows
    for score in scores:
        part = (score / 2 - low / 2) / span if span else 0.5
        counts[min(_BINS - 1, int(part * _BINS))] += 1
    return [count / len(scores) for count in counts]


def samples_of(record: RunRecord, before: int | None, after: int | None, steps: Sequence[int]
               ) -> dict[str, Any]:
    """Samples of the evaluations at two steps, and at those of ``steps`` between them, from
    samples.jsonl.

    Each of ``pairs`` has ``prompt``; its responses ``before``, ``after``, and those at the steps
    ``between``, each with ``text``, ``turns`` (as of :func:`ppocli.runs.episode.transcript_turns`),
    ``score``, ``kl``, ``tokens`` and ``finished``.
    """
    middle = [step for step in steps if step not in (before, after)]
    count = min(len(middle), _MOST_STEPS - 2)
    middle = [middle[(2 * part + 1) * len(middle) // (2 * count)] for part in range(count)]
    evaluations = eval_samples(record.folder, before, after, *middle)
    old, new, *between = map(first_of_each_prompt, evaluations)
    prompts = list(dict.fromkeys([*old, *new]))
    pairs = [{"prompt": shown(prompt), "before": _response(old.get(prompt)),
              "after": _response(new.get(prompt)),
              "between": [_response(each.get(prompt)) for each in between]}
             for prompt in prompts[:SHOWN + HIDDEN]]
    first, last, *_ = evaluations
    return {
        # different prompts in the order of the evaluation, so nothing is picked
        "pairs": pairs,
        # steps of evaluations after the first and before the last, evenly chosen if they are many
        "between": middle,
        "prompts": len(prompts),  # how many different ones there are
        "scores_before": _scores(first), "scores_after": _scores(last),
        # of the mean score, over prompts: responses to one prompt hang together
        "stderr_before": _stderr(first), "stderr_after": _stderr(last)}


def _response(row: dict[str, Any] | None) -> dict[str, Any] | None:
    """One response; its text is cleaned and cut for display."""
    if row is None:
        return None
    tokens, finished = row.get("response_tokens"), row.get("finished")
    return {"text": shown(sample_text(row)),
            "turns": [(who, shown(text)) for who, text in transcript_turns(row)],
            "score": finite_number(row.get("score")), "kl": finite_number(row.get("kl")),
            "tokens": tokens if isinstance(tokens, int) else None,
            "finished": finished if isinstance(finished, bool) else None}


def _scores(rows: list[dict[str, Any]]) -> list[float]:
    return [score for row in rows if (score := finite_number(row.get("score"))) is not None]


def _stderr(rows: list[dict[str, Any]]) -> float | None:
    """s / sqrt(n) of the prompts' mean scores; with a single prompt, of its scores.

    With as many responses to every prompt this is the clustered standard error of the mean (Miller
    2024, arXiv:2411.00640, section 2.2).
    """
    by_prompt: dict[str, list[float]] = {}
    for row in rows:
        by_prompt.setdefault(str(row.get("prompt", "")), []).extend(_scores([row]))
    means = [math.fsum(scores) / len(scores) for scores in by_prompt.values() if scores]
    if len(means) == 1:
        means = _scores(rows)
    if len(means) < 2:
        return None
    error = statistics.stdev(means) / math.sqrt(len(means))
    # scores that are all 0 or 1 say what has passed
    return share_error(error, len(means)) if {*_scores(rows)} <= {0.0, 1.0} else error


def shown(text: str) -> str:
    """``text`` with control characters escaped, and the end of a very long one replaced by a
    note."""
    if len(text) > LONGEST:
        return f"{printable(text[:LONGEST])} … ({len(text) - LONGEST:,} more characters)"
    return printable(text)


def bars(shares: list[float], top: float) -> str:
    """Shares as blocks whose height is a part of ``top``; ``·`` for none."""
    last = len(BLOCKS) - 1
    return "".join(BLOCKS[round(share / top * last)] if share else "·" for share in shares)
