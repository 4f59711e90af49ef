"""Memory told beforehand, against tensors that are there."""

import gc
import time
from contextlib import ExitStack

import pytest
import torch
from helpers import save_lm, write_prompts
from sessions import (
    estimate_of,
    fresh_state,
    optimize,
    prompt_and_response,
    rollout_of,
    session_of,
    small_config,
)
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, EncoderDecoderCache

from ppocli.estimate.parts import models_of
from ppocli.models.fast.gemm import packed_weights
from ppocli.models.layout import lay_out
from ppocli.models.loading.language_model import DTYPES
from ppocli.models.transformers_internals import cache_name, give_room
from ppocli.models.trunk import virtual_tokens
from ppocli.parallel import onednn
from ppocli.tasks.ppo.step import collect_rollout, to_experience
from ppocli.training.state import Moment, PhaseClock

PROMPT, NEW = 30, 20
SHAPES = {
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 512},
    "llama": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    "gpt_neox": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3,
                 "num_attention_heads": 4},
    "qwen2": {"hidden_size": 64, "num_hidden_layers": 16, "num_attention_heads": 4},
    "t5": {"d_model": 128, "d_kv": 32, "num_heads": 4, "d_ff": 256, "num_layers": 3,
           "num_decoder_layers": 4},
    "bart": {"d_model": 128, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
             "encoder_ffn_dim": 256, "decoder_ffn_dim": 256},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each shape, with a model in it."""
    found = {}
    for kind, shape in SHAPES.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        save_lm(found[kind] / "lm", kind, **shape)
    return found


def kept_of(session) -> int:
    """Bytes that torch's allocator still holds, of those it gave, after the forward pass of a
    micro-batch; then updates once.

    What autograd shows of saved tensors is less: a checkpointed layer's input is held beside them.
    """
    rows, count = session.forward_rows, session.sampling.max_new_tokens
    ids, new = torch.randint(5, 30, (rows, PROMPT)), torch.randint(5, 30, (rows, count))
    batch = lay_out(prompt_and_response(ids, torch.ones_like(ids).bool(), new,
                                        torch.ones_like(new).bool(), session.loaded.decoder_start))
    session.policy.train(session.cfg.model.gradient_checkpointing)
    session.trained.engine(batch, temperature=1.0)  # what is made once is made
    gc.collect()  # what checkpoints of that pass held on to must not go meanwhile
    gc.disable()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = session.trained.engine(batch, temperature=1.0)
    gc.enable()
    loss = out.logprobs.sum()
    (loss if out.values is None else loss + out.values.sum()).backward()
    session.trained.optimizer.step()
    session.policy.eval()
    return sum(event.self_cpu_memory_usage for event in profiled.key_averages())


def cache_of(session) -> int:
    """Bytes of the keys and values of one generate call at its end, and of the encoder's states."""
    lm, rows, new = session.policy.lm, session.chunk_size, session.sampling.max_new_tokens
    cache, encoded = give_room(DynamicCache(config=lm.config), PROMPT + new - 1), 0
    with torch.no_grad(), session.backend.autocast():
        if session.loaded.decoder_start is None:
            words = {"input_ids": torch.ones(rows, PROMPT + new - 1, dtype=torch.long)}
            virtual = virtual_tokens(lm)
            if virtual is not None and virtual.in_cache:
                cache = give_room(virtual.cache(rows), virtual.count + PROMPT + new - 1)
            elif virtual is not None:
                words = {"inputs_embeds": virtual.in_front(
                    lm.get_input_embeddings()(words["input_ids"]))}
            lm.base_model(use_cache=True, **{cache_name(lm.base_model): cache}, **words)
        else:
            cache = EncoderDecoderCache(give_room(DynamicCache(), new), DynamicCache())
            prompts = torch.ones(rows, PROMPT, dtype=torch.long)
            states = lm.get_encoder()(input_ids=prompts).last_hidden_state
            encoded = states.nbytes
            decoder = lm.get_decoder()
            decoder(input_ids=torch.ones(rows, new, dtype=torch.long), use_cache=True,
                    encoder_hidden_states=states, **{cache_name(decoder): cache})
    halves = ([cache] if isinstance(cache, DynamicCache)
              else [cache.self_attention_cache, cache.cross_attention_cache])
    return encoded + sum(layer.keys.nbytes + layer.values.nbytes
                         for half in halves for layer in half.layers)


