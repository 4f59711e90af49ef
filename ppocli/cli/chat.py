"""A conversation with one or two models in a terminal: ``ppocli chat``."""

import json
import signal
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from types import FrameType
from typing import Any

from ppocli.cli import sampling_request
from ppocli.cli.output import awaiting_lines, complain, say, show_text, working
from ppocli.config.schema import GenerationConfig
from ppocli.config.schema_training import MAX_SEED
from ppocli.config.text import clean, figure
from ppocli.distributed.standard_output import put
from ppocli.distributed.stop import StopRequested, catch_signals
from ppocli.errors import ConfigError, PpocliError
from ppocli.evaluation.player import CHANGEABLE, Player, changed_sampling, scores_of
from ppocli.rewards.scoring import Reward
from ppocli.sampling.token_choice import SAMPLING_KEYS

PROMPT = "> "
HELP = """\
/quit            leave (also Ctrl-D); Ctrl-C stops an answer
/reset           forget the conversation
/seed N          the seed of the next answers; they start over
/set NAME=VALUE  change the sampling, e.g. /set temperature=0.7 max_new_tokens=60
/set             show the sampling
/help            this list
//text           a text that begins with a slash"""


def converse(request: sampling_request.SamplingRequest) -> None:
    """Chat until the user leaves.

    Raises:
        PpocliError: a model or the reward can't be loaded.
        StoppedError: left by Ctrl-C.
    """
    chosen = sampling_request.find_models(request)
    with working(), sampling_request.loaded(request, chosen) as (players, generation, judge):
        for player in players:
            if chosen.chat and not player.has_chat_template:
                raise ConfigError(f"The tokenizer of {player.name} has no chat template.",
                                  where="--chat", fix="--no-chat takes each text as it is")
        if request.system is not None and not (chosen.chat is not False
                                               and players[0].has_chat_template):
            raise ConfigError(f"{players[0].name} is asked without a chat template, which a "
                              "system message needs.", where="--system", fix="leave it out")
        talk = Chat(request, chosen, players, generation, judge)
        with awaiting_lines(SIGTERM=_leave, SIGHUP=_leave):
            talk.greet()
            # line editing and history for input(), where Python was built with it
            with suppress(ImportError):
                import readline  # noqa: F401
            while talk.take(_typed()):
                pass


class Conversation:
    """A conversation of the user with one model.

    Args:
        chat: False leaves the chat template out; without it each text is a separate prompt.
    """

    def __init__(self, player: Player, system: str | None = None, *, chat: bool | None = None
                 ) -> None:
        self.player = player
        self.chat = player.has_chat_template and chat is not False
        """whether the chat template renders it"""
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[list[dict[str, str]]] = []
        """messages of user and assistant, the oldest first; always empty without ``chat``"""
        self.dropped = 0
        """turns that no longer fit the model"""
        self.messages: list[Any] = []
        """of the newest prompt"""

    def ask(self, text: str, generation: GenerationConfig) -> tuple[str, list[int]]:
        """The prompt that continues the conversation with ``text``: rendered, and as tokens.

        The oldest turns are dropped as long as the whole and an answer don't fit the model.

        Raises:
            ConfigError: the text alone is too long, or empty.
            InputError: the chat template refuses it.
        """
        chat = self.chat
        while True:
            self.messages = [*self._opening, *chain(*self.turns), {"role": "user", "content": text}]
            rendered = self.player.render([self.messages if chat else text], chat=chat)
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
        """Keep a turn, where a chat template renders the conversation."""
        if self.chat:
            self.turns.append([{"role": "user", "content": text},
                               {"role": "assistant", "content": answer}])


