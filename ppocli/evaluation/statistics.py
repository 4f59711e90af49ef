"""The results of an evaluation: figures with standard errors, win rates, frontier, eval.json."""

import math
import platform
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ppocli.config.text import share_error
from ppocli.evaluation.eval_request import Row
from ppocli.ppo.policy_samples import evaluation_figures
from ppocli.ppo.session import EvalSession
from ppocli.ppo.step_metrics import mean
from ppocli.publish.curves import Line, Panel, draw
from ppocli.runs.episode import DONE
from ppocli.runs.target import Target
from ppocli.training.state import torch_versions

SCHEMA = 1
"""of eval.json; raised when the meaning of a name in it changes"""
QUANTILES = (5, 25, 50, 75, 95)
BASE_SAMPLES = 16
"""samples of the base for each prompt of a frontier"""
BEST_OF = (1, 2, 4, 8, 16)
PREDICTION = "pred"
"""column that a reward logs with the answer it read in a response, as verl names it"""


def now() -> str:
    """The time in UTC, as eval.json has it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def figures_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures over the samples of one model; NaN for the mean of nothing.

    Returns:
        figures as a run's ``eval_after`` has them, ``distinct_1`` and ``distinct_3``, and those of
        :func:`figures_at_k`; stderr of those that are means over samples or prompts; quantiles of
        the scores, ``p5`` to ``p95``; samples, and how many are scored.
    """
    columns = defaultdict[str, list[tuple[float, int]]](list)
    for row in rows:
        means = {"reward_mean": row["score"], "kl_mean": row["kl"],
                 "response_tokens_mean": row["response_tokens"], "finished_share": row["finished"],
                 **({"turns_mean": len(row["turns"]), "done_share": row["ended"] == DONE}
                    if "turns" in row else {}),
                 **{f"reward/{name}": value for name, value in row["rewards"].items()},
                 **{f"metrics/{name}": value for name, value in row["metrics"].items()}}
        for name, value in means.items():
            if value is not None:
                columns[name].append((float(value), row["prompt_index"]))

    at_k = figures_at_k(rows)
    columns |= at_k
    figures = evaluation_figures(rows, (1, 2, 3)) | {
        name: mean([value for value, _ in column]) for name, column in at_k.items()}
    scores = [row["score"] for row in rows if row["score"] is not None]
    return {"figures": figures,
            "stderr": {name: _stated_error(name, columns[name]) for name in figures
                       if name in columns or name == "reward_mean"},
            "quantiles": {f"p{q}": float(np.quantile(scores, q / 100)) if scores else math.nan
                          for q in QUANTILES},
            "samples": len(rows), "scored": len(scores)}


def _stated_error(name: str, column: Sequence[tuple[float, int]]) -> float:
    """The standard error of a figure. The mean of scores and metrics that are all 0 or 1 is a
    share."""
    may_be = name.endswith("_share") or name == "reward_mean" or "/" in name
    if may_be and {value for value, _ in column} <= {0.0, 1.0}:
        return share_stderr(column)
    return clustered_stderr(column)


def figures_at_k(rows: Sequence[Row]) -> dict[str, list[tuple[float, int]]]:
    """What k responses to a prompt are worth where every score is 0 or 1 and every prompt has
    several responses, n at least.

    ``pass_at_k``, k = 2, 4, ... n: the chance that one of k is right, unbiased over all subsets
    (Chen et al. 2021, arXiv:2107.03374, section 2.1). ``maj_at_n``, where the reward logs the
    answer it read as column ``pred``: the score of the most frequent answer among all responses;
    of several that are equally frequent, their mean (self-consistency, Wang et al. 2022,
    arXiv:2203.11171). A response without an answer has no vote.

    Returns:
        name -> the value of each prompt, with the prompt's number.
    """
    prompts = defaultdict[int, list[Row]](list)
    for row in rows:
        prompts[row["prompt_index"]].append(row)
    fewest = min(map(len, prompts.values()), default=0)
    if fewest < 2 or not {row["score"] for row in rows} <= {0.0, 1.0}:
        return {}
    sizes = sorted({fewest, *(k for k in BEST_OF if 1 < k < fewest)})
    figures = {f"pass_at_{k}": [(best_of_n([row["score"] for row in group], k), prompt)
                                for prompt, group in prompts.items()] for k in sizes}
    if any(PREDICTION in row.get("extra", {}) for row in rows):
        figures[f"maj_at_{fewest}"] = [(_score_of_majority(group), prompt)
                                       for prompt, group in prompts.items()]
    return figures


def _score_of_majority(group: Sequence[Row]) -> float:
    """The score of the most frequent prediction among the samples of a prompt, 0 without any."""
    scores = defaultdict[str, list[float]](list)
    for row in group:
        if (prediction := row.get("extra", {}).get(PREDICTION)) is not None:
            scores[str(prediction)].append(row["score"])
    most = max(map(len, scores.values()), default=0)
    return mean([mean(votes) for votes in scores.values() if len(votes) == most]) if most else 0.0