def reference_of(session) -> int:
    """Bytes of what the reference holds of its own."""
    held = session.reference
    if hasattr(held, "frozen"):
        return sum(t.nbytes for t in held.frozen.values())
    return sum(t.nbytes for t in held.lm.parameters()) if hasattr(held, "lm") else 0


def slow(*case: object) -> object:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "keys"), [
    ("gpt2", {}),
    slow("gpt2", {"hardware__precision": "bf16", "ppo__micro_batch_size": 2}),
    ("gpt2", {"model__gradient_checkpointing": True}),
    slow("llama", {"ppo__micro_batch_size": 3}),
    ("llama", {"hardware__precision": "bf16", "model__num_layers_unfrozen": 2}),
    slow("gpt2", {"hardware__precision": "bf16", "hardware__weights": "bf16"}),
    slow("llama", {"hardware__precision": "bf16", "hardware__weights": "bf16",
                   "model__num_layers_unfrozen": 2}),
    slow("gpt_neox", {"model__attn_implementation": "eager", "ppo__optimizer__name": "sgd"}),
    slow("qwen2", {}),
    # a checkpoint keeps the state of the random numbers too, 5 KB a layer
    slow("qwen2", {"model__gradient_checkpointing": True, "ppo__micro_batch_size": 6}),
    # frozen layers keep nothing, checkpointed or not
    slow("gpt2", {"model__gradient_checkpointing": True, "model__num_layers_unfrozen": 2}),
    ("llama", {"model__peft": {"type": "lora", "r": 4}, "hardware__precision": "bf16"}),
    slow("qwen2", {"model__peft": {"type": "lora"}, "model__gradient_checkpointing": True,
                   "model__dtype": "bf16"}),
    slow("llama", {"model__peft": {"type": "lora"}, "model__reference__kind": "copy",
                   "ppo__optimizer__name": "adafactor"}),
    slow("llama", {"model__peft": {"type": "prefix", "num_virtual_tokens": 5}}),
    slow("gpt2", {"model__peft": {"type": "prompt", "num_virtual_tokens": 5}}),
    ("t5", {}),
    slow("t5", {"hardware__precision": "bf16", "model__num_layers_unfrozen": 1,
                "ppo__micro_batch_size": 2}),
    slow("bart", {"model__gradient_checkpointing": True}),
    slow("gpt2", {"model__value__kind": "branch", "model__value__num_layers_unfrozen": 2,
                  "model__num_layers_unfrozen": 1}),
    slow("llama", {"model__value__kind": "model", "ppo__value_optimizer__name": "adafactor"}),
    slow("gpt2", {"ppo__advantage": "grpo", "ppo__n": 2, "ppo__optimizer__name": "sgd",
                  "ppo__optimizer__momentum": 0.5}),
    slow("gpt2", {"ppo__optimizer__name": "adafactor", "model__reference__offload": True}),
    # longer than attention makes plain products of
    slow("gpt2", {"generation__max_new_tokens": 300, "ppo__micro_batch_size": 2}),
    slow("llama", {"generation__max_new_tokens": 300, "ppo__micro_batch_size": 2,
                   "hardware__precision": "bf16"}),
])
def test_each_kind_of_memory_is_what_the_tensors_of_a_session_take(folders, kind, keys):
    cfg = small_config(folders[kind], **{"generation__max_new_tokens": NEW, **keys})
    with session_of(cfg) as session:
        kept, cache = kept_of(session), cache_of(session)
        policy = list(session.policy.parameters())
        weights = sum(p.nbytes for p in policy)
        # those of weights in bf16 are gone after an update; they are of the weights' type
        gradients = sum((p if p.grad is None else p.grad).nbytes for p in policy if p.requires_grad)
        state = sum(value.nbytes for slots in session.trained.optimizer.state.values()
                    for value in slots.values() if torch.is_tensor(value) and value.dim())
        reference = reference_of(session)
    found = estimate_of(cfg, PROMPT)
    told = {line.name: line.device for line in found.lines}
    assert told["weights"] == weights
    assert told["gradients"] == gradients
    assert told.get("optimizer state", 0) == state
    assert told.get("reference", 0) == reference
    assert not found.unknown
    assert told["keys and values (KV cache)"] == cache
    activations = told["activations"] + told.get("weights in bf16", 0)
    assert activations == pytest.approx(kept, rel=0.2)


