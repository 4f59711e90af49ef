"""What one pass of a model keeps in memory, found by running it on tensors that have none.

The model's own code runs, as the engine calls it, on torch's fake tensors: shapes, types and the
autograd graph are real, no number is computed. Every storage is counted from its making to its end,
so attention kernels, gradient checkpointing, autocast and unusual architectures are as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ppocli.estimate.storages import LiveBytes, computing, like_device
from ppocli.models.layer_stack import layer_stack
from ppocli.models.layout import SequenceBatch
from ppocli.models.policy import Policy
from ppocli.models.trunk import has_encoder
from ppocli.models.value_function import ValueBranch, ValueModel
from ppocli.models.virtual_tokens import virtual_tokens
from ppocli.sampling.token_choice import SamplingSpec, choose

SHALLOW, DEEP = 4, 8
"""layers that are run of a deep model; each further one adds as much as one between these"""
FULL = SHALLOW + DEEP
"""models of at most so many layers are run whole"""

@dataclass(frozen=True, slots=True)
class TrainingPass:
    """Bytes of one micro-batch, weights apart."""

    kept: int
    """alive between forward and backward: activations, and copies of weights in bf16"""
    forward: int
    """most that is alive beside them before; with checkpointing copies in bf16 are among it"""
    backward: int
    """most that is alive beside them later; a weight's gradient counts until it is complete"""

    @property
    def working(self) -> int:
        """Most that is alive beside what is kept."""
        return max(self.forward, self.backward)


@dataclass(frozen=True, slots=True)
class DecodingPass:
    """Bytes of one generate call, weights apart."""

    cache: int
    """keys and values of all samples at their full length"""
    working: int
    """most that is alive beside them"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one pass."""

    rows: int
    prompt: int
    """tokens of the longest prompt"""
    new: int
    """tokens of the longest response"""
    bf16: bool
    cuda: bool
    """whether a GPU is meant"""


