"""A conversation with a model in a terminal: ``ppocli chat``."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from ppocli.cli import options as opt
from ppocli.cli.generate import configured, loaded, make_request
from ppocli.cli.options import Overrides, Run, option
from ppocli.cli.output import complain, say, show_text, working
from ppocli.config.text import clean, figure, unescaped
from ppocli.distributed.ranks import StopRequested
from ppocli.distributed.standard_output import put
from ppocli.distributed.stop import catch_signals, signal_handlers
from ppocli.errors import ConfigError, PpocliError, StoppedError

if TYPE_CHECKING:
    from types import FrameType

    from ppocli.config.schema import GenerationConfig, TrainConfig
    from ppocli.evaluation.player import Player
    from ppocli.rewards.scoring import Reward

HELP = """\
/quit            leave (also Ctrl-D); Ctrl-C stops an answer
/reset           forget the conversation
/set NAME=VALUE  change the sampling, e.g. /set temperature=0.7 max_new_tokens=60 seed=1
/set             show the sampling
/help            this list
//text           a text that begins with a slash"""


def chat(
        run: Run = None, overrides: Overrides = None,
        system: str | None = option("TEXT", "A system message before each conversation."),
        score: opt.Score = False, reward: opt.Reward = None,
        step: opt.Step = None, best: opt.Best = False, trust: opt.Trust = False) -> None:
    """Chat with a run, a checkpoint or a model in the terminal.

    Answers appear as they are sampled. With a chat template the conversation is kept; without one,
    and with a model that was trained without it, each text is a separate prompt. /help lists the
    commands; /quit or Ctrl-D leaves, Ctrl-C stops an answer.

    \b
    Examples:
      ppocli chat
      ppocli chat runs/NAME --score
      ppocli chat ./model generation.temperature=0.7
    """
    request = make_request(run, overrides, reward, step, best, trust)
    if not sys.stdin.isatty():
        raise ConfigError("ppocli chat needs a terminal, and standard input isn't one.",
                          where="standard input",
                          fix="ppocli generate takes prompts from a pipe or a file")
    scored = score or reward is not None
    with working():
        target, cfg = configured(request, scored)
        with loaded(request, target, cfg, scored) as (player, generation, judge):
            talk = Chat(cfg, player, generation, judge, system and unescaped(system))
            with _awaiting_lines():
                talk.greet()
                # line editing and history for input(), where Python was built with it
                with suppress(ImportError):
                    import readline  # noqa: F401
                while talk.take(_typed()):
                    pass


