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

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ppocli.config.schema import TrainConfig
from ppocli.estimate.parts import Models
from ppocli.models.fast.attention import SHORT
from ppocli.models.head import ALIGNED, CHUNK_BYTES, DEVICE_CHUNK_BYTES, KEPT_BYTES
from ppocli.models.layer_stack import layer_stack
from ppocli.models.transformers_internals import conv1d
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


class Block(NamedTuple):
    """Attention or an MLP: what reads the residual stream, and what writes to it."""

    inputs: list[int]
    """of each reader whose input is needed in the backward pass: its weight trains, or an
    adapter's does"""
    inner: int
    """width of what the writer reads"""
    shared: int
    """width of keys and values together; of an MLP what is gated"""
    written_kept: bool
    """whether what the writer reads is needed in the backward pass"""


class Layer(NamedTuple):
    """A layer's widths."""

    blocks: dict[str, Block]
    """``attention``, ``cross`` (to an encoder) and ``mlp``"""
    norms: list[tuple[int, bool, bool]]
    """(width, whether RMSNorm, whether it trains) of each"""
    width: int
    """of the residual stream"""
    trains: bool


def read_layer(module: nn.Module) -> Layer:
    """The widths of a layer, from the shapes and the names of what it is made of."""
    found: dict[str, list[tuple[int, int, bool]]] = {}
    norms = []
    for name, part in module.named_modules():
        kind = "cross" if "enc" in name.lower() else "attention" if "att" in name.lower() else "mlp"
        weight: Any = getattr(part, "weight", None)
        if "lora_A" in name and isinstance(part, nn.Linear):
            found[kind][-1] = (*found[kind][-1][:2], True)
        elif "lora_" not in name and isinstance(part, (nn.Linear, conv1d())):
            inputs, outputs = weight.shape[::-1] if isinstance(part, nn.Linear) else weight.shape
            found.setdefault(kind, []).append((inputs, outputs, weight.requires_grad))
        elif "norm" in type(part).__name__.lower() and weight is not None:
            rms = getattr(part, "bias", None) is None
            norms.append((weight.numel(), rms, weight.requires_grad))
    blocks = {}
    for kind, (*readers, (inner, _, kept)) in found.items():
        shared = sum(outputs for _, outputs, _ in readers) - inner
        blocks[kind] = Block([inputs for inputs, _, needed in readers if needed], inner, shared,
                             kept)
    return Layer(blocks, norms, max((width for width, _, _ in norms), default=0),
                 any(p.requires_grad for p in module.parameters()))


class Stack(NamedTuple):
    """Layers of the same passes."""

    lm: Any
    """that they are of"""
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
    try:
        modules = list(layer_stack(lm))
    except ValueError:
        modules = [lm.base_model]
    lists = [(modules, at.new if pair else at.prompt)]
    if pair:
        inside = (m for m in lm.get_encoder().modules() if isinstance(m, nn.ModuleList))
        lists.append((list(next(inside)), at.prompt))
    above = virtual > 0 or lm.get_input_embeddings().weight.requires_grad
    for number, (modules, tokens) in enumerate(lists):
        keys = tokens + virtual + (at.new - 1 if whole and not pair else 0)
        queries = keys - (virtual if before is not None and before.in_cache else 0)
        layers = [read_layer(module) for module in modules]
        first = next((i for i, layer in enumerate(layers) if layer.trains), len(layers))
        yield Stack(lm, layers, queries, keys, at.prompt if pair and not number else 0,
                    layers[0 if above and not number else first:])


# Training -----------------------------------------------------------------------------------------

