"""Facts about a language model: its kind, and how it is decoded; its trunk's pass over samples; and
its decoder's stack of layers, at one of which forward passes can be split: what the layers before
it make of a batch can serve several passes through those after."""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ppocli.distributed.deepspeed_internals import whole_shape
from ppocli.models.layout import SequenceBatch, placeholder_mask

log = logging.getLogger("ppocli")

RELATIVE_POSITIONS = ("t5", "mt5", "umt5", "longt5", "switch_transformers")


def has_encoder(lm: Any) -> bool:
    """Whether prompts go to an encoder and responses come from a decoder."""
    return bool(getattr(lm.config, "is_encoder_decoder", False))


def decoder_start(lm: Any) -> int | None:
    """The token that the decoder of an encoder-decoder starts from; None for other models. To be
    asked before :func:`ppocli.models.loading.language_model.make_ready`, and known to its
    ``LoadedLM`` from then on: that which transformers' ``generate`` takes, or what pads where no
    such token is named."""
    if not has_encoder(lm):
        return None
    generation = lm.generation_config
    named = (generation.decoder_start_token_id,
             getattr(lm.config, "decoder_start_token_id", None),
             generation.bos_token_id, lm.config.pad_token_id)
    return next((token for token in named if token is not None), None)


def state_scale(lm: Any) -> float:
    """By which a model multiplies its final states on their way into the output embedding. T5 and
    its kin scale the decoder's states where the embeddings are tied (Raffel et al. 2020, arXiv
    1910.10683, from the Mesh TensorFlow implementation)."""
    config = lm.config
    if config.model_type not in RELATIVE_POSITIONS or config.model_type == "mt5":
        return 1.0  # mT5 was trained with an output embedding of its own, and isn't scaled
    scales = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
    return float(config.d_model) ** -0.5 if scales else 1.0


def state_width(lm: Any) -> int:
    """The size of a model's final states, or a trunk's; OPT may project them to that of its
    embeddings."""
    config = lm.config
    width: int = getattr(config, "word_embed_proj_dim", getattr(
        config, "hidden_size", lm.get_input_embeddings().weight.shape[1]))
    return width


class Decoding(Enum):
    """Ways of decoding, the fastest first."""

    STEPS = "steps"
    """ppocli's own loop feeds each token with the keys and values of those before it"""
    LIBRARY = "library"
    """transformers' ``generate``, which knows what else a model keeps from token to token"""
    UNCACHED = "uncached"
    """the same, each token by a pass over all before it"""


def decoding_of(lm: Any) -> Decoding:
    """How a model decodes; by steps where nobody has said otherwise."""
    return getattr(lm, "ppocli_decoding", Decoding.STEPS)


def set_decoding(lm: Any, decoding: Decoding) -> None:
    """Make a model decode so from now on."""
    lm.ppocli_decoding = decoding


def trunk_states(lm: Any, batch: SequenceBatch) -> torch.Tensor:
    """[b, T, D] final hidden states of the trunk for the tokens of a batch without an encoder."""
    tokens, packed = batch.tokens, dict[str, Any]()
    if batch.packing is not None:
        packed = {"position_ids": batch.positions,
                  "attention_mask": placeholder_mask(tokens.device, batch.packing)}
    elif tokens.device.type != "cpu" and getattr(lm, "ppocli_packs", False):
        packed = {"attention_mask": placeholder_mask(tokens.device)}
    return lm.base_model(input_ids=tokens, use_cache=False, **packed).last_hidden_state


def response_hidden(lm: Any, batch: SequenceBatch) -> torch.Tensor:
    """[N, D] final hidden states of ``lm``'s trunk at the positions that predict the response."""
    states = trunk_states(lm, batch) if batch.encoder_tokens is None else _decoder_states(lm, batch)
    return states.reshape(-1, states.shape[-1]).index_select(0, batch.predictors)


def _decoder_states(lm: Any, batch: SequenceBatch) -> torch.Tensor:
    """As :func:`trunk_states`, of a batch with an encoder's part."""
    encoded = lm.get_encoder()(input_ids=batch.encoder_tokens,
                               attention_mask=batch.encoder_mask).last_hidden_state
    return lm.get_decoder()(
        input_ids=batch.tokens, encoder_hidden_states=encoded,
        encoder_attention_mask=batch.encoder_mask, use_cache=False).last_hidden_state


# The stack of layers ------------------------------------------------------------------------------

def layer_stack(lm: Any) -> nn.ModuleList:
    """The list of a model's decoder layers.

    Raises:
        ValueError: no list of modules is as long as the model is deep.
    """
    config, trunk = lm.config, lm.base_model
    depth = config.get_text_config(decoder=True).num_hidden_layers
    if getattr(config, "is_encoder_decoder", False):
        trunk = lm.get_decoder()
        depth = next((value for name in ("num_decoder_layers", "decoder_layers")
                      if (value := getattr(config, name, None)) is not None), depth)
    for module in trunk.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ValueError(f"no stack of {depth} layers in {type(trunk).__name__}")


