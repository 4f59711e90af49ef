"""What is reported of a PPO step: figures by name, samples as rows, and signs of a run going wrong,
each with its probable cause and what to do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ppocli.config import schema, schema_training, tasks
from ppocli.ppo.advantages import ESTIMATORS, accepted_tokens
from ppocli.ppo.experience import POLICY, Experience, PPOState, penalties_of
from ppocli.ppo.rollout import Rollout
from ppocli.ppo.session import Session
from ppocli.rewards.resolve import MODEL_REWARDS
from ppocli.runs.episode import DONE, ERROR, TOKENS, TURNS, Episode, turn_rows
from ppocli.training.state import TrainState
from ppocli.training.task import OptimizeResult

PATIENCE = 3
"""steps in a row, of ``held_back`` evaluations, before a sign is reported"""
DECODING_GAP = 0.01
"""nats, in the root mean square: from there on, decoding differs from a forward pass; fp32 rounds
by some 1e-5"""
FROM_THE_START = frozenset({"no_spread", "flat", "alike_groups"})
"""signs that are reported at the first rollout already, where they begin there"""
FLAT, LEARNED_FLAT = 1e-3, 1e-2
"""deviation of the scores, as a share of their mean, and of a reward model by itself, below which
they hardly differ: two answers 0.01 apart are preferred 50.2 to 49.8"""
ALIKE = 0.9
"""share of the groups whose rewards are all equal, from which on a comparison learns little"""
CRITIC_PATIENCE = 10
"""of ``critic``: a new value function explains nothing at first"""

_TERMS = (
    ("loss/total_avg", "total", ""), ("loss/policy_avg", "policy", ""),
    ("policy/approxkl_avg", "approx_kl_squared", ""), ("policy/policykl_avg", "approx_kl", ""),
    ("policy/clipfrac_avg", "policy_clipfrac", ""), ("policy/grad_norm", "grad_norm", ""),
    ("policy/max_log_ratio", "max_log_ratio", ""), ("val/ratio", "ratio", ""), ("lr", "lr", ""),
    ("updates_skipped", "skipped", ""), ("early_stopped", "early_stopped", ""),
    ("loss/value_avg", "value", "critic"), ("val/clipfrac_avg", "value_clipfrac", "critic"),
    ("val/error", "value_error", "critic"), ("val/var_explained", "explained", "critic"),
    ("val/returns_mean", "returns_mean", "critic"),
    ("objective/ent_coef", "ent_coef", "ent_coef_end"),
    ("policy/entropy_avg", "entropy", "entropy"),  # else objective/entropy, the sampled estimate
    ("loss/kl_avg", "kl", "kl"), ("loss/positive_nll_avg", "nll", "nll"),
    ("loss/ptx", "ptx", "ptx"), ("policy/dual_clipfrac_avg", "dual_clipfrac", "dual_clip"))
"""figures of phase 2: name, term of the loss or what else is known, and what must be on for it"""
DECODING_DIFFERS = (
    "The log-probabilities of decoding differ from those of a forward pass over the same tokens: "
    "{:.2g} nats apart (root mean square; up to {:.2g}). From now on they come from a forward pass."
    " ppo.logprobs_from=forward does so from the first step on.")

ADVICE = {
    "negative_kl": "The KL to the reference is negative ({kl:.2f} nats per sample): the tokens are "
                   "not drawn from the policy's own distribution{why}, or the model computes "
                   "differently in rollout and scoring.",
    "no_spread": "All rewards are equal ({reward:g}) in {rollouts}: there is nothing to learn "
                 "from. Check that the reward reads the response, that its label or pattern "
                 "occurs, what a reward model gets to see (--dry-run shows samples and "
                 "scores), and that prompts vary.",
    "flat": "All rewards are nearly equal ({low:.6g} to {high:.6g}) in {rollouts}: there is next "
            "to nothing to learn from. Look at samples and their scores (--dry-run), at "
            "what a reward model gets to see, and at its accuracy on held-back pairs.",
    "alike_groups": "In {alike:.0%} of the groups all {group} responses have the same reward, in "
                    "{rollouts}: ppo.advantage={estimator} compares within a group and learns "
                    "next to nothing. Raise ppo.n or generation.temperature, give prompts that "
                    "the policy gets right now and then, or set ppo.dynamic_sampling.",
    "full_length": "Every response ran to the full {tokens} tokens for {n} steps: the policy never "
                   "ends one. Raise generation.max_new_tokens, set reward.missing_eos_penalty, or "
                   "give generation.stop_sequences.",
    "empty": "Every response is empty for {n} steps: the policy ends at once. Raise "
             "generation.min_new_tokens, or check that the reward does not favour empty text.",
    "kl_runaway": "The KL to the reference is {kl:.0f} nats per sample: "
                  "the policy is leaving the language it started from. Raise "
                  "ppo.init_kl_coef or lower ppo.optimizer.lr.",
    "short": "Responses have {length:.1f} tokens in the mean, less than a third of the {first:.1f} "
             "that they began with, for {n} steps: the reward pays for ending early. Read some, "
             "and raise ppo.init_kl_coef, set generation.min_new_tokens, or score length.",
    "ratio": "The mean ratio of new to old probabilities is off 1 by more than 0.1 for {n} steps "
             "({ratio:.2f}): updates leave the samples that they learn from. Lower "
             "ppo.optimizer.lr or ppo.ppo_epochs, or set ppo.target_kl.",
    "critic": "The value function explains less than the mean would for {n} steps "
              "(val/var_explained {explained:.2f}): advantages gain noise from it. Give "
              "it layers of its own (model.value.kind=model; with LoRA, adapter), raise "
              "ppo.vf_coef or ppo.optimizer.value_lr, or train without a critic (ppo.advantage).",
    "held_back": "The reward rises while {falling} falls, for {n} evaluations: the policy may be "
                 "learning the reward's gaps. Compare samples, raise ppo.init_kl_coef, stop "
                 "earlier, or let checkpoint.metric={falling} keep what is best."}


def mean(values: Sequence[float]) -> float:
    """Their mean; NaN without any."""
    return math.fsum(values) / len(values) if values else math.nan


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and biased standard deviation; NaN without any."""
    middle = mean(values)
    return middle, math.sqrt(mean([(value - middle) ** 2 for value in values]))


