"""``ppocli eval``, as the shell sees it."""

from __future__ import annotations

from typing import Annotated

import typer

from ppocli.cli.options import AsJson, Run, complete_setting
from ppocli.cli.output import ending

SHOWN = 3
"""samples that are printed"""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("eval")(evaluate)


def evaluate(
        run: Run = None,
        words: Annotated[list[str] | None, typer.Argument(
            metavar="[KEY=VALUE]...", autocompletion=complete_setting, show_default=False,
            help="Settings over those of the run.")] = None,
        against: Annotated[str | None, typer.Option(
            metavar="BASE", help="Compare with this run, checkpoint or model; base: the model the "
            "run started from.")] = None,
        prompts: Annotated[str | None, typer.Option(
            metavar="SPEC", help="Prompts to evaluate on: a file, a folder or a Hub data set."
            )] = None,
        reward: Annotated[str | None, typer.Option(
            metavar="IMPORT", help="Judge by this instead of the run's rewards.")] = None,
        limit: Annotated[int | None, typer.Option(
            metavar="N", help="At most so many prompts, spread over their source.")] = None,
        num_samples: Annotated[int | None, typer.Option(
            metavar="K", help="Responses to each prompt.")] = None,
        seed: Annotated[int | None, typer.Option(
            metavar="S", help="Seed of the sampling (default: the run's).")] = None,
        frontier: Annotated[bool, typer.Option(
            "--frontier", help="Best-of-n of the base beside the policy: is it worth its KL?"
            )] = False,
        min_reward: Annotated[float | None, typer.Option(
            metavar="X", help="Exit with 10 if the mean reward is below.")] = None,
        step: Annotated[int | None, typer.Option(
            metavar="N", help="Take the run's checkpoint of this step.")] = None,
        best: Annotated[bool, typer.Option(
            "--best", help="Take the run's best checkpoint.")] = False,
        output: Annotated[str | None, typer.Option(
            metavar="DIR", help="Put the folder NAME here (default: RUN/eval, or ./eval)."
            )] = None,
        name: Annotated[str | None, typer.Option(
            metavar="NAME", help="Name of the results' folder (default: step-000024).")] = None,
        overwrite: Annotated[bool, typer.Option(
            "--overwrite", help="Throw away results of that name.")] = False,
        resume: Annotated[bool, typer.Option(
            "--resume", help="Go on with an interrupted evaluation.")] = False,
        show: Annotated[int, typer.Option(
            metavar="N", min=0, help="Print so many samples.")] = SHOWN,
        as_json: AsJson = False) -> None:
    """Score a policy's responses to fixed prompts, and compare policies.

    Without options: the run's own evaluation, with the same prompts, seed and sampling. Results go
    to RUN/eval/NAME/: samples.jsonl while they are scored, eval.json at the end.

    \b
    Examples:
      ppocli eval runs/NAME
      ppocli eval runs/NAME --against base
      ppocli eval runs/NAME --best --against runs/OTHER --num-samples 8
      ppocli eval runs/NAME --frontier
      ppocli eval runs/NAME generation.temperature=0.7 --name cool
      ppocli eval ./model --prompts prompts.jsonl --reward my_rewards:score
      ppocli eval runs/NAME --min-reward 0.8 --json
    """
    from ppocli.cli.evaluate import evaluate_command, printing_of, request_of

    ending(lambda: evaluate_command(
        request_of(run, words, against=against, prompts=prompts, reward=reward, limit=limit,
                   num_samples=num_samples, seed=seed, frontier=frontier, step=step, best=best,
                   output=output, name=name, overwrite=overwrite, resume=resume,
                   printing=printing_of(min_reward, show, as_json)),
        min_reward=min_reward, show=show, as_json=as_json))
