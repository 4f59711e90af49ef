"""Estimated memory against tensors that are there, and against sums made by hand."""

import logging

import pytest
import torch
from helpers import model_config, save_lm
from sessions import (
    estimate_of,
    experience_of,
    optimize,
    rollout_of,
    session_of,
    set_keys,
    small_config,
)
from torch.profiler import ProfilerActivity, profile

from ppocli.config.schema import TrainConfig
from ppocli.distributed.host_memory import Room, host_room
from ppocli.errors import OutOfMemoryError
from ppocli.models.memory_check import refuse_or_warn

SHAPES = {"gpt2": {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 256},
          "llama": {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 704,
                    "num_attention_heads": 4, "num_key_value_heads": 2,
                    "max_position_embeddings": 256},
          "t5": {"num_layers": 4, "num_decoder_layers": 4, "d_model": 256, "d_kv": 64,
                 "num_heads": 4, "d_ff": 1024}}
LORA = {"model__peft": {"type": "lora", "r": 8}}


def peak_of(work) -> int:
    """The most bytes that torch's allocator gave out during the work, over those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    now = most = 0
    for event in sorted((e for e in profiled.profiler.kineto_results.events()
                         if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.long
@pytest.mark.parametrize(("kind", "keys"), [
    ("llama", LORA), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("gpt2", {}), ("t5", {}), ("gpt2", {"model__num_layers_unfrozen": 2}),
        ("llama", {"model__value__kind": "model"}),
        ("llama", {**LORA, "model__value__kind": "adapter"}),
        ("llama", {"model__gradient_checkpointing": True})))])
def test_rollouts_and_updates_take_within_a_quarter_of_the_estimate(tmp_path, kind, keys):
    save_lm(tmp_path / "lm", kind, gain=1.0, vocab_size=4000, **SHAPES[kind])
    cfg = small_config(tmp_path, ppo__num_rollouts=16, ppo__mini_batch_size=16, ppo__ppo_epochs=1,
                       generation__max_new_tokens=24, generation__min_new_tokens=24, **keys)
    needed = estimate_of(cfg, 8)
    with session_of(cfg) as session:
        experience = experience_of(session)
        optimize(session, experience)  # makes the optimizer's state
        reference = getattr(session.reference, "lm", None)
        weights = [*session.policy.parameters(), *(reference.parameters() if reference else [])]
        weights += getattr(session.reference, "frozen", {}).values()
        state = [value for slots in session.trained.optimizer.state.values()
                 for value in slots.values() if torch.is_tensor(value)]
        resident = sum(t.nbytes for t in [*weights, *state])
        update = peak_of(lambda: optimize(session, experience))
        rollout = peak_of(lambda: rollout_of(session, start=16))
    assert needed.update == pytest.approx(resident + update, rel=0.25)
    assert needed.rollout == pytest.approx(resident + rollout, rel=0.25)
    assert sum(part.size + part.state for part in needed.parts) == pytest.approx(
        resident, abs=2000)  # but for what counts steps


# Sums by hand -------------------------------------------------------------------------------------

# embeddings of input and output, and a norm; in each layer two norms, q and o, k and v for one head
# of two, and the three matrices of an MLP
WORDS, WIDTH, INNER, LAYERS = 100, 32, 48, 2
LAYER = 2 * WIDTH + 2 * WIDTH**2 + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * INNER
POLICY = 2 * WORDS * WIDTH + WIDTH + LAYERS * LAYER
VALUE = WIDTH * 2 * WIDTH + 2 * WIDTH + 2 * WIDTH + 1
N = POLICY + VALUE


def config_of(**keys) -> TrainConfig:
    return set_keys(TrainConfig(), {"model.path": "x", **{
        key.replace("__", "."): value for key, value in keys.items()}})


LLAMA = model_config("llama", vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=INNER,
                     num_hidden_layers=LAYERS)


def lines_of(ranks: int = 1, *, cuda: bool = True, whole: int | None = None, **keys):
    needed = estimate_of(config_of(**keys), 8, LLAMA, cuda=cuda, ranks=ranks, device_bytes=whole)
    return {line.name: line[1:] for line in needed.lines}, needed


@pytest.mark.parametrize(("stage", "weights", "gradients", "state", "extra"), [
    (0, 4 * N, 4 * N, 8 * N, {"DDP's buckets": (4 * N, 4 * N, 0)}),
    (1, 4 * N, 4 * N, 2 * N, {"fp32 weights of DeepSpeed": (N, N, 0)}),
    (2, 4 * N, N, 2 * N, {"fp32 weights of DeepSpeed": (N, N, 0)}),
    (3, N, N, 2 * N, {"fp32 weights of DeepSpeed": (N, N, 0), "reference": (POLICY, POLICY, 0),
                      "weights gathered for passes": (4 * N, 4 * N, 0)})])
def test_zero_divides_by_four_ranks_what_its_stage_says(stage, weights, gradients, state, extra):
    lines, needed = lines_of(4, hardware__zero_stage=stage)
    assert [part.parameters for part in needed.parts] == [POLICY, VALUE, POLICY]
    assert lines["weights"] == (weights, weights, 0)
    assert lines["gradients"] == (gradients if stage == 3 else 0, gradients, 0)
    assert lines["optimizer state"] == (state, state, 0)
    assert lines.items() >= {"reference": (4 * POLICY, 4 * POLICY, 0), **extra}.items()
    assert needed.loading == (1 if stage == 3 else 4) * (4 * N + 4 * POLICY)
    assert needed.host == 0
    # two newest checkpoints, the best and one being written
    assert (needed.model, needed.checkpoint) == (4 * POLICY, 12 * N)
    assert needed.disk == 4 * 12 * N + 4 * POLICY


def test_a_server_on_the_same_gpu_holds_its_share_unless_it_sleeps():
    served = {"rollout__engine": "vllm", "rollout__launch": True, "whole": 10**9}
    args = {"rollout__server_args": ["--gpu-memory-utilization", "0.4"]}
    share, default = 4 * 10**8, int(10**9 * 0.92)
    assert lines_of(**served)[0]["vLLM server"] == (default, default, 0)
    lines, awake = lines_of(**served, **args)
    assert lines["vLLM server"] == (share, share, 0)
    assert "keys and values (KV cache)" not in lines
    lines, asleep = lines_of(**served, **args, rollout__sleep=True)
    assert lines["vLLM server"] == (share, 0, 0)
    assert awake.update - asleep.update == share
    adapted = lines_of(**served, **args, rollout__sleep=True, **LORA,
                       model__reference__kind="adapter")[0]["vLLM server"]
    assert adapted[:2] == (share, 0)
    assert 4 * POLICY < adapted[2] < 4.5 * POLICY
    assert "vLLM server" not in lines_of(**{**served, "whole": None})[0]


# The check before a run ---------------------------------------------------------------------------

def test_only_what_is_certain_is_refused_and_what_is_close_is_warned_of(caplog):
    _, needed = lines_of()
    device = max(needed.rollout, needed.update)
    assert needed.certain == 16 * N + 4 * POLICY < device
    for free, refused in ((needed.certain - 1, True), (needed.certain, False),
                          (int(device / 0.89), False)):
        room = Room(free, 2**40, "card")
        if refused:
            with pytest.raises(OutOfMemoryError, match="memory on card") as error:
                refuse_or_warn(TrainConfig(), needed, room)
            assert "ppo.micro_batch_size=1" in str(error.value)
            assert "hardware.memory_check=warn" in str(error.value)
        with caplog.at_level(logging.WARNING, "ppocli"):
            refuse_or_warn(config_of(hardware__memory_check="warn"), needed, room)
        assert ("Memory is short: this run needs about" in caplog.text) == (free < device)
        caplog.clear()


def test_free_memory_is_that_of_the_tightest_group(tmp_path):
    assert host_room() > 2**26
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert host_room(tmp_path) == 8000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in (("max", "max"), ("current", "5000"), ("stat", "anon 1\ninactive_file 700")):
        (group / f"memory.{name}").write_text(f"{text}\n")
    assert host_room(tmp_path) == 8000 * 1024
    (group / "memory.max").write_text("6000\n")
    assert host_room(tmp_path) == 6000 - 5000 + 700