def step_figures(rollout: Rollout, kl_coef: float, result: OptimizeResult, experience: Experience,
                 cfg: schema.TrainConfig) -> dict[str, float]:
    """All figures of a step, named as TRL names them where it has them; ``kl_coef`` is the
    coefficient that its rewards, or its loss, were charged with."""
    mask, extras, kl, penalty = rollout.sequences.mask, rollout.extras, rollout.sequence_kl, 0.0
    lengths, (score, std) = mask.sum(1).double(), mean_std(rollout.valid_scores)
    if tasks.kl_term(cfg.ppo)[0] == "reward":
        penalty = kl_coef * float((rollout.kl * mask).double().sum(1).mean())
    figures = {
        "reward/mean": score, "reward/std": std,
        "reward/invalid": float((~rollout.valid).sum()),
        "objective/scores": score, "objective/rlhf_reward": score - penalty,
        "objective/non_score_reward": -penalty, "objective/kl": kl,
        "objective/kl_per_token": kl * len(rollout) / max(float(lengths.sum()), 1.0),
        "objective/kl_coef": kl_coef,
        "objective/entropy": float(-(rollout.logprobs * mask).double().sum(1).mean()),
        "val/num_eos_tokens": float(rollout.finished.sum()),
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/response_tokens_max": float(lengths.max()),
        "rollout/finished_share": float(rollout.finished.double().mean())}
    if extras.sampled or extras.episodes or extras.sampler_logprobs is not None \
            or len(rollout.parts) > 1 or any(rollout.logs) or cfg.prompts.mix:
        figures |= further_figures(rollout, experience, cfg)
    for name, amounts in penalties_of(rollout, cfg).items():  # over all samples
        figures[f"reward/penalty/{name}"] = mean(amounts.nan_to_num(0.0).tolist())
    return figures | optimize_figures(result, experience, cfg.ppo)


def further_figures(rollout: Rollout, experience: Experience, cfg: schema.TrainConfig
                    ) -> dict[str, float]:
    """Of dynamic sampling, episodes, several sources, several rewards, what they log, and another
    sampler's gap."""
    extras, figures = rollout.extras, means_of(rollout.logs, "logged")
    if extras.sampled:
        figures |= {"rollout/drawn": float(extras.sampled),
                    "rollout/uniform_groups": float(extras.uniform_groups)}
    if extras.episodes:
        figures |= episode_figures(extras.episodes)
    if cfg.prompts.mix:
        figures |= means_of([{"by": {source: score}} for source, score in zip(
            rollout.prompts.columns[schema.SOURCE], rollout.shown_scores, strict=True)],
            "by", "reward/mean")
    if len(rollout.parts) > 1:
        for name, part in rollout.parts.items():
            figures[f"reward/{name}"] = mean([v for v in part if v is not None])
    if extras.sampler_logprobs is not None:
        figures |= gap_figures(rollout, experience, cfg.ppo.importance)
    return figures


