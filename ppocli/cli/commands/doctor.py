"""``ppocli env`` and ``ppocli doctor``, as the shell sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppocli.cli.options import AsJson
from ppocli.cli.output import ending


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(env)
    app.command()(doctor)


def env(as_json: AsJson = False) -> None:
    """Print versions, machine and variables, to be pasted into an issue.

    Tokens are never shown, only that they are set.

    \b
    Examples:
      ppocli env
      ppocli env --json
    """
    from ppocli.cli.doctor import print_env

    ending(lambda: print_env(as_json))


def doctor(folder: Annotated[Path, typer.Argument(
               metavar="[DIR]", help="The folder that holds, or will hold, the run folders.")
               ] = Path("runs"),
           as_json: AsJson = False) -> None:
    """Check this machine and installation; each check has a verdict and says how to mend it.

    Exit code 0: nothing failed (warnings don't count), 1: a check failed.

    \b
    Examples:
      ppocli doctor
      ppocli doctor /scratch/runs
      ppocli doctor --json
    """
    from ppocli.cli.doctor import run_doctor

    ending(lambda: run_doctor(folder, as_json))
