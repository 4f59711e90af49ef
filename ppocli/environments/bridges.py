"""Adapters: environments written for other libraries, and plain functions as tools.

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
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from ppocli.config import extras
from ppocli.config.text import error_line
from ppocli.runs.daemon import awaited
from ppocli.runs.episode import Step

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


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


class _AgentInstanceBase:
    """Replaces OpenRLHF's base class if that isn't installed."""

    async def reset(self, states: Any, **_: Any) -> Any:
        """The same as OpenRLHF's."""
        return states


@contextmanager
def openrlhf_names() -> Iterator[None]:
    """Make the base classes that an agent's file imports importable within the block, even if
    OpenRLHF, which needs Ray and a GPU, isn't installed: ppocli plays the episodes itself."""
    if extras.installed("openrlhf"):
        yield
        return
    names = ("openrlhf", "openrlhf.utils", "openrlhf.utils.agent")
    sys.modules.update({name: ModuleType(name) for name in names})
    for base in ("AgentInstanceBase", "MultiTurnAgentExecutor", "AgentExecutorBase"):
        setattr(sys.modules[names[-1]], base, type(base, (_AgentInstanceBase,), {}))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
