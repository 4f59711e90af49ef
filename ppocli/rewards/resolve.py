"""From a config value to a callable ready to score: imported, built, its signature checked.

What a function receives is chosen by the names of its own parameters, so that functions written for
trlX, ``f(samples, prompts, outputs, tokenizer, **metadata)``
(``CarperAI/trlx:trlx/trainer/accelerate_ppo_trainer.py``), and for TRL,
``f(prompts, completions, completion_ids, **columns)``
(``huggingface/trl:trl/trainer/grpo_trainer.py``), work unchanged.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter
from types import MappingProxyType
from typing import Any

from ppocli.errors import PpocliError, RewardError
from ppocli.rewards.records import RewardRequest
from ppocli.text import error_line, suggestion
from ppocli.user_code import (
    Kind,
    Located,
    Wanted,
    from_object,
    locate,
    raised_at,
)

log = logging.getLogger(__name__)

KNOWN_ARGUMENTS: Mapping[str, Callable[[RewardRequest], Any]] = {
    "samples": lambda r: [p + q for p, q in zip(r.prompts, r.responses, strict=True)],
    "prompts": lambda r: list(r.prompts),
    "outputs": lambda r: list(r.responses),
    "responses": lambda r: list(r.responses),
    "completions": lambda r: list(r.responses),
    "completion_ids": lambda r: [list(ids) for ids in r.response_ids],
    "response_ids": lambda r: [list(ids) for ids in r.response_ids],
    "output_ids": lambda r: [list(ids) for ids in r.response_ids],
    "tokenizer": lambda r: r.tokenizer,
}
"""What a function may ask for by name. Every call gets fresh lists, which it may change."""

_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class BoundCallable:
    """A reward or metric function with its arguments settled. Made by :func:`bind`."""

    located: Located
    call: Callable[..., Any]
    """the function itself, or the object that a class made"""
    kwargs: Mapping[str, Any]
    """bound by configuration; empty for a class, which took them when it was built"""
    parameters: tuple[Parameter, ...]
    is_async: bool

    @property
    def label(self) -> str:
        """the function with its file and line, for messages"""
        return self.located.label

    @property
    def file(self) -> str | None:
        """file that the code comes from"""
        return self.located.file

    def check_columns(self, columns: Sequence[str]) -> None:
        """Check that every required parameter has a source, now that the columns are known.

        Raises:
            RewardError: a parameter is neither a known argument nor a column nor in the kwargs.
        """
        for parameter in self.parameters:
            if parameter.name not in columns and _needs_column(parameter, self.kwargs):
                raise self._unbound(parameter.name, columns)
        if self._takes_all():
            wanted = set(columns)
        else:
            wanted = {parameter.name for parameter in self.parameters} & set(columns)
        for name in sorted(wanted & (KNOWN_ARGUMENTS.keys() | self.kwargs.keys())):
            winner = "reward's own argument" if name in KNOWN_ARGUMENTS else "configured argument"
            log.warning("prompt column %r is hidden from %s by the %s of the same name",
                        name, self.located.spec, winner)

    def arguments(self, request: RewardRequest) -> tuple[list[Any], dict[str, Any]]:
        """Positional-only and keyword arguments for one call.

        Raises:
            RewardError: as :meth:`check_columns`.
        """
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for parameter in self.parameters:
            name = parameter.name
            if parameter.kind is Parameter.VAR_POSITIONAL:
                continue
            if parameter.kind is Parameter.VAR_KEYWORD:
                for other in (*request.columns, *KNOWN_ARGUMENTS, *self.kwargs):
                    if other not in named:
                        named[other] = self._value(other, request)
            elif name in self.kwargs or name in KNOWN_ARGUMENTS or name in request.columns:
                if parameter.kind is Parameter.POSITIONAL_ONLY:
                    positional.append(self._value(name, request))
                else:
                    named[name] = self._value(name, request)
            elif parameter.default is Parameter.empty:
                raise self._unbound(name, list(request.columns))
            elif parameter.kind is Parameter.POSITIONAL_ONLY:
                positional.append(parameter.default)
        return positional, named

    def _value(self, name: str, request: RewardRequest) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        if name in KNOWN_ARGUMENTS:
            return KNOWN_ARGUMENTS[name](request)
        return list(request.columns[name])

    def _takes_all(self) -> bool:
        return any(p.kind is Parameter.VAR_KEYWORD for p in self.parameters)

    def _unbound(self, name: str, columns: Sequence[str]) -> RewardError:
        known = ", ".join(KNOWN_ARGUMENTS)
        listed = ", ".join(columns) or "none"
        near = suggestion(name, [*KNOWN_ARGUMENTS, *columns])
        key = self.located.key
        configure = f"; or set {kwargs_key(key)}.{name}=..." if key.endswith(".fn") else ""
        return RewardError(
            f"{self.label} needs an argument {name!r} that nothing provides. {near}".rstrip(),
            where=f"{key}={self.located.spec}",
            fix=f"use one of {known}; or a metadata column of the prompts (there are: {listed}; "
                f"see prompts.columns){configure}")


def kwargs_key(key: str) -> str:
    """``reward.fn`` -> ``reward.kwargs``; ``reward.fns.x.fn`` -> ``reward.fns.x.kwargs``."""
    return f"{key.removesuffix('.fn')}.kwargs"


def resolve_object(target: Any, kwargs: Mapping[str, Any], *, key: str) -> BoundCallable:
    """:func:`bind` for a Python object handed through the API."""
    name = getattr(target, "__qualname__", type(target).__qualname__)
    return bind(from_object(target, Wanted(name, key, REWARD)), kwargs)


def check_callable(located: Located, kwargs: Mapping[str, Any],
                   columns: Sequence[str] | None = None) -> None:
    """Check kwargs and signature without building anything: no model is loaded for this.

    Raises:
        RewardError: as :func:`bind`, except for what happens inside a constructor.
    """
    if inspect.isclass(located.target):
        _check_kwargs(located, _signature(located.target, located), kwargs, complete=True)
        if not any("__call__" in vars(base) for base in located.target.__mro__):
            raise _not_callable(located, f"An object of class {located.spec}")
        method = _body(located.target)
        method = located.target.__call__ if method is located.target else method
        parameters, kwargs = _signature(method, located)[1:], {}
    else:
        parameters = _signature(_body(located.target), located)
        _check_kwargs(located, parameters, kwargs, complete=False)
    if columns is not None:
        bound = BoundCallable(located, located.target, kwargs, parameters, is_async=False)
        bound.check_columns(columns)


def bind(located: Located, kwargs: Mapping[str, Any]) -> BoundCallable:
    """Build a class with its kwargs, or bind them to a function; read the signature once.

    Raises:
        RewardError: whatever is wrong with the signature or the kwargs.
        InputError: a built-in's model is missing or unusable.
    """
    call, bound_kwargs = located.target, dict(kwargs)
    if inspect.isclass(call):
        _check_kwargs(located, _signature(call, located), kwargs, complete=True)
        call, bound_kwargs = _construct(located, kwargs), {}
        if isinstance(told := getattr(call, "told_as", None), str):  # better known than its class
            located = replace(located, spec=told, file=None, line=None)
        if not callable(call):
            raise _not_callable(located, f"An object of class {located.spec}")
    parameters = _signature(_body(call), located)
    _check_kwargs(located, parameters, bound_kwargs, complete=False)
    method = call if inspect.isroutine(call) or not callable(call) else type(call).__call__
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(method)
    return BoundCallable(located, call, bound_kwargs, parameters, is_async)


def unbuilt(located: Located) -> BoundCallable:
    """What stands for a function that another rank calls: nothing is built or bound."""
    return BoundCallable(located, located.target, {}, (), is_async=False)


def _not_callable(located: Located, what: str) -> RewardError:
    return RewardError(f"{what} can't be called: the class has no __call__ method.",
                       where=located.label, fix="give it __call__(self, samples, ...) -> list")


def _construct(located: Located, kwargs: Mapping[str, Any]) -> Any:
    try:
        return located.target(**kwargs)
    except PpocliError as error:
        name_own_key(error, located.key)
        raise
    except Exception as error:
        raise RewardError(
            f"Building {located.label} with {dict(kwargs)} failed: {error_line(error)}",
            where=raised_at(error, located.file), fix=f"see {kwargs_key(located.key)}",
        ) from error


def name_own_key(error: PpocliError, key: str) -> None:
    """Built-ins name the usual key in their errors; under ``reward.fns`` it is another one."""
    named = kwargs_key(key)
    error.where = error.where and error.where.replace("reward.kwargs", named)
    error.fix = error.fix and error.fix.replace("reward.kwargs", named)


def _body(call: Any) -> Any:
    """The callable whose signature counts: ``forward`` for a ``torch.nn.Module``."""
    if not inspect.isroutine(call) and hasattr(call, "forward") and hasattr(call, "parameters"):
        return call.forward
    return call


def _signature(target: Any, located: Located) -> tuple[Parameter, ...]:
    try:
        return tuple(inspect.signature(target).parameters.values())
    except (ValueError, TypeError) as error:
        raise RewardError(f"The signature of {located.label} can't be read: {error}",
                          where=located.key, fix="wrap it in a plain Python function") from error


def _needs_column(parameter: Parameter, kwargs: Mapping[str, Any]) -> bool:
    """Whether only a metadata column could provide this parameter."""
    name = parameter.name
    return (parameter.default is Parameter.empty and name not in kwargs
            and name not in KNOWN_ARGUMENTS
            and parameter.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL))


def _check_kwargs(located: Located, parameters: Sequence[Parameter], kwargs: Mapping[str, Any],
                  *, complete: bool) -> None:
    """Refuse kwargs the target doesn't take and, for a constructor, those it lacks."""
    key = kwargs_key(located.key)
    accepted = [p.name for p in parameters if p.kind in _KEYWORD]
    takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    for name in kwargs:
        if not complete and name in KNOWN_ARGUMENTS:
            raise RewardError(f"{key}.{name} can't be set: every call passes its own {name!r}.",
                              where=f"{located.key}={located.spec}", fix="remove that key")
        if name not in accepted and not takes_all:
            settable = [a for a in accepted if complete or a not in KNOWN_ARGUMENTS]
            listed = ", ".join(settable) or "nothing that can be set"
            near = suggestion(name, settable)
            # what a recipe or a group has set stays where another function is named
            drop = "; or, where a recipe brought it, take the recipe's reward out: ~reward " \
                f"{located.key}={located.spec}" if located.key == "reward.fn" else ""
            raise RewardError(
                f"{located.label} has no argument {name!r}. {near}".rstrip(),
                where=f"{key}.{name}", fix=f"it takes: {listed}{drop}")
    required = [p.name for p in parameters if p.kind in _KEYWORD
                and p.default is Parameter.empty and p.name not in kwargs]
    if complete and required:
        raise RewardError(f"{located.label} can't be built without {required[0]!r}.",
                          where=f"{located.key}={located.spec}",
                          fix=f"{key}.{required[0]}=...")


BUILTIN_REWARDS: Mapping[str, str] = MappingProxyType({
    "classifier": "ppocli.rewards.classifier:TextClassifier",
    "reward_model": "ppocli.rewards.reward_model:RewardModel",
    "http": "ppocli.rewards.remote:HttpReward",
    "length": "ppocli.rewards.rules:Length",
    "keyword": "ppocli.rewards.rules:Keyword",
    "word_list": "ppocli.rewards.rules:WordList",
    "randomwalks": "ppocli.rewards.randomwalks:optimality",
})

MODEL_REWARDS = ("classifier", "reward_model")
"""those whose ``model`` argument names a model of their own"""
REWARD = Kind("function", RewardError, BUILTIN_REWARDS)


def locate_reward(spec: str, *, key: str) -> Located:
    """Import the reward function that ``key`` names: an import path or a built-in's short name.

    Raises:
        RewardError: the path leads to nothing that can be called, or its module can't be imported.
    """
    return locate(Wanted(spec, key, REWARD))
