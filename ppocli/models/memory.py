"""Bytes on each device, on each host and on disk: a page of arithmetic.

Weights, of n parameters, t of them trained, on w ranks, with AdamW. ZeRO (Rajbhandari et al. 2020,
arXiv 1910.02054, section 3) counts 2 + 2 + 12 bytes per parameter in 16 bits; here weights,
gradients and state are fp32, and DeepSpeed steps on a copy of a rank's share of the weights:

===== ================= =============== ============= ========================================
stage weights           gradients       Adam's state  in addition, fp32
===== ================= =============== ============= ========================================
0     4 n               4 t             8 t           4 t of DDP's buckets if w > 1
1     4 n + 4 t / w     4 t             8 t / w       a bucket for reducing gradients
2     4 n + 4 t / w     4 t / w         8 t / w       a bucket for reducing gradients
3     4 (n + t) / w     4 t / w         8 t / w       a bucket, and weights gathered for passes
===== ================= =============== ============= ========================================

Activations: per token, a layer keeps the input and output of each of its linear layers, about half
of that of frozen ones, in the type of products, and the fp32 input of each norm, twice for RMSNorm;
and attention probabilities where the kernel keeps them. With gradient checkpointing a layer keeps
its input alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ppocli.builtin.names import BUILTIN_REWARDS
from ppocli.config import algorithm, sampling, schema, tasks
from ppocli.config.deepspeed import deepspeed_config
from ppocli.distributed.onednn import TORCH, choose_gemm, probe
from ppocli.errors import PpocliError
from ppocli.models.head import CHUNK_BYTES as CHUNK
from ppocli.models.head import DEVICE_CHUNK_BYTES as DEVICE_CHUNK
from ppocli.models.head import KEPT_BYTES
from ppocli.models.kernels import packed_size
from ppocli.models.loading.language_model import DTYPES, frozen_dtype
from ppocli.models.loading.model_config import reference_kind
from ppocli.models.outline import CLASSIFIER, Models, outline
from ppocli.models.trunk import RELATIVE_POSITIONS, num_virtual_tokens, state_width
from ppocli.rewards.resolve import MODEL_REWARDS

QUANTIZED = {"8bit": 1, "4bit": 0.52}
"""bytes of a number: LLM.int8() (arXiv 2208.07339); QLoRA's double quantization (arXiv 2305.14314),
half a byte, with 8 bits of scale for 64 numbers and 32 for 64 * 256"""
STATE = {"adamw": 8, "adamw_8bit": 2, "adafactor": 0, "sgd": 0}
"""bytes of optimizer state per trained number; without Adafactor's sums of rows and columns"""

ACTIVATIONS, KV_CACHE = "activations", "keys and values (KV cache)"
FROZEN = "states of frozen layers"
"""names of lines"""


class Part(NamedTuple):
    """A model whose weights lie in memory during a run; sizes are bytes."""

    name: str
    parameters: int
    size: int
    place: str = "device"
    """``offloaded`` is in host memory while it isn't run; ``host``; ``elsewhere`` isn't counted"""
    trained: int = 0
    """parameters with a gradient and optimizer state"""
    gradients: int = 0
    state: int = 0


class Line(NamedTuple):
    """Bytes of one rank at the fullest moment of each phase."""

    name: str
    rollout: int = 0
    update: int = 0
    host: int = 0


