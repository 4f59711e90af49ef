"""Each option of the loss by hand, and the whole of it against a naive float64 reference."""

import itertools
import math
import random
from dataclasses import fields

import pytest
import torch

from ppocli.ppo.losses import (
    AGGREGATIONS,
    SAMPLED_ESTIMATORS,
    LossInputs,
    LossOptions,
    ppo_loss,
    token_weights,
)


def loss_of(**over):
    given = {"logprobs": torch.tensor([math.log(1.5)]), "values": torch.tensor([1.0]),
             "entropy": None, "old_logprobs": torch.zeros(1), "old_values": torch.tensor([0.5]),
             "advantages": torch.tensor([1.0]), "returns": torch.tensor([2.0]),
             "weights": torch.ones(1), "total_tokens": 1, **over}
    names = {f.name for f in fields(LossOptions)}
    options = {"cliprange": 0.2, "cliprange_value": 0.2, "vf_coef": 0.1} | {
        name: given.pop(name) for name in list(given) if name in names}
    return ppo_loss(LossOptions(**options), LossInputs(**given))


def test_policy_loss_by_hand():
    assert loss_of().policy.item() == pytest.approx(-1.2)  # clipped: -1 * 1.2 > -1 * 1.5
    assert loss_of(advantages=torch.tensor([-1.0])).policy.item() == pytest.approx(1.5)
    low = torch.tensor([math.log(0.5)])
    assert loss_of(logprobs=low).policy.item() == pytest.approx(-0.5)
    pushed = loss_of(logprobs=low, advantages=torch.tensor([-1.0]))
    assert pushed.policy.item() == pytest.approx(0.8)


def test_value_loss_by_hand():
    # (1-2)^2 = 1; clipped value 0.5 + 0.2 = 0.7: (0.7-2)^2 = 1.69; half the larger
    loss = loss_of()
    assert loss.value.item() == pytest.approx(0.845)
    assert loss.total.item() == pytest.approx(-1.2 + 0.1 * 0.845)
    assert loss.value_clipfrac.item() == 1.0
    assert loss.policy_clipfrac.item() == 1.0
    assert loss.ratio.item() == pytest.approx(1.5)
    assert loss.approx_kl.item() == pytest.approx(-math.log(1.5))


@pytest.mark.parametrize(("ratio", "advantage", "options", "expected"), [
    (1.5, 1.0, {"cliprange_high": 0.28}, -1.28),  # max(-1.5, -1.28)
    (1.5, 1.0, {"cliprange_high": 0.6}, -1.5),  # not clipped
    (0.5, -1.0, {"cliprange_high": 0.28}, 0.8),  # the lower clip is as it was
    (5.0, -1.0, {"dual_clip": 3.0}, 3.0),  # min(max(5, 1.2), 3)
    (2.0, -1.0, {"dual_clip": 3.0}, 2.0),  # within the bound
    (5.0, 1.0, {"dual_clip": 3.0}, -1.2),  # positive advantages are not touched
])
def test_asymmetric_and_dual_clip_by_hand(ratio, advantage, options, expected):
    loss = loss_of(logprobs=torch.tensor([math.log(ratio)]), advantages=torch.tensor([advantage]),
                   **options)
    assert loss.policy.item() == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_log_ratio_beyond_fp32_leaves_no_gradient_and_no_nan(estimator):
    """exp(90) is infinite there. The clip leaves it out for the first token and counts it for the
    second; the third, whose ratio is all but 0, is as ever."""
    change = torch.tensor([90.0, 90.0, -90.0])
    logprobs = (change - 100.0).requires_grad_()
    loss = loss_of(logprobs=logprobs, old_logprobs=torch.full((3,), -100.0),
                   advantages=torch.tensor([1.0, -1.0, 1.0]), weights=torch.ones(3),
                   ref_logprobs=logprobs.detach() + change, kl_estimator=estimator, kl_coef=0.1,
                   values=None, old_values=None, returns=None, total_tokens=3)
    loss.total.backward()
    pulled = 0.1 if estimator == "k1" else 0.0
    assert logprobs.grad[:2].tolist() == pytest.approx([pulled, pulled])
    assert all(math.isfinite(term.item()) for term in loss)
    assert loss.policy.item() == pytest.approx(math.exp(20.0) - 1.2)
    assert loss.ratio.item() == pytest.approx(2 * math.exp(20.0) / 3)
    assert loss.max_log_ratio.item() == 90.0


