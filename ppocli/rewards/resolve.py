"""From a config value to a callable ready to score: imported, built, its signature checked.

What a function receives is chosen by the names of its own parameters, so that functions written for
other libraries work unchanged: see :mod:`ppocli.rewards.styles`.
"""

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import Any, Self

from ppocli.config.resolved import PYTHON_OBJECT
from ppocli.errors import PpocliError, RewardError
from ppocli.rewards import guard, records, styles
from ppocli.text import error_line, pasted, raised_at, suggestion
from ppocli.user_classes import refuse_abstract
from ppocli.user_code import CodeSetting, Kind, Located, from_object, locate, shorten

log = logging.getLogger(__name__)

_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class BoundCallable:
    """A reward or metric function with its arguments settled. Made by :func:`bind`."""

    located: Located
    call: Callable[..., Any]
    """the function itself; a class, or the object that :meth:`built` has made of it"""
    parameters: tuple[Parameter, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """what the configuration gives to each call"""
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """what it gives to a class when it is built"""
    style: str = "ppocli"
    """how it is called and its answer read, one of :mod:`ppocli.rewards.styles`"""
    name: str = ""
    """among the rewards that are summed"""
    weight: float = 1.0
    """in their sum"""

    @property
    def takes_steps(self) -> bool:
        """Whether it asks for the steps of responses: lists that it returns are then theirs."""
        return "steps" not in self.kwargs and any(p.name == "steps" for p in self.parameters)

    @property
    def label(self) -> str:
        """the function with its file and line, for messages"""
        return self.located.label

    def built(self) -> Self:
        """With the object that a class makes in place of the class; others are ready as they are.

        Raises:
            RewardError: the constructor raised.
            InputError: a built-in's model is missing or unusable.
        """
        located = self.located
        call: Any = self.call
        try:
            if inspect.isclass(call):
                with guard.contained(self.label, located.key, "while it was built"):
                    call = call(**self.init_kwargs)
        except PpocliError as error:
            name_own_key(error, located.key)
            raise
        except BaseException as error:
            if not guard.is_its_own(error):
                raise
            raise RewardError(f"Building {self.label} with {dict(self.init_kwargs)} failed: "
                              f"{error_line(error)}", where=raised_at(error, located.file),
                              fix=f"see {kwargs_key(located.key)}") from error
        if isinstance(label := getattr(call, "told_as", None), str):  # in place of its class
            located = replace(located, spec=label, file=None, line=None)
        return replace(self, located=located, call=call, parameters=_parameters(call, located))

    def check_columns(self, columns: Sequence[str], *, steps: bool = False) -> None:
        """Check that every required parameter has a source, now that the columns are known.

        Args:
            steps: whether something says what the steps of a response are.

        Raises:
            RewardError: a parameter is neither a known argument nor a column nor in the kwargs.
        """
        providers = styles.known(self.style, columns, steps=steps)
        reserved = providers.keys() | self.kwargs.keys()
        if not inspect.isfunction(self.call):
            reserved |= {"self"}  # as the call of an object gets it
        column_names = set(columns)
        if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in self.parameters):
            column_names &= {parameter.name for parameter in self.parameters}
        for parameter in self.parameters:
            if (parameter.default is Parameter.empty and parameter.kind not in _VARIADIC
                    and parameter.name not in reserved | column_names):
                raise self._unbound(parameter.name, columns)
        for name in sorted(column_names & reserved - (styles.MADE_OF_COLUMN & providers.keys())):
            winner = "configured argument" if name in self.kwargs else "reward's own argument"
            log.warning("prompt column %r is hidden from %s by the %s of the same name",
                        name, self.located.spec, winner)

    def answer(self, request: records.RewardRequest) -> Any:
        """What the function returns for a request, or what awaits it. It gets fresh lists: a call
        that failed may have cut them.

        Raises:
            RewardError: as :meth:`check_columns`; and whatever it raises.
        """
        positional: list[Any] = []
        named: dict[str, Any] = {}
        providers = styles.known(self.style, request.columns, steps=request.steps is not None)
        sources = {**dict.fromkeys(request.columns), **providers, **self.kwargs}
        if not inspect.isfunction(self.call):
            sources.pop("self", None)

        def value(name: str) -> Any:
            if name in self.kwargs:
                return self.kwargs[name]
            return (providers[name](request) if name in providers
                    else styles.fresh(request.columns[name]))

        for parameter in self.parameters:
            name = parameter.name
            if parameter.kind is Parameter.VAR_KEYWORD:
                named.update({other: value(other) for other in sources if other not in named})
            elif parameter.kind is Parameter.VAR_POSITIONAL:
                continue
            elif name not in sources and parameter.default is Parameter.empty:
                raise self._unbound(name, list(request.columns))
            elif parameter.kind is Parameter.POSITIONAL_ONLY:
                positional.append(value(name) if name in sources else parameter.default)
            elif name in sources:
                named[name] = value(name)
        if self.style == "verl":
            return styles.per_sample(self.call, named, self.kwargs, len(request))
        return self.call(*positional, **named)

    def _unbound(self, name: str, columns: Sequence[str]) -> RewardError:
        names = list(styles.known(self.style, columns))
        usable, listed = ", ".join(names), ", ".join(columns) or "none"
        near = suggestion(name, [*names, *columns])
        key = self.located.key
        if name == "steps":
            return RewardError(
                f"{self.label} asks for the steps of responses, and nothing says what they are.",
                where=f"{key}={self.located.spec}", fix="say where one ends: reward.step_separator "
                "or reward.step_fn (of a served reward: in the run that asks it)")
        configure = f"; or set {kwargs_key(key)}.{name}=..." if key.endswith(".fn") else ""
        return RewardError(
            f"{self.label} needs an argument {name!r} that nothing provides. {near}".rstrip(),
            where=f"{key}={self.located.spec}",
            fix=f"use one of {usable}; or a metadata column of the prompts (there are: {listed}; "
                f"see prompts.columns){configure}")