class Chat:
    """The models, their conversations and the sampling, between two lines of the user."""

    def __init__(self, request: sampling_request.SamplingRequest,
                 chosen: sampling_request.ChosenModels, players: Sequence[Player],
                 generation: GenerationConfig, reward: Reward | None) -> None:
        self._cfg, self._generation, self._reward = chosen.cfg, generation, reward
        self._players, self._seed, self._system = players, request.seed or 0, request.system
        self._chat = chosen.chat
        self._forget()

    def _forget(self) -> None:
        self._next_number = 0
        self._conversations = [Conversation(player, self._system, chat=self._chat)
                               for player in self._players]

    def greet(self) -> None:
        """Print the names of the models and the sampling."""
        names = " and ".join(clean(player.name) for player in self._players)
        say(f"chatting with {names}: {self._sampling()}")
        for talk in self._conversations:
            if not talk.chat:
                why = "is asked without its" if talk.player.has_chat_template else "has no"
                say(f"{clean(talk.player.name)} {why} chat template: each text is a prompt of its "
                    "own, and the answer continues it")
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
            # this line failed; the conversation goes on
            complain(f"Error: {error}")
        return True

    def _obey(self, words: list[str]) -> bool:
        name, *values = words
        if name in ("/quit", "/exit"):
            return False
        if name == "/help":
            complain(HELP)
        elif name == "/reset":
            self._forget()
            complain("forgotten")
        elif name == "/seed":
            if len(values) != 1 or not values[0].isdecimal() \
                    or len(values[0]) > len(str(MAX_SEED)) or int(values[0]) >= MAX_SEED:
                raise ConfigError(f"/seed {' '.join(values)}: it takes a number from 0.",
                                  fix="/seed 1")
            self._seed, self._next_number = int(values[0]), 0
        elif name == "/set":
            self._set(values)
        else:
            raise ConfigError(f"There is no command {name}.", fix="/help lists them; //text sends "
                              "a text that begins with a slash")
        return True

    def _set(self, values: list[str]) -> None:
        pairs = [word.partition("=") for word in values]
        if wrong := [name for name, equals, _ in pairs if not equals]:
            raise ConfigError(f"/set {wrong[0]}: it takes NAME=VALUE.", fix="/set temperature=0.7")
        changes = {name: getattr(self._generation, name) for name in CHANGEABLE}
        changes |= {name: _value(text) for name, _, text in pairs}
        self._generation = changed_sampling(self._cfg, changes)
        sampling_request.say_idle(self._generation, [name for name, _, _ in pairs])
        complain(self._sampling())

    def _sampling(self) -> str:
        shown = [f"{name}={getattr(self._generation, name)}" for name in SAMPLING_KEYS]
        return ", ".join([*shown, f"seed={self._seed}"])

    def _answer(self, text: str) -> None:
        """Print each model's answer; Ctrl-C ends an answer, and its beginning is kept."""
        number, self._next_number = self._next_number, self._next_number + 1
        for conversation in self._conversations:
            rendered, tokens = conversation.ask(text, self._generation)
            if len(self._conversations) > 1:
                put(f"[{clean(conversation.player.name)}]")
            pieces: list[str] = []
            try:
                self._speak(conversation, rendered, tokens, number, pieces)
            finally:
                if pieces:
                    conversation.keep(text, "".join(pieces))

    def _speak(self, conversation: Conversation, rendered: str, tokens: list[int], number: int,
               pieces: list[str]) -> None:
        player = conversation.player

        def show(piece: str) -> None:
            pieces.append(piece)
            show_text(piece, end="")

        with catch_signals() as stop:
            try:
                try:
                    answers = [answer for batch in player.answers(
                        [tokens], self._generation, seed=self._seed, first=number,
                        poll=stop.check, show=show) for answer in batch]
                finally:
                    put()
                if self._reward is not None:
                    score, = scores_of(self._reward, player, [rendered], answers, {},
                                       [conversation.messages] if conversation.chat else [])
                    complain(f"score {figure(score, 3)}")
                stop.check()
            except StopRequested as stopped:
                if stopped.signal_number != signal.SIGINT:
                    raise
                complain("(stopped)")


def _typed() -> str:
    try:
        return input(PROMPT)
    except UnicodeDecodeError:
        complain("Error: that was not UTF-8")
        return ""


def _leave(number: int, frame: FrameType | None) -> None:
    raise StopRequested(signal.SIGTERM)


def _value(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text