def training_pass(cfg: TrainConfig, models: Models, at: Sizes, *, copies: int) -> tuple[int, int]:
    """Bytes of one micro-batch: those that lie there between its forward and its backward pass, and
    most that lies there beside them: chunks of logits, gradients of the output embedding, or a
    checkpointed layer that is run again.

    Args:
        copies: bytes of the weights that autocast copies to bf16.
    """
    kept, largest, checkpoints = _kept_by_heads(models, at), 0, cfg.model.gradient_checkpointing
    found = [stack for lm in models.trunks for stack in stacks(lm, at)]
    if models.branch is not None:
        own = [read_layer(module) for module in models.branch]
        found.append(found[0]._replace(layers=own, trained=own))
    for stack in found:
        for layer in stack.trained:
            size = at.rows * _kept_by_layer(layer, at, stack)
            largest = max(largest, size)
            kept += 0 if checkpoints else size
        stream = at.rows * stack.queries * stack.layers[0].width * at.stream
        # what is checkpointed holds on to its input, even where it is frozen; a norm follows, and
        # in an encoder-decoder one goes before or holds the encoder's states
        kept += stream * (len(stack.layers) * checkpoints
                          + bool(stack.trained) * (1 + has_encoder(stack.lm)))
    head, logits = models.head.weight, _logits(models, at)
    chunk, table = _chunk(models, at), 4 * head.numel() if head.requires_grad else 0
    again = logits > KEPT_BYTES  # the backward pass computes them once more
    forward = chunk * (1 + again) + copies * checkpoints  # which give them back at its end
    backward = chunk * again + table * (1 + (logits > chunk)) + chunk // 2 * at.casts
    return kept, _cast(head, at) + max(forward, backward, checkpoints * (largest + table))


def _cast(weight: torch.Tensor, at: Sizes) -> int:
    """Bytes of the copy that a pass in bf16 makes of a weight."""
    copied = weight.element_size() == 4 or (at.cuda and weight.shape[0] % ALIGNED)
    return 2 * weight.numel() if at.casts and copied else 0


def _logits(models: Models, at: Sizes) -> int:
    """Bytes of the fp32 logits of all response tokens of a pass."""
    return 4 * at.rows * at.new * models.head.weight.shape[0]


def _chunk(models: Models, at: Sizes) -> int:
    """Bytes of those of them that are there at a time."""
    return min(_logits(models, at), DEVICE_CHUNK_BYTES if at.cuda else CHUNK_BYTES)


def _kept_by_heads(models: Models, at: Sizes) -> int:
    """The output embedding's states, and logits where they are few (:mod:`ppocli.models.head`);
    those of the value head, in fp32."""
    samples, logits = at.rows * at.new, _logits(models, at)
    width = models.head.weight.shape[1]
    kept = samples * width * at.stream + (logits if logits <= KEPT_BYTES else 0)
    if models.value_head is not None:
        kept += 4 * samples * sum(p.shape[0] for p in models.value_head.parameters()
                                  if p.dim() == 2)
    return kept


