"""The decoder's stack of layers, and forward passes that are split at one of them: what the layers
before it make of a batch can serve several passes through those after it."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ppocli.distributed.deepspeed_internals import whole_shape


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


def _trial_inputs(lm: Any, device: torch.device) -> dict[str, Any]:
    tokens = torch.zeros(1, 3, dtype=torch.long, device=device)
    pair = getattr(lm.config, "is_encoder_decoder", False)
    return {"input_ids": tokens, "use_cache": False} | (
        {"decoder_input_ids": tokens} if pair else {})


@torch.no_grad()
def _trial_pass(lm: Any) -> Any:
    """What the trunk returns for three tokens."""
    return lm.base_model(**_trial_inputs(lm, lm.base_model.device))


@torch.no_grad()
def _trial_of_shapes(lm: Any) -> None:
    """As :func:`_trial_pass` where weights are in parts, or not there yet: the model's code runs on
    tensors that have shapes only, in bf16, which is all that torch's products of experts take."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call

    trunk = lm.base_model
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = {name: torch.empty(whole_shape(tensor), dtype=torch.bfloat16
                                    if tensor.is_floating_point() else tensor.dtype)
                  for name, tensor in (*trunk.named_parameters(), *trunk.named_buffers())}
        functional_call(trunk, shapes, kwargs=_trial_inputs(lm, torch.device("cpu")))


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
    """Collects what enters the layer, [b, T, D] for each forward pass meanwhile; nothing without a
    split."""
    inputs: list[torch.Tensor] = []

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    with nullcontext() if split is None else (
            layer_stack(lm)[split.layer].register_forward_pre_hook(take, with_kwargs=True)):
        yield inputs


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


def modules_run(lm: Any, trial: Callable[[Any], Any] = _trial_pass) -> list[nn.Module]:
    """What a pass of the trunk runs, in the order in which it begins."""
    order: list[nn.Module] = []
    with ExitStack() as hooks:
        for module in lm.base_model.modules():
            hooks.enter_context(module.register_forward_pre_hook(
                lambda module, _: order.append(module)))
        trial(lm)
    return order


def _parameters_before(lm: Any, layer: int, trial: Callable[[Any], Any] = _trial_pass
                       ) -> list[nn.Parameter]:
    """All that a pass uses before layer ``layer`` begins: embeddings, norms and projections of
    theirs, an encoder, the layers before."""
    order = modules_run(lm, trial)
    before = order[:order.index(layer_stack(lm)[layer])]
    return [p for module in before for p in module.parameters(recurse=False)]


def freeze_before(lm: Any, layer: int) -> None:
    """Freeze all that a pass uses before layer ``layer`` begins. Weights may be in parts, if none
    has been prepared for training yet, or not be there."""
    whole = all(p.shape == whole_shape(p) and not p.is_meta for p in lm.parameters())
    for parameter in _parameters_before(lm, layer, _trial_pass if whole else _trial_of_shapes):
        parameter.requires_grad_(False)


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
