"""Attention of the models that are trained, against transformers' own and against sums in fp64."""

import types

import pytest
import torch
from helpers import mostly_slow, save_lm
from sessions import grads_of
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from ppocli.config.schema import ModelConfig
from ppocli.errors import InputError
from ppocli.models import kernels as ours
from ppocli.models.loading.language_model import load_lm
from ppocli.models.transformers_internals import cache_name, give_room

pytestmark = pytest.mark.long

KINDS = {
    "gpt2": {"n_positions": 160}, "llama": {"max_position_embeddings": 160},
    "qwen2": {"max_position_embeddings": 160}, "gpt_neox": {"max_position_embeddings": 160},
    "opt": {"max_position_embeddings": 160},
    "mistral": {"max_position_embeddings": 160, "sliding_window": 7}}
"""llama, qwen2 and mistral have two heads to a key; mistral hides what is far back"""
BELOW, ABOVE = 20, 140
"""tokens, and of fp32 plain products take the former only"""


@pytest.fixture(scope="module", params=mostly_slow(
    KINDS, quick=lambda kind: kind in ("gpt2", "mistral")))
def folder(request, tmp_path_factory):
    return save_lm(tmp_path_factory.mktemp(request.param) / "lm", request.param, gain=2.0,
                   **KINDS[request.param])


@pytest.fixture
def products(monkeypatch):
    """How often plain products were taken."""
    calls, plain = [], ours._by_products
    monkeypatch.setattr(ours, "has_amx", lambda: False)
    monkeypatch.setattr(ours, "_by_products", lambda *a: calls.append(1) or plain(*a))
    return calls


def loaded(folder, attention=None):
    return load_lm(ModelConfig(path=str(folder), attn_implementation=attention)).lm


def padded(tokens, generator):
    """Three rows of ids, mask and positions, two of them padded on the left."""
    ids = torch.randint(4, 30, (3, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :tokens // 3] = 0
    mask[2, :tokens - 2] = 0
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def passed(lm, tokens, *, left, amp=False):
    """States of a pass where there are tokens, and the gradients of all weights."""
    generator = torch.Generator().manual_seed(tokens)
    ids, mask, positions = padded(tokens, generator)
    given = {"attention_mask": mask, "position_ids": positions} if left else {}
    lm.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        states = lm.base_model(input_ids=ids, use_cache=False, **given).last_hidden_state.float()
    if left:
        states = states[mask.bool()]
    weights = torch.randn(states.shape, generator=generator)
    (states * weights).sum().backward()
    return states.detach(), grads_of(lm)


@pytest.mark.parametrize(("theirs", "tokens", "left"), mostly_slow(
    ["eager", "sdpa"], [BELOW, ABOVE], [False, True],
    quick=lambda theirs, tokens, left: theirs == "eager" and left))
def test_states_and_gradients_are_those_of_transformers(folder, products, theirs, tokens, left):
    assert BELOW <= ours.SHORT[torch.float32] < ABOVE
    other, lm = loaded(folder, theirs), loaded(folder)
    assert lm.config._attn_implementation == ours.NAME
    products.clear()
    states, gradients = passed(lm, tokens, left=left)
    # a window hides keys that the mask then has to
    assert len(products) == (2 if tokens == BELOW else 0)
    wanted, their_gradients = passed(other, tokens, left=left)
    torch.testing.assert_close(states, wanted, rtol=1e-4, atol=2e-5)
    assert gradients.keys() == their_gradients.keys()
    for name, grad in gradients.items():
        scale = float(their_gradients[name].abs().max())
        torch.testing.assert_close(grad, their_gradients[name], rtol=1e-3, atol=1e-4 * scale + 1e-4)


@pytest.mark.parametrize("room", [False, True])
def test_one_query_after_the_other_with_a_cache_is_a_whole_pass(folder, products, room):
    ids, mask, positions = padded(BELOW, torch.Generator().manual_seed(0))
    # nothing but a prompt's last token is real in the third row at first
    prompt = BELOW - 1
    with torch.no_grad():
        whole = loaded(folder, "eager").base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
        lm = loaded(folder)
        cache = DynamicCache(config=lm.config)
        if room:
            give_room(cache, 10 * BELOW)
        products.clear()
        for part in (slice(0, prompt), slice(prompt, BELOW)):
            found = lm.base_model(
                input_ids=ids[:, part], attention_mask=mask[:, :part.stop], use_cache=True,
                position_ids=positions[:, part],
                **{cache_name(lm.base_model): cache}).last_hidden_state
            torch.testing.assert_close(found[mask[:, part].bool()], whole[:, part][
                mask[:, part].bool()], rtol=1e-4, atol=2e-5)
    assert len(products) == 4


# The function alone -------------------------------------------------------------------------------

def in_double(query, key, value, mask, scaling=None):
    """softmax(q k^T scaling + mask) v, head by head."""
    share = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(share, 1) for t in (key, value))
    scores = query.double() @ key.transpose(2, 3) * (scaling or query.shape[3] ** -0.5)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -float("inf"))
    elif mask is not None:
        scores = scores + mask.double()
    return (torch.softmax(scores, -1) @ value).transpose(1, 2)


