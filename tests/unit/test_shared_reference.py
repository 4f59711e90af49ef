"""A reference that shares the policy's frozen trunk: the same numbers as a copy, with fewer tensors
and without a second pass through what is frozen."""

import pytest
import torch
from helpers import DECODERS, model_config, mostly_slow, save_lm
from sessions import (
    count_letters,
    experience_of,
    optimize,
    rollout_of,
    session_of,
    small_config,
)

from ppocli.models.layer_stack import layer_stack
from ppocli.models.policy import freeze_lower_layers
from ppocli.models.reference import CopyReference, share_trunk

pytestmark = pytest.mark.long


def one_layer(tmp_path, kind="gpt2", reference="shared", **over):
    if not (tmp_path / "lm").exists():
        save_lm(tmp_path / "lm", kind, gain=1.5)  # less sure of itself, so that a KL can be seen
    return small_config(tmp_path, **{
        "model__num_layers_unfrozen": 1, "model__reference__kind": reference,
        "ppo__chunk_size": 5, **over})


@pytest.mark.parametrize(("kind", "source"), mostly_slow(
    [*(kind if isinstance(kind, str) else kind.values[0] for kind in DECODERS), "bloom",
     "opt with projections", "bart"], ["decode", "forward"],
    quick=lambda kind, source: kind == "gpt2" or (source == "decode" and kind in (
        "llama", "gptj", "bloom", "opt with projections", "bart"))))
def test_a_shared_reference_gives_what_a_copy_gives(tmp_path, kind, source):
    """What comes before the first layer is frozen too."""
    found, projected = [], kind == "opt with projections"
    kind = kind.partition(" ")[0]
    save_lm(tmp_path / "lm", kind, gain=1.5, **({"word_embed_proj_dim": 16} if projected else {}))
    for reference in ("copy", "shared"):
        cfg = one_layer(tmp_path, kind, reference, ppo__optimizer__lr=0.01,
                        ppo__logprobs_from=source)
        with session_of(cfg, reward=count_letters) as session:
            assert isinstance(session.reference, CopyReference) == (reference == "copy")
            before = rollout_of(session)
            below = {n: p.clone() for n, p in session.policy.lm.named_parameters()
                     if any(part in n for part in ("embed", "project_in", "wte", "wpe"))}
            assert below
            optimize(session, experience_of(session))
            after = dict(session.policy.lm.named_parameters())
            assert all(torch.equal(after[name], value) for name, value in below.items())
            found.append((before, rollout_of(session, start=100)))
    for copied, shared in zip(*found, strict=True):
        assert torch.equal(copied.response_tokens, shared.response_tokens)
        torch.testing.assert_close(shared.ref_logprobs, copied.ref_logprobs, rtol=0, atol=2e-6)
        torch.testing.assert_close(shared.values, copied.values, rtol=0, atol=2e-6)
    first, later = found[1]
    assert first.kl.abs().max() <= (0.0 if source == "forward" else 1e-5)
    assert later.kl.abs().max() > 1e-3


def test_in_bf16_the_reference_is_not_the_policy_s_cached_weights(tmp_path):
    """Autocast keeps the bf16 copies that it made of weights, whatever is put in their place."""
    found = []
    for reference in ("copy", "shared"):
        cfg = one_layer(tmp_path, "llama", reference, ppo__optimizer__lr=0.01,
                        hardware__precision="bf16", model__dtype="fp32")
        with session_of(cfg, reward=count_letters) as session:
            optimize(session, experience_of(session))
            found.append(rollout_of(session, start=100))
    copied, shared = found
    assert torch.equal(copied.response_tokens, shared.response_tokens)
    assert copied.kl.abs().max() > 0.01
    torch.testing.assert_close(shared.kl, copied.kl, rtol=0, atol=2e-3)


def test_it_holds_what_trains_and_nothing_else(tmp_path):
    with session_of(one_layer(tmp_path, "llama", "auto")) as session:
        policy, reference = session.policy.lm, session.reference
        assert set(reference.frozen) == {n for n, p in policy.named_parameters() if p.requires_grad}
        held = sum(t.numel() for t in reference.frozen.values())
        copied = sum(p.numel() for p in policy.parameters())
        assert reference.split.layer == 1
        assert held < 0.6 * copied


def test_a_trunk_whose_layers_are_no_plain_sequence_is_refused():
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_config(model_config("gpt2")).eval()
    freeze_lower_layers(lm, 1)
    layers = layer_stack(lm)
    original = layers[1].forward
    # a layer that also takes what another one left
    left = []
    layers[0].register_forward_hook(lambda *_: left.append(2.0))
    layers[1].forward = lambda hidden, *a, **k: original(
        hidden * (left.pop() if left else 1.0), *a, **k)
    with pytest.raises(ValueError, match="entered at layer 1 gives other numbers"):
        share_trunk(lm)
