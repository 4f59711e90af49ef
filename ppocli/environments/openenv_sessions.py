"""``env.fn=openenv``: episodes on a server of OpenEnv (``meta-pytorch/OpenEnv``), each in a session
of its own, through the client of the package ``openenv``."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any
from weakref import WeakKeyDictionary, finalize

from ppocli.config.import_guard import require
from ppocli.config.secrets import why_no_url
from ppocli.environments.env_calls import is_observation
from ppocli.errors import RewardError
from ppocli.runs.episode import Step

require("openenv", "env.fn=openenv", "env.fn")
from openenv.core.generic_client import GenericEnvClient  # noqa: E402

_idle: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, list[Any]]] = WeakKeyDictionary()
"""by event loop and address, the sessions that no episode has: the next ones take them"""
LARGEST_SEED = 2**31


class OpenEnv:
    """One episode. ``reset`` sends the server a seed, the prompt and the columns of its row, of
    which the environment gets those that its own ``reset`` names; ``step`` sends the turn.

    Args:
        url: address of the server, ``http://HOST:PORT``.
        action: field of the server's action that a turn is sent in.
        observation: field of its observation that the policy reads; None: all, as JSON.

    Raises:
        RewardError: ``url`` is no address, or holds a secret.
    """

    deterministic = False
    """what a seed fixes is up to the server"""
    wrapped = None
    """in place of this object, which an episode's record would keep and its session with it"""

    def __init__(self, url: str, action: str = "message", observation: str | None = None) -> None:
        if wrong := why_no_url(url):
            raise RewardError(f"env.kwargs.url is no address of a server ({wrong}).",
                              where="env.kwargs.url", fix="env.kwargs.url=http://127.0.0.1:8000")
        self.url, self.action, self.observation = url, action, observation

    async def reset(self, *, rng: Any, prompt: Any = None, messages: Any = None, **columns: Any
                    ) -> Any:
        """Take a session, and begin an episode in it."""
        idle = _idle.setdefault(asyncio.get_running_loop(), {}).setdefault(self.url, [])
        self.client = idle.pop() if idle else GenericEnvClient(
            base_url=self.url, message_timeout_s=None)  # env.timeout limits calls
        # also of an episode that is cut off, which nothing tells that it is over
        self.leave = finalize(self, idle.append, self.client)
        self.leave.atexit = False
        seed = int(rng.integers(LARGEST_SEED))
        result = await self._answer(self.client.reset(**{
            **columns, "prompt": messages or prompt, "seed": seed}))
        return self._words(result.observation)

    async def step(self, response: str) -> Step:
        """Send a turn."""
        result = await self._answer(self.client.step({self.action: response}))
        if result.done:
            self.leave()
        return Step(self._words(result.observation), float(result.reward or 0), bool(result.done))

    async def _answer(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except RuntimeError as error:  # as which the client raises what the server reports
            if "CAPACITY_REACHED" not in str(error):
                raise
            raise RuntimeError(f"{error}. Each episode has a session: start the server with "
                               "max_concurrent_envs of at least ppo.chunk_size times the number "
                               "of processes, or lower ppo.chunk_size") from error

    def _words(self, observation: dict[str, Any]) -> Any:
        fields = {name: value for name, value in observation.items() if name != "metadata"}
        if self.observation is None:
            return json.dumps(fields, ensure_ascii=False)
        if self.observation not in fields:
            raise ValueError(f"the server's observation has no field {self.observation!r}; it has "
                             f"{', '.join(fields)} (env.kwargs.observation)")
        value = fields[self.observation]
        return value if is_observation(value) else json.dumps(value, ensure_ascii=False)
