"""Environments of a user's own, for tests."""

import asyncio
import time

from ppocli import Step
from ppocli.environments.env_calls import Called, Calls
from ppocli.sampling.samples import ROLLOUT


class Words:
    """Says one of a few words, or nothing, after each turn; how many turns there are and what is
    said depend on the random numbers alone."""

    def __init__(self, most: int = 4) -> None:
        self.most, self.turns = most, 0

    def reset(self, prompt, *, rng, label=None):
        self.last = int(rng.integers(1, self.most + 1))
        return " the film" if rng.integers(2) else None

    def step(self, response, rng):
        self.turns += 1
        said = (None, " good", " a film was", " warm")[int(rng.integers(4))]
        return Step(said, reward=len(response) / 10 - 0.3 * self.turns,
                    done=self.turns == self.last)


class Slow(Words):
    """The same, but waits."""

    async def step(self, response, rng):
        await asyncio.sleep(0.01)
        return super().step(response, rng)


class Failing(Words):
    """Every second episode fails in its second turn."""

    trouble = "raise"

    def reset(self, prompt, *, rng, label=None):
        self.fails = bool(rng.integers(2))
        self.last = 3

    def step(self, response, rng):
        if self.fails and self.turns == 1:
            if self.trouble == "hang":
                time.sleep(30)
            if self.trouble == "garbage":
                return "higher"
            if self.trouble == "nan":
                return None, float("nan"), False
            raise ValueError("the door is locked")
        return super().step(response, rng)


class Hanging(Failing):
    trouble = "hang"


class Waiting(Words):
    """Waits far too long."""

    calls = 0

    async def step(self, response, rng):
        type(self).calls += 1
        await asyncio.sleep(30)


class Garbage(Failing):
    trouble = "garbage"


class NoNumber(Failing):
    trouble = "nan"


class Counter:
    """Fails until it was called a third time."""

    calls = 0

    def reset(self, prompt):
        return None

    def step(self, response):
        type(self).calls += 1
        if self.calls % 3:
            raise OSError("busy")
        return Step(done=True, reward=1.0)


class Reports:
    """Earns the number that ``reset`` has drawn, and answers with one that ``step`` draws."""

    def reset(self, prompt, *, rng):
        self.number = int(rng.integers(10**6))

    def step(self, response, rng):
        return Step(f" {rng.integers(10**9)}", reward=self.number)


class Keeps(Reports):
    """Goes on with the generator of ``reset``."""

    def reset(self, prompt, *, rng):
        self.rng = rng
        super().reset(prompt, rng=rng)

    def step(self, response):
        return Step(reward=float(self.rng.integers(10**6)))


class AsyncKeeps(Keeps):
    async def reset(self, prompt, *, rng):
        await asyncio.sleep(0)
        super().reset(prompt, rng=rng)


class Lookup:
    """An environment of TRL's: its public methods are tools."""

    def reset(self, **row):
        self.found = 0
        return " What is the film?"

    def look(self, name: str) -> str:
        """Look a film up.

        Args:
            name: the film's name.
        """
        self.found += 1
        return f"{name} is good"


def found(completions, environments, **_):
    """A reward in TRL's way."""
    return [float(one.found) for one in environments]


class AgentInstance:
    """An environment of OpenRLHF's."""

    def __init__(self):
        self.steps = 0

    async def reset(self, states, **_):
        return {"observation": states["observation"]}

    async def step(self, states, **_):
        import torch

        self.steps += 1
        assert states["observation_text"].endswith(" more" if self.steps > 1 else "")
        return {"rewards": torch.tensor(float(len(states["action_text"]))),
                "scores": torch.tensor(1.0), "environment_feedback": " more",
                "done": self.steps == 2, "sampling_params": None, "extra_logs": {}}


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def fail(a: int) -> int:
    """Never works.

    Args:
        a: any.
    """
    raise RuntimeError("out of order")


TEMPLATE = ("{% for m in messages %}<im>{{ m.role }} {{ m.content }}<eos> {% endfor %}"
            "{% if add_generation_prompt %}<im>assistant {% endif %}")


def chat_tokenizer(template: str = TEMPLATE):
    """Of characters, so that any text can be read back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *letters])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>",
                                   unk_token="<unk>", chat_template=template)


def stepped(calls: Calls, environments, turn: int, response: str = "good"):
    return calls.answers([Called(one, episode, turn, {"response": response})
                          for episode, one in enumerate(environments)], ROLLOUT)


class Needy:
    def reset(self, prompt, secret):
        return None

    def step(self, response):
        return None, 0.0, True
