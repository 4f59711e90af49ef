"""A server of OpenEnv, as users have them, for the built-in game: ``python openenv_server.py PORT
SESSIONS``. Each line of its output is what an episode began with."""

import json
import sys

import numpy as np
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from ppocli.environments.shipped import GuessNumber


class Guess(Action):
    guess: str


class Answer(Observation):
    text: str = ""
    turns: int = 0


class GuessServer(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, prompt=None):
        self.game, self._state = GuessNumber(), State(episode_id=episode_id, step_count=0)
        print(json.dumps([seed, prompt]) + "\n", end="", flush=True)  # whole, from any thread
        return Answer(text=self.game.reset(rng=np.random.default_rng(seed)))

    def step(self, action, timeout_s=None):
        if action.guess == "error":
            raise ValueError("no such move")
        self._state.step_count += 1
        step = self.game.step(action.guess)
        return Answer(text=step.observation, turns=self._state.step_count, reward=step.reward,
                      done=step.done)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    uvicorn.run(create_app(GuessServer, Guess, Answer, env_name="guess",
                           max_concurrent_envs=int(sys.argv[2])),
                host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
