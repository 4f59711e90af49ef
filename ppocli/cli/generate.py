"""``ppocli generate``, prompts to sampled responses on standard output; and ``ppocli chat``."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from ppocli.builtin.names import BUILTIN_PREFIX
from ppocli.cli import options as opt
from ppocli.cli.options import AsJson, Overrides, Run, option
from ppocli.cli.output import complain, prompt_heading, say, show_text, typed_text, working
from ppocli.config.text import clean, figure, printable
from ppocli.distributed.standard_output import put, result_stream
from ppocli.errors import ConfigError, InputError, PpocliError

if TYPE_CHECKING:
    from ppocli.sampling.prompting import Answer

HOW = ("give --prompt TEXT, --prompts FILE (json, jsonl, csv, tsv, parquet or txt), or prompts on "
       "standard input, one per line")
_OPTIONS = (("prompts.path=", "--prompts "), ("prompts.column=", "--column "),
            ("prompts.chat=true", "--chat"), ("prompts.items", "standard input"))


def generate(
        ctx: typer.Context, run: Run = None, overrides: Overrides = None,
        prompt: list[str] | None = option("TEXT", "A prompt (repeatable).", "--prompt", "-p"),
        prompts_file: str | None = option(
            "FILE", "Prompts: txt (one per line), json, jsonl, csv, tsv, parquet; -: standard "
            "input.",
            "--prompts"),
        column: str = option("NAME", "Column of the file with the prompts.", default="prompt"),
        num_samples: int = option(
            "K", "Responses to each prompt.", "--num-samples", "-n", default=1, min=1),
        max_new_tokens: opt.MaxNew = None, min_new_tokens: opt.MinNew = None,
        temperature: opt.Temperature = None, top_k: opt.TopK = None, top_p: opt.TopP = None,
        min_p: opt.MinP = None, repetition_penalty: opt.Penalty = None,
        ignore_eos: opt.IgnoreEos = False, greedy: opt.Greedy = False, stop: opt.Stop = None,
        seed: opt.Seed = 0, trust: opt.Trust = False, chat: opt.Chat = None,
        system: opt.System = None, step: opt.Step = None, best: opt.Best = False,
        score: opt.Score = False, reward: opt.Reward = None, against: opt.Against = None,
        batch_size: int = option("N", "Samples decoded together.", default=64, min=1),
        env: opt.Env = False, as_json: AsJson = False) -> None:
    """Sample responses from a run, a checkpoint or a model.

    Prompts come from --prompt, --prompts or standard input. Sampling follows the run's
    settings unless options change them. Standard output contains only the responses.

    \b
    Examples:
      ppocli generate runs/NAME --prompt "The film was"
      ppocli generate runs/NAME --prompts prompts.jsonl -n 4 --score --json
      ppocli generate runs/NAME --prompt "The film was" --against base --score
      ppocli generate ./model --temperature 0.7 --max-new-tokens 60 < prompts.txt
      ppocli generate runs/NAME -p "Hello" --reward length reward.kwargs.target=20
      ppocli generate runs/NAME --env prompts.eval.limit=4
    """
    from ppocli.cli.sampling_request import find_models, loaded, sampling_request

    request = sampling_request(ctx)
    prompt = [typed_text("--prompt", text) for text in prompt or ()]
    if env:
        from ppocli.cli import episodes

        episodes.generate(request, episode_words(prompt, prompts_file, column, chat, batch_size),
                          None if prompts_file == "-" else prompts_file, as_json=as_json)
        return
    lines = typed_prompts(prompt, prompts_file)
    chosen = find_models(request)
    chat = bool(chosen.chat)
    if system is not None and not chat:
        raise ConfigError("--system needs a conversation, but prompts are used as plain texts.",
                          where="--system", fix="add --chat")
    if chosen.cfg.prompts.template is not None and not chat:
        say("prompts.template of the run is not applied: prompts are used as they are")
    cells, columns = read_prompts(prompts_file, column, lines, chat=chat)
    with working() as stopping, loaded(request, chosen, list(columns)) as (
            players, generation, judge):
        from ppocli.evaluation.player import scores_of

        messages = with_system(cells, system)
        texts = [player.render(messages, chat=chat, tools=columns.get(
            chosen.cfg.prompts.tools or "")) for player in players]
        tokens = [player.tokens(rendered, generation, chat=chat)
                  for player, rendered in zip(players, texts, strict=True)]
        shown = [cell if isinstance(cell, str) else text
                 for cell, text in zip(cells, texts[0], strict=True)]
        with closing(ResponsePrinter(shown, [player.name for player in players], num_samples,
                                     as_json=as_json, scored=judge is not None)) as printer:
            batches = [player.answers(
                ids, generation, seed=seed, num_samples=num_samples, batch=batch_size,
                poll=stopping.check, show=partial(show_text, end="") if printer.streams else None)
                for player, ids in zip(players, tokens, strict=True)]
            # each batch is printed as soon as all models have answered it
            for answers in zip(*batches, strict=True):
                printer.write(answers, [
                    [None] * len(batch) if judge is None else
                    scores_of(judge, player, rendered, batch, columns, messages if chat else ())
                    for player, rendered, batch in zip(players, texts, answers, strict=True)])
                stopping.check()


def chat(
        ctx: typer.Context, run: Run = None, overrides: Overrides = None,
        max_new_tokens: opt.MaxNew = None, min_new_tokens: opt.MinNew = None,
        temperature: opt.Temperature = None, top_k: opt.TopK = None, top_p: opt.TopP = None,
        min_p: opt.MinP = None, repetition_penalty: opt.Penalty = None,
        ignore_eos: opt.IgnoreEos = False, greedy: opt.Greedy = False, stop: opt.Stop = None,
        seed: opt.Seed = 0, trust: opt.Trust = False, chat: opt.Chat = None,
        system: opt.System = None, step: opt.Step = None, best: opt.Best = False,
        score: opt.Score = False, reward: opt.Reward = None, against: opt.Against = None,
        env: opt.Env = False,
        watch: bool = opt.flag("With --env: the policy plays, and you look on.")) -> None:
    """Chat with a run, a checkpoint or a model in the terminal.

    Answers appear as they are sampled. With a chat template the conversation is kept; without one,
    and with a model that was trained without it, each text is a separate prompt. /help lists the
    commands; /quit or Ctrl-D leaves, Ctrl-C stops an answer.

    \b
    Examples:
      ppocli chat
      ppocli chat runs/NAME --score
      ppocli chat runs/NAME --against base --temperature 0.7
      ppocli chat runs/NAME --env
    """
    from ppocli.cli.sampling_request import sampling_request

    request = sampling_request(ctx)
    if watch and not env:
        raise ConfigError("There is no game to watch.", where="--watch", fix="add --env")
    if not sys.stdin.isatty():
        raise ConfigError("ppocli chat needs a terminal, and standard input isn't one.",
                          where="standard input",
                          fix="ppocli generate takes prompts from a pipe or a file")
    if env:
        from ppocli.cli import episodes

        episodes.chat(request, watch=watch)
        return
    from ppocli.cli.chat import converse

    converse(request)


# Prompts ------------------------------------------------------------------------------------------

def typed_prompts(prompts: Sequence[str], file: str | None) -> list[str] | None:
    """The prompts of the command line, or those on standard input, one per line; None if they come
    from a file.

    Raises:
        ConfigError: there are no prompts, or two sources of them; or one is empty.
        InputError: standard input is not UTF-8.
    """
    if prompts and file is not None:
        raise ConfigError("--prompt and --prompts can't be combined.", where="command line",
                          fix="give one of them")
    if blank := [text for text in prompts if not text.strip()]:
        raise ConfigError(f"The prompt {blank[0]!r} is empty.", where="--prompt",
                          fix="give some text")
    if prompts or file not in (None, "-"):
        return list(prompts) if prompts else None
    if sys.stdin.isatty() and file is None:
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


def episode_words(prompts: Sequence[str], file: str | None, column: str, chat: bool | None,
                  batch: int) -> list[str]:
    """The options of ``generate --env`` on prompts, as words; without any, the run's evaluation
    prompts are played."""
    from ppocli.config.config_yaml import mapping_words

    items = typed_prompts(prompts, file) if prompts or file else None
    return mapping_words({"ppo": {"chunk_size": batch}, "prompts": {
        **({} if chat is None else {"chat": chat}), **({} if file is None else {"column": column}),
        **({} if items is None else {"eval": {"path": None, "items": items}})}})


def read_prompts(file: str | None, column: str, lines: list[str] | None, *, chat: bool
                 ) -> tuple[list[Any], dict[str, list[Any]]]:
    """The prompts (texts, or lists of chat messages) and their metadata by column name, read as
    those of a training are; blank ones are dropped.

    Args:
        lines: from :func:`typed_prompts`.
        chat: whether prompts may be chat messages.

    Raises:
        InputError: the file is missing, unreadable or empty, or lacks the column.
    """
    from ppocli.config.keys import joined_paths, row_paths
    from ppocli.config.schema import PromptsConfig
    from ppocli.data import chat_text, sources

    notes: list[str] = []
    path = None if lines is not None else file
    if path:  # of files, never of data sets on the Hub
        path = joined_paths([
            each if each.startswith((BUILTIN_PREFIX, "~", "/")) or "://" in each else f"./{each}"
            for each in row_paths(path)])
    cfg = PromptsConfig(column=column, chat=chat, items=lines, path=path)
    try:
        spec = sources.training_spec(cfg, None)
        rows = chat_text.take_rows(sources.open_rows(spec, notes), spec, notes)
        columns = chat_text.metadata(rows, spec)
        cells = [chat_text.with_system_turn(row.values[column], row, spec, notes) for row in rows]
    except PpocliError as error:
        if error.fix and ("prompts.name=" in error.fix or "prompts.split=" in error.fix):
            error.fix = f"name the files: --prompts '{file}/*.jsonl', or whatever they are called"
        for key, option in _OPTIONS:
            error.where = error.where and error.where.replace(key, option)
            error.fix = error.fix and error.fix.replace(
                f"'{key}", f"{option}'").replace(key, option)
        raise
    for note in notes:
        say(note)
    return cells, columns


def with_system(cells: Sequence[Any], system: str | None) -> list[Any]:
    """The prompts as conversations that begin with a system message, unless they bring their own.
    """
    if system is None:
        return list(cells)
    opening = [{"role": "system", "content": system}]
    talks = [[{"role": "user", "content": cell}] if isinstance(cell, str) else list(cell)
             for cell in cells]
    return [talk if talk[0]["role"] == "system" else opening + talk for talk in talks]


# Responses ----------------------------------------------------------------------------------------

class ResponsePrinter:
    """Writes batches of answers of one or two models to the same prompts.

    Args:
        prompts: as the user wrote them.
        names: of the models.
        num_samples: responses to each prompt.
    """

    def __init__(self, prompts: Sequence[str], names: Sequence[str], num_samples: int, *,
                 as_json: bool, scored: bool) -> None:
        self._prompts, self._names, self._samples = prompts, names, num_samples
        self._json, self._scored = as_json, scored
        self._scores: list[list[float]] = [[] for _ in names]
        self._heading: int | None = None
        self._bare = len(prompts) == num_samples == len(names) == 1 and not as_json
        self.streams = self._bare and result_stream().isatty()
        """whether the text of the only response is shown while it grows"""
        self._open_line = self.streams

    def write(self, answers: Sequence[Sequence[Answer]],
              scores: Sequence[Sequence[float | None]]) -> None:
        """Print a batch: a list of answers for each model, of the same samples, and their scores.
        """
        for row, judged in zip(zip(*answers, strict=True), zip(*scores, strict=True), strict=True):
            for model_scores, score in zip(self._scores, judged, strict=True):
                if score is not None:
                    model_scores.append(score)
            if self._json:
                self._objects(row, judged)
            elif self._bare:
                self._one(row[0], figure(judged[0], 3))
            else:
                self._block(row, [figure(score, 3) for score in judged])

    def close(self) -> None:
        """End an unfinished line; print the mean score of several samples."""
        if self._open_line:
            put()
            self._open_line = False
        for name, scores in zip(self._names, self._scores, strict=True):
            if scores and not self._bare:
                mean = math.fsum(scores) / len(scores)
                complain(f"mean score of {name}: {figure(mean, 3)} ({len(scores)} scored)")

    def _objects(self, row: Sequence[Answer], scores: Sequence[float | None]) -> None:
        for name, answer, score in zip(self._names, row, scores, strict=True):
            put(json.dumps({
                "prompt": self._prompts[answer.prompt], "sample": answer.sample,
                "response": answer.text, "model": name, "score": score,
                "finished": answer.finished, "response_tokens": len(answer.ids)}))

    def _one(self, answer: Answer, score: str) -> None:
        show_text("" if self.streams else answer.text)
        self._open_line = False
        if self._scored:
            complain(f"score {score}")

    def _block(self, row: Sequence[Answer], scores: Sequence[str]) -> None:
        answer = row[0]
        if answer.prompt != self._heading:
            if self._heading is not None and len(row) == 1:
                put()
            self._heading = answer.prompt
            put(prompt_heading(answer.prompt, self._prompts[answer.prompt]))
        facts = [] if self._samples == 1 else [f"sample {answer.sample + 1}"]
        if self._scored and len(row) == 1:
            facts.append(f"score {scores[0]}")
        if facts:
            put("-- " + ", ".join(facts))
        if len(row) == 1:
            show_text(answer.text)
            return
        marks = [f"[{score}] " if self._scored else "" for score in scores]
        put(side_by_side(self._names, [mark + printable(each.text)
                                         for mark, each in zip(marks, row, strict=True)]))


def side_by_side(names: Sequence[str], texts: Sequence[str]) -> str:
    """Columns of equal width under their names, as wide together as the terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SQUARE, expand=True)  # rich takes another where it can't be printed
    for name in names:
        table.add_column(Text(clean(name)), ratio=1, overflow="fold")
    table.add_row(*map(Text, texts))
    console = Console(width=shutil.get_terminal_size((100, 24)).columns, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip("\n")
