"""``ppocli generate``, prompts to sampled responses on standard output; and ``ppocli chat``, a
conversation in a terminal."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from ppocli.cli import options as opt
from ppocli.cli.options import AsJson, Overrides, Run, option
from ppocli.cli.output import complain, say, show_text, split_words, working
from ppocli.config.text import clean, cut, figure, unescaped
from ppocli.distributed.standard_output import put
from ppocli.distributed.stop import StopRequested, catch_signals, signal_handlers
from ppocli.errors import ConfigError, InputError, PpocliError, StoppedError

if TYPE_CHECKING:
    from types import FrameType

    from ppocli.config.schema import GenerationConfig, TrainConfig
    from ppocli.evaluation.eval_request import EvalRequest
    from ppocli.evaluation.player import Player
    from ppocli.rewards.scoring import Reward
    from ppocli.runs.target import Target
    from ppocli.sampling.prompting import Answer

HOW = ("give --prompt TEXT, --prompts FILE (json, jsonl, csv, tsv, parquet or txt), or prompts on "
       "standard input, one per line")


def generate(
        run: Run = None, overrides: Overrides = None,
        prompt: list[str] | None = option("TEXT", "A prompt (repeatable).", "--prompt", "-p"),
        prompts_file: str | None = option(
            "FILE", "Prompts: txt (one per line), json, jsonl, csv, tsv, parquet; -: standard "
            "input.",
            "--prompts"),
        num_samples: int = option(
            "K", "Responses to each prompt.", "--num-samples", "-n", default=1, min=1),
        score: opt.Score = False, reward: opt.Reward = None,
        step: opt.Step = None, best: opt.Best = False, trust: opt.Trust = False,
        as_json: AsJson = False) -> None:
    """Sample responses from a run, a checkpoint or a model.

    Prompts come from --prompt, --prompts or standard input. Sampling follows the run's
    settings unless words change them. Standard output contains only the responses.

    \b
    Examples:
      ppocli generate runs/NAME --prompt "The film was"
      ppocli generate runs/NAME --prompts prompts.jsonl -n 4 --score --json
      ppocli generate ./model generation.temperature=0.7 generation.max_new_tokens=60 < prompts.txt
      ppocli generate runs/NAME -p "Hello" --reward length reward.kwargs.target=20 seed=1
      ppocli generate ./chat-model -p "Hello" prompts.chat=true
    """
    request = _request(run, overrides, reward, step, best, trust)
    items = typed_prompts([unescaped(text) for text in prompt or ()], prompts_file)
    scored = score or reward is not None
    with working() as stopping:
        from ppocli.evaluation.player import scores_of
        from ppocli.sampling.prompting import BATCH

        target, cfg = _configured(request, scored)
        chat = bool(cfg.prompts.chat)
        cells, columns = _read_prompts(cfg, prompts_file, items)
        with _loaded(request, target, cfg, scored, list(columns)) as (player, generation, judge):
            texts = player.render(cells, chat=chat, tools=columns.get(cfg.prompts.tools or ""))
            shown = [cell if isinstance(cell, str) else text
                     for cell, text in zip(cells, texts, strict=True)]
            scores: list[float] = []
            for answers in player.answers(
                    player.tokens(texts, generation, chat=chat), generation, seed=cfg.seed,
                    num_samples=num_samples, batch=cfg.ppo.chunk_size or BATCH,
                    poll=stopping.check):
                judged = [None] * len(answers) if judge is None else scores_of(
                    judge, player, texts, answers, columns, cells if chat else ())
                scores += [one for one in judged if one is not None]
                for answer, one in zip(answers, judged, strict=True):
                    if as_json:
                        put(json.dumps({
                            "prompt": shown[answer.prompt], "sample": answer.sample,
                            "response": answer.text, "model": player.name, "score": one,
                            "finished": answer.finished, "response_tokens": len(answer.ids)}))
                    else:
                        _print_answer(answer, one, shown, num_samples)
                stopping.check()
            if scores:
                mean = figure(math.fsum(scores) / len(scores), 3)
                complain(f"mean score of {player.name}: {mean} ({len(scores)} scored)")


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
    request = _request(run, overrides, reward, step, best, trust)
    if not sys.stdin.isatty():
        raise ConfigError("ppocli chat needs a terminal, and standard input isn't one.",
                          where="standard input",
                          fix="ppocli generate takes prompts from a pipe or a file")
    scored = score or reward is not None
    with working():
        target, cfg = _configured(request, scored)
        with _loaded(request, target, cfg, scored) as (player, generation, judge):
            talk = Chat(cfg, player, generation, judge, system and unescaped(system))
            with _awaiting_lines():
                talk.greet()
                # line editing and history for input(), where Python was built with it
                with suppress(ImportError):
                    import readline  # noqa: F401
                while talk.take(_typed()):
                    pass


# The policy ---------------------------------------------------------------------------------------

def _request(run: str | None, overrides: Sequence[str] | None, reward: str | None,
             step: int | None, best: bool, trust: bool) -> EvalRequest:
    from ppocli.evaluation.eval_request import EvalRequest

    run, words = split_words(run, overrides)
    return EvalRequest(run=run, words=tuple(words), reward=reward, step=step, best=best,
                       trust=trust)


def _configured(request: EvalRequest, scored: bool) -> tuple[Target, TrainConfig]:
    """The policy, found but not loaded, and how it was trained, or the defaults for a model that
    came from elsewhere; ``prompts.chat`` is decided.

    Raises:
        ConfigError, CheckpointError, InputError: as :func:`ppocli.runs.target.find_target` and
            :func:`ppocli.launch.target_config.target_config`.
    """
    from ppocli.config.config_yaml import with_values
    from ppocli.launch.target_config import target_config
    from ppocli.models.loading.tokenizer import decided, present
    from ppocli.runs.target import find_target

    target = find_target(request.run, say=say, step=request.step, best=request.best)
    request.check()
    cfg = target_config(target, request.overrides(target), needs_reward=scored,
                        needs_prompts=False, trusts=request.trust, say=say)
    if any(word.startswith("rollout.") for word in request.words) and cfg.rollout.engine != "vllm":
        raise ConfigError("Responses are sampled by our own loop here, or by vLLM servers.",
                          where="rollout", fix="rollout.engine=vllm rollout.urls=[URL]; ppocli "
                          "eval takes other engines")
    cfg = with_values(cfg, {
        "model.chat_template_date": cfg.model.chat_template_date or present()})
    revision = cfg.model.revision if target.model == cfg.model.path else None
    return target, decided(cfg, target.model, revision, name=target.name)


@contextmanager
def _loaded(request: EvalRequest, target: Target, cfg: TrainConfig, scored: bool,
            columns: Sequence[str] = ()
            ) -> Iterator[tuple[Player, GenerationConfig, Reward | None]]:
    """The model, how it samples, and the reward where responses are scored.

    Sampling is that of words over the run's settings, or over the model's generation_config.json
    without a run.

    Args:
        columns: of metadata, which the reward gets.

    Raises:
        ConfigError: settings out of range.
        InputError: a model or its tokenizer is unusable.
        RewardError: the reward can't be made.
    """
    from ppocli.distributed.backend import open_backend
    from ppocli.evaluation import player as players
    from ppocli.models.loading.model_config import policy_config
    from ppocli.models.loading.tokenizer import stop_clock, tokenizers_of

    generation = players.changed_sampling(cfg, {})  # refused before anything is loaded
    reward = players.build_judge(cfg.reward, columns) if scored else None
    for tokenizer in [] if reward is None else tokenizers_of(reward):
        stop_clock(tokenizer, cfg.model.chat_template_date)
    with open_backend(cfg.hardware, target.run_dir) as backend:
        player = players.load_player(policy_config(cfg.model, target.model), target.name, backend)
        declared = {} if target.run_dir else {
            name: value for name, value in players.own_sampling(player.loaded).items()
            if not request.sets(f"generation.{name}")}
        if declared:
            say("sampling as its generation_config.json says: " + ", ".join(
                f"{name}={value}" for name, value in declared.items()))
            generation = players.changed_sampling(
                cfg, declared, dict.fromkeys(declared, "generation_config.json"))
        if cfg.rollout.engine == "vllm":
            with players.served(player, cfg, backend) as served:
                yield served, generation, reward
        else:
            yield player, generation, reward


# generate -----------------------------------------------------------------------------------------

def typed_prompts(prompts: Sequence[str], file: str | None) -> list[str] | None:
    """The prompts of the command line, or those on standard input, one per line; None if they come
    from a file.

    Raises:
        ConfigError: there are no prompts, or two sources of them.
        InputError: standard input is not UTF-8.
    """
    if prompts and file is not None:
        raise ConfigError("--prompt and --prompts can't be combined.", where="command line",
                          fix="give one of them")
    if prompts or file not in (None, "-"):
        return list(prompts) if prompts else None
    if sys.stdin.isatty() and file is None:
        raise ConfigError("There are no prompts.", where="command line", fix=HOW)
    try:
        lines = sys.stdin.buffer.read().decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError("Standard input is not UTF-8.", where="standard input",
                         fix="convert it: iconv -f latin-1 -t utf-8") from error
    if not any(line.strip() for line in lines):
        raise ConfigError("There are no prompts: standard input is empty.", where="command line",
                          fix=HOW)
    return lines


def _read_prompts(cfg: TrainConfig, file: str | None, items: list[str] | None
                  ) -> tuple[list[Any], dict[str, list[Any]]]:
    """The prompts (texts, or lists of chat messages) and their metadata by column name, read as
    those of a training are, without ``prompts.template``; blank ones are dropped.

    Raises:
        InputError: the file is missing, unreadable or empty, or lacks the column.
    """
    from ppocli.config.schema import PromptsConfig
    from ppocli.data import chat_text, sources

    if cfg.prompts.template is not None and not cfg.prompts.chat:
        say("prompts.template of the run is not applied: prompts are used as they are")
    notes: list[str] = []
    source = PromptsConfig(items=items, chat=cfg.prompts.chat, tools=cfg.prompts.tools) \
        if items is not None else PromptsConfig(
            path=file, column=cfg.prompts.column, chat=cfg.prompts.chat, tools=cfg.prompts.tools)
    spec = sources.training_spec(source, None)
    rows = chat_text.take_rows(sources.open_rows(spec, notes), spec, notes)
    cells = [chat_text.with_system_turn(row.values[spec.column], row, spec, notes) for row in rows]
    for note in notes:
        say(note)
    return cells, chat_text.metadata(rows, spec)


def _print_answer(answer: Answer, score: float | None, prompts: Sequence[str], num_samples: int
                  ) -> None:
    """Print a response, under its prompt and number where there are several."""
    facts = [f"sample {answer.sample + 1}"] * (num_samples > 1)
    facts += [] if score is None else [f"score {figure(score, 3)}"]
    if len(prompts) > 1 or num_samples > 1:
        if not answer.sample:
            put(("\n" if answer.prompt else "") + f"== prompt {answer.prompt + 1}: "
                f"{cut(clean(prompts[answer.prompt]), 100)}")
        if facts:
            put("-- " + ", ".join(facts))
    show_text(answer.text)


# chat ---------------------------------------------------------------------------------------------

HELP = """\
/quit            leave (also Ctrl-D); Ctrl-C stops an answer
/reset           forget the conversation
/set NAME=VALUE  change the sampling, e.g. /set temperature=0.7 max_new_tokens=60 seed=1
/set             show the sampling
/help            this list
//text           a text that begins with a slash"""


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
