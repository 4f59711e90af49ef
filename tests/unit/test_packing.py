"""Rows packed into one without padding: what the models say of them is what they say of padded
rows."""


import pytest
import torch
from helpers import mostly_slow, save_lm
from sessions import grads_of, prompt_and_response, rollout_of, session_of, small_config

from ppocli.config.schema import ModelConfig
from ppocli.models.kernels import takes_packed
from ppocli.models.layout import PACK_ABOVE, lay_out
from ppocli.models.loading.language_model import load_lm

LORA = {"type": "lora", "r": 4}
CASES = {
    "head": {}, "model": {"value__kind": "model"},
    "branch, checkpointed": {"value__kind": "branch", "value__num_layers_unfrozen": 1,
                             "gradient_checkpointing": True},
    "lora, checkpointed": {"peft": LORA, "gradient_checkpointing": True},
    "top layer": {"num_layers_unfrozen": 1}}


def samples(lengths=(9, 2, 14, 5), prompt=6):
    """Left-padded prompts and right-padded responses of several lengths, as :func:`lay_out` wants
    them."""
    generator = torch.Generator().manual_seed(0)
    rows, longest = len(lengths), max(lengths)
    responses = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    prompts = torch.arange(prompt)[None] >= torch.tensor([prompt - 1 - i % prompt
                                                          for i in range(rows)])[:, None]
    ids = torch.randint(4, 30, (rows, prompt + longest), generator=generator)
    return ids[:, :prompt] * prompts, prompts, ids[:, prompt:] * responses, responses


def packed(*given, pack=True):
    return lay_out(prompt_and_response(*(given or samples())), pack=pack)


def said(session, batch):
    """Logprobs, values and entropies of a batch, and the gradients of all that trains."""
    session.policy.zero_grad(set_to_none=True)
    found = session.trained.engine(batch, temperature=0.7, want_entropy=True)
    out = found.logprobs, found.values, found.entropy
    weights = torch.randn(3, len(batch.targets), generator=torch.Generator().manual_seed(1))
    (torch.stack(out) * weights).sum().backward()
    return out, grads_of(session.policy)


@pytest.mark.parametrize(("kind", "case"), mostly_slow(
    ["gpt2", "llama", "gpt_neox"], CASES,
    quick=lambda kind, case: (kind, case) in (
        ("llama", "head"), ("gpt2", "branch, checkpointed"), ("gpt_neox", "lora, checkpointed"))))
def test_logprobs_values_and_gradients_are_those_of_padded_rows(tmp_path, kind, case):
    save_lm(tmp_path / "lm", kind, gain=2.0)
    keys = {f"model__{name}": value for name, value in CASES[case].items()}
    with session_of(small_config(tmp_path, **keys)) as session:
        assert session.packs
        with torch.no_grad():
            for module in session.policy.modules():  # heads and adapters start at zero
                for name, p in module.named_parameters(recurse=False):
                    if p.requires_grad and not p.any():
                        p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
        session.policy.train(session.cfg.model.gradient_checkpointing)
        grid, flat = packed(pack=False), packed()
        assert grid.packing is None
        assert flat.tokens.shape[1] < grid.tokens.numel()
        assert torch.equal(flat.targets, grid.targets)
        out, gradients = said(session, flat)
        wanted, their_gradients = said(session, grid)
    for mine, theirs in zip(out, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == their_gradients.keys()
    for name, theirs in their_gradients.items():
        torch.testing.assert_close(gradients[name], theirs, rtol=1e-3, atol=1e-4)


def test_rows_that_hardly_differ_are_padded():
    # 3 of 80 positions are padding, and 1 of 80
    for lengths, packs in (((17, 20, 20, 20), True), ((20, 20, 19, 20), False)):
        mask = torch.arange(20)[None] < torch.tensor(lengths)[:, None]
        ids = torch.randint(4, 30, (4, 20)) * mask
        prompts = torch.full((4, 1), 5)
        batch = packed(prompts, torch.ones_like(prompts).bool(), ids, mask)
        share = 1 - sum(lengths) / 80
        assert (share > PACK_ABOVE) == packs == (batch.packing is not None)


# Which models take them ---------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "opt"])
def test_models_that_see_all_of_a_row_take_packed_ones(tmp_path, kind):
    save_lm(tmp_path / "lm", kind)
    assert takes_packed(load_lm(ModelConfig(path=str(tmp_path / "lm"))).lm)


@pytest.mark.parametrize(("kind", "over"), [
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
    ("bloom", {}), ("gpt_neo", {}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("mistral", {"sliding_window": 40}), ("mpt", {}), ("bart", {}), ("falcon", {"alibi": True})
    ))])
def test_windows_alibi_encoders_and_attention_of_their_own_take_none(tmp_path, kind, over):
    save_lm(tmp_path / "lm", kind, **over)
    with session_of(small_config(tmp_path)) as session:
        assert not takes_packed(session.policy.lm)
        assert not session.packs
        assert rollout_of(session).logprobs.isfinite().all()


def test_a_model_that_runs_on_from_token_to_token_is_found_out(tmp_path):
    """Whatever a configuration says: states are compared."""
    save_lm(tmp_path / "lm", "llama")
    lm = load_lm(ModelConfig(path=str(tmp_path / "lm"))).lm
    assert takes_packed(lm)
    layer = lm.model.layers[0]
    # a token takes over something of the one before it, as a convolution does
    handle = layer.register_forward_pre_hook(
        lambda _, args: (args[0] + torch.nn.functional.pad(args[0], (0, 0, 1, 0))[:, :-1],
                         *args[1:]))
    assert not takes_packed(lm)
    handle.remove()
    assert takes_packed(lm)
