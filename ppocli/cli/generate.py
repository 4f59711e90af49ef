"""What ``ppocli generate`` does, and what ``ppocli chat`` shares with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppocli.builtin.names import BUILTIN_PREFIX
from ppocli.cli.output import say
from ppocli.cli.sheet import Sheet, printable
from ppocli.cli.working import split_words, working
from ppocli.errors import ConfigError, InputError, PpocliError

if TYPE_CHECKING:
    from ppocli.config.schema import GenerationConfig, ModelConfig, TrainConfig
    from ppocli.evaluation.player import Player
    from ppocli.parallel.backend import Backend
    from ppocli.rewards.scoring import Reward
    from ppocli.runs.target import Target

COLUMN = "prompt"
MAX_SEED = 2**63
SHAPING = ("temperature", "top_k", "top_p")
"""sampling settings that count only where something is drawn"""
HOW = ("give --prompt TEXT, --prompts-file FILE (json, jsonl, csv, parquet or txt), or a line each "
       "on standard input")
_OPTIONS = (("prompts.path=", "--prompts-file "), ("prompts.column=", "--column "),
            ("prompts.chat=true", "--chat"), ("prompts.items", "standard input"))


@dataclass(frozen=True, slots=True)
class Asking:
    """Who is asked and how: what ``generate`` and ``chat`` have in common."""

    run: str | None = None
    words: tuple[str, ...] = ()
    """KEY=VALUE"""
    step: int | None = None
    best: bool = False
    against: str | None = None
    """a target, or the word ``base``"""
    score: bool = False
    reward: str | None = None
    seed: int = 0
    system: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    """sampling settings by option; None: not given"""

    @property
    def scored(self) -> bool:
        """Whether answers get a score."""
        return self.score or self.reward is not None


@dataclass(frozen=True, slots=True)
class Named:
    """A model to be loaded."""

    name: str
    policy: str
    """checked folder, or Hub name"""
    cfg: ModelConfig
    """of the model that the policy is, or was trained from"""


@dataclass(frozen=True, slots=True)
class Cast:
    """Found, but not loaded yet. Made by :func:`find_cast`."""

    cfg: TrainConfig
    """how the first model was trained, or the defaults for a model that came from elsewhere"""
    from_run: bool
    models: tuple[Named, ...]
    """the one or two models"""


@dataclass(frozen=True, slots=True)
class Asked:
    """P prompts. Made by :func:`read_prompts`."""

    cells: list[Any]
    """texts, or lists of chat messages"""
    columns: dict[str, list[Any]]
    """metadata by column name, each of length P"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What ``generate`` was asked for beside :class:`Asking`."""

    prompts: tuple[str, ...] = ()
    file: str | None = None
    column: str = COLUMN
    num_samples: int = 1
    chat: bool | None = None
    batch: int = 64
    as_json: bool = False


# Who is asked -------------------------------------------------------------------------------------

def asking_of(run: str | None, words: Sequence[str] | None, **options: Any) -> Asking:
    """Tell RUN from the words behind it, and check the options by themselves.

    Raises:
        ConfigError: something among the words is no KEY=VALUE, or wrong options.
    """
    try:
        found, rest = split_words(run, words)
    except ConfigError as error:
        error.fix = "prompts go behind an option: --prompt TEXT"
        raise
    asking = Asking(found, tuple(rest), **options)
    if asking.seed >= MAX_SEED:
        raise ConfigError(f"--seed {asking.seed} is too large.", where="--seed",
                          fix="a number below 2**63")
    _given_flags(asking)
    return asking


def find_cast(asking: Asking) -> Cast:
    """Find the models that are asked and their settings; nothing is loaded.

    Raises:
        ConfigError, CheckpointError, InputError: as :func:`ppocli.runs.target.find_target` and
            :func:`ppocli.launching.target_config.target_config`.
    """
    from ppocli.evaluation.request import EvalRequest
    from ppocli.launching.target_config import target_config
    from ppocli.runs.target import find_target

    target = find_target(asking.run, say=say, step=asking.step, best=asking.best)
    request = EvalRequest(words=asking.words, reward=asking.reward, against=asking.against)
    request.check()
    cfg = target_config(target, request.overrides(target), needs_reward=asking.scored,
                        needs_prompts=False)
    models = [_named(target, cfg.model)]
    other = request.find_against(target, cfg, say)
    if other is not None:
        models.append(_named(other, cfg.model if other.model == cfg.model.path else None))
    return Cast(cfg, target.run_dir is not None, tuple(models))