@pytest.mark.parametrize(("kind", "keys"), [
    ("gpt2", {}), ("gpt2", {"hardware__precision": "bf16"}), ("llama", {}),
    ("llama", {"hardware__precision": "bf16", "model__num_layers_unfrozen": 2}),
    ("llama", {"model__peft": {"type": "lora", "r": 64}, "hardware__precision": "bf16"}),
    ("t5", {}), ("gpt2", {"hardware__gemm": "default"}),
    ("gpt2", {"hardware__gemm": "default", "hardware__precision": "bf16"})])
def test_the_copy_that_decoding_reads_weights_from_is_told(tmp_path, kind, keys):
    # dimensions that oneDNN, which works in blocks, need not fill up
    inner = {"llama": {"intermediate_size": 384}}.get(kind, {})
    save_lm(tmp_path / "lm", kind, **{**SHAPES[kind], "vocab_size": 128, **inner})
    cfg = small_config(tmp_path, **{"hardware__gemm": "onednn", **keys})
    if cfg.hardware.gemm == "onednn" and onednn.probe(DTYPES[cfg.hardware.precision]) is not None:
        pytest.skip("no oneDNN of this type here")
    with session_of(cfg) as session, ExitStack() as decoding:
        lm = session.policy.lm
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            decoding.enter_context(packed_weights(lm, DTYPES[session.backend.precision]))
        made = sum(event.self_cpu_memory_usage for event in profiled.key_averages())
    lines = {line.name: line for line in estimate_of(cfg, PROMPT).lines}
    line = lines.get("weights laid out for decoding")
    told = 0 if line is None else line.device
    assert (told > 0) == (cfg.hardware.gemm == "onednn")
    assert told == pytest.approx(made, rel=0.01)
    if line is not None:
        assert line.phases == "generate"
    copies = lines.get("weights in bf16 for rollouts")
    if copies is not None:  # autocast's, of what decoding doesn't read from the other copy
        assert copies.phases == ("score" if told else "generate score")