def attend(query, key, value, mask, *, amp=False, **words):
    module = types.SimpleNamespace(
        num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True, training=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        out, weights = ours.attention(module, query, key, value, mask, **words)
    assert weights is None
    return out


def heads_of(queries, keys, groups=2):
    generator = torch.Generator().manual_seed(queries)
    shapes = (3, 4, queries, 8), (3, groups, keys, 8), (3, groups, keys, 8)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def seen(queries, keys):
    """[3, 1, T, S] bool: causal, and a row with padding whose first queries see nothing."""
    mask = torch.ones(queries, keys).tril(keys - queries).bool().expand(3, 1, -1, -1).clone()
    mask[0, ..., :keys // 2] = False
    if queries > 1:
        mask[1, :, 0] = False
    return mask


HOW = {"bool": lambda mask: mask,
       "least number": lambda mask: torch.zeros(mask.shape).masked_fill(
           ~mask, torch.finfo(torch.float32).min),
       "infinity": lambda mask: torch.zeros(mask.shape).masked_fill(~mask, -float("inf"))}


@pytest.mark.parametrize(("queries", "keys", "groups", "how", "amp"), [
    (6, 6, 4, "bool", False), (4, 9, 2, "least number", False), (1, 9, 1, "infinity", False),
    (4, 9, 1, "infinity", False), (6, 6, 2, "bool", True), (1, 9, 2, "least number", True)])
def test_what_a_mask_hides_adds_nothing_and_rows_that_see_nothing_stay_finite(
        products, queries, keys, groups, how, amp):
    heads = heads_of(queries, keys, groups=groups)
    mask = seen(queries, keys)
    real = mask.any(-1)[:, 0, :, None, None]
    assert bool(real.all()) == (queries == 1)
    found = attend(*heads, HOW[how](mask), amp=amp)
    assert products
    assert found.shape == (3, queries, 4, 8)
    assert bool(torch.isfinite(found).all())
    given = [t.detach().clone().requires_grad_() for t in heads]
    wanted = in_double(*given, mask | ~mask.any(-1, keepdim=True))
    close = {"rtol": 3e-2, "atol": 5e-2} if amp else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close((found * real).double(), wanted * real, **close)
    weights = torch.randn(found.shape) * real  # nobody learns from padding
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    for mine, their in zip(heads, given, strict=True):
        torch.testing.assert_close(mine.grad, their.grad, rtol=3e-2 if amp else 1e-4,
                                   atol=1e-1 if amp else 1e-5)


def test_without_a_mask_several_queries_are_causal_unless_told_otherwise(products):
    heads = heads_of(5, 5)
    causal = torch.ones(5, 5).tril().bool()[None, None]
    for words, mask in (({}, causal), ({"is_causal": False}, None)):
        torch.testing.assert_close(attend(*heads, None, **words).double(), in_double(*heads, mask),
                                   rtol=1e-5, atol=1e-5)
    assert len(products) == 2


def test_what_plain_products_do_not_know_is_left_to_transformers(products):
    heads = heads_of(6, 6, groups=4)
    plain = attend(*heads, None)
    products.clear()
    torch.manual_seed(0)
    dropped = attend(*heads, None, dropout=0.5)
    assert not torch.allclose(dropped, plain)
    position_bias = torch.randn(1, 4, 6, 6)
    hidden = torch.zeros(6, 6).masked_fill(~torch.ones(6, 6).tril().bool(), -float("inf"))
    torch.testing.assert_close(
        attend(*heads, None, position_bias=position_bias).double(),
        in_double(*heads, position_bias + hidden), rtol=1e-5, atol=1e-5)
    assert not products


def test_soft_capped_attention_is_capped(tmp_path):
    cap = {"attn_logit_softcapping": 0.05, "num_key_value_heads": 1, "head_dim": 16}
    folder = save_lm(tmp_path / "lm", "gemma2", gain=5.0, **cap)
    ids = torch.arange(12)[None] + 4
    with torch.no_grad():
        found = load_lm(ModelConfig(path=str(folder))).lm(ids)
        eager, torchs = (AutoModelForCausalLM.from_pretrained(
            folder, config=AutoConfig.from_pretrained(folder, **words),
            attn_implementation="eager")(ids)
            for words in ({}, {"attn_logit_softcapping": None}))
    assert torch.equal(found.logits, eager.logits)
    assert not torch.allclose(found.logits, torchs.logits, atol=1e-3), "the cap is felt"
    with pytest.raises(InputError, match="leaves out the cap"):
        load_lm(ModelConfig(path=str(folder), attn_implementation="sdpa"))



