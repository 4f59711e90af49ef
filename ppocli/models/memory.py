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

Activations: per token, a layer keeps the input and output of each of its linear layers, half of
that of frozen ones, in the type of products, and some more for norms; and attention
probabilities where the kernel keeps them. With gradient checkpointing a layer keeps its input.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from ppocli.config import schema, tasks
from ppocli.config.deepspeed import deepspeed_config
from ppocli.distributed.onednn import TORCH, choose_gemm
from ppocli.models.head import CHUNK_BYTES, DEVICE_CHUNK_BYTES, KEPT_BYTES
from ppocli.models.kernels import PACKED_BYTES
from ppocli.models.loading import model_config
from ppocli.models.loading.language_model import DTYPES, frozen_dtype, outline, read_config
from ppocli.models.loading.load_adapters import ValueAdapter, attach, peft_config
from ppocli.models.policy import ValueHead
from ppocli.models.trunk import (
    RELATIVE_POSITIONS,
    freeze_attention,
    freeze_lower_layers,
    layer_stack,
    state_width,
)
from ppocli.runs.checkpoints import value_start

QUANTIZED = {"8bit": 1, "4bit": 0.52}
"""bytes of a number: LLM.int8() (arXiv 2208.07339); QLoRA's double quantization (arXiv 2305.14314),
half a byte, with 8 bits of scale for 64 numbers and 32 for 64 * 256"""
STATE = {"adamw": 8, "adamw_8bit": 2, "adafactor": 0, "sgd": 0}
"""bytes of optimizer state per trained number; without Adafactor's sums of rows and columns"""
VLLM_SHARE = 0.92
"""of a GPU's memory that a vLLM server takes, unless told otherwise"""
NORMS = 1.15
"""activations relative to the inputs and outputs of linear layers"""


class Models(NamedTuple):
    """What a run trains, on torch's meta device; parameters that are frozen in the run are frozen
    here."""

    lm: Any
    value_head: nn.Module | None
    value_trunk: Any
    """a value model's trunk, the layers of a value branch, or a value adapter"""


class Part(NamedTuple):
    """A model whose weights lie in memory during a run; sizes are bytes."""

    name: str
    parameters: int
    size: int
    gradients: int = 0
    state: int = 0
    trained: int = 0
    """parameters with a gradient and optimizer state"""
    place: str = "device"
    """``offloaded`` is in host memory while it isn't run; ``host``; ``elsewhere`` isn't counted"""


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


# Models without weights ---------------------------------------------------------------------------

def _outline(cfg: schema.ModelConfig, key: str, config: Any = None, kind: Any = None,
             dtype: torch.dtype = torch.float32) -> Any:
    config = config or read_config(cfg, key)
    with torch.device("meta"):
        model = outline(cfg, key, config, kind or (
            transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder
            else transformers.AutoModelForCausalLM), dtype=dtype)
    model.tie_weights()
    return model


def models_of(cfg: schema.TrainConfig, config: Any = None) -> Models:
    """What a run of ``cfg`` trains, without weights.

    Args:
        config: of ``model.path``, if it has been read already.

    Raises:
        InputError: a model is missing, transformers can't make a language model of it, or its
            layers can't be told apart.
        ConfigError: the adapter doesn't fit the model.
    """
    model, adapter, value = cfg.model, tasks.adapter_kind(cfg.model), cfg.model.value
    dtype = cfg.hardware.weights if adapter is None else model.dtype or cfg.hardware.precision
    auto, kind = None, value.kind if tasks.needs_critic(cfg) else "none"
    if tasks.task_name(cfg) == "reward_model":
        auto = transformers.AutoModelForSequenceClassification
        config = copy.deepcopy(config or read_config(model, "model.path"))
        config.num_labels = 1
    lm = _outline(model, "model.path", config, auto, DTYPES[dtype])
    model_config.check_text_alone(lm)
    head: Any = None
    trunk: Any = None
    with model_config.loading(f"outline of {model.path}", "model.path"):
        if adapter is not None:
            settings = peft_config(tasks.adapter_settings(model), revision=model.revision,
                                   pair=lm.config.is_encoder_decoder)
            with torch.device("meta"):
                attach(lm, settings, seed=0)
        freeze_lower_layers(lm, model.num_layers_unfrozen)
        if kind == "branch":
            trunk = copy.deepcopy(layer_stack(lm)[-value.num_layers_unfrozen:]).requires_grad_(True)
        elif kind == "adapter":
            trunk = ValueAdapter(lm)
        elif kind == "model":
            key = "model.value.path" if value.path else "model.path"
            trunk = _outline(value_start(model), key, kind=transformers.AutoModel)
            freeze_lower_layers(trunk, value.num_layers_unfrozen)
        if trunk is not None and value.freeze_attention:
            freeze_attention(trunk)
        if kind != "none":
            width = state_width(trunk if kind == "model" else lm)
            with torch.device("meta"):
                head = ValueHead(width, torch.Generator())
    return Models(lm, head, trunk)


