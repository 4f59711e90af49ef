"""What must hold of the engine whichever kind of model it trains: adapters, critics with layers of
their own, encoder-decoders."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import save_lm
from sessions import (
    count_letters,
    experience_of,
    gradients,
    load_session,
    optimize,
    rollout_of,
    save_session,
    session_of,
    small_config,
    weights_of,
)

from ppocli.config.schema import TrainConfig

# PEFT asks transformers by a name that is going to be dropped
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is dep:FutureWarning")


def peft(kind: str, **fields: Any) -> dict[str, Any]:
    sizes = {"r": 4, "lora_alpha": 8} if kind == "lora" else {"num_virtual_tokens": 5}
    return {"model__peft": {"type": kind, **sizes, **fields}}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("gpt2", peft("lora")), "lora on llama": ("llama", peft("lora")),
    "dora": ("gpt2", peft("lora", use_dora=True)),
    "prefix": ("gpt2", peft("prefix")), "prefix on llama": ("llama", peft("prefix")),
    "projected prefix": ("gpt2", peft("prefix", prefix_projection=True, encoder_hidden_size=8)),
    "prompt": ("gpt2", peft("prompt")), "prompt on llama": ("llama", peft("prompt")),
    "branch": ("gpt2", {"model__value__kind": "branch", "model__value__num_layers_unfrozen": 1}),
    "critic": ("gpt2", {"model__value__kind": "model"}), "t5": ("t5", {}), "bart": ("bart", {})}
PREFIXES = [kind for kind in KINDS if "prefix" in kind]
FEW = ["lora", "prompt", "branch", "critic", "t5", "bart"]


def config(folder: Path, kind: str, **over: Any) -> TrainConfig:
    shape, keys = KINDS[kind]
    if not (folder / "lm").exists():
        save_lm(folder / "lm", shape, gain=1.5)
    return small_config(folder, **{"ppo__chunk_size": 5, **keys, **over})


def wake_the_value_head(session) -> None:
    """A head at 0 hands nothing down, and would hide the gradient of the layers below it."""
    with torch.no_grad():
        session.policy.value_head.outer.weight.fill_(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_with_learning_rate_zero_every_ratio_is_one_and_no_value_moves(tmp_path, kind):
    with session_of(config(tmp_path, kind, ppo__optimizer__lr=0.0), reward=count_letters
                    ) as session:
        result = optimize(session, experience_of(session))
    assert result.terms["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert result.terms["max_log_ratio"] <= 1e-5
    assert result.terms["value_clipfrac"] == 0


@pytest.mark.parametrize("kind", ["lora", "prefix", "prompt", "t5", "bart"])
def test_the_rollout_does_not_depend_on_chunks_and_micro_batches(tmp_path, kind):
    found = []
    for chunk, micro in ((16, None), (3, 1)):
        cfg = config(tmp_path, kind, ppo__chunk_size=chunk, ppo__micro_batch_size=micro,
                     ppo__logprobs_from="forward")
        with session_of(cfg) as session:
            wake_the_value_head(session)
            found.append(rollout_of(session))
    assert torch.equal(found[0].response_tokens, found[1].response_tokens)
    for name in ("logprobs", "ref_logprobs", "values"):
        one, other = (getattr(rollout, name) for rollout in found)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("keys", [
    {"ppo__micro_batch_size": 3}, {"model__gradient_checkpointing": True}])
@pytest.mark.parametrize("kind", FEW)
def test_micro_batches_and_checkpointed_layers_change_no_gradient(tmp_path, kind, keys):
    found = []
    for more in ({}, keys):
        cfg = config(tmp_path, kind, ppo__mini_batch_size=16, **more)
        with session_of(cfg, reward=count_letters) as session:
            wake_the_value_head(session)
            experience = experience_of(session)
            session.policy.train(cfg.model.gradient_checkpointing)
            found.append(gradients(session, experience)[0])
    whole, other = found
    below = {"branch": "value_trunk.", "critic": "value_trunk.", "t5": ".encoder.",
             "bart": ".encoder."}.get(kind, "lm.")
    assert any(below in name and grad.abs().max() > 0 for name, grad in whole.items())
    for name, grad in whole.items():
        torch.testing.assert_close(other[name], grad, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("kind", ["lora", "dora", "prompt", *PREFIXES])
def test_a_checkpoint_goes_on_bit_for_bit(tmp_path, kind):
    def train(session) -> None:
        optimize(session, experience_of(session))

    cfg = config(tmp_path, kind, ppo__optimizer__lr=0.01)
    with session_of(cfg) as session:
        train(session)
        save_session(session, tmp_path / "saved")
        train(session)
        straight = weights_of(session)
    with session_of(replace(cfg, seed=1)) as session:  # another initial adapter
        session.cfg.seed = cfg.seed
        load_session(session, tmp_path / "saved")
        train(session)
        for name, tensor in weights_of(session).items():
            assert torch.equal(tensor, straight[name]), name