# --- other policy losses ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ratio", "advantage", "slope"), [
    ("cispo", 1.5, 1.0, -1.28), ("cispo", 1.5, -1.0, 1.28), ("cispo", 0.5, 1.0, -0.5),
    ("cispo", 1.1, 2.0, -2.2), ("dis", 1.5, 1.0, 0.0), ("dis", 1.5, -1.0, 0.0),
    ("dis", 0.5, -1.0, 0.0), ("dis", 1.1, 2.0, -2.2), ("dis", 0.9, -2.0, 1.8)])
def test_weights_that_are_clipped_or_dropped_by_hand(name, ratio, advantage, slope):
    """The slope by the logprob: the weight times the advantage, on either side of either sign."""
    logprobs = torch.tensor([math.log(ratio) - 3.0], requires_grad=True)
    loss = loss_of(logprobs=logprobs, old_logprobs=torch.tensor([-3.0]), policy_loss=name,
                   cliprange_high=0.28, advantages=torch.tensor([advantage]), values=None,
                   old_values=None, returns=None)
    loss.total.backward()
    assert logprobs.grad.item() == pytest.approx(slope)
    assert loss.policy_clipfrac.item() == (ratio == 1.5 or (ratio == 0.5 and name == "dis"))


def test_gspo_is_the_clipped_objective_of_whole_responses():
    """The gradient is that of its paper's equation 5, one ratio and one advantage a response."""
    rng, lengths, advantages = random.Random(4), [3, 1, 4, 2], [1.0, -0.5, 0.7, 2.0]
    old = torch.tensor([rng.gauss(-2, 1) for _ in range(10)], dtype=torch.float64)
    logprobs = old + torch.tensor([rng.gauss(0.1, 0.2) for _ in range(10)], dtype=torch.float64)
    logprobs.requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for one, before, advantage in zip(logprobs.split(lengths), old.split(lengths), advantages,
                                      strict=True):
        ratio = (one - before).mean().exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage) / 4
    wanted = torch.autograd.grad(total, logprobs, retain_graph=True)[0]
    sizes = torch.tensor(lengths)
    found = ppo_loss(
        LossOptions(0.1, policy_loss="gspo"), LossInputs(
            logprobs=logprobs, old_logprobs=old, lengths=sizes, total_tokens=10,
            advantages=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(sizes),
            weights=(1.0 / (4.0 * sizes.double())).repeat_interleave(sizes)))
    assert found.policy.item() == pytest.approx(total.item())
    torch.testing.assert_close(torch.autograd.grad(found.total, logprobs)[0], wanted)
    assert 0 < found.policy_clipfrac.item() < 1


# --- KL in the loss --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value", "slope"), [
    ("k1", 0.5, 1.0), ("abs", 0.5, 1.0), ("k2", 0.125, 0.5),
    ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)), ("k3+", math.exp(-0.5) - 0.5, 0.5)])
def test_kl_as_a_loss_by_hand(name, value, slope):
    # new - reference logprob is 0.5; the derivative is by the new logprob
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss = loss_of(logprobs=logprobs, old_logprobs=torch.tensor([-1.0]),
                   ref_logprobs=torch.tensor([-1.5]), kl_coef=0.2, kl_estimator=name,
                   advantages=torch.zeros(1), values=None, old_values=None, returns=None)
    assert loss.kl.item() == pytest.approx(value)
    assert loss.total.item() == pytest.approx(0.2 * value)
    loss.total.backward()
    assert logprobs.grad.item() == pytest.approx(0.2 * slope)