# The arithmetic -----------------------------------------------------------------------------------

def estimate(cfg: schema.TrainConfig, models: Models, *, prompt_tokens: int, cuda: bool, ranks: int,
             ranks_on_host: int, new_tokens: int | None = None, device_bytes: int | None = None
             ) -> Estimate:
    """What a run of ``cfg`` takes at its fullest, without its rewards.

    Args:
        models: of ``cfg``.
        prompt_tokens: of the longest prompt.
        cuda: whether GPUs compute.
        new_tokens: of the longest response; in an example the tokens that the loss counts, the
            prompt being those before them (default: ``generation.max_new_tokens``).
        device_bytes: of the whole GPU, if that is known: a share of it is a server's that the run
            starts on it.

    Raises:
        ConfigError: DeepSpeed's file can't be read.
        InputError: the reference is missing.
    """
    trained, frozen = list(_trained(cfg, models)), list(_reference(cfg, models.lm))
    new = tasks.longest_rollout(cfg) if new_tokens is None else new_tokens
    rows, stage = pass_rows(cfg, prompt_tokens + new, ranks), cfg.hardware.zero_stage
    weights = list(_weight_lines(cfg, trained, frozen, ranks, cuda=cuda))
    if cfg.rollout.launch and cuda and device_bytes is not None:
        weights.append(_server_line(cfg, models.lm, device_bytes))
    passes = list(_pass_lines(cfg, models, rows, prompt_tokens, new, cuda=cuda))
    certain = max(sum(line.rollout for line in weights), sum(line.update for line in weights))
    lines = weights + passes
    rollout, update, host = (sum(line.rollout for line in lines),
                             sum(line.update for line in lines), sum(line.host for line in lines))
    if not rows.accumulates and not stage:  # activations go as gradients come
        update -= min(sum(part.gradients for part in trained), sum(line.update for line in passes))
    loaded = sum(part.size for part in trained + frozen) * (1 if stage == 3 else ranks_on_host)
    model = trained[0].gradients if cfg.model.peft else trained[0].size
    checkpoint = model + trained[0].state + sum(part.size + part.state for part in trained[1:]) + (
        sum(part.size for part in frozen) if cfg.model.reference.sync_every else 0)
    keeps = cfg.checkpoint.keep_last + cfg.checkpoint.keep_best + 1
    return Estimate((*trained, *frozen), tuple(x for x in lines if any(x[1:])),
                    rows, rollout, update,
                    ranks_on_host * (host + (0 if cuda else max(rollout, update))), loaded, certain,
                    ranks_on_host * (host + (0 if cuda else certain)), checkpoint, model,
                    keeps * checkpoint + model)


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


def _count(weights: Iterable[Any]) -> int:
    return sum(p.numel() for p in weights)


def _matrices(lm: Any) -> dict[str, Any]:
    """Weights of linear layers by name, those of embeddings apart; of a value branch all."""
    tables = {id(table.weight) for table in (lm.get_input_embeddings(), lm.get_output_embeddings())
              if table is not None} if hasattr(lm, "config") else ()
    return {name: p for name, p in lm.named_parameters() if p.dim() > 1 and id(p) not in tables}