def stack_path(lm: Any) -> str:
    """The stack's name in ``lm``, such as ``model.layers``."""
    stack = layer_stack(lm)
    return next(name for name, module in lm.named_modules() if module is stack)


@torch.no_grad()
def _trial_pass(lm: Any) -> Any:
    """What the trunk returns for three tokens. Where weights are in parts, or not there yet, the
    model's code runs on tensors that have shapes only, in bf16, which is all that torch's products
    of experts take."""
    trunk, names = lm.base_model, ["input_ids"]
    if getattr(lm.config, "is_encoder_decoder", False):
        names.append("decoder_input_ids")
    if all(p.shape == whole_shape(p) and not p.is_meta for p in lm.parameters()):
        tokens = torch.zeros(1, 3, dtype=torch.long, device=trunk.device)
        return trunk(**dict.fromkeys(names, tokens), use_cache=False)
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call

    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = {name: torch.empty(whole_shape(tensor), dtype=torch.bfloat16
                                    if tensor.is_floating_point() else tensor.dtype)
                  for name, tensor in (*trunk.named_parameters(), *trunk.named_buffers())}
        tokens = torch.zeros(1, 3, dtype=torch.long)
        return functional_call(trunk, shapes, kwargs={**dict.fromkeys(names, tokens),
                                                      "use_cache": False})


class _PassesOn(nn.Module):
    """Stands where a layer stands in the stack, and hands its input on, or other states instead."""

    def __init__(self, layer: nn.Module, instead: torch.Tensor | None, as_tuple: bool) -> None:
        super().__init__()
        object.__setattr__(self, "layer", layer)  # not a submodule: nothing of it is moved or saved
        self.instead, self.as_tuple = instead, as_tuple

    def __getattr__(self, name: str) -> Any:
        """What a trunk asks its layers for (the kind of their attention) is the layer's own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "layer"), name)

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
        """As the layer's, without computing anything."""
        out = hidden if self.instead is None else self.instead
        return (out,) if self.as_tuple else out


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """A layer above the first at which passes of a causal LM can be split."""

    layer: int
    as_tuple: bool
    """whether the model's layers return tuples"""

    def resumed(self, lm: Any, states: torch.Tensor, others: Mapping[str, nn.Module] | None = None
                ) -> Any:
        """A model over the same parameters whose passes start at the layer, with ``states``
        [b, T, D] as its input; the layers before it are not run.

        Args:
            others: modules that take the places of those of these names, too.
        """
        path, stack = stack_path(lm), layer_stack(lm)
        before = {f"{path}.{i}": _PassesOn(stack[i], None if i else states, self.as_tuple)
                  for i in range(self.layer)}
        return with_modules(lm, {**before, **(others or {})})


def split_at(lm: Any, layer: int) -> SplitPoint:
    """The split at a layer above the first. Whether layers return tuples is found out by a pass."""
    kinds: list[bool] = []
    with layer_stack(lm)[0].register_forward_hook(
            lambda _module, _inputs, out: kinds.append(isinstance(out, tuple))):
        _trial_pass(lm)
    return SplitPoint(layer, kinds[0])


@contextmanager
def inputs_at(split: SplitPoint | None, lm: Any) -> Iterator[list[torch.Tensor]]:
    """Collects what enters the layer, [b, T, D] of each pass meanwhile; nothing without a split."""
    inputs: list[torch.Tensor] = []
    with nullcontext() if split is None else layer_stack(lm)[split.layer].register_forward_pre_hook(
            partial(_keep_input, inputs), with_kwargs=True):
        yield inputs


def _keep_input(inputs: list[torch.Tensor], _: nn.Module, args: tuple[Any, ...],
                kwargs: dict[str, Any]) -> None:
    inputs.append(args[0] if args else kwargs["hidden_states"])


def trained_split(lm: Any) -> SplitPoint | None:
    """The first layer that trains, where nothing before it does; None where the first of all
    trains, or something before it.

    Raises:
        ValueError: a pass from that layer on does not give what a whole pass gives, so that the
            model's layers are not a plain sequence.
    """
    trains = [any(p.requires_grad for p in layer.parameters()) for layer in layer_stack(lm)]
    # a decoder's layers beside an encoder need more than the states of the layer below
    if (getattr(lm.config, "is_encoder_decoder", False) or not any(trains) or trains[0]
            or any(p.requires_grad for p in _parameters_before(lm, 0))):
        return None
    return _checked(lm, split_at(lm, trains.index(True)))


def modules_run(lm: Any) -> list[nn.Module]:
    """What a pass of the trunk runs, in the order in which it begins."""
    order: list[nn.Module] = []
    with ExitStack() as hooks:
        for module in lm.base_model.modules():
            hooks.enter_context(module.register_forward_pre_hook(
                lambda module, _: order.append(module)))
        _trial_pass(lm)
    return order


