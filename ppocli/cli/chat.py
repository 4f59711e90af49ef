"""``ppocli chat``: a conversation with one or two models in a terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from ppocli.cli import options as opt
from ppocli.cli.generate import printable
from ppocli.cli.options import Overrides, Run
from ppocli.cli.output import complain, say, working
from ppocli.errors import ConfigError, PpocliError, StoppedError
from ppocli.text import clean, figure, first_line

if TYPE_CHECKING:
    from ppocli.cli.sampling_request import ChosenModels, SamplingRequest
    from ppocli.config.schema import GenerationConfig
    from ppocli.evaluation.player import Player
    from ppocli.rewards.scoring import Reward as RewardModel

PROMPT = "> "
HELP = """\
/quit            leave (also Ctrl-D); Ctrl-C stops an answer
/reset           forget the conversation
/seed N          the seed of the next answers; they start over
/set NAME=VALUE  change the sampling, e.g. /set temperature=0.7 max_new_tokens=60
/set             show the sampling
/help            this list
//text           a text that begins with a slash"""


def chat(
        ctx: typer.Context, run: Run = None, overrides: Overrides = None,
        max_new_tokens: opt.MaxNew = None, min_new_tokens: opt.MinNew = None,
        temperature: opt.Temperature = None, top_k: opt.TopK = None, top_p: opt.TopP = None,
        greedy: opt.Greedy = False, stop: opt.Stop = None, seed: opt.Seed = 0,
        system: opt.System = None, step: opt.Step = None, best: opt.Best = False,
        score: opt.Score = False, reward: opt.Reward = None, against: opt.Against = None) -> None:
    """Chat with a run, a checkpoint or a model in the terminal.

    Answers appear as they are sampled. With a chat template the conversation is kept; without one
    each text is a separate prompt. /help lists the commands; /quit or Ctrl-D leaves, Ctrl-C stops
    an answer.

    \b
    Examples:
      ppocli chat
      ppocli chat runs/NAME --score
      ppocli chat runs/NAME --against base --temperature 0.7
    """
    from ppocli.cli.sampling_request import find_models, loaded, sampling_request
    from ppocli.parallel.stop import signal_handlers

    request = sampling_request(ctx)
    if not sys.stdin.isatty():
        raise ConfigError("ppocli chat needs a terminal, and standard input isn't one.",
                          where="standard input",
                          fix="ppocli generate takes prompts from a pipe or a file")
    chosen = find_models(request)
    with working(), loaded(request, chosen) as (players, generation, judge):
        if system is not None and not players[0].has_chat_template:
            raise ConfigError(f"The tokenizer of {players[0].name} has no chat template for a "
                              "system message.", where="--system", fix="leave it out")
        talk = Chat(request, chosen, players, generation, judge)
        # while a line is awaited, signals end the waiting at once instead of setting a flag
        with signal_handlers({signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _leave,
                              signal.SIGHUP: _leave}):
            talk.greet()
            _converse(talk)


class Conversation:
    """What was said between the user and one model."""

    def __init__(self, player: Player, system: str | None = None) -> None:
        self.player = player
        self.system = system
        self.turns: list[tuple[str, str]] = []
        """(user, assistant), the oldest first; always empty without a chat template"""
        self.dropped = 0
        """turns that no longer fit the model"""

    def ask(self, text: str, generation: GenerationConfig) -> tuple[str, list[int]]:
        """The prompt that continues the conversation with ``text``: rendered, and as tokens.

        The oldest turns are dropped as long as the whole and an answer don't fit the model.

        Raises:
            ConfigError: the text alone is too long, or empty.
            InputError: the chat template refuses it.
        """
        chat = self.player.has_chat_template
        while True:
            prompt: Any = self._messages(text) if chat else text
            rendered = self.player.render([prompt], chat=chat)
            try:
                return rendered[0], self.player.tokens(rendered, generation, chat=chat)[0]
            except ConfigError:
                if not self.turns:
                    raise
            if not self.dropped:
                say(f"(the conversation has outgrown the positions of {self.player.name}: its "
                    "oldest turns are left out)")
            del self.turns[0]
            self.dropped += 1

    def keep(self, text: str, answer: str) -> None:
        """Remember a turn, where there is a template to tell turns apart."""
        if self.player.has_chat_template:
            self.turns.append((text, answer))

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.turns.clear()
        self.dropped = 0

    def _messages(self, text: str) -> list[dict[str, str]]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for user, assistant in self.turns:
            messages += [{"role": "user", "content": user},
                         {"role": "assistant", "content": assistant}]
        return [*messages, {"role": "user", "content": text}]