def share_stderr(column: Sequence[tuple[float, int]]) -> float:
    """:func:`clustered_stderr` of a share, which isn't 0 where all outcomes are alike
    (:func:`ppocli.config.text.share_error`, over the clusters)."""
    clusters = len({cluster for _, cluster in column})
    error = clustered_stderr(column)  # NaN stays NaN
    return error if math.isnan(error) else share_error(
        error, len(column) if clusters == 1 else clusters)


def clustered_stderr(column: Sequence[tuple[float, int]]) -> float:
    """Standard error of the mean when values of one cluster (prompt) are correlated.

    ``sqrt(C/(C-1) sum_c (sum_{i in c} (x_i - mean))^2) / n`` over C clusters, which is s/sqrt(n)
    when each cluster holds one value (clustered standard errors: Miller 2024, arXiv:2411.00640,
    section 2.2). With a single prompt it is s/sqrt(n) over its samples.

    Args:
        column: each value with its cluster.

    Returns:
        NaN for fewer than two values.
    """
    if len(column) < 2:
        return math.nan
    middle = mean([value for value, _ in column])
    single = len({cluster for _, cluster in column}) == 1
    sums: dict[int, list[float]] = {}
    for number, (value, cluster) in enumerate(column):
        sums.setdefault(number if single else cluster, []).append(value - middle)
    total = math.fsum(math.fsum(part) ** 2 for part in sums.values())
    return math.sqrt(len(sums) / (len(sums) - 1) * total) / len(column)


def compare(policy: Sequence[Row], against: Sequence[Row]) -> dict[str, Any]:
    """How often the policy's sample scores higher than the other's with the same prompt and number.

    Pairs of which one has no score are left out; a tie counts as half a win.

    Args:
        policy, against: rows of the same prompts in the same order.

    Returns:
        compared, wins, ties, losses, win_rate with stderr, and the mean difference of the scores
        with difference_stderr; standard errors as in :func:`clustered_stderr`.
    """
    gaps = [(a["score"] - b["score"], a["prompt_index"])
            for a, b in zip(policy, against, strict=True)
            if a["score"] is not None and b["score"] is not None]
    outcomes = [(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0, prompt) for gap, prompt in gaps]
    wins, ties, losses = (sum(outcome == value for outcome, _ in outcomes)
                          for value in (1.0, 0.5, 0.0))
    return {"compared": len(gaps), "wins": wins, "ties": ties, "losses": losses,
            "win_rate": mean([outcome for outcome, _ in outcomes]),
            "stderr": share_stderr(outcomes), "difference": mean([gap for gap, _ in gaps]),
            "difference_stderr": clustered_stderr(gaps)}


def best_of_n(scores: Sequence[float], n: int, values: Sequence[float] | None = None) -> float:
    """Unbiased estimate of the expected best score of n samples, from N >= n scores.

    ``sum_{i=n}^{N} C(i-1, n-1) / C(N, n) r_(i)`` with r_(i) the i-th smallest: the mean of the
    maximum over all subsets of size n.

    Args:
        values: what the sample with the best score is worth, where that is something else than
            its score, such as another reward.
    """
    ordered, total = sorted(zip(scores, values or scores, strict=True)), math.comb(len(scores), n)
    return math.fsum(math.comb(i - 1, n - 1) / total * value
                     for i, (_, value) in enumerate(ordered, start=1) if i >= n)


def best_of_n_kl(n: int) -> float:
    """KL of best-of-n to the model that is sampled from, in nats: ``log n - (n-1)/n``.

    Stiennon et al. 2020 (arXiv:2009.01325), appendix G.3. It is an upper bound, nearly reached
    when no response is likely by itself (Beirami et al. 2024, arXiv:2401.01879).
    """
    return math.log(n) - (n - 1) / n


