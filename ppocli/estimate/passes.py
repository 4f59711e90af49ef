"""What passes take beside weights, a formula for each phase, from the widths of a model's layers.

Of a layer with width D, queries of width A, keys and values of width K each, H heads and an MLP of
width I, whose residual stream has s bytes a number and whose products have c, the backward pass
needs, for each of the tokens that see S others,

======================= =========================================================================
norms                   s D of its input, and as much of what RMSNorm has normalised
inputs of linear layers c D where they read the same tensor; in bf16 each of them casts its own
attention               c (2 A + 2 K), and c H S where its kernel keeps probabilities
MLP                     2 c I; gated 4 c I; with ReLU c I
======================= =========================================================================

which is how Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) count, with the types and
kernels of these passes. Layers below the first that trains keep nothing, checkpointed ones their
input. Passes without gradients hold one layer's tensors at a time. The tests hold all of it against
what torch's allocator gave out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ppocli.config.schema import TrainConfig
from ppocli.estimate.parts import Models
from ppocli.models.fast.attention import SHORT
from ppocli.models.head import CHUNK_BYTES, KEPT_BYTES
from ppocli.models.layer_stack import layer_stack
from ppocli.models.trunk import RELATIVE_POSITIONS, has_encoder, num_virtual_tokens, virtual_tokens

MEASURED = frozenset({"gpt2", "llama", "mistral", "qwen2", "qwen3", "gpt_neox", "opt", "bloom",
                      "bart", "t5"})
"""kinds of models whose passes have been measured"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of passes."""

    rows: int
    prompt: int
    """tokens of the longest prompt"""
    new: int
    """tokens of the longest response"""
    compute: int
    """bytes of a number in products"""
    stream: int
    """bytes of a number in the residual stream"""
    cuda: bool
    attention: str | None
    """``model.attn_implementation``"""

    @property
    def casts(self) -> bool:
        """Whether autocast computes in bf16."""
        return self.compute == 2


def is_measured(lm: Any) -> bool:
    """Whether what passes of such a model take has been measured."""
    return lm.config.model_type in MEASURED


def stream_bytes(lm: Any, *, cuda: bool) -> int:
    """Bytes of a number in the residual stream: as embeddings are, unless CUDA's autocast makes
    fp32 of them in a norm right behind."""
    normed = any("embed" in name and "norm" in name for name, _ in lm.named_modules())
    return 4 if normed and cuda else int(lm.get_input_embeddings().weight.element_size())


class Projection(NamedTuple):
    """A linear layer."""

    inputs: int
    outputs: int
    kept: bool
    """whether its input is needed in the backward pass: its weight trains, or an adapter's does"""


class Block(NamedTuple):
    """Attention or an MLP: what reads the residual stream, and what writes to it."""

    readers: list[Projection]
    writer: Projection

    @property
    def shared(self) -> int:
        """Width of keys and values together; of an MLP what is gated."""
        return sum(p.outputs for p in self.readers) - self.writer.inputs

    @property
    def grouped(self) -> bool:
        """Whether several heads share keys."""
        return self.shared < 2 * self.writer.inputs


class Layer(NamedTuple):
    """A layer's widths."""

    blocks: dict[str, Block]
    """``attention``, ``cross`` (to an encoder) and ``mlp``"""
    norms: list[tuple[int, bool, bool]]
    """(width, whether RMSNorm, whether it trains) of each"""
    trains: bool

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return max(width for width, _, _ in self.norms) if self.norms else 0


def read_layer(module: nn.Module) -> Layer:
    """The widths of a layer, from the shapes and the names of what it is made of."""
    from transformers.pytorch_utils import Conv1D

    found: dict[str, list[Projection]] = {}
    norms = []
    for name, part in module.named_modules():
        kind = "cross" if "enc" in name.lower() else "attention" if "att" in name.lower() else "mlp"
        weight: Any = getattr(part, "weight", None)
        if "lora_A" in name and isinstance(part, nn.Linear):
            found[kind][-1] = found[kind][-1]._replace(kept=True)
        elif "lora_" not in name and isinstance(part, (nn.Linear, Conv1D)):
            inputs, outputs = weight.shape if isinstance(part, Conv1D) else weight.shape[::-1]
            found.setdefault(kind, []).append(Projection(inputs, outputs, weight.requires_grad))
        elif "norm" in type(part).__name__.lower() and weight is not None:
            rms = getattr(part, "bias", None) is None
            norms.append((weight.numel(), rms, weight.requires_grad))
    blocks = {kind: Block(linear[:-1], linear[-1]) for kind, linear in found.items()}
    return Layer(blocks, norms, any(p.requires_grad for p in module.parameters()))