def gap_figures(rollout: Rollout, experience: Experience,
                importance: schema_training.ImportanceConfig) -> dict[str, float]:
    """How far the trained policy is from the one that sampled, and what is made of it; empty where
    they are the same or the sampler computes no logprobs."""
    gap, mask = rollout.gap, rollout.sequences.mask
    if gap is None:
        return {}
    far, weights = gap[mask].double().abs(), experience.extras.importance
    figures = {"rollout/logprob_gap_mean": float(far.mean()),
               "rollout/logprob_gap_max": float(far.max())}
    if weights is not None:
        weights = weights.cpu()[experience.sequences.mask]
        figures["rollout/importance_mean"] = float(weights.double().mean())
        # in the type that they were capped in
        figures["rollout/importance_capped"] = float((weights >= importance.cap).double().mean())
    if importance.reject:
        left_out = mask & ~accepted_tokens(gap, mask, importance.reject)
        figures["rollout/rejected_tokens"] = float(left_out.sum() / mask.sum())
        figures["rollout/rejected_samples"] = float((left_out == mask).all(1).double().mean())
    return figures


def episode_figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """How episodes went, at least one."""
    turns = [turn for one in episodes for turn in one.turns]
    ended = [one.ended for one in episodes]
    return {
        "env/turns_mean": len(turns) / len(episodes),
        "env/reward_per_turn": mean([turn.reward for turn in turns]),
        "env/observation_tokens_mean": sum(turn.observation_tokens for turn in turns)
        / len(episodes),
        "env/done_share": ended.count(DONE) / len(episodes),
        "env/truncated_share": (ended.count(TURNS) + ended.count(TOKENS)) / len(episodes),
        "env/errors": float(ended.count(ERROR)),
        "env/tool_errors": float(sum(turn.failed is not None for turn in turns))}


def means_of(rows: Sequence[Mapping[str, Any]], part: str, prefix: str | None = None
             ) -> dict[str, float]:
    """The mean of each figure in a part of rows of samples, such as what rewards ``logged``, over
    the samples that have it; named ``prefix/NAME``, by default after the part."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.get(part, {}).items():
            column = columns.setdefault(f"{prefix or part}/{name}", [])
            if value is not None:
                column.append(value)
    return dict(zip(columns, map(mean, columns.values()), strict=True))


def optimize_figures(result: OptimizeResult, experience: Experience, ppo: schema.PPOConfig
                     ) -> dict[str, float]:
    """Figures of phase 2, named as TRL names them where it has them."""
    extras, returns = experience.extras, experience.returns
    terms = result.terms | {"lr": result.lr, "skipped": float(result.skipped),
                            "early_stopped": float(result.early_stopped),
                            "ent_coef": experience.options.ent_coef}
    enabled = {"critic": returns is not None, "entropy": experience.options.has_entropy,
               "ent_coef_end": ppo.ent_coef_end is not None,
               "kl": extras.ref_logprobs is not None, "nll": extras.imitated is not None,
               "ptx": extras.examples is not None, "dual_clip": ppo.dual_clip is not None}
    if returns is not None:
        returns = returns.cpu()[experience.sequences.mask].double()
        variance = float(returns.var(correction=0)) if returns.numel() else 0.0
        error = terms.get("value_error", math.nan)
        terms |= {"explained": 1.0 - error / variance if variance else math.nan,
                  "returns_mean": float(returns.mean()) if returns.numel() else math.nan}
    return {name: terms.get(term, math.nan)
            for name, term, part in _TERMS if enabled.get(part, True)}


def sample_rows(columns: Mapping[str, Sequence[Any]],
                parts: Mapping[str, Mapping[str, Sequence[float | None]]],
                logs: Sequence[Mapping[str, Any]], episodes: Sequence[Episode]
                ) -> list[dict[str, Any]]:
    """Columns as one row per sample for samples.jsonl; what consists of several as a mapping in
    each row, left out where it consists of nothing; what rewards logged, and how episodes went,
    where there is any of it."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    for name, values in parts.items():
        for i, row in enumerate(rows if values else ()):
            row[name] = {part: numbers[i] for part, numbers in values.items()}
    for row, log in zip(rows, logs, strict=False):  # a loop of one's own has none
        row.update(log)
    for row, episode in zip(rows, episodes, strict=False):
        row.update(episode_row(episode))
    return rows


