"""Where only top layers train: what the frozen ones below make of a sample is computed once for all
passes over it, and a reference shares them; neither changes a number."""

import pytest
import torch
from helpers import DECODERS, mostly_slow, save_lm
from sessions import (
    count_letters,
    experience_of,
    optimize,
    rollout_of,
    session_of,
    small_config,
    weights_of,
)

from ppocli.models.policy import CopyReference
from ppocli.models.transformers_internals import cache_name
from ppocli.models.trunk import layer_stack

pytestmark = pytest.mark.long

KINDS = ["gpt2", "gpt_neox", "gptj", "llama", "qwen2", "mistral", "opt"]


def one_layer(tmp_path, kind="gpt2", **over):
    if not (tmp_path / "lm").exists():
        save_lm(tmp_path / "lm", kind, gain=1.5)  # less sure of itself, so that a KL can be seen
    return small_config(tmp_path, **{"model__num_layers_unfrozen": 1, **over})


def top_layer(tmp_path, kind="gpt2", **over):
    """In three epochs. Adam would make steps out of the rounding of gradients that are zero (a bias
    of keys)."""
    return one_layer(tmp_path, kind, **{"ppo__ppo_epochs": 3, "ppo__optimizer__lr": 0.1,
                                        "ppo__optimizer__name": "sgd", **over})


def trained(cfg):
    """Weights after one rollout and its updates, and how often the lowest layer ran in these."""
    with session_of(cfg, reward=count_letters) as session:
        experience = experience_of(session)
        runs = []
        layer_stack(session.policy.lm)[0].register_forward_pre_hook(
            lambda _, inputs, runs=runs: runs.append(inputs[0].shape[:2].numel()))
        result = optimize(session, experience)
        assert result.updates
        return weights_of(session), runs, session.frozen_states_bytes


@pytest.mark.parametrize(("kind", "source"), mostly_slow(
    KINDS, ["decode", "forward"],
    quick=lambda kind, source: (kind, source) in (
        ("gpt2", "forward"), ("opt", "decode"))))
def test_weights_are_those_of_passes_through_all_layers(tmp_path, kind, source):
    whole, runs, _ = trained(top_layer(tmp_path, kind, ppo__logprobs_from=source,
                                       hardware__frozen_states_mib=0))
    assert runs
    kept, again, most = trained(top_layer(tmp_path, kind, ppo__logprobs_from=source))
    assert most == 2048 * 2**20
    assert again == [], "a pass before ran the frozen layers already"
    for name, weight in whole.items():
        torch.testing.assert_close(kept[name], weight, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("kind", "reference"), mostly_slow(
    ["gpt2", "llama"], ["shared", "copy", "adapter"],
    quick=lambda kind, reference: (kind == "llama" and reference == "adapter")
    or (kind == "gpt2" and reference == "shared")))
def test_decoding_alone_runs_the_frozen_layers(tmp_path, kind, reference):
    lora = {"type": "lora", "layers_to_transform": [1], "target_modules": (
        ["c_attn", "c_fc"] if kind == "gpt2" else ["q_proj", "up_proj"])}
    over = {} if reference != "adapter" else {"model__num_layers_unfrozen": -1, "model__peft": lora}
    cfg = top_layer(tmp_path, kind, model__reference__kind=reference, ppo__chunk_size=3, **over)
    found = {}
    for mib in (0, 64):
        cfg.hardware.frozen_states_mib = mib
        with session_of(cfg, reward=count_letters) as session:
            with torch.no_grad():  # an adapter that does something, and must be switched off
                for name, weight in session.policy.lm.named_parameters():
                    if "lora_B" in name:
                        weight.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
            runs = []
            session.policy.lm.base_model.register_forward_pre_hook(
                lambda its, _, words, runs=runs: runs.append(words.get(cache_name(its))),
                with_kwargs=True)
            lower = []
            layer_stack(session.policy.lm)[0].register_forward_pre_hook(
                lambda *_, lower=lower: lower.append(1))
            found[mib] = rollout_of(session), runs, lower
    plain, kept = found[0][0], found[64][0]
    torch.testing.assert_close(kept.ref_logprobs, plain.ref_logprobs, rtol=0, atol=2e-6)
    spans = kept.prompts.mask.sum(1) + kept.response_mask.sum(1) - 1
    assert [len(state) for state in kept.extras.frozen_states] == spans.tolist()
    _, runs, lower = found[64]
    assert len(lower) == sum(cache is not None for cache in runs), "in decoding, and only there"


@pytest.mark.parametrize(("over", "epochs"), [
    ({"model__reference__kind": "none", "ppo__init_kl_coef": 0.0, "hardware__precision": "bf16",
      "ppo__logprobs_from": "decode"}, 1), ({"hardware__frozen_states_mib": 0}, 3)],
    ids=["no exact pass before: the first epoch remembers", "no room: each epoch computes them"])
def test_in_how_many_of_three_epochs_the_frozen_layers_run(tmp_path, over, epochs):
    _, runs, most = trained(top_layer(tmp_path, **over))
    assert len(runs) == 2 * epochs  # two minibatches in each
    assert bool(most) == (epochs == 1)


# A reference that shares them ---------------------------------------------------------------------

@pytest.mark.parametrize(("kind", "source"), mostly_slow(
    [*(kind if isinstance(kind, str) else kind.values[0] for kind in DECODERS), "bloom",
     "opt with projections", "bart"], ["decode", "forward"],
    quick=lambda kind, source: (kind, source) in (
        ("gpt2", "forward"), ("opt with projections", "decode"), ("bart", "decode"))))
def test_a_shared_reference_gives_what_a_copy_gives(tmp_path, kind, source):
    """What comes before the first layer is frozen too."""
    found, projected = [], kind == "opt with projections"
    kind = kind.partition(" ")[0]
    save_lm(tmp_path / "lm", kind, gain=1.5, **({"word_embed_proj_dim": 16} if projected else {}))
    for reference in ("copy", "shared"):
        cfg = one_layer(tmp_path, kind, model__reference__kind=reference, ppo__chunk_size=5,
                        ppo__ppo_epochs=1, ppo__optimizer__lr=0.03, ppo__logprobs_from=source)
        with session_of(cfg, reward=count_letters) as session:
            assert isinstance(session.reference, CopyReference) == (reference == "copy")
            if reference == "shared":  # it holds what trains and nothing else
                assert set(session.reference.frozen) == {
                    n for n, p in session.policy.lm.named_parameters() if p.requires_grad}
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
        cfg = one_layer(tmp_path, "llama", model__reference__kind=reference, ppo__chunk_size=5,
                        ppo__optimizer__lr=0.01, hardware__precision="bf16",
                        model__dtype="fp32")
        with session_of(cfg, reward=count_letters) as session:
            optimize(session, experience_of(session))
            found.append(rollout_of(session, start=100))
    copied, shared = found
    assert torch.equal(copied.response_tokens, shared.response_tokens)
    assert copied.kl.abs().max() > 0.01
    torch.testing.assert_close(shared.kl, copied.kl, rtol=0, atol=2e-3)