def _named(target: Target, cfg: ModelConfig | None) -> Named:
    """``cfg`` None: that of the target's own run, or the defaults."""
    from ppocli.config.resolved import CONFIG_FILE, read_config
    from ppocli.config.schema import ModelConfig

    if cfg is None:
        cfg = (ModelConfig(path=target.model) if target.run_dir is None
               else read_config(target.run_dir / CONFIG_FILE).model)
    return Named(target.name, target.model, cfg)


def load_players(cast: Cast, backend: Backend) -> list[Player]:
    """Load the one or two models.

    Raises:
        InputError: a model or its tokenizer is unusable.
    """
    from ppocli.evaluation.player import load_player, policy_config

    return [load_player(policy_config(model.cfg, model.policy), model.name, backend)
            for model in cast.models]


def sampling_of(asking: Asking, cast: Cast, player: Player | None) -> GenerationConfig:
    """Flags over words over the run's own settings; a model that came from elsewhere has those of
    its generation_config.json.

    Args:
        player: the model, loaded; not needed for a run.

    Raises:
        ConfigError: values out of range.
    """
    from ppocli.evaluation.player import changed_sampling, own_sampling

    changes: dict[str, Any] = {}
    if not cast.from_run and player is not None:
        worded = {word.lstrip("+~").partition("=")[0] for word in asking.words}
        changes = {name: value for name, value in own_sampling(player.loaded).items()
                   if f"generation.{name}" not in worded}
        if changes:
            say("sampling as its generation_config.json says: " + ", ".join(
                f"{name}={value}" for name, value in changes.items()))
    given = _given_flags(asking)
    sources = {**dict.fromkeys(changes, "generation_config.json"),
               **{name: _option(name) for name in given}}
    generation = changed_sampling(cast.cfg, {**changes, **given}, sources)
    say_idle(generation, [name for name in SHAPING if any(
        word.lstrip("+~").startswith(f"generation.{name}=") for word in asking.words)])
    return generation


def say_idle(generation: GenerationConfig, asked: Sequence[str]) -> None:
    """Say which of the settings that were ``asked`` for change nothing."""
    idle = [name for name in asked if name in SHAPING]
    if idle and not generation.do_sample:
        say(f"no effect: {', '.join(idle)}, as do_sample=false (--greedy) always takes the "
            "likeliest token")


def _given_flags(asking: Asking) -> dict[str, Any]:
    """The sampling flags that were given; those that shape a distribution ask for sampling.

    Raises:
        ConfigError: flags that exclude each other.
    """
    given = {name: value for name, value in asking.flags.items() if value is not None}
    shaping = sorted(given.keys() & set(SHAPING))
    if shaping and given.setdefault("do_sample", True) is False:
        raise ConfigError(f"--greedy takes the likeliest token; {_option(shaping[0])} would change "
                          "nothing.", where="command line", fix="give one of them")
    return given


def _option(name: str) -> str:
    named = {"do_sample": "--greedy", "stop_sequences": "--stop"}
    return named.get(name, "--" + name.replace("_", "-"))


# What is asked ------------------------------------------------------------------------------------

def given_lines(wanted: Wanted) -> list[str] | None:
    """The prompts that standard input holds, a line each; None if they come from elsewhere.

    Raises:
        ConfigError: nothing says what the prompts are, or two things do.
        InputError: standard input is not UTF-8.
    """
    if wanted.prompts and wanted.file is not None:
        raise ConfigError("--prompt and --prompts-file are both given.", where="command line",
                          fix="give one of them")
    if wanted.prompts or wanted.file not in (None, "-"):
        return None
    if sys.stdin.isatty() and wanted.file is None:
        raise ConfigError("There are no prompts.", where="command line", fix=HOW)
    raw = sys.stdin.buffer.read()
    try:
        text = raw.decode("utf-8").removeprefix("\N{BYTE ORDER MARK}")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"Line {line} of standard input is not UTF-8.", where="standard input",
                         fix="convert it: iconv -f latin-1 -t utf-8") from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if not any(line.strip() for line in lines):
        raise ConfigError("There are no prompts: standard input is empty.", where="command line",
                          fix=HOW)
    return lines[:-1] if lines[-1] == "" else lines