class Rows(NamedTuple):
    """Samples of one rank at a time."""

    update: int
    decoded: int
    accumulates: bool
    """whether an update consists of several micro-batches"""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes that a run takes. ``update`` and ``rollout`` are of one device; ``host`` and
    ``loading``, the time while models are loaded, of all ranks of a host; ``checkpoint``, ``model``
    and ``disk`` of the run folder."""

    parts: tuple[Part, ...]
    unknown: dict[str, str]
    """what is left out, and why"""
    lines: tuple[Line, ...]
    rows: Rows
    rollout: int
    update: int
    host: int
    loading: int
    certain: int
    """of a device without its passes, which can be made smaller"""
    certain_host: int
    checkpoint: int
    model: int
    disk: int


def estimate(cfg: schema.TrainConfig, models: Models, *, prompt_tokens: int, cuda: bool, ranks: int,
             ranks_on_host: int, rewards: bool = True, new_tokens: int | None = None) -> Estimate:
    """What a run of ``cfg`` takes at its fullest.

    Args:
        models: of ``cfg``.
        prompt_tokens: of the longest prompt.
        cuda: whether GPUs compute.
        rewards: whether models of the rewards count.
        new_tokens: of the longest response; in an example the tokens that the loss counts, the
            prompt being those before them (default: ``generation.max_new_tokens``).

    Raises:
        ConfigError: DeepSpeed's file can't be read.
    """
    trained, frozen, unknown = list(_trained(cfg, models)), list[Part](), dict[str, str]()
    makers = {} if tasks.task_name(cfg) in tasks.DATA_TASKS else {
        "reference": partial(_reference, cfg, models.lm)}
    for key, fn, kwargs in schema.rewards_of(cfg.reward) if rewards else ():
        if fn in MODEL_REWARDS and isinstance(kwargs, dict) and "model" in kwargs:
            makers[f"reward {kwargs['model']}"] = partial(
                _reward, cfg.model, f"{key}.kwargs.model", kwargs)
        elif fn is not None and fn not in BUILTIN_REWARDS:
            unknown[f"reward {fn}"] = "your function"
    for name, make in makers.items():
        try:
            frozen += make()
        except PpocliError as error:
            unknown[name] = error.what
    new = sampling.longest_rollout(cfg) if new_tokens is None else new_tokens
    rows = pass_rows(cfg, prompt_tokens + new, ranks)
    weights = list(_weight_lines(cfg, trained, frozen, ranks, cuda=cuda))
    passes = list(_pass_lines(cfg, models, rows, prompt_tokens, new, cuda=cuda, alone=ranks == 1))
    rollout, update, host = (sum(column) for column in zip(*(
        (line.rollout, line.update, line.host) for line in weights + passes), strict=True))
    certain = max(sum(line.rollout for line in weights), sum(line.update for line in weights))
    if not rows.accumulates and not cfg.hardware.zero_stage:  # activations go as gradients come
        update -= min(sum(p.gradients for p in trained), sum(line.update for line in passes))
    loaded = sum(p.size for p in trained + frozen if not p.name.startswith("reward")) * (
        1 if cfg.hardware.zero_stage == 3 else ranks_on_host)
    saved = [(p.gradients if cfg.model.peft and p.name == "policy" else p.size, p.state)
             for p in trained]
    checkpoint = sum(map(sum, saved)) + sum(p.size for p in frozen if p.name == "reference") * bool(
        cfg.model.reference.sync_every)
    keeps = cfg.checkpoint.keep_last + cfg.checkpoint.keep_best + 1
    return Estimate(
        (*trained, *frozen), unknown, tuple(line for line in weights + passes if any(line[1:])),
        rows, rollout, update, ranks_on_host * (host + (0 if cuda else max(rollout, update))),
        loaded, certain, ranks_on_host * (host + (0 if cuda else certain)), checkpoint, saved[0][0],
        keeps * checkpoint + saved[0][0])


def pass_rows(cfg: schema.TrainConfig, tokens: int, ranks: int) -> Rows:
    """Sizes in ``cfg`` are of the whole run, but micro-batch and chunk of one rank.

    Args:
        tokens: of the longest sample.
    """
    updates, task, evaluation = tasks.updates_of(cfg), tasks.task_name(cfg), cfg.prompts.eval
    share, rows = -(-updates.mini_batch_size // ranks), tasks.rows_per_pass(updates)
    if updates.micro_batch_tokens is not None:
        rows = max(1, min(rows, updates.micro_batch_tokens // tokens))
    rows = min(rows, share)
    if task in tasks.DATA_TASKS:  # two rows of a pair
        return Rows(rows * (1 + (task == "reward_model")), -(-cfg.sft.eval_samples // ranks) * (
            task == "sft"), rows < share)
    samples = max(cfg.ppo.num_rollouts, evaluation.limit * evaluation.repeat)
    decoded = min(cfg.ppo.chunk_size or min(cfg.ppo.num_rollouts, 128), -(-samples // ranks))
    return Rows(rows, decoded, rows < share)


# Weights ------------------------------------------------------------------------------------------

def _count(weights: Iterable[Any]) -> int:
    return sum(p.numel() for p in weights)


def _matrices(lm: Any) -> dict[str, Any]:
    """Weights of linear layers by name, the output embedding's apart; of a value branch all."""
    tables = {id(table.weight) for table in (lm.get_input_embeddings(), lm.get_output_embeddings())
              if table is not None} if hasattr(lm, "config") else ()
    return {name: p for name, p in lm.named_parameters() if p.dim() > 1 and id(p) not in tables}


