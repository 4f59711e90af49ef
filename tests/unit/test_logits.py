"""Models that scale or bound their logits: decoded and scored as transformers' own logits say."""

import pytest
import torch
from helpers import save_lm
from sessions import assert_own_logprobs, rollout_of, session_of, small_config

from ppocli.errors import InputError
from ppocli.models.head import HeadWeights, LogitMap, OtherHead, full_kl, token_logprobs
from ppocli.models.loading.language_model import load_lm

KINDS = {"gemma2": ({"final_logit_softcapping": 2.0}, LogitMap(1.0, 2.0)),
         "cohere": ({"logit_scale": 0.25}, LogitMap(0.25)),
         "granite": ({"logits_scaling": 8.0}, LogitMap(0.125))}


@pytest.mark.parametrize(("kind", "source"), [
    ("gemma2", "decode"), ("gemma2", "forward"), ("cohere", "decode"), ("granite", "forward")])
def test_logprobs_are_those_of_the_model_s_own_logits(tmp_path, kind, source):
    keys, wanted_map = KINDS[kind]
    save_lm(tmp_path / "lm", kind, gain=3.0, **keys)
    with session_of(small_config(tmp_path, ppo__logprobs_from=source)) as session:
        rollout, lm = rollout_of(session), session.policy.lm
        assert LogitMap.of(lm) == wanted_map
        assert_own_logprobs(lm, rollout)


@pytest.mark.parametrize("kept", [True, False], ids=["logits kept", "computed again"])
@pytest.mark.parametrize(("logit_map", "with_kl", "with_entropy", "spare", "gaps"), [
    (LogitMap(), True, True, 0, []), (LogitMap(0.5), False, True, 2, []),
    (LogitMap(0.5, 3.0), True, False, 0, [0, 4]), (LogitMap(cap=0.7), True, True, 2, [3]),
    (LogitMap(0.5, 3.0), False, False, 2, [])])
def test_logprobs_entropy_full_kl_and_gradients_are_those_of_their_definitions(
        monkeypatch, logit_map, kept, with_kl, with_entropy, spare, gaps):
    """In float64; nothing between a model and itself. Rows without a token are as if they weren't
    there."""
    monkeypatch.setattr("ppocli.models.head.KEPT_BYTES", 2**20 if kept else 0)
    monkeypatch.setattr("ppocli.models.head.CHUNK_BYTES", 4 * 11 * 3)
    torch.manual_seed(0)
    weight, bias, hidden = torch.randn(11, 6), torch.randn(11), torch.randn(8, 6)
    rows = torch.tensor([i for i in range(11 - spare) if i not in gaps])
    places, weights = torch.randint(0, len(rows), (8,)), torch.randn(8)
    targets, gap_rows = rows[places], torch.tensor(gaps) if gaps else None
    there = HeadWeights(torch.randn(11 + spare, 5), None, spare=2 * spare, gaps=gap_rows)
    their_states = torch.randn(8, 5)

    def graded(tensors, figures):
        logprobs, entropy, kl = figures[:3]
        total = (weights * logprobs).sum()
        total = total - (2.0 * weights * kl).sum() if with_kl else total
        return torch.autograd.grad(total + 0.3 * entropy.sum() if with_entropy else total, tensors)

    ours = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    head = HeadWeights(ours[1], ours[2], logit_map, spare=spare, gaps=gap_rows)
    found = token_logprobs(ours[0], head, targets, temperature=0.7, want_entropy=with_entropy,
                           other=OtherHead(their_states, there) if with_kl else None)
    exact = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    scaled = logit_map.scale * (exact[0] @ exact[1].T + exact[2])
    capped = scaled if logit_map.cap is None else logit_map.cap * torch.tanh(scaled / logit_map.cap)
    log_p = torch.log_softmax(capped[:, rows] / 0.7, -1)
    log_q = torch.log_softmax((their_states.double() @ there.weight.double().T)[:, rows] / 0.7, -1)
    wanted = (log_p[range(8), places], -(log_p.exp() * log_p).sum(-1),
              (log_p.exp() * (log_p - log_q)).sum(-1))
    for mine, theirs in zip(found, wanted, strict=False):
        if mine is not None:
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
    assert [one is not None for one in found[:3]] == [True, with_entropy, with_kl]
    if with_kl:
        torch.testing.assert_close(found.kl.double(), wanted[2], rtol=1e-5, atol=1e-6)
    gradients = graded(ours, found)
    for mine, theirs in zip(gradients, graded(exact, wanted), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)
    if not spare:  # of a view autograd would make a copy, as large as the output embedding
        assert gradients[1]._base is None

    told = full_kl(hidden, head.as_now(), their_states, there, temperature=0.7)
    torch.testing.assert_close(told.double(), wanted[2], rtol=1e-4, atol=1e-5)
    own = token_logprobs(ours[0], head, targets, temperature=0.7, want_entropy=False,
                         other=OtherHead(ours[0].detach(), head.as_now())).kl
    assert not own.any()
    assert not torch.autograd.grad(own.sum(), ours[0])[0].any()


@pytest.mark.parametrize(("kind", "keys"), [
    ("modernbert-decoder", {}),  # whose configuration takes no missing padding
    # with a layer between trunk and head
    ("rembert", {"is_decoder": True, "output_embedding_size": 48, "input_embedding_size": 16}),
    ("granite", {"logits_scaling": 8.0})])
def test_a_model_that_does_something_else_with_its_logits_is_refused(tmp_path, monkeypatch, kind,
                                                                     keys):
    save_lm(tmp_path / "lm", kind, **keys)
    cfg = small_config(tmp_path).model
    if kind == "granite":
        load_lm(cfg)
        monkeypatch.setattr(LogitMap, "of", staticmethod(lambda lm: LogitMap()))
    with pytest.raises(InputError, match="does not compute its logits as"):
        load_lm(cfg)