class Chat:
    """A conversation of the user with a model, which a chat template renders as a whole; without
    one each text is a separate prompt.

    Raises:
        ConfigError: there is no chat template for ``prompts.chat=true`` or a system message.
    """

    def __init__(self, cfg: TrainConfig, player: Player, generation: GenerationConfig,
                 reward: Reward | None, system: str | None = None) -> None:
        self._cfg, self._player, self._generation, self._reward = cfg, player, generation, reward
        self._seed = cfg.seed
        self.keeps_turns = player.has_chat_template and cfg.prompts.chat is not False
        """whether the chat template renders the conversation"""
        if (system is not None or cfg.prompts.chat) and not self.keeps_turns:
            raise ConfigError(f"{player.name} is used without a chat template.",
                              where="--system" if system else "prompts.chat",
                              fix="leave it out: each text is a prompt of its own")
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; the random numbers start over."""
        self._next_number = 0
        self.turns: list[list[dict[str, str]]] = []
        """messages of user and assistant, the oldest first; always empty without a template"""
        self.dropped = 0
        """turns that no longer fit the model"""

    def greet(self) -> None:
        """Print the name of the model and the sampling."""
        say(f"chatting with {clean(self._player.name)}: {self._sampling()}")
        if not self.keeps_turns:
            say("no chat template: each text is a prompt of its own, and the answer continues it")
        say("/help lists the commands, /quit leaves")

    def take(self, line: str) -> bool:
        """Answer a line, or carry out its command; returns False to leave.

        Raises:
            StopRequested: SIGTERM came, or the terminal went away.
        """
        if not line.strip():
            return True
        try:
            if line.startswith("/") and not line.startswith("//"):
                return self._obey(line.split())
            self._answer(line.removeprefix("/"))
        except PpocliError as error:
            complain(f"Error: {error}")  # this line failed; the conversation goes on
        return True

    def prompt(self, text: str) -> tuple[list[Any], str, list[int]]:
        """The prompt that continues the conversation with ``text``: messages, rendered, tokens.

        The oldest turns are dropped as long as the whole and an answer don't fit the model.

        Raises:
            ConfigError: the text alone is too long, or empty.
            InputError: the chat template refuses it.
        """
        chat = self.keeps_turns
        while True:
            messages = [*self._opening, *chain(*self.turns), {"role": "user", "content": text}]
            rendered = self._player.render([messages if chat else text], chat=chat)
            try:
                tokens, = self._player.tokens(rendered, self._generation, chat=chat)
                return messages, rendered[0], tokens
            except ConfigError:
                if not self.turns:
                    raise
            if not self.dropped:
                say("(the conversation has outgrown the model's positions: its oldest turns are "
                    "left out)")
            del self.turns[0]
            self.dropped += 1

    def _obey(self, words: list[str]) -> bool:
        name, *values = words
        if name in ("/quit", "/exit"):
            return False
        if name == "/help":
            complain(HELP)
        elif name == "/reset":
            self.reset()
            complain("forgotten")
        elif name == "/set":
            self._set(values)
        else:
            raise ConfigError(f"There is no command {name}.", fix="/help lists them; //text sends "
                              "a text that begins with a slash")
        return True

    def _set(self, values: list[str]) -> None:
        from ppocli.evaluation.player import CHANGEABLE, changed_sampling

        changes = {}
        for name, _, text in (word.partition("=") for word in values):
            changes[name] = text
            with suppress(ValueError):
                changes[name] = json.loads(text)
        seed = changes.pop("seed", self._seed)
        if not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"seed is {seed!r}; it takes a number from 0.", fix="/set seed=1")
        now = {name: getattr(self._generation, name) for name in CHANGEABLE}
        self._generation = changed_sampling(self._cfg, now | changes)
        if seed != self._seed:
            self._seed, self._next_number = seed, 0
        complain(self._sampling())

    def _sampling(self) -> str:
        from ppocli.sampling.samples import SAMPLING_KEYS

        shown = [f"{name}={getattr(self._generation, name)}" for name in SAMPLING_KEYS]
        return ", ".join([*shown, f"seed={self._seed}"])

    def _answer(self, text: str) -> None:
        """Print the answer; Ctrl-C ends it, and its beginning is kept."""
        from ppocli.evaluation.player import scores_of

        number, self._next_number = self._next_number, self._next_number + 1
        messages, rendered, tokens = self.prompt(text)
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            show_text(piece, end="")

        with catch_signals() as stop:
            try:
                try:
                    answer, = chain.from_iterable(self._player.answers(
                        [tokens], self._generation, seed=self._seed, first=number,
                        poll=stop.check, show=show))
                finally:
                    put()
                    if pieces and self.keeps_turns:
                        self.turns.append([messages[-1],
                                           {"role": "assistant", "content": "".join(pieces)}])
                if self._reward is not None:
                    score, = scores_of(self._reward, self._player, [rendered], [answer], {},
                                       [messages] if self.keeps_turns else [])
                    complain(f"score {figure(score, 3)}")
                stop.check()
            except StopRequested as stopped:
                if stopped.signal_number != signal.SIGINT:
                    raise
                complain("(stopped)")


@contextmanager
def _awaiting_lines() -> Iterator[None]:
    """A block that waits for lines of the user until Ctrl-D: signals end the waiting at once
    instead of setting a flag.

    Raises:
        StoppedError: left by Ctrl-C.
        StopRequested: SIGTERM came, or the terminal went away.
    """
    def leave(number: int, frame: FrameType | None) -> None:
        raise StopRequested(signal.SIGTERM)

    try:
        with signal_handlers({signal.SIGINT: signal.default_int_handler, signal.SIGTERM: leave,
                              signal.SIGHUP: leave}):
            yield
    except EOFError:
        put()
    except KeyboardInterrupt:
        put()
        raise StoppedError("left by Ctrl-C", signal_number=signal.SIGINT) from None


def _typed() -> str:
    try:
        return input("> ")
    except UnicodeDecodeError:
        complain("Error: that was not UTF-8")
        return ""
