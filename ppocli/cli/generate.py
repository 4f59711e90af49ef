"""``ppocli generate``, prompts to sampled responses on standard output. ``ppocli chat`` loads its
policy as this does."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ppocli.cli import options as opt
from ppocli.cli.options import AsJson, Overrides, Run, option
from ppocli.cli.output import complain, say, show_text, split_words, working
from ppocli.config.text import clean, cut, figure, unescaped
from ppocli.distributed.standard_output import put
from ppocli.errors import ConfigError, InputError

if TYPE_CHECKING:

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
    request = make_request(run, overrides, reward, step, best, trust)
    items = typed_prompts([unescaped(text) for text in prompt or ()], prompts_file)
    scored = score or reward is not None
    with working() as stopping:
        from ppocli.evaluation.player import scores_of
        from ppocli.sampling.prompting import BATCH

        target, cfg = configured(request, scored)
        chat = bool(cfg.prompts.chat)
        cells, columns = _read_prompts(cfg, prompts_file, items)
        with loaded(request, target, cfg, scored, list(columns)) as (player, generation, judge):
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


# The policy ---------------------------------------------------------------------------------------

def make_request(run: str | None, overrides: Sequence[str] | None, reward: str | None,
                 step: int | None, best: bool, trust: bool) -> EvalRequest:
    """The arguments of ``generate`` and ``chat``.

    Raises:
        ConfigError: a word is no KEY=VALUE.
    """
    from ppocli.evaluation.eval_request import EvalRequest

    run, words = split_words(run, overrides)
    return EvalRequest(run=run, words=tuple(words), reward=reward, step=step, best=best,
                       trust=trust)


def configured(request: EvalRequest, scored: bool) -> tuple[Target, TrainConfig]:
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
    cfg = target_config(target, request.overrides(target), needs_reward=scored,
                        needs_prompts=False, trusts=request.trust, say=say)
    if any(word.startswith("rollout.") for word in request.words) and cfg.rollout.engine != "vllm":
        raise ConfigError("Responses are sampled by our own loop here, or by vLLM servers.",
                          where="rollout", fix="rollout.engine=vllm rollout.urls=[URL]; ppocli "
                          "eval takes other engines")
    cfg = with_values(cfg, {"model.chat_template_date": cfg.model.chat_template_date or present()})
    revision = cfg.model.revision if target.model == cfg.model.path else None
    return target, decided(cfg, target.model, revision, name=target.name)


@contextmanager
def loaded(request: EvalRequest, target: Target, cfg: TrainConfig, scored: bool,
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
            generation = players.changed_sampling(cfg, declared)
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
