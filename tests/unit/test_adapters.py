"""LoRA, prefix and prompt tuning: what PEFT computes and writes, and what holds of every run."""

import shutil
from contextlib import nullcontext

import pytest
import torch
from helpers import save_lm
from sessions import (
    experience_of,
    load_session,
    optimize,
    own_logprobs,
    refused_session,
    rolled,
    rollout_of,
    save_session,
    session_of,
    small_config,
    weights_of,
)
from transformers import AutoModelForCausalLM

from ppocli.config.schema import TrainConfig
from ppocli.errors import CheckpointError, ConfigError
from ppocli.launch.input_checks import missing_inputs
from ppocli.models.loading.language_model import load_lm
from ppocli.models.policy import AdapterReference
from ppocli.training.optimizers import named_trainable

pytestmark = pytest.mark.long


def adapter(**fields) -> dict:
    return {"type": "lora", "r": 4, "lora_alpha": 8, **fields}


def config_of(tmp_path, shape="gpt2", fields=None, **over) -> TrainConfig:
    if not (tmp_path / "lm").exists():
        save_lm(tmp_path / "lm", shape, gain=1.5)
    return small_config(tmp_path, **{"model__peft": adapter(**(fields or {})),
                                     "ppo__chunk_size": 5, "ppo__optimizer__lr": 0.01, **over})


def trained(session) -> None:
    """One rollout and its updates."""
    optimize(session, experience_of(session))


def plain_peft(tmp_path, folder):
    """The saved adapter as anyone would load it, and the bare base."""
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    return PeftModel.from_pretrained(base, folder).eval()


def naive_logprobs(lm, rollout) -> torch.Tensor:
    """[B, R] of the sampled tokens, one row at a time, without any padding."""
    out = torch.zeros(rollout.response_mask.shape)
    for row, mask in enumerate(rollout.response_mask):
        out[row][mask] = own_logprobs(lm, rollout, row).float()
    return out


@pytest.mark.parametrize(("way", "shape"), [
    pytest.param("forward", "gpt2", marks=pytest.mark.slow), ("decode", "llama")])
def test_a_trained_adapter_is_what_plain_peft_makes_of_its_files(tmp_path, way, shape):
    """Decoding, the packed pass, the reference and the files, against PEFT's own forward."""
    cfg = config_of(tmp_path, shape, ppo__logprobs_from=way)
    with session_of(cfg) as session:
        assert isinstance(session.reference, AdapterReference)
        before = weights_of(session)
        trained(session)
        after = rollout_of(session, start=100)
        lengths = after.prompts.mask.sum(1)
        assert lengths.min() < lengths.max()  # some rows are padded
        save_session(session, tmp_path / "saved")
        moved = {n for n, t in session.policy.state_dict().items() if not torch.equal(t, before[n])}
        assert moved == set(named_trainable(session.policy))
        assert all(n.startswith("value_head.") or "lora_" in n for n in moved)
    files = tmp_path / "saved" / "policy"
    assert not (files / "model.safetensors").exists()
    peft, base = plain_peft(tmp_path, files), AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    expected, of_base = naive_logprobs(peft, after), naive_logprobs(base.eval(), after)
    torch.testing.assert_close(after.logprobs * after.response_mask, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(after.ref_logprobs, of_base, rtol=0, atol=2e-5)
    assert (expected - of_base).abs().max() > 1e-3


# Invariants ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("over", [{"ppo__logprobs_from": "forward"},
                                  {"hardware__precision": "bf16"}])
def test_the_kl_is_zero_before_lora_has_learnt(tmp_path, over):
    cfg = config_of(tmp_path, ppo__kl_estimator="full", **over)
    assert rolled(cfg).kl.abs().max() == 0.0


@pytest.mark.slow
def test_dropout_is_on_in_updates_alone(tmp_path):
    """It leaves the logprobs the same, and the generators of the reward."""
    found = {}
    for name, dropout, source, more in (
            ("off", 0.0, "forward", {}), ("forward", 0.5, "forward", {}),
            ("recomputed", 0.5, "forward", {"model__gradient_checkpointing": True})):
        cfg = config_of(tmp_path, fields={"lora_dropout": dropout}, ppo__logprobs_from=source,
                        ppo__ratio_threshold=None, **more)
        with session_of(cfg) as session:
            first = experience_of(session)
            generator = torch.get_rng_state()
            ratios = [optimize(session, first).terms["max_log_ratio"]]
            assert torch.equal(torch.get_rng_state(), generator)
            weights = weights_of(session)
            second = experience_of(session, start=16)
            for group in session.trained.optimizer.param_groups:
                group["base_lr"] = 0.0
            ratios.append(optimize(session, second).terms["max_log_ratio"])
            found[name] = first.logprobs, second.logprobs, ratios, weights
    off, forward = found["off"], found["forward"]
    assert off[2][1] <= 1e-5
    assert forward[2][1] > 1e-3
    torch.testing.assert_close(forward[0], off[0])  # the first rollout
    assert any(not torch.equal(forward[3][name], off[3][name]) for name in off[3])
    for name, tensor in found["recomputed"][3].items():
        torch.testing.assert_close(tensor, forward[3][name], rtol=0, atol=1e-5)


