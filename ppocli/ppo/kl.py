"""KL estimators against the reference policy and the controller of their coefficient."""

import torch

SAMPLED_ESTIMATORS = ("k1", "abs", "k2", "k3", "k3+")
ROUNDING = 1e-5
"""nats by which a token's logprob may differ in fp32 between passes of other shapes"""


def kl_per_token(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str
                 ) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from the sampled tokens, in nats.

    With ``l = logprobs - ref_logprobs`` (Schulman 2020, "Approximating KL Divergence"):
    k1 = l, abs = abs(l), k2 = l^2 / 2 (TRL's ``mse``), k3 = exp(-l) - 1 + l, for which l is cut at
    -20 (``verl/trainer/ppo/core_algos.py@b178a3c``): exp(89) is infinite in fp32. k3+ is k3 with
    the gradient of k2 (there, ``kl_penalty``).

    As a loss on the policy's own samples, k1 has gradient 0 on average, k2 that of
    KL(policy || reference), and k3 that of KL(reference || policy), to first order the same (arXiv
    2510.01555, 2512.21852).

    Args:
        logprobs, ref_logprobs: equal shapes, of the sampled tokens.
        estimator: one of ``SAMPLED_ESTIMATORS``. (``full`` needs the whole vocabulary and is
            computed by the model.)

    Raises:
        ValueError: for another name.
    """
    log_ratio = logprobs - ref_logprobs
    if estimator == "k1":
        return log_ratio
    if estimator == "abs":
        return log_ratio.abs()
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator in ("k3", "k3+"):
        cut = log_ratio.clamp(min=-20.0)
        k3 = torch.expm1(-cut) + cut
        if estimator == "k3":
            return k3
        k2 = 0.5 * log_ratio.square()
        return k2 - k2.detach() + k3.detach()
    raise ValueError(f"{estimator!r} is not one of {SAMPLED_ESTIMATORS}")


def adapt_kl_coef(coef: float, sequence_kl: float, *, target: float, horizon: int,
                  num_samples: int, rounding: float = 0.0) -> float:
    """One step of the adaptive controller (Ziegler et al. 2019, section 2.2).

    ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * min(num_samples / horizon, 1))``, once per
    rollout.

    Args:
        sequence_kl: KL summed over the tokens of a response, mean over samples (nats).
        num_samples: samples of the rollout, over all ranks.
        rounding: what a KL of 0 may be off by; so little below zero counts as 0.

    Returns:
        The new coefficient. A KL below zero is an artefact of how tokens were sampled, not a
        distance, and leaves the coefficient as it is.
    """
    if sequence_kl < -rounding:
        return coef
    error = min(max(sequence_kl / target - 1.0, -0.2), 0.2)
    # a rollout larger than the horizon must not turn the penalty into a reward
    return coef * (1.0 + error * min(num_samples / horizon, 1.0))
