"""``ppocli estimate``, as the shell sees it."""

from __future__ import annotations

from typing import Annotated

import typer

from ppocli.cli.options import WORDS, AsJson, HydraCommand, Overrides
from ppocli.cli.output import ending


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=HydraCommand, context_settings=WORDS)(estimate)


def estimate(overrides: Overrides = None,
             prompt_tokens: Annotated[int | None, typer.Option(
                 "--prompt-tokens", min=1, show_default=False,
                 help="Tokens of the longest prompt (default: of the prompts themselves, if they "
                      "and the tokenizer are on this machine).")] = None,
             available: Annotated[bool, typer.Option(
                 "--available", help="Compare with what this machine has free.")] = False,
             memory: Annotated[float | None, typer.Option(
                 "--memory", metavar="GIB", min=0.001, show_default=False,
                 help="Compare with a device that has so many GiB.")] = None,
             as_json: AsJson = False) -> None:
    """Tell how much memory and disk a run takes, before anything is loaded.

    Words are those of ppocli train; reward, prompts and length may be left out. Of the model only
    its config.json is read, so it can be larger than this machine. What can't be told is listed as
    unknown, with the reason. Exit code 8: what it was compared with is too small.

    \b
    Examples:
      ppocli estimate +recipe=quickstart
      ppocli estimate +recipe=quickstart --available
      ppocli estimate model.path=./llama hardware=zero2 hardware.num_processes=8 \\
          hardware.device=cuda hardware.precision=bf16 --prompt-tokens 512 --memory 80
      ppocli estimate model.path=./llama model.peft.type=lora hardware=gpu_bf16 --memory 24
      ppocli estimate +recipe=quickstart --json
    """
    from ppocli.cli.estimate import print_estimate

    ending(lambda: print_estimate(overrides or [], prompt_tokens=prompt_tokens,
                                  available=available, memory=memory, as_json=as_json))