class Stack(NamedTuple):
    """Layers of the same passes."""

    layers: list[Layer]
    queries: int
    """tokens of a row that run through them"""
    keys: int
    """tokens of a row that those attend to"""
    encoded: int
    """tokens of a row that an encoder beside them made"""
    trained: list[Layer]
    """those that gradients run through"""


def stacks(lm: Any, at: Sizes, *, whole: bool = True) -> Iterator[Stack]:
    """The layers of a model's decoder, and of its encoder. A trunk whose layers can't be told apart
    is one.

    Args:
        whole: over prompt and response; else over the prompt, in generation.
    """
    pair, virtual, before = has_encoder(lm), num_virtual_tokens(lm), virtual_tokens(lm)
    lists = []
    try:
        lists.append((list(layer_stack(lm)), at.new if pair else at.prompt))
    except ValueError:
        lists.append(([lm.base_model], at.prompt))
    if pair:
        inside = (m for m in lm.get_encoder().modules() if isinstance(m, nn.ModuleList))
        lists.append((list(next(inside)), at.prompt))
    above = virtual > 0 or lm.get_input_embeddings().weight.requires_grad
    for number, (modules, tokens) in enumerate(lists):
        keys = tokens + virtual + (at.new - 1 if whole and not pair else 0)
        queries = keys - (virtual if before is not None and before.in_cache else 0)
        layers = [read_layer(module) for module in modules]
        first = next((i for i, layer in enumerate(layers) if layer.trains), len(layers))
        yield Stack(layers, queries, keys, at.prompt if pair and not number else 0,
                    layers[0 if above and not number else first:])


# Training -----------------------------------------------------------------------------------------

def training_pass(cfg: TrainConfig, models: Models, at: Sizes, *, copies: int
                  ) -> tuple[int, int]:
    """Bytes of one micro-batch: those that lie there between its forward and its backward pass, and
    most that lies there beside them.

    Args:
        copies: bytes of the weights that autocast copies to bf16.
    """
    kept = _kept_by_heads(models, at)
    largest = 0
    checkpoints = cfg.model.gradient_checkpointing
    found = [(lm, stack) for lm in (models.lm, models.value_lm) if lm is not None
             for stack in stacks(lm, at)]
    if models.branch is not None:
        own = [read_layer(module) for module in models.branch]
        found.append((models.lm, found[0][1]._replace(layers=own, trained=own)))
    for lm, stack in found:
        for layer in stack.trained:
            size = at.rows * _kept_by_layer(layer, lm, at, stack)
            largest = max(largest, size)
            kept += 0 if checkpoints else size
        stream = at.rows * stack.queries * stack.layers[0].width * at.stream
        # what is checkpointed holds on to its input, even where it is frozen; a norm follows, and
        # in an encoder-decoder one goes before or holds the encoder's states
        kept += stream * (len(stack.layers) * checkpoints
                          + bool(stack.trained) * (1 + has_encoder(lm)))
    # a checkpointed pass gives its copies back at its end
    return kept, _beside_updates(cfg, models, at, largest, copies if checkpoints else 0)


def _cast(weight: torch.Tensor, at: Sizes) -> int:
    """Bytes of the copy that a pass in bf16 makes of a weight."""
    return 2 * weight.numel() if at.casts and weight.element_size() == 4 else 0


def _logits(models: Models, at: Sizes) -> int:
    """Bytes of the fp32 logits of all response tokens of a pass."""
    return 4 * at.rows * at.new * models.lm.get_output_embeddings().weight.shape[0]


