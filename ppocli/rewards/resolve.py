"""From a config value to a function that scores: imported, its signature checked, and built."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter
from typing import Any

from ppocli.builtin.names import BUILTIN_REWARDS, BUILTIN_STEPS
from ppocli.config.config_yaml import PYTHON_OBJECT
from ppocli.config.text import error_line, pasted, raised_at, suggestion
from ppocli.config.user_code import CodeSetting, Kind, Located, from_object, locate, shorten
from ppocli.errors import PpocliError, RewardError
from ppocli.rewards.calls import (
    STOPS,
    RewardFunction,
    kwargs_key,
    name_reward_key,
    torch_modes_kept,
)
from ppocli.rewards.styles import STYLES, recognised

_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_SETTABLE = frozenset({"steps", "ground_truth"})
"""arguments of calls that may be configured, for the prompts and steps may not provide them"""
MODEL_REWARDS = ("classifier", "reward_model", "step_reward_model")
"""built-ins whose argument ``model`` names a model"""
REWARD = Kind("function", RewardError, BUILTIN_REWARDS)
STEPS = Kind("function", RewardError, BUILTIN_STEPS)


def locate_reward(spec: str, *, key: str) -> Located:
    """Import the reward function, or the function that finds steps, that ``key`` names.

    Args:
        spec: an import path or a built-in's short name.

    Raises:
        RewardError: the path leads to nothing that can be called, its module can't be imported, or
            it stands for a Python object, which has to be passed again.
    """
    if spec == PYTHON_OBJECT:
        name = "metric_fn" if key.endswith("metric_fn") else "reward_fn"
        raise RewardError(
            f"{key} was a Python object, which a configuration can't hold.", where=key,
            fix=f"pass {name}= to ppocli.train again, or set {key}=pkg.module:function")
    return locate(CodeSetting(spec, key, STEPS if key == "reward.step_fn" else REWARD))


def bind(target: Any, kwargs: Mapping[str, Any], *, key: str, style: str = "ppocli",
         name: str | None = None, weight: float = 1.0) -> RewardFunction:
    """Import a function, read its signature and check its kwargs. Classes aren't built yet, so no
    model is loaded.

    Args:
        target: an import path, a built-in's short name, or a Python object.
        key: the config key that names it.
        style: calling convention; ``auto``: by its signature.
        name: among several rewards (default: the last part of the import path).
        weight: of the reward in the sum.

    Raises:
        RewardError: the path leads to nothing, or something is wrong with signature or kwargs.
    """
    if isinstance(target, str):
        with torch_modes_kept(target, key, lambda: "while it was imported"):
            located = locate_reward(target, key=key)
    else:
        located = from_object(target, CodeSetting(
            getattr(target, "__qualname__", type(target).__qualname__), key, REWARD))
    call = located.target
    located = _renamed(located, call)
    parameters = _parameters(call, located)
    if style == "auto":
        style = recognised([p.name for p in parameters])
    # an unknown style is reported by config/checks.py
    convention = STYLES.get(getattr(call, "reward_style", style), STYLES["ppocli"])
    if name is None:
        name = located.spec.rpartition(":")[2].rpartition(".")[2]
    function = RewardFunction(located, located.label, call, parameters, convention, name=name,
                              weight=weight)
    if inspect.isclass(call):
        _check_kwargs(located, _signature(call, located), kwargs, complete=True)
        return replace(function, init_kwargs=kwargs)
    _check_kwargs(located, parameters, kwargs, {*convention.sources} - _SETTABLE, complete=False)
    return replace(function, kwargs=kwargs)


def built(function: RewardFunction) -> RewardFunction:
    """The function with an object of its class in place of the class; unchanged if it is none.

    Raises:
        RewardError: the constructor raised.
        InputError: a built-in's model is missing or unusable.
    """
    located = function.located
    call: Any = function.call
    if not inspect.isclass(call):
        return function
    try:
        with torch_modes_kept(function.label, located.key, lambda: "while it was built"):
            call = call(**function.init_kwargs)
    except PpocliError as error:
        name_reward_key(error, located.key)
        raise
    except STOPS:
        raise
    except BaseException as error:
        raise RewardError(f"Building {function.label} with {dict(function.init_kwargs)} failed: "
                          f"{error_line(error)}", where=raised_at(error, located.file),
                          fix=f"see {kwargs_key(located.key)}") from error
    located = _renamed(located, call)
    return replace(function, located=located, label=located.label, call=call,
                   parameters=_parameters(call, located))


def _renamed(located: Located, call: Any) -> Located:
    """The same under the ``display_name`` of a function object that has one."""
    label = getattr(call, "display_name", None)
    return replace(located, spec=label, file=None, line=None) if isinstance(label, str) else located


def _parameters(call: Any, located: Located) -> tuple[Parameter, ...]:
    """The parameters of a call without ``self``; for a ``torch.nn.Module`` those of ``forward``."""
    is_class, method = inspect.isclass(call), call
    if not inspect.isroutine(call) and hasattr(call, "forward") and hasattr(call, "parameters"):
        method = call.forward
    elif is_class:
        if "__call__" not in dir(call):
            raise RewardError(f"An object of class {located.spec} can't be called: the class has "
                              "no __call__ method.", where=located.label,
                              fix="give it __call__(self, samples, ...) -> list")
        method = call.__call__
    parameters = _signature(method, located)
    return parameters[1:] if is_class else parameters


def _signature(target: Any, located: Located) -> tuple[Parameter, ...]:
    try:
        return tuple(inspect.signature(target).parameters.values())
    except (ValueError, TypeError) as error:
        raise RewardError(f"The signature of {located.label} can't be read: {error}",
                          where=located.key, fix="wrap it in a plain Python function") from error


def _check_kwargs(located: Located, parameters: Sequence[Parameter], kwargs: Mapping[str, Any],
                  reserved: Collection[str] = (), *, complete: bool) -> None:
    """Refuse kwargs the target doesn't take and, for a constructor, those it lacks."""
    key = kwargs_key(located.key)
    accepted = [p.name for p in parameters if p.kind in _KEYWORD]
    takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    for name in kwargs:
        if not isinstance(name, str):
            raise RewardError(f"An argument is called {name!r}, which is no text.", where=key,
                              fix="put it in quotes: YAML reads a bare on, off, yes or no as true "
                              "or false")
        if name in reserved:
            raise RewardError(f"{key}.{name} can't be set: every call passes its own {name!r}.",
                              where=f"{located.key}={located.spec}", fix="remove that key")
        if name not in accepted and not takes_all:
            settable = [a for a in accepted if a not in reserved]
            listed = ", ".join(settable) or "nothing that can be set"
            near = suggestion(name, settable)
            # arguments from a recipe or a group stay when another function is named
            drop = "; or, where a recipe brought it, take the recipe's reward out: reward=null " \
                + pasted(f"reward.fn={located.spec}") if located.key == "reward.fn" else ""
            raise RewardError(f"{located.label} has no argument {name!r}. {near}".rstrip(),
                              where=f"{key}.{name}", fix=f"it takes: {listed}{drop}")
    required = [p.name for p in parameters if p.kind in _KEYWORD
                and p.default is Parameter.empty and p.name not in kwargs]
    if complete and required:
        raise RewardError(f"{located.label} can't be built without {required[0]!r}.",
                          where=f"{located.key}={located.spec}", fix=f"{key}.{required[0]}=...")


def wrong_argument(name: str, value: object, expected: str) -> RewardError:
    """A built-in's error for an argument of a wrong type or value."""
    return RewardError(f"{name}={shorten(repr(value))[1:-1]} is not {expected}.",
                       where=f"reward.kwargs.{name}", fix=f"set reward.kwargs.{name} to {expected}")