def _trained(cfg: schema.TrainConfig, models: Models) -> Iterator[Part]:
    for name, modules, optimizer in (
            ("policy", [models.lm], tasks.updates_of(cfg).optimizer),
            ("value", [m for m in models[1:] if m], tasks.value_optimizer(cfg.ppo))):
        if weights := [p for m in modules for p in m.parameters()]:
            trained, size = [p for p in weights if p.requires_grad], sum(p.nbytes for p in weights)
            if cfg.model.quantization and name == "policy":
                size -= sum(int(p.numel() * (p.itemsize - QUANTIZED[cfg.model.quantization]))
                            for p in _matrices(models.lm).values() if not p.requires_grad)
            per_number = 4 if optimizer.name == "sgd" and optimizer.momentum else (
                STATE[optimizer.name])
            # the fp32 master copy of a weight in bf16 has its other half in the state
            yield Part(name, _count(weights), size, sum(p.nbytes for p in trained),
                       sum(p.numel() * (per_number + 4 - p.itemsize) for p in trained),
                       _count(trained))


def _reference(cfg: schema.TrainConfig, lm: Any) -> Iterator[Part]:
    model, where, kind = cfg.model, cfg.model.reference, model_config.reference_kind(cfg.model)
    place = "offloaded" if where.offload else {None: "device", "cpu": "host"}.get(
        where.device, "elsewhere")
    if kind not in ("shared", "copy") or tasks.task_name(cfg) in tasks.DATA_TASKS:
        return
    if kind == "shared":  # initial values of what trains
        weights, dtype = [p for p in lm.parameters() if p.requires_grad], \
            DTYPES[cfg.hardware.weights]
    else:
        source = replace(model, path=where.path or model.path, revision=None)
        weights = list(_outline(source, "model.reference.path",
                                None if where.path else lm.config).parameters())
        dtype = frozen_dtype(model, cfg.hardware)
    yield Part("reference", number := _count(weights), number * dtype.itemsize, place=place)