def test_a_copy_for_decoding_that_is_too_large_is_neither_made_nor_told(folders, monkeypatch):
    cfg = small_config(folders["llama"], hardware__gemm="onednn")
    layers = [p for name, p in models_of(cfg).lm.named_parameters() if "layers." in name]
    monkeypatch.setattr("ppocli.models.fast.gemm.PACKED_BYTES",
                        4 * sum(p.numel() for p in layers) // 2)
    with (session_of(cfg) as session,
          packed_weights(session.policy.lm, DTYPES[session.backend.precision])):
        assert not any(getattr(part, "packed", None) is not None
                       for part in session.policy.lm.modules())
    found = estimate_of(cfg, PROMPT)
    assert "weights laid out for decoding" not in {line.name for line in found.lines}


def peaks_of_a_rollout(session) -> dict[str, int]:
    """The most bytes that torch's allocator has given out in each phase of a second rollout, over
    those before it."""
    marks: list[tuple[int, str]] = []
    clock = PhaseClock(session.backend.device, Moment.now(),
                       lambda name: marks.append((time.time_ns(), name)))
    rollout_of(session)  # what is made once is made
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        collect_rollout(session, session.context(clock=clock), 0, session.cfg.ppo.num_rollouts)
    events = [event for event in profiled.profiler.kineto_results.events()
              if event.name() == "[memory]"]
    now, found = 0, dict.fromkeys((name for _, name in marks), 0)
    for event in sorted(events, key=lambda event: event.start_ns()):
        phase = next((name for end, name in marks if event.start_ns() <= end), marks[-1][1])
        now += event.nbytes()
        found[phase] = max(found[phase], now)
    return found


def storage_of(tensors) -> int:
    """Bytes that tensors, which may be parts of one another's memory, lie in."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in tensors if t is not None}.values())


COPY = {"model__reference__kind": "copy"}
FROZEN = "states of frozen layers"


@pytest.mark.long
@pytest.mark.parametrize(("kind", "keys", "samples"), [
    # samples whose states are there as decoding padded them, those that scoring keeps, and updates
    ("llama", {}, (16, 16, 16)), slow("gpt2", {"ppo__chunk_size": 4}, (16, 16, 16)),
    # scored by a forward pass, which keeps its own
    slow("llama", {"hardware__precision": "bf16", "ppo__chunk_size": 4}, (0, 16, 16)),
    ("gpt2", {"ppo__logprobs_from": "forward", **COPY}, (0, 16, 16)),
    slow("gpt2", {"model__value__kind": "model"}, (16, 16, 16)),
    # no pass of the policy's with exact states but those of updates
    ("gpt2", {"hardware__precision": "bf16", "ppo__logprobs_from": "decode", **COPY}, (0, 0, 16)),
    # twice the states, which decoding asks room for, are too much
    slow("gpt2", {"ppo__num_rollouts": 56}, (0, 56, 56)),
    # and once
    slow("gpt2", {"ppo__num_rollouts": 88, "ppo__logprobs_from": "forward", **COPY},
         (0, 0, None))])
def test_states_of_frozen_layers_are_told_as_a_rollout_keeps_them(tmp_path, kind, keys, samples):
    save_lm(tmp_path / "lm", kind, **SHAPES[kind])
    write_prompts(tmp_path / "prompts.jsonl", ["the film plot actor was"] * 8)
    prompt, measured, lines = 5, [], []
    one = 4 * 128 * (prompt + NEW - 1)
    for mib in (1, 0):
        cfg = small_config(tmp_path, **{
            "model__num_layers_unfrozen": 2, "ppo__ppo_epochs": 1,
            "generation__max_new_tokens": NEW, "generation__min_new_tokens": NEW,
            "hardware__frozen_states_mib": mib, **keys})
        with session_of(cfg) as session:
            peaks = peaks_of_a_rollout(session)
            experience = to_experience(rollout_of(session), fresh_state(session), cfg)
            optimize(session, experience)
            measured.append((peaks["rollout"], peaks["scoring"],
                             storage_of(experience.frozen_states)))
        told = [line for line in estimate_of(cfg, prompt).lines if line.name.startswith("states ")]
        lines.append([sum(line.device for line in told if phase in line.phases)
                      for phase in ("generate", "score", "update")])
        own = {line.name: line for line in told if line.name.startswith(FROZEN)}
        assert bool(own) == bool(mib)
        if mib:
            padded, scored, kept = samples
            line = own[FROZEN]
            assert line.device == (2**20 if kept is None else kept * one)
            assert line.phases == ("score update" if scored else "update")
            line = own.get(f"{FROZEN}, padded")
            assert (line is not None) == (padded > 0)
            if line is not None:
                assert line.device == padded * 4 * 128 * (prompt + NEW)
                assert line.phases == "generate score"
    more, less = measured
    told = [a - b for a, b in zip(*lines, strict=True)]
    # the fullest pass of decoding may be the first, before all of them are there
    assert 0 <= more[0] - less[0] < told[0] + 20_000
    assert more[1] - less[1] == pytest.approx(told[1], abs=20_000)
    assert less[2] == 0
    assert 0.9 * lines[0][2] < more[2] <= lines[0][2]


@pytest.mark.parametrize(("kind", "keys", "ranks", "kept"), [
    ("gpt2", {}, 1, True), ("gpt2", {"hardware__zero_stage": 2}, 1, True), ("gpt2", {}, 2, False),
    ("gpt2", {"hardware__frozen_states_mib": 0}, 1, False),
    ("gpt2", {"model__num_layers_unfrozen": -1}, 1, False),
    ("llama", {"model__num_layers_unfrozen": -1, "model__peft": {"type": "lora"}}, 1, False),
    ("llama", {"model__peft": {"type": "lora", "layers_to_transform": [2, 3]},
               "model__num_layers_unfrozen": -1}, 1, True),
    ("gpt2", {"model__value__kind": "branch", "model__value__num_layers_unfrozen": 2}, 1, True),
    ("gpt2", {"model__value__kind": "branch", "model__value__num_layers_unfrozen": 3}, 1, False),
    ("t5", {}, 1, False)])
def test_states_of_frozen_layers_are_told_only_where_they_are_kept(folders, kind, keys, ranks,
                                                                   kept):
    cfg = small_config(folders[kind], **{"model__num_layers_unfrozen": 2, **keys})
    if ranks == 1 and cfg.hardware.zero_stage == 0:
        with session_of(cfg) as session:
            assert bool(session.frozen_states_bytes) == kept
    found = estimate_of(cfg, PROMPT, cuda=True, ranks=ranks)
    line = next((line for line in found.lines if line.name == FROZEN), None)
    assert (line is not None) == kept
    assert line is None or (line.device > 0 and line.host == 0)
