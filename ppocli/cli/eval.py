"""``ppocli eval``: a policy's responses to fixed prompts, scored and compared."""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ppocli.cli import options as opt
from ppocli.cli.options import AsJson, Run, complete_setting, flag, option
from ppocli.cli.output import aligned, display_mode, say, shown_figure, split_words, working
from ppocli.config.text import clean, cut, printable, printable_json
from ppocli.distributed.standard_output import put
from ppocli.errors import ThresholdError

LONGEST_TEXT = 300
"""characters of a printed prompt or response"""


def evaluate(
        run: Run = None,
        overrides: Annotated[list[str] | None, typer.Argument(
            metavar="[KEY=VALUE]...", autocompletion=complete_setting,
            help="Settings that override those of the run.")] = None,
        against: str | None = option("RUN|base", "Give the same prompts to a second model; base is "
            "the one that the run started from."),
        prompts: str | None = option(
            "SPEC", "Prompts to evaluate on: a file, a folder or a Hub data set."),
        reward: opt.Reward = None,
        limit: int | None = option("N", "At most this many prompts, spread over their source."),
        num_samples: int | None = option("K", "Responses to each prompt.", "--num-samples", "-n"),
        seed: int | None = option("S", "Seed of the sampling (default: the run's)."),
        frontier: bool = flag(
            "Compare the policy with best-of-n of the base at the same KL.", "--frontier"),
        min_reward: float | None = option(
            "X", "Exit with code 10 if the mean reward is below this."),
        step: opt.Step = None, best: opt.Best = False,
        output: str | None = option(
            "DIR", "Write the folder NAME here (default: RUN/eval, or ./eval).", "--output", "-o"),
        name: str | None = option(
            "NAME", "Name of the results folder (default: e.g. step-000024)."),
        overwrite: bool = flag("Replace existing results of that name.", "--overwrite"),
        show: int = option("N", "Print this many samples.", default=3, min=0),
        as_json: AsJson = False, trust: opt.Trust = False) -> None:
    """Score a policy's responses to fixed prompts, and compare policies; or measure a model on
    data: the loss of a policy, the accuracy of a reward model.

    Without options, this repeats the run's own evaluation, with the same prompts, seed and
    sampling. Results go to RUN/eval/NAME/: samples.jsonl as they are scored, eval.json at the end.

    \b
    Examples:
      ppocli eval runs/NAME
      ppocli eval runs/NAME --against base
      ppocli eval runs/NAME --best --against runs/OTHER --num-samples 8
      ppocli eval runs/NAME --frontier
      ppocli eval runs/NAME generation.temperature=0.7 --name cool
      ppocli eval ./model --prompts prompts.jsonl --reward my_rewards:score
      ppocli eval runs/NAME --min-reward 0.8 --json
      ppocli eval runs/SFT
      ppocli eval runs/SFT data.path=other.jsonl --against base
      ppocli eval runs/PPO --against runs/SFT --reward my_rewards:score
    """
    from ppocli.api import carry_out
    from ppocli.evaluation.eval_request import PICTURE, RESULT, SAMPLES, EvalRequest

    run, words = split_words(run, overrides)
    request = EvalRequest(
        run=run, words=tuple(words), against=against, prompts=prompts, reward=reward, limit=limit,
        num_samples=num_samples, seed=seed, step=step, best=best, frontier=frontier, output=output,
        name=name, overwrite=overwrite, min_reward=min_reward, trust=trust)
    folder, report = carry_out(request, working(), say, watching=_progress())
    if as_json:
        put(printable_json((folder / RESULT).read_text(encoding="utf-8")))
    else:
        lines = [*lines_of(report), *_sample_lines(folder / SAMPLES, show)]
        put(printable("\n".join(lines)))
    if (folder / PICTURE).is_file():
        say(f"picture  {folder / PICTURE}")
    say(f"samples  {folder / SAMPLES}")
    say(f"results  {folder / RESULT}")
    mean = report["figures"].get("reward_mean")
    if min_reward is not None and not (mean is not None and mean >= min_reward):
        raise ThresholdError(f"The mean reward is {mean}, below the {min_reward} asked for.",
                             where=str(folder / RESULT))


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal."""
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.TextColumn("{task.description}"), progress.BarColumn(),
        progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TextColumn("left"),
        progress.TimeRemainingColumn(), console=Console(stderr=True), transient=True,
        disable=not sys.stderr.isatty() or display_mode() != "auto")
    with bar:
        task = bar.add_task("loading", total=None)

        def watch(role: str, done: int, total: int) -> None:
            bar.update(task, description=role, completed=done, total=total)

        yield watch


def lines_of(report: dict[str, Any]) -> list[str]:
    """The contents of eval.json as tables and sentences."""
    models = {role: {**result, "name": result["model"]["name"]} for role, result in (
        ("policy", report), ("against", report["against"])) if result is not None}
    if (frontier := report["frontier"]) is not None:
        models["base"] = {**frontier["base"], "name": f"{report['base']['path']}, "
                          f"{frontier['samples_each']} samples per prompt"}
    lines = aligned([[role, model["name"]] for role, model in models.items()])
    table = [["", *models], ["samples", *(str(model["samples"]) for model in models.values())]]
    for name in dict.fromkeys(name for model in models.values() for name in model["figures"]):
        if name == "reward_std":
            table += [[f"reward {q}", *(shown_figure(model["quantiles"][q])
                                        for model in models.values())]
                      for q in report["quantiles"]]
        # distinct-n falls with the number of texts, so it is shown only for equal numbers
        table.append([_NAMES.get(name, name.removeprefix("metrics/").replace("_at_", "@")),
                      *(_with_error(model["figures"].get(name), model["stderr"].get(name))
                        if model["samples"] == report["samples"]
                        or not name.startswith("distinct_") else "-"
                        for model in models.values())])
    lines += ["", *aligned(table)]
    unscored = {role: model["samples"] - model["scored"] for role, model in models.items()}
    lines += [f"{count} samples of {role} have no score" for role, count in unscored.items()
              if count]
    if report["win_rate"] is not None:
        lines += ["", _win_line(report["win_rate"])]
    return lines if frontier is None else [*lines, "", *_frontier_lines(report)]


_NAMES = {"reward_mean": "reward", "reward_std": "reward std", "kl_mean": "KL to the base",
          "response_tokens_mean": "response tokens", "finished_share": "finished",
          "turns_mean": "turns", "done_share": "ended by the environment",
          "distinct_1": "distinct-1", "distinct_2": "distinct-2", "distinct_3": "distinct-3"}


def _with_error(value: float | None, error: float | None) -> str:
    return shown_figure(value) + ("" if error is None or value is None
                                  else f" ± {shown_figure(error, 2)}")


def _win_line(wins: dict[str, Any]) -> str:
    counts = ", ".join(f"{wins[name]} {one if wins[name] == 1 else name}" for one, name in (
        ("win", "wins"), ("tie", "ties"), ("loss", "losses")))
    return (f"win rate {_with_error(wins['win_rate'], wins['stderr'])} of {wins['compared']}: "
            f"{counts}; reward higher by "
            f"{_with_error(wins['difference'], wins['difference_stderr'])}")


def _frontier_lines(report: dict[str, Any]) -> list[str]:
    frontier = report["frontier"]
    points = {f"best of {point['n']}": point for point in frontier["points"]}
    table = [["", "KL", "reward"]]
    table += [[name, shown_figure(point["kl"]), _with_error(point["reward"], point["stderr"])]
              for name, point in {**points, "policy": frontier["policy"]}.items()]
    return [*aligned(table), _verdict(frontier)]


def _verdict(frontier: dict[str, Any]) -> str:
    last, policy = frontier["points"][-1], frontier["policy"]
    more = None not in (last["reward"], last["stderr"], policy["reward"], policy["stderr"]) and (
        last["reward"] - policy["reward"] > 2 * math.hypot(last["stderr"], policy["stderr"]))
    gap = _with_error(frontier["difference"], frontier["difference_stderr"])
    at_kl = shown_figure(frontier["best_of_n_at_policy_kl"])
    return {
        "above": f"The policy has earned its KL: best-of-n of the base reaches {at_kl} there, "
                 f"difference {gap}.",
        "below": f"The policy has not earned its KL: best-of-n of the base reaches {at_kl} there "
                 f"without any training, difference {gap}.",
        "level": f"The policy is level with best-of-n at its KL ({at_kl}, difference {gap}).",
        "beyond": f"The policy's KL is beyond that of best of {last['n']} "
                  f"({shown_figure(last['kl'])}), so they can't be compared at the same KL; best "
                  f"of {last['n']} reaches {shown_figure(last['reward'])}"
                  + (", more at less KL." if more else "."),
        "not comparable": "The policy can't be placed. That takes a KL to the base; responses at "
                          "temperature 1 without top-k, top-p, min-p, a repetition penalty and a "
                          f"minimum length; and a score of all {frontier['samples_each']} "
                          "responses of the base to a prompt, and of one of the policy.",
    }[frontier["verdict"]]


def _sample_lines(path: Path, count: int) -> Iterator[str]:
    """One response to each of the first prompts: the policy's, and that of the next model."""
    from ppocli.runs.record import sample_text
    from ppocli.runs.run_logs import read_jsonl

    shown: dict[int, list[dict[str, Any]]] = {}
    for row in read_jsonl(path) if count else ():
        if row["sample"] == 0 and row["prompt_index"] < count:
            shown.setdefault(row["prompt_index"], []).append(row)
    for _, rows in sorted(shown.items()):
        yield ""
        yield f"prompt   {_short(rows[0]['prompt'])}"
        for row in rows[:2]:
            score = f"[{shown_figure(row['score'])}] " if "score" in row else ""
            text = sample_text(row)
            for line in text.split("\n") if {"chosen", "turns"} & set(row) else [text]:
                yield f"{row['model']:7}  {score}{_short(line)}"


def _short(text: str) -> str:
    return cut(clean(text), LONGEST_TEXT)
