"""Per-token rewards, the advantage estimators made from them, and what corrects for samples of
another policy than the one that is trained: importance weights and rejection.

``ESTIMATORS`` and ``CRITERIA`` are read while a configuration is checked, before torch is loaded:
nothing here imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def token_rewards(scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, *, kl_coef: float,
                  dense: torch.Tensor | None = None) -> torch.Tensor:
    """[B, R] ``r_t = -kl_coef * kl_t``, plus each sample's score [B] on its last response token,
    zero outside the mask (Ziegler et al. 2019, "Fine-Tuning Language Models from Human
    Preferences", eq. 2). The mask is contiguous from column 0; a row without a true entry gets no
    score. ``kl`` are per-token estimates in nats, ``kl_coef`` is 0 where the KL is a term of the
    loss, and ``dense`` are rewards [B, R] that already lie on their own tokens."""
    rewards = -kl_coef * kl
    if dense is not None:
        rewards = rewards + dense
    last = (mask.sum(dim=1) - 1).clamp(min=0)
    rewards = rewards.scatter_add(1, last[:, None], scores.to(rewards.dtype)[:, None])
    return rewards * mask


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """B samples of one rollout, of all ranks: all that an advantage may depend on."""

    rewards: torch.Tensor
    """[B, R] of each token, zero outside the mask"""
    mask: torch.Tensor
    """[B, R] bool, contiguous from column 0"""
    groups: torch.Tensor
    """[B] int64: samples with the same number answer the same prompt of the order"""
    values: torch.Tensor | None
    """[B, R] value of the state before each response token; None without a critic"""
    gamma: float = 1.0
    lam: float = 1.0
    lam_value: float | None = None
    """of the critic's targets (decoupled GAE, VC-PPO, Yuan et al. 2025, arXiv 2503.01491); None:
    ``lam``"""
    lam_alpha: float | None = None
    """the advantages of a response of l tokens have lambda = max(1 - 1 / (alpha l), 0) (VAPO, Yue
    et al. 2025, arXiv 2504.05118, eq. 7; this and ``lam_value`` as in
    ``nemo_rl/algorithms/advantage_estimator.py`` of ``NVIDIA-NeMo/RL@00925dd``)"""
    group_std: bool = True
    """GRPO: divide by the group's standard deviation"""
    batch_std: bool = False
    """GRPO: divide by that of all outcomes instead"""
    group_baseline: bool = False
    """GAE: the samples of one prompt correct each other's values"""
    gaps: torch.Tensor | None = None
    """[B, R] steps of reward and value 0 between each token and the next that counts; GAE only"""
    turns: torch.Tensor | None = None
    """[B, R] int64 turn of each token, rising from 0: GAE then steps over turns; None: over tokens
    """


def gae(samples: AdvantageInputs, lam: float | torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, eq. 16): advantages [B, R], and what
    the critic learns [B, R], the values plus advantages of its lambda; zero outside the mask.
    ``delta_t = r_t + gamma V_{t+1} - V_t``; ``A_t = delta_t + gamma lam A_{t+1}``. The value after
    a sample's last token is 0, whether or not it ended by itself (truncation is terminal). With
    ``gaps`` tokens that a mask leaves out are steps of reward and value 0, as in TRL 0.11
    (``trl/trainer/ppo_trainer.py@v0.11.4``, ``loss``). ``lam``, one or [B], replaces theirs."""
    values: Any = samples.values
    if lam is None:
        lam = samples.lam if samples.lam_alpha is None else _adaptive_lam(
            samples.lam_alpha, samples.mask.sum(1).to(values.dtype))
    if samples.turns is not None:
        return _over_turns(samples, values, samples.turns, lam)
    if samples.group_baseline:
        values = values + _missed_by_values(samples, values)
    advantages = targets = _exponential(samples, values, lam)
    if samples.lam_alpha is not None or samples.lam_value is not None:
        targets = _exponential(samples, values, samples.lam if samples.lam_value is None
                               else samples.lam_value)
    return advantages, (targets + values * samples.mask) * samples.mask


def _missed_by_values(samples: AdvantageInputs, values: torch.Tensor) -> torch.Tensor:
    """[B, 1] what the values of each sample probably miss, by the other samples of its prompt.

    A sample's return less its first value is predicted from the mean of the same over its group's
    other samples, by least squares over the rollout: the slope is near 1 where the values know
    nothing of prompts that differ much (the baseline is then RLOO's), and near 0 where they know
    it all, or where groups are so small that their means are noise. A sample's baseline hardly
    depends on its own reward, as with whitening. 0 where nothing shares a prompt."""
    missed = _exponential(samples, values, 1.0)[:, 0].double()
    counts = _in_group(samples, missed.new_ones(len(missed)))
    shared = counts > 1
    if not shared.any():
        return samples.rewards.new_zeros(len(missed), 1)
    others = (_in_group(samples, missed) - missed) / (counts - 1).clamp(min=1)
    mean = missed[shared].mean()
    centred = (others - mean) * shared
    slope = ((missed - mean) * centred).sum() / centred.square().sum().clamp(min=1e-12)
    return (mean + slope.clamp(0.0, 1.0) * centred)[:, None].to(samples.rewards.dtype)


def _adaptive_lam(alpha: float, lengths: torch.Tensor) -> torch.Tensor:
    """[B] by :attr:`AdvantageInputs.lam_alpha`, of responses of ``lengths`` [B]."""
    return (1.0 - 1.0 / (alpha * lengths.clamp(min=1))).clamp(min=0.0)


def _over_turns(samples: AdvantageInputs, values: torch.Tensor, turns: torch.Tensor,
                lam: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`gae` with a turn for each step: its reward is the sum of its tokens' rewards, its
    value that of the state before its first token. All tokens of a turn have its advantage, and the
    value function learns its return at each of them."""
    mask, count = samples.mask, int(turns.max()) + 1
    turns = turns * mask
    zeros = values.new_zeros(len(values), count)
    rewards = zeros.scatter_add(1, turns, samples.rewards * mask)
    starts = mask & (turns != turns.roll(1, 1))
    starts[:, 0] = mask[:, 0]
    before = zeros.scatter_add(1, turns, values * starts)
    steps = zeros.scatter_add(1, turns, values.new_ones(values.shape) * mask) > 0
    advantages, returns = gae(replace(samples, rewards=rewards, mask=steps, values=before,
                                      turns=None), lam)
    return advantages.gather(1, turns) * mask, returns.gather(1, turns) * mask


def _exponential(samples: AdvantageInputs, values: torch.Tensor, lam: float | torch.Tensor
                 ) -> torch.Tensor:
    """The advantages of :func:`gae` with one lambda, or [B] one of each sample."""
    mask = samples.mask
    rewards, values = samples.rewards * mask, values * mask
    advantages = values.new_zeros(values.shape)
    running = values.new_zeros(len(values))
    next_value = running
    for t in range(values.shape[1] - 1, -1, -1):
        if samples.gaps is not None:
            passed = (samples.gamma * lam) ** samples.gaps[:, t]
            next_value, running = next_value * passed, running * passed
        delta = rewards[:, t] + samples.gamma * next_value - values[:, t]
        running = (delta + samples.gamma * lam * running) * mask[:, t]
        advantages[:, t] = running
        next_value = values[:, t]
    return advantages


def _outcomes(samples: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reward of each whole response, float64 [B]: its tokens' sum; the sum of its group, and
    how many are in the group."""
    outcomes = (samples.rewards * samples.mask).double().sum(dim=1)
    ones = outcomes.new_ones(len(outcomes))
    return outcomes, _in_group(samples, outcomes), _in_group(samples, ones)


def _in_group(samples: AdvantageInputs, each: torch.Tensor) -> torch.Tensor:
    """[B] -> [B]: the sum over each sample's group."""
    group = samples.groups.unique(return_inverse=True)[1]
    return each.new_zeros(len(each)).index_add(0, group, each)[group]


def _on_tokens(advantages: torch.Tensor, samples: AdvantageInputs) -> torch.Tensor:
    """[B] -> [B, R]: every token of a response has the response's advantage."""
    return advantages[:, None].to(samples.rewards.dtype) * samples.mask


def grpo(samples: AdvantageInputs) -> tuple[torch.Tensor, None]:
    """Group relative advantages (Shao et al. 2024, arXiv 2402.03300, section 4.1.2).

    ``A_i = (R_i - mean(R)) / (std(R) + 1e-6)`` over the samples of one prompt, the same on every
    token; unbiased standard deviation and epsilon as ``verl/trainer/ppo/core_algos.py@1dda039``.
    Without ``group_std`` only the mean comes off (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783);
    with ``batch_std`` the deviation is that of all R (Lite PPO, arXiv 2508.08221).
    A sample that is alone in its group, the others being invalid, has advantage 0.
    """
    outcomes, sums, counts = _outcomes(samples)
    centred = outcomes - sums / counts
    if samples.batch_std:
        centred = centred / (outcomes.std() + 1e-6 if len(outcomes) > 1 else 1.0)
    elif samples.group_std:
        squares = _in_group(samples, centred.square())
        centred = centred / ((squares / (counts - 1).clamp(min=1)).sqrt() + 1e-6)
    return _on_tokens(centred, samples), None


def rloo(samples: AdvantageInputs) -> tuple[torch.Tensor, None]:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740, eq. 8).

    ``A_i = R_i - mean of the R_j of the prompt's other samples``, the same on every token. A sample
    that is alone in its group, the others being invalid, has advantage 0.
    """
    outcomes, sums, counts = _outcomes(samples)
    others = (sums - outcomes) / (counts - 1).clamp(min=1)
    return _on_tokens((outcomes - others) * (counts > 1), samples), None


def reinforce_pp(samples: AdvantageInputs) -> tuple[torch.Tensor, None]:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): ``A_t = sum over k >= t of gamma^(k-t) r_k``, to be
    whitened over the whole rollout (``ppo.whiten_advantages``, on unless it is switched off)."""
    nothing = samples.rewards.new_zeros(samples.rewards.shape)
    return _exponential(replace(samples, gaps=None), nothing, 1.0), None


@dataclass(frozen=True, slots=True)
class Estimator:
    """An advantage estimator, and everything that the configuration and the engine need to know
    about it."""

    estimate: Callable[[AdvantageInputs], tuple[torch.Tensor, torch.Tensor | None]]
    """advantages [B, R], and with a critic the returns [B, R] that it learns"""
    needs_critic: bool
    needs_groups: bool
    """compares the samples of one prompt: ``ppo.n`` must be 2 or more"""
    whitened: bool
    """whether ``ppo.whiten_advantages`` is on unless it is set"""
    kl_in: str
    """where the KL is charged unless ``ppo.kl_in`` is set: ``reward`` or ``loss``"""


ESTIMATORS = {
    "gae": Estimator(gae, needs_critic=True, needs_groups=False, whitened=True, kl_in="loss"),
    "grpo": Estimator(grpo, needs_critic=False, needs_groups=True, whitened=False, kl_in="loss"),
    "rloo": Estimator(rloo, needs_critic=False, needs_groups=True, whitened=False, kl_in="reward"),
    "reinforce_pp": Estimator(reinforce_pp, needs_critic=False, needs_groups=False, whitened=True,
                              kl_in="reward")}
"""by the name that ``ppo.advantage`` gives them; one more needs a function and a line here"""


# Samples of another policy ------------------------------------------------------------------------
#
# ``gap`` is ``log(pi_trainer / pi_sampler)`` of each token: the trained policy at the start of a
# step's updates against the one that sampled, an earlier one or the same in other arithmetic. Their
# ratio corrects for whose samples they are, and PPO's own ratio, to the policy at the start, bounds
# the step (the decoupled objective of Hilton et al. 2021, arXiv 2110.00641, with the trained policy
# at the start of the step as the proximal one). Names of criteria are those of
# ``verl/trainer/ppo/rollout_corr_helper.py`` of ``verl-project/verl@20c30bf``.

LEVELS = ("token", "sequence")
CRITERIA = (*(f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean")
              for kind in ("k1", "k2", "k3")), "seq_max_k2", "seq_max_k3")
"""what a token or a sample can be left out by; those of k1 bound a ratio on both sides"""
MAX_GAP = 20.0
"""where a log-ratio is cut on either side before it is exponentiated, as in verl"""


def importance_weights(gap: torch.Tensor, mask: torch.Tensor, *, level: str, cap: float
                       ) -> torch.Tensor:
    """Truncated importance weights [B, R] ``min(pi_trainer / pi_sampler, cap)`` (Ionides 2008),
    which have no gradient, of log-ratios [B, R]; zero outside the mask. ``level`` is ``token``, or
    ``sequence`` for the product over the response, the same on all of its tokens."""
    log_ratio = gap * mask
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True)
    return log_ratio.clamp(-MAX_GAP, MAX_GAP).exp().clamp(max=cap) * mask


def accepted_tokens(gap: torch.Tensor, mask: torch.Tensor, reject: Mapping[str, Any]
                    ) -> torch.Tensor:
    """The tokens that meet all criteria.

    With the log-ratio l of a token, k1 = l, k2 = l^2 / 2, k3 = exp(l) - 1 - l. ``token_`` looks at
    each token, ``seq_sum_``, ``seq_mean_`` and ``seq_max_`` at the sum, mean or maximum over a
    response, all of whose tokens are left out together. Of k2 and k3 the bound is the largest
    value; of k1 the smallest and largest ratio ``exp(k1)`` (verl bounds its inverse), or the
    largest alone, whose inverse is the smallest.

    Args:
        gap: [B, R] log-ratios.
        mask: [B, R] bool.
        reject: criterion -> its bound, with which nothing is wrong by :func:`why_no_bound`.

    Returns:
        [B, R] bool, within the mask.
    """
    is_accepted = mask
    log_ratio = (gap * mask).clamp(-MAX_GAP, MAX_GAP)
    kinds = {"k1": log_ratio, "k2": 0.5 * log_ratio.square(), "k3": log_ratio.expm1() - log_ratio}
    for name, bound in reject.items():
        level, kind = name.rsplit("_", 1)
        figure = kinds[kind]
        if level == "seq_max":
            figure = figure.amax(1, keepdim=True)  # zero outside the mask, never negative within
        elif level != "token":
            figure = figure.sum(1, keepdim=True)
            if level == "seq_mean":
                figure = figure / mask.sum(1, keepdim=True).clamp(min=1)
        low, high = bounds_of(name, bound)
        is_accepted = is_accepted & (figure >= low) & (figure <= high)
    return is_accepted


def why_no_bound(name: str, bound: Any) -> str:
    """What is wrong with a criterion or its bound; empty if nothing is."""
    if name not in CRITERIA:
        return f"must be one of {', '.join(CRITERIA)}"
    both = isinstance(bound, list) and len(bound) == 2
    if not all(type(one) in (int, float) and 0 < one < math.inf
               for one in (bound if both else [bound])):
        return f"{bound} must be a number above 0"
    if not name.endswith("k1"):
        return f"{bound} must be the largest value alone: there is no smallest" if both else ""
    if both:
        return "" if bound[0] < bound[1] else f"{bound} must be the smallest ratio and a larger one"
    return "" if bound > 1 else f"{bound} must be above 1: its inverse is the smallest ratio"


def bounds_of(name: str, bound: Any) -> tuple[float, float]:
    """The smallest and the largest value of a criterion with a proper bound."""
    if not name.endswith("k1"):
        return -math.inf, bound
    low, high = bound if isinstance(bound, list) else (1.0 / bound, bound)
    return math.log(low), math.log(high)