def test_a_kl_of_rounding_alone_has_no_gradient():
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    off = torch.tensor([3e-6, -9e-6, 3e-5])
    loss = loss_of(logprobs=logprobs, old_logprobs=logprobs.detach(), advantages=torch.zeros(3),
                   weights=torch.ones(3), ref_logprobs=logprobs.detach() - off, kl_coef=1.0,
                   kl_estimator="k2", values=None, old_values=None, returns=None, total_tokens=3)
    loss.total.backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 3e-5], rel=1e-2)


# --- the whole update ------------------------------------------------------------------------


def naive_kl(name, x):
    return {"k1": x, "abs": abs(x), "k2": x * x / 2, "k3": math.exp(-x) - 1 + x,
            "k3+": math.exp(-x) - 1 + x}[name]


def naive_loss(rows, aggregation, o):
    """The whole update, one token at a time in float64."""
    total = 0.0
    tokens = sum(len(r["lp"]) for r in rows)
    for r in rows:
        for j in range(len(r["lp"])):
            ratio = math.exp(r["lp"][j] - r["old"][j])
            a = r["adv"][j]
            high = o.cliprange if o.cliprange_high is None else o.cliprange_high
            pg = max(-a * ratio, -a * min(max(ratio, 1 - o.cliprange), 1 + high))
            if o.dual_clip is not None and a < 0:
                pg = min(pg, -a * o.dual_clip)
            v, vo, ret = r["v"][j], r["v_old"][j], r["ret"][j]
            room = math.inf if o.cliprange_value is None else o.cliprange_value
            vc = vo + min(max(v - vo, -room), room)
            loss = pg + o.vf_coef * 0.5 * max((v - ret) ** 2, (vc - ret) ** 2)
            loss -= o.ent_coef * r["ent"][j]
            loss += o.kl_coef * naive_kl(o.kl_estimator, r["lp"][j] - r["ref"][j])
            total += loss / {
                "token-mean": tokens, "seq-mean-token-mean": len(r["lp"]) * len(rows),
                "token-sum": 1, "seq-mean-token-sum": len(rows),
                "seq-mean-token-sum-norm": len(rows) * 10}[aggregation]
    return total


OPTIONS = {
    "plain": LossOptions(0.2, cliprange_value=0.3, vf_coef=0.7),
    "any value": LossOptions(0.2, cliprange_value=None, vf_coef=0.7),
    "asymmetric": LossOptions(0.2, cliprange_high=0.28, vf_coef=0.1),
    "dual": LossOptions(0.2, dual_clip=1.3, vf_coef=0.1, ent_coef=0.02),
    **{name: LossOptions(0.2, kl_coef=0.4, kl_estimator=name) for name in SAMPLED_ESTIMATORS},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cut", [[0, 5], [0, 1, 3, 5]])
def test_loss_equals_the_naive_reference_however_it_is_cut(aggregation, cut, options):
    rng = random.Random(3)
    lengths = [4, 1, 6, 2, 3]
    names = ("lp", "old", "adv", "v", "v_old", "ret", "ref", "ent")
    rows = [{n: [rng.gauss(0, 0.5) for _ in range(k)] for n in names} for k in lengths]
    total = entropy = 0.0
    for start, end in itertools.pairwise(cut):
        part = rows[start:end]
        sizes = torch.tensor(lengths[start:end])
        weights = token_weights(sizes, aggregation=aggregation, total_tokens=sum(lengths),
                                total_samples=len(lengths), max_tokens=10).double()

        def flat(name, part=part):
            return torch.tensor([x for r in part for x in r[name]], dtype=torch.float64)

        found = ppo_loss(options, LossInputs(
            logprobs=flat("lp"), values=flat("v"), entropy=flat("ent"),
            old_logprobs=flat("old"), old_values=flat("v_old"), advantages=flat("adv"),
            returns=flat("ret"), ref_logprobs=flat("ref"),
            weights=weights.repeat_interleave(sizes), total_tokens=sum(lengths)))
        total, entropy = total + found.total.item(), entropy + found.entropy.item()
    said = [value for row in rows for value in row["ent"]]
    assert entropy == pytest.approx(sum(said) / len(said))  # nats of a token, however it is charged
    assert total == pytest.approx(naive_loss(rows, aggregation, options), rel=1e-6)
