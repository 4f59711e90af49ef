"""From ``env.fn`` to an environment: imported, with its signatures checked."""

import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter
from typing import Any

from ppocli.builtin.names import BUILTIN_ENVIRONMENTS, TOOLS
from ppocli.config.schema import EnvConfig
from ppocli.config.text import first_line, suggestion
from ppocli.config.user_classes import refuse_abstract
from ppocli.config.user_code import CodeSetting, Kind, Located, locate
from ppocli.environments import bridges
from ppocli.errors import RewardError

ENVIRONMENT = Kind("class", RewardError, BUILTIN_ENVIRONMENTS)
TOOL = Kind("function", RewardError)
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class EnvironmentClass:
    """The class that ``env.fn`` names. Each object plays one episode."""

    label: str
    """name, file and line, for messages"""
    file: str | None
    make: Callable[[], Any]
    """returns a new environment with ``reset`` and ``step``"""
    reset_names: frozenset[str] | None = None
    """names of the arguments that ``reset`` takes; None: all"""
    step_takes_rng: bool = False
    waits: bool = False
    """whether ``step`` is ``async``, so that the calls of a batch wait together"""
    deterministic: bool = True
    """whether the same responses and random numbers give the same episode"""
    tools: tuple[Any, ...] = ()
    """functions that the chat template describes to the policy"""


def code_files(cfg: EnvConfig) -> list[str]:
    """Files of the user's code that episodes run, for ``running code from FILE``.

    Raises:
        RewardError: as :func:`resolve`.
    """
    return sorted({file for one in _located(cfg) if (file := one.file)
                   and one.spec not in BUILTIN_ENVIRONMENTS})


def _located(cfg: EnvConfig) -> list[Located]:
    if cfg.fn == TOOLS:
        return [locate(CodeSetting(spec, "env.tools", TOOL)) for spec in cfg.tools]
    with bridges.openrlhf_names() if cfg.adapter == "openrlhf" else nullcontext():
        return [locate(CodeSetting(str(cfg.fn), "env.fn", ENVIRONMENT))]


def resolve(cfg: EnvConfig, columns: Collection[str] | None) -> EnvironmentClass:
    """Import and check the environment.

    Args:
        columns: metadata columns of the prompts; None while they aren't known.

    Raises:
        RewardError: the path leads to nothing, a method is missing, or ``reset`` or ``step`` takes
            an argument that nothing provides.
    """
    locations = _located(cfg)
    if cfg.fn == TOOLS:
        functions = _described([one.target for one in locations], "env.tools")
        return EnvironmentClass(", ".join(cfg.tools), locations[0].file,
                                partial(bridges.ToolPlay, functions), frozenset(),
                                tools=functions)
    located, = locations
    cls: Any = located.target
    where = f"env.fn={cfg.fn}"
    if not inspect.isclass(cls):
        raise RewardError(f"{located.label} is no class.", where=where,
                          fix="name a class with reset and step; each episode gets an object of it")
    for method in ("reset",) if cfg.adapter == "trl" else ("reset", "step"):
        if not callable(getattr(cls, method, None)):
            raise RewardError(f"{located.label} has no method {method}.", where=where,
                              fix="def reset(self, prompt, **columns) and def step(self, response)"
                              "; classes of other libraries: env.adapter=trl or openrlhf")
    refuse_abstract(located, RewardError)
    if cfg.adapter is None:
        _check_step(cls, located)
    try:
        inspect.signature(cls).bind(**cfg.kwargs)
    except TypeError as error:
        raise RewardError(f"{located.label} can't be made with env.kwargs={dict(cfg.kwargs)}: "
                          f"{error}.", where=f"{where}, env.kwargs",
                          fix=f"it takes {inspect.signature(cls)}") from error
    step: Any = getattr(cls, "step", None)
    plain = EnvironmentClass(located.label, located.file, partial(cls, **cfg.kwargs),
                             waits=inspect.iscoroutinefunction(step),
                             deterministic=bool(getattr(cls, "deterministic", True)))
    if cfg.adapter == "trl":  # a tool may be called step
        return replace(plain, make=lambda: bridges.TRLPlay(plain.make()), waits=False,
                       tools=_described(bridges.tools_of(cls), where))
    if cfg.adapter == "openrlhf":
        return replace(plain, make=lambda: bridges.OpenRLHFPlay(plain.make()))
    return replace(plain, reset_names=_reset_names(cls, located, columns),
                   step_takes_rng="rng" in inspect.signature(step).parameters)


def _receivers(cls: Any, method: str) -> int:
    """1 if a method, taken from its class, has ``self`` as its first argument; else 0."""
    return int(not isinstance(inspect.getattr_static(cls, method), staticmethod | classmethod))


def _check_step(cls: Any, located: Located) -> None:
    """Refuse a ``step`` with other arguments than a response and random numbers."""
    signature, receiver = inspect.signature(cls.step), (None,) * _receivers(cls, "step")
    named = {"rng": None} if "rng" in signature.parameters else {}
    try:
        signature.bind(*receiver, "", **named)
    except TypeError as error:
        raise RewardError(f"{located.label}: step{signature} is called as step(response) or "
                          f"step(response, rng=...): {error}.", where="env.fn",
                          fix="def step(self, response)") from error


def _described(tools: Sequence[Any], where: str) -> tuple[Any, ...]:
    """The functions, if chat templates can describe each of them and their names differ.

    Raises:
        RewardError: a function can't be described, or has the name of another.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    names = list[str]()
    for tool in tools:
        try:
            names.append(get_json_schema(tool)["function"]["name"])
        except Exception as error:  # of several kinds; a tool may be anything that can be called
            name = getattr(tool, "__name__", repr(tool))
            raise RewardError(f"{name} can't be described to the policy: {first_line(error)}",
                              where=where, fix="give it a docstring, with Args, and type hints"
                              ) from error
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RewardError(f"Several tools are called {twice[0]}, of which the policy could call "
                          "one.", where=where, fix="give each a name of its own")
    return tuple(tools)


def _reset_names(cls: Any, located: Located, columns: Collection[str] | None
                 ) -> frozenset[str] | None:
    """The names of the arguments of ``reset``; None: it takes all.

    Raises:
        RewardError: nothing provides a required argument.
    """
    parameters = list(inspect.signature(cls.reset).parameters.values())[_receivers(cls, "reset"):]
    available = {"prompt", "messages", "rng", *(columns or ())}
    for parameter in () if columns is None else parameters:
        if (parameter.kind in _NAMED and parameter.default is Parameter.empty
                and parameter.name not in available):
            listed = ", ".join(sorted(columns or ())) or "none"
            raise RewardError(f"{located.label}: reset asks for {parameter.name!r}, which nothing "
                              f"provides. {suggestion(parameter.name, available)}".rstrip(),
                              where="env.fn", fix="use prompt, messages, rng or a metadata column "
                              f"of the prompts (there are: {listed}; see prompts.columns)")
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)
