"""What a PPO step is told to have done: figures by name, and its samples as rows."""

from __future__ import annotations

import math
from typing import Any

import torch

from ppocli.config.schema import PPOConfig, TrainConfig
from ppocli.tasks.ppo.experience import penalties_of, sequence_kl
from ppocli.tasks.ppo.records import Experience, Rollout
from ppocli.training.task import OptimizeResult


def _mean_std(values: list[float]) -> tuple[float, float]:
    if not values:
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


def rollout_figures(rollout: Rollout, kl_coef: float, *, in_reward: bool = True
                    ) -> dict[str, float]:
    """Figures of phase 1, named as TRL names them where it has them.

    Args:
        in_reward: whether the reward is charged with the KL, and not the loss.
    """
    mask = rollout.response_mask
    lengths = mask.sum(1).double()
    scores = [s for s, ok in zip(rollout.scores, rollout.valid.tolist(), strict=True) if ok]
    mean, std = _mean_std(scores)
    kl = sequence_kl(rollout)
    penalty = kl_coef * float((rollout.kl * mask).double().sum(1).mean()) if in_reward else 0.0
    figures = {
        "reward/mean": mean, "reward/std": std,
        "reward/invalid": float((~rollout.valid).sum()),
        "objective/scores": mean, "objective/rlhf_reward": mean - penalty,
        "objective/non_score_reward": -penalty, "objective/kl": kl,
        "objective/kl_per_token": kl * len(rollout) / max(float(lengths.sum()), 1.0),
        "objective/kl_coef": kl_coef,
        "objective/entropy": float(-(rollout.logprobs * mask).double().sum(1).mean()),
        "val/num_eos_tokens": float(rollout.finished.sum()),
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/response_tokens_max": float(lengths.max()),
        "rollout/finished_share": float(rollout.finished.double().mean()),
    }
    if len(rollout.parts) > 1:
        for name, part in rollout.parts.items():
            figures[f"reward/{name}"] = _mean_std([v for v in part if v is not None])[0]
    return figures


def _critic_figures(terms: dict[str, float], returns: torch.Tensor) -> dict[str, float]:
    """How the value function does; ``returns`` flat."""
    variance = float(returns.var(correction=0)) if returns.numel() else 0.0
    error = terms.get("value_error", math.nan)
    return {
        "loss/value_avg": terms.get("value", math.nan),
        "val/clipfrac_avg": terms.get("value_clipfrac", math.nan),
        "val/error": error,
        "val/var_explained": 1.0 - error / variance if variance > 0 else math.nan,
        "val/returns_mean": float(returns.mean()) if returns.numel() else math.nan,
    }


def penalty_figures(rollout: Rollout, cfg: TrainConfig) -> dict[str, float]:
    """Mean amount of each penalty over all samples, 0 where it does not apply."""
    return {f"reward/penalty/{name}": _mean_std([amount or 0.0 for amount in amounts])[0]
            for name, amounts in penalties_of(rollout, cfg).items()}


def optimize_figures(result: OptimizeResult, experience: Experience, ppo: PPOConfig
                     ) -> dict[str, float]:
    """Figures of phase 2, named as TRL names them where it has them."""
    terms = result.terms
    figures = {
        "loss/total_avg": terms.get("total", math.nan),
        "loss/policy_avg": terms.get("policy", math.nan),
        "policy/approxkl_avg": terms.get("approx_kl_squared", math.nan),
        "policy/policykl_avg": terms.get("approx_kl", math.nan),
        "policy/clipfrac_avg": terms.get("policy_clipfrac", math.nan),
        "policy/grad_norm": terms.get("grad_norm", math.nan),
        "policy/max_log_ratio": terms.get("max_log_ratio", math.nan),
        "val/ratio": terms.get("ratio", math.nan),
        "lr": result.lr, "updates_skipped": float(result.skipped),
        "early_stopped": float(result.early_stopped),
    }
    if experience.returns is not None:
        figures |= _critic_figures(terms, experience.returns[experience.response_mask].double())
    if ppo.ent_coef > 0:  # else it is not computed; objective/entropy is the sampled estimate
        figures["policy/entropy_avg"] = terms.get("entropy", math.nan)
    if experience.ref_logprobs is not None:
        figures["loss/kl_avg"] = terms.get("kl", math.nan)
    if ppo.dual_clip is not None:
        figures["policy/dual_clipfrac_avg"] = terms.get("dual_clipfrac", math.nan)
    return figures


def rollout_samples(rollout: Rollout, step: int, cfg: TrainConfig) -> list[dict[str, Any]]:
    """One row a sample for samples.jsonl."""
    kl: list[float | None] = [None] * len(rollout)
    if rollout.has_reference:
        kl = ((rollout.logprobs - rollout.ref_logprobs) * rollout.response_mask).sum(1).tolist()
    lengths = rollout.response_mask.sum(1).tolist()
    rows = [{"step": step, "kind": "rollout", "episode": rollout.prompts.episodes[i],
             "prompt": rollout.prompts.texts[i], "response": rollout.responses[i],
             "score": rollout.scores[i] if bool(rollout.valid[i]) else None, "kl": kl[i],
             "response_tokens": lengths[i], "finished": bool(rollout.finished[i])}
            for i in range(len(rollout))]
    for name, columns in (("rewards", rollout.parts if len(rollout.parts) > 1 else {}),
                          ("penalties", penalties_of(rollout, cfg))):
        if columns:
            for i, row in enumerate(rows):
                row[name] = {part: values[i] for part, values in columns.items()}
    if cfg.tracking.rollout_tokens:
        for i, row in enumerate(rows):
            row.update(_token_lists(rollout, i))
    return rows


def _token_lists(rollout: Rollout, i: int) -> dict[str, Any]:
    """Token by token what the update is made from, as trlX's ``rollout_logging_dir`` keeps it."""
    prompts, mask = rollout.prompts, rollout.response_mask[i]
    found = {"prompt_ids": prompts.tokens[i][prompts.mask[i]].tolist(),
             "response_ids": rollout.response_tokens[i][mask].tolist(),
             "logprobs": rollout.logprobs[i][mask].tolist(),
             "values": rollout.values[i][mask].tolist()}
    if rollout.has_reference:
        found["kl_per_token"] = rollout.kl[i][mask].tolist()
    if rollout.dense is not None:
        found["token_rewards"] = rollout.dense[i][mask].tolist()
    return found