class Chat:
    """The state between two lines of the user."""

    def __init__(self, request: SamplingRequest, chosen: ChosenModels, players: Sequence[Player],
                 generation: GenerationConfig, reward: RewardModel | None) -> None:
        self._cfg = chosen.cfg
        self._generation = generation
        self._reward = reward
        self._seed = request.seed
        self._asked = 0
        self._conversations = [Conversation(player, request.system) for player in players]

    def greet(self) -> None:
        """Say with whom one chats and how."""
        players = [conversation.player for conversation in self._conversations]
        say(f"chatting with {' and '.join(clean(player.name) for player in players)}: "
            f"{self._sampling()}")
        for player in players:
            if not player.has_chat_template:
                say(f"{clean(player.name)} has no chat template: each text is a prompt of its own, "
                    "and the answer continues it")
        say("/help lists the commands, /quit leaves")

    def take(self, line: str) -> bool:
        """Answer a line, or obey it; returns False to leave.

        Raises:
            StopRequested: SIGTERM came, or the terminal went away.
        """
        if not line.strip():
            return True
        try:
            if line.startswith("/") and not line.startswith("//"):
                return self._obey(line.split())
            self._answer(line.removeprefix("/") if line.startswith("//") else line)
        except PpocliError as error:
            # of this line alone: the conversation goes on
            complain(f"Error: {error}")
        return True

    def _obey(self, words: list[str]) -> bool:
        name, values = words[0], words[1:]
        if name in ("/quit", "/exit"):
            return False
        if name == "/help":
            complain(HELP)
        elif name == "/reset":
            self._asked = 0
            for conversation in self._conversations:
                conversation.reset()
            complain("forgotten")
        elif name == "/seed":
            from ppocli.cli.sampling_request import MAX_SEED

            if len(values) != 1 or not values[0].isdecimal() or int(values[0]) >= MAX_SEED:
                raise ConfigError(f"/seed {' '.join(values)}: it takes a number from 0.",
                                  fix="/seed 1")
            self._seed, self._asked = int(values[0]), 0
        elif name == "/set":
            self._set(values)
        else:
            raise ConfigError(f"There is no command {name}.", fix="/help lists them; //text sends "
                              "a text that begins with a slash")
        return True

    def _set(self, values: list[str]) -> None:
        from ppocli.cli.sampling_request import say_idle
        from ppocli.evaluation.player import CHANGEABLE, changed_sampling

        pairs = [word.partition("=") for word in values]
        wrong = [name for name, equals, _ in pairs if not equals]
        if wrong:
            raise ConfigError(f"/set {wrong[0]}: it takes NAME=VALUE.", fix="/set temperature=0.7")
        changes = {name: getattr(self._generation, name) for name in CHANGEABLE}
        changes.update(_typed(self._generation, {name: value for name, _, value in pairs}))
        self._generation = changed_sampling(self._cfg, changes)
        say_idle(self._generation, [name for name, _, _ in pairs])
        complain(self._sampling())

    def _sampling(self) -> str:
        from ppocli.sampling.token_choice import SAMPLING_KEYS

        shown = {name: getattr(self._generation, name) for name in SAMPLING_KEYS}
        return ", ".join([f"{name}={value}" for name, value in shown.items()]
                         + [f"seed={self._seed}"])

    def _answer(self, text: str) -> None:
        """Each model's answer; Ctrl-C ends that answer, and what there is of it counts."""
        number, self._asked = self._asked, self._asked + 1
        for conversation in self._conversations:
            rendered, tokens = conversation.ask(text, self._generation)
            if len(self._conversations) > 1:
                print(f"[{clean(conversation.player.name)}]")
            pieces: list[str] = []
            try:
                self._speak(conversation.player, rendered, tokens, number, pieces)
            finally:
                if pieces:
                    conversation.keep(text, "".join(pieces))

    def _speak(self, player: Player, rendered: str, tokens: list[int], number: int,
               pieces: list[str]) -> None:
        from ppocli.evaluation.player import scores_of
        from ppocli.parallel.stop import StopRequested, catch_signals

        def show(piece: str) -> None:
            pieces.append(piece)
            print(printable(piece), end="", flush=True)

        with catch_signals() as stop:
            try:
                try:
                    answers = [answer for batch in player.answers(
                        [tokens], self._generation, seed=self._seed, first=number,
                        poll=stop.check, show=show) for answer in batch]
                finally:
                    print(flush=True)
                if self._reward is not None:
                    score, = scores_of(self._reward, player, [rendered], answers, {})
                    complain(f"score {figure(score, 3)}")
                stop.check()
            except StopRequested as stopped:
                if stopped.signal_number != signal.SIGINT:
                    raise
                complain("(stopped)")


def _leave(number: int, frame: FrameType | None) -> None:
    from ppocli.parallel.stop import StopRequested

    raise StopRequested(signal.SIGTERM)


def _typed(generation: GenerationConfig, texts: dict[str, str]) -> dict[str, Any]:
    """Texts as values of the types that the settings have.

    Raises:
        ConfigError: a value of another type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from ppocli.sampling.token_choice import SAMPLING_KEYS

    node = OmegaConf.structured(generation)
    for name, text in texts.items():
        if name not in SAMPLING_KEYS:
            raise ConfigError(f"{name!r} is not a sampling setting.",
                              fix=f"one of {', '.join(SAMPLING_KEYS)}")
        try:
            OmegaConf.update(node, name, text)
        except OmegaConfBaseException as error:
            raise ConfigError(f"/set {name}={text}: {first_line(error.msg or error)}") from error
    return {name: node[name] for name in texts}


def _converse(talk: Chat) -> None:
    # line editing and history for input(), where Python was built with it
    with suppress(ImportError):
        import readline  # noqa: F401

    while True:
        try:
            line = input(PROMPT)
        except EOFError:
            print(flush=True)
            return
        except UnicodeDecodeError:
            complain("Error: that was not UTF-8")
            continue
        except KeyboardInterrupt:
            print(flush=True)
            raise StoppedError("left by Ctrl-C", signal_number=signal.SIGINT) from None
        if not talk.take(line):
            return