def _kept_by_layer(layer: Layer, at: Sizes, stack: Stack) -> int:
    """Bytes of one row."""
    kept, lm, attention = 0, stack.lm, layer.blocks.get("attention")
    for size, rms, trains in layer.norms:
        # in the middle of attention there is one of queries and one of keys, over each head
        width = size if size == layer.width or attention is None else (
            attention.inner + attention.shared // 2) // 2
        first = 4 if rms or (at.cuda and at.casts) else at.stream
        kept += stack.queries * width * (first + (at.stream if rms and trains else 0))
    for kind, block in layer.blocks.items():
        kept += at.compute * stack.queries * (
            sum(block.inputs) if at.casts else max(block.inputs, default=0))
        if kind != "mlp":
            keys = stack.encoded if kind == "cross" else stack.keys
            kept += at.compute * (2 * stack.queries * block.inner + keys * block.shared)
            kept += _heads(lm) * stack.queries * keys * _probability(lm, at, keys, block)
        elif block.shared > 0 or "relu" not in str([getattr(lm.config, name, "") for name in (
                "activation_function", "hidden_act", "dense_act_fn", "hidden_activation")]):
            # what enters the activation, what is gated, and what comes out
            kept += at.compute * stack.queries * (block.inner + block.shared + block.inner * (
                (block.shared > 0) + block.written_kept))
        else:  # the result of a ReLU will do
            kept += at.compute * stack.queries * block.inner
    return kept


def _probability(lm: Any, at: Sizes, keys: int, block: Block, *, masked: bool = False) -> int:
    """Bytes that attention keeps for each query and key, of each head; 0 where its kernel computes
    them anew."""
    if at.attention == "eager" or lm.config.model_type == "bloom":
        return 6 if at.casts else 4
    if lm.config.model_type in RELATIVE_POSITIONS:
        return 4
    ours = not at.cuda and at.attention is None and not has_encoder(lm)
    if ours and keys <= SHORT[torch.bfloat16 if at.casts else torch.float32]:
        return at.compute
    # no fused kernel of CUDA shares keys among heads in fp32
    shares = block.shared < 2 * block.inner
    return 4 if at.cuda and not at.casts and shares and not masked else 0


def _heads(lm: Any) -> int:
    return int(getattr(lm.config, "num_attention_heads", 1))


# Without gradients --------------------------------------------------------------------------------

def decoding_pass(lm: Any, at: Sizes) -> tuple[int, int]:
    """Bytes of one generate call: keys and values of all samples at their full length, with the
    states of an encoder, and most that lies there beside them."""
    head = lm.get_output_embeddings().weight
    stack = next(stacks(lm, at))
    cache, encoded = 0, 0
    window = getattr(lm.config, "sliding_window", None)
    # in transformers' own layers values take the type of keys, which in bf16 their positions'
    # rotation makes fp32
    rotary = window and any("rotary" in type(m).__name__.lower() for m in lm.modules())
    element = at.stream if rotary else min(at.stream, at.compute)
    for layer in stack.layers:
        if "attention" in layer.blocks:
            cache += (at.rows * min(stack.keys, window or stack.keys)
                      * layer.blocks["attention"].shared * element)
        if "cross" in layer.blocks:
            encoded += at.rows * at.prompt * layer.blocks["cross"].shared * at.compute
    states = at.rows * at.prompt * head.shape[1] * at.stream
    # a copy of the head, fp32 logits, those that are restricted, and two tensors to draw from
    chosen = _cast(head, at) + 16 * at.rows * head.shape[0]
    if has_encoder(lm):  # which has ended when keys and values grow
        return cache + encoded + states, max(
            2 * states, chosen, _largest_layer(lm, at, whole=False) - encoded - states)
    return cache, max(states + chosen, _largest_layer(lm, at, whole=False))


def scoring_pass(models: Models, at: Sizes) -> int:
    """Bytes that a forward pass takes without gradients."""
    head = models.head.weight
    chunk = _chunk(models, at)
    tokens = at.new if has_encoder(models.lm) else at.prompt + at.new - 1
    layers = max(_largest_layer(lm, at) for lm in models.trunks)
    return max(layers, at.rows * tokens * head.shape[1] * at.stream + 2 * chunk + _cast(head, at))


def _largest_layer(lm: Any, at: Sizes, *, whole: bool = True) -> int:
    """Most bytes of the tensors of one layer: its residual stream in four places, and either those
    of the MLP, or of attention with its probabilities twice."""
    most = 0
    for stack in stacks(lm, at, whole=whole):
        for layer in stack.layers:
            inside = [0]
            for kind, block in layer.blocks.items():
                each = 0 if kind == "mlp" else _probability(lm, at, stack.keys, block,
                                                            masked=not whole)
                copies = 2 + (block.shared > 0) if kind == "mlp" or each else 0
                inside.append(copies * block.inner * at.compute
                              + 2 * each * _heads(lm) * stack.keys)
            most = max(most, at.rows * stack.queries * (4 * layer.width * at.stream + max(inside)))
    return most