def _parameters_before(lm: Any, layer: int) -> list[nn.Parameter]:
    """All that a pass uses before layer ``layer`` begins: embeddings, norms and projections of
    theirs, an encoder, the layers before."""
    order = modules_run(lm)
    before = order[:order.index(layer_stack(lm)[layer])]
    return [p for module in before for p in module.parameters(recurse=False)]


def freeze_attention(trunk: nn.Module) -> None:
    """Leave no gradients to a value function's attention (SAO, arXiv 2607.07508).

    Raises:
        ValueError: there is none that can be told by its name.
    """
    layers = [module for module in trunk.modules() if "Attention" in type(module).__name__]
    for module in layers:  # T5 has a layer of that name around it, with a norm
        if not any(inner in layers for inner in list(module.modules())[1:]):
            module.requires_grad_(False)
    if not layers:
        raise ValueError("model.value.freeze_attention finds no attention in it")


def freeze_lower_layers(lm: Any, num_layers_unfrozen: int) -> None:
    """Leave gradients only to the top ``num_layers_unfrozen`` layers and what follows them.

    What a pass uses before the first of these layers is frozen: embeddings with norms and
    projections of theirs, an encoder, lower layers. The top layers, the final norm and an untied
    output embedding train. -1 trains everything; a number beyond the depth does too.

    Raises:
        ValueError: when the stack of layers can't be found.
    """
    if num_layers_unfrozen < 0:
        return
    layers = list(layer_stack(lm))
    if (first := len(layers) - num_layers_unfrozen) <= 0:
        log.info("num_layers_unfrozen=%d: all %d layers train, and the embeddings too",
                 num_layers_unfrozen, len(layers))
        return
    for parameter in _parameters_before(lm, min(first, len(layers) - 1)):
        parameter.requires_grad_(False)
    for layer in layers[:first]:
        layer.requires_grad_(False)


@torch.no_grad()
def _checked(lm: Any, split: SplitPoint) -> SplitPoint:
    """The split, if a pass resumed there gives what a whole pass gives."""
    with inputs_at(split, lm) as states:
        whole = _trial_pass(lm).last_hidden_state
    try:
        resumed = _trial_pass(split.resumed(lm, states[-1])).last_hidden_state
    except (TypeError, AttributeError, LookupError, RuntimeError) as error:
        raise ValueError(f"{type(lm).__name__} can't be entered at layer {split.layer} ({error})"
                         ) from error
    if not torch.equal(whole, resumed):
        raise ValueError(f"{type(lm).__name__} entered at layer {split.layer} gives other numbers")
    return split


@contextmanager
def swapped_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Forward passes meanwhile use ``tensors`` in place of the parameters and buffers of these
    names. Gradients must not flow through such a pass, nor be pending from one before.

    Autocast keeps its copies of weights by parameter while it is on, and does not notice that a
    parameter's data have been replaced: it is made to cast them anew.
    """
    slots: dict[str, torch.Tensor] = dict((*module.named_parameters(), *module.named_buffers()))
    kept = {name: slots[name].data for name in tensors}
    try:
        for name, tensor in tensors.items():
            slots[name].data = tensor
        torch.clear_autocast_cache()
        yield
    finally:
        for name, tensor in kept.items():
            slots[name].data = tensor
        torch.clear_autocast_cache()


# Second views of a module, over the same parameters; the module itself stays as it is -------------

def with_modules(lm: Any, modules: Mapping[str, nn.Module]) -> Any:
    """A model over the same parameters that has other modules under these names."""
    made = copy.copy(lm)
    made._modules = dict(lm._modules)
    inside: dict[str, dict[str, nn.Module]] = {}
    for name, module in modules.items():
        child, _, rest = name.partition(".")
        if rest:
            inside.setdefault(child, {})[rest] = module
        else:
            made._modules[child] = module
    for child, others in inside.items():
        made._modules[child] = with_modules(made._modules[child], others)
    return made


def without_hooks(module: nn.Module,
                  parameters: Mapping[int, nn.Parameter] = MappingProxyType({})) -> Any:
    """A module that computes the same and runs no hooks; what is one module inside stays one.

    Args:
        parameters: to take instead of those with these ids.
    """
    made: dict[int, nn.Module] = {}

    def view_of(part: nn.Module) -> nn.Module:
        if id(part) not in made:
            view = made[id(part)] = type(part).__new__(type(part))
            nn.Module.__init__(view)
            vars(view).update({name: value for name, value in vars(part).items()
                               if name not in vars(view)}, _buffers=part._buffers,
                              training=part.training)
            view._parameters = {name: None if p is None else parameters.get(id(p), p)
                                for name, p in part._parameters.items()}
            view._modules = {name: None if child is None else view_of(child)
                             for name, child in part._modules.items()}
        return made[id(part)]

    return view_of(module)
