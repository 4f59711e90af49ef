"""Tokens that are fed in the same memory each time, as a CUDA graph replays them: here on the CPU,
where the same work is done anew instead of being replayed."""

import pytest
import torch
from helpers import DECODERS, save_lm
from sessions import count_good, rollout_of, session_of, small_config

from ppocli.errors import OutOfMemoryError
from ppocli.sampling import token_graph
from ppocli.sampling.token_graph import TokenGraph

NAMES = ("response_tokens", "response_mask", "logprobs", "values", "ref_logprobs")


@pytest.fixture
def recording(monkeypatch) -> list[TokenGraph]:
    """Let tokens be fed so on a CPU; the graphs that were made."""
    made: list[TokenGraph] = []
    begin = TokenGraph.__init__

    def noted(self, *args):
        begin(self, *args)
        made.append(self)

    monkeypatch.setattr(TokenGraph, "__init__", noted)
    monkeypatch.setattr(token_graph, "DEVICES", ("cpu",))
    monkeypatch.setattr(token_graph, "recorded", lambda work: work)
    return made


def assert_same(found, wanted) -> None:
    assert len(found) == len(wanted)
    for name in NAMES:
        a, b = getattr(found, name), getattr(wanted, name)
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6 if a.is_floating_point() else 0)


CASES = {
    "all at once": {},
    "places taken anew": {"ppo__chunk_size": 4, "generation__length_sampler": [2, 12]},
    "bf16": {"hardware__precision": "bf16"},
    "one layer trains": {"model__num_layers_unfrozen": 1},
    "chosen by what came before": {"generation__repetition_penalty": 1.3,
                                   "generation__min_new_tokens": 3, "generation__top_p": 0.8},
    "adapters": {"model__peft": {"type": "lora", "r": 4, "lora_alpha": 8}},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_rollout_is_that_of_the_loop(tmp_path, recording, kind, name):
    save_lm(tmp_path / "lm", kind)
    cfg = small_config(tmp_path, generation__max_new_tokens=12,
                       generation__stop_token_ids=[5, 9, 14], **CASES[name])
    with session_of(cfg, count_good) as session:
        found = rollout_of(session)
        assert recording
        assert all(graph.fed > 0 for graph in recording)
        made = len(recording)
        cfg.hardware.cuda_graphs = False
        wanted = rollout_of(session)
    assert len(recording) == made
    assert (found.response_mask.sum(1).unique().numel()) > 2
    if name == "bf16":  # products over the room round in another order
        same = (found.response_tokens == wanted.response_tokens).all(1)
        assert same.float().mean() > 0.8
    else:
        assert_same(found, wanted)


@pytest.mark.parametrize("kind", DECODERS)
def test_kinds_that_are_recorded_are_right_so(tmp_path, recording, kind):
    save_lm(tmp_path / "lm", kind)
    cfg = small_config(tmp_path, generation__stop_token_ids=[5, 9, 14])
    with session_of(cfg) as session:
        found = rollout_of(session)
        cfg.hardware.cuda_graphs = False
        assert_same(found, rollout_of(session))


@pytest.mark.parametrize("keys", [
    {"generation__stop_sequences": ["no such words"]}, {"hardware__cuda_graphs": False},
    {"model__peft": {"type": "prefix_tuning", "num_virtual_tokens": 3}}])
def test_what_the_host_has_a_say_in_is_not_recorded(tmp_path, recording, keys):
    with session_of(small_config(tmp_path, **keys)) as session:
        recording.clear()  # what was decoded to look at the model
        rollout_of(session)
    assert not recording


@pytest.mark.parametrize("kind", ["t5", "mamba"])
def test_models_that_keep_something_else_are_not_recorded(tmp_path, recording, kind):
    save_lm(tmp_path / "lm", kind)
    with session_of(small_config(tmp_path)) as session:
        rollout_of(session)
    assert not recording


def test_a_model_that_waits_for_the_device_is_fed_kernel_by_kernel(
        tmp_path, recording, monkeypatch, caplog):
    tried = []

    def refused(work):
        tried.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    with session_of(small_config(tmp_path)) as session:
        monkeypatch.setattr(token_graph, "recorded", refused)
        found, again = rollout_of(session), rollout_of(session)
        assert_same(found, again)
    assert len(tried) == 1
    assert "can't be recorded as a CUDA graph" in caplog.text


def test_no_memory_for_a_graph_is_no_memory(tmp_path, recording, monkeypatch):
    def full(work):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with session_of(small_config(tmp_path)) as session:
        monkeypatch.setattr(token_graph, "recorded", full)
        with pytest.raises(OutOfMemoryError):
            rollout_of(session)
