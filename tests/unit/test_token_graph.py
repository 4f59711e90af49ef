"""Tokens that are fed in the same memory each time, as a CUDA graph replays them: here on the CPU,
where the same work is done anew instead of being replayed."""


import pytest
import torch
from helpers import mostly_slow, save_lm
from sessions import count_good, record_on_cpu, rollout_of, session_of, small_config

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
    record_on_cpu(monkeypatch)
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


@pytest.mark.parametrize(("kind", "name"), mostly_slow(
    ["gpt2", "llama"], CASES,
    quick=lambda kind, name: (kind, name) in (
        ("llama", "places taken anew"), ("gpt2", "chosen by what came before"))))
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
    with session_of(cfg, count_good) as session:
        wanted = rollout_of(session)
    assert len(recording) == made
    assert (found.response_mask.sum(1).unique().numel()) > 2
    if name == "bf16":  # products over the room round in another order
        same = (found.response_tokens == wanted.response_tokens).all(1)
        assert same.float().mean() > 0.8
    else:
        assert_same(found, wanted)


@pytest.mark.parametrize(("kind", "keys"), [
    ("gpt2", {"generation__stop_sequences": ["no such words"]}),
    ("gpt2", {"reward__overlap": "always"}), pytest.param("t5", {}, marks=pytest.mark.slow),
    pytest.param("mamba", {}, marks=pytest.mark.slow)])
def test_what_the_host_has_a_say_in_or_keeps_otherwise_is_not_recorded(
        tmp_path, recording, kind, keys):
    save_lm(tmp_path / "lm", kind)
    with session_of(small_config(tmp_path, **keys)) as session:
        recording.clear()  # what was decoded to look at the model
        rollout_of(session)
    assert not recording


REFILLS = {"ppo__chunk_size": 4, "generation__length_sampler": [2, 12],
           "generation__max_new_tokens": 12}


@pytest.mark.parametrize("error", [
    RuntimeError("operation not permitted when stream is capturing"),
    torch.OutOfMemoryError("CUDA out of memory")])
def test_without_a_recording_tokens_are_fed_kernel_by_kernel(
        tmp_path, recording, monkeypatch, caplog, error):
    tried = []

    def failing(work, before):
        tried.append(before)
        raise error

    cfg = small_config(tmp_path, **REFILLS)
    monkeypatch.setattr(token_graph, "recorded", failing)
    with session_of(cfg) as session:
        rows = session.passes.figures()
        found = rollout_of(session)
        assert session.passes.figures() == rows, "other graphs' memory is no reason for fewer rows"
        cfg.hardware.cuda_graphs = False
        assert_same(found, rollout_of(session))
    full = isinstance(error, torch.OutOfMemoryError)
    assert len(tried) > 1 if full else len(tried) == 1
    assert caplog.text.count("can't be recorded as a CUDA graph") == (not full)