def read_prompts(wanted: Wanted, lines: list[str] | None, *, chat: bool) -> Asked:
    """The prompts with their metadata, read as those of a training are; blank ones are dropped.

    Args:
        lines: from :func:`given_lines`.
        chat: whether cells may be chat messages.

    Raises:
        ConfigError: a blank ``--prompt``.
        InputError: the file is missing, unreadable or empty, or lacks the column.
    """
    from ppocli.config.schema import PromptsConfig
    from ppocli.data.render import metadata, take_rows
    from ppocli.data.sources import open_rows
    from ppocli.data.spec import training_spec

    if wanted.prompts:
        blank = [text for text in wanted.prompts if not text.strip()]
        if blank:
            raise ConfigError(f"The prompt {blank[0]!r} is empty.", where="--prompt",
                              fix="give some text")
        return Asked(list(wanted.prompts), {})
    notes: list[str] = []
    cfg = PromptsConfig(column=wanted.column, chat=chat, items=lines,
                        path=None if lines is not None else _as_path(wanted.file or ""))
    try:
        spec = training_spec(cfg, None)
        rows, blank_rows = take_rows(open_rows(spec, notes), spec, most=None)
        columns = metadata(rows, spec)
    except PpocliError as error:
        for key, option in _OPTIONS:
            error.where = error.where and error.where.replace(key, option)
            error.fix = error.fix and error.fix.replace(key, option)
        raise
    if blank_rows:
        notes.append(f"{blank_rows} blank prompt{'s were' if blank_rows > 1 else ' was'} dropped")
    for note in notes:
        say(note)
    return Asked([row.values[wanted.column] for row in rows], columns)


def _as_path(given: str) -> str:
    """A name that means a file here, never a data set on the Hub."""
    if given.startswith((BUILTIN_PREFIX, "~")) or Path(given).is_absolute():
        return given
    return f"./{given}"


def with_system(cells: Sequence[Any], system: str | None) -> list[Any]:
    """The prompts as conversations that begin with a system message, unless they bring their own.
    """
    if system is None:
        return list(cells)
    found = []
    for cell in cells:
        messages = [{"role": "user", "content": cell}] if isinstance(cell, str) else list(cell)
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        found.append(messages)
    return found


# The command --------------------------------------------------------------------------------------

def generate(asking: Asking, wanted: Wanted) -> None:
    """Sample responses and print them as batches complete.

    Raises:
        PpocliError: wrong usage, missing inputs, a failing reward.
        StoppedError: a signal asked to stop; what was complete is printed.
    """
    lines = given_lines(wanted)
    cast = find_cast(asking)
    chat = cast.cfg.prompts.chat if wanted.chat is None else wanted.chat
    if asking.system is not None and not chat:
        raise ConfigError("--system is a message of a conversation, and prompts are taken as plain "
                          "texts.", where="--system", fix="add --chat")
    if cast.cfg.prompts.template is not None and not chat:
        say("prompts.template of the run is not applied: prompts are taken as they are")
    asked = read_prompts(wanted, lines, chat=chat)
    with working() as stop:
        from ppocli.evaluation.player import build_judge
        from ppocli.parallel.backend import open_backend

        # before anything is loaded
        generation = sampling_of(asking, cast, None) if cast.from_run else None
        reward = build_judge(cast.cfg.reward, list(asked.columns)) if asking.scored else None
        with open_backend(cast.cfg.hardware) as backend:
            players = load_players(cast, backend)
            generation = generation or sampling_of(asking, cast, players[0])
            cells = with_system(asked.cells, asking.system)
            texts = [player.render(cells, chat=chat) for player in players]
            tokens = [player.tokens(rendered, generation, chat=chat)
                      for player, rendered in zip(players, texts, strict=True)]
            sheet = Sheet([_shown(cell, text) for cell, text in
                           zip(asked.cells, texts[0], strict=True)],
                          [player.name for player in players], wanted.num_samples,
                          as_json=wanted.as_json, scored=reward is not None)
            batches = [player.answers(
                ids, generation, seed=asking.seed, num_samples=wanted.num_samples,
                batch=wanted.batch, poll=stop.check, show=_show if sheet.streams else None)
                for player, ids in zip(players, tokens, strict=True)]
            _write(sheet, batches, players, texts, reward, asked.columns, stop.check)


def _write(sheet: Sheet, batches: list[Any], players: list[Player], texts: list[list[str]],
           reward: Reward | None, columns: Mapping[str, Sequence[Any]], check: Callable[[], None]
           ) -> None:
    """Print each batch as soon as all models have answered it."""
    from ppocli.evaluation.player import scores_of

    try:
        for answers in zip(*batches, strict=True):
            scores = None
            if reward is not None:
                scores = [scores_of(reward, player, rendered, batch, columns)
                          for player, rendered, batch in zip(players, texts, answers, strict=True)]
            sheet.write(answers, scores)
            check()
    finally:
        sheet.close()


def _shown(cell: Any, rendered: str) -> str:
    return cell if isinstance(cell, str) else rendered


def _show(piece: str) -> None:
    print(printable(piece), end="", flush=True)
