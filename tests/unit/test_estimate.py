"""Memory told beforehand: against tensors that are there, and against sums made by hand."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from helpers import model_config, save_lm
from sessions import session_of, set_keys, small_config

from ppocli.config.schema import ModelConfig, TrainConfig
from ppocli.errors import InputError, OutOfMemoryError
from ppocli.estimate.check import bound, check_memory, judge, shown
from ppocli.estimate.estimate import Estimate, estimate
from ppocli.estimate.machine import Room, host_room
from ppocli.estimate.memory import Layout, add_up, disk_of, layout_of, lines_of
from ppocli.estimate.parts import Part, outline, own_functions, parts_of
from ppocli.estimate.trace import DecodingPass, TrainingPass, training_pass, weightless
from ppocli.models.layout import lay_out

PROMPT, NEW = 30, 20
SHAPES = {
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_head": 4},
    "llama": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt_neox": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3,
                 "num_attention_heads": 4},
    "qwen2": {"hidden_size": 64, "num_hidden_layers": 16, "num_attention_heads": 4},
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
    """Bytes of what autograd saves in one forward pass of a micro-batch, and of the one chunk of
    logits that the head keeps."""
    rows = session.forward_rows
    ids, new = torch.randint(5, 30, (rows, PROMPT)), torch.randint(5, 30, (rows, NEW))
    batch = lay_out(ids, torch.ones_like(ids).bool(), new, torch.ones_like(new).bool())
    ours = {t.untyped_storage().data_ptr()
            for t in (*session.policy.parameters(), *session.policy.buffers())}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            saved[storage.data_ptr()] = storage
        return tensor

    session.policy.train(session.cfg.model.gradient_checkpointing)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = session.engine(batch, temperature=1.0)
    kept = sum(storage.nbytes() for storage in saved.values())
    (out.logprobs.sum() + out.values.sum()).backward()
    session.optimizer.step()
    session.policy.eval()
    vocabulary = session.policy.lm.get_output_embeddings().weight.shape[0]
    return kept + 4 * rows * NEW * vocabulary


def cache_of(session) -> int:
    """Bytes of the keys and values of one generate call at its end."""
    from transformers import DynamicCache

    lm = session.policy.lm
    cache = DynamicCache(config=lm.config)
    ids = torch.ones(session.chunk_size, PROMPT + NEW - 1, dtype=torch.long)
    with torch.no_grad(), session.backend.autocast():
        lm.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.parametrize(("kind", "keys"), [
    ("gpt2", {}),
    ("gpt2", {"hardware__precision": "bf16", "ppo__micro_batch_size": 2}),
    ("gpt2", {"model__gradient_checkpointing": True}),
    ("llama", {"ppo__micro_batch_size": 3}),
    ("llama", {"hardware__precision": "bf16", "model__num_layers_unfrozen": 2}),
    ("llama", {"model__gradient_checkpointing": True, "model__num_layers_unfrozen": 2}),
    ("gpt_neox", {"model__attn_implementation": "eager", "ppo__optimizer__name": "sgd"}),
    ("gpt_neox", {"model__gradient_checkpointing": True, "hardware__precision": "bf16",
                  "model__dtype": "fp32"}),
    ("qwen2", {}),
    ("qwen2", {"model__gradient_checkpointing": True, "ppo__micro_batch_size": 2}),
])
def test_each_kind_of_memory_is_what_the_tensors_of_a_session_take(folders, kind, keys):
    cfg = small_config(folders[kind], generation__max_new_tokens=NEW, **keys)
    with session_of(cfg) as session:
        kept, cache = kept_of(session), cache_of(session)
        policy = list(session.policy.parameters())
        weights = sum(p.nbytes for p in policy)
        gradients = sum(p.grad.nbytes for p in policy if p.grad is not None)
        state = sum(value.nbytes for slots in session.optimizer.state.values()
                    for value in slots.values() if torch.is_tensor(value) and value.dim())
        held = session.reference
        reference = sum(t.nbytes for t in (held.frozen.values() if hasattr(held, "frozen")
                                           else held.lm.parameters()))
    found = estimate(cfg, outline(cfg.model), prompt_tokens=PROMPT, cuda=False, ranks=1,
                     ranks_on_host=1)
    told = {line.name: line.device for line in found.lines}
    assert told["weights"] == weights
    assert told["gradients"] == gradients
    assert told.get("optimizer state", 0) == state
    assert told["reference"] == reference
    assert told["keys and values (KV cache)"] == cache
    activations = told["activations"] + told.get("weights in bf16", 0)
    assert activations == pytest.approx(kept, rel=0.15)


def test_the_outline_counts_what_a_gpt2_has():
    layers, width, words, places = 3, 32, 50, 64
    config = model_config("gpt2", n_layer=layers, n_embd=width, vocab_size=words)
    policy = outline(ModelConfig(path="x", num_layers_unfrozen=1), config)
    cfg = set_keys(TrainConfig(), {"model.dtype": "bf16", "model.reference.kind": "copy"})
    parts = {part.kind: part for part in parts_of(cfg, policy)}
    layer = 12 * width**2 + 13 * width  # four matrices with biases, two norms
    trunk = words * width + places * width + layers * layer + 2 * width
    head = 2 * width**2 + 2 * width + 2 * width + 1
    assert all(p.is_meta for p in policy.parameters())
    assert parts["policy"].parameters == trunk
    assert parts["policy"].trained == layer + 2 * width
    assert parts["policy"].cast == 12 * width**2
    assert (parts["value"].parameters, parts["value"].trained) == (head, head)
    assert (parts["reference"].parameters, parts["reference"].stored) == (trunk, 2 * trunk)
    assert "reward" not in parts


def test_a_classifier_among_the_rewards_is_a_part_and_a_function_is_unknown():
    cfg = set_keys(TrainConfig(), {"reward.fns": {
        "mood": {"fn": "classifier", "kwargs": {"model": "builtin:reviews-sentiment"}},
        "own": {"fn": "my_rewards:score"}, "brief": {"fn": "length"}}})
    parts = parts_of(cfg, outline(ModelConfig(path="builtin:reviews")))
    assert [(p.name, p.parameters, p.trained) for p in parts if p.kind == "reward"] == [
        ("reward builtin:reviews-sentiment", 360_002, 0)]
    assert own_functions(cfg) == ["my_rewards:score"]


def test_a_missing_model_is_named():
    with pytest.raises(InputError, match="nowhere"):
        outline(ModelConfig(path="./nowhere"))


def test_layers_beyond_those_that_are_run_count_like_those():
    passes = []
    for layers in (12, 24):
        policy = outline(ModelConfig(path="x"), model_config("llama", num_hidden_layers=layers))
        with weightless(policy):
            passes.append(training_pass(policy, rows=2, tokens=40, responses=20, bf16=False,
                                        cuda=False, temperature=1.0, want_entropy=False))
    config = model_config("llama", num_hidden_layers=12)
    policy = outline(ModelConfig(path="x", gradient_checkpointing=True), config)
    with weightless(policy):
        one = training_pass(policy, rows=1, tokens=40, responses=20, bf16=False, cuda=False,
                            temperature=1.0, want_entropy=False)
    # all of it but rotary tables and indices grows with rows, most of it with layers
    assert passes[0].kept == pytest.approx(2 * one.kept, rel=0.02)
    assert 1.9 < passes[1].kept / passes[0].kept < 2.0


# n = 1000 parameters, t = 800 trained, on w = 4 ranks, two on a host
PARTS = (Part(kind="policy", name="policy", parameters=900, trained=700, sharded=True, cast=600,
              largest=200),
         Part(kind="value", name="value head", parameters=100, trained=100, sharded=True,
              largest=50),
         Part(kind="reference", name="reference", parameters=900, bytes_each=2))
LAYOUT = Layout(ranks=4, ranks_on_host=2, cuda=True, rows=2, decoded=4, accumulates=True)
TRAINING, DECODING = TrainingPass(5000, 10, 300), DecodingPass(2000, 70)


def added(stage: int, layout: Layout = LAYOUT, **hardware: object):
    cfg = set_keys(TrainConfig(), {"hardware.zero_stage": stage,
                                   **{f"hardware.{k}": v for k, v in hardware.items()}})
    lines = lines_of(cfg, PARTS, layout, TRAINING, DECODING,
                     {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 300})
    return ({line.name: (line.device, line.host) for line in lines},
            add_up(lines, PARTS, layout, stage=stage))


def test_one_process_holds_everything():
    lines, sums = added(0, replace(LAYOUT, ranks=1, ranks_on_host=1))
    assert lines == {
        "weights": (4000, 0), "reference": (1800, 0), "optimizer state": (6400, 0),
        "gradients": (3200, 0), "activations": (5000, 0), "working memory of updates": (300, 0),
        "keys and values (KV cache)": (2000, 0), "working memory of rollouts": (70, 0)}
    assert sums.rollout == 4000 + 1800 + 6400 + 2000 + 70
    assert sums.update == 4000 + 1800 + 6400 + 3200 + 5000 + 300
    assert (sums.host, sums.loading) == (0, 4000)


def test_without_accumulation_activations_make_room_for_gradients():
    alone = replace(LAYOUT, ranks=1, ranks_on_host=1, accumulates=False)
    assert added(0, alone)[1].update == 4000 + 1800 + 6400 + (5000 + 300)
    lines = lines_of(TrainConfig(), PARTS, alone, TrainingPass(100, 0, 10), DECODING, {})
    assert add_up(lines, PARTS, alone, stage=0).update == 4000 + 1800 + 6400 + (3200 + 4 * 200)


def test_ddp_holds_its_buckets_beside():
    lines, sums = added(0)
    assert lines["DDP's buckets of gradients"] == (3200, 0)
    assert sums.loading == 2 * 4000


@pytest.mark.parametrize(("stage", "own"), [
    (1, {"weights": 4000, "weights DeepSpeed steps on": 800, "gradients": 3200}),
    (2, {"weights": 4000, "weights DeepSpeed steps on": 800, "gradients": 800}),
    (3, {"weights": 1000, "gradients": 800, "weights gathered in a pass": 4 * 300,
         "weights gathered for rollouts": 4000})])
def test_zero_divides_what_its_stage_says(stage, own):
    lines, sums = added(stage)
    assert lines == {
        **{name: (size, 0) for name, size in own.items()}, "reference": (1800, 0),
        "optimizer state": (1600, 0), "DeepSpeed's bucket of gradients": (4000, 0),
        "activations": (5000, 0), "working memory of updates": (300, 0),
        "keys and values (KV cache)": (2000, 0), "working memory of rollouts": (70, 0)}
    assert sums.loading == 2 * 4000


def test_offloading_moves_bytes_to_the_host():
    lines, sums = added(3, offload_optimizer=True, offload_param=True)
    assert lines["weights"] == (0, 1000)
    assert lines["weights DeepSpeed steps on"] == (0, 800)
    assert lines["optimizer state"] == (0, 1600)
    assert lines["gradients"] == (0, 800)
    assert sums.host == 2 * (1000 + 800 + 1600 + 800)
    lines, _ = added(2, offload_optimizer=True)
    assert lines["weights"] == (4000, 0)
    assert lines["DeepSpeed's buffers of one gradient"] == (800, 800)


def test_on_a_cpu_device_and_host_are_one():
    _, sums = added(0, replace(LAYOUT, cuda=False))
    assert sums.host == 2 * sums.device


def test_a_rank_works_on_its_share():
    cfg = set_keys(TrainConfig(), {"ppo.num_rollouts": 512, "ppo.mini_batch_size": 64,
                                   "ppo.micro_batch_size": 6, "prompts.eval.limit": 10})
    first = layout_of(cfg, ranks=8, ranks_on_host=4, cuda=True)
    assert (first.rows, first.decoded, first.accumulates) == (6, 64, True)
    cfg = set_keys(cfg, {"ppo.micro_batch_size": None, "ppo.chunk_size": 16})
    whole = layout_of(cfg, ranks=8, ranks_on_host=4, cuda=True)
    assert (whole.rows, whole.decoded, whole.accumulates) == (8, 16, False)


def test_disk_is_weights_and_state():
    disk = disk_of(TrainConfig(), PARTS)
    assert (disk.checkpoint, disk.model) == (4000 + 6400, 3600)
    assert disk.run == 4 * disk.checkpoint + disk.model  # two newest, the best, one being written


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


def found_of(size: int) -> Estimate:
    _, sums = added(0)
    return Estimate(PARTS, LAYOUT, (), replace(sums, rollout=0, update=size, host=0, loading=0),
                    disk_of(TrainConfig(), PARTS), 8, 8, ())


def test_what_surely_does_not_fit_is_refused_and_what_is_close_is_warned_of(caplog):
    cfg, room = TrainConfig(), Room(1000 * 2**20, 2**40, "card")
    with caplog.at_level(logging.WARNING, "ppocli"):
        judge(cfg, found_of(900 * 2**20), room)
        assert not caplog.records
        judge(cfg, found_of(1100 * 2**20), room)
        assert "needs about 1.07 GiB of memory on card, and 1000 MiB are free" in caplog.text
        caplog.clear()
        with pytest.raises(OutOfMemoryError, match=r"1\.15 GiB of memory on card") as error:
            judge(cfg, found_of(1180 * 2**20), room)
        assert "hardware.memory_check=warn" in str(error.value)
        judge(set_keys(cfg, {"hardware.memory_check": "warn"}), found_of(2**40), room)
        assert "Memory is short" in caplog.text


def test_a_small_model_is_settled_without_running_it_and_the_check_can_be_off(caplog):
    config = model_config("gpt2")
    cfg = set_keys(TrainConfig(), {"model.path": "x"})
    policy = outline(cfg.model, config)
    parts = parts_of(cfg, policy)
    layout = layout_of(cfg, ranks=1, ranks_on_host=1, cuda=False)
    most = bound(cfg, policy, parts, layout, 20)
    found = estimate(cfg, policy, prompt_tokens=20, cuda=False, ranks=1, ranks_on_host=1)
    assert found.sums.device < most < 2**30
    with caplog.at_level(logging.INFO, "ppocli"):
        check_memory(cfg, config, prompt_tokens=20, device=torch.device("cpu"), ranks=1,
                     ranks_on_host=1)
        off = set_keys(cfg, {"hardware.memory_check": "off"})
        check_memory(off, None, prompt_tokens=20, device=torch.device("cpu"), ranks=1,
                     ranks_on_host=1)
    assert not caplog.records


@pytest.mark.parametrize("kind", list(SHAPES))
def test_the_bound_is_one(kind):
    config = model_config(kind, **SHAPES[kind])
    cfg = set_keys(TrainConfig(), {"model.path": "x", "hardware.precision": "bf16"})
    policy = outline(cfg.model, config)
    parts = parts_of(cfg, policy)
    layout = layout_of(cfg, ranks=1, ranks_on_host=1, cuda=True)
    most = bound(cfg, policy, parts, layout, 30)
    found = estimate(cfg, policy, prompt_tokens=30, cuda=True, ranks=1, ranks_on_host=1)
    assert found.sums.device < most


def test_bytes_are_told_with_three_digits():
    assert [shown(n) for n in (2048, 5 * 2**20, 1234 * 2**30)] == ["2 KiB", "5 MiB", "1234 GiB"]
