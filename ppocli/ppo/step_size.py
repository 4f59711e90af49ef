"""A learning rate that is steered by the KL by which the updates of a step move the policy."""

import math
from collections.abc import Mapping, Sequence

FIRST_RATE = 0.1
"""share of the learning rate with which a steered run begins: Adam's first steps are as long as its
rate, whatever the gradient, and a first step that is too long leaves the model's language"""
LARGEST_CHANGE = 8.0
"""factor by which the rate changes after one step at most"""
GROWTH = 1.5
"""power of the number of updates with which their KL grows: 1 if updates are noise, 2 if all go the
same way"""


def step_kl(kls: Sequence[float]) -> float:
    """The KL between the policies before and after a step's updates, estimated from the KL that
    each update measured before it was made: after k of K updates it is ``(k/K)^1.5`` of the whole.

    The first update's own is taken off: it is 0 unless the samples are another policy's.

    Args:
        kls: nats per token, K of them.

    Returns:
        Nats per token; 0, which stands for "unknown", with fewer than two updates.
    """
    count = len(kls)
    if count < 2:
        return 0.0
    share = math.fsum((made / count) ** GROWTH for made in range(count))
    return max(math.fsum(kl - kls[0] for kl in kls), 0.0) / share


def kl_of_updates(updates: Sequence[Mapping[str, float]], mean_tokens: float) -> float:
    """The KL by which a step moved the policy, in nats per response, from the loss terms of its
    updates: the estimate ``ratio - 1 - log ratio`` over the samples of the old policy, which is
    never negative and which tokens that have all but vanished don't dominate.

    Args:
        updates: terms of each update, means over tokens.
        mean_tokens: trained tokens of a response. What a reward can gain is bounded by the KL of
            a whole response, so that long responses move less per token.
    """
    return mean_tokens * step_kl([
        terms["approx_kl"] + terms["ratio"] - 1.0 for terms in updates])


def next_rate(rate: float, kl: float, target: float) -> float:
    """The factor on the learning rate in the next step, ``rate * sqrt(target / kl)``: a KL goes
    with the square of the step that causes it. It changes by 8 at most.

    Args:
        rate: the factor in this step.
        kl: of this step, as :func:`step_kl` has it.
        target: what it should have been; where either is 0 the rate stays.
    """
    if not (0.0 < kl < math.inf and target > 0.0):
        return rate
    return rate * min(max(math.sqrt(target / kl), 1.0 / LARGEST_CHANGE), LARGEST_CHANGE)