# Loading ------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base, and a checkpoint of an adapter that was trained on it."""
    folder = tmp_path_factory.mktemp("made")
    with session_of(config_of(folder)) as session:
        trained(session)
        save_session(session, folder / "saved")
    return folder


@pytest.fixture
def saved(made, tmp_path):
    """The checkpoint, with the base that it names beside it."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    for name in ("adapter_config.json", "base_model.json"):
        file = tmp_path / "saved/policy" / name
        file.write_text(file.read_text().replace(str(made), str(tmp_path)))
    return tmp_path / "saved"


def test_an_adapter_goes_on_as_it_is_and_with_its_base_only(tmp_path, saved):
    with (session_of(config_of(tmp_path, fields={"r": 2})) as session,
          pytest.raises(CheckpointError, match=r"is \(4, 32\) in the file, \(2, 32\) here")):
        load_session(session, saved)
    save_lm(tmp_path / "lm", seed=7)
    with pytest.raises(CheckpointError, match="is not the model that the adapter"):
        load_lm(small_config(tmp_path, model__path=str(saved / "policy")).model)


# An adapter as the start --------------------------------------------------------------------------

def start_of(tmp_path, saved, **over) -> TrainConfig:
    """A training that starts from the adapter, whose folder holds no tokenizer."""
    for file in (saved / "policy").glob("tokenizer*"):
        file.unlink()
    return config_of(tmp_path, model__path=str(saved / "policy"), **over)


@pytest.mark.parametrize("over", [
    {"model__peft": {}},
    pytest.param({"model__peft": {}, "model__num_layers_unfrozen": 1}, marks=pytest.mark.slow),
    {"model__peft": {"type": "lora", "r": 4}}])
def test_training_starts_from_base_and_adapter_and_so_does_the_reference(tmp_path, saved, over):
    cfg = start_of(tmp_path, saved, ppo__logprobs_from="forward", **over)
    peft = plain_peft(tmp_path, saved / "policy")
    with session_of(cfg) as session:
        before = rollout_of(session)
        assert before.kl.abs().max() == 0.0
        torch.testing.assert_close(before.logprobs, naive_logprobs(peft, before), rtol=0, atol=2e-5)
        trained(session)
        after = rollout_of(session, start=100)
        assert after.kl.abs().max() > 1e-4
        save_session(session, tmp_path / "again")
        names = list(named_trainable(session.policy))
    folder = tmp_path / "again/policy"
    if cfg.model.peft:
        assert all("lora_" in name or name.startswith("value_head.") for name in names)
        assert (folder / "adapter_model.safetensors").exists()
        lm = plain_peft(tmp_path, folder)
    else:
        lm = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert len(lm.state_dict().keys() - {"lm_head.weight"}) <= len(names) or (
            cfg.model.num_layers_unfrozen == 1)
    torch.testing.assert_close(after.logprobs, naive_logprobs(lm, after), rtol=0, atol=2e-5)


def test_an_adapter_may_be_the_reference_or_its_base_is(tmp_path, saved):
    """As path of the reference; and switched off, if that is typed, where it goes on."""
    peft = plain_peft(tmp_path, saved / "policy")
    folder = str(saved / "policy")
    for over, enabled in (({"model__peft": {}, "model__reference__path": folder}, True),
                          ({"model__path": folder, "model__reference__kind": "adapter"}, False)):
        rollout = rolled(config_of(tmp_path, ppo__logprobs_from="forward", **over))
        with nullcontext() if enabled else peft.disable_adapter():
            expected = naive_logprobs(peft, rollout)
        torch.testing.assert_close(rollout.ref_logprobs, expected, rtol=0, atol=2e-5)
        assert rollout.kl.abs().max() > 1e-3


def test_a_base_that_is_gone_is_told_before_anything_is_loaded(tmp_path, saved):
    cfg = start_of(tmp_path, saved, model__peft={})
    assert missing_inputs(cfg) == []
    (tmp_path / "lm").rename(tmp_path / "moved")
    gone, = missing_inputs(cfg)
    assert f"The base of the adapter in {saved}/policy can't be used: Folder" in gone.what
    assert gone.where == f"model.path, {saved}/policy/base_model.json"


@pytest.mark.parametrize(("fields", "what"), [
    ({"target_modules": ["nowhere"]}, "does not fit GPT2LMHeadModel"),
    ({"modules_to_save": ["wte"]}, "covers the output embedding")])
def test_an_adapter_that_does_not_fit_the_model_is_refused(tmp_path, fields, what):
    refused_session(config_of(tmp_path, fields=fields), ConfigError, what)