def _kept_by_heads(models: Models, at: Sizes) -> int:
    """The output embedding's states, and logits where they are few (:mod:`ppocli.models.head`);
    those of the value head, in fp32."""
    samples, logits = at.rows * at.new, _logits(models, at)
    width = models.lm.get_output_embeddings().weight.shape[1]
    kept = samples * width * at.stream + (logits if logits <= KEPT_BYTES else 0)
    if models.value_head is not None:
        matrices = [p.shape for p in models.value_head.parameters() if p.dim() == 2]
        own = at.stream < 4 or len(models.value_modules) > 1
        kept += 4 * samples * (sum(outputs for outputs, _ in matrices) + own * matrices[0][1])
    return kept


def _kept_by_layer(layer: Layer, lm: Any, at: Sizes, stack: Stack) -> int:
    """Bytes of one row."""
    kept, attention = 0, layer.blocks.get("attention")
    for size, rms, trains in layer.norms:
        # in the middle of attention there is one of queries and one of keys, over each head
        width = size if size == layer.width or attention is None else (
            attention.writer.inputs // 2 + attention.shared // 4)
        first = 4 if rms or (at.cuda and at.casts) else at.stream
        kept += stack.queries * width * (first + (at.stream if rms and trains else 0))
    for kind, block in layer.blocks.items():
        inputs = [p.inputs for p in block.readers if p.kept]
        if kind == "cross":  # the encoder's states are the same for all layers
            kept += at.compute * stack.queries * max(inputs, default=0)
            kept += at.casts * at.compute * stack.encoded * sum(inputs[1:])
        else:
            kept += at.compute * stack.queries * (
                sum(inputs) if at.casts else max(inputs, default=0))
        kept += (_kept_by_mlp(block, lm, at, stack) if kind == "mlp" else
                 _kept_by_attention(block, lm, at, stack, cross=kind == "cross"))
    return kept


def _kept_by_mlp(block: Block, lm: Any, at: Sizes, stack: Stack) -> int:
    inner, gated = block.writer.inputs, block.shared > 0
    names = ("activation_function", "hidden_act", "dense_act_fn", "hidden_activation")
    kind = str(next((v for name in names if (v := getattr(lm.config, name, None))), ""))
    if gated or "relu" not in kind:
        # what enters the activation, what is gated, and what comes out
        numbers = inner + block.shared + inner * (gated + block.writer.kept)
    else:  # its result will do; T5 casts it to the type of the next weight and back
        numbers = inner * (1 + (at.casts and _relative(lm)))
    return at.compute * stack.queries * numbers


def _kept_by_attention(block: Block, lm: Any, at: Sizes, stack: Stack, *, cross: bool) -> int:
    width, keys = block.writer.inputs, stack.encoded if cross else stack.keys
    read = stack.queries * width + keys * block.shared
    kept = at.compute * (read + stack.queries * width)
    pairs = _heads(lm) * stack.queries * keys
    each = _probability(lm, at, keys, block)
    if _relative(lm) and at.casts and at.stream == 4 and not cross:  # as their positions: in fp32
        return kept + 4 * pairs + 2 * read
    if each and at.cuda and not at.casts and block.grouped:  # once for each head
        kept += 4 * keys * (2 * width - block.shared)
    return kept + pairs * each


def _probability(lm: Any, at: Sizes, keys: int, block: Block, *, masked: bool = False) -> int:
    """Bytes that attention keeps for each query and key, of each head; 0 where its kernel computes
    them anew."""
    if at.attention == "eager" or lm.config.model_type == "bloom":
        return 6 if at.casts else 4
    if _relative(lm):
        return at.compute
    ours = not at.cuda and at.attention is None and not has_encoder(lm)
    if ours and keys <= SHORT[torch.bfloat16 if at.casts else torch.float32]:
        return at.compute
    # no fused kernel of CUDA shares keys among heads in fp32
    return 4 if at.cuda and not at.casts and block.grouped and not masked else 0


def _heads(lm: Any) -> int:
    return int(getattr(lm.config, "num_attention_heads", 1))


def _relative(lm: Any) -> bool:
    return lm.config.model_type in RELATIVE_POSITIONS


def _rotary(lm: Any) -> bool:
    """Whether queries and keys are turned by their positions; in bf16 that gives fp32."""
    return any("rotary" in type(m).__name__.lower() for m in lm.modules())


def _beside_updates(cfg: TrainConfig, models: Models, at: Sizes, largest: int, copies: int
                    ) -> int:
    """Most that lies beside what is kept: chunks of logits, gradients of the output embedding, or a
    checkpointed layer that is run again.

    Args:
        largest: bytes that one layer keeps.
        copies: bytes of weights in bf16 that are gone by the backward pass.
    """
    head, logits = models.lm.get_output_embeddings().weight, _logits(models, at)
    chunk, several, again = min(logits, CHUNK_BYTES), logits > CHUNK_BYTES, logits > KEPT_BYTES
    copied = _cast(head, at)
    forward = copied + chunk * (1 + again + 2 * (cfg.ppo.ent_coef > 0))
    backward = copied + (chunk // 2 if at.casts else chunk * again)
    table = 4 * head.numel() if head.requires_grad else 0
    backward += table * (1 + several) + at.casts * table // 2
    if cfg.model.gradient_checkpointing:
        # by then logits are gone, but not the gradient of a table that words are looked up in, too
        tied = head is models.lm.get_input_embeddings().weight
        backward = max(backward, largest + table * tied - (0 if again else logits))
    return max(copies + forward, backward)


def may_take_onednn(cfg: TrainConfig, cuda: bool) -> bool:
    """Whether linear layers may multiply through oneDNN (``auto`` measures that first)."""
    return not cuda and cfg.hardware.gemm != "default"


# Without gradients --------------------------------------------------------------------------------

def decoding_pass(lm: Any, at: Sizes, *, copied: int) -> tuple[int, int]:
    """Bytes of one generate call: keys and values of all samples at their full length, with the
    states of an encoder, and most that lies there beside them.

    Args:
        copied: bytes of the output embedding in bf16 that are kept between steps.
    """
    head = lm.get_output_embeddings().weight
    stack = next(stacks(lm, at))
    pair, cache, encoded = has_encoder(lm), 0, 0
    window = getattr(lm.config, "sliding_window", None) or stack.keys
    # values take the type of keys
    each = at.stream if _rotary(lm) else at.compute
    for layer in stack.layers:
        if "attention" in layer.blocks:
            cache += at.rows * min(stack.keys, window) * layer.blocks["attention"].shared * each
        if "cross" in layer.blocks:
            encoded += at.rows * at.prompt * layer.blocks["cross"].shared * at.compute
    states = at.rows * at.prompt * head.shape[1] * at.stream
    if pair:  # which has ended when keys and values grow
        encoded += states
        first = max(_largest_layer(lm, at, whole=False) - encoded, 2 * states)
    else:
        first = _largest_layer(lm, at, whole=False)
    logits = at.rows * head.shape[0]
    # fp32 logits, those that are restricted, and two tensors that are drawn from
    chosen = max(16 * logits, _cast(head, at) + 2 * logits)
    return cache + encoded, copied + max(first, states * (not pair) + chosen)


def scoring_pass(models: Models, at: Sizes) -> int:
    """Bytes that a forward pass takes without gradients."""
    head = models.lm.get_output_embeddings().weight
    chunk = min(_logits(models, at), CHUNK_BYTES)
    tokens = at.new if has_encoder(models.lm) else at.prompt + at.new - 1
    layers = max(_largest_layer(lm, at) for lm in (models.lm, models.value_lm) if lm is not None)
    return max(layers, at.rows * tokens * head.shape[1] * at.stream + 2 * chunk + _cast(head, at)
               + at.casts * chunk // 2)


def _largest_layer(lm: Any, at: Sizes, *, whole: bool = True) -> int:
    """Most bytes of the tensors of one layer: its residual stream in four places, and either those
    of the MLP, or of attention with its probabilities twice, where positions are added to them more
    often."""
    most, eager = 0, at.attention == "eager" or lm.config.model_type == "bloom"
    for stack in stacks(lm, at, whole=whole):
        for layer in stack.layers:
            inside = [0]
            for kind, block in layer.blocks.items():
                each = 0 if kind == "mlp" else max(
                    _probability(lm, at, stack.keys, block, masked=not whole), 4 * _relative(lm))
                copies = 2 + (block.shared > 0) if kind == "mlp" or each else 0
                inside.append(copies * block.writer.inputs * at.compute
                              + (4 if eager else 2) * each * _heads(lm) * stack.keys)
            most = max(most, at.rows * stack.queries * (
                4 * layer.width * at.stream + max(inside)))
    return most
