"""Second views of a module: other modules in some places, or no hooks, over the same parameters.
The module itself stays as it is."""

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn


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
            view._parameters = {name: None if own is None else parameters.get(id(own), own)
                                for name, own in part._parameters.items()}
            view._modules = {name: None if child is None else view_of(child)
                             for name, child in part._modules.items()}
        return made[id(part)]

    return view_of(module)