def _trained(cfg: schema.TrainConfig, models: Models) -> Iterator[Part]:
    for name, modules, optimizer in (
            ("policy", [models.lm], tasks.updates_of(cfg).optimizer),
            ("value", [m for m in models[1:] if m], algorithm.value_optimizer(cfg.ppo))):
        if weights := [p for m in modules for p in m.parameters()]:
            trained, size = [p for p in weights if p.requires_grad], sum(p.nbytes for p in weights)
            if cfg.model.quantization and name == "policy":
                size -= sum(int(p.numel() * (p.itemsize - QUANTIZED[cfg.model.quantization]))
                            for p in _matrices(models.lm).values() if not p.requires_grad)
            per_number = 4 if optimizer.name == "sgd" and optimizer.momentum else (
                STATE[optimizer.name])
            # the fp32 master copy of a weight in bf16 has its other half in the state
            yield Part(name, _count(weights), size, "device", _count(trained), sum(
                p.nbytes for p in trained), sum(p.numel() * (per_number + 4 - p.itemsize)
                                                for p in trained))


def _reference(cfg: schema.TrainConfig, lm: Any) -> Iterator[Part]:
    model, where, kind = cfg.model, cfg.model.reference, reference_kind(cfg.model)
    place = "offloaded" if where.offload else {None: "device", "cpu": "host"}.get(
        where.device, "elsewhere")
    if kind == "copy":
        source = replace(model, path=where.path or model.path, revision=None)
        whole = outline(source, "model.reference.path", None if where.path else lm.config)
        yield _frozen("reference", whole.parameters(), frozen_dtype(model, cfg.hardware), place)
    elif kind == "shared":  # initial values of what trains
        yield _frozen("reference", (p for p in lm.parameters() if p.requires_grad),
                      DTYPES[cfg.hardware.weights], place)


def _reward(model: schema.ModelConfig, key: str, kwargs: dict[str, Any]) -> Iterator[Part]:
    source = replace(model, path=str(kwargs["model"]), revision=kwargs.get("revision"),
                     trust_remote_code=bool(kwargs.get("trust_remote_code")))
    yield _frozen(f"reward {source.path}", outline(source, key, auto_class=CLASSIFIER).parameters(),
                  DTYPES.get(str(kwargs.get("dtype")), torch.float32),
                  "host" if kwargs.get("device") == "cpu" else "device")


def _frozen(name: str, weights: Iterable[Any], dtype: torch.dtype, place: str) -> Part:
    return Part(name, number := _count(weights), number * dtype.itemsize, place)