def kwargs_key(key: str) -> str:
    """``reward.fn`` -> ``reward.kwargs``; ``reward.fns.x.fn`` -> ``reward.fns.x.kwargs``."""
    return f"{key.removesuffix('.fn')}.kwargs"


def name_own_key(error: PpocliError, key: str) -> None:
    """Built-ins name the usual key in their errors; under ``reward.fns`` it is another one."""
    named = kwargs_key(key)
    error.where = error.where and error.where.replace("reward.kwargs", named)
    error.fix = error.fix and error.fix.replace("reward.kwargs", named)


def wrong_argument(name: str, value: object, expected: str) -> RewardError:
    """A built-in's error for an argument that is not what it takes."""
    return RewardError(f"{name}={shorten(repr(value))[1:-1]} is not {expected}.",
                       where=f"reward.kwargs.{name}", fix=f"set reward.kwargs.{name} to {expected}")


def bind(target: Any, kwargs: Mapping[str, Any], *, key: str, style: str = "ppocli",
         name: str | None = None, weight: float = 1.0) -> BoundCallable:
    """Find a function, check its kwargs and read its signature, once. Nothing is built yet: no
    model is loaded for this.

    Args:
        target: an import path, a built-in's short name, or a Python object.
        key: the config key it came from.
        style: how it is called; ``auto``: by its signature.
        name: among several (default: the last part of its own).
        weight: of a reward in the sum.

    Raises:
        RewardError: the path leads to nothing, or something is wrong with signature or kwargs.
    """
    if isinstance(target, str):
        with guard.contained(target, key, "while it was imported"):
            located = locate_reward(target, key=key)
    else:
        located = from_object(target, CodeSetting(
            getattr(target, "__qualname__", type(target).__qualname__), key, REWARD))
    call = located.target
    parameters = _parameters(call, located)
    if style == "auto":
        style = styles.recognised([p.name for p in parameters])
    style = getattr(call, "reward_style", style)
    if name is None:
        name = located.spec.rpartition(":")[2].rpartition(".")[2]
    bound = BoundCallable(located, call, parameters, style=style, name=name, weight=weight)
    if inspect.isclass(call):
        refuse_abstract(located, RewardError)
        _check_kwargs(located, _signature(call, located), kwargs, complete=True)
        return replace(bound, init_kwargs=kwargs)
    _check_kwargs(located, parameters, kwargs, styles.known(style, ()), complete=False)
    return replace(bound, kwargs=kwargs)


def _parameters(call: Any, located: Located) -> tuple[Parameter, ...]:
    """What a call takes besides ``self``: the parameters of ``forward`` for a ``torch.nn.Module``.
    """
    is_class, method = inspect.isclass(call), call
    if not inspect.isroutine(call) and hasattr(call, "forward") and hasattr(call, "parameters"):
        method = call.forward
        if getattr(method, "__name__", "") == "_forward_unimplemented":  # torch's, which raises
            raise RewardError(f"{located.spec} is a torch.nn.Module without a forward method.",
                              where=located.label,
                              fix="give it forward(self, samples, ...) -> list or tensor")
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
            # what a recipe or a group has set stays where another function is named
            drop = "; or, where a recipe brought it, take the recipe's reward out: reward=null " \
                + pasted(f"reward.fn={located.spec}") if located.key == "reward.fn" else ""
            raise RewardError(f"{located.label} has no argument {name!r}. {near}".rstrip(),
                              where=f"{key}.{name}", fix=f"it takes: {listed}{drop}")
    required = [p.name for p in parameters if p.kind in _KEYWORD
                and p.default is Parameter.empty and p.name not in kwargs]
    if complete and required:
        raise RewardError(f"{located.label} can't be built without {required[0]!r}.",
                          where=f"{located.key}={located.spec}", fix=f"{key}.{required[0]}=...")


BUILTIN_REWARDS: Mapping[str, str] = {name: f"ppocli.rewards.{place}" for name, place in {
    "classifier": "classifier:TextClassifier", "reward_model": "reward_model:RewardModel",
    "step_reward_model": "reward_model:StepRewardModel", "http": "remote:HttpReward",
    "length": "rules:Length", "keyword": "rules:Keyword", "word_list": "rules:WordList",
    "step_word_list": "rules:StepWordList", "answer": "rules:Answer",
    "randomwalks": "randomwalks:optimality"}.items()}
BUILTIN_STEPS = {"words": "ppocli.rewards.rules:words"}
"""of ``reward.step_fn``"""

MODEL_REWARDS = ("classifier", "reward_model", "step_reward_model")
"""those whose ``model`` argument names a model of their own"""
REWARD = Kind("function", RewardError, BUILTIN_REWARDS)
STEPS = Kind("function", RewardError, BUILTIN_STEPS)


def locate_reward(spec: str, *, key: str) -> Located:
    """Import the reward function that ``key`` names, or the function that says where steps end:
    an import path or a built-in's short name.

    Raises:
        RewardError: the path leads to nothing that can be called, or its module can't be imported;
            or it stands for a Python object, which nobody handed over this time.
    """
    if spec == PYTHON_OBJECT:
        name = "metric_fn" if key.endswith("metric_fn") else "reward_fn"
        raise RewardError(
            f"{key} was a Python object, which a configuration can't hold.", where=key,
            fix=f"pass {name}= to ppocli.train again, or set {key}=pkg.module:function")
    return locate(CodeSetting(spec, key, STEPS if key == "reward.step_fn" else REWARD))