def frontier_of(base: Sequence[Row], policy: Sequence[Row], *, plain_sampling: bool
                ) -> dict[str, Any]:
    """The reward of best-of-n of the base at each KL, compared with the policy's.

    Best-of-n needs no training, so a policy has earned its KL if it scores above best-of-n at the
    same KL.

    Args:
        base: ``BASE_SAMPLES`` rows per prompt.
        plain_sampling: responses were sampled at temperature 1 without top-k, top-p or a minimum
            length; otherwise the policy's KL is not of the distribution that best-of-n starts from.

    Returns:
        points of best-of-n; the policy's kl (nats), reward and stderr; a verdict: above, level,
        below, beyond (the last point) or not comparable; best_of_n_at_policy_kl, interpolated; and
        the difference of the policy to it, a mean over prompts, with difference_stderr. NaN beyond
        the last point.
    """
    scores, policy_scores = _by_prompt(base), _by_prompt(policy)
    summary, last = figures_of(policy), best_of_n_kl(BEST_OF[-1])
    kl = summary["figures"]["kl_mean"]
    comparable = plain_sampling and math.isfinite(kl)
    best = {prompt: _interpolated(scores[prompt], kl) for prompt in policy_scores
            if comparable and kl <= last and len(scores.get(prompt, ())) >= BEST_OF[-1]}
    differences = [(mean(policy_scores[prompt]) - reward, prompt)
                   for prompt, reward in best.items()]
    difference, spread = mean([gap for gap, _ in differences]), clustered_stderr(differences)
    verdict = "beyond" if comparable and kl > last else "not comparable"
    if differences:
        clear = abs(difference) > 2 * spread  # never with a single prompt, whose spread is NaN
        verdict = "level" if not clear else "above" if difference > 0 else "below"
    return {"samples_each": BASE_SAMPLES, "points": [_point(scores, n) for n in BEST_OF],
            "policy": {"kl": kl, "reward": summary["figures"]["reward_mean"],
                       "stderr": summary["stderr"]["reward_mean"]},
            "verdict": verdict, "best_of_n_at_policy_kl": mean(list(best.values())),
            "difference": difference, "difference_stderr": spread}


def frontier_svg(frontier: dict[str, Any]) -> bytes:
    """The frontier and the policy as an SVG picture."""
    place = (frontier["policy"]["kl"], frontier["policy"]["reward"])
    lines = [Line("best-of-n of the base", [(p["kl"], p["reward"]) for p in frontier["points"]]),
             Line("policy", [place] if all(map(math.isfinite, place)) else [], kind="dots")]
    return draw([Panel("reward by KL to the base", lines, "KL (nats)", "reward")])


def _by_prompt(rows: Sequence[Row]) -> dict[int, list[float]]:
    scores: dict[int, list[float]] = {}
    for row in rows:
        if row["score"] is not None:
            scores.setdefault(row["prompt_index"], []).append(row["score"])
    return scores


def _point(scores: dict[int, list[float]], n: int) -> dict[str, float]:
    """Best-of-n of the base over the prompts with at least n scored samples; its kl is an upper
    bound."""
    values = [(best_of_n(each, n), prompt) for prompt, each in scores.items() if len(each) >= n]
    return {"n": n, "kl": best_of_n_kl(n), "reward": mean([value for value, _ in values]),
            "stderr": clustered_stderr(values), "prompts": len(values)}


def _interpolated(scores: Sequence[float], kl: float) -> float:
    """Best-of-n of one prompt at a KL up to the last point's, linear between the points; ``kl``
    below 0 counts as 0."""
    low, high = next(pair for pair in pairwise(BEST_OF) if kl <= best_of_n_kl(pair[1]))
    left, right = best_of_n_kl(low), best_of_n_kl(high)
    share = max(kl - left, 0.0) / (right - left)
    return (1 - share) * best_of_n(scores, low) + share * best_of_n(scores, high)


def report_of(settings: dict[str, Any], digests: dict[str, str], targets: dict[str, Target],
              rows: dict[str, list[Row]], frontier: dict[str, Any] | None, *,
              session: EvalSession, name: str, started: str, seconds: float) -> dict[str, Any]:
    """The contents of eval.json, from the rows of samples.jsonl; docs/eval.md explains each name.

    Args:
        settings: what determines the samples.
        digests, targets, rows: by role: policy, against, base.
        session: of any of the models.
        seconds: duration of the evaluation.
    """
    policy, count, device = targets["policy"], settings["prompts"]["count"], session.backend.device
    digest = settings["base_digest"]

    def model(role: str) -> dict[str, Any]:
        target = targets[role]
        return {"model": {"name": target.name, "path": target.model, "step": target.step,
                          "digest": digests[role]}, **figures_of(rows[role])}

    return {
        "schema": SCHEMA, "name": name,
        "run": None if policy.run_dir is None else str(policy.run_dir), "step": policy.step,
        **model("policy"),
        "against": model("against") if "against" in targets else None,
        "win_rate": compare(rows["policy"], rows["against"]) if "against" in targets else None,
        "frontier": None if frontier is None else {**frontier, "base": figures_of(rows["base"])},
        "base": None if digest is None else {"path": session.cfg.model.path, "digest": digest},
        "prompts": {"digest": settings["prompts"]["digest"], "count": count,
                    "samples_each": len(rows["policy"]) // count},
        "generation": settings["generation"], "seed": settings["seed"],
        "settings": {key: value for key, value in settings.items()
                     if key not in ("generation", "seed", "base_digest")},
        "versions": torch_versions(),
        "time": {"started": started, "finished": now(), "seconds": seconds},
        "hardware": {
            "device": device.type,
            "name": (platform.processor() or platform.machine() if device.type == "cpu" else
                     torch.get_device_module(device).get_device_name(device)),
            "threads": torch.get_num_threads(), "precision": session.backend.precision,
            "peak_memory_mib": session.backend.peak_memory_mib()}}