@contextmanager
def weightless(policy: Policy) -> Iterator[FakeTensorMode]:
    """``policy``, an outline on the meta device, with fake tensors in place of its own inside;
    must not be used for anything else afterwards."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        made: dict[int, Any] = {}
        for module in policy.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    # the old one is kept, or another could get its id
                    made[id(parameter)] = (parameter, nn.Parameter(
                        torch.empty(parameter.shape, dtype=parameter.dtype),
                        requires_grad=parameter.requires_grad))
                module._parameters[name] = made[id(parameter)][1]
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        tokens = virtual_tokens(policy.lm)
        if tokens is not None:
            tokens.forget_values()
        yield mode




# Depth --------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class _Stack:
    """Layers of which only the uppermost few have to be run."""

    parent: nn.Module
    name: str
    layers: nn.ModuleList
    depth: int
    """of how many the result is wanted"""


def _stacks(policy: Policy, *, training: bool) -> list[_Stack]:
    """The stacks of a policy's model and of a value model whose layers are all alike; none where
    layers depend on each other (an encoder-decoder, a branch): those are run whole."""
    trunk = policy.value_trunk
    if has_encoder(policy.lm) or isinstance(trunk, ValueBranch):
        return []
    found = []
    for lm in [policy.lm, *([trunk.lm] if isinstance(trunk, ValueModel) else [])]:
        try:
            layers = layer_stack(lm)
        except ValueError:
            continue
        keeping = _keeping(lm, layers) if training and not policy.training else len(layers)
        for parent in lm.base_model.modules():
            for name, child in parent.named_children():
                if child is layers and keeping is not None:
                    found.append(_Stack(parent, name, layers, keeping))
    return found


def _keeping(lm: Any, layers: nn.ModuleList) -> int | None:
    """How many of the uppermost layers keep something for the backward pass, and one; None if that
    differs among those."""
    trains = [any(p.requires_grad for p in layer.parameters()) for layer in layers]
    inside = {id(p) for p in layers.parameters()}
    below = any(p.requires_grad and id(p) not in inside for m in lm.modules()
                if isinstance(m, nn.Embedding) for p in m.parameters())
    if below or not any(trains):
        # what follows the stack trains, or virtual tokens before it
        return len(layers) if below else 1
    first = trains.index(True)
    return min(len(layers) - first + 1, len(layers)) if all(trains[first:]) else None


@contextmanager
def _cut(stacks: list[_Stack], counts: list[int]) -> Iterator[None]:
    """Each stack with only its uppermost layers."""
    with ExitStack() as back:
        for stack, count in zip(stacks, counts, strict=True):
            stack.parent._modules[stack.name] = nn.ModuleList(list(stack.layers)[-count:])
            back.callback(stack.parent._modules.__setitem__, stack.name, stack.layers)
        yield


def _trials(stacks: list[_Stack]) -> list[list[int]]:
    """How many layers of each stack to run: deep ones with few, then each with some more."""
    first = [stack.depth if stack.depth <= FULL else SHALLOW for stack in stacks]
    return [first] + [[DEEP if i == j else count for j, count in enumerate(first)]
                      for i, stack in enumerate(stacks) if stack.depth > FULL]


def _at_depth(stacks: list[_Stack], found: list[int]) -> int:
    """What all layers come to, from the bytes of each of the trials: each layer adds A of them."""
    deep = [stack.depth for stack in stacks if stack.depth > FULL]
    return found[0] + sum(round((more - found[0]) / (DEEP - SHALLOW) * (depth - SHALLOW))
                          for more, depth in zip(found[1:], deep, strict=True))


# Passes -------------------------------------------------------------------------------------------

def checkpoint_layers(policy: Policy, *, bf16: bool, cuda: bool) -> None:
    """Turn gradient checkpointing on, as the engine does; layers run a second time alike."""
    trunk = policy.value_trunk
    for lm in [policy.lm, *([trunk.lm] if isinstance(trunk, ValueModel) else [])]:
        enable = getattr(lm, "activation_checkpointing_enable", None)
        (enable or lm.gradient_checkpointing_enable)({
            "use_reentrant": False,
            "context_fn": lambda: (nullcontext(), like_device(bf16, cuda))})
    if isinstance(trunk, ValueBranch):  # whose layers are copied from such ones
        layer: Any = layer_stack(policy.lm)[0]
        copied: Any
        for copied in trunk.layers:
            if hasattr(copied, "gradient_checkpointing"):
                copied.gradient_checkpointing = True
                copied._gradient_checkpointing_func = layer._gradient_checkpointing_func
    policy.train()


def _batch(policy: Policy, sizes: Sizes) -> SequenceBatch:
    count = sizes.rows * sizes.new
    flat = torch.empty(count, dtype=torch.long), torch.empty(count, dtype=torch.long)
    if has_encoder(policy.lm):
        prompts = torch.empty(sizes.rows, sizes.prompt, dtype=torch.long)
        return SequenceBatch(torch.empty(sizes.rows, sizes.new, dtype=torch.long), *flat, prompts,
                             torch.ones_like(prompts))
    tokens = max(sizes.prompt + sizes.new - 1, 1)
    return SequenceBatch(torch.empty(sizes.rows, tokens, dtype=torch.long), *flat)


def training_pass(policy: Policy, sizes: Sizes, *, temperature: float, want_entropy: bool
                  ) -> TrainingPass:
    """What a micro-batch of ``rows`` samples takes, forward and backward.

    With A bytes kept by each layer, a model of L layers keeps c + A L; what comes on top is the
    head's or one layer's, whatever L is.

    Args:
        policy: inside :func:`weightless`; gradient checkpointing as it is set there.
    """
    stacks = _stacks(policy, training=True)
    found = []
    for counts in _trials(stacks):
        with _cut(stacks, counts):
            found.append(_train_once(policy, sizes, temperature, want_entropy))
    forward = [one.forward for one in found]
    return TrainingPass(_at_depth(stacks, [one.kept for one in found]),
                        max(_at_depth(stacks, forward), *forward),
                        max(one.backward for one in found))


def _train_once(policy: Policy, sizes: Sizes, temperature: float, want_entropy: bool
                ) -> TrainingPass:
    batch = _batch(policy, sizes)
    live = LiveBytes([*policy.parameters(), *policy.buffers()])
    hooks = [p.register_post_accumulate_grad_hook(live.forget)
             for p in policy.parameters() if p.requires_grad]
    with live:
        with computing(sizes.bf16, sizes.cuda):
            out = policy(batch, temperature=temperature, want_entropy=want_entropy)
            loss = out.logprobs.sum()
            if out.values is not None:
                loss = loss + out.values.sum()
            if out.entropy is not None:
                loss = loss + out.entropy.sum()
        kept, forward = live.now, live.peak
        live.peak = kept
        loss.backward()
        del out, loss
    for hook in hooks:
        hook.remove()
    for parameter in policy.parameters():
        parameter.grad = None
    return TrainingPass(kept, forward - kept, live.peak - kept)


def scoring_pass(policy: Policy, sizes: Sizes, *, temperature: float) -> int:
    """Bytes that a forward pass over ``rows`` samples takes without gradients, weights apart.

    Args:
        policy: inside :func:`weightless`; nothing in it is trained any more.
    """
    stacks = _stacks(policy, training=False)
    policy.requires_grad_(False)  # autocast keeps copies of trained weights: told elsewhere
    batch = _batch(policy, sizes)
    live = LiveBytes([*policy.parameters(), *policy.buffers()])
    with (_cut(stacks, _trials(stacks)[0]), torch.no_grad(), live,
          computing(sizes.bf16, sizes.cuda)):
        policy(batch, temperature=temperature)
    return live.peak


def decoding_pass(policy: Policy, spec: SamplingSpec, sizes: Sizes) -> DecodingPass:
    """What generating takes of ``rows`` samples.

    Args:
        policy: inside :func:`weightless`; nothing in it is trained any more.
    """
    stacks = _stacks(policy, training=False)[:1]  # a value model decodes nothing
    policy.requires_grad_(False)
    pair = has_encoder(policy.lm)
    # the last token is never fed
    cached = sizes.prompt if pair else sizes.prompt + spec.max_new_tokens - 1
    caches, working = [], 0
    for counts in _trials(stacks):
        with _cut(stacks, counts), torch.no_grad():
            # keys and values grow with the rows, one is enough
            cache, _ = _decode_once(policy, None, 1, cached, spec.max_new_tokens, sizes)
            own, peak = _decode_once(policy, spec, sizes.rows, sizes.prompt, 1, sizes)
        caches.append(cache)
        working = max(working, peak - own)
    return DecodingPass(_at_depth(stacks, caches) * sizes.rows, working)


def _decode_once(policy: Policy, spec: SamplingSpec | None, rows: int, tokens: int, new: int,
                 sizes: Sizes) -> tuple[int, int]:
    """Bytes of the cache behind a prompt, with what an encoder made of it, and the peak on the way.

    Args:
        new: tokens that the decoder beside an encoder is fed.
    """
    lm: Any = policy.lm
    live = LiveBytes([*policy.parameters(), *policy.buffers()])
    with live, computing(sizes.bf16, sizes.cuda):
        ids = torch.empty(rows, max(tokens, 1), dtype=torch.long)
        states, cache, encoded = _fed(lm, ids, new)
        hidden = states[:, -1]
        del states
        if spec is not None:
            choose(lm.get_output_embeddings()(hidden), torch.empty(rows, dtype=torch.float64), spec,
                   0, torch.empty(len(spec.stop_ids), dtype=torch.long))
            if policy.values_while_decoding:
                policy.value_head(hidden)  # type: ignore[misc]
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for layer in cache
            for t in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if t is not None}
    return sum(held.values()) + (0 if encoded is None else encoded.nbytes), live.peak


def _fed(lm: Any, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, list[Any], Any]:
    """Final states, layers of the cache, and the encoder's states, as
    :func:`ppocli.sampling.decode_loop.generate` makes them."""
    from transformers import DynamicCache, EncoderDecoderCache

    if has_encoder(lm):
        mask = torch.ones_like(ids)
        encoded = lm.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        both = EncoderDecoderCache(DynamicCache(), DynamicCache())
        states = lm.get_decoder()(
            input_ids=torch.empty(len(ids), new, dtype=torch.long), past_key_values=both,
            encoder_hidden_states=encoded, encoder_attention_mask=mask, use_cache=True)
        caches = (both.self_attention_cache, both.cross_attention_cache)
        return states.last_hidden_state, [x for one in caches for x in one.layers], encoded
    cache: Any = DynamicCache(config=lm.config)
    words: dict[str, torch.Tensor] = {"input_ids": ids}
    virtual = virtual_tokens(lm)
    before = 0 if virtual is None else virtual.count
    # prompts of unlike lengths
    words["attention_mask"] = torch.ones(len(ids), before + ids.shape[1], dtype=torch.long)
    if virtual is not None and virtual.in_cache:
        cache = virtual.cache(len(ids))
    elif virtual is not None:
        words["inputs_embeds"] = virtual.in_front(lm.get_input_embeddings()(words.pop("input_ids")))
    states = lm.base_model(past_key_values=cache, use_cache=True, **words)
    return states.last_hidden_state, cache.layers, None