def _weight_lines(cfg: schema.TrainConfig, trained: list[Part], frozen: list[Part], ranks: int, *,
                  cuda: bool) -> Iterator[Line]:
    hardware, stage = cfg.hardware, cfg.hardware.zero_stage
    size, gradients, state = (sum(column) for column in zip(*(
        (p.size, p.gradients, p.state) for p in trained), strict=True))
    share = -(-gradients // ranks)

    def line(name: str, size: int, *, host: bool = False, update_only: bool = False) -> Line:
        return Line(name, 0, 0, size) if host else Line(name, 0 if update_only else size, size)

    yield line("weights", -(-size // ranks) if stage == 3 else size, host=hardware.offload_param)
    for part in frozen:
        divided = part.name == "reference" and algorithm.reference_sharded(cfg)
        if part.place != "elsewhere":
            yield line(part.name, -(-part.size // ranks) if divided else part.size,
                       host=cuda and part.place != "device")
        if divided:  # layer by layer, but for what rollouts gather whole
            whole = algorithm.whole_while_acting(cfg) and reference_kind(cfg.model) == "shared"
            yield Line(f"{part.name} while it runs", part.size if whole else min(
                part.size, _live_numbers(cfg) * (part.size // max(part.parameters, 1))))
        elif cuda and part.place == "offloaded":
            yield Line(f"{part.name} while it runs", part.size)
    offload = hardware.offload_optimizer
    yield line("optimizer state", -(-state // ranks) if stage else state, host=offload)
    # stage 3 keeps the room for gradients
    yield line("gradients", share if stage > 1 else gradients, update_only=stage < 3, host=offload)
    if stage:
        zero = deepspeed_config(cfg)["zero_optimization"]
        bucket = 4 * zero["reduce_bucket_size"]
        yield line("fp32 weights of DeepSpeed", share, host=offload)
        yield line("DeepSpeed's buckets", bucket if cuda else min(bucket, gradients),
                   update_only=stage < 3)  # a CPU has pages for what is written alone
    if stage == 3:
        gathered = min(size, 4 * _live_numbers(cfg))
        yield Line("weights gathered for passes", size if algorithm.whole_while_acting(cfg)
                   else gathered, gathered)
    elif stage == 0 and ranks > 1:
        yield line("DDP's buckets", gradients)


def _live_numbers(cfg: schema.TrainConfig) -> int:
    """Parameters that DeepSpeed gathers at a time under ZeRO 3."""
    return int(deepspeed_config(cfg)["zero_optimization"].get("stage3_max_live_parameters", 10**9))


# Passes -------------------------------------------------------------------------------------------

def _layer_bytes(cfg: schema.TrainConfig, models: Models, prompt: int, new: int, *, cuda: bool
                 ) -> tuple[int, int]:
    """Bytes of one sample that all layers keep for the backward pass, and those of one layer."""
    config, number = models.lm.config, DTYPES[cfg.hardware.precision].itemsize
    relu, pair = "relu" in str([getattr(config, name, "") for name in (
        "hidden_act", "activation_function", "dense_act_fn")]), config.is_encoder_decoder
    virtual, kept, total = num_virtual_tokens(models.lm), 0, 0
    for trunk in [lm for lm in (models.lm, models.value_trunk) if lm is not None]:
        weights, matrices, trains = dict(trunk.named_parameters()), _matrices(trunk), virtual > 0
        for name, weight in weights.items():
            trains |= weight.requires_grad  # below the first that trains nothing is kept
            size = 0
            if name in matrices and "lora_B" not in name:
                wide, narrow = sorted(weight.shape[-2:], reverse=True)
                size = number * (wide + narrow) // (1 if weight.requires_grad else 2)
                # ReLU needs its result alone
                size -= number * wide // 2 * (relu and wide > narrow and weight.requires_grad)
            elif weight.dim() == 1 and name.endswith("weight"):
                size = 4 * len(weight) * (1 if f"{name[:-6]}bias" in weights else 2)
            size *= prompt + new + virtual if not pair else prompt if "encoder." in name else new
            kept, total = kept + size * trains, total + size
    heads = getattr(config, "num_attention_heads", None) or 0
    shares = (getattr(config, "num_key_value_heads", None) or heads) < heads
    probabilities, depth = 0, config.num_hidden_layers
    # CUDA has no fused kernel in fp32 where heads share keys
    if (cfg.model.attn_implementation == "eager" or (cuda and number == 4 and shares)
            or config.model_type in ("bloom", *RELATIVE_POSITIONS)):
        pairs = prompt**2 + new**2 + prompt * new * (1 if pair else 2)
        probabilities = depth * heads * pairs * (4 if number == 4 else 6)
    one = (total + probabilities) // (depth * (1 + pair))
    if cfg.model.gradient_checkpointing:  # of each layer its input
        return depth * (prompt + new) * _state_bytes(models.lm), one
    return kept + probabilities * kept // max(total, 1), one


def _state_bytes(lm: Any) -> int:
    """Bytes of the states of one token between two layers."""
    return state_width(lm) * lm.get_input_embeddings().weight.itemsize


def _cache_bytes(lm: Any, tokens: int, number: int) -> int:
    """Bytes of the keys and values of one sample."""
    config = lm.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None) or 0
    width = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or (
        config.hidden_size // max(heads, 1))
    keys = min(tokens + num_virtual_tokens(lm), getattr(config, "sliding_window", None) or tokens)
    return 2 * config.num_hidden_layers * keys * width * number * (
        getattr(config, "num_key_value_heads", None) or heads)


def _pass_lines(cfg: schema.TrainConfig, models: Models, rows: Rows, prompt: int, new: int, *,
                cuda: bool, alone: bool) -> Iterator[Line]:
    """What passes of one rank take in addition to weights."""
    lm, dtype, stage = models.lm, DTYPES[cfg.hardware.precision], cfg.hardware.zero_stage
    head, number = (lm.get_output_embeddings() or lm.score).weight, dtype.itemsize
    checkpoints, most = cfg.model.gradient_checkpointing, DEVICE_CHUNK if cuda else CHUNK
    kept, one = _layer_bytes(cfg, models, prompt, new, cuda=cuda)
    # autocast copies what trains for each pass; oneDNN decodes from weights in its own order
    copied = [p for p in _matrices(lm).values() if p.requires_grad and p.itemsize > number]
    copies = number * _count(copied)
    packs = not cuda and probe(dtype) is None and choose_gemm(cfg.hardware) != TORCH
    yield Line("copies of weights", max(copies * (stage < 3), packed_size(lm, dtype) * packs),
               copies * (not checkpoints))
    state = _state_bytes(lm) + 12 * state_width(lm) * (models.value_head is not None)
    logits = 4 * rows.update * new * head.shape[0]
    again = logits > KEPT_BYTES  # the backward pass computes them once more
    yield Line(ACTIVATIONS, 0, rows.update * (kept + new * state) + logits * (not again))
    table, half = 4 * head.numel() * head.requires_grad, 2 * head.numel() * (number == 2)
    chunk = min(logits, most)
    yield Line("working memory of updates", 0, half + max(
        chunk * (1 + again), (chunk + table) * again + table,
        checkpoints * (rows.update * one + table)))
    cache = rows.decoded * _cache_bytes(lm, prompt + new, number)
    yield Line(KV_CACHE, cache)
    _, prefill = _layer_bytes(cfg, models, prompt, 1, cuda=False)
    decoding = rows.decoded * max(prefill, 16 * head.shape[0])
    scored = min(rows.update, rows.decoded)
    scoring = scored * one + 2 * min(most, 4 * scored * new * head.shape[0]) - cache
    yield Line("working memory of rollouts", half + max(decoding, scoring))
    if not lm.config.is_encoder_decoder and cfg.model.num_layers_unfrozen >= 0 and (
            alone and stage < 3 and tasks.task_name(cfg) not in tasks.DATA_TASKS):
        states = cfg.ppo.num_rollouts * (prompt + new) * _state_bytes(lm)
        yield Line(FROZEN, *[min(states, cfg.hardware.frozen_states_mib * 2**20)] * 2)