def _weight_lines(cfg: schema.TrainConfig, trained: list[Part], frozen: list[Part], ranks: int, *,
                  cuda: bool) -> Iterator[Line]:
    hardware, stage = cfg.hardware, cfg.hardware.zero_stage
    size, gradients = sum(part.size for part in trained), sum(part.gradients for part in trained)
    state = sum(part.state for part in trained)
    share = -(-gradients // ranks)

    def line(name: str, size: int, *, host: bool = False, update_only: bool = False) -> Line:
        return Line(name, 0, 0, size) if host else Line(name, 0 if update_only else size, size)

    yield line("weights", -(-size // ranks) if stage == 3 else size, host=hardware.offload_param)
    for part in frozen:
        size_here = part.size * (part.place != "elsewhere")
        if tasks.reference_sharded(cfg):
            size_here = -(-part.size // ranks)
        on_host = size_here * (cuda and part.place != "device")
        yield Line(part.name, size_here * (part.place == "offloaded" or not on_host),
                   size_here * (not on_host), on_host)
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
        gathered = min(size, 4 * int(zero.get("stage3_max_live_parameters", 10**9)))
        yield Line("weights gathered for passes", size if tasks.whole_while_acting(cfg)
                   else gathered, gathered)
    elif stage == 0 and ranks > 1:
        yield line("DDP's buckets", gradients)


def _server_line(cfg: schema.TrainConfig, lm: Any, device_bytes: int) -> Line:
    """What a vLLM server takes. One that sleeps gives all of it back; where an adapter is sent, its
    weights stay in host memory."""
    typed = re.search(r"--gpu[-_]memory[-_]utilization[ =]([\d.]+)",
                      " ".join(cfg.rollout.server_args))
    share = int(device_bytes * (float(typed[1]) if typed else VLLM_SHARE))
    sleeps, base = cfg.rollout.sleep, DTYPES[cfg.hardware.precision].itemsize * _count(
        lm.parameters())
    return Line("vLLM server", share, 0 if sleeps else share,
                base if sleeps and cfg.model.peft else 0)


def _activations(cfg: schema.TrainConfig, models: Models, prompt: int, new: int) -> int:
    """Bytes of one sample that all layers keep for the backward pass."""
    config, number, kept = models.lm.config, DTYPES[cfg.hardware.precision].itemsize, 0
    pair, depth = config.is_encoder_decoder, config.num_hidden_layers
    if cfg.model.gradient_checkpointing:  # of each layer its input
        return 4 * depth * (prompt + new) * state_width(models.lm)
    # a value adapter's pass runs the policy's model again
    value = models.lm if isinstance(models.value_trunk, ValueAdapter) else models.value_trunk
    for trunk in [lm for lm in (models.lm, value) if lm is not None]:
        matrices, trains = _matrices(trunk), False
        for name, weight in trunk.named_parameters():
            trains |= weight.requires_grad  # below the first that trains nothing is kept
            if name in matrices and trains:
                tokens = prompt + new if not pair else prompt if "encoder." in name else new
                kept += NORMS * number * tokens * sum(weight.shape[-2:]) / (
                    1 if weight.requires_grad else 2)
    if cfg.model.attn_implementation == "eager" or config.model_type in RELATIVE_POSITIONS:
        pairs = prompt**2 + new**2 + prompt * new * (1 if pair else 2)
        kept += depth * config.num_attention_heads * pairs * (4 if number == 4 else 6)
    return int(kept)


def _pass_lines(cfg: schema.TrainConfig, models: Models, rows: Rows, prompt: int, new: int, *,
                cuda: bool) -> Iterator[Line]:
    """What passes of one rank take in addition to weights."""
    lm, number, width = models.lm, DTYPES[cfg.hardware.precision].itemsize, state_width(models.lm)
    head, text = (lm.get_output_embeddings() or lm.score).weight, lm.config.get_text_config(
        decoder=True)
    # autocast copies what trains for each pass; oneDNN decodes from weights in its own order
    copied, packed = (number * _count(p for p in _matrices(lm).values() if every or (
        p.requires_grad and p.itemsize > number)) for every in (False, True))
    packs = not cuda and packed <= PACKED_BYTES and choose_gemm(cfg.hardware) != TORCH
    yield Line("copies of weights", max(copied, packed * packs), copied)
    kept, logits = _activations(cfg, models, prompt, new), 4 * rows.update * new * head.shape[0]
    one, again = kept // text.num_hidden_layers, logits > KEPT_BYTES  # computed once more
    yield Line("activations", 0, logits * (not again) + rows.update * (
        kept + 4 * new * width * (1 + 3 * (models.value_head is not None))))
    chunk = min(logits, DEVICE_CHUNK_BYTES if cuda else CHUNK_BYTES)
    yield Line("working memory of updates", 0,
               chunk * (1 + again) + 4 * head.numel() * head.requires_grad)
    heads = getattr(text, "num_attention_heads", None) or 1
    depth = getattr(text, "head_dim", None) or getattr(text, "d_kv", None) or (
        text.hidden_size // heads)
    keys = min(prompt + new, getattr(text, "sliding_window", None) or 2**31)
    decodes = cfg.rollout.engine != "vllm"
    cache = decodes * rows.decoded * 2 * text.num_hidden_layers * keys * depth * number * (
        getattr(text, "num_key_value_heads", None) or heads)
    yield Line("keys and values (KV cache)", cache)
    scoring = min(rows.update, rows.decoded) * one + chunk - cache
    yield Line("working memory of rollouts",
               max(decodes * rows.decoded * 16 * head.shape[0], scoring))
    if cfg.model.num_layers_unfrozen >= 0 and tasks.task_name(cfg) not in tasks.DATA_TASKS:
        states = min(cfg.ppo.num_rollouts * (prompt + new) * 4 * width,
                     cfg.hardware.frozen_states_mib * 2**20)
        yield Line("states of frozen layers", states, states)