def source_column(columns: Mapping[str, list[Any]], cfg: schema.TrainConfig
                  ) -> dict[str, list[Any]]:
    """The sources of prompts of a mix, as a column of samples.jsonl; without a mix none, and of
    evaluation prompts that don't come from it those that they name."""
    return {schema.SOURCE: columns[schema.SOURCE]} if (
        cfg.prompts.mix and schema.SOURCE in columns) else {}


def episode_row(episode: Episode) -> dict[str, Any]:
    """What a row of samples.jsonl says of an episode."""
    return {"turns": turn_rows(episode), "ended": episode.ended,
            **({"opening": episode.opening} if episode.opening else {}),
            **({"error": episode.error} if episode.error else {})}


def rollout_samples(rollout: Rollout, step: int, cfg: schema.TrainConfig) -> list[dict[str, Any]]:
    """The samples of a step as rows of samples.jsonl."""
    count, mask = len(rollout), rollout.sequences.mask
    rows = sample_rows(
        {"step": [step] * count, "kind": ["rollout"] * count, "episode": rollout.prompts.episodes,
         "prompt": rollout.prompts.texts, "response": rollout.responses,
         "score": rollout.shown_scores,
         "kl": rollout.k1.sum(1).tolist() if rollout.has_reference else [None] * count,
         "response_tokens": mask.sum(1).tolist(), "finished": rollout.finished.tolist(),
         **source_column(rollout.prompts.columns, cfg)},
        {"rewards": rollout.parts if len(rollout.parts) > 1 else {},
         "penalties": {name: [None if math.isnan(amount) else amount for amount in column.tolist()]
                       for name, column in penalties_of(rollout, cfg).items()}},
        rollout.logs, rollout.extras.episodes)
    if cfg.tracking.rollout_tokens:
        for i, row in enumerate(rows):
            row.update(_token_lists(rollout, i))
    return rows


def _token_lists(rollout: Rollout, i: int) -> dict[str, Any]:
    """Token by token what the update is made from, as trlX's ``rollout_logging_dir`` keeps it."""
    prompts, mask = rollout.prompts, rollout.sequences.mask[i]
    columns = {"prompt_ids": prompts.tokens[i][prompts.mask[i]].tolist(),
             "response_ids": rollout.response_tokens[i][mask].tolist(),
             "logprobs": rollout.logprobs[i][mask].tolist(),
             "values": rollout.values[i][mask].tolist()}
    if rollout.has_reference:
        columns["kl_per_token"] = rollout.kl[i][mask].tolist()
    if rollout.extras.dense is not None:
        columns["token_rewards"] = rollout.extras.dense[i][mask].tolist()
    return columns


def decoding_gap(session: Session, result: OptimizeResult) -> str | None:
    """Why the old logprobs of a step were not the policy's, where they came from decoding: before
    its first update the policy had not moved, and its ratios are 1 then, up to rounding."""
    cfg, first = session.cfg, result.first.get(POLICY)
    if (first is None or not session.from_decode or cfg.ppo.logprobs_from == "decode"
            or cfg.ppo.old_logprobs == "sampler" or (cfg.model.peft or {}).get("lora_dropout")):
        return None
    gap = math.sqrt(2 * first["approx_kl_squared"])
    return None if gap < DECODING_GAP else DECODING_DIFFERS.format(gap, first["max_log_ratio"])


def _falling(state: TrainState) -> str | None:
    """A figure of ``reward.metric_fn`` that has fallen since the start by a twentieth of itself
    while the reward has risen by as much; None if there is none."""
    before, last = state.eval_before or {}, state.eval_last or {}
    change = {name: (last[name] - value) / abs(value) if value else last[name] - value
              for name, value in before.items() if name in last}
    if not change.get("reward_mean", 0.0) > 0.05:  # NaN, too, is no rise
        return None
    return next((name for name, share in change.items()
                 if name.startswith("metrics/") and share < -0.05), None)


