"""``ppocli generate``: prompts to sampled responses on standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppocli.cli.options import AsJson, Overrides, Run
from ppocli.cli.output import ending, say
from ppocli.cli.sampling_options import (
    Against,
    Asking,
    Best,
    Greedy,
    MaxNew,
    MinNew,
    Reward,
    Score,
    Seed,
    Step,
    Stop,
    System,
    Temperature,
    TopK,
    TopP,
    asking_of,
    find_cast,
    load_players,
    sampling_of,
)
from ppocli.cli.working import working
from ppocli.errors import ConfigError, InputError, PpocliError

if TYPE_CHECKING:
    from ppocli.cli.sheet import Sheet
    from ppocli.evaluation.player import Player
    from ppocli.rewards.scoring import Reward as RewardModel

COLUMN = "prompt"
HOW = ("give --prompt TEXT, --prompts-file FILE (json, jsonl, csv, parquet or txt), or a line each "
       "on standard input")
_OPTIONS = (("prompts.path=", "--prompts-file "), ("prompts.column=", "--column "),
            ("prompts.chat=true", "--chat"), ("prompts.items", "standard input"))

Prompt = Annotated[list[str] | None, typer.Option("--prompt", "-p", metavar="TEXT",
                                                  show_default=False,
                                                  help="A prompt; repeatable.")]
PromptsFile = Annotated[str | None, typer.Option(
    "--prompts-file", metavar="FILE", show_default=False,
    help="Prompts: txt (a line each), json, jsonl, csv or parquet; - is standard input.")]
Column = Annotated[str, typer.Option("--column", metavar="NAME",
                                     help="Column of the file that holds the prompt.")]
NumSamples = Annotated[int, typer.Option("--num-samples", "-n", metavar="K", min=1,
                                         help="Responses to each prompt.")]
AsChat = Annotated[bool | None, typer.Option(
    "--chat/--no-chat", show_default=False,
    help="Render prompts with the chat template, or take them as they are (default: as the run "
         "did).")]
BatchSize = Annotated[int, typer.Option("--batch-size", metavar="N", min=1,
                                        help="Samples decoded together.")]


def generate_command(
        run: Run = None, overrides: Overrides = None, prompt: Prompt = None,
        prompts_file: PromptsFile = None, column: Column = "prompt", num_samples: NumSamples = 1,
        max_new_tokens: MaxNew = None, min_new_tokens: MinNew = None,
        temperature: Temperature = None, top_k: TopK = None, top_p: TopP = None,
        greedy: Greedy = False, stop: Stop = None, seed: Seed = 0, chat: AsChat = None,
        system: System = None, step: Step = None, best: Best = False, score: Score = False,
        reward: Reward = None, against: Against = None, batch_size: BatchSize = 64,
        as_json: AsJson = False) -> None:
    """Sample responses of a run, a checkpoint or a model.

    Prompts come from --prompt, --prompts-file or standard input. Sampling is the run's own unless
    options change it. Standard output holds the responses and nothing else.

    \b
    Examples:
      ppocli generate runs/NAME --prompt "The film was"
      ppocli generate runs/NAME --prompts-file prompts.jsonl -n 4 --score --json
      ppocli generate runs/NAME --prompt "The film was" --against base --score
      ppocli generate ./model --temperature 0.7 --max-new-tokens 60 < prompts.txt
      ppocli generate runs/NAME -p "Hello" --reward length reward.kwargs.target=20
    """
    flags = {"max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens,
             "temperature": temperature, "top_k": top_k, "top_p": top_p,
             "do_sample": False if greedy else None, "stop_sequences": stop or None}
    ending(lambda: generate(
        asking_of(run, overrides, step=step, best=best, against=against, score=score,
                  reward=reward, seed=seed, system=system, flags=flags),
        Wanted(tuple(prompt or ()), prompts_file, column, num_samples, chat, batch_size, as_json)))


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
    if given.startswith(("builtin:", "~")) or Path(given).is_absolute():
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
    from ppocli.cli.sheet import Sheet

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
           reward: RewardModel | None, columns: Mapping[str, Sequence[Any]],
           check: Callable[[], None]) -> None:
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
    from ppocli.cli.sheet import printable

    print(printable(piece), end="", flush=True)
