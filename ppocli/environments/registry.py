"""From ``env.fn`` to an environment: imported, with its signatures checked; and adapters for
environments written for other libraries, and plain functions as tools.

- TRL (``huggingface/trl:trl/trainer/grpo_trainer.py``, ``environment_factory``): ``reset(**row)``
  returns text for the prompt; every other public method is a tool. The first turn without a call
  ends the episode. The reward function, which gets ``environments``, scores it.
- OpenRLHF (``OpenRLHF/OpenRLHF:openrlhf/utils/agent.py``, ``AgentInstanceBase``): ``async
  reset(states)`` and ``async step(states)``, which gets ``observation_text``, ``action_text`` and
  ``label`` and returns ``environment_feedback``, ``rewards`` and ``done``.
"""

import inspect
import json
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter
from typing import Any

from ppocli.builtin.names import BUILTIN_ENVIRONMENTS, TOOLS
from ppocli.config.schema import EnvConfig
from ppocli.config.text import error_line, first_line, suggestion
from ppocli.config.user_code import CodeSetting, Kind, Located, locate
from ppocli.errors import RewardError
from ppocli.runs.daemon import awaited
from ppocli.runs.episode import Step

ENVIRONMENT = Kind("class", RewardError, BUILTIN_ENVIRONMENTS)
TOOL = Kind("function", RewardError)
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)
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
    return [locate(CodeSetting(str(cfg.fn), "env.fn", ENVIRONMENT))]


def resolve(cfg: EnvConfig, columns: Collection[str] | None) -> EnvironmentClass:
    """Import and check the environment.

    Args:
        columns: metadata columns of the prompts; None while they aren't known.

    Raises:
        RewardError: the path leads to nothing, a method is missing, or ``reset`` takes an argument
            that nothing provides.
    """
    locations = _located(cfg)
    if cfg.fn == TOOLS:
        functions = _described([one.target for one in locations], "env.tools")
        return EnvironmentClass(", ".join(cfg.tools), locations[0].file,
                                partial(ToolPlay, functions), frozenset(),
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
        return replace(plain, make=lambda: TRLPlay(plain.make()), waits=False,
                       tools=_described(tools_of(cls), where))
    if cfg.adapter == "openrlhf":
        return replace(plain, make=lambda: OpenRLHFPlay(plain.make()))
    return replace(plain, reset_names=_reset_names(cls, located, columns),
                   step_takes_rng="rng" in inspect.signature(step).parameters)


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
    is_plain = not isinstance(inspect.getattr_static(cls, "reset"), staticmethod | classmethod)
    parameters = list(inspect.signature(cls.reset).parameters.values())[is_plain:]  # without self
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


# Adapters -----------------------------------------------------------------------------------------

def tools_of(thing: Any) -> tuple[Any, ...]:
    """The public methods of a TRL environment, or of its class, except ``reset``."""
    return tuple(member for name, member in inspect.getmembers(thing, inspect.isroutine)
                 if not name.startswith("_") and name != "reset")


def parsed(call: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a tool call in the syntax of Hermes and Qwen, ``{"name": ...,
    "arguments": {...}}``.

    Raises:
        ValueError: the call is malformed.
    """
    try:
        fields = json.loads(call)
        name, arguments = fields["name"], fields.get("arguments") or {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the call is no JSON object with a name: {error_line(error)}") from error
    if isinstance(arguments, str):  # some models write JSON into JSON
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("arguments must be a JSON object")
    return name, arguments


class ToolPlay:
    """Functions that the policy calls in the chat template's syntax. The first turn without a call
    ends the episode. An exception of a function becomes an observation, and the run goes on."""

    def __init__(self, tools: Sequence[Callable[..., Any]]) -> None:
        self._tools = {tool.__name__: tool for tool in tools}

    def reset(self) -> None:
        """Nothing is added to the prompt."""

    def step(self, response: str) -> Step:
        """Make the calls of a turn in order, each between ``<tool_call>`` and ``</tool_call>``."""
        if not (calls := _CALL.findall(response)):
            return Step(done=True)
        messages, failed = [], None
        for call in calls:
            name = "unknown"
            try:
                name, arguments = parsed(call)
                text = self._answer(name, arguments)
            except Exception as error:  # the user's own code, or the policy's arguments for it
                text = failed = f"error: {error_line(error)}"
            messages.append({"role": "tool", "name": name, "content": text})
        return Step(observation=messages, failed=failed)

    def _answer(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in self._tools:
            raise ValueError(f"there is no tool {name!r}; there are {', '.join(self._tools)}")
        result = self._tools[name](**arguments)
        result = awaited(result, "environments") if inspect.iscoroutine(result) else result
        return result if isinstance(result, str) else json.dumps(result, default=str)


class TRLPlay(ToolPlay):
    """A TRL environment, whose methods are the tools."""

    def __init__(self, environment: Any) -> None:
        super().__init__(tools_of(environment))
        self.wrapped = environment

    def reset(self, *, prompt: Any = None, messages: Any = None, rng: Any = None, **columns: Any
              ) -> Any:
        """Pass the whole row with the prompt, as TRL does."""
        return self.wrapped.reset(prompt=messages or prompt, **columns)


class OpenRLHFPlay:
    """An OpenRLHF ``AgentInstance``."""

    def __init__(self, agent: Any) -> None:
        self.wrapped, self._text, self._label = agent, "", None

    async def reset(self, *, prompt: Any, label: Any = None, **_: Any) -> Any:
        """The text that the agent adds to the prompt, which it may not change."""
        self._label = label
        text = (await self.wrapped.reset({"observation": prompt, "label": label}))["observation"]
        if not isinstance(text, str) or not text.startswith(prompt):
            raise ValueError("reset returned an observation that does not begin with the prompt")
        self._text = text
        return text[len(prompt):] or None

    async def step(self, response: str) -> Step:
        """One turn."""
        result = await self.wrapped.step({"observation_text": self._text, "action_text": response,
                                          "label": self._label, "sampling_params": None})
        feedback = result.get("environment_feedback") or ""
        self._text += response + feedback
        return Step(observation=feedback or None, reward=float(result["rewards"]),
                    done=bool(result["done"]))
