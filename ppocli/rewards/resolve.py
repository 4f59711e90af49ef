"""From a config value to a function that scores: imported, built, and its signature checked.

The names of a function's parameters decide its arguments, so that functions written for other
libraries work unchanged: see :mod:`ppocli.rewards.styles`.
"""

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import Any, Self

from ppocli.builtin.names import BUILTIN_REWARDS, BUILTIN_STEPS
from ppocli.config.config_yaml import PYTHON_OBJECT
from ppocli.config.text import error_line, pasted, raised_at, suggestion
from ppocli.config.user_classes import refuse_abstract
from ppocli.config.user_code import CodeSetting, Kind, Located, from_object, locate, shorten
from ppocli.errors import PpocliError, RewardError
from ppocli.rewards import guard, reward_records, styles

log = logging.getLogger(__name__)

_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class BoundCallable:
    """A reward or metric function with its configured arguments, from :func:`bind`."""

    located: Located
    call: Callable[..., Any]
    """the function, or a class, or the object that :meth:`built` has made of it"""
    parameters: tuple[Parameter, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """configured arguments of each call"""
    init_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """configured arguments of a class's constructor"""
    style: str = "ppocli"
    """calling convention, one of :mod:`ppocli.rewards.styles`"""
    name: str = ""
    """among the rewards that are summed"""
    weight: float = 1.0
    """in their sum"""

    @property
    def takes_steps(self) -> bool:
        """Whether it takes the steps of responses; lists that it returns are then step scores."""
        return "steps" not in self.kwargs and any(p.name == "steps" for p in self.parameters)

    @property
    def label(self) -> str:
        """the function with its file and line, for messages"""
        return self.located.label

    def built(self) -> Self:
        """A copy with an object of the class in place of the class; other callables unchanged.

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
            name_reward_key(error, located.key)
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
            steps: whether the steps of responses are defined.

        Raises:
            RewardError: a parameter is neither an argument of the style nor a column nor in the
                kwargs.
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

    def answer(self, request: reward_records.RewardRequest) -> Any:
        """The function's result for a request, or an awaitable of it. The function gets fresh
        lists, since a call that failed may have changed them.

        Raises:
            RewardError: as :meth:`check_columns`; also whatever the function raises.
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
                f"{self.label} takes the steps of responses, and nothing defines them.",
                where=f"{key}={self.located.spec}", fix="set reward.step_separator or "
                "reward.step_fn (for a served reward: in the run that uses it)")
        configure = f"; or set {kwargs_key(key)}.{name}=..." if key.endswith(".fn") else ""
        return RewardError(
            f"{self.label} needs an argument {name!r} that nothing provides. {near}".rstrip(),
            where=f"{key}={self.located.spec}",
            fix=f"use one of {usable}; or a metadata column of the prompts (there are: {listed}; "
                f"see prompts.columns){configure}")


def kwargs_key(key: str) -> str:
    """``reward.fn`` -> ``reward.kwargs``; ``reward.fns.x.fn`` -> ``reward.fns.x.kwargs``."""
    return f"{key.removesuffix('.fn')}.kwargs"


def name_reward_key(error: PpocliError, key: str) -> None:
    """Replace ``reward.kwargs`` in a built-in's error by the key of the reward that raised it."""
    named = kwargs_key(key)
    error.where = error.where and error.where.replace("reward.kwargs", named)
    error.fix = error.fix and error.fix.replace("reward.kwargs", named)


def wrong_argument(name: str, value: object, expected: str) -> RewardError:
    """A built-in's error for an argument of a wrong type or value."""
    return RewardError(f"{name}={shorten(repr(value))[1:-1]} is not {expected}.",
                       where=f"reward.kwargs.{name}", fix=f"set reward.kwargs.{name} to {expected}")


def bind(target: Any, kwargs: Mapping[str, Any], *, key: str, style: str = "ppocli",
         name: str | None = None, weight: float = 1.0) -> BoundCallable:
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
    """The parameters of a call without ``self``; for a ``torch.nn.Module`` those of ``forward``."""
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