def alike_share(rollout: Rollout, n: int) -> float:
    """The share of the groups, of ``n`` samples of a prompt, whose rewards are all equal."""
    groups: dict[int, list[float]] = {}
    for episode, score in zip(rollout.prompts.episodes, rollout.shown_scores, strict=True):
        if score is not None:
            groups.setdefault(episode // n, []).append(score)
    return mean([float(max(group) == min(group)) for group in groups.values()])


def _is_learned(reward: schema.RewardConfig) -> bool:
    """Whether all rewards are models."""
    return {fn for _, fn, _ in schema.rewards_of(reward) if fn is not None} <= {*MODEL_REWARDS}


def signs(session: Session, rollout: Rollout, row: Mapping[str, float], first: float,
          scores: Sequence[float], alike: float) -> dict[str, bool]:
    """Whether each unhealthy sign is present in a step with the figures of ``row`` and these valid
    scores, ``first`` being the mean response tokens of the first rollout and ``alike`` the share of
    the groups that are compared whose rewards are all equal."""
    cfg, sampling, lengths = session.cfg, session.sampling, rollout.sequences.mask.sum(1)
    kl, (middle, deviation) = row["objective/kl"], mean_std(scores)
    equal = len(scores) > 1 and max(scores) - min(scores) <= 1e-6 * abs(middle)  # up to rounding
    flat = len(scores) > 1 and not equal and rollout.extras.dense is None and (
        deviation < FLAT * abs(middle) or (deviation < LEARNED_FLAT and _is_learned(cfg.reward)))
    return {
        "negative_kl": kl < -0.5,
        "full_length": (bool(sampling.stop_ids or sampling.stop_sequences)
                        and sampling.max_new_tokens > 1 and not bool(rollout.finished.any())
                        and int(lengths.min()) == sampling.max_new_tokens),
        "empty": not any(map(str.strip, rollout.responses)),
        "short": row["rollout/response_tokens_mean"] < first / 3,
        "kl_runaway": kl > 50.0,
        "ratio": abs(row["val/ratio"] - 1.0) > 0.1,
        "critic": row.get("val/var_explained", 0.0) < 0.0,
        "no_spread": equal and cfg.reward.fn != "zero", "flat": flat,
        "alike_groups": alike >= ALIKE and not rollout.extras.sampled and not equal}


def watch(session: Session, rollout: Rollout, before: PPOState, row: Mapping[str, float],
          state: TrainState) -> tuple[PPOState, list[str]]:
    """Count the unhealthy signs of the step after ``state`` by the figures of ``row``: the PPO
    state with the counts, and a sentence for each sign that has now lasted ``PATIENCE`` steps."""
    ppo, length, scores = session.cfg.ppo, row["rollout/response_tokens_mean"], rollout.valid_scores
    first, falling = length if before.first_length is None else before.first_length, None
    alike = alike_share(rollout, ppo.n) if ESTIMATORS[ppo.advantage].needs_groups else 0.0
    present_signs = signs(session, rollout, row, first, scores, alike)
    if state.eval_last is not None and state.eval_step == state.step:
        falling = _falling(state)
        present_signs["held_back"] = falling is not None
    health, messages = dict(before.health), list[str]()
    for name, present in present_signs.items():
        health[name] = health.get(name, 0) + 1 if present else 0
        at_once = name in FROM_THE_START and health[name] == state.step + 1
        patience = CRITIC_PATIENCE if name == "critic" else 1 if at_once else PATIENCE
        if health[name] == patience:
            messages.append(_advice(name, session, row, rollout, at_once=at_once, n=patience,
                                    first=first, falling=falling, alike=alike))
    return replace(before, health=health, first_length=first), messages


def _advice(name: str, session: Session, row: Mapping[str, float], rollout: Rollout, *,
            at_once: bool, n: int, **figures: Any) -> str:
    """The sentence about a sign that has lasted ``n`` steps, or all of them, ``at_once``."""
    ppo, sampling, scores = session.cfg.ppo, session.sampling, rollout.valid_scores
    why = " (ppo.staleness)" if ppo.staleness else "" if sampling.is_policy_distribution else \
        " (top-k, top-p, min-p, a repetition penalty, min_new_tokens or greedy sampling)"
    return ADVICE[name].format(
        kl=row["objective/kl"], ratio=row["val/ratio"], tokens=sampling.max_new_tokens, why=why,
        length=row["rollout/response_tokens_mean"], explained=row.get("val/var_explained", 0.0),
        group=ppo.n, estimator=ppo.advantage, low=min(scores, default=0.0),
        high=max(scores, default=0.0), reward=rollout.scores[0] if rollout.scores else 0.0, n=n,
        rollouts="the first rollout" if at_once else f"{n} rollouts in a row", **figures)
